"""Pipeline schedules, each a pure function of p ranks and m microbatches.

A rank runs its list of actions (actions.py) in order and waits where a result of another rank is
missing. Bubbles are idle / total time, of stages that take equal time. An interleaved schedule has
v stages per rank.

    naive              one microbatch in the pipeline at a time               (p-1)/p
    gpipe              all forwards, then all backwards (Huang et al. 2019)   (p-1)/(m+p-1)
    1f1b               one forward, one backward (Narayanan et al. 2021)      (p-1)/(m+p-1)
    interleaved-1f1b   1f1b with v stages per rank (same, section 2.2)        (p-1)/(vm+p-1)
    zb-h1              1f1b with W moved into the bubble (Qi et al. 2023)     time (p-1)(F+I-W)
    zb-h2              more forwards first, no bubble in the middle (same)    time (p-1)(F+I-2W)
    zbv                two stages per rank, as in a V (Qi et al. 2024)        none if F = I = W
    dualpipev          the same V, F and B in pairs F&B (DeepSeek-AI 2024)    time (p-1)(F&B+B-3W)

In the examples below a cell is a unit of time, and B takes two.
"""

from collections import Counter
from collections.abc import Callable

from minipar.errors import UsageError
from minipar.parallel.pipeline.actions import Action, Schedule, paired


class RankList:
    """One rank's list of actions while it is written.

    The k-th call for a stage and a kind adds the action of microbatch k. Microbatches from `m` on
    do not exist, so their actions are left out. B counts as I and W.
    """

    def __init__(self, m: int) -> None:
        self.m = m
        self.actions: list[Action] = []
        self._next: Counter[tuple[int, str]] = Counter()  # the next microbatch by (stage, kind)

    def forward(self, stage: int) -> None:
        """Add an F."""
        self._add(self._make(stage, "F"))

    def backward(self, stage: int) -> None:
        """Add a B."""
        self._add(self._make_backward(stage))

    def backward_input(self, stage: int) -> None:
        """Add an I."""
        self._add(self._make(stage, "I"))

    def backward_weight(self, stage: int) -> None:
        """Add a W."""
        self._add(self._make(stage, "W"))

    def pair(self, forward_stage: int, backward_stage: int) -> None:
        """Add an F and a B that overlap."""
        self._add(paired(self._make(forward_stage, "F"), self._make_backward(backward_stage)))

    def _make(self, stage: int, kind: str) -> Action:
        microbatch = self._next[stage, kind]
        self._next[stage, kind] += 1
        return Action(stage, kind, microbatch)

    def _make_backward(self, stage: int) -> Action:
        self._make(stage, "W")
        microbatch = self._make(stage, "I").microbatch
        return Action(stage, "B", microbatch)

    def _add(self, action: Action) -> None:
        if action.microbatch < self.m:
            self.actions.append(action)


def _in_turn(stage: int, m: int, ahead: int) -> list[Action]:
    """List `ahead` forwards, then one forward and one backward in turn, then the backwards left."""
    rank = RankList(m)
    for _ in range(ahead):  # warmup
        rank.forward(stage)
    for _ in range(m - ahead):  # steady state: one forward, one backward
        rank.forward(stage)
        rank.backward(stage)
    for _ in range(ahead):  # cooldown
        rank.backward(stage)
    return rank.actions


def _in_turn_with_late_weights(stage: int, m: int, ahead: int, delay: int) -> list[Action]:
    """List the same actions with I for each B, and its W `delay` microbatches later.

    The previous rank waits for I only, so a rank that puts W off sends its I earlier. Its W fill
    the time that 1F1B waits.
    """
    rank = RankList(m)
    for _ in range(ahead):
        rank.forward(stage)
    for i in range(m):
        if ahead + i < m:
            rank.forward(stage)
        rank.backward_input(stage)
        if i >= delay:
            rank.backward_weight(stage)
    for _ in range(min(delay, m)):
        rank.backward_weight(stage)
    return rank.actions


def naive(p: int, m: int) -> Schedule:
    """Send each microbatch forward through all ranks and back again before the next one starts.

    With p = 2 and m = 2:

        rank 0   F0          B0 B0 F1          B1 B1
        rank 1      F0 B0 B0          F1 B1 B1
    """
    return Schedule.of("naive", [_in_turn(r, m, ahead=0) for r in range(p)])


def gpipe(p: int, m: int) -> Schedule:
    """Run all forwards, then all backwards. Every rank keeps the activations of m microbatches.

    With p = 2 and m = 3:

        rank 0   F0 F1 F2          B0 B0 B1 B1 B2 B2
        rank 1      F0 F1 F2 B0 B0 B1 B1 B2 B2
    """
    return Schedule.of("gpipe", [_in_turn(r, m, ahead=m) for r in range(p)])


def one_f_one_b(p: int, m: int) -> Schedule:
    """Run p-1-r forwards on rank r, one for each rank after it, then F and B in turn.

    Rank r keeps the activations of at most min(m, p-r) microbatches. With p = 3 and m = 4:

        rank 0   F0 F1 F2             B0 B0 F3 B1 B1    B2 B2    B3 B3
        rank 1      F0 F1       B0 B0 F2 B1 B1 F3 B2 B2    B3 B3
        rank 2         F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3
    """
    return Schedule.of("1f1b", [_in_turn(r, m, ahead=min(p - 1 - r, m)) for r in range(p)])


def interleaved(p: int, m: int, v: int) -> Schedule:
    """Run 1F1B with v stages per rank: rank r holds stages r, p+r, 2p+r, ...

    A rank runs p microbatches through its first stage, then through its second, ... NB: this is
    Megatron-LM's order. UsageError if p does not divide m. With p = 2, m = 4 and v = 2, where 2F0
    is the forward of microbatch 0 through stage 2, the ranks' lists are

        rank 0   0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3
        rank 1   1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3
    """
    if m % p:
        why = "interleaved-1f1b sends microbatches through in groups of pp"
        raise UsageError(f"{why}: microbatches/pp = {m}/{p} is not whole")
    lists = []
    for r in range(p):
        # Before the first gradient reaches rank r, the first group of p microbatches passes v-1 of
        # its stages, and the first microbatch needs p-r-1 hops to the last rank and as many back,
        # with one forward of rank r for each hop.
        ahead = min(2 * (p - r - 1) + (v - 1) * p, m * v)
        actions = []
        for nth in _in_turn(r, m * v, ahead):
            group, left = divmod(nth.microbatch, p * v)
            turn, i = divmod(left, p)
            if nth.kind == "B":  # Backwards take a rank's stages from the last to the first.
                turn = v - 1 - turn
            actions.append(Action(turn * p + r, nth.kind, group * p + i))
        lists.append(actions)
    return Schedule.of("interleaved-1f1b", lists)


def zb_h1(p: int, m: int) -> Schedule:
    """Keep no more activations than 1F1B's p, at a third of its bubble if F = I = W.

    With p = 3 and m = 4:

        rank 0   F0 F1 F2       I0 W0 F3 I1 W1 I2 W2 I3 W3
        rank 1      F0 F1    I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
        rank 2         F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
    """
    lists = []
    for r in range(p):
        ahead = min(p - 1 - r, m)
        lists.append(_in_turn_with_late_weights(r, m, ahead, delay=r))
    return Schedule.of("zb-h1", lists)


def zb_h2(p: int, m: int) -> Schedule:
    """Keep up to 2p-1 microbatches alive, and wait only at the start if F = I = W and m >= 2p-1.

    With p = 3 and m = 5:

        rank 0   F0 F1 F2 F3 F4 I0 W0 I1 W1 I2 W2 I3 W3 I4 W4
        rank 1      F0 F1 F2 I0 F3 I1 F4 I2 W0 I3 W1 I4 W2 W3 W4
        rank 2         F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 W1 W2 W3 W4
    """
    lists = []
    for r in range(p):
        ahead = min(2 * (p - 1 - r), m)
        lists.append(_in_turn_with_late_weights(r, m, ahead, delay=2 * r))
    return Schedule.of("zb-h2", lists)


def zbv(p: int, m: int) -> Schedule:
    """Lay 2p stages out as a V: rank r holds stage r on the way down and 2p-1-r on the way up.

    The last stage is on rank 0 next to the first. The backward of a microbatch starts on the rank
    where its forward ended, and every rank keeps 2p activations of half the size, as much as 1F1B's
    rank 0. Qi et al. 2024 (arXiv 2405.15362). With p = 2 and m = 4 the steps below add

        step | rank 0                    | rank 1
        1    | 0F0 0F1 0F2               | 1F0
        2    |                           | 2F0 1F1
        3    | 3F0 3I0 3W0 3F1 3I1 3W1   | 2F1 2I0 2W0
        4    | 0F3 0I0 0W0 3F2 3I2 3W2   | 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2
        5    | 0I1 0W1 3F3 3I3 3W3       |
        6    |                           | 1I2 2I3
        7    | 0I2 0W2 0I3 0W3           | 1I3 1W2
        8    |                           | 2W3 1W3

    The list is built for 2p-1 microbatches or more, and those above m are left out.
    """
    built = max(m, 2 * p - 1)
    lists = []
    for r in range(p):
        rank = RankList(m)
        down, up = r, 2 * p - 1 - r
        # 1. F down, until microbatch 0 has been down to the last rank and is back on this one.
        for _ in range(2 * (p - r) - 1):
            rank.forward(down)
        # 2. F up and F down, until it has been up to rank 0, where its backward starts, and its
        # gradient is here.
        for _ in range(r):
            rank.forward(up)
            rank.forward(down)
        # 3. F, I and W up, until that gradient has been down to the last rank and is back.
        for _ in range(p - r):
            rank.forward(up)
            rank.backward_input(up)
            rank.backward_weight(up)
        # 4. The steady state has every kind once.
        for _ in range(built - (2 * p - 1 - r)):
            rank.forward(down)
            rank.backward_input(down)
            rank.backward_weight(down)
            rank.forward(up)
            rank.backward_input(up)
            rank.backward_weight(up)
        # 5. The same without F down, when all of these are done.
        for _ in range(p - 1 - r):
            rank.backward_input(down)
            rank.backward_weight(down)
            rank.forward(up)
            rank.backward_input(up)
            rank.backward_weight(up)
        # 6. All forwards are done. Other ranks wait for I, so each W from here on comes later.
        for _ in range(r):
            rank.backward_input(down)
            rank.backward_input(up)
        # 7. The last I down, with a W down after each.
        for _ in range(p - r):
            rank.backward_input(down)
            rank.backward_weight(down)
        # 8. The W that are left.
        for _ in range(r):
            rank.backward_weight(up)
        for _ in range(r):
            rank.backward_weight(down)
        lists.append(rank.actions)
    return Schedule.of("zbv", lists)


def dualpipev(p: int, m: int) -> Schedule:
    """Lay 2p stages out as zbv does, and overlap one's forwards with the other's backwards.

    Each half of a pair F&B communicates while the other computes. A rank keeps at most 2p+1
    activations of half size. UsageError if m < 2p. The eight steps have DeepSeek's names (arXiv
    2412.19437), in which 0 is a rank's stage on the way down and 1 the one on the way up. With
    p = 2 and m = 4, where (0F3;3B1) is a pair, they add

        step | rank 0                | rank 1
        1    | 0F0 0F1               |
        2    | 0F2 3F0               | 1F0 2F0 1F1 2F1
        3    | 3I0 3W0 3F1           |
        4    | (0F3;3B1) (3F2;0B0)   | 1F2 2B0 (2F2;1B0) (1F3;2B1) (2F3;1B1)
        5    | 3B2 (3F3;0B1)         |
        6    | 3B3 0I2               | 2B2 1B2 2I3 1I3
        7    | 0W2 0I3               |
        8    | 0W3                   | 2W3 1W3
    """
    if m < 2 * p:
        needed = f"2*pp = 2*{p} = {2 * p}"
        raise UsageError(f"schedule dualpipev: microbatches {m} are fewer than {needed}")
    lists = []
    for r in range(p):
        rank = RankList(m)
        down, up = r, 2 * p - 1 - r
        after = p - 1 - r  # the ranks after this one
        # 1. nF0, until microbatch 0 has been down to the last rank and is back on this one.
        for _ in range(2 * after):
            rank.forward(down)
        # 2. nF0F1, until it has been up to rank 0, where its backward starts, and its gradient is
        # here.
        for _ in range(r + 1):
            rank.forward(down)
            rank.forward(up)
        # 3. nB1W1F1, until that gradient has been down to the last rank and is back.
        for _ in range(after):
            rank.backward_input(up)
            rank.backward_weight(up)
            rank.forward(up)
        # 4. nF0B1F1B0, the main step, until all forwards down are done.
        for i in range(m - 2 * p + r + 1):
            if i == 0 and r == p - 1:
                # This B needs only the F before it. In a pair it would wait for F's input.
                rank.forward(down)
                rank.backward(up)
            else:
                rank.pair(down, up)
            rank.pair(up, down)
        # 5. nB1F1B0, until all forwards up are done.
        for _ in range(after):
            rank.backward(up)
            rank.pair(up, down)
        # 6. nB1B0. Other ranks wait for I, so W comes later from the middle of this step on.
        late_weights = []  # the stages, in the order of their I
        for i in range(2 * (r + 1)):
            stage = up if i % 2 == 0 else down
            if i < r + 1:
                rank.backward(stage)
            else:
                rank.backward_input(stage)
                late_weights.append(stage)
        # 7. nWB0, where each W is the earliest that is left.
        for _ in range(after):
            rank.backward_weight(late_weights.pop(0))
            rank.backward_input(down)
            late_weights.append(down)
        # 8. nW
        for stage in late_weights:
            rank.backward_weight(stage)
        lists.append(rank.actions)
    return Schedule.of("dualpipev", lists)


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "naive": naive,
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved-1f1b": interleaved,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "zbv": zbv,
    "dualpipev": dualpipev,
}


def make(name: str, p: int, m: int, v: int | None = None) -> Schedule:
    """Return the named schedule. UsageError if there is none.

    v counts for interleaved-1f1b alone, the stages per rank (2 if None).
    """
    if name not in SCHEDULES:
        raise UsageError(f"schedule {name}: choose from {', '.join(SCHEDULES)}")
    if name == "interleaved-1f1b":
        return interleaved(p, m, 2 if v is None else v)
    return SCHEDULES[name](p, m)
