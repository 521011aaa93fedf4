"""Claims about the matrix of docs/combinations.md: each cell, when run, is equal to the bit, or within the bound.

tests/train/test_matrix.py has the cells that are refused, and what the others promise.
"""

import pytest
from combinations import TEXT
from matrix import MATRIX, config_for
from training import verdicts


@pytest.mark.parametrize("cell", [cell for cell in MATRIX if MATRIX[cell] != "no"], ids=" x ".join)
def test_a_cell_of_the_matrix_is_true(cell):
    verdict = verdicts(config_for(" ".join(cell)), TEXT)[0]
    assert verdict.passed, verdict.line
    assert ("bit for bit" in verdict.line) == (MATRIX[cell][0] == "=")
