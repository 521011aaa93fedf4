"""The layout of a run whose sums are trees, for the core's closed forms. Seams of the core: `StepLayout`."""

from minipar.parallel.layout import StepLayout


class TreeLayout(StepLayout):
    """A layout in which each microbatch is a leaf, whose gradients travel by themselves."""

    @property
    def partial_syncs(self) -> int:
        """The number of times that a leaf's Partial gradients are summed over tp, and a table's sent over pp."""
        return self.microbatches

    @property
    def enters(self) -> int:
        """The crossings of a layer into tensor parallelism: q, k, v, gate and up of a Llama enter by themselves."""
        return 2 if self.model.model_type == "gpt2" else 5

    def norm_sums(self, count: int) -> list[int]:
        """Return how many values the norm's all-reduces add: a maximum, and the two integers of an exact sum."""
        return [1, 2]
