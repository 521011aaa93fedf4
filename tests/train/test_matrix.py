"""Claims about the matrix of docs/combinations.md: what is refused, and what keeps the bits.

tests/release/train/test_matrix.py trains every cell; test_combinations.py trains rows of every axis.
"""

from matrix import MATRIX, config_for

from minipar.errors import UsageError
from minipar.train.flags import is_exact


def promised(flags):
    """What the program says of a cell: "no" if refused, "=" for bits, "≈" for the bound."""
    try:
        args = config_for(flags)
    except UsageError:
        return "no"
    return "=" if is_exact(args) else "≈"


def test_the_program_promises_what_each_cell_says():
    assert {cell: promised(" ".join(cell)) for cell in MATRIX} == MATRIX
