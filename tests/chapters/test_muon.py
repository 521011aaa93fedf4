"""Muon, chapters/more/muon.py: the iteration against the singular value decomposition, and the page's own proofs."""

import numpy as np
import pytest
from chapter_code import run_functions
from launcher import ROOT, run_mpi

from chapters.exercises.e30_muon_owners import orthogonalize as of_the_exercise
from chapters.support.muon import stack


def chapter():
    """Return the page's functions."""
    namespace = {"np": np}
    run_functions("more/muon", ("orthogonalize", "muon"), namespace)
    return namespace


def of_singular_value(value):
    """Apply the five steps to a singular value."""
    for _ in range(5):
        value = 3.4445 * value - 4.7750 * value**3 + 2.0315 * value**5
    return value


@pytest.mark.parametrize("shape", [(6, 6), (4, 9), (9, 4), (1, 5)])
def test_newton_schulz_changes_the_singular_values_alone(shape):
    matrix = np.random.default_rng(shape).normal(size=shape)
    u, values, vt = np.linalg.svd(matrix, full_matrices=False)
    expected = (u * of_singular_value(values / np.linalg.norm(values))) @ vt
    for orthogonalize in (chapter()["orthogonalize"], of_the_exercise):
        assert abs(orthogonalize(matrix) - expected).max() < 1e-12


def test_singular_values_from_0_003_on_come_near_1():
    values = of_singular_value(np.linspace(0.003, 1, 100_001))
    assert 0.68 < values.min() and values.max() < 1.21


def test_a_matrix_moves_by_the_orthogonal_matrix_of_its_mean():
    matrix, gradient, mean = np.zeros((8, 2)), np.eye(8, 2), np.zeros((8, 2))
    chapter()["muon"](matrix, gradient, mean)
    assert np.array_equal(mean, 0.05 * gradient)
    size = 0.02 * 2 * of_singular_value(1 / np.sqrt(2))  # 8 rows over 2 columns: a factor of 2
    assert abs(matrix + size * gradient).max() < 1e-15


def test_the_stacks_gradient_is_that_of_its_loss():
    flat = stack.initial()
    loss, gradient = stack.loss_and_gradient(flat, 1, 2, ranks=3)
    direction = np.random.default_rng(0).normal(size=flat.size)
    ahead, behind = (stack.loss_and_gradient(flat + way * 1e-6 * direction, 1, 2, 3)[0] for way in (1, -1))
    assert (ahead - behind) / 2e-6 == pytest.approx(gradient @ direction, rel=1e-7) and loss > 0
    assert all(np.shares_memory(view, flat) for view in stack.views(flat))


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_page_proves_its_claims(ranks, tmp_path):
    result = run_mpi(ranks, [str(ROOT / "chapters/more/muon.py")], cwd=tmp_path)
    assert result.returncode == 0, result.stderr[-3000:]
    assert {path.name for path in tmp_path.glob("out/*")} == {"muon_spectra.png", "muon_owners.png"}
