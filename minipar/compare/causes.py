"""A difference between two runs and its usual meaning: the name of a group of parameters, and the causes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

# What it usually means if B's gradient is this many times A's, and if A's is this many times B's.
CAUSES = {
    "dp": (
        "summed over dp, though each rank's is already that of the global mean",
        "divided by dp once too often",
    ),
    "cp": (
        "of a loss times cp, or summed over cp once more",
        "divided by cp once too often, or not summed over it",
    ),
    "tp": ("summed over tp, though each rank has it whole", "divided by tp, or not summed over it"),
    "ep": (
        "summed over ep, though each expert's covers its tokens",
        "divided by ep, or not summed over its tokens",
    ),
    "pp": ("added on each pipeline rank", "divided by pp, or kept on one pipeline rank only"),
    "microbatches": (
        "not divided by the microbatches",
        "divided by the microbatches twice, or of one of them only",
    ),
    "tokens": ("that of the sum over the tokens, not of their mean", "divided by the tokens twice"),
}
Sizes = Mapping[str, Iterable[int]]  # the two runs' values of each name in CAUSES
CLIPPED = "gradients that each rank clips before they are summed, not after"
MEANS = "means over ranks or microbatches of unequal token counts, averaged as if the counts were equal"
OTHER = "other data, masks or order; a sum over ranks that is missing; a transposed weight"
# Parameters that one mistake often hits together, and what their names match.
GROUPS = {
    "all parameters": r"",
    "the norms": r"(^|\.)ln_|norm",
    "the biases": r"\.bias$",
    "the norms and biases": r"(^|\.)ln_|norm|\.bias$",
    "what tensor parallelism does not split (norms, positions, row biases)": r"(^|\.)(ln_|wpe\.)|norm|c_proj\.bias$",
    "the token embedding, to which a tied head belongs": r"(^|\.)(wte|embed_tokens)\.",
    "the embeddings": r"(^|\.)(wte|wpe|embed_tokens)\.",
    "the head": r"(^|\.)lm_head\.",
    "the experts": r"expert",
}


@dataclass(frozen=True)
class Difference:
    """Parameters, or the same part of each, that differ by one ratio B / A; None if no ratio fits."""

    quantity: str  # gradient, loss, grad_norm or update
    ratio: float | None
    group: str
    parameters: tuple[str, ...]
    causes: tuple[str, ...]
    not_finite: str = ""  # "A", "B" or "A and B": the runs in which a value is infinite or nan


def name_strips(different: Sequence[bool], dim: int, tps: Iterable[int]) -> str:
    """Name the strips of a dim that differ: one tp rank's part, of q, k and v side by side too, or which ones.

    tps: the tensor-parallel sizes of the two runs.
    """
    count = len(different)
    for tp, groups in product(tps, (1, 3)):
        owners = [i * groups * tp // count % tp for i in range(count)]
        own = {owner for owner, differs in zip(owners, different, strict=True) if differs}
        fits = tp > 1 and count % (tp * groups) == 0
        if fits and len(own) == 1 and sum(different) == count // tp:
            return f"tp rank {own.pop()}'s part (of {tp}) of "
    strips = [i for i, differs in enumerate(different) if differs]
    return f"{len(strips)} of {count} strips ({strips[0]} to {strips[-1]}) along dim {dim} of "


def describe(names: Sequence[str], every: Iterable[str]) -> str:
    """Describe a group of the model's parameters in words."""
    chosen = set(names)
    whole = set(every)
    for words, pattern in GROUPS.items():
        members = {name for name in whole if re.search(pattern, name)}
        if members and chosen in (members, whole - members):
            return words if chosen == members else f"all parameters but {words}"
    # Of transformer.h.3.ln_1.weight: block 3, parameter ln_1.weight.
    blocks: dict[str, tuple[int, str]] = {}
    for name in every:
        match = re.search(r"\.(\d+)\.(.*)", name)
        if match:
            blocks[name] = (int(match[1]), match[2])
    numbers = sorted({blocks[name][0] for name in names if name in blocks})
    inside = {name for name in blocks if blocks[name][0] in numbers}
    if numbers and inside <= chosen:
        rest = "".join(f" and {name}" for name in names if name not in inside)
        if len(numbers) == 1:
            return f"block {numbers[0]}{rest}"
        return f"blocks {numbers[0]} to {numbers[-1]}{rest}"
    kinds = dict.fromkeys(blocks[name][1] for name in names if name in blocks)
    if chosen == {name for name in blocks if blocks[name][1] in kinds}:
        return f"{', '.join(kinds)} of every block"
    if len(names) <= 3:
        return ", ".join(names)
    order = list(every)
    distance = order.index(names[-1]) - order.index(names[0])
    some = "" if distance == len(names) - 1 else "some from "
    return f"{some}{names[0]} to {names[-1]}"


def causes(quantity: str, ratio: float, sizes: Sizes, difference: float = 0.0) -> tuple[str, ...]:
    """Return the usual causes of B = ratio * A; `difference` is B - A of the loss."""
    if ratio in (0, math.inf):
        run = "B" if ratio == 0 else "A"
        return (f"missing in {run}: detached, frozen, not sent, or never added",)
    found = []
    for name, meanings in CAUSES.items():
        for size in sorted(sizes.get(name, ())):
            if size > 1:
                found += _causes_of_size(quantity, ratio, name, size, meanings)
                if quantity == "loss" and math.isclose(difference, math.log(size), rel_tol=1e-3):
                    cause = "logits that a rank has whole are gathered once more"
                    found.append(f"B - A = log {size} = log {name}: {cause}")
    if math.isclose(ratio, -1, rel_tol=1e-3):
        found.append("a wrong sign")
    if quantity == "update":
        found.append("the learning rate: its schedule, its warm-up, or how often it is advanced")
    return tuple(found)


def _causes_of_size(
    quantity: str, ratio: float, name: str, size: int, meanings: tuple[str, str]
) -> list[str]:
    """Return the causes of a ratio that is an axis's size or its inverse, or the root of these for a norm."""
    subject = "the gradient is " if quantity == "gradient" else ""
    found = []
    for value, text, cause in (
        (size, f"{size} = {name}", meanings[0]),
        (1 / size, f"1/{size} = 1/{name}", meanings[1]),
    ):
        if math.isclose(ratio, value, rel_tol=1e-3):
            found.append(f"{text}: {subject}{cause}")
        if quantity == "grad_norm" and math.isclose(ratio**2, value, rel_tol=1e-3):
            found.append(f"the root of {text}: squares are {cause}")
    return found
