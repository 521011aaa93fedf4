"""Grader of exercise 19, an optimizer step with loss scaling over ranks."""

from typing import Any

import numpy as np

from chapters.exercises.grading import expect, on_ranks, random, require
from minipar.comm import chunk_bounds

SIZE, LR = 11, 0.5
BAD = {"an infinity": np.inf, "minus infinity": -np.inf, "a NaN": np.nan}
SOLVED = "All ranks take a step or none does, and gradients that float16 cannot hold are not lost (section 13.4)."


def cases(ranks):
    """Yield a description, the ranks' gradients, the scale, the good steps so far, and what the weights are of."""
    whole = random(ranks).integers(-500, 500, (ranks, SIZE)).astype(np.float16)
    yield "ordinary gradients", whole / np.float16(8), 1024.0, 5, 1.0
    yield "tiny gradients", whole * np.float16(2**-24), 2.0**16, 5, 2.0**-40
    yield "gradients of 60000", np.full((ranks, SIZE), 60000, np.float16), 1024.0, 5, 1.0
    yield "the 1999th good step", whole, 1024.0, 1998, 1.0
    yield "the 2000th good step", whole, 1024.0, 1999, 1.0
    for name, value in BAD.items():
        for place in range(0, SIZE, 4):
            gradients = whole.copy()
            gradients[place % ranks, place] = value
            yield f"{name} in element {place} on rank {place % ranks}", gradients, 1024.0, 7, 1.0


def grade(solution):
    for ranks in (1, 2, 3, 4):
        bounds = chunk_bounds(SIZE, ranks)
        for name, gradients, scale, good, unit in cases(ranks):
            masters = (random(ranks, 1).integers(-99, 99, SIZE) * unit).astype(np.float32)

            def program(comm, gradients=gradients, scale=scale, good=good, masters=masters, bounds=bounds):
                master = masters[slice(*bounds[comm.rank])].copy()
                with np.errstate(all="ignore"):
                    return solution.scaled_step(comm, master, gradients[comm.rank].copy(), scale, good, LR)

            with np.errstate(all="ignore"):
                total = gradients.astype(np.float32).sum(axis=0)
            is_good = bool(np.isfinite(total).all())
            next_good = 0 if not is_good or good == 1999 else good + 1
            next_scale = scale
            if not is_good:
                next_scale = scale / 2
            elif good == 1999:
                next_scale = 2 * scale
            for rank, result in enumerate(on_ranks(solution, ranks, program)):
                where = f"rank {rank} of {ranks}, {name}"
                require(isinstance(result, tuple) and len(result) == 3, f"{where}: return master, scale and good steps")
                own = slice(*bounds[rank])
                old = masters[own]
                if not is_good:
                    here = "this rank has it in its chunk of the sum, and updated"
                    other = "another rank has it in its chunk, and this one updated: all must agree before one steps"
                    hint = other if np.isfinite(total[own]).all() else here
                    require(np.array_equal(result[0], old), f"{where}: {hint}")
                narrow = "float16 has no room for it: make the gradient float32 before you take the scale out"
                skipped = "the step was skipped, but in float32 the sum over the ranks is finite"
                mistakes: dict[str, Any] = {
                    "the scale is still in the gradient": old - LR * total[own],
                    narrow if name.startswith("tiny") else skipped: old,
                    "the gradient is the ranks' mean, their sum is asked for": old - LR * total[own] / scale / ranks,
                    "these are this rank's own gradients: add up those of all ranks": (
                        old - LR * gradients[rank, own].astype(np.float32) / scale
                    ),
                }
                right = old - LR * total[own] / scale if is_good else old
                expect(result[0], right, f"{where}, master", mistakes if is_good else {})
                when = "it doubles after the 2000th good step in a row, not before and not after"
                hint = when if is_good else "a skipped step halves the scale"
                expect(result[1], next_scale, f"{where}, scale", {hint: (scale / 2, scale, 2 * scale)})
                counts = {"after a skipped step or a doubling it starts again at 0": (good, good + 1, 1)}
                onwards = {"count on from `good`, the steps before this one": (0, 1, good)}
                expect(result[2], next_good, f"{where}, good steps", counts if next_good == 0 else onwards)
