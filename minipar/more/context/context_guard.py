"""The refusal of a forgotten or too small wrapper under context parallelism. Seams of the core: owners."""

from collections.abc import Sequence

from minipar.comm.communicator import Communicator
from minipar.errors import UsageError
from minipar.nn.module import Module
from minipar.nn.parameter import Owner, Parameter
from minipar.parallel.agreement import check_alike


class ContextGuard(Owner):
    """An owner of the parameters of a model whose ranks have a part of each sample's tokens.

    A gradient covers this rank's tokens alone. A script may sum the gradients in its own way, so
    what is compared is what the first step makes of the ranks' parameters.
    """

    def __init__(self, comm: Communicator, model: Module) -> None:
        self.comm = comm
        self.is_compared = False
        self.names = {p: name for name, p in model.named_parameters()}
        self.updated: list[Parameter] = []
        for p in self.names:
            p.owners.append(self)

    def check_sum(self, parameters: Sequence[Parameter], group: Communicator, is_complete: bool) -> None:
        """Raise UsageError if a wrapper over `group` would leave out ranks that share the samples' tokens."""
        if self.of_all_ranks(parameters) and not set(self.comm.ranks) <= set(group.ranks):
            why = f"context_parallel has shared each sample's tokens among ranks {list(self.comm.ranks)}"
            raise UsageError(
                f"a wrapper over ranks {group.ranks}: {why}; wrap it over mesh.dp_cp, which has all"
            )

    def of_all_ranks(self, parameters: Sequence[Parameter]) -> list[Parameter]:
        """Return those of these parameters that all ranks hold: no experts, and no shards."""
        held = [p for p in parameters if p in self.names]
        return [p for p in held if p.placement is None or p.placement.ep is None]

    def before_step(self, parameters: Sequence[Parameter]) -> None:
        """Note what the step updates."""
        self.updated = self.of_all_ranks(parameters)

    def after_step(self) -> None:
        """Raise UsageError, on every rank, if the first step has made their parameters different."""
        if not self.is_compared:
            self.is_compared = True
            what = f"the gradients of {self.comm.axis}, each of a rank's own tokens, were not summed"
            remedy = "wrap the model over all ranks that hold other tokens, such as mesh.dp_cp"
            check_alike(self.comm, [(self.names[p], p.data) for p in self.updated], what, remedy)
