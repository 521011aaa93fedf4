"""Grader of exercise 29, the cluster on which ZeRO-3 loses."""

from fractions import Fraction

from chapters.exercises.e29_where_zero3_loses import Machine, Model
from chapters.exercises.grading import Hint, call, counted, require

A100, H100 = Machine(8, 73_600_000_000, 11_700, 975), Machine(8, 73_600_000_000, 18_544, 2060)
MODELS = {
    "70B": Model(69_000_000_000, 8192, 4096, 34 * 8192 * 80),
    "175B": Model(175_000_000_000, 12288, 2048, 34 * 12288 * 96),
    "70B, long sequences": Model(69_000_000_000, 8192, 32768, 34 * 8192 * 80),
    "7B": Model(6_700_000_000, 4096, 2048, 34 * 4096 * 32),
    "7B that keeps little": Model(6_700_000_000, 4096, 2048, 2 * 4096 * 32),
}
SOLVED = "You have the number of GPUs from which on ZeRO-3's gathers no longer hide (section 10.4)."


def price(model, machine, t):
    return Fraction((t - 1) * machine.inside, 9 * model.h)


def zero3(model, machine, N, sequences, *, whole=False, one=False, state=16, host="g/t", third=1, room=None):
    """Return the relative time of the best ZeRO-3 layout. The keywords are mistakes.

    whole: the step's tokens hide; one: b is 1; state: bytes; host: replicas of a host; third: times tp's price; room:
    bytes of memory.
    """
    best, t = None, 1
    while t <= machine.g:
        own = Fraction(sequences * t, N)
        for b in range(1, int(own) + 1) if own.denominator == 1 else ():
            held = Fraction(state * model.parameters, N) + Fraction(b * model.T * model.kept, t)
            if own % b == 0 and held <= (room or machine.memory) and not (one and b > 1):
                replicas = {"g/t": Fraction(machine.g, t), "g": Fraction(machine.g), "1": Fraction(1)}[host]
                ratio = machine.network / ((own if whole else b) * model.T * replicas)
                time = max(Fraction(1), ratio) + third * price(model, machine, t)
                best = time if best is None else min(best, time)
        t *= 2
    return best


def pipeline(model, machine, N, sequences, p, *, flying=None, bubble=None, third=1):
    """Return the relative time of tp x pp. The keywords are mistakes: microbatches alive, the bubble's form."""
    ranks = machine.g * p
    m = Fraction(sequences * ranks, N)
    if N % ranks or m.denominator > 1 or m < 1:
        return None
    held = Fraction(4 * model.parameters, ranks) + Fraction(12 * model.parameters, N)
    alive = min(m, p) if flying is None else flying
    if held + alive * Fraction(model.T * model.kept, ranks) > machine.memory:
        return None
    return 1 + (Fraction(p - 1) / (m + p - 1 if bubble else m)) + third * price(model, machine, machine.g)


def crossover(model, machine, sequences, p, *, added=False, tie=False, fewest=1, needs_both=False):
    """Return the first N at which tp x pp wins. The keywords are mistakes.

    added: N grows by g p; tie: it wins if both take as long; fewest: sequences of a replica; needs_both: it does not
    win if ZeRO-3 is not possible.
    """
    N = machine.g * p
    while sequences * machine.g * p >= fewest * N:
        ours, other = pipeline(model, machine, N, sequences, p), zero3(model, machine, N, sequences)
        if ours is not None and other is None and not needs_both:
            return N
        if ours is not None and other is not None and (other > ours or tie and other == ours):
            return N
        N = N + machine.g * p if added else 2 * N
    return None


ZERO3_MISTAKES = {
    "the gathers come with every microbatch: what hides them are the tokens of one": {"whole": True},
    "microbatches may be larger: the gathers then hide behind more tokens": {"one": True},
    "a GPU has 16 bytes for each of its parameters": {"state": 12},
    "all g/t replicas of a host share its g network cards": {"host": "1"},
    "a host has g/t replicas, not g: the tokens are b T g/t": {"host": "g"},
    "tp's price is a share of forward, which is a third of the step": {"third": 3},
    "the price of tp is missing, or it stands inside the max (it comes on top), or this needs more memory than there "
    "is": {"third": 0},
    "this needs more memory than there is": {"room": 10**18},
}
PIPELINE_MISTAKES = {
    "under 1F1B the first stage holds min(m, p) microbatches, not one": {"flying": 1},
    "the bubble is idle / computing time here, (p - 1)/m": {"bubble": True},
    "tp's price is a share of forward, which is a third of the step": {"third": 3},
}
CROSSOVER_MISTAKES = {
    "N doubles, from g p on": {"added": True},
    "if both take as long, ZeRO-3 does not lose": {"tie": True},
    "the last N gives a replica of g p GPUs one sequence; it counts": {"fewest": 2},
    "a layout that is not possible loses": {"needs_both": True},
}
TERMS = {
    zero3: "16 parameters/N + b T kept/t, for the smallest b",
    pipeline: "4 parameters/(g p) + 12 parameters/N + min(m, p) T kept/(g p)",
}
TINY = Model(1, 1, 10, 0)
CROSSOVERS = [  # a name, and the arguments
    (f"{name} on {kind}s", model, machine, sequences, p)
    for kind, machine in (("A100", A100), ("H100", H100))
    for name, model in MODELS.items()
    for sequences, p in ((1024, 8), (512, 4), (16, 4))
] + [
    ("both take as long up to N = 16", TINY, Machine(4, 1000, 40, 0), 16, 1),
    ("ZeRO-3 takes longer from N = 12 on", TINY, Machine(4, 1000, 192, 0), 48, 1),
    ("ZeRO-3 is not possible at N = 64, and the faster one before", TINY, Machine(4, 1000, 10, 0), 8, 2),
]


def compare(solution, function, reference, arguments, where, mistakes):
    """Raise a Hint unless the reader's function and the reference return the same."""
    found, right = call(solution, function, *arguments), reference(*arguments)
    require(found is None or isinstance(found, int | Fraction), f"{where}: {found!r}; return a Fraction, or None")
    if found == right:
        return
    for hint, how in mistakes.items():
        if found == reference(*arguments, **how):
            raise Hint(f"{where}: {hint}")
    shown = [value if isinstance(value, int | None) else f"{float(value):.4f}" for value in (found, right)]
    hint = f"{where}: {shown[0]}, expected {shown[1]}"
    if found is None and reference in TERMS:
        hint += f": these bytes must fit, and may fill the memory: {TERMS[reference]}; which term is too large?"
    raise Hint(hint)


def grade(solution):
    cases = [("A100", A100, name, N) for name in MODELS for N in (64, 96, 256, 1024, 4096, 16384)]
    cases += [("H100", H100, name, N) for name in MODELS for N in (64, 2048)]
    for kind, machine, name, N in cases:
        arguments, where = (MODELS[name], machine, N, 1024), f"{name} on {N} {kind}s:"
        compare(solution, solution.zero3, zero3, arguments, f"{where} ZeRO-3", ZERO3_MISTAKES)
        for p in (1, 4, 8):
            what = f"{where} tp x pp with {counted(p, 'stage')}"
            compare(solution, solution.pipeline, pipeline, (*arguments, p), what, PIPELINE_MISTAKES)
    full = Model(64_000, 1, 10, 100)  # with t = 4 and b = 1, 1000 bytes of state and 250 of activations
    arguments = (full, Machine(4, 16 * full.parameters // 1024 + 250, 5, 1), 1024, 1024)
    compare(solution, solution.zero3, zero3, arguments, "a memory that is full: ZeRO-3", ZERO3_MISTAKES)
    arguments = (full, Machine(4, 32_000 + 750 + 250, 5, 1), 1024, 1024, 2)
    what = "a memory that is full: tp x pp with 2 stages"
    compare(solution, solution.pipeline, pipeline, arguments, what, PIPELINE_MISTAKES)
    for name, *arguments in CROSSOVERS:
        what = f"{name}, {arguments[2]} sequences, p {arguments[3]}: crossover"
        compare(solution, solution.crossover, crossover, arguments, what, CROSSOVER_MISTAKES)
