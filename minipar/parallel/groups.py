"""Groups of parameters that travel together: by size, or by what runs at one time."""

from collections.abc import Sequence
from dataclasses import dataclass

from minipar.comm.communicator import Communicator
from minipar.nn.module import Module, Segment
from minipar.nn.parameter import Parameter
from minipar.parallel.guards import check_context, check_groups
from minipar.parallel.placement import Placement, attach_placements, placement_of, update

# PyTorch DDP's sizes (Li et al. 2020, section 4.2): a small first bucket, so that communication
# starts early.
BUCKET_BYTES = 25 * 2**20
FIRST_BUCKET_BYTES = 2**20


@dataclass(frozen=True)
class Group:
    """Parameters for one bucket, and the ranks that hold them and sum their gradients."""

    parameters: Sequence[Parameter]
    comm: Communicator
    unit: int  # the number of their unit, by which the gradient's norm is summed


def groups_over(comm: Communicator, units: Sequence[Sequence[Parameter]]) -> list[Group]:
    """Make a group of each unit, summed over `comm`."""
    return [Group(unit, comm, number) for number, unit in enumerate(units)]


def by_size(
    parameters: Sequence[Parameter], bucket_bytes: int, first_bucket_bytes: int
) -> list[list[Parameter]]:
    """Group parameters into buckets of `bucket_bytes` or more, filled from the last one on."""
    groups: list[list[Parameter]] = []
    held = 0
    for p in reversed(parameters):
        if held == 0:
            groups.insert(0, [])
        groups[0].insert(0, p)
        held += p.size * p.dtype.itemsize
        enough = bucket_bytes if len(groups) > 1 else first_bucket_bytes
        if held >= enough:
            held = 0
    return groups


def has_segments(model: Module) -> bool:
    """Return whether the model lists its segments."""
    return bool(getattr(model, "segments", []))


def segments_of(model: Module) -> list[Segment]:
    """Return the model's segments in the order in which they run; without any it is one."""
    if has_segments(model):
        return getattr(model, "segments", [])
    return [Segment("model", model.forward, model.parameters(), is_last=True)]


def by_unit(model: Module) -> list[list[Parameter]]:
    """Group the model's parameters by what runs at one time, which FSDP gathers at a time.

    GPT: one group for each block, and one, the first, for the embedding and the head, which share
    the token embedding.
    """
    groups: list[list[Parameter]] = []
    for segment in segments_of(model):
        shared = [group for group in groups if not set(segment.parameters).isdisjoint(group)]
        if shared:
            shared[0] += [p for p in segment.parameters if p not in set(shared[0])]
        else:
            groups.append(list(segment.parameters))
    return groups


def number_units(groups: Sequence[Group]) -> None:
    """Record the unit of each parameter, unless a pipeline has, for all its ranks."""
    for group in groups:
        for i, p in enumerate(group.parameters):
            if p.placement is None:
                p.placement = Placement(str(i), p.shape)  # one that is in no model
            if placement_of(p).units == 0:
                update(p, unit=group.unit, units=groups[-1].unit + 1)


def place_groups(
    model: Module, comm: Communicator, groups: Sequence[Group], before_reduce: object, replicas: int = 1
) -> None:
    """Record the placement of each parameter and its unit, and forget gradients from before.

    UsageError or ValueError for groups that cannot be summed together (guards.py).
    """
    check_context(model, comm)
    check_groups(comm, [(group.parameters, group.comm) for group in groups], before_reduce, replicas)
    attach_placements(model)
    number_units(groups)
    for group in groups:
        for p in group.parameters:
            p.zero_grad()  # the first step's gradient would be added to it
