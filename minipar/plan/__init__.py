"""A planner: it predicts the memory and the time of every layout of a model on a cluster, and runs
nothing.

Reading order:

    model.py          a model's parameters and floating-point operations
    layout.py         a layout, which the planner chooses, and a framework's habits, which it cannot
                      choose
    cluster.py        GPUs, links, their constants with sources, and the seconds of a collective
    programs.py       the programs that train, with what each achieves; a user's own program or GPU
    rank_bytes.py     the bytes that a rank holds (memory) and sends (traffic)
    gpu_time.py       the seconds of a microbatch's computation on a GPU
    compute.py        those of one microbatch in each unit of the model: embedding, layer, output
                      head
    pipeline_time.py  the makespan of a pipeline schedule, simulated or in closed form
    overlap.py        data parallelism's collectives next to computation
    stages.py         the pipeline stages of a layout, and the seconds of their passes
    step_time.py      the seconds of one optimizer step, and what they are spent on
    space.py          the layouts that a search tries;  advice.py says what would fit if none does
    search.py         the search for the fastest layout that fits
    request.py        a user's question, and the assumptions of its answer
    report.py         the answer as a table and as JSON;  command.py is the line to copy,
                      __main__.py the command line
"""
