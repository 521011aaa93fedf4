"""Grader of exercise 23, a hook that fires too early."""

import numpy as np

from chapters.exercises.graders.e04_ddp_bucket import WatchedCommunicator
from chapters.exercises.grading import Hint, call, expect, on_ranks, random, require

BUCKETS = [{"head": 3, "norm": 1}, {"shared": 4, "up": 2}, {"expert": 5}, {"embedding": 6, "position": 2}]
# Of each step: the parameters in the order of their contributions; a rank's own differ.
STEPS = [
    ["head", "norm", "shared", "expert", "up", "shared", "position", "embedding", "embedding"],
    ["shared", "shared", "up", "embedding", "shared", "position"],  # bucket 0 has no use, and leaves at once
    ["up", "embedding", "head", "position", "embedding", "norm", "expert", "expert", "shared"],
]
LOGS = {
    (("gradient", "head"), ("gradient", "norm"), ("send", 0), ("gradient", "up")): None,
    (("gradient", "head"), ("gradient", "norm"), ("send", 0), ("gradient", "norm")): (0, "norm"),
    (
        ("gradient", "up"),
        ("send", 1),
        ("gradient", "head"),
        ("send", 0),
        ("gradient", "norm"),
        ("gradient", "shared"),
    ): (1, "shared"),
    (("send", 3), ("gradient", "position"), ("gradient", "embedding"), ("gradient", "position")): (3, "position"),
    (("send", 2), ("gradient", "head"), ("gradient", "norm"), ("send", 0)): None,
    (): None,
}
SOLVED = "Each bucket leaves once, in order and complete, however often its parameters are used (section 4.4)."


def order_of(step, rank):
    return STEPS[(step + rank) % len(STEPS)]


def gradient_of(step, rank, place, size):
    return random(23, step, rank, place).normal(size=size)


def complete(left):
    """Return how many buckets may have left if each parameter still misses left[name] contributions."""
    number = 0
    while number < len(BUCKETS) and not any(left[name] for name in BUCKETS[number]):
        number += 1
    return number


def check_sent(watched, left, where):
    """Compare what has left with what can have left."""
    sizes = [sum(bucket.values()) for bucket in BUCKETS]
    sent, allowed = [size for size, _ in watched.all_reduces], complete(left)
    require(
        sent == sizes[: len(sent)],
        f"{where}: all-reduces of {sent} elements; the buckets have {sizes}, and leave in this order, each once",
    )
    if len(sent) > allowed:
        missing = {name: left[name] for name in BUCKETS[allowed] if left[name]}
        raise Hint(f"{where}: bucket {allowed} leaves, and contributions are missing: {missing}; count uses")
    require(
        len(sent) == allowed,
        f"{where}: bucket {len(sent)} is complete and does not leave. Is a parameter without uses waited for? Does the "
        "count start anew in each step? Does a bucket leave in the call that completes it?",
    )
    require(all(started for _, started in watched.all_reduces), f"{where}: start the all-reduce with async_op=True")


def grade(solution):
    for log, right in LOGS.items():
        found = call(solution, solution.first_early, list(log), BUCKETS)
        require(
            found == right,
            f"first_early of {list(log)}: {found}, expected {right}; a bucket left too early if a contribution to one "
            "of its own parameters comes after it, and the first to leave counts",
        )
    sizes = {name: size for bucket in BUCKETS for name, size in bucket.items()}
    for ranks in (1, 2, 3):

        def program(comm):
            watched = WatchedCommunicator(comm, "an all-reduce is waited for before `finish`; leave it under way")
            mended = solution.Mended(watched, BUCKETS)
            results = []
            for step in range(2):
                order = order_of(step, comm.rank)
                left = {name: order.count(name) for name in sizes}
                del watched.all_reduces[:]
                watched.may_wait = False
                where = f"rank {comm.rank} of {comm.size}, step {step}"
                mended.begin(dict(left))
                check_sent(watched, left, f"{where}, begin")
                for place, name in enumerate(order):
                    left[name] -= 1
                    mended.contribution(name, gradient_of(step, comm.rank, place, sizes[name]))
                    check_sent(watched, left, f"{where}, after contribution {place}, to {name}")
                watched.may_wait = True
                results.append({name: array.copy() for name, array in mended.finish().items()})
            return results

        for rank, results in enumerate(on_ranks(solution, ranks, program)):
            for step, result in enumerate(results):
                for name, size in sizes.items():
                    each = [
                        [
                            gradient_of(step, r, place, size)
                            for place, other in enumerate(order_of(step, r))
                            if other == name
                        ]
                        for r in range(ranks)
                    ]
                    right = sum((sum(own) for own in each), np.zeros(size))
                    last = sum(own[-1] for own in each if own)
                    mistakes = {"the contributions of several uses must be added up, this is the last alone": last}
                    expect(result[name], right, f"rank {rank} of {ranks}, step {step}, {name}", mistakes)
