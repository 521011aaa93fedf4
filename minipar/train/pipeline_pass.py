"""Forward and backward of all microbatches of a step through the stages of a pipeline."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import numpy as np

from minipar.autograd import Tensor, packed
from minipar.backend import Array, from_host
from minipar.memory import enter
from minipar.nn.layers import DropoutKeys, dropping
from minipar.parallel.parallelize import DataParallel
from minipar.parallel.pipeline.actions import Action
from minipar.parallel.pipeline.stage import PipelineExecutor, PipelineParallel
from minipar.parallel.tree import tree_sum
from minipar.train.leaves import LeafGradients


def run_schedule(
    executor: PipelineExecutor,
    pipeline: PipelineParallel,
    data_parallel: DataParallel,
    *,
    batches: Sequence[tuple[np.ndarray, np.ndarray]],
    keys: Sequence[DropoutKeys],
    position_ids: Sequence[np.ndarray | None],
    gradient: float,
    last_microbatch: int | None,
    leaves: LeafGradients | None,
) -> float:
    """Compute the gradient of a replica's microbatches, times `gradient`; return their summed loss.

    batches[m] has the inputs and targets of microbatch m. Only the ranks of the first and of the
    last stage need them. keys[m] draws its dropout masks, and position_ids[m] are those of its
    `packed` documents, or None. The backward of the last microbatch starts the sum of the gradients
    over the replicas. Sends what the schedule sends, the gradient of a tied embedding, the
    gradients, and the loss (8 bytes) over pp. `leaves` takes each microbatch's gradients, if they
    add up as a tree.
    """
    losses = np.zeros(1)
    leaf_losses = np.zeros(len(keys))
    on_device: list[tuple[Array, Array]] = []
    for inputs, targets in batches:
        on_device.append((from_host(inputs), from_host(targets)))

    def tokens(m: int) -> Array:
        return on_device[m][0]

    def loss(m: int, logits: Tensor) -> Tensor:
        value = pipeline.model.criterion(logits, on_device[m][1])
        if leaves is None:
            losses[0] += value.item()
        else:
            leaf_losses[m] = value.item()
        return value

    @contextmanager
    def around(action: Action) -> Iterator[None]:
        m = action.microbatch
        enter("forward" if action.kind == "F" else "backward")
        sync = nullcontext() if m == last_microbatch else data_parallel.no_sync()
        region = pipeline.comm.tracer.region(str(action))
        with dropping(keys[m]), packed(position_ids[m]), sync, data_parallel.scaled_backward(), region:
            yield
        if leaves is not None:
            leaves.take(m)

    executor.run(tokens, loss, gradient, around)
    if leaves is None:
        pipeline.fetch_tied_gradient()
    else:
        leaves.finish(len(keys))
        losses[0] = tree_sum(leaf_losses)
    data_parallel.synchronize()
    pipeline.comm.all_reduce(losses, algorithm="ordered")  # zero on all stages but the last
    return float(losses[0])
