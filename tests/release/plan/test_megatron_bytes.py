"""Bytes of Megatron-LM's own functional tests on 8 A100: model state, by differences between layouts, and peaks.

RECORD has 85 of them (Megatron-LM d98e8a64, tests/functional_tests/test_cases/gpt, golden values of dev_dgx_a100),
as the last rank wrote them: bytes resident after the last step, and the most. All but two are of a model of 12 layers
of 512.
"""

import csv
from functools import cache
from itertools import combinations
from pathlib import Path

import pytest

from minipar.plan.layout import PRECISIONS, Layout
from minipar.plan.model import ModelShape
from minipar.plan.rank_bytes import memory, rank_parameters

RECORD = Path(__file__).parent / "recorded" / "megatron_tests.csv"
GPUS = 8


@cache
def rows():
    with RECORD.open() as file:
        return tuple(csv.DictReader(file))


def described(row):
    """Return a row's model and layout. The vocabulary is padded to a multiple of 128 tp."""
    size = {name: int(row[name]) for name in row if row[name].isdigit()}
    padded = -(-size["vocab"] // (128 * size["tp"])) * 128 * size["tp"]
    model = ModelShape(
        layers=size["layers"],
        hidden=size["hidden"],
        heads=size["heads"],
        vocab_size=padded,
        positions=size["positions"],
        kv_heads=size["groups"],
        gated=bool(size["swiglu"]),
        tied=not size["untied"],
        biases=bool(size["biases"]),
    )
    dp = GPUS // (size["tp"] * size["pp"] * size["cp"])
    return model, Layout(
        dp=dp,
        tp=size["tp"],
        pp=size["pp"],
        cp=size["cp"],
        microbatch=size["microbatch"],
        microbatches=size["batch"] // (dp * size["microbatch"]),
        zero=size["sharded"],
        schedule="interleaved-1f1b" if size["stages_per_rank"] > 1 else "1f1b",
        virtual_stages=size["stages_per_rank"],
        recompute=row["recompute"],
        attention="flash" if row["engine"] in ("auto", "flash") else "stored",
        precision=PRECISIONS["bf16"],
    )


def state(row):
    """Return the bytes of parameters, gradients and optimizer state of the row's last rank.

    In a pipeline it has the head and the last norm, and no positions. Of the tied embedding it has a copy.
    """
    model, layout = described(row)
    first, held = rank_parameters(model, layout), memory(model, layout, int(row["length"]))
    last = first if layout.pp == 1 else first - model.positions * model.hidden + model.norm_parameters
    return last / first * (held.parameters + held.gradients + held.optimizer)


OTHER_BUFFERS = ("cross_entropy", "defer", "reshard")  # in the names of tests that keep more or less


def alike(row):
    """Return what decides which other buffers a rank has: pipeline, cp, recompute, the MLP, who wrote the layers."""
    pipeline = "none" if row["pp"] == "1" else f"interleaved {row['stages_per_rank'] != '1'}"
    return pipeline, row["cp"] != "1", row["engine"] == "local", row["recompute"], row["swiglu"], row["hidden"]


def usual(row):
    return row["precision"] == "bf16" and not any(word in row["case"] for word in OTHER_BUFFERS)


def differences():
    """Return (measured, predicted) resident bytes of layouts with the same buffers that differ by 100 MB."""
    groups = {}
    for row in rows():
        if usual(row) and row["engine"] != "local":
            groups.setdefault(alike(row), {})[state(row)] = int(row["resident"])
    found = []
    for group in groups.values():
        for (first, held), (second, other) in combinations(group.items(), 2):
            if abs(first - second) > 100e6:
                found.append((abs(held - other), abs(first - second)))
    return found


def test_state_differs_between_layouts_as_it_does_in_megatron():
    found = differences()
    assert len(found) == 9
    assert all(abs(measured / predicted - 1) < 0.01 for measured, predicted in found)


def test_resident_bytes_are_state_and_at_most_230_mib():
    """What the planner does not count: buffers of NCCL, cuBLAS and the data. One row of the 7B model has 1,093 MiB; all
    but 68 of them are as many as a 16-bit copy of its output matrix, and we do not know why.
    """
    rest = {row["case"]: (int(row["resident"]) - state(row)) / 2**20 for row in rows()}
    large = {case: more for case, more in rest.items() if not 23 < more < 230}
    assert list(large) == ["gpt3_7b_tp1_pp4_memory_speed"]
    matrix = 2 * 131200 * 4096 / 2**20
    assert large["gpt3_7b_tp1_pp4_memory_speed"] - matrix == pytest.approx(68, abs=1)


def peaks(chosen):
    """Return predicted over measured peak bytes."""
    found = []
    for row in chosen:
        model, layout = described(row)
        found.append(memory(model, layout, int(row["length"])).total / int(row["peak"]))
    return found


def test_peaks_of_the_7b_model_within_3_percent():
    assert [row["hidden"] for row in rows()][:2] == ["4096", "4096"]
    assert peaks(rows()[:2]) == pytest.approx([1.0, 0.98], abs=0.01)


def is_fullest(row):
    """Return whether the last rank, whose bytes these are, is the fullest: without interleaving a pipeline's is not."""
    return row["pp"] != "4" or row["stages_per_rank"] != "1"


def test_peaks_of_small_models_within_13_percent():
    """53 of 56 within 10 %. Scores are stored where attention is not flash attention."""
    found = peaks(row for row in rows()[2:] if usual(row) and is_fullest(row))
    assert len(found) == 56 and max(abs(ratio - 1) for ratio in found) < 0.13
    assert sum(abs(ratio - 1) <= 0.1 for ratio in found) == 53
