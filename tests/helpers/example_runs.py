"""Runs of the scripts of docs/examples, all of one number of ranks in one job."""

from functools import cache
from pathlib import Path

from launcher import run_each

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


@cache
def losses_of(runs):
    """Run each (name, ranks, arguments), and on one rank with its first argument; return the losses of both by run."""
    jobs = {(name, ranks, arguments) for name, ranks, arguments in runs}
    jobs |= {(name, 1, arguments[:1]) for name, _, arguments in runs}
    printed = {}
    for size in sorted({ranks for _, ranks, _ in jobs}):
        chosen = sorted(job for job in jobs if job[1] == size)
        commands = [[str(EXAMPLES / f"{name}.py"), *arguments] for name, _, arguments in chosen]
        for job, result in zip(chosen, run_each(size, commands, timeout=120), strict=True):
            assert result.returncode == 0, result.stderr
            lines = [line for line in result.stdout.splitlines() if line.startswith("loss")]
            printed[job] = [float(line.split()[1]) for line in lines]
    return {run: (printed[run], printed[run[0], 1, run[2][:1]]) for run in runs}
