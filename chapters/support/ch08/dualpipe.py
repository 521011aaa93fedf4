"""DualPipe, of which DualPipeV is one half: two pipelines on the same ranks, from both ends."""

from dataclasses import replace

from minipar.parallel.pipeline.actions import Action, Schedule, paired
from minipar.parallel.pipeline.schedules import make


class TwoPipelines(Schedule):
    """A schedule of a model and its copy, whose stages have the numbers after the model's. The two send nothing."""

    def needs(self, action: Action) -> list[Action]:
        """Return the computations whose results this one uses, all of the same model."""
        if action.pair:
            return super().needs(action)  # asks for each half
        own = self.is_copy(action)
        return [need for need in super().needs(action) if self.is_copy(need) == own]

    def is_copy(self, action: Action) -> bool:
        return 2 * action.stage >= self.stages


def dualpipe(ranks: int, m: int) -> Schedule:
    """Send m microbatches through the model's stages on ranks 0, 1, ... and m through the copy's on ..., 1, 0.

    Rank r of the first half does what rank r of a V of half as many ranks does: down, the model's stage r, and up, the
    copy's last stages. The rank as far from the other end does the same with the two exchanged.
    """
    lists: dict[int, list[Action]] = {}
    for r, actions in enumerate(make("dualpipev", ranks // 2, m).ranks):
        lists[r] = [_moved(action, ranks, down=0, up=ranks) for action in actions]
        lists[ranks - 1 - r] = [_moved(action, ranks, down=ranks, up=0) for action in actions]
    return TwoPipelines("dualpipe", tuple(tuple(lists[r]) for r in range(ranks)))


def _moved(action: Action, ranks: int, down: int, up: int) -> Action:
    """Return a V's action with its stage moved by `down` on the way down, and by `up` on the way up."""
    if action.pair:
        forward, backward = (_moved(half, ranks, down, up) for half in action.pair)
        return paired(forward, backward)
    return replace(action, stage=action.stage + (down if 2 * action.stage < ranks else up))
