"""Claims about the sizes of data parallelism's buckets: both bounds that a user gives are kept."""

import pytest
from training import small_gpt

from minipar.comm import serial
from minipar.parallel.ddp import DistributedDataParallel

LARGE = 2**30


@pytest.mark.parametrize(
    ("options", "several_in_first", "buckets"),
    [
        ({"bucket_bytes": LARGE, "first_bucket_bytes": LARGE}, True, 1),
        ({"bucket_bytes": LARGE, "first_bucket_bytes": 1}, False, 2),
        ({"bucket_bytes": 1, "first_bucket_bytes": LARGE}, True, 1),
        ({"bucket_bytes": 1, "first_bucket_bytes": 1}, False, len(small_gpt().parameters())),
    ],
)
def test_the_first_bucket_to_travel_has_a_size_of_its_own(options, several_in_first, buckets):
    """The first to travel has the last parameters; a bucket is closed by the parameter that fills it."""
    model = small_gpt()
    last = model.parameters()[-1]
    ddp = DistributedDataParallel(model, serial(), **options)
    assert len(ddp.buckets) == buckets
    assert ddp.buckets[0].parameters[-1] is last and (len(ddp.buckets[0].parameters) > 1) == several_in_first
