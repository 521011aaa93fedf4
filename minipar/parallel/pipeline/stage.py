"""Pipeline stages: consecutive segments of a model, run by one rank's list of actions."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from numpy.typing import DTypeLike

from minipar.autograd.backward import DeferredGradients, defer_weight_gradients
from minipar.autograd.tensor import Tensor
from minipar.backend import Array, xp
from minipar.comm.communicator import Communicator
from minipar.comm.transport import USER_TAGS
from minipar.comm.work import Work
from minipar.errors import UsageError
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
        `backward` returns. `finish` computes the loss from the last stage's result.
        """
        y = x
        for segment in self.segments:
            y = segment.run(y)
        if finish is not None:
            y = finish(y)
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
    elements forward over each cut between ranks, and as many backward. `peak_alive` is the most
    activations that this rank has held.
    """

    def __init__(
        self,
        schedule: Schedule,
        comm: Communicator,
        stages: dict[int, PipelineStage],
        shape: tuple[int, ...],
        dtype: DTypeLike | None,
    ) -> None:
        if FIRST_TAG + 2 * schedule.stages * schedule.microbatches > USER_TAGS:
            sizes = f"2*{schedule.stages}*{schedule.microbatches}"
            messages = f"2*stages*microbatches = {sizes} messages in a step"
            more = f"are more than the {USER_TAGS - FIRST_TAG} tags there are"
            raise UsageError(f"schedule {schedule.name}: {messages} {more}")
        self.schedule = schedule
        self.comm = comm
        self.stages = stages
        self.actions = lower(schedule.unpaired()).ranks[comm.rank]
        self.shape = shape
        self.dtype = dtype
        self.peak_alive = 0
        # The results that are not used yet: an array each, or a function that waits for it.
        self._results: dict[Key, Array] = {}
        self._sent: list[Work] = []

    def run(self, tokens: Tokens, loss: Loss, scale: float, around: Around) -> None:
        """Run one step: every action of this rank's list, each computation inside `around(action)`.

        tokens(m) returns the first stage's input, and loss(m, logits) the loss of the last stage's
        output, whose gradients are multiplied by `scale`.
        """
        for action in self.actions:
            if action.computes:
                self._compute(action, tokens, loss, scale, around)
                alive = sum(len(stage.alive) for stage in self.stages.values())
                self.peak_alive = max(self.peak_alive, alive)
            else:
                self._message(action)
        self._wait_for_sends()

    def run_forward(self, tokens: Tokens, loss: Loss) -> None:
        """Run the forwards of a step alone, for an evaluation; the arguments are those of `run`."""
        for action in self.actions:
            if action.kind == "F":
                self._compute(action, tokens, loss, 1.0, nullcontext)
            elif action.kind in ("SEND_F", "RECV_F"):
                self._message(action)
        self._wait_for_sends()
        self._results = {}
        for stage in self.stages.values():
            stage.alive = {}

    def forward(self, tokens: Array) -> Tensor | None:
        """Run one sample, (1, T), through all stages, without a schedule; return the logits on the last stage's rank.

        All ranks of the pipeline call it. Sends T h elements over each cut between ranks.
        """
        home = self.schedule.home
        last = len(home) - 1
        x: Tensor | Array = tokens
        for number, stage in sorted(self.stages.items()):
            if number > 0 and home[number - 1] != self.comm.rank:
                received = xp.empty((1, *self.shape[1:]), dtype=self.dtype)
                x = Tensor(self.comm.irecv(received, home[number - 1], number).wait())
            for segment in stage.segments:
                x = segment.run(x)
            if number < last and home[number + 1] != self.comm.rank:
                self.comm.isend(xp.ascontiguousarray(x.data), home[number + 1], number + 1).wait()
        return x if isinstance(x, Tensor) and home[last] == self.comm.rank else None

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

    def _wait_for_sends(self) -> None:
        for message in self._sent:
            message.wait()
        self._sent = []

    def _receive(self, key: Key, peer: int, tag: int) -> Callable[[], Array]:
        """Post a receive; return the function that waits for it."""
        return self.comm.irecv(xp.empty(self.shape, dtype=self.dtype), peer, tag).wait

    def _send(self, key: Key, array: Array, peer: int, tag: int) -> None:
        self._sent.append(self.comm.isend(array, peer, tag))
