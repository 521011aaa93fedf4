"""Fit nanotron's constants (`PROGRAMS["nanotron"]` in minipar/plan/programs.py, `NANOTRON` in layout.py).

They are fitted to the Ultra-Scale Playbook's runs with the 1B model, without a pipeline, on at most 32 hosts, and to
nothing else: 149 runs. The 8B runs only judge them (test_playbook.py). NB: which constants there are was decided with
the errors of an earlier planner on 1B and 8B in view.

    PYTHONPATH=.:tests/release python tests/release/plan/fit_nanotron.py

prints the constants and what they reach, in less than a minute. A coordinate descent on logarithms minimizes the mean
|log(predicted / measured)|, each at most CAP, since some runs took several times as long as their twins. The runs of
one model hardly tell slow products from slow elementwise kernels. So each constant is pulled towards its start,
weakly, in units of its spread.
"""

from __future__ import annotations

from dataclasses import replace
from math import exp, log

from plan.nanotron_runs import nbytes, runs, seconds, without_pipeline
from plan.playbook import summary

from minipar.plan.programs import PROGRAMS, Program

# A start, and how far from it (as a logarithm) a constant is expected. Products: the runs suggest 0.57 to 0.75 of the
# peak. Elementwise kernels: times Megatron's traffic. Links: nccl-tests. The host: the least seconds of a layer in the
# record. An all-reduce is between a tree (1) and a ring (2).
TIME = {
    "products": (0.65, 0.15),
    "half_work": (4e9, 1.0),
    "elementwise": (1.0, 0.3),
    "links": (0.8, 0.3),
    "cards": (0.75, 0.4),
    "all_reduce": (1.2, 0.4),
    "alpha_between": (30e-6, 0.7),
    "host_layer": (4.2e-3, 0.1),
    "host_ends": (5e-3, 0.7),
}
# The logits are kept in 16 bits and, once or several times, in 32.
MEMORY = {"logits": (6.0, 0.3), "overhead": (0.5e9, 1.0)}
CAP, PULL = 0.6, 0.01
STEPS = (0.2, 0.1, 0.05, 0.02)


def with_time(values: dict[str, float]) -> Program:
    """Return nanotron with these constants of time."""
    program, fields = PROGRAMS["nanotron"], dict(values)
    elementwise = fields.pop("elementwise")
    fields |= {"forward_traffic": 2 * elementwise, "backward_traffic": 4 * elementwise}
    return replace(program, assumptions=replace(program.assumptions, **fields))


def with_memory(values: dict[str, float]) -> Program:
    """Return nanotron with these constants of memory."""
    program = PROGRAMS["nanotron"]
    kept = replace(program.framework.kept, logits=values["logits"])
    return replace(program, framework=replace(program.framework, kept=kept, overhead=values["overhead"]))


def time_loss(values: dict[str, float]) -> float:
    """Return the mean error of the 1B runs' seconds, and the pull."""
    program, chosen = with_time(values), without_pipeline("1B")
    errors = [abs(log(seconds(run, program) / run.seconds)) for run in chosen]
    return sum(min(error, CAP) for error in errors) / len(errors) + pull(values, TIME)


def memory_loss(values: dict[str, float]) -> float:
    """Return the mean error of the 1B runs' bytes, and the pull."""
    program, chosen = with_memory(values), without_pipeline("1B")
    errors = [abs(log(nbytes(run, program) / run.nbytes)) for run in chosen]
    return sum(min(error, CAP) for error in errors) / len(errors) + pull(values, MEMORY)


def pull(values: dict[str, float], expected: dict[str, tuple[float, float]]) -> float:
    """Return what values cost that are far from where they are expected."""
    return PULL * sum((log(values[k] / start) / spread) ** 2 for k, (start, spread) in expected.items()) / len(values)


def descend(loss, expected):
    """Return the values at which no single step lowers the loss."""
    values = {name: start for name, (start, _) in expected.items()}
    least = loss(values)
    for step in STEPS:
        moved = True
        while moved:
            moved = False
            for name in values:
                for factor in (exp(step), exp(-step)):
                    tried = values | {name: values[name] * factor}
                    if (found := loss(tried)) < least - 1e-6:
                        values, least, moved = tried, found, True
                        break
    return values, least


if __name__ == "__main__":
    for loss, expected, program_of in ((time_loss, TIME, with_time), (memory_loss, MEMORY, with_memory)):
        fitted, least = descend(loss, expected)
        print(f"loss {least:.4f}:", ", ".join(f"{name} {value:.3g}" for name, value in fitted.items()))
        for model in ("1B", "8B"):
            print(f"  {model}, pp = 1, at most 32 hosts:", summary(without_pipeline(model), program_of(fitted)))
    print("frozen, all runs:", summary(runs()))
