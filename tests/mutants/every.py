"""Every mutant, package by package, and the tests of each package."""

from mutants import (
    autograd,
    bench,
    checkpoint,
    comm,
    compare,
    core,
    nn,
    parallel,
    plan,
    precision,
    tensor,
    train,
    visualize,
)

# The folders of tests, below tests/, and the mutants that must not survive them.
PACKAGES = {
    "autograd": (("autograd",), autograd.MUTANTS),
    "nn": (("nn",), nn.MUTANTS),
    "comm": (("comm",), comm.MUTANTS),
    "parallel": (("parallel",), parallel.MUTANTS + tensor.MUTANTS),
    "train": (("train",), train.MUTANTS + checkpoint.MUTANTS + precision.MUTANTS),
    "plan": (("plan",), plan.MUTANTS),
    "bench": (("bench",), bench.MUTANTS),
    "visualize": (("visualize",), visualize.MUTANTS),
    "compare": (("test_compare.py",), compare.MUTANTS),
    "shared": (("test_memory.py",), core.MUTANTS),
}
EVERY = [(package, mutant) for package, (_, mutants) in PACKAGES.items() for mutant in mutants]
