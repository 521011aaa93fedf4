"""The traffic between the replicas of a `HybridComm` in closed form, which is added to that inside of one.

Seams of the core: `StepLayout`, whose `chunk_ranks` are the ranks of a replica.
"""

from minipar.comm.traffic import wire_bytes
from minipar.parallel.layout import StepLayout


def replica_bytes(layout: StepLayout, dp: int, pp: int) -> int:
    """Compute what leaves the replica: all-reduces of this rank's chunks, 2 (Psi/s) (q-1)/q elements.

    The layout's `chunk_ranks` are the s = d/q ranks of one of q replicas.
    """
    ranks = layout.dp // layout.shards
    itemsize = layout.reduce_itemsize
    total = 0
    for bucket in layout.buckets(dp=dp, pp=pp):
        chunk = sum(len(p.dp.own) for p in bucket if p.dp is not None)
        replica = dp // layout.shards
        total += wire_bytes("all_reduce", layout.reduction, chunk, itemsize, ranks, replica)
    return layout.syncs * total
