"""Exercise 11 (chapter 8): a schedule that beats 1F1B and needs no more memory.

Backward is two actions now: I, the gradient of the stage's input, which the rank before waits for, and W, that of its
weights, for which nobody waits. F, I and W take 1 each, so 1F1B takes 3(m + p - 1). With each B cut into I and W,
next to each other, the rank before waits for I alone, and it takes 3m + 2(p - 1). Put W where a rank would wait: your
schedule must be faster still. Zero Bubble's ZB-H1 takes 3m + p - 1; you need not reach that.

The limit is the memory of 1F1B's first rank: at most min(m, p) microbatches alive on any rank, from the start of F to
the end of **W** (the weight gradient needs the layer's input).

Graded for p from 2 to 8 and m from p to 4p: every action occurs once, I after its F, W after its I, nobody waits
forever; the limit; the time.
"""


def schedule(p: int, m: int) -> list[list[str]]:
    """Return for each rank its list of actions: "F0", "I0" and "W0" for microbatch 0, and so on."""
    raise NotImplementedError("your code")
