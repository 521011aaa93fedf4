"""Claims about docs/examples: each script is short, and trains on many ranks what it trains on one."""

import sys
from functools import cache
from pathlib import Path

import pytest
from launcher import run_each

EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"
RUNS = [
    ("ddp", 3, []),  # 8 samples: the ranks' shares differ
    ("zero", 4, ["1"]),
    ("zero", 4, ["2"]),
    ("zero", 3, ["3"]),
    ("zero", 4, ["3", "2"]),  # two replicas of two shards; one device has one
    ("tensor", 4, []),
    ("tensor", 4, ["llama"]),
    ("context", 4, []),
    ("context", 2, ["all-gather"]),
    ("context", 2, ["ulysses"]),
    ("expert", 2, []),
    ("expert", 4, []),
    ("pipeline", 2, []),
    ("resume", 8, []),
    ("three_d", 16, []),
]


@cache
def losses_of_all(ranks):
    """The losses of every run on so many ranks, by script and arguments."""
    runs = [(name, tuple(arguments)) for name, size, arguments in RUNS if size == ranks]
    if ranks == 1:
        runs = list(dict.fromkeys((name, tuple(arguments[:1])) for name, _, arguments in RUNS))
    results = run_each(ranks, [[str(EXAMPLES / f"{name}.py"), *arguments] for name, arguments in runs], timeout=90)
    losses = {}
    for run, result in zip(runs, results, strict=True):
        assert result.returncode == 0, result.stderr
        losses[run] = [float(line.split()[1]) for line in result.stdout.splitlines() if line.startswith("loss")]
    return losses


@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("*.py")))
def test_an_example_has_at_most_40_lines(name):
    assert len((EXAMPLES / f"{name}.py").read_text(encoding="utf-8").splitlines()) <= 40


@pytest.mark.parametrize(
    ("name", "ranks", "arguments"), [pytest.param(*run, marks=pytest.mark.long) if run[1] > 8 else run for run in RUNS]
)
def test_an_example_trains_what_one_device_trains(name, ranks, arguments):
    many, one = losses_of_all(ranks)[name, tuple(arguments)], losses_of_all(1)[name, tuple(arguments[:1])]
    assert len(many) == len(one) == 20 and one[-1] < one[0]
    assert many == pytest.approx(one, rel=2e-5)  # float32, printed with six decimals


def test_every_example_is_run():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {name for name, _, _ in RUNS}
    assert sys.version_info >= (3, 11)
