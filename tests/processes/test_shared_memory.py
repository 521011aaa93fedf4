"""Eight ranks start in the shared memory of a Docker container."""

import own_machine
import pytest

TRAIN = "-m minipar.train --layers 1 --hidden 16 --heads 2 --seq-len 16 --global-batch 8 --steps 1".split()


@pytest.mark.skipif(own_machine.why_not() is not None, reason="no mounts of one's own here")
def test_eight_ranks_train_in_dockers_shared_memory(tmp_path):
    result, _ = own_machine.run_alone(tmp_path, 8, TRAIN, "size=64m")
    assert (result.returncode, result.stderr) == (0, "")
