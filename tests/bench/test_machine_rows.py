"""Claims about the rows of `bench machine`: the tests say how long the pieces and the messages take."""

import time
from argparse import Namespace
from dataclasses import asdict, fields
from types import SimpleNamespace

import numpy as np
import pytest

from minipar.bench import machine
from minipar.bench.costs import PIECES, SUMS, Costs, Shape, amounts_of, fit, flops
from minipar.comm import run_local, serial
from minipar.errors import UsageError

NAMES = [field.name for field in fields(Costs)]
SCALES = [1e11 if name == "flops_per_second" else 1e-9 for name in NAMES]
UNITS = dict(zip(NAMES, np.linspace(1, 2, len(NAMES)) * SCALES, strict=True))
TRUE = Costs(**UNITS)
UNIT_OF = {
    "flops_per_second": "FLOP/s",
    "forward_byte": "seconds per kept byte",
    "weight_block": "seconds per block and pass",
    "copy_hidden": "seconds per element of hidden",
    "head_forward_logit": "seconds per element of logits",
    "embed_forward_call": "seconds per pass",
    "norm_parameter": "seconds per parameter",
    "update_tensor": "seconds per tensor",
}


@pytest.mark.parametrize("ranks", [1, 3])
def test_rows_are_constants_pieces_and_messages(ranks, monkeypatch):
    """A shape to which nothing is fitted takes twice the time that the constants predict."""
    checked = [shape for shape, fitted in machine.shapes(256, 64, 256) if not fitted]

    def measure_pieces(comm, shape, repeat):
        assert repeat == 5
        size = 1e6 * shape.hidden * shape.samples
        slower = 2 if shape in checked else 1
        times = {piece: slower * TRUE.seconds(piece, shape, size) for piece in (*PIECES, *SUMS)}
        return times | {"parameters": size}

    def ping_pong(comm, buffer, peer):
        assert {comm.rank, peer} == {0, 1}
        return 2 * machine.ROUND_TRIPS * (1e-5 + 2e-9 * buffer.nbytes)

    monkeypatch.setattr(machine, "measure_pieces", measure_pieces)
    monkeypatch.setattr(machine, "_ping_pong", ping_pong)
    every = run_local(ranks, lambda comm: machine.measure(comm, 256, 64, 256, 5))
    assert every == [every[0]] * ranks
    rows = every[0]
    assert all(tuple(row)[: len(machine.COLUMNS)] == machine.COLUMNS for row in rows)
    kept = [{column: value for column, value in row.items() if value is not None} for row in rows]
    constants = [row for row in kept if row["row"] == "constant"]
    messages = [row for row in kept if row["row"] == "message"]
    assert kept == [*constants, *[row for row in kept if row["row"] == "piece"], *messages]
    units = {row["name"]: row["unit"] for row in constants}
    assert {name: units[name] for name in UNIT_OF} == UNIT_OF
    values = {row["name"]: row["value"] for row in constants}
    links = {"message_alpha": 1e-5, "message_beta": 2e-9} if ranks > 1 else {}
    assert values == pytest.approx(UNITS | links, rel=1e-4)
    if ranks > 1:
        assert (units["message_alpha"], units["message_beta"]) == ("seconds", "seconds per byte")
    times = [1e-5 + 2e-9 * nbytes for nbytes in machine.MESSAGE_BYTES]
    one_way = [
        {"row": "message", "name": "one way", "bytes": nbytes, **approximately(seconds, seconds)}
        for nbytes, seconds in zip(machine.MESSAGE_BYTES, times, strict=True)
    ]
    assert messages == (one_way if ranks > 1 else [])
    (piece,) = [row for row in kept if row["name"] == "B more" and (row["samples"], row["tp"]) == (32, 8)][:1]
    shape = Shape(256, 8, 64, 32, 8)
    seconds = TRUE.seconds("B more", shape, 1e6 * 256 * 32)
    assert piece == {
        "row": "piece",
        "name": "B more",
        "fitted": True,
        **asdict(shape),
        **approximately(seconds, seconds),
    }
    ratios = [row["ratio"] for row in kept if row["row"] == "piece" and not row["fitted"]]
    assert checked
    assert ratios == pytest.approx([0.5] * len(checked) * len((*PIECES, *SUMS)), rel=1e-3)


def approximately(seconds, predicted):
    return {
        "seconds": pytest.approx(seconds, rel=1e-3),
        "predicted": pytest.approx(predicted, rel=1e-3),
        "ratio": pytest.approx(predicted / seconds, rel=1e-3),
    }


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"repeat": 0}, "--repeat 0 --vocab-size 8: expected at least 1 and 8"),
        ({"vocab_size": 7}, "--repeat 1 --vocab-size 7: expected at least 1 and 8"),
        ({"hidden": 12}, "--hidden 12 --seq-len 4: expected multiples of 8 and 4"),
        ({"hidden": 0}, "--hidden 0 --seq-len 4: expected multiples of 8 and 4"),
        ({"seq_len": 6}, "--hidden 8 --seq-len 6: expected multiples of 8 and 4"),
        ({"seq_len": 0}, "--hidden 8 --seq-len 0: expected multiples of 8 and 4"),
        ({}, None),
    ],
)
def test_the_least_sizes_are_one_head_each_and_four_tokens(changed, line, monkeypatch):
    measured = []
    monkeypatch.setattr(machine, "measure", lambda comm, *sizes: measured.append(sizes))
    monkeypatch.setattr(machine, "publish", lambda comm, rows, path: None)
    args = Namespace(**{"repeat": 1, "vocab_size": 8, "hidden": 8, "seq_len": 4, "json": None} | changed)
    if line is None:
        machine.run(serial(), args)
        assert measured == [(8, 4, 8, 1)]
    else:
        with pytest.raises(UsageError, match=f"^{line}$"):
            machine.run(serial(), args)


def test_the_even_rank_sends_first():
    """The odd rank gets its values, and both ranks send as many bytes."""

    def rank(comm):
        buffer = np.full(3, float(comm.rank))
        seconds = machine._ping_pong(comm, buffer, comm.rank ^ 1)
        assert 0 < seconds < 60
        return buffer.tolist(), comm.traffic.bytes()

    (even, sent), (odd, sent_back) = run_local(2, rank)
    assert even == odd == [0.0] * 3 and sent == sent_back


def test_the_seconds_of_pieces_are_medians_over_the_ranks(monkeypatch):
    monkeypatch.setattr(machine, "pieces", lambda shape, repeat: {"F": next(values), "I": repeat + shape.samples})
    values = iter([9.0, 2.0, 4.0])
    expected = {"F": 4.0, "I": 7.0}
    assert run_local(3, lambda comm: machine.measure_pieces(comm, Shape(32, 4, 8, 2), 5)) == [expected] * 3


def test_all_ranks_measure_at_once(monkeypatch):
    """No rank begins with its pieces, or with its messages, before the last one has come."""
    came = []

    def begin(*_):
        assert came
        return {"F": 1.0}

    def rank(comm):
        if comm.rank == 1:
            time.sleep(0.1)
            came.append(comm.rank)
        machine.measure_pieces(comm, Shape(32, 4, 8, 2), 1)
        comm.barrier()
        came.clear()
        comm.barrier()
        if comm.rank == 1:
            time.sleep(0.1)
            came.append(comm.rank)
        machine.measure_messages(comm)

    monkeypatch.setattr(machine, "pieces", begin)
    monkeypatch.setattr(machine, "_ping_pong", lambda *given: begin(*given)["F"])
    run_local(2, rank)


def test_the_fake_group_sends_nothing_and_keeps_sizes():
    group, x = machine.LocalGroup(3), np.arange(6.0)
    assert (group.rank, group.size, list(group.ranks), group.axis) == (0, 3, [0, 1, 2], "tp")
    assert group.all_gather_bytes(b"a") == [b"a"] * 3
    assert group.all_reduce(x) is x and group.all_reduce(x, async_op=True).wait() is x
    gathered, scattered = group.all_gather(x), group.reduce_scatter(x, async_op=True).wait()
    assert (gathered.size, gathered.dtype, scattered.size, scattered.dtype) == (18, x.dtype, 2, x.dtype)
    assert not gathered.any() and not scattered.any()


def test_the_head_and_the_embedding_start_from_zero(monkeypatch):
    """When the norm is taken, only the two embeddings and the last norm's weight and bias have gradients."""
    seen = []

    def clip(parameters, most, comm):
        seen.append(sum(bool(p.grad.any()) for p in parameters))

    monkeypatch.setattr(machine, "clip_grad_norm", clip)
    machine.pieces(Shape(16, 2, 8, 1), 2)
    assert seen == [4] * (machine.WARMUP + 2)


def test_the_first_weight_gradients_of_a_step_are_written(monkeypatch):
    """The second microbatch is the same one here, and its gradients are added; the head has none in the blocks."""
    models, sizes = [], []
    build = machine._build

    def remember(shape):
        models.append(build(shape))
        return models[0]

    class Stage(machine.PipelineStage):
        def remember(self):
            gradients = [p.grad for block in models[0][0].h for p in block.parameters() if p.grad is not None]
            sizes.append(sum(float(np.abs(gradient).sum()) for gradient in gradients))

        def backward(self, *arguments):
            super().backward(*arguments)
            self.remember()

        def backward_input(self, *arguments):
            super().backward_input(*arguments)
            sizes.pop()

        def backward_weight(self, *arguments):
            super().backward_weight(*arguments)
            self.remember()

    monkeypatch.setattr(machine, "_build", remember)
    monkeypatch.setattr(machine, "PipelineStage", Stage)
    machine.pieces(Shape(16, 2, 8, 1), 1)
    one = sizes[0]
    assert sizes[:5] == pytest.approx([one, 2 * one, one, 2 * one, 0], rel=1e-4) and one > 0


# ---- the fit ---------------------------------------------------------------------------------------------------------


def test_a_shape_is_that_of_one_rank_and_256_tokens_by_default():
    assert Shape(32, 4, 8, 3) == Shape(32, 4, 8, 3, tp=1, sequence_parallel=False, vocab_size=256)


def test_the_least_error_is_that_of_squares():
    """Half of each second is known. A constant for the first alone halves the squared error."""
    assert fit([[1.0], [0.0]], [1.0, 1.0], [0.5, 0.5]).tolist() == [0.5]
    assert fit([[1.0, 2.0], [2.0, 1.0], [1.0, 1.0]], [-1.0, -1.0, -1.0]).shape == (2,)
    assert fit([[1.0], [1.0]], [1.0, 1.0], [3.0, 3.0]).tolist() == [0.0]


def test_a_piece_takes_its_flops_and_each_constants_amount():
    shape = Shape(32, 4, 8, 2, 2, True, 64)
    amounts = amounts_of(shape, 1000.0)
    own = TRUE.input_byte * amounts["kept"] + TRUE.input_block + TRUE.read_parameter * amounts["matrices"]
    own += TRUE.copy_hidden * amounts["copied"] + flops("I", amounts) / TRUE.flops_per_second
    more = TRUE.weight_byte * amounts["kept"] + TRUE.weight_block + TRUE.accumulate_parameter * amounts["matrices"]
    more += flops("W more", amounts) / TRUE.flops_per_second
    assert TRUE.seconds("B more", shape, 1000.0) == pytest.approx(own + more, rel=1e-12)
    norm = 1000 * TRUE.norm_parameter + (4 * 12 + 4) * TRUE.norm_tensor
    assert TRUE.seconds("norm", shape, 1000.0) == pytest.approx(norm, rel=1e-12)
    assert SimpleNamespace(**amounts).once == 1
