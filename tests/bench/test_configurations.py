"""Claims about what the planner is told of a configuration, and about the rows of `bench layouts` and `bench modelled`.

Both run in this process, on threads.
"""

import json
import time
from argparse import ArgumentParser

import pytest
from training import config_for

from minipar.bench import layouts
from minipar.bench.costs import Costs, Machine
from minipar.comm import run_local, serial
from minipar.comm.clock import Network
from minipar.errors import UsageError
from minipar.parallel.memory import Precision
from minipar.plan.cluster import AlphaBeta, Assumptions, Cluster
from minipar.plan.layout import MINIPAR, Layout
from minipar.plan.model import ModelShape
from minipar.train.settings import ModelConfig

COSTS = Costs(1e9, *[1e-9] * 23)
SIZES = "--layers 6 --hidden 16 --heads 4 --seq-len 8 --vocab-size 32 --global-batch 48"


# ---- what the planner is told ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", {"positions": 8, "kv_heads": 4}),
        ("--model llama --kv-heads 2 --ffn 40", {"kv_heads": 2, "ffn": 40}),
        ("--model mixtral --kv-heads 2 --experts 4 --top-k 3", {"kv_heads": 2, "experts": 4, "top_k": 3}),
    ],
)
def test_the_planner_gets_the_model(flags, expected):
    sizes = {"ffn": 64}
    if flags:  # both other models are built as Llama is
        sizes |= {"gated": True, "tied": False, "biases": False, "norm_biases": False}
    shape = ModelShape(6, 16, 4, 32, **(sizes | expected))
    assert layouts.shape_of(config_for(f"{SIZES} {flags}")) == shape


FLOAT32, BFLOAT16 = Precision(4, 4, 8), Precision(2, 4, 12)
INTERLEAVED = {"dp": 4, "pp": 2, "microbatch": 3, "microbatches": 4, "schedule": "interleaved-1f1b"}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", {"microbatch": 48}),
        ("--seq-len 2048", {"microbatch": 48, "attention": "flash"}),
        ("--seq-len 2048 --dropout 0.1", {"microbatch": 48}),
        ("--attention full --seq-len 2048", {"microbatch": 48}),
        ("--dp 4 --pp 2 --schedule interleaved-1f1b --microbatches 4", INTERLEAVED | {"virtual_stages": 2}),
        (
            "--dp 4 --pp 2 --schedule interleaved-1f1b --virtual-stages 3 --microbatches 4 --recompute full"
            " --dtype bfloat16 --zero-stage 1 --zero-replicas 2",
            INTERLEAVED
            | {"virtual_stages": 3, "recompute": "full", "precision": BFLOAT16, "zero": 1, "zero_replicas": 2},
        ),
        (
            "--dp 2 --tp 2 --sequence-parallel --ep 2 --etp 1 --model mixtral --experts 4",
            {"dp": 2, "tp": 2, "microbatch": 24, "sequence_parallel": True, "ep": 2, "etp": 1},
        ),
        (
            "--cp 2 --context-parallel ulysses --cp-order contiguous",
            {"microbatch": 48, "cp": 2, "context_parallel": "ulysses", "cp_order": "contiguous"},
        ),
    ],
)
def test_the_planner_gets_the_layout(flags, expected):
    default = {"dp": 1, "tp": 1, "pp": 1, "microbatches": 1, "precision": FLOAT32}
    assert layouts.layout_of(config_for(f"{SIZES} {flags}")) == Layout(**default | expected)


def test_the_planner_gets_when_gradients_are_summed():
    for flags, every in (("", False), (" --sync-every-microbatch", True)):
        config = config_for(f"{SIZES} --dp 4 --zero-stage 2 --microbatches 4{flags}")
        framework = layouts.framework_of(config)
        assert framework.every_microbatch == every
        assert (framework == MINIPAR) == (every == MINIPAR.every_microbatch)


@pytest.mark.parametrize(("beta", "speed"), [(4e-9, 2.5e8), (0.0, float("inf"))])
def test_the_planner_gets_one_host_with_the_measured_network(beta, speed, monkeypatch):
    """The host has all ranks, a message takes alpha + beta*bytes, and computation never slows messages down."""
    clusters = []
    monkeypatch.setattr(layouts, "step_time", lambda model, layout, cluster, length: clusters.append(cluster))
    config = config_for(f"{SIZES} --dp 4 --zero-stage 2 --microbatches 4 --sync-every-microbatch")
    layouts.predict(config, Machine(COSTS, Network(3e-6, beta)), 8)
    (cluster,) = clusters
    gpu = cluster.gpu
    assert (gpu.peak, gpu.memory, gpu.memory_bandwidth) == (1e9, float("inf"), float("inf"))
    assert gpu.inside == gpu.between == pytest.approx(speed)
    assert cluster == Cluster(
        gpu=gpu,
        gpus=4,
        per_host=4,
        assumptions=Assumptions(links=1.0, alpha_inside=3e-6, contention=0.0),
        framework=layouts.framework_of(config),
        measured=COSTS.compute,
    )


# ---- layouts ---------------------------------------------------------------------------------------------------------

MODEL = "--layers 2 --hidden 8 --heads 2 --seq-len 4 --vocab-size 16 --global-batch 4".split()
FIVE = ("", "--dp 2 --zero-stage 1 --microbatches 2", "--pp 2 --schedule gpipe --microbatches 4", "--dp 4", "--tp 2")


def run_layouts(ranks, *flags):
    parser = ArgumentParser()
    layouts.add_layouts_flags(parser)
    parser.add_argument("--json")
    run_local(ranks, layouts.run_layouts, parser.parse_args([*MODEL, *flags]))


def test_a_row_says_which_layout_ran(monkeypatch, capsys):
    """Layouts of more ranks than there are do not run. Each message takes a second."""
    monkeypatch.setattr(layouts, "LAYOUTS", FIVE)
    run_layouts(2, "--repeat", "1", "--network", "1", "0", "--json", "-")
    rows = json.loads(capsys.readouterr().out)
    named = ("ranks", "dp", "tp", "pp", "zero_stage", "zero_replicas", "microbatches", "schedule", "virtual_stages")
    assert [tuple(row[name] for name in named) for row in rows] == [
        (1, 1, 1, 1, 0, 1, 1, None, 1),
        (2, 2, 1, 1, 1, 1, 2, None, 1),
        (2, 1, 1, 2, 0, 1, 4, "gpipe", 1),
        (2, 1, 2, 1, 0, 1, 1, None, 1),
    ]
    for row in rows:
        assert [row[size] for size in layouts.MODEL_SIZES] == [2, 8, 2, 4, 16]
        assert (row["global_batch"], row["recompute"]) == (4, "none")
        assert (row["seconds"] > 1) == (row["ranks"] > 1)
        assert len(row["ranks_peak_bytes"]) == row["ranks"]
        assert 0 < min(row["ranks_peak_bytes"]) <= max(row["ranks_peak_bytes"]) == row["peak_bytes"]


def test_the_table_has_columns_for_what_layouts_differ_in(monkeypatch, capsys):
    monkeypatch.setattr(layouts, "LAYOUTS", ("", "--microbatches 2"))
    run_layouts(1, "--repeat", "1")
    columns = (
        "ranks dp tp pp zero_stage zero_replicas sequence_parallel schedule microbatches recompute"
        " seconds seconds_min seconds_max peak_bytes"
    )
    assert capsys.readouterr().out.splitlines()[0].split() == columns.split()


@pytest.mark.parametrize(
    ("flags", "network"),
    [
        ([], Network(20e-6, 1e-9)),
        (["--network", "2", "3"], Network(2.0, 3.0)),
        (["--network", "0", "0"], Network(0.0, 0.0)),
    ],
)
def test_messages_take_a_usual_time_or_the_given_one(flags, network, monkeypatch):
    given = []
    monkeypatch.setattr(layouts, "measure", lambda comm, configs, repeat, network: given.append((repeat, network)))
    monkeypatch.setattr(layouts, "publish", lambda comm, rows, path, hidden: None)
    run_layouts(1, *flags)
    assert given == [(5, network)]


def test_steps_go_on_from_layout_to_layout_and_warm_up_first(monkeypatch):
    """The ledger records two steps of a layout, then one warms up; the layouts take their measured steps in turn."""
    taken = []

    class Trainer(layouts.Trainer):
        def step(self, step):
            taken.append((self.config.data.microbatches, step))
            return super().step(step)

    monkeypatch.setattr(layouts, "Trainer", Trainer)
    configs = [config_for(" ".join([*MODEL, f"--microbatches {count}"])) for count in (1, 2)]
    rows = layouts.measure(serial(), configs, 2, Network())
    assert taken == [(1, 0), (1, 1), (2, 0), (2, 1), (1, 2), (2, 2), (1, 3), (2, 3), (1, 4), (2, 4)]
    for row in rows:
        assert row["seconds"] == pytest.approx((row["seconds_min"] + row["seconds_max"]) / 2)


def test_ranks_without_a_part_in_a_layout_wait_for_it(monkeypatch):
    """Rank 1 begins the layout of two ranks after rank 0 is done with that of one."""
    done = []

    def step_seconds(trainer, step):
        if trainer.mesh.world.size == 1:
            time.sleep(0.1)
            done.append(step)
        assert done[-1] == step
        return 1.0

    monkeypatch.setattr(layouts, "_step_seconds", step_seconds)
    configs = [config_for(" ".join([*MODEL, flags]), ranks) for flags, ranks in (("", 1), ("--dp 2", 2))]
    rows = run_local(2, layouts.measure, configs, 1, Network())
    assert len(done) == 2 and [row["seconds"] for row in rows[0]] == [1.0, 1.0]


def test_a_given_network_is_predicted_too(monkeypatch, tmp_path):
    """Each message takes a second, on the clock and for the planner."""
    published = []
    constants = {"flops_per_second": 1e9, "message_alpha": 0.0, "message_beta": 0.0}
    constants |= dict.fromkeys([name for name in vars(COSTS) if name not in constants], 1e-9)
    rows = [{"row": "constant", "name": name, "value": value} for name, value in constants.items()]
    (tmp_path / "machine.json").write_text(json.dumps(rows))
    monkeypatch.setattr(layouts, "LAYOUTS", ("", "--tp 2"))
    monkeypatch.setattr(layouts, "publish", lambda comm, rows, path, hidden: published.append((comm.rank, rows)))
    flags = ["--machine", str(tmp_path / "machine.json"), "--repeat", "1", "--json", "-"]
    for alpha in ("0", "1"):
        run_layouts(2, *flags, "--network", alpha, "0")
        one, two = dict(published)[0]
        assert one["predicted_seconds"] < 1 and (two["predicted_seconds"] > 1) == (alpha == "1")
        assert two["ratio"] == pytest.approx(1, abs=0.1) or alpha == "0"
        assert "ratio" not in dict(published)[1][0]


def test_a_model_of_one_layer_runs_where_no_pipeline_does():
    assert [layouts.layout_of(config).gpus for config in layouts.configs(ModelConfig(1, 16, 4, 8, 16), 8, 1)] == [1] * 3
    with pytest.raises(UsageError, match="^--layers 1 are fewer than the 2 stages of the layout --pp 2"):
        layouts.configs(ModelConfig(1, 16, 4, 8, 16), 8, 2)


# ---- modelled --------------------------------------------------------------------------------------------------------


def run_modelled(capsys, own, flags):
    parser = ArgumentParser()
    layouts.add_modelled_flags(parser)
    parser.add_argument("--json")
    args = parser.parse_args([*own.split(), "--flops", "1e9", "--json", "-", "--", *MODEL, *flags.split()])
    layouts.run_modelled(serial(), args)
    (row,) = json.loads(capsys.readouterr().out)
    return row


@pytest.mark.parametrize(
    ("own", "flags", "hosts"),
    [
        ("", "", 1),
        ("--gpus-per-node 1", "--dp 2", 2),
        ("", "--dp 2 --dtype bfloat16 --recompute full", 1),
        ("", "--dp 2 --dtype float64", 1),
        ("--inside 1e-4 1e-7", "--dp 2 --zero-stage 2 --microbatches 2 --sync-every-microbatch", 1),
        ("--gpus-per-node 2 --between 1 1e-9", "--dp 2 --tp 2", 2),
    ],
)
def test_a_modelled_step_is_the_predicted_one(own, flags, hosts, capsys):
    row = run_modelled(capsys, own, flags)
    assert row["hosts"] == hosts and row["ratio"] == pytest.approx(1, abs=0.02)
    assert (row["seconds"] > 1) == ("--between 1" in own)


def test_a_modelled_row_names_the_whole_mesh(capsys):
    mixtral = "--model mixtral --experts 4 --top-k 2 --dp 2 --tp 2 --ep 2 --etp 1 --sequence-parallel"
    rows = [run_modelled(capsys, "", flags) for flags in ("--tp 2", mixtral)]
    mesh = ("ranks", "hosts", "dp", "cp", "ep", "tp", "etp", "pp")
    assert [tuple(row[axis] for axis in mesh) for row in rows] == [(2, 1, 1, 1, 1, 2, 2, 1), (4, 1, 2, 1, 2, 2, 1, 1)]


def test_as_many_ranks_as_the_limit_are_modelled(monkeypatch, capsys):
    monkeypatch.setattr(layouts, "MOST_RANKS", 2)
    assert run_modelled(capsys, "", "--dp 2")["ranks"] == 2
    with pytest.raises(UsageError, match="^4 ranks, --reduction ring: at most 2, and ring$"):
        run_modelled(capsys, "", "--dp 4")


def test_the_default_cluster_is_of_a100_hosts():
    """The links run at 0.8 of the data sheet's 300 and 25 GB/s."""
    parser = ArgumentParser()
    layouts.add_modelled_flags(parser)
    args = parser.parse_args([])
    assert (args.gpus_per_node, args.flops, args.flags) == (8, 234e12, [])
    assert AlphaBeta(*args.inside) == AlphaBeta(3.4e-6, 1 / 0.8 / 300e9)
    assert AlphaBeta(*args.between) == AlphaBeta(14e-6, 1 / 0.8 / 25e9)
