"""Plant five mistakes in tensor parallelism, and run the checks that may notice them (section 6b.7).

A mistake is a context in which one function or class of the library is replaced by a wrong one. A process enters it
once: ranks that are threads enter it together.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import numpy as np

from chapters.support.ch06.whole_gradients import is_split
from chapters.support.instruments import same_on_all_ranks
from chapters.support.share_work import from_all
from chapters.support.training import step_traffic
from chapters.support.whole_runs import verdict_of
from minipar.autograd import Tensor, linear
from minipar.parallel.grad_norm import scale_down, squared_norm
from minipar.parallel.tensor import mappings, vocabulary
from minipar.parallel.tensor.layers import RowLinear
from minipar.parallel.tensor.mappings import TensorGroup
from minipar.parallel.tensor.plan import TensorParallel
from minipar.parallel.tensor.vocabulary import vocab_parallel_cross_entropy_sum
from minipar.train.trainer import Trainer


def bias_on_every_rank(layer: RowLinear, x: Any) -> Tensor:
    """Mistake 1: a row layer that adds its bias before the sum."""
    return layer.border.leave(linear(x, layer.weight, layer.bias))


def enter_without_f(x: Tensor, group: TensorGroup) -> Tensor:
    """Mistake 2: a column layer whose backward does not sum the input's gradient."""
    return x


def norm_of_all_ranks(parameters: Any, max_norm: Any, dp: Any, tp: Any, pp: Any) -> float:
    """Mistake 3: a gradient norm that sums the squares of replicated parameters over tp, too."""
    squares = np.array([squared_norm([p.grad for p in parameters])])
    tp.all_reduce(squares, algorithm="ordered")
    return scale_down(parameters, max_norm, float(np.sqrt(squares[0])))


def loss_with_own_maximum(logits: Tensor, targets: Any, group: TensorGroup, vocab_size: int | None = None) -> Tensor:
    """Mistake 4: a loss that takes each rank's own maximum instead of that of all ranks."""
    alone = TensorGroup(group.comm, group.reduction)
    alone.comm = _OwnMaximum(group.comm)  # type: ignore[assignment]
    return vocab_parallel_cross_entropy_sum(logits, targets, alone, vocab_size)


class _OwnMaximum:
    """A communicator that leaves out the maximum over ranks."""

    def __init__(self, comm: Any) -> None:
        self.comm = comm

    def all_reduce(self, x: Any, op: str = "sum", **options: Any) -> Any:
        return x if op == "max" else self.comm.all_reduce(x, **options)


def no_sum(tensor: TensorParallel, parameters: Any) -> None:
    """Mistake 5: the gradients of Partial parameters stay those of each rank's own tokens."""


MISTAKES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "nothing broken": nullcontext,
    "1. bias on every rank": lambda: patch.object(RowLinear, "forward", bias_on_every_rank),
    "2. no all-reduce in backward": lambda: patch.object(mappings, "copy_to", enter_without_f),
    "3. norm counts t times": lambda: patch.object(Trainer, "clip", staticmethod(norm_of_all_ranks)),
    "4. own maximum": lambda: patch.object(vocabulary, "vocab_parallel_cross_entropy_sum", loss_with_own_maximum),
    "5. no sum of partial gradients": lambda: patch.object(TensorParallel, "sum_partial", no_sum),
}

# The checks of `examine` that notice each of them, with more than one rank.
CATCHING: dict[str, set[str]] = {
    "nothing broken": set(),
    "1. bias on every rank": {"step 3"},
    "2. no all-reduce in backward": {"ranks", "bytes", "step 1", "step 3"},
    "3. norm counts t times": {"step 1", "step 3"},
    "4. own maximum": {"bytes", "step 1", "step 3"},
    "5. no sum of partial gradients": {"ranks", "bytes", "step 1", "step 3"},
}


def bytes_per_step(trainer: Trainer) -> int:
    """Return what a correct step sends over tp: layers, embedding, head, loss, norm, and replicated gradients."""
    return step_traffic(trainer.args, trainer.mesh.world.rank)["tp"]


def examine(trainer: Trainer, single: Mapping[int, tuple[Any, Any]]) -> tuple[set[str], float]:
    """Train. Return the checks that notice a mistake, on every rank, and the last loss.

    `single` has on rank 0, for one step and for the steps of the trainer, the parameters and the results of one device
    after as many steps; on other ranks it is empty. The checks:

    ranks   all ranks hold the same bits of the parameters that are not split
    bytes   the first step sends `bytes_per_step` over tp
    step k  after k steps parameters, losses and norms are those of one device
    """
    noticed: set[str] = set()
    comm, steps = trainer.mesh.world, trainer.args.steps
    comm.traffic.reset()
    results, states = [], {}
    for step in range(steps):
        results.append(trainer.step(step))
        if step == 0 and comm.traffic.bytes(axis="tp") != bytes_per_step(trainer):
            noticed.add("bytes")
        if step + 1 in (1, steps):
            states[step + 1] = trainer.state_dict()
    if not same_on_all_ranks(comm, *(p.data for p in trainer.model.parameters() if not is_split(p))):
        noticed.add("ranks")
    for count, alone in single.items():
        if not verdict_of((states[count], results[:count]), alone, comm.size).passed:
            noticed.add(f"step {count}")
    return {check for each in from_all(comm, sorted(noticed)) for check in each}, results[-1].loss
