"""Durations of stages that communicate: the all-to-alls of experts inside a stage's F and I, which a pair hides."""

from dataclasses import dataclass

from minipar.parallel.pipeline.actions import Action, Durations, Time


@dataclass(frozen=True)
class ExchangeDurations(Durations):
    """The time of each action; `exchange` is the part of each F and I in which the stage communicates.

    In a pair one half computes while the other communicates.
    """

    exchange: Time = 0

    def of(self, action: Action) -> Time:
        if not action.pair:
            return super().of(action)
        forward, backward = (self.of(half) for half in action.pair)
        computing = forward + backward - 2 * self.exchange
        return max(computing, 2 * self.exchange, forward, backward)
