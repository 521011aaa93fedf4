"""The executor of one rank's list of actions.

A receive is posted when the list comes to it and waited for when its result is used. Sends are waited for at the end of
the step. Ranks therefore cannot block each other, whatever the order of the messages.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from minipar.autograd import Tensor
from minipar.backend import Array, xp
from minipar.comm.communicator import Communicator
from minipar.comm.transport import USER_TAGS
from minipar.comm.work import Message
from minipar.errors import UsageError
from minipar.parallel.pipeline.actions import Action, Schedule
from minipar.parallel.pipeline.check import lower
from minipar.parallel.pipeline.stage import PipelineStage

FIRST_TAG = 2  # the tags below are those of the tied embedding (stage.py)
Key = tuple[int, str, int]  # of a result: the stage that uses it, direction (F or B), microbatch


class PipelineExecutor:
    """The runner of a schedule on the ranks of `comm`; `stages` are this rank's.

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
            raise UsageError(
                f"schedule {schedule.name}: 2*stages*microbatches = 2*{schedule.stages}*{schedule.microbatches} "
                f"messages in a step are more than the {USER_TAGS - FIRST_TAG} tags there are"
            )
        self.schedule, self.comm, self.stages = schedule, comm, stages
        self.actions = lower(schedule).ranks[comm.rank]
        self.shape, self.dtype = shape, dtype
        self.peak_alive = 0
        self._results: dict[Key, Any] = {}  # not used yet: an array, or a function that waits for it
        self._sent: list[Message] = []

    def run(
        self,
        tokens: Callable[[int], Array],
        loss: Callable[[int, Tensor], Tensor],
        scale: float,
        around: Callable[[Action], AbstractContextManager[None]],
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
            if is_last:
                self._results[s, "B", m] = xp.full_like(y, scale)
            else:
                self._results[s + 1, "F", m] = y
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
        """Post the receive of an activation or its gradient; return the function that waits for it."""
        return self.comm.irecv(xp.empty(self.shape, dtype=self.dtype), peer, tag).wait

    def _send(self, key: Key, array: Array, peer: int, tag: int) -> None:
        """Start to send an activation or its gradient."""
        self._sent.append(self.comm.isend(array, peer, tag))
