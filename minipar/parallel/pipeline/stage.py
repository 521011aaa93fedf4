"""Pipeline stages: consecutive parts of a model (embedding, blocks, head), cut by cost, and run by one rank's list."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import islice
from typing import Any

from minipar.autograd import DeferredGradients, Tensor, defer_weight_gradients
from minipar.backend import Array, xp
from minipar.comm.communicator import Communicator
from minipar.comm.transport import USER_TAGS
from minipar.comm.work import Work
from minipar.errors import UsageError
from minipar.memory import hold
from minipar.nn.module import Parameter, Part
from minipar.nn.transformer import LanguageModel
from minipar.parallel.pipeline.actions import Action, Schedule
from minipar.parallel.pipeline.check import lower
from minipar.parallel.placement import place, update

# Tags of the token embedding's messages, which two stages need, and the first of the schedule's.
TIED_GRADIENT, TIED_WEIGHT, FIRST_TAG = 0, 1, 2
Key = tuple[int, str, int]  # of a result: the stage that uses it, direction (F or B), microbatch
Around = Callable[[Action], AbstractContextManager[None]]


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


def cut(model: LanguageModel, counts: Sequence[int]) -> list[list[Part]]:
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


class PipelineExecutor:
    """The runner of a schedule on the ranks of `comm`; `stages` are this rank's.

    A receive is posted when the list comes to it and waited for when its result is used. Sends are waited for at the
    end of the step. Ranks therefore cannot block each other, whatever the order of the messages.

    `shape` and `dtype` are those of the activations between stages. Each microbatch sends B T h elements forward over
    each cut between ranks, and as many backward. `peak_alive` is the most activations that this rank has held.
    """

    def __init__(
        self,
        schedule: Schedule,
        comm: Communicator,
        stages: dict[int, PipelineStage],
        shape: tuple[int, ...],
        dtype: Any,
    ) -> None:
        if FIRST_TAG + 2 * schedule.stages * schedule.microbatches > USER_TAGS:
            messages = f"2*stages*microbatches = 2*{schedule.stages}*{schedule.microbatches} messages in a step"
            more = f"are more than the {USER_TAGS - FIRST_TAG} tags there are"
            raise UsageError(f"schedule {schedule.name}: {messages} {more}")
        self.schedule, self.comm, self.stages = schedule, comm, stages
        lowered = lower(schedule).ranks[comm.rank]
        # A pair's halves run one after the other, and the result of its F is sent in between: it travels while B runs.
        early = {Action(a.stage, "SEND_F", a.microbatch) for a in lowered if a.pair}.intersection(lowered)
        self.actions: list[Action] = []
        for half in (half for action in lowered if action not in early for half in action.halves):
            send = Action(half.stage, f"SEND_{half.kind}", half.microbatch)
            self.actions += [half, send] if send in early else [half]
        self.shape, self.dtype = shape, dtype
        self.peak_alive = 0
        self._results: dict[Key, Any] = {}  # not used yet: an array, or a function that waits for it
        self._sent: list[Work] = []

    def run(
        self, tokens: Callable[[int], Array], loss: Callable[[int, Tensor], Tensor], scale: float, around: Around
    ) -> None:
        """Run one step: every action of this rank's list, each computation inside `around(action)`.

        tokens(m) returns the first stage's input, and loss(m, logits) the loss of the last stage's output, whose
        gradients are multiplied by `scale`.
        """
        for action in self.actions:
            if action.computes:
                self._compute(action, tokens, loss, scale, around)
                self.peak_alive = max(self.peak_alive, sum(len(stage.alive) for stage in self.stages.values()))
            else:
                self._message(action)
        for message in self._sent:
            message.wait()
        self._sent = []

    def _compute(self, action: Action, tokens: Any, loss: Any, scale: float, around: Any) -> None:
        """Run one computation; the other arguments are those of `run`."""
        s, m = action.stage, action.microbatch
        stage, is_last = self.stages[s], s == self.schedule.stages - 1
        if action.kind == "F":
            x = tokens(m) if s == 0 else Tensor(self._take(s, "F", m), requires_grad=True)
            with around(action):
                y = stage.forward(m, x, (lambda logits: loss(m, logits)) if is_last else None)
            key, result = ((s, "B", m), xp.full_like(y, scale)) if is_last else ((s + 1, "F", m), y)
            self._results[key] = result
        elif action.kind == "W":
            with around(action):
                stage.backward_weight(m)
        else:
            gradient = self._take(s, "B", m)
            with around(action):
                dx = stage.backward(m, gradient) if action.kind == "B" else stage.backward_input(m, gradient)
            if s > 0:
                self._results[s - 1, "B", m] = dx

    def _take(self, stage: int, direction: str, m: int) -> Array:
        """Return the result that `stage` uses, once it has arrived."""
        result = self._results.pop((stage, direction, m))
        return result() if callable(result) else result

    def _message(self, action: Action) -> None:
        """Post a send or a receive."""
        verb, direction = action.kind.split("_")
        peer = self.schedule.home[action.other_end.stage]
        receiver = action.stage if verb == "RECV" else action.other_end.stage
        # One tag for each message of a step: the receiving stage, the direction, the microbatch.
        tag = FIRST_TAG + (receiver * 2 + (direction == "B")) * self.schedule.microbatches + action.microbatch
        key = receiver, direction, action.microbatch
        if verb == "RECV":
            self._results[key] = self._receive(key, peer, tag)
        else:
            self._sent = [message for message in self._sent if not message.test()]  # frees what has been delivered
            self._send(key, xp.ascontiguousarray(self._results.pop(key)), peer, tag)

    def _receive(self, key: Key, peer: int, tag: int) -> Callable[[], Any]:
        """Post a receive; return the function that waits for it."""
        return self.comm.irecv(xp.empty(self.shape, dtype=self.dtype), peer, tag).wait

    def _send(self, key: Key, array: Array, peer: int, tag: int) -> None:
        self._sent.append(self.comm.isend(array, peer, tag))


def part_groups(model: LanguageModel) -> list[list[Parameter]]:
    """Group the parameters by part, each in the first part that uses it; a tied head's group is the last norm."""
    first = {p: i for i, part in reversed([*enumerate(model.parts)]) for p in part.parameters}
    return [[p for p in part.parameters if first[p] == i] for i, part in enumerate(model.parts)]


class PipelineParallel:
    """This rank's share of a model on the ranks of `comm`.

    `stages` are this rank's, by number, and `groups` their parameters, by part, which data parallelism sends together.

    The token embedding belongs to the first stage. If the head is tied and on another rank, that rank (`borrower`, else
    None) keeps a copy of the values. The head's gradient is sent to the first stage, where the two gradients are added
    as on one device, and the updated weight is sent back: V h elements each way per step. NB: Megatron-LM all-reduces
    the two copies' gradients (Narayanan et al. 2021), so both ranks need the optimizer.
    """

    def __init__(self, model: LanguageModel, comm: Communicator, schedule: Schedule, length: int) -> None:
        if len(schedule.ranks) != comm.size:
            raise UsageError(f"schedule {schedule.name} is for {len(schedule.ranks)} ranks, but pp = {comm.size}")
        self.model, self.comm = model, comm
        runs = cut(model, balanced_cuts(model.config.part_flops(length), schedule.stages))
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
        self.borrower = self.last if model.head_weight is not None and self.first != self.last else None
        if comm.rank == self.borrower:
            model.token_embedding.materialize()
            hold("buffers", model.token_embedding.data)

    def fetch_tied_gradient(self) -> None:
        """Send the head's gradient of the token embedding from the last stage to the first, after all backwards."""
        weight, leaf = self.model.token_embedding, self.model.head_weight
        if leaf is None or self.borrower is None:
            return
        if self.comm.rank == self.borrower:
            self.comm.isend(leaf.grad, self.first, TIED_GRADIENT).wait()
        elif self.comm.rank == self.first:
            gradient = xp.empty(weight.shape, dtype=leaf.grad_dtype)
            leaf.grad = self.comm.irecv(gradient, self.borrower, TIED_GRADIENT).wait()

    def send_tied_weight(self, whole: Callable[[Parameter], Array]) -> None:
        """Send the updated token embedding from the first stage to the last. whole(p) returns all values of p."""
        weight = self.model.token_embedding
        if self.borrower is not None and self.comm.rank == self.first:
            self.comm.isend(whole(weight), self.borrower, TIED_WEIGHT).wait()
        elif self.comm.rank == self.borrower:
            self.comm.irecv(weight.data, self.first, TIED_WEIGHT).wait()
