"""Claims about the serial model's state: in every layout one rank owns each element, and rank 0 collects them all."""

import json
from collections import defaultdict
from dataclasses import asdict

import numpy as np
import pytest
from training import MLP, bits, config_for, ranks_of, small_gpt, text, trainer_for, whole_state

import minipar as mp
from minipar.comm import run_local, serial
from minipar.parallel.placement import elements_of
from minipar.parallel.state import Piece, gather_state, owned_pieces
from minipar.parallel.wrap import shard
from minipar.train.data import Tokens

SHAPE = "--layers 4 --hidden 12 --heads 4 --seq-len 8 --vocab-size 11 --dtype float64 --global-batch 12"
TEXT = Tokens(np.arange(100, dtype=np.uint8) % 11, "0 to 10")
LAYOUTS = [
    ("--dp 2 --tp 2 --pp 2 --microbatches 2", 0),
    ("--dp 2 --tp 2 --pp 2 --microbatches 2", 3),
    ("--dp 3 --tp 2 --sequence-parallel", 2),
    ("--dp 3 --pp 2 --microbatches 2 --schedule interleaved-1f1b", 1),
    ("--tp 4 --pp 2 --microbatches 2", 0),
    ("--dp 2 --pp 2 --microbatches 2 --schedule zbv", 3),
    ("--dp 8 --global-batch 8", 3),
]


def on_ranks(layout, stage, inspect):
    config = config_for(f"{SHAPE} {layout} --zero-stage {stage}")
    return run_local(ranks_of(config), lambda comm: inspect(trainer_for(config, TEXT, comm)))


@pytest.mark.parametrize(("layout", "stage"), LAYOUTS)
def test_the_ranks_own_each_element_of_each_parameter_once(layout, stage):
    serial = trainer_for(config_for(SHAPE), TEXT).model
    shapes = {name: p.shape for name, p in serial.named_parameters()}

    def own(trainer):
        return [
            (piece, trainer.ddp.parameters()[i].placement) for i, piece, _ in owned_pieces(trainer.ddp.parameters())
        ]

    counts = defaultdict(dict)
    for piece, placement in [each for pieces in on_ranks(layout, stage, own) for each in pieces]:
        rank, shape = 0, placement.shape
        assert Piece.from_json(json.loads(json.dumps(asdict(piece)))) == piece
        if piece.shard is not None:
            assert piece.shard == placement.tp
            rank, shape = piece.shard.rank, placement.tp.local_shape(shape)
        held = counts[piece.name].setdefault(rank, np.zeros(int(np.prod(shape)), int))
        held[piece.start : piece.stop] += 1
    assert set(counts) == set(shapes)
    for name, parts in counts.items():
        assert sorted(parts) == list(range(len(parts))), name
        assert all((held == 1).all() for held in parts.values()), name
        assert sum(held.size for held in parts.values()) >= int(np.prod(shapes[name]))


@pytest.mark.parametrize(("layout", "stage"), LAYOUTS)
def test_rank_0_gets_the_serial_models_state_and_the_others_none(layout, stage):
    expected = trainer_for(config_for(SHAPE), TEXT).state_dict()
    first, *others = on_ranks(layout, stage, lambda trainer: trainer.state_dict())
    assert list(first) == list(expected) if "--pp" not in layout else set(first) == set(expected)
    assert all(np.array_equal(first[name], array) for name, array in expected.items())
    assert all(array.flags.c_contiguous and array.dtype == np.float64 for array in first.values())
    assert all(other == {} for other in others)


def test_collecting_sends_each_element_to_rank_0_once():
    def rank(comm):
        ddp = shard(small_gpt(), comm, 2)
        comm.traffic.reset()
        whole_state(ddp)
        return comm.traffic.bytes("send"), 8 * sum(p.size for p in ddp.parameters())

    (first, _), *others = run_local(4, rank)
    assert first == 0 and all(sent == own for sent, own in others)


def test_parameters_of_a_users_model_come_in_its_order():
    def rank(comm):
        ddp = shard(MLP(), comm, 3)
        own = {p.placement.name: len(elements_of(p)) for p in ddp.parameters()}
        return list(gather_state(ddp.model, ddp.parameters(), comm)), sum(own.values())

    (names, _), *_ = outcomes = run_local(3, rank)
    assert names == [name for name, _ in MLP().named_parameters()]
    assert sum(count for _, count in outcomes) == 26


def test_one_device_has_a_norm_and_a_state_too():
    """The functions are those of any mesh; a model that no strategy has placed is whole."""
    model, x, y = small_gpt(), *text(range(2))
    model.loss(x, y).backward()
    exact = np.sqrt(sum((p.grad**2).sum() for p in model.parameters() if not p.ties))
    tied = model.wte.weight.grad + model.wte.weight.ties[0].grad
    norm = mp.clip_grad_norm(model.parameters(), 0.5)
    assert norm == pytest.approx(np.hypot(exact, np.linalg.norm(tied)), rel=1e-13)
    assert mp.clip_grad_norm(model.parameters(), None) == pytest.approx(0.5, rel=1e-5)
    assert bits(mp.gather_state(model, model.parameters(), serial())) == bits(model.state_dict())
