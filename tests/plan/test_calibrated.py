"""The planner against minipar's own runs: time on the `cpu` clock, memory in the ledger.

`recorded/calibration.json` holds what `mpirun -n 8 python -m minipar.bench machine` and `bench layouts --machine`
measured on a quiet machine with 2 cores: the constants, and 28 layouts of one model. What the planner says of them is
computed here; measuring again is the bench's business, since no timed test is a test. Memory is measured here.
"""

import json
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest
from planning import layout

from minipar.bench.costs import Costs, Machine, Shape, load_machine
from minipar.bench.layouts import (
    LAYOUTS,
    RECORDED,
    Agreement,
    agreement,
    configs,
    framework_of,
    layout_of,
    predict,
    shape_of,
)  # fmt: skip
from minipar.bench.pipeline import random_tokens
from minipar.comm import DeviceMesh, Network, run_local
from minipar.errors import UsageError
from minipar.memory import MemoryLedger
from minipar.plan.model import ModelShape
from minipar.plan.rank_bytes import memory
from minipar.train.settings import ModelConfig
from minipar.train.trainer import Trainer

pytestmark = pytest.mark.sampled(3)

RECORD = json.loads((Path(__file__).parent / "recorded" / "calibration.json").read_text())


def machine_of(constants):
    costs = Costs(**{field.name: constants[field.name] for field in fields(Costs)})
    return Machine(costs, Network(constants["message_alpha"], constants["message_beta"]))


def predicted_rows(machine):
    model = dict(RECORD["model"])
    resolved = configs(ModelConfig(**{k: v for k, v in model.items() if k != "global_batch"}), model["global_batch"], 8)
    rows = []
    for row, config in zip(RECORD["layouts"], resolved, strict=True):
        time, held = predict(config, machine, model["seq_len"])
        rows.append(row | {"predicted_seconds": time.total, "predicted_bytes": held.total})
    return rows


def test_the_record_is_of_the_benchs_layouts():
    assert tuple(row["flags"] for row in RECORD["layouts"]) == LAYOUTS and len(LAYOUTS) >= 20


def test_step_times_agree_within_20_percent_and_in_order():
    result = agreement(predicted_rows(machine_of(RECORD["constants"])))
    assert result.largest < 0.20 and result.median < 0.10 and result.spearman >= 0.9
    assert result.memory_largest < 0.10


@pytest.mark.parametrize("wrong", ["flops_per_second", "forward_byte", "message_beta"])
def test_with_a_constant_wrong_by_four_they_disagree(wrong):
    """The claim above can fail."""
    constants = RECORD["constants"] | {wrong: RECORD["constants"][wrong] * (0.25 if wrong[:5] == "flops" else 4)}
    result = agreement(predicted_rows(machine_of(constants)))
    assert result.largest > 0.20


def test_agreement_of_four_rows():
    rows = [
        {"seconds": s, "predicted_seconds": p, "peak_bytes": 100, "predicted_bytes": b}
        for s, p, b in ((1.0, 1.1, 100), (2.0, 2.0, 95), (3.0, 2.4, 100), (4.0, 2.2, 103))
    ]
    result = agreement(rows)
    expected = Agreement(median=0.15, largest=0.45, spearman=0.8, memory_largest=0.05)
    assert asdict(result) == pytest.approx(asdict(expected), rel=1e-6)
    assert str(result) == "seconds predicted within 45.0%, median 15.0%, Spearman 0.800; memory within 5.0%"


def test_the_planners_computation_adds_up_to_the_pieces():
    costs = Costs(*(1e9 if field.name == "flops_per_second" else 1e-9 * i for i, field in enumerate(fields(Costs), 1)))
    model, sizes = ModelShape(5, 32, 4, 64, 8), {"dp": 2, "tp": 2, "pp": 2, "microbatch": 3, "microbatches": 4}
    one = layout(**sizes, sequence_parallel=True, recompute="full")
    compute = costs.compute(model, one, 8, 1000.0)

    def takes(piece):
        return costs.seconds(piece, Shape(32, 4, 8, 3, 2, True, 64), 1000.0)

    assert (compute.forward, compute.backward_input, compute.recompute) == (takes("F"), takes("I"), takes("F"))
    assert costs.compute(model, replace(one, recompute="none"), 8, 1000.0) == replace(compute, recompute=0.0)
    # Four microbatches: from the second on gradients are added to.
    assert 4 * compute.backward_weight == pytest.approx(takes("W") + 3 * takes("W more"), rel=1e-12)
    assert (compute.head_forward, compute.embedding_forward) == (takes("head F"), takes("embed F"))
    assert compute.head_backward_input + compute.head_backward_weight == pytest.approx(takes("head B"), rel=1e-12)
    assert compute.head_backward_weight == 2 * 3 * 8 * 32 * 64 / 2 / 1e9
    assert compute.embedding_backward == takes("embed B")
    tensors = 12 * 3 + 4  # of the fullest rank, three layers
    expected = (costs.norm_parameter + costs.update_parameter) * 1000 + (
        costs.norm_tensor + costs.update_tensor
    ) * tensors
    assert compute.update == pytest.approx(expected, rel=1e-12)


def test_messages_take_the_networks_time_or_none_if_free():
    """On the `cpu` clock what is hidden costs nothing: of two replicas' gradients only the last bucket's waits."""
    machine, resolved = machine_of(RECORD["constants"]), configs(ModelConfig(8, 256, 8, 64, 256), 32, 8)
    for config in resolved:
        time, _ = predict(config, replace(machine, network=Network(0.0, 0.0)), 64)
        assert [time.tp, time.pp, time.dp] == pytest.approx([0, 0, 0], abs=1e-12)
    (two,) = [config for flags, config in zip(LAYOUTS, resolved, strict=True) if flags == "--dp 2"]
    time, _ = predict(two, replace(machine, network=Network(0.0, 1e-10)), 64)
    ends = (256 + 64 + 2) * 256  # tokens, positions, the last norm
    assert time.dp == pytest.approx(2 * ends * 4 / 2 * 1e-10, rel=1e-6)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("which", range(len(LAYOUTS)), ids=[flags or "one device" for flags in LAYOUTS])
def test_memory_is_within_10_percent_of_the_ledger(which):
    resolved = configs(ModelConfig(8, 64, 8, 32, 64), 32, 8)
    config = resolved[which]

    def peak(comm):
        ledger = MemoryLedger()
        with ledger.recording():
            trainer = Trainer(config, DeviceMesh(comm, tp=config.mesh.tp, pp=config.mesh.pp), random_tokens(config))
            for step in range(RECORDED):
                trainer.step(step)
        return ledger.peak

    predicted = memory(shape_of(config), layout_of(config), 32, framework_of(config)).total
    assert predicted == pytest.approx(max(run_local(layout_of(config).gpus, peak)), rel=0.10)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "KeyError 'flops_per_second'"),
        ("x", "JSONDecodeError"),
        ('[{"row": "constant", "name": "flops_per_second", "value": "fast"}]', "ValueError"),
    ],
)
def test_a_file_that_is_no_machine(tmp_path, text, words):
    path = tmp_path / "machine.json"
    path.write_text(text)
    with pytest.raises(UsageError, match="bench machine --json FILE") as caught:
        load_machine(str(path))
    assert words in str(caught.value)
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        load_machine(str(tmp_path / "none.json"))


def test_a_machine_is_read_as_the_bench_writes_it(tmp_path):
    rows = [{"row": "constant", "name": name, "value": value} for name, value in RECORD["constants"].items()]
    path = tmp_path / "machine.json"
    path.write_text(json.dumps([*rows, {"row": "piece", "name": "F"}]))
    assert load_machine(str(path)) == machine_of(RECORD["constants"])
    assert replace(load_machine(str(path)), network=Network()).network == Network(0.0, 0.0)
