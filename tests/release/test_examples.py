"""Claims about docs/examples: the further stages, methods and layouts train what one device trains."""

import pytest
from example_runs import losses_of

RUNS = (
    ("zero", 4, ("1",)),
    ("zero", 4, ("2",)),
    ("zero", 4, ("3", "2")),  # two replicas of two shards; one device has one
    ("tensor", 4, ("llama",)),
    ("context", 2, ("all-gather",)),
    ("context", 2, ("ulysses",)),
    ("expert", 2, ()),
    ("resume", 8, ()),
    ("three_d", 16, ()),
)


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_an_example_trains_what_one_device_trains(run):
    many, one = losses_of(RUNS)[run]
    assert len(many) == len(one) == 20 and one[-1] < one[0]
    assert many == pytest.approx(one, rel=2e-5)  # float32, printed with six decimals
