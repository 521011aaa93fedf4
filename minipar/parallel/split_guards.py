"""Refusals of strategies that split a model over ranks: the order, and ranks that two of them would share."""

from collections.abc import Sequence
from typing import Any

from minipar.comm.communicator import Communicator
from minipar.errors import UsageError
from minipar.nn.module import Module
from minipar.nn.parameter import Owner, Parameter

# The name, among the strategies that have split a model, of the split of experts over fewer ranks than all of tp.
EXPERTS = "tensor_parallel of experts"


def check_split(model: Any, strategy: str, comm: Communicator) -> None:
    """Raise UsageError unless `strategy` may split this model over `comm`.

    It comes before the wrapper, once, and tensor parallelism shares no two ranks with another
    strategy. Experts may be shared among ranks of tp, but not among those of etp.
    """
    is_pipeline = isinstance(model, Owner)
    if is_pipeline or any(p.placement is not None and p.placement.dp is not None for p in model.parameters()):
        remedy = f"call mp.{strategy}(model, ...) first, then mp.DistributedDataParallel, mp.fully_shard or mp.shard"
        raise UsageError(f"{strategy} of a model that is wrapped already: {remedy}")
    noted = dict(model.split_over)
    for other, ranks in noted.items():
        if other == strategy:
            raise UsageError(f"{strategy} has split this model already: call it once, or make a new model")
        if strategy == "expert_parallel" and other == "tensor_parallel" and EXPERTS in noted:
            continue
        shared = set(ranks) & set(comm.ranks)
        if len(shared) > 1 and ("tensor_parallel" in (strategy, other) or other == EXPERTS):
            why = f"{other} has split this model over ranks {list(ranks)} already"
            remedy = "give each its own axis, such as mesh.tp and mesh.cp of mp.DeviceMesh(comm, tp=2, cp=2)"
            raise UsageError(f"{strategy} over ranks {list(comm.ranks)}: {why}; {remedy}")


def note_split(model: Module, strategy: str, comm: Communicator) -> None:
    """Note on the model that `strategy` splits it over `comm`, once nothing is left to refuse."""
    model.split_over = (*model.split_over, (strategy, tuple(comm.ranks)))


def check_expert_ranks(model: Module, comm: Communicator, experts: Communicator, sequence: bool) -> None:
    """Raise UsageError unless experts can be split over `experts`, and all else over `comm`."""
    first = comm.rank - comm.rank % experts.size
    if list(experts.ranks) != list(comm.ranks[first : first + experts.size]):
        what = f"experts over ranks {list(experts.ranks)}, tensor_parallel over ranks {list(comm.ranks)}"
        raise UsageError(f"{what}: experts are split over neighbours of tp; give experts=mesh.etp")
    if experts.size == comm.size:
        return
    sizes = f"tp = {comm.size} with etp = {experts.size}"
    if not sequence:
        why = "each rank of tp routes its own tokens, which it has with sequence parallelism"
        raise UsageError(f"{sizes}: {why}; give sequence=True (--sequence-parallel)")
    if "expert_parallel" in dict(model.split_over):
        raise UsageError(
            f"{sizes}: expert_parallel comes after tensor_parallel, which says where experts are"
        )


class ExpertGuard(Owner):
    """The refusal of a forgotten expert_parallel, where each rank of tp routes its own tokens."""

    def __init__(self, model: Module) -> None:
        self.model = model

    def check_optimizer(self, parameters: Sequence[Parameter]) -> None:
        """Raise UsageError if nobody has been told over which ranks the experts' gradients are summed."""
        if "expert_parallel" not in dict(self.model.split_over):
            remedy = "call mp.expert_parallel(model, mesh.ep, mesh.edp), and give its groups to mp.shard"
            raise UsageError(
                f"the ranks of tp hold experts whose gradients nobody sums over their ranks: {remedy}"
            )

    def check_sum(self, parameters: Sequence[Parameter], group: Communicator, is_complete: bool) -> None:
        """Raise UsageError if nobody has been told over which ranks the experts' gradients are summed."""
        self.check_optimizer([])
