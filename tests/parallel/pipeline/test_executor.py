"""Claims about the pipeline executed: whatever the schedule, the gradients have the bits of one device that accumulates
the same microbatches in order; what is held and what is sent is what the schedule says.
"""

import gc
import itertools
import random
import weakref

import numpy as np
import pytest
from launcher import run_mpi
from pipeline_cases import SCALE, TEXT, B, H, T, differing, execute, execute_rank, gradients, keys, one_device

from minipar.comm import run_local
from minipar.errors import UsageError
from minipar.memory import MemoryLedger
from minipar.parallel.pipeline.actions import Action, Schedule, parse_action, simulate
from minipar.parallel.pipeline.check import check, lower
from minipar.parallel.pipeline.schedule_file import load_csv, save_csv
from minipar.parallel.pipeline.schedules import make
from minipar.parallel.pipeline.stage import PipelineExecutor, PipelineStage

pytestmark = pytest.mark.sampled(3)

# Schedule, ranks, microbatches, layers, stages per rank: fewer microbatches than ranks, more, as many, not a multiple;
# as many layers as stages, a few more (uneven stages), many more.
CASES = [
    *[(name, p, m, layers, None) for name in ("naive", "gpipe", "1f1b", "zb-h1", "zb-h2")
      for p, m, layers in ((1, 1, 2), (1, 4, 2), (2, 1, 3), (2, 5, 4), (3, 2, 5), (3, 7, 4), (4, 3, 7), (4, 6, 5),
                           (8, 4, 11), (8, 9, 8))],
    *[("zbv", p, m, layers, None)
      for p, m, layers in ((1, 1, 2), (1, 4, 3), (2, 1, 4), (2, 5, 7), (3, 2, 6), (3, 7, 8), (4, 6, 9), (4, 9, 8),
                           (8, 5, 17))],
    *[("dualpipev", p, m, layers, None)
      for p, m, layers in ((1, 2, 2), (1, 5, 3), (2, 4, 4), (2, 7, 7), (3, 6, 6), (4, 9, 9), (8, 16, 17))],
    *[("interleaved-1f1b", p, m, layers, v)
      for p, m, layers, v in ((1, 3, 5, 3), (2, 2, 4, 1), (2, 6, 7, 3), (3, 3, 8, 2), (4, 4, 9, 2), (4, 8, 12, 3),
                              (8, 8, 17, 2))],
    *[("1f1b", 4, m, 5, None) for m in (1, 2, 4, 5, 8, 11, 13, 16)],
]  # fmt: skip


def name_of(case):
    return "-".join(str(part) for part in case if part is not None)


@pytest.mark.sampled(13)
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_every_gradient_has_one_devices_bits(case):
    name, p, m, layers, v = case
    recompute = (p + m) % 2 == 0
    schedule = make(name, p, m, v)
    runs = execute(schedule, layers, recompute=recompute)
    assert differing(runs, one_device(layers, m, recompute)) == []

    held = [run.executor.peak_alive for run in runs]
    assert held == simulate(schedule).peak_activations == check(schedule).peak_activations
    if name in ("gpipe", "1f1b"):
        assert held == [m if name == "gpipe" else min(m, p - r) for r in range(p)]

    # B T h elements for each microbatch, direction and cut between ranks, and nothing else.
    message = B * T * H * 8
    cuts = [[(s, d) for s, home in schedule.home.items() if home == r for d in (-1, 1)] for r in range(p)]
    sends = [sum(0 <= s + d < schedule.stages and schedule.home[s + d] != r for s, d in cuts[r]) for r in range(p)]
    if name not in ("zbv", "dualpipev", "interleaved-1f1b"):
        assert sends == [(r > 0) + (r < p - 1) for r in range(p)]
    for run, count in zip(runs, sends, strict=True):
        traffic = run.comm.traffic
        assert (traffic.messages(), traffic.bytes()) == (count * m, count * m * message)
        assert traffic.bytes("send") == traffic.bytes()
    assert_nothing_is_left(runs)


def assert_nothing_is_left(runs):
    assert not any(stage.alive for run in runs for stage in run.stages.values())
    assert runs[0].comm.transport.world.unmatched == {}  # no message was sent that nobody received


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zbv", "dualpipev", "interleaved-1f1b"])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_recompute_and_dropout_in_every_combination(name, recompute, dropout):
    runs = execute(make(name, 2, 4), 5, recompute=recompute, dropout=dropout)
    assert differing(runs, one_device(5, 4, recompute, dropout)) == []
    assert differing(runs, one_device(5, 4, not recompute, dropout)) == []  # recompute changes no bit either
    assert differing(runs, one_device(5, 4, recompute, 0.1 - dropout)) != []


@pytest.mark.sampled(1)
@pytest.mark.parametrize("counts", [[4, 1, 1, 1], [1, 1, 4, 1], [2, 2, 2, 1], [1, 3, 1, 2]])
@pytest.mark.parametrize("name", ["gpipe", "zb-h2"])
def test_stages_may_be_cut_anywhere(name, counts):
    """Even to the embedding or the head alone."""
    assert differing(execute(make(name, 4, 3), 5, counts=counts), one_device(5, 3)) == []


def test_the_tied_embedding_collects_gradients_where_they_arise():
    runs = execute(make("1f1b", 3, 2), 3)
    have = [[name for name in ("wte.weight", "wte.weight tied 0") if run.gradients[name] is not None] for run in runs]
    assert have == [["wte.weight"], [], ["wte.weight tied 0"]]
    runs = execute(make("zbv", 2, 2), 4)  # both ends of the model on rank 0
    assert [run.gradients["wte.weight tied 0"] is not None for run in runs] == [True, False]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "zbv", "dualpipev"])
def test_each_cut_carries_an_activation_and_a_gradient(name):
    m = 6 if name == "dualpipev" else 4
    schedule = make(name, 3, m)

    def rank(comm):
        sent, isend = [], comm.isend

        def spy(array, dest, tag=0):
            sent.append((array.shape, array.dtype, comm.rank, dest, tag))
            return isend(array, dest, tag)

        comm.isend = spy
        execute_rank(comm, schedule, 6)
        return sent

    sent = list(itertools.chain(*run_local(3, rank)))
    assert {(shape, dtype) for shape, dtype, *_ in sent} == {((B, T, H), np.dtype("float64"))}
    assert len({tag for *_, tag in sent}) == len(sent)  # no two messages of a step can be taken for each other
    homes = [schedule.home[s] for s in range(schedule.stages)]
    expected = [(a, b) for pair in itertools.pairwise(homes) for a, b in (pair, pair[::-1]) if a != b] * m
    assert sorted(sent_pair[2:4] for sent_pair in sent) == sorted(expected)


class NotesGraphs(PipelineStage):
    """Weak references to each forward's result and its graph."""

    def __init__(self, parts):
        super().__init__(parts)
        self.graphs = {}

    def forward(self, microbatch, x, finish=None):
        def note(y):
            y = y if finish is None else finish(y)
            self.graphs[microbatch] = weakref.ref(y), weakref.ref(y.node)
            return y

        return super().forward(microbatch, x, note)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-h2", "zbv", "dualpipev"])
def test_activations_are_freed_when_their_backward_is_done(name):
    """At once, with no help from the garbage collector: a later action never sees the graph of an earlier backward."""
    schedule = make(name, 2, 6)

    def rank(comm):
        done, checked = set(), 0

        def watch(executor, action):
            nonlocal checked
            for stage, microbatch in done:
                checked += 1
                graph = executor.stages[stage].graphs[microbatch]
                assert all(ref() is None for ref in graph), f"{stage}, {microbatch} lives on at {action}"
            if action.kind in ("B", "I"):
                done.add((action.stage, action.microbatch))

        executed = execute_rank(comm, schedule, 5, stage_type=NotesGraphs, watch=watch)
        assert checked > 6 and len(done) == 6 * len(executed.stages)

    gc.disable()
    try:
        run_local(2, rank)
    finally:
        gc.enable()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "naive"])
def test_the_ledger_counts_the_microbatches_that_are_alive(name, recompute):
    """In bytes, on the middle ranks of equal stages. Results that are still being sent come on top, whole messages."""
    p, m, message = 4, 6, B * T * H * 8
    peak = {"gpipe": lambda r: m, "1f1b": lambda r: min(m, p - r), "naive": lambda r: 1}[name]

    def rank(comm):
        ledger, seen = MemoryLedger(), []

        def watch(executor, action):
            seen.append((sum(len(stage.alive) for stage in executor.stages.values()), ledger.held["activations"]))

        with ledger.recording():
            execute_rank(comm, make(name, p, m), 6, counts=[2, 2, 2, 2], recompute=recompute, watch=watch)
        return seen, ledger.held["activations"]

    ones = set()
    for r, (seen, left) in enumerate(run_local(p, rank)):
        assert left == 0 and max(alive for alive, _ in seen) == peak(r)
        if 0 < r < p - 1:
            one = min(held for alive, held in seen if alive == 1)
            ones.add(one)
            for alive, held in seen:
                assert held >= alive * one and (held - alive * one) % message == 0
                assert held <= alive * one + 2 * m * message
    assert len(ones) == 1 and (ones.pop() < 10 * message) == recompute  # a block's input, or all that is in it


def test_computations_happen_in_the_lists_order_inside_around():
    """Which is where the trainer puts dropout keys, gradient synchronization, and the trace."""
    schedule = make("zbv", 2, 3)

    def rank(comm):
        seen = []
        execute_rank(comm, schedule, 5, watch=lambda executor, action: seen.append(action))
        return tuple(seen)

    assert tuple(run_local(2, rank)) == schedule.ranks


def test_a_pairs_forward_travels_while_its_backward_computes():
    """Every rank sends the F's result after F and before B, for each pair whose F has a message; the checker's list,
    which has to agree with sends that block, sends both results after the pair.
    """
    schedule = make("dualpipev", 3, 7)

    def rank(comm):
        seen, isend = [], comm.isend

        def spy(array, dest, tag=0):
            seen.append(f"to {dest}")
            return isend(array, dest, tag)

        comm.isend = spy
        run = execute_rank(comm, schedule, 6, watch=lambda executor, action: seen.append(action))
        assert run.executor.peak_alive == 7
        return seen

    count = 0
    for r, seen in enumerate(run_local(3, rank)):
        assert [each for each in seen if isinstance(each, Action)] == [a for home, a in schedule if home == r]
        for pair in (action for action in schedule.ranks[r] if action.pair):
            forward, backward = pair.halves
            peer = schedule.home.get(forward.stage + 1, r)
            expected = [forward, f"to {peer}", backward] if peer != r else [forward, backward]
            begin = seen.index(forward)
            assert seen[begin : begin + len(expected)] == expected
            count += peer != r
    assert count > 10


def test_a_second_step_adds_to_the_gradients_of_the_first():
    schedule = make("zb-h1", 2, 2)

    def rank(comm):
        run = execute_rank(comm, schedule, 3)
        first = {name: None if g is None else g.copy() for name, g in run.gradients.items()}
        model = run.model
        run.executor.run(
            lambda i: TEXT[i, :, :T],
            lambda i, y: model.criterion(y, TEXT[i, :, 1:]),
            float(SCALE),
            lambda a: keys(a.microbatch),
        )
        for name, g in gradients(model).items():
            assert (g is None) == (first[name] is None)
            assert g is None or np.abs(g - 2 * first[name]).max() <= 1e-14 * np.abs(g).max()

    run_local(2, rank)


# -- schedules from elsewhere ------------------------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["1f1b", "zb-h2", "zbv", "interleaved-1f1b", "dualpipev"])
@pytest.mark.parametrize("messages", [False, True], ids=["computations only", "with messages"])
def test_a_schedule_from_a_csv_runs(name, messages, tmp_path):
    m = 6 if name == "dualpipev" else 3
    schedule = make(name, 3, m)
    save_csv(lower(schedule) if messages else schedule, tmp_path / "mine.csv")
    loaded = load_csv(tmp_path / "mine.csv")
    check(loaded)
    runs = execute(loaded, 7)
    assert differing(runs, one_device(7, m)) == []
    assert_nothing_is_left(runs)


def test_any_order_that_passes_the_checker_gives_the_same_bits():
    """Stages on ranks at random, more than one per rank, whole and halved backwards in one schedule."""
    rng = random.Random(5)
    for _ in range(12):
        stages, m = rng.randint(2, 5), rng.randint(1, 4)
        homes = [rng.randrange(3) for _ in range(stages)]
        homes = [sorted(set(homes)).index(home) for home in homes]
        halved = [rng.random() < 0.5 for _ in range(stages)]
        left = {Action(s, k, i) for s in range(stages) for k in ("FIW" if halved[s] else "FB") for i in range(m)}
        needs = Schedule.of("random", [sorted(left)]).needs
        rows = [[] for _ in range(max(homes) + 1)]
        while left:
            free = [a for a in sorted(left) if not left.intersection(needs(a))]
            a = rng.choice([a for a in free if Action(a.stage, a.kind, a.microbatch - 1) not in left])
            left.remove(a)
            rows[homes[a.stage]].append(a)
        schedule = Schedule.of("random", rows)
        check(schedule)
        runs = execute(schedule, 5)
        assert differing(runs, one_device(5, m)) == [], rows
        assert_nothing_is_left(runs)


def test_a_list_that_deadlocks_elsewhere_still_runs_here():
    """Sends never block here. 1F1B's steady state with both neighbours sending first; the checker refuses it, for MPI's
    blocking sends."""
    rows = (
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
    )
    schedule = Schedule.of("facing", [[parse_action(cell) for cell in row.split()] for row in rows])
    with pytest.raises(UsageError, match="deadlocks"):
        check(schedule)
    assert differing(execute(schedule, 3), one_device(3, 2)) == []


@pytest.mark.long
def test_over_mpi_too():
    script = """
from minipar.comm import main
from minipar.parallel.pipeline.schedules import make
from pipeline_cases import execute_rank, one_device

def program(comm):
    for name, m, layers in (("1f1b", 5, 5), ("interleaved-1f1b", 4, 9), ("zb-h1", 3, 6), ("zbv", 6, 8),
                            ("dualpipev", 8, 8)):
        run = execute_rank(comm, make(name, comm.size, m), layers, recompute=name == "1f1b")
        expected = one_device(layers, m)
        mine = {leaf: g for leaf, g in run.gradients.items() if g is not None}
        wrong = [leaf for leaf, g in mine.items() if g.tobytes() != expected[leaf].tobytes()]
        assert not wrong, (name, comm.rank, wrong)
        names = comm.all_gather_bytes(",".join(mine).encode())
        assert sorted(",".join(n.decode() for n in names).split(",")) == sorted(expected), name
    if comm.rank == 0:
        print("every claim holds")

main(program)
"""
    result = run_mpi(4, script)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "every claim holds\n"


# -- mistakes, made on purpose -----------------------------------------------------------------------------------------


class ForgetsOneW(PipelineStage):
    def backward_weight(self, microbatch):
        if microbatch != 1:
            super().backward_weight(microbatch)


class MixesUpMicrobatches(PipelineStage):
    """Several are under way, and the first backward takes the last one's activations."""

    def backward(self, microbatch, gradient):
        return super().backward({0: 2, 2: 0}.get(microbatch, microbatch), gradient)


@pytest.mark.parametrize("name, broken", [("zb-h1", ForgetsOneW), ("gpipe", MixesUpMicrobatches)])
def test_a_forgotten_or_mixed_up_microbatch_is_caught(name, broken):
    expected, schedule = one_device(4, 3), make(name, 2, 3)
    assert differing(execute(schedule, 4), expected) == []
    wrong = differing(execute(schedule, 4, stage_type=broken), expected)
    assert {"h.0.mlp.c_fc.weight", "h.3.mlp.c_fc.weight"} <= set(wrong)


def test_gradients_added_in_another_order_are_caught():
    """GPipe whose backwards run from the last microbatch to the first, as the paper draws it: a valid schedule, and
    equal within rounding, but not the same sum.
    """
    expected = one_device(3, 4)
    reverse = Schedule.of(
        "gpipe-reversed",
        [[Action(r, "F", i) for i in range(4)] + [Action(r, "B", i) for i in range(3, -1, -1)] for r in (0, 1)],
    )
    check(reverse)
    runs = execute(reverse, 3)
    assert len(differing(runs, expected)) > len(expected) / 2
    for name, gradient in expected.items():
        (found,) = [run.gradients[name] for run in runs if run.gradients[name] is not None]
        np.testing.assert_allclose(found, gradient, rtol=1e-9, atol=1e-15)


class Sized:
    """A schedule of so many messages in a step; whoever asks for its actions has accepted it."""

    name = "sized"

    def __init__(self, stages, microbatches):
        self.stages, self.microbatches = stages, microbatches

    def unpaired(self):
        raise KeyError("accepted")


def test_a_step_has_at_most_as_many_messages_as_there_are_tags():
    """The tags of users are 0 to 65,535, of which the tied embedding has the first two."""

    def executor(*sizes):
        return PipelineExecutor(Sized(*sizes), None, {}, (), None)

    with pytest.raises(KeyError, match="accepted"):
        executor(1, 32767)
    with pytest.raises(
        UsageError, match=r"2\*stages\*microbatches = 2\*2\*16384 messages .* than the 65534 tags there are"
    ):
        executor(2, 16384)
