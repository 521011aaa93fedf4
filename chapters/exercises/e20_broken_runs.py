"""Exercise 20 (chapter 14): diagnose three broken runs from their records.

The command

    python -m chapters.exercises.e20_broken_runs OUT

trains and records three runs in OUT/1, OUT/2 and OUT/3, in half a minute. In each of them `right` is one device, and
`run` is the run with a mistake: 1 with `--dp 2 --ep 2` (a Mixtral), 2 with `--dp 2 --zero-stage 2`, and 3 with
`--dp 2 --zero-stage 3`. Look at them with `python -m minipar.compare OUT/1/right OUT/1/run`, and with the losses and
norms that the command prints. `compare` may name a likely cause: see whether the losses confirm it. It names the first
and the last parameter that differ; `--json -` lists all. All runs are in float64. Do not look into the code that breaks
them. The causes to choose from:

 0  nothing: the difference is rounding
 1  the gradient is not divided by the number of microbatches
 2  a bucket is never sent
 3  the router's gradient is not summed over the ranks
 4  the gradients of experts are multiplied by ep
 5  the schedule of the learning rate advances with every microbatch
 6  `zero_grad` is forgotten
 7  gradients are clipped on each rank, before they are summed
 8  weight decay acts on the wrong parameters
 9  the master weights are missing
10  a rank skips a step alone

Return for each run: the first step that differs, counted from 0; the quantity that `compare` names first ("gradient",
"loss", "grad_norm" or "update"); and the number of the cause.

Graded: the three answers. A wrong one gets a hint at the place to look at.
"""

import sys
from pathlib import Path


def diagnose() -> dict[str, tuple[int, str, int]]:
    """Return for the runs "1", "2" and "3" the step, the quantity and the cause."""
    raise NotImplementedError("your code")


if __name__ == "__main__":
    from chapters.support.ch14.patients import record_pair

    for name in "123":
        folder = Path(sys.argv[1], name)
        folder.mkdir(parents=True)
        found = record_pair(name, str(folder))
        for what, which in (("losses", 0), ("norms", 1)):
            for run in ("right", "run"):
                values = " ".join(f"{value:.3f}" for value in found[run][which][::3])
                print(f"{name} {what:<6} {run:<5} {values}")
