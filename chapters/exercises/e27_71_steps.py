"""Exercise 27 (chapter 7): 1F1B in 71 steps?

Somebody claims a bubble of 7/71 = 0.0986 for 1F1B with p = 8 ranks, one stage on each, and m = 32 microbatches. F and B
take one step each, so a rank works for 64 steps and idles for 7. `claim()` returns the timetable, in which each action
occurs once and no rank does two things at a time. The library's 1F1B takes 78 steps. Who is right?

1. Refute the claim. `first_broken` gets a timetable: for each rank a list of (start, action), sorted by start, such as
   (9, "B0"). Every action takes one step. Return (start, rank, action) of the first action that breaks a rule: the one
   with the smallest start, and among several the one on the smallest rank (in no graded timetable are there two on one
   rank). Return None if there is none. The rules: an action begins when the one before it on its rank has ended, or
   later; so does F after F of the same microbatch on the rank before, and B after F of the same microbatch on its own
   rank and after B on the next rank.
2. Show that nobody can do it. `least_time` returns a time that no schedule can beat, in whichever order the ranks run
   their actions. It gets the time of F and of B on each rank, which may differ, and m. With p = 8, m = 32 and all times
   1 it must return 78. (Choose a rank. What must have happened before its first action, and what is left to do after
   its last?)

Graded: timetables, right and wrong. Of `least_time`: the times of 1F1B where all ranks are equally fast; where they are
not, no more than the best of all schedules, which the grader tries, and no less than the answer to the question in
brackets for the rank for which it is largest.
"""

Timetable = list[list[tuple[int, str]]]


def claim(p: int = 8, m: int = 32) -> Timetable:
    """Return the timetable of the claim."""
    ranks = []
    for r in range(p):
        forwards = [(r + 2 * i, f"F{i}") for i in range(m)]
        backwards = [(p - 1 + (p - 1 - r + 1) % 2 + 2 * i, f"B{i}") for i in range(m)]
        ranks.append(sorted(forwards + backwards))
    return ranks


def first_broken(timetable: Timetable) -> tuple[int, int, str] | None:
    """Return (start, rank, action) of the first action that breaks a rule, or None."""
    raise NotImplementedError("your code")


def least_time(forward: list[int], backward: list[int], m: int) -> int:
    """Return a time that no schedule can beat; forward[r] and backward[r] are the times of F and B on rank r."""
    raise NotImplementedError("your code")
