"""Messages that come late, in any order, change no result; one that is lost is an error that names it."""

import re
import sys

import numpy as np
import pytest
from combinations import TEXT, Combination
from training import bits, reports, trainer_for
from transports import OURS, Late, collective, messages_of, run_lossy

from minipar.comm import Communicator, run_local
from minipar.errors import CommunicationError


@pytest.fixture
def threads_change_often():
    """Python switches between threads after 20 us instead of 5 ms."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(20e-6)
    yield
    sys.setswitchinterval(usual)


def run_late(ranks, fn, *args):
    """`run_local` with delayed messages. Returns the ranks' values, and how many messages overtook others."""
    overtaken = []

    def rank(comm):
        late = Late(comm.transport, seed=0)
        result = fn(Communicator(late), *args)
        late.close()
        overtaken.append(late.outbox.overtaken)
        return result

    return run_local(ranks, rank), sum(overtaken)


# ---- late messages ---------------------------------------------------------------------------------------------------


def every_collective(comm):
    """The bits of each operation and algorithm, and of operations on three groups that are under way together."""
    results = []
    for op, algorithm in OURS:
        for n in (0, comm.size - 1, 257, 1001):
            results.append((op, algorithm, n, np.asarray(collective(comm, op, algorithm, n), float).tobytes()))
    results.append(comm.all_gather_bytes(b"x" * comm.rank))
    groups = [comm, comm.new_group(range(comm.size), "all"), comm.new_group(range(comm.rank % 2, comm.size, 2), "odd")]
    works = {}
    for op, algorithm in OURS[:-1]:  # a barrier is not asynchronous
        for turn in range(3):
            i = (comm.rank + turn) % 3  # each rank begins with another group
            works[op, algorithm, i] = collective(groups[i], op, algorithm, 101, async_op=True)
    return results + [works[key].wait().tobytes() for key in sorted(works)]


@pytest.mark.parametrize("p", [2, 3, 5])
def test_collectives_have_the_same_bits_however_late(p, threads_change_often):
    expected = run_local(p, every_collective)
    results, overtaken = run_late(p, every_collective)
    assert results == expected and overtaken > 0


LAYOUTS = {
    "ZeRO 3": Combination((3, 1, 1), zero=3, microbatches=2, recompute=True),
    "tp": Combination((1, 2, 1), sequence=True),
    "interleaved": Combination((1, 1, 2), "interleaved-1f1b", microbatches=4, dropout=True),
    "3D, ZeRO 1": Combination((2, 2, 2), "1f1b", sequence=True, microbatches=2, zero=1, clip=True),
    "3D, ZeRO 3": Combination((2, 2, 2), "zbv", microbatches=2, zero=3),
}


def train(comm, combination):
    """Return what this rank reports and holds after two steps, and after gathering the whole parameters."""
    trainer = trainer_for(combination.config(), TEXT, comm)
    results = list(trainer.train())
    held = {name: p.data for name, p in trainer.model.named_parameters()}
    return reports(results), bits(held), bits(trainer.state_dict())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_has_the_same_bits_however_late(layout, threads_change_often):
    combination = LAYOUTS[layout]
    expected = run_local(combination.ranks, train, combination)
    results, overtaken = run_late(combination.ranks, train, combination)
    assert results == expected
    assert overtaken > 0 or combination.ranks == 2


# ---- a lost message --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [2, 3])
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


LAYOUT = Combination((2, 2, 2), "1f1b", sequence=True, microbatches=2, zero=1)
RANKS_APART = {"tp": 1, "dp": 2, "pp": 4}  # neighbours of an axis


def one_step(comm):
    trainer_for(LAYOUT.config(), TEXT, comm).step(0)


@pytest.fixture(scope="module")
def messages():
    return messages_of(LAYOUT.ranks, one_step)


@pytest.mark.parametrize("axis", RANKS_APART)
def test_a_lost_message_of_training_names_its_axis(axis, messages):
    """The axis is in the name of the group: world/2.dp4."""
    on_axis = [lost for lost in messages if lost[0].split(".")[-1].rstrip("0123456789") == axis]
    assert len(on_axis) > 10
    lost = on_axis[len(on_axis) // 2]
    _, source, dest, _ = lost
    with pytest.raises(CommunicationError) as caught:
        run_lossy(LAYOUT.ranks, one_step, lost)
    first = int(lost[0].rpartition(axis)[2])
    receiver = rf"rank {first + dest * RANKS_APART[axis]} \({axis} rank {dest}\)"
    sender = f"rank {first + source * RANKS_APART[axis]} "
    assert re.search(rf"{receiver}, [\w ]+: .*{sender}", str(caught.value)), lost
