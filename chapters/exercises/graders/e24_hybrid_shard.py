"""Grader of exercise 24, a step of hybrid sharding."""

import numpy as np

from chapters.exercises.grading import RingCommunicator, counted, expect, on_ranks, random, require, same
from minipar.comm import chunk_bounds

STEPS = 3
LIMITS = (1e9, 0.5, 0.5)  # the first step is not clipped
SOLVED = "Between hosts a rank all-reduces n/s elements only, those of its chunk (section 5.11)."


def gradient_of(whole, rank, step):
    matrix, target = random(24, rank, step).normal(size=(2, whole.size))
    return matrix * matrix * (whole - target)


def one_device(n, ranks, *, mean=None, times=1.0, always=False, parts=None, seen=slice(None)):
    """Return the parameters after each step. The keywords are mistakes.

    mean: divide by this; times: of the norm's squares; always: clip a short gradient too; parts: these ranks alone;
    seen: the elements that the norm has.
    """
    values, velocity, history = np.arange(n) / n, np.zeros(n), []
    for step in range(STEPS):
        gradients = [gradient_of(values, rank, step) for rank in parts or range(ranks)]
        gradient = sum(gradients) / (mean or len(gradients))
        norm = np.sqrt(times * (gradient[seen] ** 2).sum())
        if always or norm > LIMITS[step]:
            gradient = gradient * LIMITS[step] / norm
        velocity = 0.9 * velocity + gradient
        values = values - 0.1 * velocity
        history.append(values)
    return history


def grade(solution):
    for q, s, n in ((1, 1, 5), (3, 2, 10), (2, 2, 8), (1, 4, 8), (3, 1, 4), (2, 3, 11)):
        ranks = q * s

        def program(comm, q=q, s=s, n=n):
            inside, between = map(RingCommunicator, comm.split_into(q, "inside"))
            own = slice(*chunk_bounds(n, s)[inside.rank])
            parameters, velocity = (np.arange(n) / n)[own], np.zeros(n)[own]
            history = []
            for step in range(STEPS):
                calls = []

                def gradient(whole, step=step, calls=calls):
                    calls.append(1)
                    require(np.shape(whole) == (n,), f"gradient_of was given {np.shape(whole)}, expected ({n},)")
                    return gradient_of(whole, comm.rank, step)

                comm.traffic.reset()
                solution.step(inside, between, parameters, velocity, n, gradient, LIMITS[step])
                require(len(calls) == 1, f"gradient_of was called {len(calls)} times, expected once")
                sent = {
                    "a gather inside": comm.traffic.bytes("all_gather", "inside"),
                    "a reduce-scatter inside": comm.traffic.bytes("reduce_scatter", "inside"),
                    "an all-reduce inside": comm.traffic.bytes("all_reduce", "inside"),
                    "all together": comm.traffic.bytes(axis="inside"),
                    "between": comm.traffic.bytes() - comm.traffic.bytes(axis="inside"),
                }
                history.append((parameters.copy(), {what: count // 8 for what, count in sent.items()}))
            return history

        results = on_ranks(solution, ranks, program)
        for rank, history in enumerate(results):
            check_values(q, s, n, rank, [values for values, _ in history])
        for step in range(STEPS):
            check_bytes(q, s, n, [history[step][1] for history in results])


def check_values(q, s, n, rank, history):
    """Compare a rank's chunk after each step with one device."""
    ranks, place = q * s, rank % s
    own, host = slice(*chunk_bounds(n, s)[place]), range(rank - place, rank - place + s)
    wrong = {
        "these are the samples of this host alone: sum the chunks between hosts": (
            {"parts": host},
            {"parts": host, "mean": ranks},
        ),
        "the norm is that of all n elements: sum the squares of the chunks inside the host": (
            {"seen": own},
            {"seen": own, "times": q},
        ),
        "this is the sum over all ranks, the mean is asked for": ({"mean": 1},),
        "divide by all ranks, not by those of a host": ({"mean": s},),
        "divide by all ranks, not by the hosts": ({"mean": q},),
        "the norm counts each element q times: sum the squares inside, not between": ({"times": q},),
        "a gradient that is shorter than the limit stays as it is": ({"always": True},),
    }
    right = one_device(n, ranks)
    for step, values in enumerate(history):
        expected = right[step][own]
        if same(values, expected):
            continue
        mistakes = {"nothing has changed: change the arrays that were given, in place": (np.arange(n) / n)[own]}
        for hint, ways in wrong.items():
            found = [one_device(n, ranks, **how)[step][own] for how in ways]
            mistakes[hint] = tuple(value for value in found if not same(value, expected))
        expect(values, expected, f"{counted(q, 'host')} of {s}, rank {rank}, step {step}", mistakes)


def check_bytes(q, s, n, sent):
    """Compare what the ranks of each host send in a step with the formulas."""
    advice = "gather the parameters, reduce-scatter the gradient, all-reduce one value for the norm"
    for host in range(q):
        inside = sent[host * s : (host + 1) * s]
        for what, fewest in (
            ("a gather inside", n * (s - 1)),
            ("a reduce-scatter inside", n * (s - 1)),
            ("an all-reduce inside", 2 * (s - 1)),
            ("all together", 2 * (n + 1) * (s - 1)),
        ):
            found = sum(counts[what] for counts in inside)
            where = f"{counted(q, 'host')} of {s}, n = {n}, the ranks of host {host}"
            require(found == fewest, f"{where} send {found} elements, {what}; expected {fewest}: {advice}")
    between, fewest = sum(counts["between"] for counts in sent), 2 * n * (q - 1)
    require(
        between == fewest,
        f"{counted(q, 'host')} of {s}, n = {n}: {between} elements travel between hosts, expected {fewest}: "
        "all-reduce the chunk that the reduce-scatter left, not the gradient, and send nothing else",
    )
