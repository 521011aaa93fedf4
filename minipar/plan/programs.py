"""The programs that train, with what they achieve, and a user's own program or GPU from a file."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from minipar.errors import UsageError
from minipar.plan.cluster import GPUS, Assumptions, Gpu
from minipar.plan.layout import (
    DEEPSPEED_2021,
    LLAMA_3,
    MEGATRON,
    MEGATRON_2021,
    MINIPAR,
    NANOTRON,
    Framework,
)
from minipar.train.pretrained import read_json

GPU_RANGE = (1.0, 1e24)  # each value in a user's file that is not a fraction lies in it
PROGRAM_RANGE = (0.0, 1e12)  # each value in a user's file that is not a fraction lies in it
FRACTIONS = ("products", "attention", "copies", "links", "cards", "memory_used")
FRACTION_RANGE = (1e-6, 1.0)


@dataclass(frozen=True)
class Program:
    """A program that trains: its framework's habits, and what it achieves of a data sheet's
    values. `evidence` says in which runs predicted seconds are within `spread` of the measured.
    """

    framework: Framework
    assumptions: Assumptions
    spread: float
    evidence: str


# The `half_work` with which two samples are the best microbatch in figure 16 of Narayanan et al.
# 2021, as printed; one sample is with 2e9. Table 1 of the same paper comes out within 3 % from 1e10
# to 3e10.
LARGER_PRODUCTS = 2e10

# nanotron: the values that are not Megatron's were fitted to the Ultra-Scale Playbook's runs, with
# its 1B model and without a pipeline, on at most 32 hosts of 8 H100, and to nothing else
# (tests/release/plan/fit_nanotron.py).
PROGRAMS = {
    # tests/release/plan/test_published.py; the other three are LLaMA's, 16 to 28 % too fast
    "megatron": Program(
        MEGATRON,
        Assumptions(),
        0.15,
        "seconds are within 15 % of the printed ones in 17 of 20 runs",
    ),
    "megatron-2021": Program(  # tests/release/plan/test_megatron_2021.py
        MEGATRON_2021,
        Assumptions(half_work=LARGER_PRODUCTS),
        0.10,
        "seconds are within 4 % of the printed ones in 16 of 16 runs, 10 % in 34 of 39 read off figures",
    ),
    "deepspeed-2021": Program(
        DEEPSPEED_2021,
        Assumptions(half_work=LARGER_PRODUCTS),
        0.10,
        "with ZeRO-3 seconds are within 10 % of the printed ones in 6 of 6 runs",
    ),
    "llama-3": Program(
        LLAMA_3,
        Assumptions(half_work=LARGER_PRODUCTS),
        0.15,
        "seconds are within 15 % of the printed ones in 2 of 2 runs, both of them shorter",
    ),
    "nanotron": Program(
        NANOTRON,
        Assumptions(
            products=0.53,
            half_work=7.8e9,
            forward_traffic=2.16,
            backward_traffic=4.32,
            links=0.70,
            cards=0.73,
            all_reduce=1.2,
            alpha_between=55e-6,
            host_layer=4.2e-3,
            host_ends=7.5e-3,
            memory_used=0.98,  # Framework.overhead is counted by itself
        ),
        0.20,
        "without a pipeline seconds are within 20 % in 8 of 10 runs; with one nothing is known",
    ),
    "minipar": Program(
        MINIPAR,
        Assumptions(),
        0.20,
        "on two CPU cores, with constants measured on them, seconds are within 20 % in 28 of 28 runs",
    ),
}


# ---- a user's own ----


def find_program(name: str) -> Program:
    """Return a program by its name, or from a JSON file with values of the user's own.

    The file holds fields of Assumptions, and "like", the name of the program that gives the rest
    (Megatron's without it). UsageError for an unknown name and for a file that describes no
    program.
    """
    if name.lower() in PROGRAMS:
        return PROGRAMS[name.lower()]
    like, values = _own_values(name, "program", PROGRAMS, vars(Assumptions()), PROGRAM_RANGE)
    like = like or "megatron"
    program = PROGRAMS[like]
    if not values:
        return program
    evidence = f"no run was compared with these values; of {like}: {program.evidence}"
    assumptions = replace(program.assumptions, **values)
    return replace(program, assumptions=assumptions, evidence=evidence)


def find_gpu(name: str) -> Gpu:
    """Return a GPU by its name, or from a JSON file with values of the user's own.

    The file holds Gpu's fields, or some of them and "like", the name of a GPU that gives the rest.
    UsageError for an unknown name and for a file that describes no GPU.
    """
    if name.lower() in GPUS:
        return GPUS[name.lower()]
    fields = vars(GPUS["a100"])
    like, values = _own_values(name, "gpu", GPUS, fields, GPU_RANGE)
    missing = sorted(fields.keys() - values - set(FRACTIONS))
    if like is None and missing:
        raise UsageError(f'{name} lacks {", ".join(missing)}, or "like": a known GPU')
    return replace(GPUS[like or "a100"], **values)


def _own_values(
    name: str,
    kind: str,
    known: Mapping[str, object],
    fields: Mapping[str, object],
    usual: tuple[float, float],
) -> tuple[str | None, dict[str, Any]]:
    """Return the "like" in a user's JSON file, a known name or None, and the values of fields.

    UsageError unless a value is in the `usual` range, or is a fraction if its field is.
    """
    names = ", ".join(known)
    if not os.path.exists(name):  # False, too, for a name that is too long
        raise UsageError(f"--{kind} {name}: neither a JSON file nor one of {names}")
    values: dict[str, Any] = read_json(Path(name))
    like = values.pop("like", None)
    if like is not None:
        if not isinstance(like, str) or like.lower() not in known:
            raise UsageError(f'{name}: "like" is {str(like)[:40]!r}, expected one of {names}')
        like = like.lower()
    for key, value in values.items():
        if key not in fields:
            raise UsageError(f"{name}: no {kind} has {key[:40]!r}; expected {', '.join(fields)}")
        low, high = FRACTION_RANGE if key in FRACTIONS else usual
        if type(value) not in (int, float) or not low <= value <= high:
            expected = f"a value from {low:g} to {high:g}"
            raise UsageError(f"{name}: {key} is {str(value)[:40]}, expected {expected}")
    return like, values
