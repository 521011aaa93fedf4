"""Claims about placements: parts join to the whole, chunks cover a bucket once, and each mistake is named."""

from pathlib import Path

import numpy as np
import pytest
from training import MLP, small_gpt

import minipar as mp
from minipar.comm import run_local
from minipar.errors import UsageError
from minipar.nn import AdamW, Linear, Parameter
from minipar.parallel.parallelize import shard
from minipar.parallel.placement import (
    BucketSlice,
    ParameterShard,
    Partial,
    Placement,
    Replicate,
    Shard,
    attach_placements,
    bucket_slice,
    elements_of,
    holders,
    is_first_holder,
    placement_of,
    terms,
    update,
)
from minipar.parallel.tensor.plan import tensor_placement

RANDOM = np.random.Generator(np.random.Philox(41))

# ---- tensor parallelism ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
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


@pytest.mark.parametrize(("ranks", "copies"), [(2, 2), (4, 2), (6, 3), (8, 2), (8, 8)])
def test_neighbouring_ranks_hold_copies_of_one_slice(ranks, copies):
    whole = RANDOM.standard_normal((24, 4))
    slices = ranks // copies
    name = "model.layers.0.self_attn.k_proj.weight"
    shards = [tensor_placement(name, (24, 4), slices, rank, ranks, False) for rank in range(ranks)]
    parts = [each.part(whole) for each in shards]
    for rank, (each, part) in enumerate(zip(shards, parts, strict=True)):
        assert np.array_equal(part, np.split(whole, slices)[rank // copies])
        assert part.shape == each.local_shape(whole.shape)
        assert is_first_holder(each) == (rank in range(0, ranks, copies))
        assert np.array_equal(each.join(parts[::copies]), whole)
        assert str(each) == f"Shard(0, copies={copies})" and terms(each) == holders(each) == copies
        assert Placement(name, (24, 4), each).describe() == f"{name}, tp rank {rank} of {ranks}"
    assert str(Shard(0, 4, 0, 8, 2, 2)) == "Shard(0, groups=2, copies=2)"


def test_each_kind_of_placement_says_what_ranks_hold_and_add():
    """(ranks with the same values, ranks in one sum, whether this one counts them) on rank 2 of 4."""
    kinds = Replicate(2, 4), Partial(2, 4), Shard(2, 4, 0, 8), Shard(1, 2, 0, 8, copies=2, copy=0)
    found = [(holders(each), terms(each), is_first_holder(each)) for each in kinds]
    assert found == [(4, 1, False), (4, 4, False), (1, 1, True), (2, 2, True)]


def test_each_kind_of_placement_is_no_other_kind():
    kinds = Replicate, Partial, Shard
    for placement in (Replicate(1, 2), Partial(1, 2), Shard(1, 2, 0, 4)):
        assert [isinstance(placement, kind) for kind in kinds] == [type(placement) is kind for kind in kinds]
    assert Replicate(1, 2) != Partial(1, 2) and Shard(1, 2, 0, 4) == Shard(1, 2, 0, 4)


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
            assert isinstance(p, ParameterShard) and p.ndim == 1 and np.shares_memory(p.data, parameter.data)
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


# ---- the record ------------------------------------------------------------------------------------------------------


def test_place_records_the_serial_names_and_shapes_once():
    model = small_gpt()
    attach_placements(model)
    update(model.wpe.weight, pp=3)
    attach_placements(model)
    placements = {name: p.placement for name, p in model.named_parameters()}
    assert all((placement.name, placement.shape) == (name, model.state_dict()[name].shape)
               for name, placement in placements.items())  # fmt: skip
    assert placements["wpe.weight"] == Placement("wpe.weight", (8, 13), pp=3)


def test_a_layer_made_parallel_first_gets_the_models_name():
    model = MLP()
    model.first.weight.placement = Placement("", (3, 5), Shard(0, 1, 1, 5))
    attach_placements(model)
    assert placement_of(model.first.weight) == Placement("first.weight", (3, 5), Shard(0, 1, 1, 5))


def test_the_table_has_names_before_any_strategy_gives_them():
    model = MLP()
    model.first.weight.placement = Placement("", (3, 5), Shard(1, 2, 1, 5))
    found = mp.placements(model)
    assert [placement.name for placement in found] == [name for name, _ in model.named_parameters()]
    assert found[0].tp == Shard(1, 2, 1, 5) and model.first.weight.placement.name == ""


def test_a_placement_is_described_by_what_the_rank_has_of_it():
    whole = Placement("up.weight", (6, 4))
    assert (whole.tp.rank, whole.tp.ranks, Partial().rank, Partial().ranks) == (0, 1, 0, 1)
    assert whole.describe() == "up.weight" and whole.local_shape == (6, 4)
    part = Placement("up.weight", (6, 4), Shard(1, 2, 0, 6))
    assert part.describe() == "up.weight, tp rank 1 of 2" and part.local_shape == (3, 4)
    assert (whole.pp, whole.ep, whole.dp, whole.unit, whole.units) == (0, None, None, 0, 0)
    assert BucketSlice(0, 5, 10, 1, 2).replica == 0


def test_placements_print_as_a_table():
    def rank(comm):
        mesh = mp.DeviceMesh(comm, dp=2, tp=2)
        model = mp.GPT(mp.GPTConfig(vocab_size=7, n_positions=4, n_embd=8, n_layer=1, n_head=2))
        before = str(mp.placements(model)).splitlines()
        tensor = mp.tensor_parallel(model, mesh.tp, sequence=True)
        mp.shard(model, mesh.dp, 1, before_reduce=tensor.sum_partial)
        return before, str(mp.placements(model)).splitlines()

    before, after = run_local(4, rank)[3]
    assert before[1].split() == ["wte.weight", "(7,", "8)", "Replicate", "0", "-", "-"]
    assert after[0].split() == ["name", "shape", "tp", "pp", "ep", "dp", "chunk"]
    rows = {line.split()[0]: line.split(maxsplit=1)[1] for line in after[1:]}
    assert list(rows) == [name for name, _ in mp.GPT(mp.GPTConfig(7, 4, 8, 1, 2)).named_parameters()]
    # The rows of the embedding are padded to 8, of which a rank has 4: with wpe and ln_f a bucket of 80 elements.
    assert rows["wte.weight"].split() == "(7, 8) Shard(0) 0 - 32:32 of 32".split()
    assert rows["wpe.weight"].split() == "(4, 8) Partial 0 - 8:32 of 32".split()
    assert rows["h.0.attn.c_attn.weight"].split()[2:4] == ["Shard(1,", "groups=3)"]
    assert {line.index("Shard(0)") for line in after if "Shard(0)" in line} == {after[0].index("tp")}


def test_the_table_says_which_heads_are_copied():
    def rank(comm):
        model = mp.Llama(mp.LlamaConfig(7, 16, 8, 1, 8, 2, 4))
        tensor = mp.tensor_parallel(model, comm)
        mp.shard(model, mp.DeviceMesh(comm, tp=comm.size).dp, 1, before_reduce=tensor.sum_partial)
        return str(mp.placements(model)).splitlines()

    rows = {line.split()[0].split(".")[-2]: line for line in run_local(8, rank)[5][1:]}
    assert "(4, 16)   Shard(0, copies=4)  0   -   0:32 of 32" in rows["k_proj"]
    assert "Shard(0, copies=4)" in rows["v_proj"] and "copies" not in rows["q_proj"] + rows["o_proj"]


def test_readme_shows_lines_of_the_table_of_its_model():
    def rank(comm):
        mesh = mp.DeviceMesh(comm, dp=2, tp=2)
        model = mp.GPT(mp.GPTConfig(vocab_size=256, n_positions=64, n_embd=128, n_layer=2, n_head=4))
        mp.tensor_parallel(model, mesh.tp)
        mp.shard(model, mesh.dp, 1)
        return str(mp.placements(model)).splitlines()

    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    shown = text.partition("    name  ")[2].partition("    [...]")[0]
    lines = ["name  " + shown.splitlines()[0], *(line.strip() for line in shown.splitlines()[1:])]
    printed = run_local(4, rank)[0]
    assert len(lines) == 4 and [line for line in printed if line in lines] == lines


def test_the_table_names_a_wrappers_model_as_the_remedy():
    def rank(comm):
        return mp.placements(shard(MLP(), comm, 0))

    with pytest.raises(UsageError, match="placements of a DistributedDataParallel: give the model that it wraps"):
        run_local(1, rank)


def test_a_parameter_that_nobody_placed_is_named_with_the_remedy():
    p = Parameter(np.zeros(3))
    with pytest.raises(ValueError, match="has no placement: call attach_placements"):
        placement_of(p)
    with pytest.raises(ValueError, match="has no placement"):
        update(p, pp=1)
    p.placement = Placement("bias", (3,))
    with pytest.raises(ValueError, match="bias is in no bucket: wrap the model"):
        bucket_slice(p)
