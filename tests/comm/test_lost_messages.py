"""A message that the network loses: the job ends, and the error names the operation and the rank that it came from."""

import random
import re

import pytest
from combinations import TEXT, Combination
from launcher import run_mpi
from training import trainer_for
from transports import OURS, Lossy, collective, messages_of, run_lossy

from minipar.comm import run_local
from minipar.comm.communicator import Communicator
from minipar.errors import CommunicationError


@pytest.mark.sampled(4)
@pytest.mark.parametrize("p", [2, 3, 5])
@pytest.mark.parametrize(("op", "algorithm"), OURS)
def test_a_lost_message_of_a_collective_is_named(p, op, algorithm):
    """Any of its messages, where all ranks then wait."""
    messages = messages_of(p, collective, op, algorithm, 257)
    assert len(messages) >= p - 1
    for lost in messages:
        _, source, dest, _ = lost
        with pytest.raises(CommunicationError) as caught:
            run_lossy(p, collective, lost, op, algorithm, 257)
        assert re.search(rf"rank {dest}, {op} {algorithm}: .*rank {source} ", str(caught.value)), lost


@pytest.mark.parametrize(
    ("op", "algorithm", "last"),  # the last message from rank 0 to rank 1
    [("all_reduce", "ring", 4), ("all_to_all", "pairwise", 1), ("barrier", "dissemination", 1)],
)
def test_a_lost_message_ends_the_wait_at_the_timeout(op, algorithm, last, monkeypatch):
    """As over MPI, where a rank does not know that all others wait too."""
    monkeypatch.setenv("MINIPAR_TIMEOUT", "0.5")
    lost = ("world", 0, 1, last)

    def program(comm):
        try:
            collective(Communicator(Lossy(comm.transport, lost, silent=True)), op, algorithm, 257)
        except CommunicationError as error:
            return str(error)

    error = run_local(3, program)[1]
    assert error is not None and error.endswith("nothing for 0.5 s (MINIPAR_TIMEOUT)")
    assert error.startswith(f"rank 1, {op} {algorithm}: receive from rank 0 ")


def test_a_lost_message_over_mpi_ends_the_job():
    script = """
import numpy as np
from transports import Lossy
from minipar.comm import main
from minipar.comm.communicator import Communicator
def program(comm):
    lossy = Communicator(Lossy(comm.transport, ("world", 0, 1, 2)))
    lossy.all_reduce(np.ones(10), algorithm="ring")
main(program)
"""
    result = run_mpi(2, script, env={"MINIPAR_TIMEOUT": "1"})
    assert result.returncode != 0
    assert "rank 1, all_reduce ring: receive from rank 0 (40 bytes, " in result.stderr
    assert "nothing for 1 s (MINIPAR_TIMEOUT)" in result.stderr


# ---- training --------------------------------------------------------------------------------------------------------

LAYOUT = Combination((2, 2, 2), "1f1b", sequence=True, microbatches=2, zero=1)


def one_step(comm):
    trainer_for(LAYOUT.config(), TEXT, comm).step(0)


@pytest.fixture(scope="module")
def messages():
    """The messages of a step of training, in an order without meaning."""
    found = messages_of(LAYOUT.ranks, one_step)
    return random.Random(0).sample(found, len(found))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("axis", ["dp", "tp", "pp"])
def test_a_lost_message_of_training_names_its_axis(axis, messages):
    """The axis is in the name of the group: world/2.dp4."""
    on_axis = [lost for lost in messages if lost[0].split(".")[-1].rstrip("0123456789") == axis]
    assert len(on_axis) > 10
    for lost in on_axis[:3]:
        _, source, dest, _ = lost
        with pytest.raises(CommunicationError) as caught:
            run_lossy(LAYOUT.ranks, one_step, lost)
        first, stride = int(lost[0].rpartition(axis)[2]), {"tp": 1, "dp": 2, "pp": 4}[axis]
        receiver, sender = rf"rank {first + dest * stride} \({axis} rank {dest}\)", f"rank {first + source * stride} "
        assert re.search(rf"{receiver}, [\w ]+: .*{sender}", str(caught.value)), lost
