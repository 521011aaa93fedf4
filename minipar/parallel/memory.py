"""Model state in closed form: the bytes of parameters, gradients and optimizer state on a rank at each ZeRO stage.

Rajbhandari et al. 2020 (arXiv 1910.02054), sections 3.1 and 5. With Psi parameters on d ranks, in bytes of 16-bit
training with Adam: 16 Psi, then 4 Psi + 12 Psi/d, 2 Psi + 14 Psi/d, 16 Psi/d for stages 1, 2, 3.
"""

from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from fractions import Fraction

import numpy as np

from minipar.errors import UsageError
from minipar.parallel.placement import Placement

STAGES = (0, 1, 2, 3)
Count = int | Fraction  # elements or bytes; a Fraction if Psi/d is not rounded


@dataclass(frozen=True)
class Precision:
    """Bytes for each element of parameters, gradients and optimizer state."""

    parameters: int
    gradients: int
    optimizer: int


# Parameters and gradients in fp16, and in fp32 the optimizer's parameters, mean and variance (section 3.1).
MIXED = Precision(2, 2, 12)
# minipar's own: parameters and gradients in the dtype of the run, and AdamW's two means.
FLOAT32, FLOAT64 = Precision(4, 4, 8), Precision(8, 8, 16)
OF_DTYPE = {"float32": FLOAT32, "float64": FLOAT64}


def precision_of(dtype: str, gradients: str | None = None, sums: str | None = None) -> Precision:
    """Return the bytes of a run: in 2-byte training K = 12, and gradients of 2 bytes or (the default) 4.

    With plain data parallelism, gradients that are summed in another dtype (`sums`) exist in both: 20 bytes in all.
    """
    if np.dtype(dtype).itemsize > 2:
        return OF_DTYPE[dtype]
    copies = {np.dtype(each) for each in (gradients or "float32", sums or gradients or "float32")}
    return Precision(2, sum(dtype.itemsize for dtype in copies), 12)


@dataclass(frozen=True)
class ModelState:
    """Bytes of model state on one rank."""

    parameters: Count
    gradients: Count
    optimizer: Count

    @property
    def total(self) -> Count:
        return self.parameters + self.gradients + self.optimizer


def elements_held(psi: int, own: Count, stage: int, accumulating: bool = False) -> tuple[Count, Count, Count]:
    """Count the elements of (parameters, gradients, optimizer state) on a rank that owns `own` of psi parameters.

    If `accumulating`, microbatches add up in whole gradients before these are reduced (`no_sync`). From stage 2 on the
    whole gradients are held next to the rank's chunk of their sum.
    """
    gradients = psi if stage < 2 else own + psi if accumulating else own
    return own if stage >= 3 else psi, gradients, own if stage >= 1 else psi


def model_state(psi: int, own: Count, stage: int, precision: Precision, accumulating: bool = False) -> ModelState:
    """Compute the bytes on a rank: the paper's with own = Fraction(psi, d), a run's with elements_placed(...)."""
    held = zip(elements_held(psi, own, stage, accumulating), astuple(precision), strict=True)
    return ModelState(*(elements * width for elements, width in held))


def elements_placed(placements: Sequence[Placement], rank: int) -> tuple[int, int]:
    """Count the elements of placed parameters, and those of them that data-parallel rank `rank` owns: (psi, own)."""
    psi = own = 0
    for placement in placements:
        assert placement.dp is not None, f"{placement.name} is in no bucket"
        psi += placement.dp.size
        own += len(placement.dp.elements(rank, placement.dp.ranks))
    return psi, own


def check_limit(
    limit: int, placements: Sequence[Placement], ranks: int, stage: int, widths: Sequence[Precision], accumulating: bool
) -> None:
    """Raise UsageError, with a stage that fits, if model state on the fullest of `ranks` is above `limit` bytes.

    `widths` are the bytes of an element at each stage.
    """
    psi, own = elements_placed(placements, rank=0)  # which owns the most. NB: frameworks pad every rank to that
    totals = [model_state(psi, own, s, widths[s], accumulating).total for s in STAGES]
    if totals[stage] <= limit:
        return

    def arithmetic(stage: int) -> str:
        terms = zip(asdict(widths[stage]).items(), elements_held(psi, own, stage, accumulating), strict=True)
        products = [f"{width}*{count:,} ({what})" for (what, width), count in terms]
        return f"{' + '.join(products)} = {totals[stage]:,} bytes"

    message = f"--memory-limit {limit:,} bytes of model state per rank, but --zero-stage {stage} on {ranks} "
    message += f"data-parallel rank{'s' if ranks > 1 else ''} holds {arithmetic(stage)}"
    least = totals.index(min(totals))
    if fits := [s for s in STAGES if totals[s] <= limit]:
        message += f"; --zero-stage {fits[0]} fits: {arithmetic(fits[0])}"
    else:
        message += f"; the least, --zero-stage {least}, holds {arithmetic(least)}" if stage != least else ""
        message += "; no stage fits"
    if accumulating and ranks > 1:
        message += " (whole gradients while microbatches accumulate, from stage 2 on next to the chunk of their sum; "
        message += "without a pipeline, --sync-every-microbatch keeps them sharded)"
    raise UsageError(message)
