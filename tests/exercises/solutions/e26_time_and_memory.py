"""Schedules that a search has found: a list scheduler with limits and priorities, which it has changed at random."""

from fractions import Fraction

P, M, TIMES = 4, 8, {"F": 4, "I": 5, "W": 3}
# For a limit of memory: the rank of each stage; the most alive on its rank when a stage runs F; how urgent F, I and W
# of each stage are; and for each rank, how many W of a stage may wait before they are the most urgent.
FOUND = {
    2: (
        [0, 1, 2, 3, 3, 2, 1, 0],
        [3, 10, 15, 3, 11, 4, 6, 4],
        [8, 20, 13, 1, 6, 22, 19, 11],
        [15, 12, 4, 7, 16, 23, 21, 0],
        [9, 10, 2, 14, 5, 17, 3, 18],
        [0, 5, 2, 2],
    ),
    3: (
        [0, 1, 2, 3, 0, 1, 2, 3],
        [6, 6, 6, 7, 6, 7, 6, 6],
        [11, 6, 1, 18, 16, 20, 17, 7],
        [2, 9, 12, 14, 14, 14, 10, 14],
        [13, 3, 15, 0, 4, 19, 8, 5],
        [2, 2, 4, 1],
    ),
    4: (
        [0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3],
        [11, 9, 11, 10, 13, 13, 16, 14, 12, 12, 21, 16],
        [19, 17, 1, 20, 23, 34, 13, 15, 31, 6, 10, 18],
        [16, 26, 22, 28, 11, 8, 21, 24, 35, 25, 32, 33],
        [30, 4, 9, 14, 29, 0, 7, 3, 12, 27, 2, 5],
        [1, 5, 5, 4],
    ),
    5: (
        [0, 1, 2, 3, 3, 2, 1, 0, 0, 1, 2, 3],
        [14, 15, 13, 12, 11, 15, 13, 16, 13, 13, 15, 19],
        [7, 16, 4, 24, 25, 33, 34, 15, 26, 27, 9, 30],
        [3, 28, 14, 35, 22, 19, 31, 10, 21, 11, 23, 29],
        [18, 5, 2, 6, 0, 12, 8, 20, 1, 17, 32, 13],
        [5, 6, 3, 5],
    ),
}


def scheduled(home, limits, forward, backward_input, backward_weight, waiting):
    """Return the lists: whenever a rank is free, it takes the most urgent action that it can begin."""
    stages = range(len(home))
    urgency = {"F": forward, "I": backward_input, "W": backward_weight}
    done = {kind: [0] * len(home) for kind in "FIW"}  # how many each stage has begun
    ends, free, alive = {}, [0] * P, [0] * P
    lists = [[] for _ in range(P)]
    moments = {0}
    while moments:
        now = min(moments)
        moments.remove(now)
        for rank in range(P):
            able = []
            for stage in stages:
                if home[stage] != rank or free[rank] > now:
                    continue
                for kind in "FIW":
                    number = done[kind][stage]
                    needs = {"F": [(stage - 1, "F")], "I": [(stage, "F"), (stage + 1, "I")], "W": [(stage, "I")]}[kind]
                    if number == M or any(ends.get((s, k, number), now + 1) > now for s, k in needs if s in stages):
                        continue
                    if kind == "F" and alive[rank] >= limits[stage]:
                        continue
                    late = kind == "W" and done["I"][stage] - number > waiting[rank]
                    able.append((late, urgency[kind][stage], stage, kind, number))
            if able:
                _, _, stage, kind, number = max(able)
                done[kind][stage] += 1
                alive[rank] += {"F": 1, "I": 0, "W": -1}[kind]
                free[rank] = ends[stage, kind, number] = now + Fraction(TIMES[kind] * P, len(home))
                moments.add(free[rank])
                lists[rank].append(f"{stage}{kind}{number}")
    return lists


def schedule():
    return scheduled(*FOUND[3])
