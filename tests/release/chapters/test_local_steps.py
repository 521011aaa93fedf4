"""DiLoCo, chapters/more/diloco.py, and its neighbours: each page proves its claims, and the outer optimizer by hand."""

import numpy as np
import pytest
from chapter_code import run_functions
from launcher import ROOT, run_mpi

import minipar as mp


@pytest.mark.parametrize("ranks", [1, 3, 8])
@pytest.mark.parametrize("page", ["diloco", "trees", "measured_collectives"])
def test_the_page_proves_its_claims(page, ranks, tmp_path):
    result = run_mpi(ranks, [str(ROOT / f"chapters/more/{page}.py")], timeout=400, cwd=tmp_path)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-5000:]
    assert (ranks, page) == (1, "measured_collectives") or (tmp_path / "out" / f"{page}.png").exists()


def test_the_outer_optimizer_is_torchs_nesterov_by_hand():
    """One parameter, whose local steps move it by 1 in each round: v = 1, 1.9; theta by 0.7 (1 + 0.9 v)."""
    moves = {"mp": mp, "np": np, "START": np.zeros(1), "Psi": 1, "STEPS": 2, "d": 1}
    run_functions("more/diloco", ("diloco",), moves)
    moves["local_steps"] = lambda theta, optimizer, r, steps: (np.ones(1), [0.0])
    theta, _ = moves["diloco"](1, lambda parameters: None, 0.7, 0.9, [0], lambda arrays: arrays[0])
    assert theta == pytest.approx(0.7 * (1 + 0.9 * 1) + 0.7 * (1 + 0.9 * 1.9))
