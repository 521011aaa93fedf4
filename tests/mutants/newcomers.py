"""Mistakes in what refuses the mistakes of a newcomer, all seen by one file of tests."""

from mutants.mutant import mistakes

FIFTY = "test_fifty_mistakes.py"
MUTANTS = [
    *mistakes(
        "minipar/autograd/guards.py",
        FIFTY,
        ("guards: a graph of any age", "leaf.changed_at > number", "leaf.changed_at > 1e99"),
        ("guards: other values count as changed", "None) is leaf.data", "None) is not None"),
        ("guards: backward without a graph", "    if not requires_grad:\n", "    if False:\n"),
    ),
    *mistakes(
        "minipar/nn/optim_guards.py",
        FIFTY,
        ("guards: gradients are used twice", "gradient is parameter.used_gradient and", "False and"),
        ("guards: assigned gradients were used", "gradient is parameter.used_gradient and", ""),
        ("guards: moments of any shape", "if parameter.shape != moment.shape:", "if False:"),
        ("guards: learning_rate is an attribute", 'if name in ("learning_rate", ', "if name in ("),
        ("guards: an optimizer over a model", "    if isinstance(parameters, Iterable):\n", "    if True:\n"),
    ),
    *mistakes(
        "minipar/nn/guards.py",
        FIFTY,
        ("guards: any state", "    if not isinstance(state, Mapping):\n", "    if False:\n"),
        ("guards: an optimizer's state", '    if "param_groups" in state:\n', "    if False:\n"),
        ("guards: an empty state", "    if len(state) == 0 and parameters > 0:\n", "    if False:\n"),
        ("guards: lists in a state", '        if not hasattr(array, "shape"):\n', "        if False:\n"),
        ("guards: complex values", 'in ("c", "O", "S", "U")', 'in ("O", "S", "U")'),
        ("guards: a size of any type", "if isinstance(value, bool) or not isinstance(value, Integral):", "if False:"),
        ("guards: a size below 1", "    if value < 1:\n", "    if value < 0:\n"),
    ),
    *mistakes(
        "minipar/nn/module.py",
        FIFTY,
        ("module: a set holds nothing", "        refuse_set(name)\n", "        pass\n"),
        (
            "module: lists in lists hold nothing",
            'yield from _items_of(f"{name}.{i}", item)',
            'yield from [(f"{name}.{i}", item)] * isinstance(item, Parameter | Module)',
        ),
    ),
    *mistakes(
        "minipar/nn/parameter.py",
        FIFTY,
        (
            "parameter: a frozen embedding moves",
            "leaf.grad is not None and self.requires_grad",
            "leaf.grad is not None",
        ),
    ),
    *mistakes(
        "minipar/nn/pretrained.py",
        FIFTY,
        ("pretrained: a checkpoint is a model", 'any(path.glob("step-*/manifest.json"))', "False"),
    ),
    *mistakes(
        "minipar/comm/guards.py",
        FIFTY,
        ("guards: a tensor is an array", '    if hasattr(x, "grad"):\n', "    if False:\n"),
        ("guards: a float is an array", '    if not hasattr(x, "strides") or', "    if False and"),
        ("guards: words add up", 'in "OSU"', 'in "O"'),
        ("guards: a mesh of anything", '    if not hasattr(comm, "ranks"):\n', "    if False:\n"),
        ("guards: an axis of any size", "if size is not None and (", "if False and ("),
    ),
    *mistakes(
        "minipar/comm/launch.py",
        FIFTY,
        ("launch: nobody notes a forgotten wrapper", "comm.traffic.bytes() < smallest_step(before)", "False"),
        ("launch: a program that sends has the note", "comm.traffic.bytes() < smallest_step", "0 < smallest_step"),
        ("launch: a gradient of two bytes has the note", "comm.traffic.bytes() <", "comm.traffic.bytes() / 8 <"),
        ("launch: every rank has the note", "if trained_alone and comm.rank == 0 and", "if trained_alone and"),
        ("launch: a rank may leave with os._exit(0)", "        refuse_exit_0(comm.rank)\n", "        pass\n"),
    ),
    *mistakes(
        "minipar/robust_start/exits.py",
        FIFTY,
        ("exits: a forked process ends the job", "os.getpid() != process or", ""),
    ),
    *mistakes(
        "minipar/parallel/guards.py",
        FIFTY,
        ("guards: a rank is a communicator", '    if not hasattr(comm, "ranks"):\n', "    if False:\n"),
        ("guards: a frozen parameter decays", "        if not parameter.requires_grad:\n", "        if False:\n"),
    ),
]
