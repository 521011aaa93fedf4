"""Pipeline schedules, each a pure function of p ranks and m microbatches (and v stages per rank), or read from a file.

A rank runs its list of actions (actions.py) in order and waits where a result of another rank is missing. Bubbles are
idle / total time, of stages that take equal time.

    naive              one microbatch in the pipeline at a time                               (p-1)/p
    gpipe              all forwards, then all backwards (Huang et al. 2019)                   (p-1)/(m+p-1)
    1f1b               PipeDream-Flush: one forward, one backward (Narayanan et al. 2021)     (p-1)/(m+p-1)
    interleaved-1f1b   v stages per rank (Narayanan et al. 2021, section 2.2)                 (p-1)/(vm+p-1)
    zb-h1              1f1b with W moved into the bubble (Qi et al. 2023, section 2.1)        time (p-1)(F+I-W)
    zb-h2              more forwards first: no bubble in the steady state (same paper)        time (p-1)(F+I-2W)
    zbv                two stages per rank, in the shape of a V (Qi et al. 2024)              none if F = I = W
    dualpipev          the same V; F and B overlap in pairs F&B (DeepSeek-AI 2024)  time (p-1)(F&B+B-3W) of a stage
"""

import csv
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from minipar.errors import UsageError
from minipar.parallel.pipeline.actions import PAIR, Action, Durations, Schedule, parse_action, simulate

_FSDP = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD)\d*")


def _numbered(steps: Iterable[str], m: int, stage: int, down: int = 0) -> list[Action]:
    """Return the actions of steps such as "F", "i" or "fB", a pair: capitals for `stage`, small letters for `down`."""
    # The k-th step of a kind is for microbatch k. There are no microbatches from m on.
    count: Counter[tuple[int, str]] = Counter()
    actions = []
    for step in steps:
        halves = []
        for letter in step:
            s, kind = stage if letter.isupper() else down, letter.upper()
            parts = "IW" if kind == "B" else kind
            halves.append(Action(s, kind, count[s, parts[0]]))
            count.update((s, part) for part in parts)
        if halves[0].microbatch < m:
            actions.append(replace(halves[0], kind=PAIR, pair=tuple(halves)) if len(halves) == 2 else halves[0])
    return actions


def _in_turn(r: int, m: int, ahead: int, delay: int | None = None) -> list[Action]:
    """List rank r's actions: `ahead` forwards, then one forward and one backward in turn, then the backwards left.

    With a `delay`, each backward is an I, and its W comes `delay` microbatches later. The previous rank waits for I
    only, so a rank that puts W off sends its I earlier; its W fill the time that 1F1B waits.
    """
    steps = "F" * ahead  # warmup
    for i in range(m):  # steady state: one forward, one backward; cooldown: the same without forwards
        steps += "F" * (ahead + i < m) + ("B" if delay is None else "I" + "W" * (i >= delay))
    return _numbered(steps + "W" * min(delay or 0, m), m, r)


def naive(p: int, m: int) -> Schedule:
    """Send each microbatch forward through all ranks and back again before the next one starts."""
    return Schedule.of("naive", [_in_turn(r, m, ahead=0) for r in range(p)])


def gpipe(p: int, m: int) -> Schedule:
    """Run all forwards, then all backwards. Every rank keeps the activations of m microbatches."""
    return Schedule.of("gpipe", [_in_turn(r, m, ahead=m) for r in range(p)])


def one_f_one_b(p: int, m: int) -> Schedule:
    """Run p-1-r forwards on rank r, one for each rank after it, then one forward and one backward in turn.

    Rank r keeps the activations of at most min(m, p-r) microbatches. With p = 3, m = 4 and B twice as long as F:

        rank 0   F0 F1 F2             B0 B0 F3 B1 B1    B2 B2    B3 B3
        rank 1      F0 F1       B0 B0 F2 B1 B1 F3 B2 B2    B3 B3
        rank 2         F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3
    """
    return Schedule.of("1f1b", [_in_turn(r, m, ahead=min(p - 1 - r, m)) for r in range(p)])


def interleaved(p: int, m: int, v: int = 2) -> Schedule:
    """Run 1F1B with v stages per rank: rank r holds stages r, p+r, 2p+r, ... NB: this is Megatron-LM's order.

    A rank runs p microbatches through its first stage, then through its second, ... UsageError if p does not divide m.
    """
    if m % p:
        why = "interleaved-1f1b sends microbatches through in groups of pp"
        raise UsageError(f"{why}: microbatches/pp = {m}/{p} is not whole")

    def action(r: int, kind: str, k: int) -> Action:
        """Return the k-th forward or backward of rank r; backwards take its stages from the last to the first."""
        group, k = divmod(k, p * v)
        turn, i = divmod(k, p)
        return Action((turn if kind == "F" else v - 1 - turn) * p + r, kind, group * p + i)

    lists = []
    for r in range(p):
        # Before the first gradient reaches rank r, the first group of p microbatches passes v-1 of its stages, and the
        # first microbatch needs p-r-1 hops to the last rank and as many back, one forward of rank r for each hop.
        ahead = min(2 * (p - r - 1) + (v - 1) * p, m * v)
        lists.append([action(r, nth.kind, nth.microbatch) for nth in _in_turn(r, m * v, ahead)])
    return Schedule.of("interleaved-1f1b", lists)


def zb_h1(p: int, m: int) -> Schedule:
    """Keep no more activations than 1F1B's p, at a third of its bubble if F = I = W. With p = 3, m = 4:

    rank 0   F0 F1 F2       I0 W0 F3 I1 W1 I2 W2 I3 W3
    rank 1      F0 F1    I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
    rank 2         F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
    """
    return Schedule.of("zb-h1", [_in_turn(r, m, ahead=min(p - 1 - r, m), delay=r) for r in range(p)])


def zb_h2(p: int, m: int) -> Schedule:
    """Keep up to 2p-1 microbatches alive; if F = I = W and m >= 2p-1 the ranks wait only at the start. With p = 3:

    rank 0   F0 F1 F2 F3 F4 I0 W0 I1 W1 I2 W2 I3 W3 I4 W4
    rank 1      F0 F1 F2 I0 F3 I1 F4 I2 W0 I3 W1 I4 W2 W3 W4
    rank 2         F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 W1 W2 W3 W4
    """
    return Schedule.of("zb-h2", [_in_turn(r, m, ahead=min(2 * (p - 1 - r), m), delay=2 * r) for r in range(p)])


def zbv(p: int, m: int) -> Schedule:
    """Lay 2p stages out as a V: rank r holds stage r on the way down and stage 2p-1-r on the way up.

    The last stage is on rank 0 next to the first. The backward of a microbatch starts on the rank where its forward
    ended, and every rank keeps 2p activations of half the size, as much as 1F1B's rank 0. With p = 2 and m = 4, where
    f, i, w are the stage on the way down and F, I, W the stage on the way up:

        rank 0   f0 f1 f2 F0 I0 W0 F1 I1 W1 f3 i0 w0 F2 I2 W2 i1 w1 F3 I3 W3 i2 w2 i3 w3
        rank 1      f0 F0 f1 F1 I0 W0 f2 i0 w0 F2 I1 W1 f3 i1 w1 F3 I2 W2 i2 I3 i3 w2 W3 w3

    The list is built for 2p-1 microbatches or more, and those above m are left out. Qi et al. 2024 (arXiv 2405.15362).
    """
    n = max(m, 2 * p - 1)
    lists = []
    for r in range(p):
        steps = "f" * (2 * (p - r) - 1)  # warmup: until microbatch 0 has been down to the last rank and is back here
        steps += "Ff" * r  # until it has been up to rank 0, where its backward starts, and its gradient is here
        steps += "FIW" * (p - r)  # until that gradient has been down to the last rank and is back
        steps += "fiwFIW" * (n - (2 * p - 1 - r))  # steady state: every kind once
        steps += "iwFIW" * (p - 1 - r)  # the same without f when all forwards down are done
        # Cooldown: other ranks wait for I and i, so the last W and w come at the end.
        steps += "iI" * r + "iw" * (p - r) + "W" * r + "w" * r
        lists.append(_numbered(steps, m, 2 * p - 1 - r, down=r))
    return Schedule.of("zbv", lists)


def dualpipev(p: int, m: int) -> Schedule:
    """Lay 2p stages out as zbv does, and overlap the forwards of one with the backwards of the other.

    Each half of a pair F&B communicates while the other computes. A rank keeps at most 2p+1 activations of half size.
    The steps have DeepSeek's names (arXiv 2412.19437): 0 is a rank's first stage, 1 its second. UsageError if m < 2p.
    """
    if m < 2 * p:
        raise UsageError(f"schedule dualpipev: microbatches {m} are fewer than 2*pp = 2*{p} = {2 * p}")
    lists = []
    for r in range(p):
        n, pairs = p - 1 - r, ["fB", "Fb"] * (m - 2 * p + r + 1)
        if r == p - 1:
            pairs[:1] = ["f", "B"]  # the first B1 needs only the F1 before it: in a pair it would wait for F0's input
        late = [*("Ww" * (r + 1))[r + 1 :], *"w" * n]  # the W of all I from step 6 on: other ranks wait for I
        steps = [
            *"f" * (2 * n),  # 1, nF0: until microbatch 0 has been down to the last rank and is back on this one
            *"fF" * (r + 1),  # 2, nF0F1: until it has been up to rank 0, where its backward starts, and that is here
            *"IWF" * n,  # 3, nB1W1F1: until its gradient has been down to the last rank and is back
            *pairs,  # 4, nF0B1F1B0, the main step: until all forwards down are done
            *["B", "Fb"] * n,  # 5, nB1F1B0: until all forwards up are done
            *[*"Bb" * (r + 1)][: r + 1], *[*"Ii" * (r + 1)][r + 1 :],  # 6, nB1B0
            *[letter for w in late[:n] for letter in (w, "i")],  # 7, nWB0
            *late[n:],  # 8, nW
        ]  # fmt: skip
        lists.append(_numbered(steps, m, 2 * p - 1 - r, down=r))
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
    """Return the named schedule, with v stages per rank (interleaved-1f1b: 2 if None). UsageError if there is none."""
    if name in ("pipedream", "pipedream-2bw"):
        why = "it never drains and updates with older weights, so it is no step of synchronous training"
        raise UsageError(f"schedule {name} is asynchronous: {why}; chapters/support/pipedream.py runs it (chapter 7)")
    if name not in SCHEDULES:
        raise UsageError(f"schedule {name}: choose from {', '.join(SCHEDULES)}, or a FILE.csv")
    if p < 1 or m < 1 or (v is not None and v < 1):
        raise UsageError(f"schedule {name}: pp = {p}, microbatches = {m}, virtual stages = {v}: each is at least 1")
    if name == "interleaved-1f1b":
        return interleaved(p, m, 2 if v is None else v)
    own = 2 if name in ("zbv", "dualpipev") else 1
    if v not in (None, own):
        raise UsageError(f"schedule {name} has {own} stage{'s' if own > 1 else ''} per rank, not {v}")
    return SCHEDULES[name](p, m)


def save_csv(schedule: Schedule, path: str | Path) -> None:
    """Write PyTorch's format: a row for each rank, a cell for each time step, an empty cell where the rank is idle.

    Computations take one step each. Messages take none; a schedule that has them is written without empty cells.
    """
    if any(not action.computes for _, action in schedule):
        rows = [[str(action) for action in actions] for actions in schedule.ranks]
    else:
        # An action is one cell, also B where no backward is split: F and B then take two units of time each.
        unit = 1 if schedule.splits_backward else 2
        rows = []
        for row in simulate(schedule, Durations(unit, 1, 1)).ranks:
            cells: list[str] = []
            for slot in row:
                cells += [""] * (int(slot.start) // unit - len(cells)) + [str(slot.action)]
            rows.append(cells)
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)


def load_csv(path: str | Path) -> Schedule:
    """Read PyTorch's format, but not FSDP's actions in it. UsageError names the file, or rank and cell."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:  # -sig: as spreadsheets save it
            rows = list(csv.reader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"schedule {path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    while rows and not rows[-1]:
        rows.pop()  # blank lines at the end
    lists = [
        [
            parse_action(cell, f"schedule {path}, rank {rank}, cell {i + 1}: ")
            for i, cell in enumerate(row)
            if cell.strip() and not _FSDP.fullmatch(cell.strip())
        ]
        for rank, row in enumerate(rows)
    ]
    if not any(lists):
        raise UsageError(f"schedule {path} holds no actions")
    return Schedule.of(Path(path).stem, lists)
