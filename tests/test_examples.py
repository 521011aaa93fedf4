"""Claims about docs/examples: each script is short, and trains on many ranks what it trains on one."""

import sys
from functools import cache
from pathlib import Path

import pytest
from launcher import run_each

EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"
RUNS = [
    ("ddp", 3, []),  # 8 samples: the ranks' shares differ
    ("zero", 3, ["3"]),
    ("tensor", 4, []),
    ("context", 4, []),
    ("expert", 4, []),
    ("pipeline", 2, []),
]
LONG = [
    ("zero", 4, ["1"]),
    ("resume", 8, []),
    ("zero", 4, ["2"]),
    ("zero", 4, ["3", "2"]),  # two replicas of two shards; one device has one
    ("tensor", 4, ["llama"]),
    ("context", 2, ["all-gather"]),
    ("context", 2, ["ulysses"]),
    ("expert", 2, []),
    ("three_d", 16, []),
]
LISTS = {"short": RUNS, "long": LONG}


@cache
def losses_of_all(ranks, among):
    """The losses of every run of a list on so many ranks, by script and arguments."""
    runs = [(name, tuple(arguments)) for name, size, arguments in LISTS[among] if size == ranks]
    if ranks == 1:
        runs = list(dict.fromkeys((name, tuple(arguments[:1])) for name, _, arguments in LISTS[among]))
    results = run_each(ranks, [[str(EXAMPLES / f"{name}.py"), *arguments] for name, arguments in runs], timeout=90)
    losses = {}
    for run, result in zip(runs, results, strict=True):
        assert result.returncode == 0, result.stderr
        losses[run] = [float(line.split()[1]) for line in result.stdout.splitlines() if line.startswith("loss")]
    return losses


@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("*.py")))
def test_an_example_has_at_most_40_lines(name):
    assert len((EXAMPLES / f"{name}.py").read_text(encoding="utf-8").splitlines()) <= 40


CASES = [("short", *run) for run in RUNS]
CASES += [pytest.param("long", *run, marks=pytest.mark.long) for run in LONG]


@pytest.mark.parametrize(("among", "name", "ranks", "arguments"), CASES)
def test_an_example_trains_what_one_device_trains(among, name, ranks, arguments):
    many = losses_of_all(ranks, among)[name, tuple(arguments)]
    one = losses_of_all(1, among)[name, tuple(arguments[:1])]
    assert len(many) == len(one) == 20 and one[-1] < one[0]
    assert many == pytest.approx(one, rel=2e-5)  # float32, printed with six decimals


def test_every_example_is_run():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {name for name, _, _ in RUNS + LONG}
    assert sys.version_info >= (3, 11)
