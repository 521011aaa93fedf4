"""A GPT on the ranks of a pipeline: each rank's stages and parameters, and the token embedding that two ranks use."""

from __future__ import annotations

from collections.abc import Callable

from minipar.backend import Array, xp
from minipar.comm.communicator import Communicator
from minipar.errors import UsageError
from minipar.memory import hold
from minipar.nn.gpt import GPT
from minipar.nn.module import Parameter
from minipar.parallel.pipeline.actions import Schedule
from minipar.parallel.pipeline.stage import PipelineStage, balanced_cuts, cut, part_costs
from minipar.parallel.placement import place, update

# Tags of the embedding's messages; the schedule's come after them (executor.FIRST_TAG).
TIED_GRADIENT, TIED_WEIGHT = 0, 1


def part_groups(model: GPT) -> list[list[Parameter]]:
    """Group the parameters by part, each in the first part that uses it; the head's group is the last LayerNorm."""
    seen: set[Parameter] = set()
    groups = []
    for part in model.parts:
        groups.append([p for p in part.parameters if p not in seen])
        seen |= set(part.parameters)
    return groups


class PipelineParallel:
    """This rank's share of a GPT on the ranks of `comm`.

    stages    this rank's stages, by number
    groups    their parameters, by part; data parallelism sends each group together
    homes     the rank of every part, by name

    The token embedding belongs to the first stage. If the last stage is on another rank, that rank keeps a copy of the
    values for the head. The head's gradient is sent to the first stage, where the two gradients are added as on one
    device, and the updated weight is sent back: V h elements each way per step. NB: Megatron-LM all-reduces the two
    copies' gradients (Narayanan et al. 2021), so both ranks need the optimizer.
    """

    def __init__(self, model: GPT, comm: Communicator, schedule: Schedule, length: int) -> None:
        if len(schedule.ranks) != comm.size:
            raise UsageError(f"schedule {schedule.name} is for {len(schedule.ranks)} ranks, but pp = {comm.size}")
        self.model, self.comm = model, comm
        runs = cut(model, balanced_cuts(part_costs(model, length), schedule.stages))
        self.stages = {s: PipelineStage(runs[s]) for s, rank in schedule.home.items() if rank == comm.rank}
        self.homes = {part.name: schedule.home[s] for s, run in enumerate(runs) for part in run}
        self.first, self.last = schedule.home[0], schedule.home[schedule.stages - 1]
        place(model)
        self.groups: list[list[Parameter]] = []
        for i, (part, group) in enumerate(zip(model.parts, part_groups(model), strict=True)):
            for p in group:
                update(p, pp=self.homes[part.name], unit=i, units=len(model.parts))
            if self.homes[part.name] == comm.rank:
                self.groups.append(group)
        if comm.rank == self.last != self.first:
            model.wte.weight.materialize()
            hold("buffers", model.wte.weight.data)

    def fetch_tied_gradient(self) -> None:
        """Send the head's gradient of the token embedding from the last stage to the first, after all backwards."""
        weight = self.model.wte.weight
        if self.first == self.last:
            return
        if self.comm.rank == self.last:
            self.comm.isend(self.model.head_weight.grad, self.first, TIED_GRADIENT).wait()
        elif self.comm.rank == self.first:
            gradient = xp.empty(weight.shape, dtype=weight.dtype)
            self.model.head_weight.grad = self.comm.irecv(gradient, self.last, TIED_GRADIENT).wait()

    def send_tied_weight(self, whole: Callable[[Parameter], Array]) -> None:
        """Send the token embedding from the first stage to the last, after the optimizer's step.

        whole(parameter) returns all its values, which data parallelism may have sharded.
        """
        if self.first == self.last:
            return
        weight = self.model.wte.weight
        if self.comm.rank == self.first:
            self.comm.isend(whole(weight), self.last, TIED_WEIGHT).wait()
        elif self.comm.rank == self.last:
            self.comm.irecv(weight.data, self.first, TIED_WEIGHT).wait()
