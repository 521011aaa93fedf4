"""Grader of exercise 29, the cluster on which ZeRO-3 loses."""

from fractions import Fraction

from chapters.exercises.e29_where_zero3_loses import Machine, Model
from chapters.exercises.grading import Hint, call, require

A100, H100 = Machine(8, 73_600_000_000, 11_700, 975), Machine(8, 73_600_000_000, 18_544, 2060)
MODELS = {
    "70B": Model(69_000_000_000, 8192, 4096, 34 * 8192 * 80),
    "175B": Model(175_000_000_000, 12288, 2048, 34 * 12288 * 96),
    "70B, long sequences": Model(69_000_000_000, 8192, 32768, 34 * 8192 * 80),
    "7B": Model(6_700_000_000, 4096, 2048, 34 * 4096 * 32),
    "7B that keeps little": Model(6_700_000_000, 4096, 2048, 2 * 4096 * 32),
}


def price(model, machine, t):
    return Fraction((t - 1) * machine.inside, 9 * model.h)


def zero3(
    model, machine, N, sequences, *, whole=False, one=False, uncut=False, state=16, host=True, third=1, room=None
):
    """Return the relative time of the best ZeRO-3 layout. The keywords are mistakes.

    whole: the step's tokens hide; one: b is 1; uncut: tp does not divide activations; state: bytes; host: replicas of
    a host share its cards; third: times tp's price; room: bytes of memory.
    """
    best, t = None, 1
    while t <= machine.g:
        own = Fraction(sequences * t, N)
        for b in range(1, int(own) + 1) if own.denominator == 1 else ():
            held = Fraction(state * model.parameters, N) + Fraction(b * model.T * model.kept, 1 if uncut else t)
            if own % b == 0 and held <= (room or machine.memory) and not (one and b > 1):
                tokens = (own if whole else b) * model.T * Fraction(machine.g, t) if host else Fraction(b * model.T)
                time = max(Fraction(1), machine.network / tokens) + third * price(model, machine, t)
                best = time if best is None else min(best, time)
        t *= 2
    return best


def pipeline(model, machine, N, sequences, p, *, flying=None, bubble=None, third=1):
    """Return the relative time of tp x pp. The keywords are mistakes: microbatches in flight, the bubble's form."""
    ranks = machine.g * p
    m = Fraction(sequences * ranks, N)
    if N % ranks or m.denominator > 1 or m < 1:
        return None
    held = Fraction(4 * model.parameters, ranks) + Fraction(12 * model.parameters, N)
    alive = min(m, p) if flying is None else {"m": m, "p": p, "1": 1}[flying]
    if held + alive * Fraction(model.T * model.kept, ranks) > machine.memory:
        return None
    return 1 + (Fraction(p - 1) / (m + p - 1 if bubble else m)) + third * price(model, machine, machine.g)


def crossover(model, machine, sequences, p):
    N = machine.g * p
    while sequences * machine.g * p >= N:
        ours, other = pipeline(model, machine, N, sequences, p), zero3(model, machine, N, sequences)
        if ours is not None and (other is None or other > ours):
            return N
        N *= 2
    return None


ZERO3_MISTAKES = {
    "the gathers come with every microbatch: what hides them are the tokens of one": {"whole": True},
    "microbatches may be larger: the gathers then hide behind more tokens": {"one": True},
    "tp divides the activations by t too": {"uncut": True},
    "a GPU has 16 bytes for each of its parameters": {"state": 12},
    "all g/t replicas of a host share its g network cards": {"host": False},
    "tp's price is a share of forward, which is a third of the step": {"third": 3},
    "the price of tp is missing, or this needs more memory than there is": {"third": 0},
    "this needs more memory than there is": {"room": 10**18},
}
PIPELINE_MISTAKES = {
    "under 1F1B the first stage holds min(m, p) microbatches, not m": {"flying": "m"},
    "under 1F1B the first stage holds min(m, p) microbatches, not p": {"flying": "p"},
    "under 1F1B the first stage holds min(m, p) microbatches, not one": {"flying": "1"},
    "the bubble is idle / computing time here, (p - 1)/m": {"bubble": True},
    "tp's price is a share of forward, which is a third of the step": {"third": 3},
}


def compare(solution, function, reference, arguments, where, mistakes):
    """Raise a Hint unless the reader's function and the reference return the same."""
    found, right = call(solution, function, *arguments), reference(*arguments)
    require(found is None or isinstance(found, int | Fraction), f"{where}: {found!r}; return a Fraction, or None")
    if found == right:
        return
    for hint, how in mistakes.items():
        if found == reference(*arguments, **how):
            raise Hint(f"{where}: {hint}")
    shown = [None if value is None else f"{float(value):.4f}" for value in (found, right)]
    raise Hint(f"{where}: {shown[0]}, expected {shown[1]}")


def grade(solution):
    cases = [("A100", A100, name, N) for name in MODELS for N in (64, 96, 256, 1024, 4096, 16384)]
    cases += [("H100", H100, name, N) for name in MODELS for N in (64, 2048)]
    for kind, machine, name, N in cases:
        arguments, where = (MODELS[name], machine, N, 1024), f"{name} on {N} {kind}s:"
        compare(solution, solution.zero3, zero3, arguments, f"{where} ZeRO-3", ZERO3_MISTAKES)
        for p in (1, 4, 8):
            what = f"{where} tp x pp with {p} stages"
            compare(solution, solution.pipeline, pipeline, (*arguments, p), what, PIPELINE_MISTAKES)
    for kind, machine in (("A100", A100), ("H100", H100)):
        for name, model in MODELS.items():
            for sequences, p in ((1024, 8), (512, 4), (16, 4)):
                found = call(solution, solution.crossover, model, machine, sequences, p)
                right = crossover(model, machine, sequences, p)
                require(
                    found == right,
                    f"{name} on {kind}s, {sequences} sequences, {p} stages: crossover is {found}, expected {right}; N "
                    "doubles from g p on, as long as m is at least 1, and a layout that is not possible loses",
                )
