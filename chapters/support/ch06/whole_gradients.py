"""Join a tensor-parallel GPT's gradients and compare them with one device (section 6b.3)."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from chapters.support.whole_runs import relative_difference
from minipar.autograd import causal_attention
from minipar.comm.communicator import Communicator
from minipar.nn import GPT, GPTConfig
from minipar.parallel.placement import Shard
from minipar.parallel.tensor.plan import tensor_parallel


def is_split(parameter: Any) -> bool:
    """Tell whether tensor parallelism has split this parameter."""
    return isinstance(parameter.placement.tp, Shard)


def joined(comm: Communicator, shard: Shard, array: np.ndarray) -> np.ndarray:
    """Return the serial array of which each rank's `array` is its part."""
    return shard.join(list(comm.all_gather(np.ascontiguousarray(array)).reshape(comm.size, *array.shape)))


def whole_gradients(
    comm: Communicator,
    shape: GPTConfig,
    batch: tuple[np.ndarray, np.ndarray],
    parallel: bool = True,
    sequence: bool = False,
) -> tuple[float, dict[str, np.ndarray], dict[str, int]]:
    """Return the mean loss, whole gradients by name, and {operation: bytes sent}, of a fresh float64 model."""
    inputs, targets = batch
    model = GPT(shape, dtype="float64")
    tensor = tensor_parallel(model, comm, "ordered", sequence) if parallel else None
    comm.traffic.reset()
    loss = model.loss_sum(inputs, targets)
    loss.backward(np.full_like(loss.data, 1 / inputs.size))
    traffic = {op: nbytes for (op, _), (_, nbytes) in comm.traffic.counts.items()}
    for p in model.parameters():
        p.fold_tied_gradients()  # the tied head's gradient joins that of wte
    if tensor is not None:
        tensor.sum_partial(model.parameters())
    gradients = {
        name: joined(comm, p.placement.tp, p.grad) if parallel and is_split(p) else p.grad
        for name, p in model.named_parameters()
    }
    return loss.item() / inputs.size, gradients, traffic


def compare_with_one_device(
    comm: Communicator, shape: GPTConfig, batch: tuple[np.ndarray, np.ndarray], sequence: bool = False
) -> tuple[float, dict[str, int]]:
    """Return the largest relative difference of the loss and of any gradient to one device, and {op: bytes sent}."""
    one_loss, one, _ = whole_gradients(comm, shape, batch, parallel=False)
    loss, gradients, traffic = whole_gradients(comm, shape, batch, sequence=sequence)
    differences = [relative_difference(gradients[name], one[name]) for name in one]
    differences.append(abs(loss / one_loss - 1))
    return float(np.max(differences)), traffic  # Python's max would lose a NaN


def walk_through_attention(
    model: GPT, inputs: np.ndarray, comm: Communicator | None = None
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield each result on the way through the first attention, its name first.

    With `comm` the model is split over it, and what is split is joined.
    """

    def whole(x: Any, groups: int) -> np.ndarray:
        if comm is None:
            return x.data
        return joined(comm, Shard(comm.rank, comm.size, 2, x.shape[2] * comm.size, groups), x.data)

    block = model.h[0]
    x = model.embed(inputs)
    yield "embedding, summed", x.data
    x = block.ln_1(x)
    yield "ln_1", x.data
    x = block.attn.c_attn(x)
    yield "c_attn: columns", whole(x, 3)
    x = causal_attention(x, block.attn.heads)
    yield "attention: heads", whole(x, 1)
    yield "c_proj: rows, summed", block.attn.c_proj(x).data
