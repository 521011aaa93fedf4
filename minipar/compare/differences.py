"""`python -m minipar.compare A B`: whether two recorded runs are equal, or where they part, by which factor, and why.

A and B are directories that `minipar.train --record`, or any loop with `minipar.compare.record.Record`,
wrote. It needs no MPI.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from minipar.cli import UsageParser, report, write_json
from minipar.compare.causes import CAUSES, Difference
from minipar.compare.records import Run, read_run, read_step
from minipar.compare.step_comparison import StepComparison
from minipar.errors import UsageError

MOST = 0.01  # the largest relative difference that rounding explains
GROWTH = (
    10  # times what rounding explains: a smaller difference may be rounding that training has amplified
)
ADVICE = (
    "    rounding may have grown to this: what comes before is equal. To tell it from a mistake, resume both runs from"
    " one checkpoint of the step before, or record both in float64, where only rounding is smaller"
)


@dataclass(frozen=True)
class Finding:
    """The outcome: the first step that differs, None if none does, and its differences.

    The differences come in this order: values that are not finite, gradients, the loss, the norm,
    updates. Of each, groups with a ratio that has a known cause come first, then the others, those
    of most parameters first.
    """

    steps: int  # compared: those that both runs recorded
    recorded: tuple[int, int]  # by A and by B
    parameters: int
    step: int | None
    differences: tuple[Difference, ...]
    # By step and parameter: B's gradient norm / A's; None where equal.
    ratios: dict[int, dict[str, float | None]]
    may_be_rounding: (
        bool  # what comes before is equal, and the differences at most GROWTH times the limit
    )
    skipped: tuple[int, ...] = ()  # by both runs, because gradients were not finite

    @property
    def equal(self) -> bool:
        return self.step is None


def compare(a: str | Path, b: str | Path, bound: float | None = None) -> Finding:
    """Compare two records step by step.

    Rounding explains a relative difference of 1000 machine epsilons of the coarser dtype in step 0,
    that much more in each further one, and never more than 1 %; in updates without a common factor
    8 times as much; or `bound` in every step. A parameter is compared on the scale of its largest
    strip. A value that is not finite, in one run or in both, is a difference; but see
    `StepComparison.skipped`.

    UsageError if the runs have different parameters, or no step in common, or are one and the same,
    or if both skipped every step in common.
    """
    if os.path.realpath(a) == os.path.realpath(b):
        raise UsageError(f"{a} and {b} are the same record")
    run_a = read_run(a)
    run_b = read_run(b)
    _check_shapes(run_a, run_b)
    steps = sorted(run_a.steps.keys() & run_b.steps.keys())
    if not steps:
        raise UsageError(f"{a} and {b} have no step in common")
    sizes = {name: {run_a.sizes[name], run_b.sizes[name]} for name in CAUSES}
    eps = max(run_a.eps, run_b.eps)
    first: int | None = None
    found: list[Difference] = []
    ratios = {}
    skipped = []
    may_be_rounding = False
    last: StepComparison | None = None
    for step in steps:
        rounding = min(1000 * eps * (step + 1), MOST)
        comparison = StepComparison(
            a=read_step(run_a.steps[step], run_a.shapes),
            b=read_step(run_b.steps[step], run_b.shapes),
            shapes=run_a.shapes,
            sizes=sizes,
            eps=eps,
            limit=rounding if bound is None else bound,
            update_limit=min(8 * rounding, MOST) if bound is None else None,
        )
        ratios[step] = comparison.norm_ratios()
        if comparison.skipped:
            skipped.append(step)
        if first is None:
            has_step_before = step - 1 in run_a.steps and step - 1 in run_b.steps
            found = comparison.differences(last if has_step_before else None)
            first = step if found else None
            # Updates are compared where gradients are equal: AdamW may have amplified rounding, even in step 0.
            if found and (has_step_before or found[0].quantity == "update"):
                wider = replace(comparison, limit=GROWTH * comparison.limit, update_limit=MOST)
                may_be_rounding = not wider.differences()
        last = comparison
    if len(skipped) == len(steps) and first is None:
        raise UsageError(
            f"{a} and {b} both skipped every step that they have in common, which proves nothing"
        )
    recorded = len(run_a.steps), len(run_b.steps)
    return Finding(
        steps=len(steps),
        recorded=recorded,
        parameters=len(run_a.shapes),
        step=first,
        differences=tuple(found),
        ratios=ratios,
        skipped=tuple(skipped),
        may_be_rounding=may_be_rounding,
    )


def _check_shapes(a: Run, b: Run) -> None:
    """Raise UsageError for a parameter that only one of the runs has, or that has two shapes."""
    for name in a.shapes | b.shapes:
        shapes = [str(run.shapes.get(name, "missing")) for run in (a, b)]
        if shapes[0] != shapes[1]:
            raise UsageError(
                f"the records are of different models: {name} is {shapes[0]} in A, {shapes[1]} in B"
            )


def as_text(finding: Finding) -> str:
    """Return the lines that the command prints."""
    steps = f"{finding.steps} step{'s' if finding.steps > 1 else ''}"
    if set(finding.recorded) != {finding.steps}:
        steps += f", of {finding.recorded[0]} in A and {finding.recorded[1]} in B"
    if finding.skipped:
        steps += f", of which both runs skipped {len(finding.skipped)} (gradients that are not finite)"
    if finding.equal:
        return f"compare: equal within rounding: {finding.parameters} parameters, {steps}\n"
    lines = [f"compare: DIFFERENT from step {finding.step} on (counted from 0; {steps} compared)"]
    for found in finding.differences:
        if found.not_finite:
            ratio = f"not finite in {found.not_finite}"
        elif found.ratio is None:
            ratio = "no constant ratio"
        else:
            ratio = f"B = {found.ratio:.5g} A".replace("= 1 A", "is nearly A")
        count = (
            f" ({len(found.parameters)} of {finding.parameters} parameters)" if found.parameters else ""
        )
        lines.append(f"  {found.quantity}: {ratio}: {found.group}{count}")
        lines += [f"    {cause}" for cause in found.causes]
    if finding.may_be_rounding:
        lines.append(ADVICE)
    return "".join(f"{line}\n" for line in lines)


def main(argv: Sequence[str]) -> int:
    """Compare, and return the exit code: 0 equal, 1 different, 2 when the input is wrong, with one line."""
    parser = UsageParser(prog="python -m minipar.compare", description=__doc__)
    parser.add_argument("a", metavar="A", help="a record, of the run that is right if one is known to be")
    parser.add_argument("b", metavar="B", help="another one")
    bound = "the relative difference that counts as equal, in every step"
    parser.add_argument("--bound", type=float, metavar="X", help=bound)
    file = "everything, for `minipar visualize compare`; - is standard output"
    parser.add_argument("--json", metavar="FILE", help=file)
    try:
        options = parser.parse_args(argv)
        if options.bound is not None and not 0 <= options.bound < 1:
            raise UsageError(f"--bound {options.bound} is outside [0, 1)")
        finding = compare(options.a, options.b, options.bound)
        if options.json is not None:
            values = json.dumps({"equal": finding.equal, **asdict(finding)})
            # JSON has no Infinity and no NaN, only their texts.
            write_json(options.json, json.loads(values, parse_constant=str))
        if options.json != "-":
            print(as_text(finding), end="")
    except UsageError as error:
        return report(error)
    return 0 if finding.equal else 1
