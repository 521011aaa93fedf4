"""Runs of the scripts of docs/examples: as threads of this process, or all of one number of ranks in one job."""

import sys
from functools import partial
from pathlib import Path

import pytest
from launcher import run_each

import minipar

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
sys.path.append(str(EXAMPLES))  # scripts import halves.py


def losses(printed):
    return [float(line.split()[1]) for line in printed.splitlines() if line.startswith("loss")]


def losses_on_threads(name, ranks, old, new, capsys):
    """Return what an example prints, with some of its text replaced, on so many threads."""
    program = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8").replace(old, new)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(minipar, "launch", partial(minipar.launch, threads=ranks))
        exec(compile(program, name, "exec"), {"__name__": "__main__"})
    return losses(capsys.readouterr().out)


def losses_of_processes(ranks, names):
    results = run_each(ranks, [[str(EXAMPLES / f"{name}.py")] for name in names], timeout=300)
    assert [result.stderr for result in results if result.returncode] == []
    return {name: losses(result.stdout) for name, result in zip(names, results, strict=True)}
