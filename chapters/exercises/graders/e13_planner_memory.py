"""Grader of exercise 13, the planner's memory formula."""

from fractions import Fraction

from chapters.exercises.e13_planner_memory import Setting
from chapters.exercises.grading import Hint, call
from minipar.parallel.predicted_memory import MIXED, model_state
from minipar.plan.layout import Layout
from minipar.plan.model import ModelShape
from minipar.plan.rank_bytes import in_flight, layer_activations

SETTINGS = [
    Setting(1000, 4, 64, 2, 32, 4, d, t, p, m, zero, schedule, sequence)
    for d, t, p, m in ((1, 1, 1, 1), (4, 1, 1, 8), (8, 2, 1, 2), (4, 2, 4, 16), (2, 8, 8, 4))
    for zero in (0, 1, 2, 3)
    for schedule in ("gpipe", "1f1b")
    for sequence in (False, True)
]
SOLVED = "Your formula gives the planner's bytes, to the last one (section 10.2)."


def layout_of(s):
    return Layout(
        s.d, s.t, s.p, s.b, s.m, zero=s.zero, schedule=s.schedule, sequence_parallel=s.sequence_parallel and s.t > 1
    )


def grade(solution):
    for s in SETTINGS:
        layout = layout_of(s)
        where = f"d {s.d}, t {s.t}, p {s.p}, m {s.m}, ZeRO {s.zero}, {s.schedule}"
        where += ", sequence parallel" if s.sequence_parallel else ""
        owned = Fraction(s.parameters, s.d)
        states = {zero: model_state(s.parameters, owned, zero, MIXED).total for zero in range(4)}
        wrong = {
            f"these are the bytes of stage {zero}: 1 divides the optimizer's, stage 2 the gradient's too, 3 all": value
            for zero, value in states.items()
        }
        wrong["the parameters are those of this rank: t and p have divided them already"] = states[s.zero] / (s.t * s.p)
        found = call(solution, solution.state_bytes, s)
        if s.d == 1 and isinstance(found, Fraction | int | float) and found not in wrong.values():
            each = float(found / s.parameters)
            wrong[f"these are {each:g} bytes for each parameter: 2, 2 and 12 are 16"] = found
        compare(found, states[s.zero], f"{where}: state", wrong)

        model = ModelShape(layers=s.layers, hidden=s.h, heads=s.a, vocab_size=64)
        layer, flying = Fraction(layer_activations(model, layout, s.s)), in_flight(layout)
        scores = Fraction(5 * s.a * s.s * s.s * s.b)
        other = Fraction(layer_activations(model, layout_of(flip(s)), s.s))
        wrong = {
            "under 1F1B the first rank keeps min(m, p) microbatches, not m": s.layers * layer * s.m,
            "under 1F1B at most m microbatches are there: min(m, p), not p": s.layers * layer * s.p,
            "GPipe keeps all m microbatches until the forwards are done": s.layers * layer * min(s.m, s.p),
            "one microbatch only: multiply by those in flight": s.layers * layer,
            "the scores, 5 a s/h, are divided by t too": s.layers * (layer - scores / s.t + scores) * flying,
            "the 24 is divided by t too": s.layers * (layer + s.s * s.b * s.h * Fraction(24 * (s.t - 1), s.t)) * flying,
            "sequence parallelism divides the 10 by t, and nothing else does": s.layers * other * flying,
            "this is one layer: the rank has several": layer * flying,
        }
        compare(call(solution, solution.activation_bytes, s), s.layers * layer * flying, f"{where}: activations", wrong)


def flip(s):
    return Setting(**{**vars(s), "sequence_parallel": not s.sequence_parallel})


def compare(value, expected, what, mistakes):
    if value == expected:
        return
    for hint, wrong in mistakes.items():
        if value == wrong:
            raise Hint(f"{what}: {hint}")
    raise Hint(f"{what}: {value} bytes, expected {expected}")
