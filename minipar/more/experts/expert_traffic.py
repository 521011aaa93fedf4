"""The layout of experts, and the traffic of their auxiliary loss, for the core's closed forms.

What dispatch and combine send over ep depends on the routing, so it is not known before a run.

Seams of the core: `StepLayout`.
"""

from dataclasses import dataclass, replace

from minipar.more.experts.mixtral import MixtralConfig
from minipar.parallel.layout import StepLayout
from minipar.parallel.placement import Placement
from minipar.parallel.predicted_traffic import ordered_sum


@dataclass(frozen=True)
class ExpertLayout(StepLayout):
    """A layout whose P ranks of ep, neighbours in dp, share each layer's experts."""

    model: MixtralConfig
    ep: int = 1

    @property
    def splits_squares(self) -> bool:
        """Whether the ranks of dp sum different squares: those of ep hold different experts."""
        return self.ep > 1 or super().splits_squares

    def groups(self, unit: list[Placement], dp: int) -> list[tuple[list[Placement], int, int]]:
        """Divide a unit into this rank's experts, summed over the d/P ranks that hold them, and all else."""
        if self.ep == 1:
            return super().groups(unit, dp)
        count = self.model.num_local_experts // self.ep
        shared, held = [], []
        for placement in unit:
            _, is_expert, rest = placement.name.partition(".experts.")
            if not is_expert:
                shared.append(placement)
            elif int(rest.split(".")[0]) // count == dp % self.ep:
                held.append(replace(placement, ep=dp % self.ep))
        groups = super().groups(shared, dp)
        if held:
            groups.append((held, dp // self.ep, self.dp // self.ep))
        return groups


def load_bytes(layout: StepLayout, experts: int, ranks: int, rank: int, pp: int) -> int:
    """Compute what the auxiliary loss sends over `ranks` ranks of cp: all loads of each layer and microbatch.

    A load is the count of a sample's tokens that one of the `experts` of a layer gets.
    """
    samples = layout.tokens * ranks // layout.length
    each = ordered_sum(samples * experts, ranks, rank)
    return layout.microbatches * layout.blocks(pp) * each
