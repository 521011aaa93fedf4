"""Claims about docs/examples: each script is short, and trains on many ranks what it trains on one."""

from pathlib import Path

import pytest
from example_runs import EXAMPLES, losses_of

RUNS = (  # a script, ranks, arguments; release/ has the others
    ("ddp", 3, ()),  # 8 samples: the ranks' shares differ
    ("zero", 3, ("3",)),
    ("tensor", 4, ()),
    ("context", 4, ()),
    ("expert", 4, ()),
    ("pipeline", 2, ()),
)


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_an_example_trains_what_one_device_trains(run):
    many, one = losses_of(RUNS)[run]
    assert len(many) == len(one) == 20 and one[-1] < one[0]
    assert many == pytest.approx(one, rel=2e-5)  # float32, printed with six decimals


def test_an_example_has_at_most_40_lines():
    lengths = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in EXAMPLES.glob("*.py")}
    assert {name: length for name, length in lengths.items() if length > 40} == {}


def test_every_example_is_run():
    here = Path(__file__)
    tables = "".join(path.read_text(encoding="utf-8") for path in (here, here.parent / "release" / here.name))
    assert [path.stem for path in EXAMPLES.glob("*.py") if f'("{path.stem}", ' not in tables] == []
