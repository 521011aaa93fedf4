"""DiLoCo of chapter 4: the section's own proofs, with a smaller model, and its optimizer."""

from functools import partial

import numpy as np
import pytest
from chapter_code import run_functions, run_section

import minipar as mp
from chapters.support.ch04 import figures
from chapters.support.instruments import same_bits, same_on_all_ranks
from chapters.support.predict import predict, reveal
from minipar.comm import run_local, wire_bytes
from minipar.train.data import Batches, load_tokens

SAMPLES, LENGTH = 1, 4
TEXT = load_tokens(None, 256, LENGTH)
CONFIG = mp.GPTConfig(vocab_size=256, n_positions=LENGTH, n_embd=4, n_layer=1, n_head=1)


def names(comm, shown):
    """Return what 4.12 uses of the cells before it, with a smaller model."""
    d = comm.size
    namespace = {
        "comm": comm,
        "rank": comm.rank,
        "d": d,
        "B": SAMPLES,
        "N": SAMPLES * LENGTH,
        "STEPS": 10,
        "RATE": 3e-3,
        "Psi": sum(parameter.size for parameter in mp.GPT(CONFIG, dtype="float64").parameters()),
        "config": CONFIG,
        "batches": Batches(TEXT, LENGTH, d * SAMPLES, "random", 0),
        "np": np,
        "mp": mp,
        "partial": partial,
        "wire_bytes": wire_bytes,
        "same_bits": same_bits,
        "same_on_all_ranks": same_on_all_ranks,
        "figures": figures,
        "predict": predict,
        "reveal": reveal,
        "say": lambda *words: None,
        "show": lambda figure, name: shown.append(name),
    }
    run_functions("04", ("fresh", "shard", "flatten", "left_to_right"), namespace)
    return namespace


def test_the_section_proves_its_claims_on_threads():
    shown = []
    run_local(3, lambda comm: run_section("04", "4.12", names(comm, shown)))
    assert shown == ["04_local_steps"]


def test_the_outer_optimizer_is_torchs_nesterov_by_hand():
    """One parameter, whose local steps move it by 1 in each round: v = 1, 1.9; theta by 0.7 (1 + 0.9 v)."""
    moves = {"mp": mp, "np": np, "START": np.zeros(1), "Psi": 1, "STEPS": 2, "d": 1}
    run_functions("04", ("diloco",), moves)
    moves["local_steps"] = lambda theta, optimizer, r, steps: (np.ones(1), [0.0])
    theta, _ = moves["diloco"](1, lambda parameters: None, 0.7, 0.9, [0], lambda arrays: arrays[0])
    assert theta == pytest.approx(0.7 * (1 + 0.9 * 1) + 0.7 * (1 + 0.9 * 1.9))
