"""Model state in closed form: what a rank holds of parameters, gradients and optimizer state.

Rajbhandari et al. 2020 (arXiv 1910.02054), sections 3.1 and 5. With Psi parameters on d ranks, in
bytes of 16-bit training with Adam: 16 Psi, then 4 Psi + 12 Psi/d, 2 Psi + 14 Psi/d, 16 Psi/d for
stages 1, 2, 3.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from minipar.parallel.placement import Placement

Count = int | Fraction  # elements or bytes; a Fraction if Psi/d is not rounded


@dataclass(frozen=True)
class Precision:
    """Bytes for each element of parameters, gradients and optimizer state."""

    parameters: int
    gradients: int
    optimizer: int


# Section 3.1: parameters and gradients in fp16; the optimizer has parameters and two means in fp32.
MIXED = Precision(2, 2, 12)
# minipar's own: parameters and gradients in the dtype of the run, and AdamW's two means.
FLOAT32, FLOAT64 = Precision(4, 4, 8), Precision(8, 8, 16)
OF_DTYPE = {"float32": FLOAT32, "float64": FLOAT64}


@dataclass(frozen=True)
class ModelState:
    """Bytes of model state on one rank."""

    parameters: Count
    gradients: Count
    optimizer: Count

    @property
    def total(self) -> Count:
        return self.parameters + self.gradients + self.optimizer


def elements_held(
    psi: int, own: Count, stage: int, accumulating: bool = False
) -> tuple[Count, Count, Count]:
    """Count the (parameters, gradients, optimizer state) of a rank that owns `own` of psi elements.

    If `accumulating`, microbatches add up in whole gradients before these are reduced (`no_sync`).
    From stage 2 on the whole gradients are held next to the rank's chunk of their sum.
    """
    parameters = own if stage >= 3 else psi
    optimizer = own if stage >= 1 else psi
    if stage < 2:
        return parameters, psi, optimizer
    return parameters, own + psi if accumulating else own, optimizer


def model_state(
    psi: int, own: Count, stage: int, precision: Precision, accumulating: bool = False
) -> ModelState:
    """Compute the bytes on a rank: the paper's with own = Fraction(psi, d), or a run's.

    A run's psi and own are those of `elements_placed`.
    """
    parameters, gradients, optimizer = elements_held(psi, own, stage, accumulating)
    return ModelState(
        parameters=parameters * precision.parameters,
        gradients=gradients * precision.gradients,
        optimizer=optimizer * precision.optimizer,
    )


def elements_placed(placements: Sequence[Placement], rank: int) -> tuple[int, int]:
    """Count the elements of placed parameters, and those that dp rank `rank` owns: (psi, own)."""
    psi = own = 0
    for placement in placements:
        assert placement.dp is not None, f"{placement.name} is in no bucket"
        psi += placement.dp.size
        own += len(placement.dp.elements(rank, placement.dp.ranks))
    return psi, own
