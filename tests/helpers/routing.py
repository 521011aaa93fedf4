"""The bytes of expert parallelism in closed form, for tests that know the routing of a step."""

from collections.abc import Sequence

from minipar.comm import wire_bytes
from minipar.more.experts.expert_traffic import ExpertLayout


def ep_bytes(layout: ExpertLayout, rank: int, rows: Sequence[Sequence[Sequence[int]]]) -> int:
    """Compute the bytes that expert-parallel rank `rank` sends over ep in a step, for the routing that happened.

    rows[i][r][j] counts the assignments from rank r to the experts of rank j in the i-th layer and microbatch that
    this pipeline rank runs. Dispatch and combine each send them in forward and in backward: in all h elements times
    2 sum_{j != r} (n_rj + n_jr). With uniform routing that is 4 k N h (P-1)/P for N tokens. Each dispatch sends E/P
    counts to each rank ahead. With recompute forward runs again.
    """
    total, forwards = 0, 1 + layout.recompute
    for each in rows:
        moved = sum(each[rank][j] + each[j][rank] for j in range(layout.ep) if j != rank)
        total += (forwards + 1) * moved * layout.model.n_embd * layout.itemsize
        total += forwards * wire_bytes("all_to_all", "pairwise", layout.model.num_local_experts, 8, layout.ep, rank)
    return total
