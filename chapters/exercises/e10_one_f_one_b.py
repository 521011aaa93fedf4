"""Exercise 10 (chapter 7): 1F1B as lists.

Write the order in which each of p pipeline ranks runs the forwards and backwards of m microbatches. Rank r computes
stage r. The forward of a microbatch on rank r needs that on rank r - 1, its backward on rank r needs that on rank r +
1, and on the last rank its own forward. Each rank first runs some forwards (warm-up), then one forward and one
backward in turn (steady state), then the backwards that are left (cool-down).

Graded for p from 1 to 8, and for m smaller and larger than p: that every action occurs once and nobody waits forever;
at most min(m, p - r) microbatches alive on rank r (forward done, backward not); with backward twice as long as
forward, the time of 1F1B, (m + p - 1)(T_F + T_B).
"""


def one_f_one_b(p: int, m: int) -> list[list[str]]:
    """Return for each rank its list of actions: "F0" is the forward of microbatch 0, "B0" its backward."""
    raise NotImplementedError("your code")
