"""Refusals of strategies that split a model over ranks: order, ranks that two would share, dropout, unlike batches."""

from typing import Any

from minipar.backend import Array
from minipar.comm.communicator import Communicator
from minipar.errors import UsageError
from minipar.nn.layers import Dropout
from minipar.nn.module import Module
from minipar.nn.parameter import Owner
from minipar.parallel.agreement import check_alike


def check_split(model: Any, strategy: str, comm: Communicator) -> None:
    """Raise UsageError unless `strategy` may split this model over `comm`.

    It comes before the wrapper, once. Tensor parallelism shares no two ranks with another strategy.
    A model that is split over several ranks has no dropout.
    """
    is_pipeline = isinstance(model, Owner)
    if is_pipeline or any(
        p.placement is not None and p.placement.dp is not None for p in model.parameters()
    ):
        raise UsageError(
            f"{strategy} of a model that is wrapped already: call mp.{strategy}(model, ...) first, then "
            "mp.DistributedDataParallel, mp.fully_shard or mp.shard"
        )
    for other, ranks in model.split_over:
        if other == strategy:
            raise UsageError(
                f"{strategy} has split this model already: call it once, or make a new model"
            )
        shared = set(ranks) & set(comm.ranks)
        if len(shared) > 1 and "tensor_parallel" in (strategy, other):
            raise UsageError(
                f"{strategy} over ranks {list(comm.ranks)}: {other} has split this model over ranks "
                f"{list(ranks)} already; give each its own axis, such as mesh.tp and mesh.cp of "
                "mp.DeviceMesh(comm, tp=2, cp=2)"
            )
    for name, module in model.named_modules():
        # A rank would draw masks for its part of an activation alone.
        if isinstance(module, Dropout) and module.p > 0 and comm.size > 1:
            raise UsageError(
                f"{strategy} over {comm.size} ranks: {name} has dropout {module.p}; make the model with dropout=0"
            )


def note_split(model: Module, strategy: str, comm: Communicator) -> None:
    """Note on the model that `strategy` splits it over `comm`, once nothing is left to refuse."""
    model.split_over = (*model.split_over, (strategy, tuple(comm.ranks)))


def check_same_batch(comm: Communicator, **arrays: Array) -> None:
    """Raise UsageError, on every rank, if ranks that compute one model together have different batches."""
    what = f"the ranks of {comm.axis} compute one model together, but were given different batches"
    check_alike(comm, arrays.items(), what, "cut the global batch by mesh.dp.rank alone")
