"""Claims about the matrix of docs/combinations.md: what is refused, what keeps the bits, and what costs a note.

tests/release/train/test_matrix.py trains every cell; test_combinations.py trains rows of every axis.
"""

import pytest
from matrix import MATRIX, config_for
from training import config_for as any_config

from minipar.errors import UsageError
from minipar.train.progress import notes
from minipar.train.verify import is_exact


def promised(flags):
    """Return the program's word on a cell: "no" if refused, "=" for bits, "≈" for the bound, with "*" for a note."""
    try:
        config = config_for(flags)
    except UsageError:
        return "no"
    sign = "=" if is_exact(config) else "≈"
    return sign + ("*" if notes(config) else "")


def test_the_program_promises_what_each_cell_says():
    assert {cell: promised(" ".join(cell)) for cell in MATRIX} == MATRIX


@pytest.mark.parametrize(
    ("flags", "values"),
    [
        ("", []),
        ("--dp 2 --zero-stage 3", []),
        ("--dp 2 --tp 2 --pp 2 --microbatches 4 --zero-stage 1", []),
        ("--tp 2 --zero-stage 1", ["--zero-stage 1", "dp = 1"]),
        ("--dp 2 --zero-stage 3 --zero-replicas 2", ["--zero-stage 3", "dp = 2 in 2 replicas"]),
        ("--dp 2 --zero-stage 2 --microbatches 4", ["4 microbatches", "--sync-every-microbatch"]),
        ("--dp 2 --zero-stage 2 --microbatches 4 --sync-every-microbatch", []),
        ("--dp 2 --zero-stage 3 --microbatches 4 --sync-every-microbatch", ["2*4 = 8"]),
        ("--pp 3 --schedule gpipe", ["one microbatch"]),
        ("--pp 2 --schedule naive --microbatches 4", ["--schedule naive"]),
    ],
)
def test_a_note_says_what_a_layout_costs(flags, values):
    lines = notes(any_config(f"--layers 4 --hidden 20 --global-batch 8 {flags}"))
    assert len(lines) == (1 if values else 0)
    for each in values:
        assert each in lines[0]
