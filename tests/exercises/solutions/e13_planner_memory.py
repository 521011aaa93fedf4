from fractions import Fraction


def state_bytes(s):
    parameter, gradient, optimizer = (Fraction(width * s.parameters) for width in (2, 2, 12))
    if s.zero >= 1:
        optimizer /= s.d
    if s.zero >= 2:
        gradient /= s.d
    if s.zero >= 3:
        parameter /= s.d
    return parameter + gradient + optimizer


def activation_bytes(s):
    whole = Fraction(10, s.t) if s.sequence_parallel else 10
    layer = s.s * s.b * s.h * (whole + Fraction(24, s.t) + Fraction(5 * s.a * s.s, s.h * s.t))
    in_flight = s.m if s.schedule == "gpipe" else min(s.m, s.p)
    return s.layers * layer * in_flight
