"""Exercise 29 (chapter 10): from how many GPUs on does ZeRO-3 lose?

The global batch stays as it is, and the cluster grows. Then each GPU gets fewer tokens, and ZeRO-3's gathers no longer
hide. Compare it with tp x pp by the chapter's rules, as *relative times*: 1 is a step in which every GPU computes
without a pause. The batch has `sequences` sequences of T tokens, N is the number of GPUs, g of them share a host. (g is
a power of two, and N a multiple of g.)

ZeRO-3 with tp t, where t is 1, 2, 4, ... up to g. A replica is t GPUs. It must get a whole number of sequences, at
least one, and runs them in microbatches of b sequences, where b divides that number.
- Memory of a GPU: 16 bytes of state for each parameter, over all N. The activations of one microbatch, over t.
- Time: parameters are gathered, and gradients scattered, with *every microbatch*. That takes S beta / (tokens of one
  microbatch on all replicas of a host) of the computation, and hides as far as it is below 1. The time is the larger
  of this ratio and 1, and tp's price comes on top: (t - 1) S beta' / (3h) of forward, which is a third of the step.
- The best t and b count, of those that fit: that need `memory` bytes at most.

tp x pp: t = g, p stages, ZeRO-1, 1F1B. A replica is g p GPUs, must get a whole number m of sequences, at least one, and
runs them one by one.
- Memory: 4 bytes for each parameter over the replica, 12 more over all N. The activations, over the replica, of the
  microbatches that its first stage holds at once under 1F1B.
- Time: 1, the bubble (p - 1)/m, and tp's price. (What dp sends is left out.)

All is exact: use Fraction. Graded with ==, for several models and machines.
"""

from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Model:
    """A model."""

    parameters: int
    h: int  # hidden size
    T: int  # tokens of a sequence
    kept: int  # bytes of activations of one token in all layers, without tp


@dataclass(frozen=True)
class Machine:
    """A cluster's hosts."""

    g: int  # GPUs of a host
    memory: int  # bytes of a GPU
    network: int  # S beta of the network: operations of a GPU in the time of one byte on its network card
    inside: int  # S beta' inside a host


def zero3(model: Model, machine: Machine, N: int, sequences: int) -> Fraction | None:
    """Return the relative time of the best ZeRO-3 layout of N GPUs, None if none is possible."""
    raise NotImplementedError("your code")


def pipeline(model: Model, machine: Machine, N: int, sequences: int, p: int) -> Fraction | None:
    """Return the relative time of tp x pp with p stages, None if it is not possible."""
    raise NotImplementedError("your code")


def crossover(model: Model, machine: Machine, sequences: int, p: int) -> int | None:
    """Return the first N of g p, 2 g p, 4 g p, ... for which tp x pp is possible, and ZeRO-3 is not or takes longer.

    None if there is none up to, and with, the N at which a replica of g p GPUs has one sequence.
    """
    raise NotImplementedError("your code")
