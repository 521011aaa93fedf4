"""Every mutant, package by package, and the tests of each package."""

from mutants import (
    autograd,
    bench,
    chapters,
    checkpoint,
    comm,
    compare,
    core,
    misuse,
    newcomers,
    nn,
    parallel,
    plan,
    precision,
    robust_start,
    tensor,
    train,
    visualize,
)

# The folders of tests, below tests/, and the mutants that must not survive them.
PACKAGES = {
    "autograd": (("autograd",), autograd.MUTANTS + misuse.AUTOGRAD),
    "nn": (("nn",), nn.MUTANTS + misuse.NN),
    "robust_start": (("robust_start", "comm"), robust_start.MUTANTS),
    "comm": (("comm",), comm.MUTANTS + misuse.COMM),
    "parallel": (("parallel",), parallel.MUTANTS + tensor.MUTANTS + misuse.PARALLEL),
    "train": (("train",), train.MUTANTS + checkpoint.MUTANTS + precision.MUTANTS),
    "plan": (("plan",), plan.MUTANTS),
    "bench": (("bench",), bench.MUTANTS),
    "visualize": (("visualize",), visualize.MUTANTS),
    "chapters": (("chapters",), chapters.MUTANTS),
    "compare": (("compare",), compare.MUTANTS),
    "newcomers": (("test_fifty_mistakes.py",), newcomers.MUTANTS),
    "shared": (("test_memory.py",), core.MUTANTS),
}
EVERY = [(package, mutant) for package, (_, mutants) in PACKAGES.items() for mutant in mutants]
