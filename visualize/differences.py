"""`python -m minipar.compare A B`: whether two recorded runs are equal, or where they part, by which factor, and why.

A and B are directories that `minipar.train --record`, or any loop with `minipar.record.Record`, wrote. It needs no MPI.
"""

import json
import math
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from minipar.errors import UsageError, UsageParser, printable, report, write_json, write_out
from minipar.record import strips

# What it usually means if B's gradient is this many times A's, and if A's is this many times B's.
CAUSES = {
    "dp": ("summed over dp, though each rank's is already that of the global mean", "divided by dp once too often"),
    "cp": ("of a loss times cp, or summed over cp once more", "divided by cp once too often, or not summed over it"),
    "tp": ("summed over tp, though each rank has it whole", "divided by tp, or not summed over it"),
    "ep": ("summed over ep, though each expert's covers its tokens", "divided by ep, or not summed over its tokens"),
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
    "what tensor parallelism does not split (norms, positions, row biases)": r"(^|\.)(ln_|wpe\.)|norm|c_proj\.bias$",
    "the token embedding, to which a tied head belongs": r"(^|\.)(wte|embed_tokens)\.",
    "the embeddings": r"(^|\.)(wte|wpe|embed_tokens)\.",
    "the head": r"(^|\.)lm_head\.",
    "the experts": r"expert",
}
EPSILONS = {"float64": 2**-52, "float32": 2**-23}  # any other dtype counts as bfloat16


@dataclass(frozen=True)
class Difference:
    """Parameters, or the same part of each, that differ by one ratio B / A; None if no ratio fits."""

    quantity: str  # gradient, loss, grad_norm or update
    ratio: float | None
    group: str
    parameters: tuple[str, ...]
    causes: tuple[str, ...]


@dataclass(frozen=True)
class Finding:
    """The outcome: the first step that differs, None if none does, and its differences, the largest group first."""

    steps: int  # compared: those that both runs recorded
    recorded: tuple[int, int]  # by A and by B
    parameters: int
    step: int | None
    differences: tuple[Difference, ...]
    ratios: dict[int, dict[str, float | None]]  # by step and parameter: B's gradient norm / A's; None where equal

    @property
    def equal(self) -> bool:
        return self.step is None


@dataclass(frozen=True)
class Run:
    """A record: the facts of its run, the parameters' shapes and the file of each step."""

    facts: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    steps: dict[int, Path]


def read_run(directory: str | Path) -> Run:
    """Read what a record says of its run. UsageError if the directory is no record, or one without a step."""
    path = Path(directory)
    if not os.path.isfile(path / "run.json"):  # a pipe or a device may have no end
        raise UsageError(f"there is no record in {path}: no file run.json")
    try:
        run = json.loads((path / "run.json").read_text(encoding="utf-8"))
        shapes = {name: tuple(map(int, shape)) for name, shape in run["shapes"].items()}
        facts: dict[str, Any] = {name: int(run.get(name, 1)) for name in CAUSES}
        facts["eps"] = EPSILONS.get(str(run.get("dtype", "float64")).removeprefix("torch."), 2**-8)
    except Exception as error:  # of json or NumPy, whatever a foreign file makes them raise
        raise UsageError(f"{path} is not a record: {error!r:.100}") from None
    files = {re.fullmatch(r"step-(\d{1,18})\.npz", file.name): file for file in path.iterdir()}
    steps = {int(match[1]): file for match, file in files.items() if match}
    if not steps or not shapes:
        raise UsageError(f"{path} is a record without a step")
    return Run(facts, shapes, steps)


def read_step(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Read loss, grad_norm, gradient/NAME and update/NAME of a step. UsageError if the file is something else."""
    expected: dict[str, tuple[int, ...]] = {"loss": (), "grad_norm": ()}
    for name, shape in shapes.items():
        expected |= dict.fromkeys((f"gradient/{name}", f"update/{name}"), (2, sum(strips(shape))))
    if not path.is_file():
        raise UsageError(f"{path} is not a file")
    try:
        with np.load(path, allow_pickle=False) as file:
            sizes = {info.filename: info.file_size for info in file.zip.infolist()}
            if any(sizes[f"{name}.npy"] > 1000 + 8 * math.prod(shape) for name, shape in expected.items()):
                raise ValueError("an array is too large")
            arrays = {name: np.asarray(file[name], np.float64) for name in expected}
    except Exception as error:  # of NumPy, zipfile or zlib
        raise UsageError(f"{path} is not a step of a record: {error!r:.100}") from None
    for name, shape in expected.items():
        if arrays[name].shape != shape:
            raise UsageError(f"{path}: {name} has shape {arrays[name].shape}, expected {shape}")
    return arrays


def compare(a: str | Path, b: str | Path, bound: float | None = None) -> Finding:
    """Compare two records step by step.

    Rounding explains a relative difference of 1000 machine epsilons of the coarser dtype in step 0, that much more in
    each further one, and never more than 1 %; or `bound` in every step. A parameter is compared on the scale of its
    largest strip. UsageError if the runs have different parameters, or no step in common, or are one and the same.
    """
    if os.path.realpath(a) == os.path.realpath(b):
        raise UsageError(f"{a} and {b} are the same record")
    run_a, run_b = read_run(a), read_run(b)
    for name in run_a.shapes | run_b.shapes:
        shapes = [str(run.shapes.get(name, "missing")) for run in (run_a, run_b)]
        if shapes[0] != shapes[1]:
            raise UsageError(f"the records are of different models: {name} is {shapes[0]} in A, {shapes[1]} in B")
    steps = sorted(run_a.steps.keys() & run_b.steps.keys())
    if not steps:
        raise UsageError(f"{a} and {b} have no step in common")
    facts = {name: max(run_a.facts[name], run_b.facts[name]) for name in run_a.facts}
    first: int | None = None
    found: list[Difference] = []
    ratios = {}
    for step in steps:
        a_arrays, b_arrays = (read_step(run.steps[step], run.shapes) for run in (run_a, run_b))
        limit = min(1000 * facts["eps"] * (step + 1), 0.01) if bound is None else bound
        comparison = StepComparison(a_arrays, b_arrays, run_a.shapes, facts, limit)
        ratios[step] = comparison.norm_ratios()
        if not found and (found := comparison.differences()):
            first = step
    recorded = len(run_a.steps), len(run_b.steps)
    return Finding(len(steps), recorded, len(run_a.shapes), first, tuple(found), ratios)


@dataclass(frozen=True)
class StepComparison:
    """One step of two records A and B, and the relative difference that rounding explains."""

    a: dict[str, np.ndarray]
    b: dict[str, np.ndarray]
    shapes: Mapping[str, tuple[int, ...]]
    facts: Mapping[str, float]
    limit: float

    @cached_property
    def noise(self) -> float:
        """The norm below which a strip's gradient is rounding: that of the keys' bias is zero, and is never exactly."""
        gradients = [run[f"gradient/{name}"] for name in self.shapes for run in (self.a, self.b)]
        return min(64 * self.facts["eps"], 1e-3) * max(float(np.nanmax(np.abs(g), initial=0.0)) for g in gradients)

    def differences(self) -> list[Difference]:
        """Return what differs: gradients and the loss, or else the norm of the gradients, or else the updates."""
        found = self.of_parameters("gradient") + self.of_value("loss")
        return found or self.of_value("grad_norm") or self.of_parameters("update")

    def of_value(self, name: str) -> list[Difference]:
        """Return the difference of the loss or of the gradient norm, if there is one, in a list."""
        a, b = float(self.a[name]), float(self.b[name])
        if a == b or abs(b - a) <= self.limit * max(abs(a), abs(b)):
            return []
        ratio = b / a if a else math.inf
        return [Difference(name, ratio, f"{a:.6g} in A, {b:.6g} in B", (), causes(name, ratio, self.facts, b - a))]

    def of_parameters(self, kind: str) -> list[Difference]:
        """Group the parameters whose gradient or update differs by ratio and part, the largest group first."""
        groups: dict[tuple[str, str], tuple[float | None, list[str]]] = {}
        for name in self.shapes:
            ratio, part = self.ratio(kind, name)
            if ratio != 1:
                groups.setdefault((f"{ratio:.3g}" if ratio is not None else "", part), (ratio, []))[1].append(name)
        found = [
            Difference(kind, ratio, part + describe(names, self.shapes), tuple(names), causes(kind, ratio, self.facts))
            for (_, part), (ratio, names) in groups.items()
        ]
        return sorted(found, key=lambda each: (each.ratio is None, -len(each.parameters)))

    def ratio(self, kind: str, name: str) -> tuple[float | None, str]:
        """Return the ratio of one parameter's gradient or update, and the part of it that differs; "" is all of it."""
        a, b = self.a[f"{kind}/{name}"], self.b[f"{kind}/{name}"]
        if kind == "update":  # AdamW divides a gradient by its own size, and would make an update of rounding alone
            gradient = np.maximum(self.a[f"gradient/{name}"][0], self.b[f"gradient/{name}"][0])
            certain = (gradient > self.noise) | (gradient == 0)  # exactly zero: an expert without tokens, which decays
            a, b = a * certain, b * certain
        whole = self.factor(a, b)
        if whole is not None:
            return whole, ""
        start = 0
        for dim, count in enumerate(strips(self.shapes[name])):
            factors = [self.factor(a[:, i : i + 1], b[:, i : i + 1]) for i in range(start, start + count)]
            wrong = [r for r in factors if r is not None and r != 1]
            if wrong and None not in factors and np.allclose(wrong, wrong[0], rtol=1e-3):
                return wrong[0], part_of([r != 1 for r in factors], dim, int(self.facts["tp"]))
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
        if np.array_equal(a, b):
            return True
        return bool(np.abs(a - b).max() <= self.limit * max(np.abs(a).max(), np.abs(b).max()) + self.noise)

    def norm_ratios(self) -> dict[str, float | None]:
        """Return B's gradient norm / A's for each parameter, None where the gradients are equal."""
        ratios: dict[str, float | None] = {}
        for name in self.shapes:
            a, b = self.a[f"gradient/{name}"], self.b[f"gradient/{name}"]
            norms = float(np.linalg.norm(a[0])), float(np.linalg.norm(b[0]))
            ratios[name] = None if self.same(a, b) else norms[1] / norms[0] if norms[0] else math.inf
        return ratios


def part_of(different: Sequence[bool], dim: int, tp: int) -> str:
    """Name the strips of a dim that differ: one tp rank's part, of q, k and v side by side too, or their places."""
    count = len(different)
    for groups in (1, 3) if tp > 1 else ():
        owners = [i * groups * tp // count % tp for i in range(count)]
        own = {owner for owner, differs in zip(owners, different, strict=True) if differs}
        if count % (tp * groups) == 0 and len(own) == 1 and sum(different) == count // tp:
            return f"tp rank {own.pop()}'s part (of {tp}) of "
    places = [i for i, differs in enumerate(different) if differs]
    return f"{len(places)} of {count} strips ({places[0]} to {places[-1]}) along dim {dim} of "


def describe(names: Sequence[str], every: Iterable[str]) -> str:
    """Describe a group of the model's parameters in words."""
    chosen, whole = set(names), set(every)
    for words, pattern in GROUPS.items():
        members = {name for name in whole if re.search(pattern, name)}
        if members and chosen in (members, whole - members):
            return words if chosen == members else f"all parameters but {words}"
    # Of transformer.h.3.ln_1.weight: block 3, parameter ln_1.weight.
    blocks = {name: (int(match[1]), match[2]) for name in every if (match := re.search(r"\.(\d+)\.(.*)", name))}
    numbers = sorted({blocks[name][0] for name in names if name in blocks})
    inside = {name for name in blocks if blocks[name][0] in numbers}
    if numbers and inside <= chosen:
        rest = "".join(f" and {name}" for name in names if name not in inside)
        return f"blocks {numbers[0]} to {numbers[-1]}{rest}" if len(numbers) > 1 else f"block {numbers[0]}{rest}"
    kinds = dict.fromkeys(blocks[name][1] for name in names if name in blocks)
    if chosen == {name for name in blocks if blocks[name][1] in kinds}:
        return f"{', '.join(kinds)} of every block"
    if len(names) <= 3:
        return ", ".join(names)
    order = list(every)
    has_all = order.index(names[-1]) - order.index(names[0]) == len(names) - 1
    return f"{'' if has_all else 'some from '}{names[0]} to {names[-1]}"


def causes(quantity: str, ratio: float | None, facts: Mapping[str, float], difference: float = 0.0) -> tuple[str, ...]:
    """Return the usual causes of B = ratio * A; `difference` is B - A of the loss."""
    if ratio is None:
        other = "other data, masks or order; a sum over ranks that is missing; a transposed weight; not finite"
        return ("weight decay, betas, eps, clipping or optimizer state" if quantity == "update" else other,)
    if ratio in (0, math.inf):
        return (f"missing in {'B' if ratio == 0 else 'A'}: detached, frozen, not sent, or never added",)
    found = []
    for name, (more, less) in CAUSES.items():
        size = facts[name]
        for value, text, cause in ((size, f"{size} = {name}", more), (1 / size, f"1/{size} = 1/{name}", less)):
            if size > 1 and math.isclose(ratio, value, rel_tol=1e-3):
                found.append(f"{text}: {'the gradient is ' if quantity == 'gradient' else ''}{cause}")
            if size > 1 and quantity == "grad_norm" and math.isclose(ratio**2, value, rel_tol=1e-3):
                found.append(f"the root of {text}: squares are {cause}")
        if size > 1 and quantity == "loss" and math.isclose(difference, math.log(size), rel_tol=1e-3):
            found.append(f"B - A = log {size} = log {name}: logits that a rank has whole are gathered once more")
    if math.isclose(ratio, -1, rel_tol=1e-3):
        found.append("a wrong sign")
    if quantity == "update":
        found.append("the learning rate: its schedule, its warm-up, or how often it is advanced")
    return tuple(found)


def as_text(finding: Finding) -> str:
    """Return the lines that the command prints."""
    steps = f"{finding.steps} step{'s' if finding.steps > 1 else ''}"
    if set(finding.recorded) != {finding.steps}:
        steps += f", of {finding.recorded[0]} in A and {finding.recorded[1]} in B"
    if finding.equal:
        return f"compare: equal within rounding: {finding.parameters} parameters, {steps}\n"
    lines = [f"compare: DIFFERENT from step {finding.step} on (counted from 0; {steps} compared)"]
    for found in finding.differences:
        ratio = "no constant ratio" if found.ratio is None else f"B = {found.ratio:.5g} A"
        count = f" ({len(found.parameters)} of {finding.parameters} parameters)" if found.parameters else ""
        lines.append(f"  {found.quantity}: {ratio.replace('= 1 A', 'is nearly A')}: {found.group}{count}")
        lines += [f"    {cause}" for cause in found.causes]
    return "".join(f"{printable(line)}\n" for line in lines)


def main(argv: Sequence[str]) -> int:
    """Compare, and return the exit code: 0 equal, 1 different, 2 when the input is wrong, with one line."""
    parser = UsageParser(prog="python -m minipar.compare", description=__doc__, allow_abbrev=False)
    parser.add_argument("a", metavar="A", help="a record, of the run that is right if one is known to be")
    parser.add_argument("b", metavar="B", help="another one")
    bound = "the relative difference that counts as equal, in every step"
    parser.add_argument("--bound", type=float, metavar="X", help=bound)
    file = "everything, for `python -m visualize compare`; - is standard output"
    parser.add_argument("--json", metavar="FILE", help=file)
    try:
        options = parser.parse_args(argv)
        if options.bound is not None and not 0 <= options.bound < 1:
            raise UsageError(f"--bound {options.bound} is outside [0, 1)")
        finding = compare(options.a, options.b, options.bound)
        if options.json is not None:
            values = json.dumps({"equal": finding.equal, **asdict(finding)})
            write_json(options.json, json.loads(values, parse_constant=str))  # JSON has no Infinity, only the text
        if options.json != "-":
            write_out(as_text(finding))
    except UsageError as error:
        return report(error)
    return 0 if finding.equal else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
