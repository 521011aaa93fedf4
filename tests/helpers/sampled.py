"""The cases of a long list that `make test` runs; `make long` runs the others."""

from collections.abc import Sequence
from typing import Any

import pytest


def sampled(cases: Sequence[Any], every: int) -> list[Any]:
    """Return the cases of a parametrization, all marked `long` but each `every`-th from the first on."""
    parameters = [case if isinstance(case, tuple) else (case,) for case in cases]
    marks = [() if i % every == 0 else (pytest.mark.long,) for i in range(len(cases))]
    return [pytest.param(*each, marks=mark) for each, mark in zip(parameters, marks, strict=True)]
