"""Exercise 13 (chapter 10): the planner's memory formula.

How many bytes does the first pipeline rank hold? Model state and activations, in mixed precision:

- State for each of the rank's `parameters` (those that tp and pp have left it): 2 bytes for the parameter, 2 for its
  gradient, 12 for the optimizer. ZeRO stage 1 divides the optimizer's bytes by d, stage 2 the gradient's too, stage 3
  all.
- Activations of one layer for one microbatch of `s` tokens and `b` samples (Korthikanti et al. 2022): s b h (10 +
  24/t + 5 a s/(h t)) bytes under tensor parallelism; with sequence parallelism the 10 is divided by t too.
- The rank has `layers` layers, and keeps the activations of the microbatches in flight: all m under GPipe, and under
  1F1B as chapter 7 says for the first of p ranks.

Use exact arithmetic: `Fraction(x, y)`. Graded against minipar's planner with ==.
"""

from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Setting:
    """A rank and its share of the work."""

    parameters: int  # on this rank
    layers: int  # on this rank
    s: int  # tokens per sample
    b: int  # samples of a microbatch
    h: int  # hidden size
    a: int  # heads
    d: int  # data-parallel ranks
    t: int  # tensor-parallel ranks
    p: int  # pipeline ranks
    m: int  # microbatches
    zero: int  # ZeRO stage, 0 to 3
    schedule: str  # "gpipe" or "1f1b"
    sequence_parallel: bool


def state_bytes(setting: Setting) -> Fraction:
    """Return the bytes of parameters, gradients and optimizer state."""
    raise NotImplementedError("your code")


def activation_bytes(setting: Setting) -> Fraction:
    """Return the bytes of activations that wait for backward."""
    raise NotImplementedError("your code")
