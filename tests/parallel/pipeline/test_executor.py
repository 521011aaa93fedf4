"""Claims about the pipeline executed: whatever the schedule, the gradients have the bits of one device that accumulates
the same microbatches in order; what is held and what is sent is what the schedule says.
"""

import random

import pytest
from pipeline_cases import B, H, T, differing, execute, execute_rank, one_device

from minipar.comm import run_local
from minipar.memory import MemoryLedger
from minipar.parallel.pipeline.actions import Action, Schedule, simulate
from minipar.parallel.pipeline.check import check, lower
from minipar.parallel.pipeline.schedules import make
from visualize.schedule_file import load_csv, save_csv


# Fewer microbatches than ranks, more, as many, not a multiple; as many layers as stages, a few more, many more.
@pytest.mark.parametrize(
    ("name", "p", "m", "layers", "v"),
    [
        ("naive", 3, 2, 5, None),
        ("gpipe", 1, 4, 2, None),
        ("gpipe", 4, 6, 5, None),
        ("1f1b", 2, 1, 3, None),
        ("1f1b", 3, 7, 4, None),
        ("1f1b", 4, 4, 5, None),
        ("1f1b", 8, 9, 8, None),
        ("zb-h1", 4, 3, 7, None),
        ("zb-h1", 8, 9, 8, None),
        ("zb-h2", 4, 6, 5, None),
        ("zbv", 1, 4, 3, None),
        ("zbv", 4, 9, 8, None),
        ("dualpipev", 3, 6, 6, None),
        ("interleaved-1f1b", 2, 6, 7, 3),
        ("interleaved-1f1b", 4, 4, 9, 2),
    ],
)
def test_every_gradient_has_one_devices_bits(name, p, m, layers, v):
    recompute = (p + m) % 2 == 0
    schedule = make(name, p, m, v)
    runs = execute(schedule, layers, recompute=recompute)
    assert differing(runs, one_device(layers, m, recompute)) == []

    held = [run.peak_alive for run in runs]
    assert held == simulate(schedule).peak_activations
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


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "dualpipev"])
@pytest.mark.parametrize(("recompute", "dropout"), [(False, 0.0), (True, 0.1)])
def test_recompute_and_dropout_change_what_they_should(name, recompute, dropout):
    runs = execute(make(name, 2, 4), 5, recompute=recompute, dropout=dropout)
    assert differing(runs, one_device(5, 4, recompute, dropout)) == []
    assert differing(runs, one_device(5, 4, not recompute, dropout)) == []  # recompute changes no bit either
    assert differing(runs, one_device(5, 4, recompute, 0.1 - dropout)) != []


@pytest.mark.parametrize(("name", "counts"), [("gpipe", [4, 1, 1, 1]), ("zb-h2", [1, 3, 1, 2]), ("1f1b", [2, 2, 2, 1])])
def test_stages_may_be_cut_anywhere(name, counts):
    """Even to the embedding or the head alone."""
    assert differing(execute(make(name, 4, 3), 5, counts=counts), one_device(5, 3)) == []


@pytest.mark.parametrize(("name", "recompute"), [("gpipe", False), ("1f1b", True), ("1f1b", False), ("naive", True)])
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
        assert run.peak_alive == 7
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


# -- schedules from elsewhere ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "messages"), [("zbv", False), ("zb-h2", True), ("dualpipev", True)])
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
    for _ in range(6):
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
