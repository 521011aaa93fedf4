"""Claims about the pipeline executed: whatever the schedule, the gradients have the bits of one device that accumulates
the same microbatches in order; what is held and what is sent is what the schedule says.
"""

import gc
import itertools
import random
import weakref
from contextlib import contextmanager
from functools import cache

import numpy as np
import pytest
from launcher import run_mpi

from minipar.comm import run_local
from minipar.errors import UsageError
from minipar.memory import MemoryLedger
from minipar.nn import GPT, DropoutKeys, GPTConfig, dropping
from minipar.parallel.pipeline import (
    Action,
    PipelineExecutor,
    PipelineStage,
    Schedule,
    balanced_cuts,
    check,
    cut,
    load_csv,
    lower,
    make,
    parse_action,
    part_costs,
    save_csv,
    simulate,
)

B, T, H, V = 2, 5, 8, 13  # samples per microbatch, sequence, hidden, vocabulary: no two sizes alike
TEXT = np.random.Generator(np.random.Philox(11)).integers(0, V, (16, B, T + 1))
SCALE = np.array(0.1)  # what the loss's gradient begins with


def gpt(layers, recompute=False, dropout=0.1):
    config = GPTConfig(vocab_size=V, n_positions=T, n_embd=H, n_layer=layers, n_head=2)
    return GPT(config, dtype="float64", recompute=recompute, dropout=dropout)


def keys(microbatch):
    """Each sample has dropout masks of its own, wherever it is computed."""
    return dropping(DropoutKeys(1, 0, [B * microbatch, B * microbatch + 1]))


def gradients(model):
    """Every leaf's gradient: the parameters', and the tied head's own."""
    leaves = {}
    for name, p in model.named_parameters():
        leaves[name] = p.grad
        for i, leaf in enumerate(p.ties):
            leaves[f"{name} tied {i}"] = leaf.grad
    return leaves


@cache
def one_device(layers, m, recompute=False, dropout=0.1):
    model = gpt(layers, recompute, dropout)
    for i in range(m):
        with keys(i):
            loss = model.loss_sum(TEXT[i, :, :T], TEXT[i, :, 1:])
        loss.backward(SCALE)
    return gradients(model)


class Run:
    """What one rank of `execute` leaves behind."""

    def __init__(self, comm, model, stages, executor):
        self.comm, self.model, self.stages, self.executor = comm, model, stages, executor
        self.gradients = gradients(model)


def execute_rank(
    comm, schedule, layers, counts=None, recompute=False, dropout=0.1, stage_type=PipelineStage, watch=None
):
    """One rank's part of a step. `counts`: parts per stage, else balanced; `watch(executor, action)` is called as each
    action begins.
    """
    model = gpt(layers, recompute, dropout)
    runs = cut(model, counts or balanced_cuts(part_costs(model, T), schedule.stages))
    stages = {s: stage_type(runs[s]) for s, rank in schedule.home.items() if rank == comm.rank}
    executor = PipelineExecutor(schedule, comm, stages, (B, T, H), np.dtype("float64"))

    @contextmanager
    def around(action):
        if watch is not None:
            watch(executor, action)
        with keys(action.microbatch):
            yield

    executor.run(
        tokens=lambda i: TEXT[i, :, :T].copy(),
        loss=lambda i, logits: model.criterion(logits, TEXT[i, :, 1:]),
        loss_gradient=lambda i: SCALE,
        around=around,
    )
    return Run(comm, model, stages, executor)


def execute(schedule, layers, **options):
    return run_local(len(schedule.ranks), execute_rank, schedule, layers, **options)


def differing(runs, expected):
    """The leaves whose gradient is not on exactly one rank, or has other bits than one device's."""
    wrong = []
    for name, gradient in expected.items():
        found = [run.gradients[name] for run in runs if run.gradients[name] is not None]
        if len(found) != 1 or found[0].tobytes() != gradient.tobytes():
            wrong.append(name)
    return wrong


# Schedule, ranks, microbatches, layers, stages per rank: fewer microbatches than ranks, more, as many, not a multiple;
# as many layers as stages, a few more (uneven stages), many more.
CASES = [
    *[(name, p, m, layers, None) for name in ("naive", "gpipe", "1f1b", "zb-h1", "zb-h2")
      for p, m, layers in ((1, 1, 2), (1, 4, 2), (2, 1, 3), (2, 5, 4), (3, 2, 5), (3, 7, 4), (4, 3, 7), (4, 6, 5),
                           (8, 4, 11), (8, 9, 8))],
    *[("zbv", p, m, layers, None)
      for p, m, layers in ((1, 1, 2), (1, 4, 3), (2, 1, 4), (2, 5, 7), (3, 2, 6), (3, 7, 8), (4, 6, 9), (4, 9, 8),
                           (8, 5, 17))],
    *[("interleaved-1f1b", p, m, layers, v)
      for p, m, layers, v in ((1, 3, 5, 3), (2, 2, 4, 1), (2, 6, 7, 3), (3, 3, 8, 2), (4, 4, 9, 2), (4, 8, 12, 3),
                              (8, 8, 17, 2))],
    *[("1f1b", 4, m, 5, None) for m in (1, 2, 4, 5, 8, 11, 13, 16)],
]  # fmt: skip


def name_of(case):
    return "-".join(str(part) for part in case if part is not None)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_every_gradient_has_one_devices_bits_and_the_run_holds_and_sends_what_the_schedule_says(case):
    name, p, m, layers, v = case
    recompute = (p + m) % 2 == 0
    schedule = make(name, p, m, v)
    runs = execute(schedule, layers, recompute=recompute)
    assert differing(runs, one_device(layers, m, recompute)) == []

    held = [run.executor.peak_alive for run in runs]
    assert held == simulate(schedule).peak_activations == check(schedule).peak_activations
    if name in ("gpipe", "1f1b"):
        assert held == [m if name == "gpipe" else min(m, p - r) for r in range(p)]

    # B T h numbers for each microbatch, direction and cut between ranks, and nothing else.
    message = B * T * H * 8
    cuts = [[(s, d) for s, home in schedule.home.items() if home == r for d in (-1, 1)] for r in range(p)]
    sends = [sum(0 <= s + d < schedule.stages and schedule.home[s + d] != r for s, d in cuts[r]) for r in range(p)]
    if name not in ("zbv", "interleaved-1f1b"):
        assert sends == [(r > 0) + (r < p - 1) for r in range(p)]
    for run, count in zip(runs, sends, strict=True):
        traffic = run.comm.traffic
        assert (traffic.messages(), traffic.bytes()) == (count * m, count * m * message)
        assert traffic.bytes("send") == traffic.bytes()
    assert_nothing_is_left(runs)


def assert_nothing_is_left(runs):
    for run in runs:
        executor = run.executor
        assert not executor._arrived and not executor._leaving and not executor._sent
        for stage in run.stages.values():
            assert stage.alive == 0 and not stage._saved and not stage._deferred
    assert runs[0].comm.transport.world.unmatched == {}  # no message was sent that nobody received


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zbv", "interleaved-1f1b"])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_recompute_and_dropout_in_every_combination(name, recompute, dropout):
    runs = execute(make(name, 2, 4), 5, recompute=recompute, dropout=dropout)
    assert differing(runs, one_device(5, 4, recompute, dropout)) == []
    assert differing(runs, one_device(5, 4, not recompute, dropout)) == []  # recompute changes no bit either
    assert differing(runs, one_device(5, 4, recompute, 0.1 - dropout)) != []


@pytest.mark.parametrize("counts", [[4, 1, 1, 1], [1, 1, 4, 1], [2, 2, 2, 1], [1, 3, 1, 2]])
@pytest.mark.parametrize("name", ["gpipe", "zb-h2"])
def test_stages_may_be_cut_anywhere_even_to_the_embedding_or_the_head_alone(name, counts):
    assert differing(execute(make(name, 4, 3), 5, counts=counts), one_device(5, 3)) == []


def test_the_tied_embedding_collects_its_gradients_where_they_arise():
    runs = execute(make("1f1b", 3, 2), 3)
    have = [[name for name in ("wte.weight", "wte.weight tied 0") if run.gradients[name] is not None] for run in runs]
    assert have == [["wte.weight"], [], ["wte.weight tied 0"]]
    runs = execute(make("zbv", 2, 2), 4)  # both ends of the model on rank 0
    assert [run.gradients["wte.weight tied 0"] is not None for run in runs] == [True, False]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "zbv"])
def test_each_cut_carries_one_activation_forward_and_one_gradient_back_per_microbatch(name):
    schedule, m = make(name, 3, 4), 4

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


@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-h2", "zbv"])
def test_activations_are_freed_when_their_backward_is_done(name):
    """At once, with no help from the garbage collector: a later action never sees the graph of an earlier backward."""
    schedule = make(name, 2, 6)

    def rank(comm):
        graphs, done, checked = {}, set(), 0

        def watch(executor, action):
            nonlocal checked
            for s, stage in executor.stages.items():
                for k, (_, y) in stage._saved.items():
                    graphs.setdefault((s, k), (weakref.ref(y), weakref.ref(y.node)))
            for key in done:
                checked += 1
                assert all(ref() is None for ref in graphs[key]), f"{key} lives on at {action}"
            if action.kind in ("B", "I"):
                done.add((action.stage, action.microbatch))

        executed = execute_rank(comm, schedule, 5, watch=watch)
        assert checked > 6 and len(done) == 6 * len(executed.stages)

    gc.disable()
    try:
        run_local(2, rank)
    finally:
        gc.enable()


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "naive"])
def test_the_ledger_counts_the_activations_of_the_microbatches_that_are_alive_and_no_more(name, recompute):
    """In bytes, on the middle ranks of equal stages. Results that are still being sent come on top, whole messages."""
    p, m, message = 4, 6, B * T * H * 8
    peak = {"gpipe": lambda r: m, "1f1b": lambda r: min(m, p - r), "naive": lambda r: 1}[name]

    def rank(comm):
        ledger, seen = MemoryLedger(), []

        def watch(executor, action):
            seen.append((sum(stage.alive for stage in executor.stages.values()), ledger.held["activations"]))

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


def test_every_computation_happens_in_its_lists_order_inside_around():
    """Which is where the trainer puts dropout keys, gradient synchronization, and the trace."""
    schedule = make("zbv", 2, 3)

    def rank(comm):
        seen = []
        execute_rank(comm, schedule, 5, watch=lambda executor, action: seen.append(action))
        return tuple(seen)

    assert tuple(run_local(2, rank)) == schedule.ranks


def test_a_backward_in_halves_gives_the_input_gradient_first_and_the_weights_when_asked():
    dx, weights = [], []
    for halves in (False, True):
        model = gpt(1)
        stage = PipelineStage(model.parts[1:])
        x = np.random.Generator(np.random.Philox(3)).standard_normal((B, T, H))
        stage.forward(0, x, lambda logits, model=model: model.criterion(logits, TEXT[0, :, 1:]))
        matrix = model.h[0].mlp.c_fc.weight
        if halves:
            dx.append(stage.backward_input(0, SCALE))
            assert matrix.grad is None and model.head_weight.grad is None  # the expensive products are still to come
            assert stage.alive == 0
            stage.backward_weight(0)
        else:
            dx.append(stage.backward(0, SCALE))
        weights.append(gradients(model))
    assert dx[0].tobytes() == dx[1].tobytes()
    for name, gradient in weights[0].items():
        other = weights[1][name]
        assert (gradient is None and other is None) or gradient.tobytes() == other.tobytes()
    assert sum(gradient is not None for gradient in weights[0].values()) == 12 + 2 + 1  # block, last norm, head


def test_a_second_step_adds_to_the_gradients_of_the_first():
    schedule = make("zb-h1", 2, 2)

    def rank(comm):
        run = execute_rank(comm, schedule, 3)
        first = {name: None if g is None else g.copy() for name, g in run.gradients.items()}
        model = run.model
        run.executor.run(
            lambda i: TEXT[i, :, :T],
            lambda i, y: model.criterion(y, TEXT[i, :, 1:]),
            lambda i: SCALE,
            lambda a: keys(a.microbatch),
        )
        for name, g in gradients(model).items():
            assert (g is None) == (first[name] is None)
            assert g is None or np.abs(g - 2 * first[name]).max() <= 1e-14 * np.abs(g).max()

    run_local(2, rank)


# -- schedules from elsewhere ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["1f1b", "zb-h2", "zbv", "interleaved-1f1b"])
@pytest.mark.parametrize("messages", [False, True], ids=["computations only", "with messages"])
def test_a_schedule_from_a_csv_runs(name, messages, tmp_path):
    schedule = make(name, 3, 3)
    save_csv(lower(schedule) if messages else schedule, tmp_path / "mine.csv")
    loaded = load_csv(tmp_path / "mine.csv")
    check(loaded)
    runs = execute(loaded, 7)
    assert differing(runs, one_device(7, 3)) == []
    assert_nothing_is_left(runs)


def test_any_order_that_passes_the_checker_and_keeps_the_microbatches_in_order_runs_to_the_same_bits():
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


def test_sends_never_block_here_so_a_list_that_deadlocks_elsewhere_still_runs():
    """1F1B's steady state with both neighbours sending first. The checker refuses it, for MPI's blocking sends."""
    rows = (
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
    )
    schedule = Schedule.of("facing", [[parse_action(cell) for cell in row.split()] for row in rows])
    with pytest.raises(UsageError, match="deadlocks"):
        check(schedule)
    assert differing(execute(schedule, 3), one_device(3, 2)) == []


def test_over_mpi_too():
    script = """
from minipar.comm import main
from minipar.parallel.pipeline import make
from test_pipeline_executor import execute_rank, one_device

def program(comm):
    for name, m, layers in (("1f1b", 5, 5), ("interleaved-1f1b", 4, 9), ("zb-h1", 3, 6), ("zbv", 6, 8)):
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
        if microbatch == 1:
            self._deferred.pop(microbatch)
        else:
            super().backward_weight(microbatch)


class MixesUpMicrobatches(PipelineStage):
    """Several are under way, and a backward takes the latest."""

    def backward(self, microbatch, gradient):
        last = max(self._saved)
        self._saved[microbatch], self._saved[last] = self._saved[last], self._saved[microbatch]
        return super().backward(microbatch, gradient)


@pytest.mark.parametrize("name, broken", [("zb-h1", ForgetsOneW), ("gpipe", MixesUpMicrobatches)])
def test_the_comparison_catches_a_forgotten_weight_gradient_and_microbatches_mixed_up(name, broken):
    expected, schedule = one_device(4, 3), make(name, 2, 3)
    assert differing(execute(schedule, 4), expected) == []
    wrong = differing(execute(schedule, 4, stage_type=broken), expected)
    assert {"h.0.mlp.c_fc.weight", "h.3.mlp.c_fc.weight"} <= set(wrong)


def test_the_comparison_catches_gradients_added_in_another_order():
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


# -- cutting -----------------------------------------------------------------------------------------------------------


def largest(costs, counts):
    stops = list(itertools.accumulate(counts))
    return max(sum(costs[a:b]) for a, b in zip([0, *stops], stops, strict=False))


def test_balanced_cuts_are_the_best_of_all_cuts():
    rng = random.Random(6)
    for _ in range(200):
        blocks = rng.randint(1, 8)
        costs = [rng.choice([0, 1, 2, 5]), *(rng.randint(1, 9) for _ in range(blocks)), rng.choice([0, 3, 20])]
        for stages in range(1, blocks + 1):
            counts = balanced_cuts(costs, stages)
            assert len(counts) == stages and sum(counts) == len(costs)
            inner = [counts[0] - 1, *counts[1:-1], counts[-1] - 1] if stages > 1 else [counts[0] - 2]
            assert min(inner) >= 1  # a block at least, besides the embedding or the head
            best = min(
                largest(costs, [b - a for a, b in itertools.pairwise([0, *stops, len(costs)])])
                for stops in itertools.combinations(range(2, blocks + 1), stages - 1)
            )
            assert largest(costs, counts) == best


def test_the_costs_of_the_parts_add_up_to_the_models_operations_and_a_large_head_takes_blocks_away_from_its_stage():
    config = GPTConfig(vocab_size=50, n_positions=T, n_embd=H, n_layer=6, n_head=2)
    model = GPT(config, dtype="float64", deferred=True)
    costs = part_costs(model, T)
    assert sum(costs) * B * T == config.forward_flops(B, T) and len(costs) == len(model.parts)
    assert balanced_cuts([0, 1, 1, 1, 1, 1, 1, 0], 3) == [3, 2, 3]
    assert balanced_cuts([0, 1, 1, 1, 1, 1, 1, 2], 3) == [3, 3, 2]
    assert balanced_cuts([0, 1, 1, 1, 1, 1, 1, 100], 2)[-1] == 2


def test_fewer_layers_than_stages_and_cuts_that_do_not_fit_are_refused_with_the_numbers():
    model = gpt(3)
    with pytest.raises(UsageError, match="layers 3 are fewer than the pipeline's 4 stages"):
        balanced_cuts(part_costs(model, T), 4)
    for counts in ([2, 2], [5, 1], [6, -1], [5, 0]):
        with pytest.raises(
            UsageError, match=rf"stages of \[{counts[0]}, {counts[1]}\] parts do not cut the model's 5 parts"
        ):
            cut(model, counts)
    assert [[part.name for part in run] for run in cut(model, [2, 3])] == [["embedding", "h.0"], ["h.1", "h.2", "head"]]
