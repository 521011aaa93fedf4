"""`python -m minipar.compare A B`: whether two recorded runs are equal, or where they part, by which factor, and why.

A and B are directories that `minipar.train --record`, or any loop with `minipar.record.Record`, wrote. It needs no MPI.
"""

import json
import math
import re
import sys
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from minipar.errors import UsageError, UsageParser, error_line, printable, write_json, write_out
from minipar.record import strips

# What it usually means if B's gradient is this many times A's, and if A's is this many times B's.
CAUSES = {
    "dp": ("summed over dp, though each rank's is already that of the global mean", "divided by dp once too often"),
    "tp": ("summed over tp, though each rank has it whole", "divided by tp, or not summed over it"),
    "pp": ("added on each pipeline rank", "divided by pp, or kept on one pipeline rank only"),
    "microbatches": ("not divided by the microbatches", "divided by the microbatches twice, or of one of them only"),
    "tokens": ("that of the sum over the tokens, not of their mean", "divided by the tokens twice"),
}
# Parameters that one mistake often hits together, and what their names match.
GROUPS = {
    "all parameters": r"",
    "the norms": r"(^|\.)ln_|norm",
    "the biases": r"\.bias$",
    "the norms and biases": r"(^|\.)ln_|norm|\.bias$",
    "the token embedding, to which a tied head belongs": r"(^|\.)(wte|embed_tokens)\.",
    "the embeddings": r"(^|\.)(wte|wpe|embed_tokens)\.",
    "the head": r"(^|\.)lm_head\.",
    "the experts": r"expert",
    "the routers": r"router|(^|\.)gate\.weight$",
}


@dataclass(frozen=True)
class Run:
    """A record: the facts of its run, the parameters' shapes and the file of each step."""

    directory: Path
    facts: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    steps: dict[int, Path]

    def step(self, step: int) -> dict[str, np.ndarray]:
        """Read loss, grad_norm, gradient/NAME and update/NAME of a step. UsageError if its file is something else."""
        path = self.steps[step]
        shapes: dict[str, tuple[int, ...]] = {"loss": (), "grad_norm": ()}
        for name, shape in self.shapes.items():
            shapes[f"gradient/{name}"] = shapes[f"update/{name}"] = (2, sum(strips(shape)))
        try:
            with np.load(path, allow_pickle=False) as file:
                arrays = {name: np.asarray(file[name], np.float64) for name in shapes}
        except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
            raise UsageError(f"{path} is not a step of a record: {error}") from None
        for name, shape in shapes.items():
            if arrays[name].shape != shape or not np.isfinite(arrays[name]).all():
                raise UsageError(f"{path}: {name} has shape {arrays[name].shape}; expected {shape} of finite values")
        return arrays


@dataclass(frozen=True)
class Difference:
    """Parameters, or the same part of each, that differ by one ratio B / A; None if no ratio fits."""

    quantity: str  # gradient, loss, gradient norm or update
    ratio: float | None
    group: str
    parameters: tuple[str, ...]
    causes: tuple[str, ...]


@dataclass(frozen=True)
class Finding:
    """The outcome: the first step that differs, None if none does, and its differences, the largest group first."""

    steps: int  # that both runs recorded
    parameters: int
    step: int | None
    differences: tuple[Difference, ...]
    ratios: dict[int, dict[str, float | None]]  # by step and parameter: B's gradient norm / A's; None where equal

    @property
    def equal(self) -> bool:
        return self.step is None


def read(directory: str | Path) -> Run:
    """Read what a record says of its run. UsageError if the directory is no record, or one without a step."""
    path = Path(directory)
    try:
        facts = json.loads((path / "run.json").read_text(encoding="utf-8"))
        shapes = {name: tuple(map(int, shape)) for name, shape in facts.pop("shapes").items()}
        files = {re.fullmatch(r"step-(\d{1,18})\.npz", file.name): file for file in path.iterdir()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UsageError(f"{path} is not a record of minipar.train --record: {error}") from None
    steps = {int(match[1]): file for match, file in files.items() if match}
    if not steps or not shapes:
        raise UsageError(f"{path} is a record without a step")
    return Run(path, facts, shapes, steps)


def compare(a: str | Path, b: str | Path, bound: float | None = None) -> Finding:
    """Compare two records step by step.

    Rounding explains relative differences of a gradient up to `bound` in step 0, and 5 * bound more in each further
    one; the default is 4500 machine epsilons of the coarser dtype, as for `--verify`. A parameter is compared on the
    scale of its largest strip. UsageError if the runs have different parameters, or no step in common.
    """
    runs = read(a), read(b)
    if runs[0].shapes != runs[1].shapes:
        names = sorted({name for name, _ in runs[0].shapes.items() ^ runs[1].shapes.items()})
        raise UsageError(f"the records are of different models: {len(names)} parameters differ, such as {names[0]}")
    steps = sorted(runs[0].steps.keys() & runs[1].steps.keys())
    if not steps:
        raise UsageError(f"{runs[0].directory} and {runs[1].directory} have no step in common")
    epsilon = max(float(np.finfo(run.facts.get("dtype", "float64")).eps) for run in runs)
    sizes = {name: max(int(run.facts.get(name, 1)) for run in runs) for name in CAUSES}
    first, found, ratios = None, (), {}
    for step in steps:
        limit = (4500 * epsilon if bound is None else bound) * (5 * step + 1)
        comparison = StepComparison(runs[0].step(step), runs[1].step(step), runs[0].shapes, sizes, limit, epsilon)
        ratios[step] = comparison.norm_ratios()
        if first is None and (differences := comparison.differences()):
            first, found = step, tuple(differences)
    return Finding(len(steps), len(runs[0].shapes), first, found, ratios)


@dataclass(frozen=True)
class StepComparison:
    """One step of two records A and B, with the relative difference that rounding explains."""

    a: dict[str, np.ndarray]
    b: dict[str, np.ndarray]
    shapes: Mapping[str, tuple[int, ...]]
    sizes: Mapping[str, int]  # by the names in CAUSES
    limit: float
    epsilon: float

    @cached_property
    def noise(self) -> float:
        """The size up to which a strip's gradient is rounding alone, as that of the keys' bias, which is zero, is."""
        return 64 * self.epsilon * max(np.abs(run[f"gradient/{n}"]).max() for n in self.shapes for run in (self.a, self.b))

    def differences(self) -> list[Difference]:
        """Return what differs: gradients and the loss, or else the norm of the gradients, or else the updates."""
        found = self.of_parameters("gradient") + self.of_value("loss")
        return found or self.of_value("grad_norm") or self.of_parameters("update")

    def of_value(self, name: str) -> list[Difference]:
        """Return the difference of the loss or of the gradient norm, if there is one, in a list."""
        a, b = float(self.a[name]), float(self.b[name])
        if abs(b - a) <= self.limit * max(abs(a), abs(b)):
            return []
        ratio = b / a if a else math.inf
        causes = causes_of(name, ratio, self.sizes, b - a)
        return [Difference(name, ratio, f"{a:.6g} in A, {b:.6g} in B", (), tuple(causes))]

    def of_parameters(self, kind: str) -> list[Difference]:
        """Group the parameters whose gradient or update differs by part and ratio, the largest group first."""
        groups: dict[tuple[str, float | None], list[str]] = {}
        for name in self.shapes:
            ratio, part = self.ratio(kind, name)
            if ratio != 1:
                near = (key for key in groups if key[0] == part and key[1] is not None and ratio is not None)
                key = next((key for key in near if math.isclose(key[1], ratio, rel_tol=1e-3)), (part, ratio))
                groups.setdefault(key, []).append(name)
        found = []
        for (part, ratio), names in groups.items():
            causes = causes_of(kind, ratio, self.sizes) or [f"the last of them in the model, {names[-1]}, differs first in backward"]
            found.append(Difference(kind, ratio, part + describe(names, self.shapes), tuple(names), tuple(causes)))
        return sorted(found, key=lambda difference: (difference.ratio is None, -len(difference.parameters)))

    def ratio(self, kind: str, name: str) -> tuple[float | None, str]:
        """Return the ratio of one parameter's gradient or update, and the part of it that differs; "" is all of it."""
        a, b = self.a[f"{kind}/{name}"], self.b[f"{kind}/{name}"]
        if kind == "update":  # AdamW divides a gradient by its own size, and rounding alone would become an update
            gradient = np.maximum(self.a[f"gradient/{name}"][0], self.b[f"gradient/{name}"][0])
            a, b = a * (gradient > self.noise), b * (gradient > self.noise)
        whole = self.factor(a, b)
        if whole is not None:
            return whole, ""
        start = 0
        for count in strips(self.shapes[name]):
            factors = [self.factor(a[:, i : i + 1], b[:, i : i + 1]) for i in range(start, start + count)]
            different = [r for r in factors if r != 1]
            if None not in different and np.allclose(different, different[0], rtol=1e-3):
                return different[0], part_of([r != 1 for r in factors])
            start += count
        return None, ""

    def factor(self, a: np.ndarray, b: np.ndarray) -> float | None:
        """Return r with b = r * a, for norms (row 0) and projections (row 1); None if no r fits."""
        if self.same(a, b):
            return 1.0
        if np.abs(a).max() <= self.noise:
            return math.inf
        r = float(a[1] @ b[1] / (a[1] @ a[1]))
        return r if self.same(np.array([abs(r) * a[0], r * a[1]]), b) else None

    def same(self, a: np.ndarray, b: np.ndarray) -> bool:
        """Return whether rounding explains the difference, on the scale of the largest strip."""
        return bool(np.abs(a - b).max() <= self.limit * max(np.abs(a).max(), np.abs(b).max()) + self.noise)

    def norm_ratios(self) -> dict[str, float | None]:
        """Return B's gradient norm / A's for each parameter, None where the gradients are equal."""
        ratios: dict[str, float | None] = {}
        for name in self.shapes:
            a, b = (run[f"gradient/{name}"] for run in (self.a, self.b))
            norms = [float(np.linalg.norm(array[0])) for array in (a, b)]
            ratios[name] = None if self.same(a, b) else norms[1] / norms[0] if norms[0] else math.inf
        return ratios


def part_of(different: Sequence[bool]) -> str:
    """Name the strips that differ: as one tensor-parallel rank's, also of q, k and v side by side, or by number."""
    count = len(different)
    for ranks, groups in product(range(2, count // 2 + 1), (1, 3)):
        if count % (ranks * groups) == 0:
            owner = [i % (count // groups) * groups * ranks // count for i in range(count)]
            own = {owner[i] for i in range(count) if different[i]}
            if len(own) == 1 and all(different[i] == (owner[i] in own) for i in range(count)):
                return f"the part of tp rank {own.pop()} of {ranks} in "
    places = [i for i, differs in enumerate(different) if differs]
    return f"{len(places)} of {count} strips, {places[0]} to {places[-1]}, of "


def describe(names: Sequence[str], every: Sequence[str]) -> str:
    """Describe a group of the model's parameters in words."""
    chosen = set(names)
    for words, pattern in GROUPS.items():
        members = {name for name in every if re.search(pattern, name)}
        if members and chosen == members:
            return words
        if len(members) < len(every) and chosen == set(every) - members:
            return f"all parameters but {words}"
    # Of "transformer.h.3.ln_1.weight": block 3, parameter ln_1.weight.
    block = {name: re.search(r"\.(\d+)\.(.*)", name) for name in every}
    numbers = sorted({int(match[1]) for name in names if (match := block[name])})
    inside = {name for name, match in block.items() if match and int(match[1]) in numbers}
    if numbers and inside <= chosen:
        rest = "".join(f" and {name}" for name in names if name not in inside)
        return f"blocks {numbers[0]} to {numbers[-1]}{rest}" if len(numbers) > 1 else f"block {numbers[0]}{rest}"
    kinds = dict.fromkeys(match[2] for name in names if (match := block[name]))
    if chosen == {name for name, match in block.items() if match and match[2] in kinds}:
        return f"{', '.join(kinds)} of every block"
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def causes_of(quantity: str, ratio: float | None, sizes: Mapping[str, int], difference: float = 0.0) -> list[str]:
    """Return the usual causes of B = ratio * A; `difference` is B - A of the loss."""
    causes = []
    sizes = {name: size for name, size in sizes.items() if size > 1}
    if ratio in (0, math.inf):
        causes.append(f"missing in {'B' if ratio == 0 else 'A'}: detached, not reduced, or never added")
    elif ratio is not None and math.isclose(ratio, -1, rel_tol=1e-3):
        causes.append("a wrong sign")
    for name, size in sizes.items() if ratio is not None else ():
        for value, text, cause in ((size, f"{size}", CAUSES[name][0]), (1 / size, f"1/{size}", CAUSES[name][1])):
            of = name if value > 1 else f"1/{name}"
            if math.isclose(ratio, value, rel_tol=1e-3):
                causes.append(f"{text} = {of}: {cause}")
            if quantity == "grad_norm" and math.isclose(ratio**2, value, rel_tol=1e-3):
                causes.append(f"the square root of {text} = {of}: squares {cause}")
        if quantity == "loss" and math.isclose(difference, math.log(size), rel_tol=1e-3):
            causes.append(f"B - A = log {size} = log {name}: logits that each rank has whole are gathered once more")
    if quantity == "update":
        causes.append("the learning rate: its schedule or warm-up" if ratio is not None else "weight decay, betas, eps, "
                      "clipping or the optimizer's state")
    return causes


def as_text(finding: Finding) -> str:
    """Return the lines that the command prints."""
    steps = f"{finding.steps} step{'s' if finding.steps > 1 else ''}"
    if finding.equal:
        return f"compare: equal within rounding: {finding.parameters} parameters, {steps}\n"
    lines = [f"compare: DIFFERENT, first in step {finding.step} (counted from 0) of {steps}"]
    for found in finding.differences:
        ratio = "no constant ratio" if found.ratio is None else f"B = {found.ratio:.6g} A"
        count = f" ({len(found.parameters)} of {finding.parameters} parameters)" if found.parameters else ""
        lines.append(f"  {found.quantity}: {ratio} in {found.group}{count}")
        lines += [f"    {cause}" for cause in found.causes]
    return "".join(f"{printable(line)}\n" for line in lines)


def main(argv: Sequence[str]) -> int:
    """Compare, and return the exit code: 0 equal, 1 different, 2 when the input is wrong, with one line."""
    parser = UsageParser(prog="python -m minipar.compare", description=__doc__, allow_abbrev=False)
    parser.add_argument("a", metavar="A", help="a record, of the run that is right if one is known to be")
    parser.add_argument("b", metavar="B", help="another one")
    parser.add_argument("--bound", type=float, metavar="X", help="relative difference that is equal (see `compare`)")
    parser.add_argument("--json", metavar="FILE", help="everything; - is standard output. `python -m visualize compare FILE` draws it")
    try:
        options = parser.parse_args(argv)
        if options.bound is not None and not 0 <= options.bound < 1:
            raise UsageError(f"--bound {options.bound} is outside [0, 1)")
        finding = compare(options.a, options.b, options.bound)
        if options.json is not None:
            write_json(options.json, {"equal": finding.equal, **asdict(finding)})
        if options.json != "-":
            write_out(as_text(finding))
    except UsageError as error:
        if not isinstance(error.__context__, BrokenPipeError):
            print(error_line(error), file=sys.stderr)
        return 2
    return 0 if finding.equal else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
