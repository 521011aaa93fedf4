"""Claims about the traffic of a layout's step: the bytes of every rank, as the counters of these runs showed them."""

from types import SimpleNamespace

import pytest
import training
from combinations import VOCAB

from minipar.nn import GPTConfig, LlamaConfig, MixtralConfig
from minipar.parallel.layout import StepLayout
from minipar.parallel.traffic import end_gathers, predicted_traffic
from minipar.train.from_config import step_layout

SHAPE = f"--layers 5 --hidden 20 --heads 4 --seq-len 8 --vocab-size {VOCAB}"
LLAMA = "--model llama --hidden 24"
MIXTRAL = "--model mixtral --hidden 24 --experts 4 --ep 2 --aux-loss 0.01 --router-bias 0.1"

# The bytes of each rank on each axis; those of an axis that sends nothing are left out.
BYTES = {
    "--dp 3 --global-batch 6": {"dp": [137176, 137188, 137188]},
    "--dp 2 --pp 2 --zero-stage 3 --microbatches 2 --global-batch 8": {
        "dp": [154856, 154856, 101456, 101456],
        "pp": [3560] * 4,
    },
    "--dp 2 --tp 2 --zero-stage 2 --microbatches 2 --global-batch 8 --sync-every-microbatch --sequence-parallel": {
        "dp": [79636] * 4,
        "tp": [63112] * 4,
    },
    "--tp 2 --pp 2 --microbatches 2 --schedule zbv --recompute full --dtype float64": {
        "tp": [579592, 579592, 737288, 737288],
        "pp": [82040] * 4,
    },
    "--dp 4 --zero-stage 1 --zero-replicas 2 --global-batch 8": {"dp": [154352, 154336, 154336, 154336]},
    "--cp 2 --tp 2 --context-parallel ulysses --zero-stage 1 --dtype bfloat16": {
        "dp": [39826] * 4,
        "cp": [51200] * 4,
        "tp": [226824] * 4,
    },
    f"{LLAMA} --cp 2 --tp 2 --kv-heads 1 --context-parallel all-gather --recompute full": {
        "dp": [65576] * 4,
        "cp": [122880] * 4,
        "tp": [400528] * 4,
    },
    f"{LLAMA} --dp 2 --tp 4 --kv-heads 2 --sequence-parallel --zero-stage 3": {
        "dp": [53968] * 8,
        "tp": [415176, 415160, 415160, 415160] * 2,
    },
    f"{LLAMA} --pp 2 --tp 2 --reduction tree --global-batch 4 --vocab-size 16 --sequence-parallel --recompute full": {
        "tp": [102168, 102168, 69912, 69912],
        "pp": [1568] * 4,
    },
    f"{MIXTRAL} --dp 2 --cp 2 --microbatches 2 --global-batch 8 --context-parallel ring": {
        "dp": [261432, 261384, 261384, 261384],
        "cp": [62080] * 4,
    },
    f"{MIXTRAL} --dp 2 --tp 4 --etp 2 --sequence-parallel --zero-stage 1 --recompute full --reduction ordered": {
        "dp": [107560, 107560, *[107544] * 6],
        "tp": [416136, 416120, 416120, 416120] * 2,
    },
}


@pytest.mark.parametrize("flags", BYTES)
def test_every_rank_sends_these_bytes(flags):
    expected = BYTES[flags]
    ranks = len(next(iter(expected.values())))
    layout = step_layout(training.config_for(f"{SHAPE} {flags}", ranks))
    predicted = [predicted_traffic(layout, rank) for rank in range(ranks)]
    sent = {axis: [each[axis] for each in predicted] for axis in predicted[0]}
    assert {axis: of_ranks for axis, of_ranks in sent.items() if any(of_ranks)} == expected


SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "num_local_experts": 8}
EXPERTS = MixtralConfig(vocab_size=16, hidden_size=16, intermediate_size=12, **SIZES)
SHARED = {"cp": 2, "tp": 4, "ep": 4, "etp": 2, "sequence_parallel": True, "router_bias": 0.1}
GPT = GPTConfig(16, 8, 24, 2, 8)
PROPERTIES = (
    "gradient_bytes", "reduce_bytes", "replicas", "shards", "expert_tp", "routing_ranks", "edp", "expert_sums_apart",
    "tokens", "syncs", "leaf_sums", "enters", "exits", "norm_rows", "loads",
)  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "values"),
    [
        (StepLayout(GPT, 8, 2, 3, 4), (4, 4, 1, 1, 1, 1, 1, False, 16, 1, 1, 2, 2, 1, 0)),
        (StepLayout(EXPERTS, 8, 2, 3, 2, 4, 8, dp=2, **SHARED), (4, 8, 4, 4, 2, 8, 2, True, 8, 1, 1, 1, 1, 1, 18)),
        (
            StepLayout(EXPERTS, 8, 2, 3, 2, dp=4, tp=2, zero_stage=1, zero_replicas=2, capacity_factor=2.0),
            (2, 2, 4, 2, 2, 4, 4, False, 16, 1, 1, 2, 2, 1, 18),
        ),
        (StepLayout(EXPERTS, 8, 2, 3, 2, dp=2, ep=2), (2, 2, 2, 2, 1, 2, 1, True, 16, 1, 1, 2, 2, 1, 0)),
        (
            StepLayout(GPT, 8, 2, 3, 4, dp=2, cp=2, tp=2, reduction="tree"),
            (4, 4, 4, 4, 2, 4, 4, False, 8, 1, 3, 2, 2, 4, 0),
        ),
        (
            StepLayout(LlamaConfig(16, 16, 12, 2, 8, 8), 8, 2, 3, 4, tp=8, reduction="tree"),
            (4, 4, 1, 1, 8, 1, 1, False, 16, 1, 3, 5, 2, 1, 0),
        ),
        (
            StepLayout(GPT, 8, 2, 3, 4, dp=3, zero_stage=2, sync_every_microbatch=True),
            (4, 4, 3, 3, 1, 3, 3, False, 16, 3, 3, 2, 2, 1, 0),
        ),
    ],
)
def test_a_layouts_properties_have_these_values(layout, values):
    assert dict(zip(PROPERTIES, values, strict=True)) == {name: getattr(layout, name) for name in PROPERTIES}


def test_a_rank_of_ep_holds_neighbouring_experts():
    layout = StepLayout(EXPERTS, 8, 2, 3, 2, dp=2, **SHARED)
    of_expert = "model.layers.1.block_sparse_moe.experts.{}.w1.weight"
    assert [layout.expert_rank(of_expert.format(e)) for e in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert layout.expert_rank("model.layers.1.block_sparse_moe.gate.weight") is None
    assert StepLayout(EXPERTS, 8, 2, 3, 2).expert_rank(of_expert.format(3)) is None
    assert [layout.routing_rank(*place) for place in ((0, 0), (0, 3), (1, 0), (3, 3))] == [0, 1, 2, 7]


class Actions(list):
    """The actions of a schedule of three stages, such as F0 for the forward of stage 0."""

    stages = 3

    def __init__(self, names):
        super().__init__((0, SimpleNamespace(kind=name[0], stage=int(name[1]))) for name in names.split())


@pytest.mark.parametrize(
    ("names", "lookups", "both"),
    [
        ("F0 F1 F2 B2 B1 B0", 1, 2),
        ("F0 F1 F2 I2 W2 I1 I0", 1, 2),
        ("F0 F2 F0 B2", 2, 3),  # the lookup frees what the head has kept
        ("F0 F2 F1 B1 W2 B2 F2 I2", 1, 3),  # the actions between the head's forward and its backward need nothing
        ("F0 F0 F0", 3, 3),
        ("F2 F2 B2 B2", 0, 2),
    ],
)
def test_a_pipelines_table_is_gathered_where_it_is_not_held(names, lookups, both):
    assert end_gathers(Actions(names), head_too=False) == lookups
    assert end_gathers(Actions(names), head_too=True) == both
