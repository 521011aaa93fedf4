"""Pipeline stages: consecutive parts of a model (embedding, blocks, head), cut by cost, and run by one rank."""

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from minipar.autograd import DeferredGradients, Tensor, defer_weight_gradients
from minipar.backend import Array, xp
from minipar.comm.communicator import Communicator
from minipar.errors import UsageError
from minipar.memory import hold
from minipar.nn.gpt import GPT, GPTConfig
from minipar.nn.module import Parameter, Part
from minipar.parallel.pipeline.actions import Schedule
from minipar.parallel.placement import place, update


def part_costs(config: GPTConfig, length: int) -> list[float]:
    """Return each part's relative cost for sequences of `length`: operations per token as in `forward_flops`."""
    h = config.n_embd
    block = 24 * h * h + 4 * length * h
    return [0.0, *[float(block)] * config.n_layer, 2.0 * h * config.vocab_size]


def balanced_cuts(costs: Sequence[float], stages: int) -> list[int]:
    """Return the number of parts of each stage such that the largest stage's cost is as small as possible.

    The embedding belongs to the first stage and the head to the last. UsageError if there are fewer blocks than stages.
    """
    blocks = len(costs) - 2
    if blocks < stages:
        raise UsageError(f"layers {blocks} are fewer than the pipeline's {stages} stages: each has at least one")
    load = [*costs[1:-1]]
    load[0] += costs[0]
    load[-1] += costs[-1]
    # best[n]: (the largest stage's load, the blocks of each stage) of the best cut of n blocks into the stages so far.
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    for s in range(1, stages + 1):
        before, best = best, {}
        for n in range(s, blocks + 1):
            largest, k = min((max(before[k][0], sum(load[k:n])), k) for k in before if k < n)
            best[n] = largest, [*before[k][1], n - k]
    counts = best[blocks][1]
    counts[0] += 1
    counts[-1] += 1
    return counts


def cut(model: GPT, counts: Sequence[int]) -> list[list[Part]]:
    """Cut the model's parts into stages of these lengths. UsageError if they do not add up to the model."""
    if sum(counts) != len(model.parts) or min(counts) < 1:
        raise UsageError(f"stages of {list(counts)} parts do not cut the model's {len(model.parts)} parts")
    parts = iter(model.parts)
    return [list(islice(parts, count)) for count in counts]


class PipelineStage:
    """A stage on the rank that holds it, with the activations of the microbatches whose backward is still to come."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts
        self.alive: dict[int, tuple[Any, Tensor]] = {}  # input and output of microbatches whose backward is not done
        self._deferred: dict[int, DeferredGradients] = {}

    def forward(self, microbatch: int, x: Any, finish: Callable[[Tensor], Tensor] | None = None) -> Array:
        """Run the stage's parts and return the result's array.

        x is the tokens on the first stage, and on the others a Tensor (B, T, h) whose gradient `backward` returns.
        `finish` computes the loss from the last stage's result.
        """
        y = x
        for part in self.parts:
            y = part.run(y)
        if finish is not None:
            y = finish(y)
        self.alive[microbatch] = x, y
        return y.data

    def backward(self, microbatch: int, gradient: Array) -> Array | None:
        """Run the whole backward and return the gradient of the stage's input, None on the first stage."""
        x, y = self.alive.pop(microbatch)
        y.backward(gradient)
        return x.grad if isinstance(x, Tensor) else None

    def backward_input(self, microbatch: int, gradient: Array) -> Array | None:
        """Run the half of backward that the previous stage waits for, and defer the weight gradients."""
        with defer_weight_gradients() as self._deferred[microbatch]:
            return self.backward(microbatch, gradient)

    def backward_weight(self, microbatch: int) -> None:
        """Compute the weight gradients that `backward_input` has deferred."""
        self._deferred.pop(microbatch).run()


# ---- a GPT on the ranks of a pipeline: who has what, and the token embedding, which two stages need ------------------

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

    The token embedding belongs to the first stage. If the last stage is on another rank, that rank keeps a copy of the
    values for the head. The head's gradient is sent to the first stage, where the two gradients are added as on one
    device, and the updated weight is sent back: V h elements each way per step. NB: Megatron-LM all-reduces the two
    copies' gradients (Narayanan et al. 2021), so both ranks need the optimizer.
    """

    def __init__(self, model: GPT, comm: Communicator, schedule: Schedule, length: int) -> None:
        if len(schedule.ranks) != comm.size:
            raise UsageError(f"schedule {schedule.name} is for {len(schedule.ranks)} ranks, but pp = {comm.size}")
        self.model, self.comm = model, comm
        runs = cut(model, balanced_cuts(part_costs(model.config, length), schedule.stages))
        self.stages = {s: PipelineStage(runs[s]) for s, rank in schedule.home.items() if rank == comm.rank}
        homes = {part.name: schedule.home[s] for s, run in enumerate(runs) for part in run}
        self.first, self.last = schedule.home[0], schedule.home[schedule.stages - 1]
        place(model)
        self.groups: list[list[Parameter]] = []
        for i, (part, group) in enumerate(zip(model.parts, part_groups(model), strict=True)):
            for p in group:
                update(p, pp=homes[part.name], unit=i, units=len(model.parts))
            if homes[part.name] == comm.rank:
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
        """Send the updated token embedding from the first stage to the last. whole(p) returns all values of p."""
        if self.first == self.last:
            return
        weight = self.model.wte.weight
        if self.comm.rank == self.first:
            self.comm.isend(whole(weight), self.last, TIED_WEIGHT).wait()
        elif self.comm.rank == self.last:
            self.comm.irecv(weight.data, self.first, TIED_WEIGHT).wait()
