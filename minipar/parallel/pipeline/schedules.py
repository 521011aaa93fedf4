"""The schedules, each a pure function of p ranks and m microbatches (and v stages per rank).

A stage is a run of layers; F, B, I, W are counted in stages. Bubble fractions are idle / total for equal stages.

    naive              one microbatch in the pipeline at a time                                    (p-1)/p
    gpipe              all forwards, then all backwards (Huang et al. 2019)                        (p-1)/(m+p-1)
    1f1b               PipeDream-Flush: one forward, one backward (Narayanan et al. 2021)          the same
    interleaved-1f1b   v stages per rank, p*v in all (Narayanan et al. 2021, section 2.2)          (p-1)/(vm+p-1)
    zb-h1              1f1b with W put off into the bubble (Qi et al. 2023, section 2.1)           (p-1)(F+I-W) idle
    zb-h2              twice as many forwards first: no bubble in steady state                     (p-1)(F+I-2W) idle
    zbv                two stages per rank, the second half of the pipeline running back up        none for F = I = W
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from minipar.errors import UsageError
from minipar.parallel.pipeline.actions import Action, Schedule


def naive(p: int, m: int) -> Schedule:
    """Each microbatch goes forward through all ranks and back again before the next one comes."""
    both = [(kind, i) for i in range(m) for kind in ("F", "B")]
    return Schedule.of("naive", [[Action(r, kind, i) for kind, i in both] for r in range(p)])


def gpipe(p: int, m: int) -> Schedule:
    """All forwards, then all backwards: every rank keeps the activations of m microbatches."""
    order = [("F", i) for i in range(m)] + [("B", i) for i in range(m)]
    return Schedule.of("gpipe", [[Action(r, kind, i) for kind, i in order] for r in range(p)])


def one_f_one_b(p: int, m: int) -> Schedule:
    """Rank r runs p-1-r forwards ahead, then one forward and one backward in turn: at most min(m, p-r) are alive."""
    lists = []
    for r in range(p):
        ahead = min(p - 1 - r, m)
        actions = [Action(r, "F", i) for i in range(ahead)]
        for i in range(m):
            if ahead + i < m:
                actions.append(Action(r, "F", ahead + i))
            actions.append(Action(r, "B", i))
        lists.append(actions)
    return Schedule.of("1f1b", lists)


def interleaved(p: int, m: int, v: int = 2) -> Schedule:
    """Megatron's: rank r holds stages r, p+r, 2p+r, ..., v of them; microbatches go through in groups of p.

    The k-th forward of a rank belongs to its stage number (k // p) mod v, the k-th backward to the same counted from
    the last. Needs p | m: UsageError.
    """
    if m % p:
        raise UsageError(
            f"interleaved-1f1b sends microbatches through in groups of pp: microbatches/pp = {m}/{p} is not whole"
        )

    def action(r: int, kind: str, k: int) -> Action:
        group, inside = divmod(k, p * v)
        chunk = inside // p
        return Action((chunk if kind == "F" else v - 1 - chunk) * p + r, kind, group * p + inside % p)

    lists = []
    for r in range(p):
        ahead = min(2 * (p - r - 1) + (v - 1) * p, m * v)
        actions = [action(r, "F", k) for k in range(ahead)]
        for k in range(m * v):
            if ahead + k < m * v:
                actions.append(action(r, "F", ahead + k))
            actions.append(action(r, "B", k))
        lists.append(actions)
    return Schedule.of("interleaved-1f1b", lists)


def _handcrafted_zero_bubble(name: str, p: int, m: int, depth: int) -> Schedule:
    """Rank r runs depth*(p-1-r) forwards ahead, and its W come depth*r microbatches after their I.

    What rank r does not spend on W early it hands to the ranks before it as an earlier I; the W fill the end, where
    1F1B has its bubble.
    """
    lists = []
    for r in range(p):
        ahead, late = min(depth * (p - 1 - r), m), depth * r
        actions = [Action(r, "F", i) for i in range(ahead)]
        for i in range(m):
            if ahead + i < m:
                actions.append(Action(r, "F", ahead + i))
            actions.append(Action(r, "I", i))
            if i >= late:
                actions.append(Action(r, "W", i - late))
        actions += [Action(r, "W", i) for i in range(max(0, m - late), m)]
        lists.append(actions)
    return Schedule.of(name, lists)


def zb_h1(p: int, m: int) -> Schedule:
    """No more activations than 1F1B's p, a third of its bubble when F = I = W."""
    return _handcrafted_zero_bubble("zb-h1", p, m, depth=1)


def zb_h2(p: int, m: int) -> Schedule:
    """Up to 2p-1 microbatches alive; none of 1F1B's bubble but the start when F = I = W and m >= 2p-1."""
    return _handcrafted_zero_bubble("zb-h2", p, m, depth=2)


def zbv(p: int, m: int) -> Schedule:
    """Rank r holds stage r and stage 2p-1-r: the pipeline goes down and comes up again (Qi et al. 2024, arXiv
    2405.15362).

    The last stage lies on rank 0 beside the first, so a microbatch's backward can begin where its forward ended, and
    every rank keeps 2p half-sized activations: 1F1B's p. Laid out for 2p-1 microbatches or more; of fewer, those that
    are missing are left out.
    """
    lists = []
    for r in range(p):
        down, up = r, 2 * p - 1 - r
        actions: list[Action] = []
        count: Counter[tuple[int, str]] = Counter()

        def do(
            *what: tuple[int, str], actions: list[Action] = actions, count: Counter[tuple[int, str]] = count
        ) -> None:
            for stage, kind in what:
                actions.append(Action(stage, kind, count[stage, kind]))
                count[stage, kind] += 1

        total = max(m, 2 * p - 1)
        for _ in range(2 * (p - r) - 1):
            do((down, "F"))
        for _ in range(r):  # until the first microbatch has come back up to this rank
            do((up, "F"), (down, "F"))
        for _ in range(p - r):
            do((up, "F"), (up, "I"), (up, "W"))
        while count[up, "F"] < total:  # steady: every kind once on each of the two stages
            if count[down, "F"] < total:
                do((down, "F"))
            do((down, "I"), (down, "W"), (up, "F"), (up, "I"), (up, "W"))
        for _ in range(r):
            do((down, "I"), (up, "I"))
        for _ in range(p - r):
            do((down, "I"), (down, "W"))
        for stage in (up, down):
            while count[stage, "W"] < total:
                do((stage, "W"))
        lists.append([action for action in actions if action.microbatch < m])
    return Schedule.of("zbv", lists)


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "naive": naive,
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved-1f1b": interleaved,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "zbv": zbv,
}


def make(name: str, p: int, m: int, v: int | None = None) -> Schedule:
    """The named schedule for p ranks and m microbatches. `v`, stages per rank, is interleaved-1f1b's alone (default 2).

    UsageError for an unknown name, sizes below 1, or a v that the schedule does not have.
    """
    if name in ("pipedream", "pipedream-2bw"):
        raise UsageError(
            f"schedule {name} is asynchronous: it never drains and updates with older weights, so it is no step of "
            "synchronous training; minipar.parallel.pipeline.asynchronous runs it (chapter 6)"
        )
    if name not in SCHEDULES:
        raise UsageError(f"schedule {name}: choose from {', '.join(SCHEDULES)}, or a FILE.csv")
    if p < 1 or m < 1 or (v is not None and v < 1):
        raise UsageError(f"schedule {name}: pp = {p}, microbatches = {m}, virtual stages = {v}: each is at least 1")
    if name == "interleaved-1f1b":
        return interleaved(p, m, 2 if v is None else v)
    own = 2 if name == "zbv" else 1
    if v not in (None, own):
        raise UsageError(f"schedule {name} has {own} stage{'s' if own > 1 else ''} per rank, not {v}")
    return SCHEDULES[name](p, m)
