"""Claims about placements: parts join to the whole, chunks cover a bucket once, and they are known for any rank."""

import numpy as np
import pytest
from combinations import TEXT, VOCAB
from training import MLP, config_for, trainer_for

from chapters.support.training import step_layout
from minipar.comm import run_local
from minipar.nn import AdamW, Linear
from minipar.parallel.placement import BucketSlice, Shard, elements_of
from minipar.parallel.wrap import shard

RANDOM = np.random.Generator(np.random.Philox(41))

# ---- tensor parallelism ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_joining_the_parts_gives_the_whole_whatever_its_size(ranks, dim, groups):
    for per_group in range(1, 12):
        size = groups * per_group
        shape = [2, 3, 4]
        shape[dim] = size
        whole = RANDOM.standard_normal(shape)
        shards = [Shard(rank, ranks, dim, size, groups) for rank in range(ranks)]
        parts = [each.part(whole) for each in shards]
        assert all(np.array_equal(each.join(parts), whole) for each in shards)
        assert {part.shape for part in parts} == {shards[0].local_shape(shape)}
        assert not any(np.shares_memory(part, whole) for part in parts)
        padding = sum(part.size for part in parts) - whole.size
        assert sum(np.count_nonzero(part == 0) for part in parts) == padding


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_shard_in_three_gives_each_rank_its_heads_of_q_k_and_v(ranks):
    """Column c of the whole is the c-th of q, k, v in turn; written down without Shard's own arithmetic."""
    heads, d = 24, 2
    h = heads * d
    names = np.array([[kind * 1000 + head for kind in range(3) for head in range(heads) for _ in range(d)]])
    for rank in range(ranks):
        own = range(rank * heads // ranks, (rank + 1) * heads // ranks)
        expected = [kind * 1000 + head for kind in range(3) for head in own for _ in range(d)]
        assert Shard(rank, ranks, 1, 3 * h, 3).part(names)[0].tolist() == expected


# ---- data parallelism ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("sizes", [[1], [3, 1], [7, 13, 2], [1, 1, 1, 40]])
def test_the_chunks_hold_each_element_of_a_bucket_once(sizes, ranks):
    offsets = np.cumsum([0, *sizes])
    held = np.zeros(sum(sizes), int)
    for rank in range(ranks):
        start, stop = np.array_split(np.arange(sum(sizes)), ranks)[rank][[0, -1]] if rank < sum(sizes) else (0, -1)
        chunk = []
        for offset, size in zip(offsets, sizes, strict=False):
            place = BucketSlice(int(offset), size, sum(sizes), rank, ranks)
            assert place.own == place.elements(rank, ranks)
            chunk += [offset + element for element in place.own]
        assert chunk == list(range(start, stop + 1))
        held[chunk] += 1
    assert (held == 1).all()


def test_a_shard_is_a_view_that_decays_as_the_whole_does():
    def rank(comm):
        ddp = shard(MLP(), comm, 1)
        whole = {p.placement.name: p for p in ddp.model.parameters()}
        for p in ddp.parameters():
            parameter = whole[p.placement.name]
            assert p.ndim == 1 and np.shares_memory(p.data, parameter.data)
            assert p.decays == parameter.decays == (parameter.ndim == 2)
            assert elements_of(p) == p.placement.dp.own and elements_of(parameter) == range(parameter.size)
            own = parameter.data.reshape(-1)[p.elements.start : p.elements.stop]
            assert np.array_equal(p.data, own)
        return sum(p.size for p in ddp.parameters())

    assert run_local(3, rank) == [9, 9, 8]


def test_with_more_ranks_than_elements_a_shard_is_empty():
    def rank(comm):
        ddp = shard(Linear(2, 1, name="layer"), comm, 3)
        AdamW(ddp.parameters())
        return [p.size for p in ddp.parameters()]

    assert run_local(5, rank) == [[1], [1], [1], [0], [0]]


# ---- computed for any rank -------------------------------------------------------------------------------------------

SHAPE = f"--layers 5 --hidden 20 --heads 4 --seq-len 8 --vocab-size {VOCAB} --global-batch 8"
EXPERTS = "--model mixtral --hidden 24 --experts 4"
LAYOUTS = {
    "--dp 3 --global-batch 6": 3,
    "--tp 4 --sequence-parallel": 4,
    "--dp 2 --tp 2 --pp 2 --microbatches 2 --zero-stage 1 --sequence-parallel": 8,
    "--pp 2 --microbatches 2 --schedule zbv": 2,
    "--dp 2 --cp 2 --tp 2 --zero-stage 2": 8,
    "--dp 4 --zero-stage 3 --zero-replicas 2": 4,
    f"{EXPERTS} --dp 2 --tp 2 --pp 2 --ep 2 --microbatches 2 --zero-stage 3": 8,
}


@pytest.mark.parametrize("flags", LAYOUTS)
def test_computed_placements_are_those_that_strategies_record(flags):
    config = config_for(f"{SHAPE} {flags}", LAYOUTS[flags])

    def rank(comm):
        ddp = trainer_for(config, TEXT, comm).ddp
        return [p.placement for bucket in reversed(ddp.buckets) for p in bucket.parameters]

    layout = step_layout(config)
    recorded = run_local(LAYOUTS[flags], rank)
    assert recorded == [layout.placements(**layout.coordinates(r)) for r in range(len(recorded))]
    assert layout.placements() == recorded[0]
