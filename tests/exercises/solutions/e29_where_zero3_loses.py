from fractions import Fraction


def price(model, machine, t):
    return Fraction((t - 1) * machine.inside, 3 * model.h) / 3


def zero3(model, machine, N, sequences):
    times = []
    for t in (1, 2, 4, 8):
        own = Fraction(sequences * t, N)
        if t > machine.g or own.denominator > 1:
            continue
        for b in range(1, int(own) + 1):
            held = Fraction(16 * model.parameters, N) + Fraction(b * model.T * model.kept, t)
            if own % b == 0 and held <= machine.memory:
                tokens = b * model.T * machine.g // t
                times.append(max(1, Fraction(machine.network, tokens)) + price(model, machine, t))
    return min(times, default=None)


def pipeline(model, machine, N, sequences, p):
    ranks = machine.g * p
    m = Fraction(sequences * ranks, N)
    if N % ranks or m.denominator > 1:
        return None
    activations = min(m, p) * Fraction(model.T * model.kept, ranks)
    held = Fraction(4 * model.parameters, ranks) + Fraction(12 * model.parameters, N) + activations
    if held > machine.memory:
        return None
    return 1 + (p - 1) / m + price(model, machine, machine.g)


def crossover(model, machine, sequences, p):
    N = machine.g * p
    while N <= sequences * machine.g * p:
        ours = pipeline(model, machine, N, sequences, p)
        other = zero3(model, machine, N, sequences)
        if ours is not None and (other is None or other > ours):
            return N
        N *= 2
    return None
