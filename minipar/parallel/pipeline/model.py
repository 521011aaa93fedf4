"""A language model on a pipeline: its segments cut into stages by cost, and a tied token embedding on two of them."""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import islice
from operator import itemgetter

from minipar.backend import Array, xp
from minipar.comm.communicator import Communicator
from minipar.errors import UsageError
from minipar.memory import hold
from minipar.nn.gpt import LanguageModel
from minipar.nn.module import Segment
from minipar.nn.parameter import Parameter, placeholder
from minipar.parallel.pipeline.actions import Schedule
from minipar.parallel.pipeline.stage import TIED_GRADIENT, TIED_WEIGHT, PipelineStage
from minipar.parallel.placement import attach_placements, placement_of, update


def balanced_cuts(costs: Sequence[float], stages: int) -> list[int]:
    """Return the number of segments of each stage such that the largest stage's cost is smallest.

    The embedding belongs to the first stage and the head to the last. UsageError if there are fewer
    blocks than stages.
    """
    blocks = len(costs) - 2
    if blocks < stages:
        least = f"the pipeline's {stages} stages: each has at least one"
        raise UsageError(f"layers {blocks} are fewer than {least}")
    load = [*costs[1:-1]]
    load[0] += costs[0]
    load[-1] += costs[-1]

    @cache
    def best(n: int, stages: int) -> tuple[float, list[int]]:
        """Cut the first n blocks; return the largest stage's load, and the blocks of each stage."""
        if stages == 1:
            return sum(load[:n]), [n]
        cuts = []
        for k in range(stages - 1, n):  # the blocks before the last stage
            largest, counts = best(k, stages - 1)
            cuts.append((max(largest, sum(load[k:n])), [*counts, n - k]))
        return min(cuts, key=itemgetter(0))

    _, counts = best(blocks, stages)
    counts[0] += 1
    counts[-1] += 1
    return counts


def cut(model: LanguageModel, counts: Sequence[int]) -> list[list[Segment]]:
    """Cut the model's segments into stages of these lengths, which add up to the model."""
    segments = iter(model.segments)
    return [list(islice(segments, count)) for count in counts]


def segment_groups(model: LanguageModel) -> list[list[Parameter]]:
    """Group the parameters by segment, each in the first segment that uses it.

    A tied head's group is the last norm.
    """
    seen: set[Parameter] = set()
    groups = []
    for segment in model.segments:
        group = [p for p in segment.parameters if p not in seen]
        groups.append(group)
        seen.update(group)
    return groups


class PipelineParallel:
    """This rank's share of a model on the ranks of `comm`.

    `stages` are this rank's, by number, and `groups` their parameters, by segment, which data
    parallelism sends together.

    The token embedding belongs to the first stage. If the head is tied and on another rank, that
    rank (`borrower`, else None) keeps a copy of the values. The head's gradient is sent to the first
    stage, where the two gradients are added as on one device, and the updated weight is sent back:
    V h elements each way per step. NB: Megatron-LM all-reduces the two copies' gradients (Narayanan
    et al. 2021), so both ranks need the optimizer.
    """

    def __init__(self, model: LanguageModel, comm: Communicator, schedule: Schedule, length: int) -> None:
        self.model = model
        self.comm = comm
        counts = balanced_cuts(model.config.segment_flops(length), schedule.stages)
        self.stages: dict[int, PipelineStage] = {}
        homes: list[int] = []  # the rank of each segment
        for s, segments in enumerate(cut(model, counts)):
            homes += [schedule.home[s]] * len(segments)
            if schedule.home[s] == comm.rank:
                self.stages[s] = PipelineStage(segments)
        self.first = homes[0]
        attach_placements(model)
        self.groups: list[list[Parameter]] = []
        for i, group in enumerate(segment_groups(model)):
            for p in group:
                update(p, pp=homes[i], unit=i, units=len(model.segments))
            if homes[i] == comm.rank:
                self.groups.append(group)
        leaf = model.head_weight
        is_lent = leaf is not None and homes[0] != homes[-1]
        self.borrower = homes[-1] if is_lent else None
        lent = None
        if leaf is not None and comm.rank == self.borrower:
            lent = model.token_embedding
            hold("buffers", lent.data)
            # The head's gradient is in no bucket of this rank, but its sum over microbatches has a bucket's dtype.
            leaf.grad_dtype = xp.promote_types(leaf.dtype, "float32")
        for p in model.parameters():
            if placement_of(p).pp != comm.rank and p is not lent:
                p.data = placeholder(p.shape, p.dtype)

    def fetch_tied_gradient(self) -> None:
        """Send the head's gradient of the token embedding from the last stage to the first.

        It is complete after all backwards.
        """
        weight = self.model.token_embedding
        leaf = self.model.head_weight
        if leaf is None or self.borrower is None:
            return
        if self.comm.rank == self.borrower:
            self.comm.isend(leaf.grad, self.first, TIED_GRADIENT).wait()
        elif self.comm.rank == self.first:
            gradient = xp.empty(weight.shape, dtype=leaf.grad_dtype)
            leaf.grad = self.comm.irecv(gradient, self.borrower, TIED_GRADIENT).wait()

    def send_tied_weight(self, whole: Callable[[Parameter], Array]) -> None:
        """Send the updated token embedding from the first stage to the last.

        whole(p) returns all values of p.
        """
        weight = self.model.token_embedding
        if self.borrower is not None and self.comm.rank == self.first:
            self.comm.isend(whole(weight), self.borrower, TIED_WEIGHT).wait()
        elif self.comm.rank == self.borrower:
            self.comm.irecv(weight.data, self.first, TIED_WEIGHT).wait()
