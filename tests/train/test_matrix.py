"""Claims about the matrix of docs/combinations.md: what is refused, and what keeps the bits.

tests/release/train/test_matrix.py trains every cell; test_combinations.py trains rows of every axis.
"""

from combinations import TEXT
from matrix import MATRIX, config_for
from training import ranks_of, trainer_for

from minipar.comm import run_local
from minipar.errors import UsageError
from minipar.train.flags import is_exact


def promised(flags, cell):
    """Return the program's word on a cell: "no" if refused, "=" for bits, "≈" for the bound.

    The flags refuse some, and the strategies the others, which are tried only where the document says "no".
    """
    try:
        args = config_for(flags)
        if cell == "no":
            run_local(ranks_of(args), lambda comm: trainer_for(args, TEXT, comm))
    except (UsageError, ValueError):
        return "no"
    return "=" if is_exact(args) else "≈"


def test_the_program_promises_what_each_cell_says():
    assert {cell: promised(" ".join(cell), MATRIX[cell]) for cell in MATRIX} == MATRIX
