"""Mistakes in minipar/plan: a formula of memory, time or traffic, and the search."""

from mutants.mutant import mistakes

MUTANTS = [
    *mistakes(
        "minipar/plan/cluster.py",
        "plan/test_cluster.py plan/test_step_time.py plan/test_search.py",
        (
            "cluster: a ring of one step too many",
            "return (size - 1) * cluster.link(stride, size)",
            "return size * cluster.link(stride, size)",
        ),
        ("cluster: a stride does not leave the host", "stride * size <= self.per_host", "size <= self.per_host"),
        (
            "cluster: all of a GPU's memory is usable",
            "self.gpu.memory * self.assumptions.memory_used",
            "self.gpu.memory",
        ),
        ("cluster: an A100's network in bits", "between=25 * GB", "between=200 * GB"),
    ),
    *mistakes(
        "minipar/plan/gpu_time.py",
        "plan/test_compute.py plan/test_step_time.py",
        (
            "compute: the half work counts once for all products",
            "return (flops / t + a.half_work * count) / rate",
            "return (flops / t + a.half_work) / rate",
        ),
        ("compute: full recomputation is free", '"full": forward}', '"full": 0.0}'),
    ),
    *mistakes(
        "minipar/plan/compute.py",
        "plan/test_compute.py plan/test_step_time.py",
        ("compute: a layer's sums in one direction", "layer_sums = 2 * tp.gather +", "layer_sums = tp.gather +"),
        (
            "compute: ZeRO all-reduces its gradients",
            "reduce if layout.zero else cluster.assumptions.all_reduce * reduce",
            "cluster.assumptions.all_reduce * reduce",
        ),
    ),
    *mistakes(
        "minipar/plan/gpu_time.py",
        "plan/test_context.py",
        (
            "compute: contiguous order wastes nothing",
            'cp_order == "zigzag" else 2) /',
            'cp_order == "zigzag" else 1) /',
        ),
    ),
    *mistakes(
        "minipar/plan/compute.py",
        "plan/test_context.py",
        ("compute: the gradients' last hop hides", "return max(now, gradient)", "return now"),
        ("compute: an all-gather's backward gathers once", "return gather, 2 * gather", "return gather, gather"),
    ),
    *mistakes(
        "minipar/plan/rank_bytes.py",
        "plan/test_context.py",
        ("bytes: recompute sends nothing over cp", "moved * (forwards + 1) + summed", "moved * 2 + summed"),
    ),
    *mistakes(
        "minipar/plan/compute.py",
        "plan/test_experts.py plan/test_expert_search.py",
        (
            "compute: recomputation sends no tokens again",
            "ep_again = ep_forward if full_recompute",
            "ep_again = 0.0 if True",
        ),
        (
            "compute: experts are summed over all of dp",
            "buckets.append((experts, layout.ranks_per_expert_copy, layout.expert_shards))",
            "buckets.append((experts, t, s))",
        ),
        (
            "compute: an MLP of whole experts is summed over tp",
            "etp = _TensorParallel(model, layout, cluster, length, layout.expert_tp)",
            "etp = tp",
        ),
        (
            "compute: the ranks of ep are those of dp",
            "nbytes, layout.expert_tp, layout.ep",
            "nbytes, layout.tp, layout.ep",
        ),
        (
            "compute: results stay with their experts",
            "return counts + 2 * rows, 2 * rows",
            "return counts + rows, rows",
        ),
    ),
    *mistakes(
        "minipar/plan/rank_bytes.py",
        "plan/test_experts.py plan/test_expert_search.py",
        ("bytes: ZeRO shards experts as all else", "(experts, layout.expert_shards)]", "(experts, layout.shards)]"),
        ("bytes: a token has one row", "rows = model.top_k * layout.tokens(length)", "rows = layout.tokens(length)"),
    ),
    *mistakes(
        "minipar/plan/space.py",
        "plan/test_expert_search.py",
        ("search: ep leaves the host unasked", " if ep <= max(1, near)]", "]"),
    ),
    *mistakes(
        "minipar/plan/model.py",
        "plan/test_model.py",
        ("model: backward takes three times forward", "return 3 * (self.layers", "return 4 * (self.layers"),
        (
            "model: grouped attention has keys for every head",
            "2 * self.groups * (self.hidden // self.heads)",
            "2 * self.hidden",
        ),
        ("model: a gated MLP has two matrices", "(3 if self.gated else 2) * self.inner", "2 * self.inner"),
        ("model: the head is always tied", "(1 if self.tied else 2)", "1"),
        (
            "model: a token passes all experts",
            "+ self.top_k * self.expert_parameters",
            "+ (self.experts or 1) * self.expert_parameters",
        ),
    ),
    *mistakes(
        "minipar/plan/pipeline_time.py",
        "plan/test_pipeline_time.py",
        ("pipeline: interleaving does not divide the bubble", "(p - 1) / v * one", "(p - 1) * one"),
        ("pipeline: zb-h1 fills the bubble with one W", "one - 2 * rank.backward_weight", "one - rank.backward_weight"),
        ("pipeline: a long step is extended by a group too many", "(m - short - p) / p", "(m - short) / p"),
    ),
    *mistakes(
        "minipar/plan/rank_bytes.py",
        "plan/test_rank_bytes.py",
        ("bytes: 1f1b keeps every microbatch", "return min(m, p)\n", "return m\n"),
        ("bytes: a recomputed layer's input is whole", "return tokens * h / slices", "return tokens * h"),
        ("bytes: recompute sends nothing again", "sums = 2 * (forwards + 1) * hidden", "sums = 4 * hidden"),
        ("bytes: stage 3 gathers once for all microbatches", "3: (2 * m, each)", "3: (2, each)"),
        ("bytes: whole experts are entered over tp", "ring(sums, etp) * etp / t", "ring(sums, t)"),
        ("bytes: each tp rank routes all tokens", "model.hidden * layout.expert_tp // layout.tp", "model.hidden"),
        ("bytes: each tp rank keeps all rows", "share = layout.expert_tp / t", "share = 1"),
        (
            "bytes: experts are cut over all of tp",
            "expert_parameters // layout.expert_tp)",
            "expert_parameters // layout.tp)",
        ),
    ),
    *mistakes(
        "minipar/plan/search.py",
        "plan/test_search.py plan/test_context.py",
        (
            "search: what does not fit is planned",
            "if nbytes > cluster.usable_memory:",
            "if nbytes > cluster.gpu.memory:",
        ),
        ("search: the slowest layout of each mesh", "seconds < best[mesh].seconds", "seconds > best[mesh].seconds"),
        ("search: plans in the closed form's order", "plans.sort(key=lambda plan: plan.time.total)", "pass"),
        ("search: TFLOP/s of the whole cluster", "/ time.total / cluster.gpus / 1e12", "/ time.total / 1e12"),
    ),
    *mistakes(
        "minipar/plan/space.py",
        "plan/test_search.py plan/test_context.py",
        ("search: a long sequence is cut to the last token", "length // LEAST_TOKENS + 1", "length + 1"),
    ),
    *mistakes(
        "minipar/plan/overlap.py",
        "plan/test_step_time.py",
        ("step: a unit computes before its parameters arrive", "now = max(now, own_arrival)", "pass"),
    ),
    *mistakes(
        "minipar/plan/step_time.py",
        "plan/test_step_time.py",
        (
            "step: one scalar over dp with ZeRO too",
            "scalar_dp + (scalar_seconds(cluster, layout.tp, layout.shards) if sums else 0.0)",
            "scalar_dp",
        ),
    ),
    *mistakes(
        "minipar/plan/stages.py",
        "plan/test_step_time.py",
        (
            "step: activations between stages are always whole",
            "slices = layout.tp if cluster.framework.scattered_hops else layout.sequence_slices",
            "slices = 1",
        ),
    ),
    *mistakes(
        "minipar/plan/stages.py",
        "plan/test_megatron_2021.py",
        ("step: gradients of 2021 are reduced during backward", "if self.hides_reductions:", "if True:"),
    ),
    *mistakes(
        "minipar/plan/layout.py",
        "plan/test_megatron_2021.py plan/test_published.py",
        (
            "layout: DeepSpeed's rings pass every card",
            "DEEPSPEED_2021 = Framework(ring_per_card=False",
            "DEEPSPEED_2021 = Framework(ring_per_card=True",
        ),
        ("layout: Llama 3 keeps a gated product more", "inner=1, gated=2)", "inner=1, gated=3)"),
    ),
    *mistakes(
        "minipar/plan/report.py",
        "plan/test_report.py",
        ("report: the table counts from 0", "row in enumerate(rows, start=1)", "row in enumerate(rows)"),
        ("report: reasons count from 0", "plan in enumerate(plans[1:], start=2)", "plan in enumerate(plans[1:])"),
        ("report: JSON counts from 0", "plan in enumerate(plans, start=1)", "plan in enumerate(plans)"),
        ("report: milliseconds are called seconds", "unit_of([plan.time.total for plan in plans], TIME_UNITS)", '"s"'),
    ),
    *mistakes(
        "minipar/plan/command.py",
        "plan/test_report.py",
        ("command: fp16 sums in fp32", " --gradients fp16 --reduce-dtype fp16", ""),
    ),
    *mistakes(
        "minipar/plan/layout.py",
        "plan/test_report.py",
        ("command: samples of one replica", "self.dp * self.microbatch * self", "self.microbatch * self"),
    ),
    *mistakes(
        "minipar/plan/__main__.py",
        "plan/test_command_line.py",
        ("plan: --json - is not alone on standard output", 'if args.json != "-":', "if True:"),
    ),
]
