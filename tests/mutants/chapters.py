"""Mistakes in chapters/support: ranks of a notebook that multiply, or that outlive its kernel."""

from mutants.mutant import mistakes

MUTANTS = mistakes(
    "chapters/support/notebook.py",
    "chapters/test_notebook.py",
    ("ranks: each rank starts ranks of its own", "    if _is_rank():\n", "    if False:\n"),
    ("ranks: the older ones stay", "    _stop_ranks()\n    print", "    print"),
    ("ranks: mpiexec is that of PATH", "    _put_environment_on_path()\n", ""),
    ("ranks: they outlive the kernel", "    os.killpg(os.getpgrp(), signal.SIGKILL)\n", ""),
    ("ranks: they leave shared memory", "    remove_shared_memory()\n    os", "    os"),
    (
        "ranks: they do not watch the controller",
        'cluster.start_engines_sync(n, engine_cmd=_command(cluster.controller.pid, "ipyparallel.engine"))',
        "cluster.start_engines_sync(n)",
    ),
)
