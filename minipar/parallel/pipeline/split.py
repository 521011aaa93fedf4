"""A model cut into stages: which rank has what, and the token embedding, which two of them need."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from minipar.backend import Array, xp
from minipar.comm import Communicator
from minipar.errors import UsageError
from minipar.memory import hold
from minipar.nn import GPT, Parameter
from minipar.parallel.pipeline.actions import Schedule
from minipar.parallel.pipeline.executor import PipelineStage
from minipar.parallel.pipeline.stage import balanced_cuts, cut, part_costs
from minipar.parallel.tensor.plan import TensorParallel

# Tags of the embedding's messages; the schedule's follow (executor.FIRST_TAG).
TIED_GRADIENT, TIED_WEIGHT = 0, 1


def part_groups(model: GPT) -> list[list[Parameter]]:
    """The parameters of each part that no part before it has: for the head the last LayerNorm alone."""
    seen: set[Parameter] = set()
    groups = []
    for part in model.parts:
        groups.append([p for p in part.parameters if p not in seen])
        seen |= set(part.parameters)
    return groups


class PipelineParallel:
    """This rank's share of a model on the ranks of `comm`.

    stages    its stages, by number
    groups    their parameters, by part;  places  the numbers of these parts

    The token embedding belongs to the first stage. The last stage, where that is on another rank, borrows its numbers
    for the head: the head's gradient goes to the first stage, where the two are added as on one device, and the updated
    weight comes back (Narayanan et al. 2021 all-reduce the two copies' gradients; then both need the optimizer). On the
    wire: V h elements each way per step.
    """

    def __init__(self, model: GPT, comm: Communicator, schedule: Schedule, length: int) -> None:
        if len(schedule.ranks) != comm.size:
            raise UsageError(f"schedule {schedule.name} is for {len(schedule.ranks)} ranks, but pp = {comm.size}")
        self.model, self.comm = model, comm
        runs = cut(model, balanced_cuts(part_costs(model, length), schedule.stages))
        self.stages = {s: PipelineStage(runs[s]) for s, rank in schedule.home.items() if rank == comm.rank}
        mine = [part.name for stage in self.stages.values() for part in stage.parts]
        self.places = [i for i, part in enumerate(model.parts) if part.name in mine]
        self.groups = [part_groups(model)[i] for i in self.places]
        self.homes = {part.name: schedule.home[s] for s, run in enumerate(runs) for part in run}
        self.first, self.last = schedule.home[0], schedule.home[schedule.stages - 1]
        if comm.rank == self.last != self.first:
            model.wte.weight.materialize()
            hold("buffers", model.wte.weight.data)

    def fetch_tied_gradient(self) -> None:
        """After the last backward: the head's gradient of the token embedding, from the last stage to the first."""
        weight = self.model.wte.weight
        if self.first == self.last:
            return
        if self.comm.rank == self.last:
            self.comm.isend(self.model.head_weight.grad, self.first, TIED_GRADIENT).wait()
        elif self.comm.rank == self.first:
            gradient = xp.empty(weight.shape, dtype=weight.dtype)
            self.model.head_weight.grad = self.comm.irecv(gradient, self.last, TIED_GRADIENT).wait()

    def refresh(self, whole: Callable[[Parameter], Array]) -> None:
        """After the optimizer's step: the token embedding, from the first stage to the last. whole(parameter): its
        numbers, where data parallelism may have sharded them.
        """
        if self.first == self.last:
            return
        weight = self.model.wte.weight
        if self.comm.rank == self.first:
            self.comm.isend(whole(weight), self.last, TIED_WEIGHT).wait()
        elif self.comm.rank == self.last:
            self.comm.irecv(weight.data, self.first, TIED_WEIGHT).wait()

    def everywhere(self, squares: np.ndarray) -> np.ndarray:
        """(rows, this rank's groups, 2) -> (rows, all groups, 2), every rank's numbers in their places. On the wire: an
        all-reduce of 2 rows parts float64, all but one rank's zero in each place, so that it rounds nothing.
        """
        whole = np.zeros((len(squares), len(self.model.parts), 2))
        whole[:, self.places] = squares
        return self.comm.all_reduce(whole, algorithm="ordered")

    def collect(self, state: dict[str, np.ndarray], tensor: TensorParallel | None) -> dict[str, np.ndarray]:
        """All ranks' parameters by name, on rank 0 of the pipeline. `state`: this rank's, whole, `tensor` says of what
        shape where layers are split. On the wire: each parameter once.
        """
        whole: dict[str, np.ndarray] = {}
        names = {p: name for name, p in self.model.named_parameters()}
        for number, (part, group) in enumerate(zip(self.model.parts, part_groups(self.model), strict=True)):
            home = self.homes[part.name]
            for p in group:
                if self.comm.rank == home and home != 0:
                    self.comm.isend(state[names[p]], 0, number).wait()
                elif self.comm.rank == 0:
                    shape = p.shape if tensor is None else tensor.whole_shape(p)
                    array = state[names[p]] if home == 0 else np.empty(shape, dtype=p.dtype)
                    if home != 0:
                        self.comm.irecv(array, home, number).wait()
                    whole[names[p]] = array
        return {name: whole[name] for name in names.values() if name in whole}
