"""The executor: one rank's actions, done.

Receives are posted when the list comes to them and waited for when the result is used; sends are never waited for
before the end. So ranks cannot block each other, whatever the order of the messages.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from minipar.autograd import Tensor
from minipar.backend import Array, xp
from minipar.comm.communicator import Communicator
from minipar.comm.work import USER_TAGS, Message
from minipar.errors import UsageError
from minipar.parallel.pipeline.actions import Action, Schedule
from minipar.parallel.pipeline.lower import lower
from minipar.parallel.pipeline.stage import PipelineStage

FIRST_TAG = 2  # those before are for the tied embedding (split.py)
Key = tuple[int, str, int]  # stage, way (F or B), microbatch


class PipelineExecutor:
    """Runs a schedule on the ranks of `comm`; `stages` are this rank's.

    `shape` and `dtype` are those of the activations between stages: B T h elements per microbatch travel forward over
    each cut between ranks, and as many backward. `peak_alive` is the most activations, of one stage and microbatch
    each, that this rank has held.
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
        self._arrived: dict[Key, Array | Message] = {}  # by stage that takes it, way, microbatch
        self._leaving: dict[Key, Array] = {}  # by stage that made it
        self._sent: list[Message] = []

    def run(
        self,
        tokens: Callable[[int], Array],
        loss: Callable[[int, Tensor], Tensor],
        loss_gradient: Callable[[int], Array],
        around: Callable[[Action], AbstractContextManager[None]],
    ) -> None:
        """One step: every action of this rank's list, each inside `around(action)`.

        tokens(m): what goes into the first stage; loss(m, logits): what comes out of the last; loss_gradient(m): what
        its backward begins with.
        """
        for action in self.actions:
            if action.computes:
                self._compute(action, tokens, loss, loss_gradient, around)
                self.peak_alive = max(self.peak_alive, sum(stage.alive for stage in self.stages.values()))
            else:
                self._message(action)
        for message in self._sent:
            message.wait()
        self._sent = []

    def _compute(
        self,
        action: Action,
        tokens: Callable[[int], Array],
        loss: Callable[[int, Tensor], Tensor],
        loss_gradient: Callable[[int], Array],
        around: Callable[[Action], AbstractContextManager[None]],
    ) -> None:
        stage, m = action.stage, action.microbatch
        last = stage == self.schedule.stages - 1
        if action.kind == "F":
            x = tokens(m) if stage == 0 else Tensor(self._take(stage, "F", m), requires_grad=True)
            with around(action):
                y = self.stages[stage].forward(m, x, (lambda logits: loss(m, logits)) if last else None)
            if not last:
                self._give(stage, stage + 1, "F", m, y)
        elif action.kind == "W":
            with around(action):
                self.stages[stage].backward_weight(m)
        else:
            gradient = loss_gradient(m) if last else self._take(stage, "B", m)
            with around(action):
                back = self.stages[stage].backward if action.kind == "B" else self.stages[stage].backward_input
                dx = back(m, gradient)
            if stage > 0:
                self._give(stage, stage - 1, "B", m, dx)

    def _take(self, stage: int, way: str, m: int) -> Array:
        arrived = self._arrived.pop((stage, way, m))
        return arrived.wait() if isinstance(arrived, Message) else arrived

    def _give(self, stage: int, other: int, way: str, m: int, result: Array) -> None:
        if self.schedule.home[other] == self.comm.rank:
            self._arrived[other, way, m] = result
        else:
            self._leaving[stage, way, m] = result

    def _message(self, action: Action) -> None:
        verb, way = action.kind.split("_")
        other = action.stage + (1 if (verb == "SEND") == (way == "F") else -1)
        peer = self.schedule.home[other]
        # One tag for each message of a step: the receiving stage, the way, the microbatch.
        taker = action.stage if verb == "RECV" else other
        tag = FIRST_TAG + (taker * 2 + (way == "B")) * self.schedule.microbatches + action.microbatch
        key = action.stage, way, action.microbatch
        if verb == "RECV":
            self._arrived[key] = self._receive(key, peer, tag)
        else:
            self._sent = [message for message in self._sent if not message.test()]  # what is through may be freed
            self._send(key, xp.ascontiguousarray(self._leaving.pop(key)), peer, tag)

    def _receive(self, key: Key, peer: int, tag: int) -> Message:
        """Post the receive of an activation or its gradient, `key` = (stage, way, microbatch)."""
        return self.comm.irecv(xp.empty(self.shape, dtype=self.dtype), peer, tag)

    def _send(self, key: Key, array: Array, peer: int, tag: int) -> None:
        self._sent.append(self.comm.isend(array, peer, tag))
