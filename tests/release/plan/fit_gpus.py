"""Fit what a GPU reaches: `products` and `attention` of an H100, `attention` of an A100 (minipar/plan/cluster.py).

They are fitted to MPT's 1B model on one host, eight runs on each GPU, and to nothing else; an A100's `products` stay.

    PYTHONPATH=.:tests/release python tests/release/plan/fit_gpus.py

prints them, on a grid of hundredths, in some seconds.
"""

from dataclasses import replace
from math import log

from plan.mpt_runs import CARDS, MptRun, mpt_runs, seconds

from minipar.plan.cluster import Gpu


def fitted_runs(gpu: str) -> list[MptRun]:
    """Return the runs that fix a GPU's constants: the 1B model's on one host, in 16 bits."""
    return [run for run in mpt_runs() if (run.name, run.gpu, run.gpus, run.fp8) == ("1b", gpu, 8, False)]


def loss(gpu: str, card: Gpu) -> float:
    """Return the mean error of these runs' seconds, as a logarithm, on a card."""
    errors = [abs(log(seconds(run, card) / run.seconds)) for run in fitted_runs(gpu)]
    return sum(errors) / len(errors)


def best(gpu: str, products: list[float], attention: list[float]) -> Gpu:
    """Return the card with the least loss."""
    cards = [replace(CARDS[gpu], products=p, attention=a) for p in products for a in attention]
    return min(cards, key=lambda card: loss(gpu, card))


if __name__ == "__main__":
    h100 = best("h100_80gb", [p / 100 for p in range(54, 71)], [a / 100 for a in range(28, 45)])
    print(f"h100: products {h100.products}, attention {h100.attention}, loss {loss('h100_80gb', h100):.3f}")
    a100 = best("a100_80gb", [0.75], [a / 100 for a in range(50, 76)])
    print(f"a100: attention {a100.attention}, loss {loss('a100_80gb', a100):.3f}")
