"""Claims about docs/examples: started by mpirun, each trains what one device trains."""

import pytest
from example_runs import losses_of_processes
from ladder import LADDER

BOUNDS = {after: 1e-9 for _, after, _, _ in LADDER} | {"expert": 1e-9, "resume": 2e-5, "stages": 2e-5}  # float64 or 32
RANKS = {after: ranks for _, after, ranks, _ in LADDER} | {"expert": 2, "resume": 8, "stages": 16}


def test_an_example_trains_what_one_device_trains():
    alone = losses_of_processes(1, ["serial", "expert", "resume", "stages"])
    for size in set(RANKS.values()):
        for name, many in losses_of_processes(size, [name for name, ranks in RANKS.items() if ranks == size]).items():
            one = alone.get(name, alone["serial"])
            assert len(many) == 20 and one[-1] < one[0] and many == pytest.approx(one, rel=BOUNDS[name]), name
