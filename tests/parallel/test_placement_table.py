"""Claims about the table of placements, a layout's stages, and a state: exactly these lines and values."""

from dataclasses import replace

import numpy as np
import pytest

from minipar.nn import GPTConfig, MixtralConfig, Parameter
from minipar.parallel.layout import StepLayout
from minipar.parallel.pipeline.schedules import make
from minipar.parallel.placement import BucketSlice, ParameterShard, Partial, Placement, Placements, Replicate, Shard
from minipar.parallel.state import Cut, Piece, as_host
from minipar.parallel.traffic import bucket_elements, dp_bytes

TABLE = """\
name            shape   tp                             pp  ep  dp chunk
wte.weight      (8, 4)  Shard(0)                       0   -   0:16 of 16
ln.weight       (4,)    Partial                        1   -   -
bias            (4,)    Replicate                      0   -   2:4 of 4
c_attn.weight   (4, 6)  Shard(1, groups=3)             2   -   0:0 of 12
k_proj.weight   (8, 4)  Shard(0, copies=2)             0   -   -
qkv.weight      (6, 4)  Shard(0, groups=3, copies=2)   0   -   -
experts.0.w1    (8, 4)  whole                          0   3   -
experts.1.w1    (8, 4)  Shard(0)                       0   10  -"""


def test_the_table_is_these_lines():
    every = Placements(
        [
            Placement("wte.weight", (8, 4), Shard(0, 2, 0, 8), dp=BucketSlice(0, 16, 16, 0, 1)),
            Placement("ln.weight", (4,), Partial(1, 2), pp=1),
            Placement("bias", (4,), dp=BucketSlice(2, 4, 8, 1, 2)),
            Placement("c_attn.weight", (4, 6), Shard(1, 2, 1, 6, 3), pp=2, dp=BucketSlice(4, 12, 16, 0, 4)),
            Placement("k_proj.weight", (8, 4), Shard(0, 2, 0, 8, copies=2)),
            Placement("qkv.weight", (6, 4), Shard(1, 2, 0, 6, 3, 2, 1)),
            Placement("experts.0.w1", (8, 4), Shard(0, 1, 0, 8), ep=3),
            Placement("experts.1.w1", (8, 4), Shard(0, 2, 0, 8), ep=10),
        ]
    )
    shown = [line.split() for line in TABLE.splitlines()]
    assert [line.split() for line in str(every).splitlines()] == shown
    assert repr(every) == str(every) and not any(line.endswith(" ") for line in str(every).splitlines())
    columns = {line.index(" 0 ") for line in str(every).splitlines() if " 0 " in line}
    assert len(columns) == 1


@pytest.mark.parametrize(
    ("placement", "shown"),
    [
        (Replicate(1, 2), "up.weight"),
        (Partial(1, 2), "up.weight"),
        (Shard(0, 1, 0, 8), "up.weight"),
        (Shard(0, 1, 0, 8, copies=2, copy=1), "up.weight, tp rank 1 of 2"),
        (Shard(1, 2, 0, 8), "up.weight, tp rank 1 of 2"),
        (Shard(1, 3, 0, 9, copies=2, copy=1), "up.weight, tp rank 3 of 6"),
    ],
)
def test_a_shard_says_which_elements_of_which_part_it_has(placement, shown):
    whole = Parameter(np.zeros(12))
    whole.placement = Placement("up.weight", (8, 4), placement)
    part = ParameterShard(whole, whole.data[3:5], range(3, 5))
    assert whole.describe() == shown and part.describe() == f"{shown}[3:5]"
    assert repr(part) == "ParameterShard(up.weight[3:5], float64)"


# ---- stages of a layout ----------------------------------------------------------------------------------------------

LAYOUT = StepLayout(GPTConfig(16, 8, 24, 4, 8), length=8, samples=2, microbatches=4, itemsize=4)


def test_the_ends_of_the_model_are_with_the_blocks_next_to_them():
    """The model has an embedding, four blocks and a head."""
    layout = replace(LAYOUT, pp=4, schedule=make("1f1b", 4, 4))
    assert (layout.homes, layout.first, layout.last) == ([0, 0, 1, 2, 3, 3], 0, 3)
    assert [layout.blocks(pp) for pp in range(4)] == [1, 1, 1, 1]
    one = replace(LAYOUT, pp=1)
    assert (one.homes, one.first, one.last, one.blocks(0)) == ([0] * 6, 0, 0, 4)


def test_both_ends_of_a_v_are_on_one_rank():
    layout = replace(LAYOUT, pp=2, schedule=make("zbv", 2, 4))
    assert (layout.homes, layout.first, layout.last) == ([0, 0, 1, 1, 0, 0], 0, 0)
    assert [layout.blocks(pp) for pp in range(2)] == [2, 2]


def test_without_a_rank_of_tp_traffic_is_that_of_the_first():
    """Routing ranks of tp have other chunks of the experts' buckets."""
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4, "num_local_experts": 4}
    model = MixtralConfig(vocab_size=16, hidden_size=16, intermediate_size=9, **sizes)
    layout = StepLayout(model, 8, 2, 1, itemsize=4, dp=2, tp=2, etp=1, sequence_parallel=True, zero_stage=1)
    layout = replace(layout, router_bias=0.1)
    by_rank = [dp_bytes(layout, 0, 0, tp) for tp in range(2)]
    assert dp_bytes(layout, 0, 0) == by_rank[0] != by_rank[1]
    every = bucket_elements(layout, 0)
    assert sum(every.values()) == sum(p.dp.size for p in layout.placements())
    assert set(every) == {(0, False), (1, False), (1, True), (2, False)}


def test_a_rank_that_is_not_there_is_named_with_the_product():
    layout = replace(LAYOUT, dp=2, cp=1, tp=2)
    assert [layout.coordinates(rank)["tp"] for rank in range(4)] == [0, 1, 0, 1]
    for rank in (-1, 4):
        with pytest.raises(ValueError) as caught:
            layout.coordinates(rank)
        assert str(caught.value) == f"rank {rank} of dp*cp*tp*pp = 2*1*2*1"


# ---- pieces of a state -----------------------------------------------------------------------------------------------


def test_a_piece_is_listed_with_its_cut_or_without():
    cut = Cut(dim=1, groups=3, rank=1, ranks=2)
    piece = Piece("up.weight", 3, 8, cut)
    entry = {"name": "up.weight", "start": 3, "stop": 8, "cut": {"dim": 1, "groups": 3, "rank": 1, "ranks": 2}}
    assert piece.to_json() == entry and Piece.from_json(entry) == piece and piece.size == 5
    assert cut.shard((4, 12)) == Shard(1, 2, 1, 12, 3)
    whole = Piece("bias", 0, 4, None)
    assert Piece.from_json(whole.to_json()) == whole and whole.to_json()["cut"] is None


def test_a_host_array_is_a_copy_row_after_row():
    x = np.arange(6.0).reshape(2, 3)
    for array in (x, x.T):
        copy = as_host(array)
        assert copy.flags.c_contiguous and np.array_equal(copy, array) and not np.shares_memory(copy, array)
