"""Claims about the values in a benchmark's rows, with clocks and messages that the tests make."""

import itertools
import json
import math
import subprocess
import sys
import threading
from argparse import Namespace
from dataclasses import asdict, fields
from types import SimpleNamespace

import numpy as np
import pytest
from launcher import ROOT

from minipar.autograd import Tensor
from minipar.bench import check_positive, collectives, context, largest, layouts, machine, pipeline, publish, step
from minipar.bench.collectives import parse_size
from minipar.bench.costs import BLOCK, BLOCKS, SUMS, Costs, Shape
from minipar.comm import run_local, serial
from minipar.errors import UsageError
from minipar.nn.gpt import GPT, GPTConfig
from minipar.parallel.fsdp import FullyShardedDataParallel
from minipar.parallel.pipeline.actions import Durations, simulate
from minipar.parallel.pipeline.schedules import make
from minipar.train.settings import DataConfig, ModelConfig, TrainConfig

ROWS = [
    {"name": "a", "seconds": 1.23456, "ratio": None, "layers": 2},
    {"name": "b", "seconds": 2.0, "ratio": 0.5, "layers": 2},
]


def test_rows_are_a_table_or_json_alone(tmp_path, capsys):
    run_local(3, lambda comm: publish(comm, ROWS, None, hidden=["layers"]))
    assert capsys.readouterr().out == "name  seconds  ratio\n   a    1.235      -\n   b        2    0.5\n"
    run_local(3, lambda comm: publish(comm, ROWS, "-", hidden=["layers"]))
    assert json.loads(capsys.readouterr().out) == ROWS
    run_local(3, lambda comm: publish(comm, ROWS, str(tmp_path / "x.json")))
    assert json.loads((tmp_path / "x.json").read_text()) == ROWS and capsys.readouterr().out.count("\n") == 3


@pytest.mark.parametrize("path", ["/nowhere/x.json", "/dev/full"])
def test_rows_that_cannot_be_written_are_every_ranks_error(path):
    def rank(comm):
        try:
            publish(comm, ROWS, path)
        except UsageError as error:
            return str(error)

    (line,) = set(run_local(3, rank))
    assert line.startswith(f"--json {path} cannot be written: ")


def test_a_table_on_a_full_disk_is_one_line():
    command = "step --layers 1 --hidden 8 --heads 2 --seq-len 8 --repeat 1".split()
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "minipar.bench", *command], stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT
        )
    assert done.returncode == 2
    assert done.stderr == "minipar: error: standard output cannot be written: No space left on device\n"


@pytest.mark.parametrize("values", [(0, 1), (1, 0), (-3, 2), (0, 0)])
def test_a_count_below_1_names_all_of_its_flags(values):
    args = Namespace(repeat=values[0], seq_len=values[1])
    with pytest.raises(UsageError, match=f"^--repeat {values[0]} --seq-len {values[1]}: expected at least 1 of each$"):
        check_positive(args, "repeat", "seq_len")
    check_positive(Namespace(repeat=1, seq_len=1), "repeat", "seq_len")


def test_sizes_have_binary_multiples():
    assert [parse_size(text) for text in ("4096", "64K", "64k", "1M", "0")] == [4096, 65536, 65536, 1 << 20, 0]
    assert parse_size("9" * 15 + "g") == (10**15 - 1) << 30
    for text in ("", "K", "-1", "1.5M", "x", "1KB", "²", "9" * 16, "9" * 5000):
        with pytest.raises(UsageError, match="^--sizes .*: expected bytes, such as 4096, 64K or 1M$"):
            parse_size(text)


def test_the_largest_value_is_one_ranks():
    assert run_local(3, lambda comm: largest(comm, 1.0 + comm.rank)) == [3.0] * 3


def test_a_message_takes_half_a_round_trip(monkeypatch):
    def ping_pong(comm, buffer, peer):
        return 2 * machine.ROUND_TRIPS * (1e-5 + 2e-9 * buffer.nbytes)

    monkeypatch.setattr(machine, "_ping_pong", ping_pong)
    assert machine.MESSAGE_BYTES == (0, *(1024 * 4**power for power in (0, 1.5, 3, 4, 5, 6)))  # up to 4 MiB
    for network, rows in run_local(3, machine.measure_messages):
        assert (network.alpha, network.beta) == (pytest.approx(1e-5), pytest.approx(2e-9))
        assert [row["seconds"] for row in rows] == pytest.approx([1e-5 + 2e-9 * row["bytes"] for row in rows])


def test_the_times_of_blocks_are_those_of_one_block(monkeypatch):
    """On a clock that stands still between the pieces, each of which takes 12 s."""
    ticks = itertools.count(0.0, 12.0)
    monkeypatch.setattr(machine, "time", SimpleNamespace(thread_time=lambda: next(ticks)))
    seconds = machine.pieces(Shape(16, 2, 8, 1), 1)
    del seconds["parameters"]
    assert seconds == {piece: 12.0 / (BLOCKS if piece in (*BLOCK, *SUMS) else 1) for piece in seconds}


def test_a_step_takes_from_a_common_start_to_the_last_end():
    def rank(comm):
        comm.clock.advance(10.0 * comm.rank)
        trainer = SimpleNamespace(mesh=SimpleNamespace(world=comm), step=lambda _: comm.clock.advance(3.0 - comm.rank))
        return layouts._step_seconds(trainer, 0)

    assert run_local(3, rank, clock="model") == [3.0] * 3


def test_a_layouts_row_has_the_fullest_rank_and_the_median_step():
    configs = layouts.configs(ModelConfig(8, 16, 4, 8, 16), 32, 4)
    for config in configs:
        layout = layouts.layout_of(config)
        assert layout.dp * layout.microbatch * layout.microbatches == 32
    config = next(config for config in configs if config.mesh.pp == 4)
    row = layouts._row(config, np.array([2.0, 9.0, 1.0]), [10, 30, 20, 25, 99])
    assert (row["seconds_min"], row["seconds"], row["seconds_max"]) == (1.0, 2.0, 9.0)
    assert row["peak_bytes"] == 30 and row["ranks_peak_bytes"] == [10, 30, 20, 25]


def test_a_pipelines_row_has_the_least_median_and_largest_bubble():
    steps = [simulate(make("1f1b", 2, 4), Durations(comm=comm)) for comm in (3, 0, 1)]
    config = TrainConfig(data=DataConfig(global_batch=8, microbatches=4))
    row = pipeline._row(config, make("1f1b", 2, 4), steps)
    bubbles = sorted(float(each.bubble_fraction) for each in steps)
    assert [row["bubble_min"], row["bubble_measured"], row["bubble_max"]] == bubbles
    assert row["batch"] == 2 and row["seconds"] == sorted(float(each.makespan) for each in steps)[1]


def test_a_measured_timeline_is_in_seconds():
    comm = serial()
    events = ({"name": "0F0", "ts": 5e6, "dur": 2e6}, {"name": "step", "ts": 0.0, "dur": 9e6})
    comm.tracer.events += [*events, {"name": "0B0", "ts": 7.5e6, "dur": 1e6}]
    assert pipeline._timeline(comm, make("gpipe", 1, 1)).makespan == 3.5


def test_the_processor_time_of_overlap_is_that_of_all_ranks(monkeypatch):
    published = []
    monkeypatch.setattr(step, "publish", lambda comm, rows, path: published.extend(rows))
    monkeypatch.setattr(step, "_timed", lambda comm, call, kind: (10.0 * comm.size, 1.0 + comm.rank))
    run_local(3, step.run_overlap, Namespace(layers=1, hidden=8, heads=2, seq_len=4, batch=1, repeat=1, json=None))
    assert {row["cpu_seconds"] for row in published} == {6.0} and {row["wall_seconds"] for row in published} == {30.0}


@pytest.mark.parametrize(
    ("op", "algorithm", "sent"),
    [
        ("all_reduce", "ring", 4000),
        ("reduce_scatter", "ring", 2000),
        ("all_gather", "ring", 2000),
        ("all_to_all", "auto", 2000),
        ("broadcast", "auto", 4000),
        ("barrier", "auto", 0),
    ],
)
def test_a_collectives_row_has_its_bytes_and_its_seconds(op, algorithm, sent, monkeypatch):
    """Over threads, where MPI has no times to compare with, each on a clock of which every reading is a second."""
    clocks = threading.local()

    def perf_counter():
        clocks.now = getattr(clocks, "now", 0.0) + 1.0
        return clocks.now

    monkeypatch.setattr(collectives, "time", SimpleNamespace(perf_counter=perf_counter))
    nbytes = 0 if op == "barrier" else 4001  # a byte more than a thousand elements
    rows = run_local(2, lambda comm: collectives.measure(comm, op, algorithm, nbytes, np.dtype("float32")))
    assert rows[0] == rows[1]
    row = rows[0]
    assert (row["op"], row["algorithm"], row["ranks"]) == (op, algorithm, 2)
    assert row["bytes"] == nbytes // 4 * 4 and row["wire_bytes"] == row["wire_bytes_expected"] == sent
    assert (row["seconds"], row["mpi_seconds"], row["ratio"]) == (1.0, None, None)


@pytest.mark.parametrize(("seconds", "calls"), [(1.0, 1), (1e-3, 10), (1e-5, 200), (0.0, 200)])
def test_a_batch_of_calls_takes_a_hundredth_of_a_second(seconds, calls, monkeypatch):
    """It has at least one call, and at most 200; the slowest rank decides. One call before them warms up."""
    counted = {0: 0, 1: 0}
    clocks = threading.local()
    monkeypatch.setattr(collectives, "time", SimpleNamespace(perf_counter=lambda: getattr(clocks, "now", 0.0)))

    def one_call(comm, op, algorithm, n, dtype):
        def call():
            counted[comm.rank] += 1
            clocks.now = getattr(clocks, "now", 0.0) + (seconds if comm.rank == 0 else 20 * seconds)

        return call, None

    monkeypatch.setattr(collectives, "_calls", one_call)
    rows = run_local(2, lambda comm: collectives.measure(comm, "all_reduce", "ring", 80, np.dtype("float64")))
    assert counted == {0: 1 + collectives.BATCHES * calls, 1: 1 + collectives.BATCHES * calls}
    assert rows[0]["seconds"] == pytest.approx(20 * seconds)


@pytest.mark.parametrize(
    ("dtype", "computed"),
    [("float32", "float32"), ("float64", "float64"), ("bfloat16", "float32"), ("float16", "float32")],
)
def test_the_matrix_products_of_a_step_are_all_there(dtype, computed, monkeypatch):
    """Three for each weight and for the head; attention has two forward and four backward. In 2 bytes they are wide."""
    config, batch = GPTConfig(vocab_size=11, n_positions=6, n_embd=8, n_layer=3, n_head=2), 5
    counted = []
    products = step._matrix_products(config, batch, dtype)

    def matmul(x, y):
        assert x.dtype == y.dtype == computed
        counted.append(2 * math.prod(x.shape) * (x @ y).shape[-1])

    monkeypatch.setattr(step, "np", SimpleNamespace(matmul=matmul))
    products()
    tokens = batch * config.n_positions
    linear = 3 * 2 * tokens * (3 * 12 * config.n_embd**2 + config.n_embd * config.vocab_size)
    attention = 3 * 6 * 2 * tokens * config.n_positions * config.n_embd
    assert sum(counted) == linear + attention and len(counted) == 3 * 13 + 18


@pytest.mark.parametrize("ranks", [1, 2])
def test_overlap_compares_each_kind_of_sum_with_none(ranks, monkeypatch):
    """Both kinds of sum leave the same model on all ranks; without one the ranks' models part."""
    published, calls, models = [], [], {}

    class Model(GPT):
        def __init__(self, config):
            super().__init__(config)
            models.setdefault(threading.get_ident(), []).append(self)

    def timed(comm, call, kind):
        if kind in kinds:
            call(kind)
        calls.append(kind)
        return {"none": (5.0, 1.0), "naive": (8.0, 2.0), "buckets": (6.0, 3.0)}[kind]

    monkeypatch.setattr(step, "GPT", Model)
    monkeypatch.setattr(step, "publish", lambda comm, rows, path: published.append((rows, path)))
    monkeypatch.setattr(step, "_timed", timed)
    args = Namespace(layers=1, hidden=8, heads=2, seq_len=4, batch=3, repeat=2, json="x")
    for kinds in (("naive", "buckets"), ("none",)):
        models.clear()
        run_local(ranks, step.run_overlap, args)
        plain, buckets = ([[p.data for p in each[i].parameters()] for each in models.values()] for i in (0, 1))
        differences = [
            max(np.abs(x - y).max() for x, y in zip(rank, plain[0], strict=True)) for rank in plain + buckets
        ]
        if "naive" in kinds:
            assert max(differences) < 1e-5
        else:
            assert max(differences[1:]) > 1e-4
    assert calls[: 3 * ranks * (step.WARMUP + 2)].count("none") == ranks * (step.WARMUP + 2)
    rows, path = published[0]
    cores = rows[0]["cores"]
    sizes = {"ranks": ranks, "cores": cores, "layers": 1, "hidden": 8, "heads": 2, "seq_len": 4, "batch": 3}
    assert (
        path == "x"
        and 1 <= cores <= ranks
        and rows
        == [
            {"sync": sync, **sizes, "wall_seconds": wall, "cpu_seconds": 1.0 * ranks, "ratio": wall * cores / ranks}
            for sync, wall in (("naive", 8.0), ("buckets", 6.0))
        ]
    )


def test_a_step_next_to_its_products_has_the_medians(monkeypatch):
    """On a clock on which the products take 2 s and a step 7, after slower ones that warm up."""
    clock = SimpleNamespace(now=0.0)

    def takes(seconds):
        calls = []

        def call():
            calls.append(None)
            clock.now += seconds if len(calls) > step.WARMUP else 100.0

        return call

    monkeypatch.setattr(step, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    monkeypatch.setattr(step, "_matrix_products", lambda *_: takes(2.0))
    monkeypatch.setattr(step, "training_step", lambda *_: takes(7.0))
    config = GPTConfig(vocab_size=16, n_positions=4, n_embd=8, n_layer=1, n_head=2)
    row = {"layers": 1, "hidden": 8, "heads": 2, "seq_len": 4, "batch": 3, "dtype": "float64", "seconds": 7.0}
    monkeypatch.setattr(step, "torch_step", lambda *_: None)
    assert step.measure(config, 3, "float64", 3) == row | {"torch_seconds": None, "ratio": None, "gemm_seconds": 2.0}
    monkeypatch.setattr(step, "torch_step", lambda *_: takes(14.0))
    assert step.measure(config, 3, "float64", 3) == row | {"torch_seconds": 14.0, "ratio": 0.5, "gemm_seconds": 2.0}


def test_a_zero_stages_row_has_the_slowest_ranks_median(monkeypatch):
    """Rank 1 takes a second longer, and each stage one more than the stage before it; warming up takes 100."""
    calls, prefetches = {0: 0, 1: 0}, {True: 0, False: 0}

    def timed(comm, _):
        calls[comm.rank] += 1
        stage, warm = (calls[comm.rank] - 1) % 5, calls[comm.rank] > 5 * step.WARMUP
        return (4.0 + stage + comm.rank if warm else 100.0), 0.0

    def training_step(wrapper, inputs, targets):
        if isinstance(wrapper, FullyShardedDataParallel):
            prefetches[wrapper.prefetch] += 1

    monkeypatch.setattr(step, "_timed", timed)
    monkeypatch.setattr(step, "training_step", training_step)
    config = GPTConfig(vocab_size=16, n_positions=4, n_embd=8, n_layer=1, n_head=2)
    rows = run_local(2, lambda comm: step.measure_zero(comm, config, 3, "float32", 3))[0]
    assert [(row["zero_stage"], row["prefetch"]) for row in rows] == [
        (0, None), (1, None), (2, None), (3, True), (3, False),
    ]  # fmt: skip
    assert prefetches == {True: 2, False: 2}
    assert [row["seconds"] for row in rows] == [5.0, 6.0, 7.0, 8.0, 9.0]
    assert [row["ratio"] for row in rows] == [1.0, 1.2, 1.4, 1.6, 1.8]


def test_a_call_is_timed_until_every_rank_is_done(monkeypatch):
    """Rank 0 works for 2 s and waits for rank 1, which works for 5 s; each rank's processor time is its own."""
    clock = threading.local()
    calls = SimpleNamespace(perf_counter=lambda: clock.wall, thread_time=lambda: clock.cpu)
    monkeypatch.setattr(step, "time", calls)

    def rank(comm):
        clock.wall, clock.cpu = 1000.0, 70.0 + comm.rank

        def work(seconds):
            clock.wall += seconds
            clock.cpu += seconds

        def barrier():
            nows = comm.all_reduce(np.array([clock.wall]), op="max")
            clock.wall = float(nows[0])

        waiting = SimpleNamespace(barrier=barrier)
        return step._timed(waiting, work, 2.0 + 3.0 * comm.rank)

    assert run_local(2, rank) == [(5.0, 2.0), (5.0, 5.0)]


def test_layouts_are_predicted_with_the_machines_constants(tmp_path, capsys, monkeypatch):
    """A row has the prediction next to what was measured; the last line says how well they agree."""
    values = {field.name: 1e9 if field.name == "flops_per_second" else 1e-9 for field in fields(Costs)}
    values |= {"message_alpha": 1e-5, "message_beta": 1e-9}
    file = tmp_path / "machine.json"
    file.write_text(json.dumps([{"row": "constant", "name": name, "value": value} for name, value in values.items()]))
    published = []
    monkeypatch.setattr(layouts, "publish", lambda comm, rows, path, hidden: published.append(rows))
    flags = {"layers": 2, "hidden": 8, "heads": 2, "seq_len": 4, "vocab_size": 16, "global_batch": 4}
    args = Namespace(**flags, machine=str(file), network=None, repeat=1, json=None)
    run_local(1, layouts.run_layouts, args)
    (rows,) = published
    assert len(rows) == 3
    for row in rows:
        assert row["ratio"] == row["predicted_seconds"] / row["seconds"]
        assert row["bytes_ratio"] == row["predicted_bytes"] / row["peak_bytes"] > 0.3
        assert row["ranks_peak_bytes"] == [row["peak_bytes"]] and row["peak_bytes"] > 0
    assert capsys.readouterr().out == f"3 layouts: {layouts.agreement(rows)}\n"
    run_local(1, layouts.run_layouts, Namespace(**vars(args) | {"json": "-"}))
    run_local(1, layouts.run_layouts, Namespace(**vars(args) | {"machine": None}))
    assert capsys.readouterr().out == "" and "ratio" not in published[2][0]


def test_context_attends_over_one_sequence(monkeypatch):
    """One rank alone over all of it, or each over its part, for each order; 64 columns of q, k and v for each head."""
    shapes = []

    def tensor(data, requires_grad):
        shapes.append(data.shape)
        return Tensor(data, requires_grad=requires_grad)

    monkeypatch.setattr(context, "Tensor", tensor)
    monkeypatch.setattr(context, "publish", lambda comm, rows, path: None)
    run_local(2, lambda comm: context.run(comm, Namespace(seq_len=16, heads=2, repeat=1, json=None)))
    assert sorted(shapes) == [(1, 8, 3 * 2 * 64)] * 4 + [(1, 16, 3 * 2 * 64)] * 2


def test_agreement_is_of_relative_errors_and_of_the_order():
    rows = [
        {"seconds": s, "predicted_seconds": p, "peak_bytes": 100, "predicted_bytes": b}
        for s, p, b in [(1.0, 1.5, 90), (2.0, 2.0, 100), (4.0, 1.0, 120)]
    ]
    assert asdict(layouts.agreement(rows)) == pytest.approx(
        {"median": 0.5, "largest": 0.75, "spearman": -0.5, "memory_largest": 0.2}
    )
