"""Pipeline stages: consecutive segments of a model, run by one rank's list of actions."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from numpy.typing import DTypeLike

from minipar.autograd.backward import DeferredGradients, defer_weight_gradients
from minipar.autograd.tensor import Tensor, grad_enabled
from minipar.backend import Array, read_values, xp
from minipar.comm.communicator import Communicator
from minipar.comm.work import Work
from minipar.nn.module import Segment
from minipar.parallel.pipeline.actions import Action, Schedule
from minipar.parallel.pipeline.check import lower

# The tags of the token embedding's messages, which two stages need, and the schedule's first tag.
TIED_GRADIENT = 0
TIED_WEIGHT = 1
FIRST_TAG = 2

Key = tuple[int, str, int]  # a result's: the stage that uses it, direction (F or B), microbatch
Tokens = Callable[[int], Array]
Loss = Callable[[int, Tensor], Tensor]
Around = Callable[[Action], AbstractContextManager[object]]


class PipelineStage:
    """A stage on the rank that holds it, with the activations that a backward still needs."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.segments = segments
        # The input and output of each microbatch whose backward is still to come.
        self.alive: dict[int, tuple[Any, Tensor]] = {}
        self._deferred: dict[int, DeferredGradients] = {}

    def forward(self, microbatch: int, x: Any, finish: Callable[[Tensor], Tensor] | None = None) -> Array:
        """Run the stage's segments and return the result's array.

        x is the tokens on the first stage, and on the others a Tensor (B, T, h) whose gradient
        `backward` returns. `finish` computes the loss from the last stage's result. Under `no_grad`
        nothing is kept for a backward.
        """
        y = x
        for segment in self.segments:
            y = segment.run(y)
        if finish is not None:
            y = finish(y)
        if grad_enabled.get():
            self.alive[microbatch] = x, y
        return y.data

    def backward(self, microbatch: int, gradient: Array) -> Array | None:
        """Run the whole backward; return the gradient of the stage's input, None on the first stage."""
        x, y = self.alive.pop(microbatch)
        y.backward(gradient)
        if not isinstance(x, Tensor):
            return None
        # Targets of a wider dtype make the gradient wider; the stage before expects its result's dtype.
        assert x.grad is not None
        return x.grad.astype(x.dtype, copy=False)

    def backward_input(self, microbatch: int, gradient: Array) -> Array | None:
        """Run the half of backward that the previous stage waits for, and defer the weight gradients."""
        with defer_weight_gradients() as self._deferred[microbatch]:
            return self.backward(microbatch, gradient)

    def backward_weight(self, microbatch: int) -> None:
        """Compute the weight gradients that `backward_input` has deferred."""
        self._deferred.pop(microbatch).run()


class PipelineExecutor:
    """The runner of a schedule on the ranks of `comm`; `stages` are this rank's.

    A receive is posted when the list comes to it and waited for when its result is used. Sends are
    waited for at the end of the step. Ranks therefore cannot block each other, whatever the order of
    the messages. A pair's F and B run one after the other. F's result travels while B runs.

    `shape` and `dtype` are those of the activations between stages. Each microbatch sends B T h
    elements forward over each cut between ranks, and as many backward.
    """

    def __init__(
        self,
        schedule: Schedule,
        comm: Communicator,
        stages: dict[int, PipelineStage],
        shape: tuple[int, ...] = (),
        dtype: DTypeLike | None = None,
    ) -> None:
        self.schedule = schedule
        self.comm = comm
        self.stages = stages
        self.actions = lower(schedule.unpaired()).ranks[comm.rank]
        self.shape = shape
        self.dtype = dtype
        # The results that are not used yet: an array each, or a function that waits for it.
        self._results: dict[Key, Array] = {}
        self._sent: list[Work] = []

    def evaluator(self) -> "PipelineExecutor":
        """Return an executor that runs forward alone, of one sample."""
        forward = self.schedule.forwards(1)
        return PipelineExecutor(forward, self.comm, self.stages, (1, *self.shape[1:]), self.dtype)

    def run(self, tokens: Tokens, loss: Loss, scale: float, around: Around) -> list[float]:
        """Run one step: every action of this rank's list, each computation inside `around(action)`.

        tokens(m) returns the first stage's input, and loss(m, logits) the loss of the last stage's
        output, whose gradients are multiplied by `scale`. Under `no_grad` the schedule is one of
        forwards alone (`Schedule.forwards`). Return the microbatches' losses; before the last stage
        they are 0.
        """
        losses: dict[int, Array] = {}

        def noted_loss(m: int, logits: Tensor) -> Tensor:
            value = loss(m, logits)
            losses[m] = xp.array(value.data)  # read at the end, in one copy
            return value

        for action in self.actions:
            if action.computes:
                self._compute(action, tokens, noted_loss, scale, around)
            else:
                self._message(action)
        for message in self._sent:
            message.wait()
        self._sent = []
        values = [0.0] * self.schedule.microbatches
        for m, value in zip(losses, read_values(list(losses.values())), strict=True):
            values[m] = value
        return values

    def _compute(self, action: Action, tokens: Tokens, loss: Loss, scale: float, around: Around) -> None:
        """Run one computation; the other arguments are those of `run`."""
        s, m = action.stage, action.microbatch
        stage = self.stages[s]
        is_last = s == self.schedule.stages - 1
        if action.kind == "F":
            x = tokens(m) if s == 0 else Tensor(self._take(s, "F", m), requires_grad=True)
            with around(action):
                y = stage.forward(m, x, partial(loss, m) if is_last else None)
            if is_last:
                self._results[s, "B", m] = xp.full_like(y, scale)
            else:
                self._results[s + 1, "F", m] = y
        elif action.kind == "W":
            with around(action):
                stage.backward_weight(m)
        else:
            backward = stage.backward if action.kind == "B" else stage.backward_input
            gradient = self._take(s, "B", m)
            with around(action):
                dx = backward(m, gradient)
            if s > 0:
                self._results[s - 1, "B", m] = dx

    def _take(self, stage: int, direction: str, m: int) -> Array:
        """Return the result that `stage` uses, once it has arrived."""
        result = self._results.pop((stage, direction, m))
        return result() if callable(result) else result

    def _message(self, action: Action) -> None:
        """Post a send or a receive."""
        other_end = action.other_end
        peer = self.schedule.home[other_end.stage]
        verb, direction = action.kind.split("_")
        receiver = action.stage if verb == "RECV" else other_end.stage
        key = (receiver, direction, action.microbatch)
        # Each message of a step has its own tag, by receiving stage, direction and microbatch.
        way = 2 * receiver if direction == "F" else 2 * receiver + 1
        tag = FIRST_TAG + way * self.schedule.microbatches + action.microbatch
        if verb == "RECV":
            self._results[key] = self._receive(key, peer, tag)
        else:
            # The test frees what has been delivered.
            self._sent = [message for message in self._sent if not message.test()]
            self._send(key, xp.ascontiguousarray(self._results.pop(key)), peer, tag)

    def _receive(self, key: Key, peer: int, tag: int) -> Callable[[], Array]:
        """Post a receive; return the function that waits for it."""
        return self.comm.irecv(xp.empty(self.shape, dtype=self.dtype), peer, tag).wait

    def _send(self, key: Key, array: Array, peer: int, tag: int) -> None:
        self._sent.append(self.comm.isend(array, peer, tag))
