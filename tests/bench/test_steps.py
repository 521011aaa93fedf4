"""Claims about the trainings that `bench step`, `pipeline` and `reductions` time, and about what their rows hold."""

import json
import threading
from argparse import ArgumentParser, Namespace
from types import SimpleNamespace

import numpy as np
import pytest

from minipar.bench import pipeline, reductions, step
from minipar.comm import run_local, serial
from minipar.comm.clock import CpuClock
from minipar.errors import UsageError
from minipar.nn.gpt import GPT, GPTConfig
from minipar.nn.optim import AdamW
from minipar.parallel.ddp import DistributedDataParallel
from minipar.parallel.pipeline.actions import Action, Slot
from minipar.parallel.pipeline.schedules import make
from minipar.train.data import Tokens
from minipar.train.settings import DataConfig, ModelConfig, TrainConfig

TINY = GPTConfig(vocab_size=16, n_positions=4, n_embd=8, n_layer=1, n_head=2)


def arguments(add_flags, *words):
    parser = ArgumentParser()
    add_flags(parser)
    parser.add_argument("--json")
    return parser.parse_args(words)


# ---- step ------------------------------------------------------------------------------------------------------------


def test_a_step_trains_and_returns_the_loss():
    """Two steps are those of a loop by hand, which sets the gradients to zero before each."""
    inputs, targets = step.random_batch(TINY, 3, seed=1)
    own = GPT(TINY, dtype="float64")
    take = step.training_step(DistributedDataParallel(own, serial()), inputs, targets)
    model = GPT(TINY, dtype="float64")
    optimizer = AdamW(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        loss = model.loss(inputs, targets)
        loss.backward()
        optimizer.step()
        assert take() == pytest.approx(loss.item(), rel=1e-12)
    for x, y in zip(own.parameters(), model.parameters(), strict=True):
        np.testing.assert_allclose(x.data, y.data, rtol=1e-9, atol=1e-12)


def test_a_random_batch_has_tokens_of_the_vocabulary():
    inputs, targets = step.random_batch(TINY, 50, seed=0)
    assert inputs.shape == targets.shape == (50, 4) and not np.array_equal(inputs, targets)
    assert (inputs.min(), inputs.max(), targets.max()) == (0, 15, 15)
    assert not np.array_equal(inputs, step.random_batch(TINY, 50, seed=1)[0])


@pytest.mark.parametrize(
    ("adds", "words", "expected"),
    [
        (step.add_step_flags, [], [(256, 128, 256, 4, 8), (256, 128, 512, 4, 8)]),
        (
            step.add_step_flags,
            ["--hidden", "16,32", "--vocab-size", "9", "--layers", "1"],
            [(9, 128, 16, 1, 8), (9, 128, 32, 1, 8)],
        ),
        (step.add_overlap_flags, ["--hidden", "16", "--seq-len", "4"], [(256, 4, 16, 4, 8)]),
    ],
)
def test_the_models_are_those_of_the_flags(adds, words, expected):
    found = step.configs(arguments(adds, *words))
    sizes = [(c.vocab_size, c.n_positions, c.n_embd, c.n_layer, c.n_head) for c in found]
    assert sizes == expected


def test_the_models_have_the_chosen_dtype(monkeypatch):
    dtypes = []
    monkeypatch.setattr(step, "torch_step", lambda model, inputs, targets: dtypes.append(model.dtype))
    step.measure(TINY, 1, "float64", 1)

    def training_step(wrapper, inputs, targets):
        dtypes.extend({str(p.data.dtype) for p in wrapper.parameters()})

    monkeypatch.setattr(step, "training_step", training_step)
    monkeypatch.setattr(step, "_timed", lambda comm, call: (1.0, 1.0))
    step.measure_zero(serial(), TINY, 1, "float64", 1)
    assert dtypes == ["float64"] * 6


def test_on_several_ranks_step_is_zero(monkeypatch, capsys):
    given = []

    def measure_zero(comm, config, batch, dtype, repeat):
        given.append((comm.rank, config.n_embd, batch, dtype, repeat))
        return [{"hidden": config.n_embd}]

    monkeypatch.setattr(step, "measure_zero", measure_zero)
    args = arguments(step.add_step_flags, "--hidden", "16", "32", "--batch", "3", "--repeat", "5", "--dtype", "float64")
    run_local(2, step.run_step, args)
    assert sorted(given) == [(rank, hidden, 3, "float64", 5) for rank in (0, 1) for hidden in (16, 32)]
    assert capsys.readouterr().out == "hidden\n    16\n    32\n"


def test_the_table_of_one_rank_has_no_dtype(monkeypatch, capsys):
    monkeypatch.setattr(step, "measure", lambda *given: {"hidden": given[0].n_embd, "dtype": given[2], "seconds": 0.5})
    args = arguments(step.add_step_flags, "--hidden", "16")
    step.run_step(serial(), args)
    assert capsys.readouterr().out == "hidden  seconds\n    16      0.5\n"
    args.json = "-"
    step.run_step(serial(), args)
    assert json.loads(capsys.readouterr().out) == [{"hidden": 16, "dtype": "float32", "seconds": 0.5}]


@pytest.mark.parametrize("flag", ["repeat", "batch"])
def test_a_step_is_measured_on_a_sample_at_least_once(flag):
    with pytest.raises(UsageError, match=f"--{flag} 0"):
        step.configs(arguments(step.add_step_flags, f"--{flag}", "0"))


def test_cores_are_those_that_this_process_may_use(monkeypatch):
    """There are no more of them than there are ranks."""
    published = []
    monkeypatch.setattr(step.os, "sched_getaffinity", lambda process: {0, 4, 7} if process == 0 else {0})
    monkeypatch.setattr(step, "publish", lambda comm, rows, path: published.append(rows[0]["cores"]))
    monkeypatch.setattr(step, "_timed", lambda comm, call, kind: (1.0, 1.0))
    args = Namespace(layers=1, hidden=8, heads=2, seq_len=4, batch=1, repeat=1, json=None)
    for ranks in (2, 4):
        run_local(ranks, step.run_overlap, args)
    assert published == [2] * 2 + [3] * 4


def test_each_kind_of_step_begins_without_gradients(monkeypatch):
    """The optimizer here changes nothing, so that the same step leaves the same gradients again."""
    gradients = {}

    class Optimizer(AdamW):
        def step(self):
            size = sum(float(np.abs(p.grad).sum()) for p in self.parameters)
            gradients.setdefault(kinds[-1], []).append(size)

    kinds = []

    def timed(comm, call, kind):
        kinds.append(kind)
        call(kind)
        return 1.0, 1.0

    monkeypatch.setattr(step, "AdamW", Optimizer)
    monkeypatch.setattr(step, "_timed", timed)
    monkeypatch.setattr(step, "publish", lambda comm, rows, path: None)
    step.run_overlap(serial(), Namespace(layers=1, hidden=8, heads=2, seq_len=4, batch=1, repeat=1, json=None))
    for sizes in gradients.values():
        assert sizes == pytest.approx([sizes[0]] * (step.WARMUP + 1), rel=1e-4)
    assert gradients["naive"] == pytest.approx(gradients["buckets"], rel=1e-4)


# ---- pipeline --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "layers", "microbatches", "batch"),
    [([], 4, 2, 8), (["--layers", "8", "--microbatches", "6", "--batch", "3", "--repeat", "5"], 8, 6, 3)],
)
def test_each_schedule_has_the_same_model_and_batch(words, layers, microbatches, batch, monkeypatch):
    measured, columns = [], []
    monkeypatch.setattr(pipeline, "measure", lambda comm, configs, repeat: measured.append((configs, repeat)))
    monkeypatch.setattr(pipeline, "publish", lambda comm, rows, path, hidden: columns.append(hidden))
    run_local(2, pipeline.run, arguments(pipeline.add_arguments, *words))
    configs, repeat = measured[0]
    assert repeat == (5 if words else 3) and ["layers", "hidden", "batch"] in columns
    assert list(configs) == ["gpipe", "1f1b", "interleaved-1f1b", "zb-h1"]
    for name, config in configs.items():
        assert (config.mesh.dp, config.mesh.pp, config.mesh.schedule) == (1, 2, name)
        assert config.model == ModelConfig(layers, 256, 8, 64, pipeline.VOCABULARY)
        assert (config.data.global_batch, config.data.microbatches) == (batch * microbatches, microbatches)


def test_a_pipelines_time_is_that_of_its_processors(monkeypatch):
    clocks = []
    monkeypatch.setattr(pipeline, "_timeline", lambda comm, schedule: clocks.append(type(comm.clock)))
    monkeypatch.setattr(pipeline, "_row", lambda config, schedule, steps: None)
    monkeypatch.setattr(pipeline, "publish", lambda comm, rows, path, hidden: None)
    words = "--layers 4 --hidden 8 --heads 2 --seq-len 4 --batch 1 --repeat 1"
    run_local(2, pipeline.run, arguments(pipeline.add_arguments, *words.split()))
    assert set(clocks) == {CpuClock} and len(clocks) == 2 * 4 * (pipeline.WARMUP + 1)


def test_a_model_that_a_schedule_cannot_cut_is_refused(monkeypatch):
    monkeypatch.setattr(pipeline, "measure", lambda comm, configs, repeat: None)
    with pytest.raises(UsageError, match="hidden.*9"):
        run_local(2, pipeline.run, arguments(pipeline.add_arguments, "--hidden", "9"))


def row_of(*slots):
    return [Slot(Action(stage, kind, microbatch), start, end) for (stage, kind, microbatch), start, end in slots]


FIRST = row_of(((0, "F", 0), 5.0, 7.0), ((0, "F", 1), 7.0, 10.0), ((0, "B", 0), 12.0, 15.0), ((0, "B", 1), 16.0, 21.0))
SECOND = row_of(((1, "F", 0), 7.5, 8.0), ((1, "B", 0), 8.0, 10.0), ((1, "F", 1), 10.0, 11.5), ((1, "B", 1), 12.0, 14.0))


def test_a_measured_step_begins_at_0():
    timeline = pipeline.timeline_of("mine", [FIRST, SECOND])
    assert timeline.ranks == (
        tuple(Slot(slot.action, slot.start - 5, slot.end - 5) for slot in FIRST),
        tuple(Slot(slot.action, slot.start - 5, slot.end - 5) for slot in SECOND),
    )
    assert timeline.schedule.name == "mine" and timeline.makespan == 16.0
    assert timeline.schedule.ranks[1] == tuple(slot.action for slot in SECOND)


def test_the_simulated_bubble_is_that_of_mean_durations():
    """Rank 0's forwards take 2.5 on average and its backwards 4, rank 1's take 1 and 2.

    Rank 0 then has F from 0 to 5, and B from 5.5 to 9.5 and to 13.5; rank 1 computes for 6.
    """
    timeline = pipeline.timeline_of("1f1b", [FIRST, SECOND])
    table = pipeline.mean_durations(timeline).table
    assert table == {(0, "F"): 2.5, (0, "B"): 4.0, (1, "F"): 1.0, (1, "B"): 2.0}
    config = TrainConfig(model=ModelConfig(6, 16, 4, 8, 32), data=DataConfig(global_batch=6, microbatches=2))
    row = pipeline._row(config, make("1f1b", 2, 2), [timeline])
    assert row == {
        "schedule": "1f1b",
        "ranks": 2,
        "microbatches": 2,
        "layers": 6,
        "hidden": 16,
        "batch": 3,
        "bubble_measured": pytest.approx(1 - (13 + 6) / 32),
        "bubble_min": pytest.approx(1 - (13 + 6) / 32),
        "bubble_max": pytest.approx(1 - (13 + 6) / 32),
        "bubble_simulated": pytest.approx(1 - (13 + 6) / 27),
        "bubble_closed_form": pytest.approx(1 / 3),
        "seconds": 16.0,
    }


# ---- reductions ------------------------------------------------------------------------------------------------------


def test_each_order_of_sums_has_the_slowest_ranks_median(monkeypatch, capsys):
    """Rank 1 takes a second longer, the step that warms up takes 100 seconds, and each order sends other sizes."""
    clock = threading.local()
    taken = []
    seconds = {"ring": 2.0, "ordered": 5.0, "tree": 8.0}

    def trainer_for(comm, args, reduction):
        def step(number):
            taken.append((comm.rank, reduction, number))
            clock.now = getattr(clock, "now", 0.0) + (100.0 if number == 0 else seconds[reduction] + comm.rank)
            comm.all_reduce(np.zeros(int(10 * seconds[reduction])))

        return SimpleNamespace(step=step)

    monkeypatch.setattr(reductions, "time", SimpleNamespace(perf_counter=lambda: getattr(clock, "now", 0.0)))
    monkeypatch.setattr(reductions, "trainer_for", trainer_for)
    words = "--hidden 16 --tp 2 --microbatches 3 --repeat 3 --json -"
    run_local(2, reductions.run, arguments(reductions.add_arguments, *words.split()))
    assert json.loads(capsys.readouterr().out) == [
        {
            "reduction": name,
            "ranks": 2,
            "tp": 2,
            "hidden": 16,
            "microbatches": 3,
            "bytes": int(80 * seconds[name]),
            "seconds": seconds[name] + 1,
            "ratio": pytest.approx((seconds[name] + 1) / 3),
        }
        for name in ("ring", "ordered", "tree")
    ]
    turns = [(reduction, number) for rank, reduction, number in taken if rank == 0]
    assert turns == [(name, number) for number in range(4) for name in ("ring", "ordered", "tree")]


def test_the_trainings_of_reductions_are_those_of_the_flags(monkeypatch):
    flags = "--layers 1 --hidden 16 --heads 4 --seq-len 8 --vocab-size 20 --tp 2 --global-batch 4 --microbatches 2"

    def tokens_of(ids, name, vocab_size):
        made.append(Tokens(ids, name, vocab_size))
        return made[-1]

    made = []
    monkeypatch.setattr(reductions, "Tokens", tokens_of)

    def rank(comm):
        args = arguments(reductions.add_arguments, *flags.split(), "--repeat", "2")
        trainer = reductions.trainer_for(comm, args, "tree")
        trainer.step(0)
        return trainer.config, trainer.mesh.dp.size, trainer.mesh.tp.size, made[-1]

    for config, dp, tp, tokens in run_local(4, rank):
        assert (dp, tp, config.run.reduction, config.optimizer.steps) == (2, 2, "tree", reductions.WARMUP + 2)
        assert config.model == ModelConfig(1, 16, 4, 8, 20)
        assert (config.data.global_batch, config.data.microbatches) == (4, 2)
        assert tokens.vocab_size == 20 and (tokens.ids.min(), tokens.ids.max()) == (0, 19)


@pytest.mark.parametrize("words", ["--repeat 0", "--vocab-size 0"])
def test_an_order_of_sums_is_measured_at_least_once(words):
    with pytest.raises(UsageError, match=f"{words}.*: expected at least 1 of each$"):
        reductions.run(serial(), arguments(reductions.add_arguments, *words.split()))
