"""Conversions between float32 and floats of 2 bytes, bfloat16 and float16, to which operations round."""

from typing import Any

from minipar.autograd.backward import LazyGradient
from minipar.backend import xp


def cast_floats(value: Any, dtype: Any, least: int = 0) -> Any:
    """Convert an array (or a gradient's recipe) of float32 or 2-byte floats; return other values as they are."""
    if isinstance(value, LazyGradient):
        return LazyGradient(lambda out: cast_floats(value.compute(None), dtype))
    is_array = isinstance(value, xp.ndarray) and value.dtype.kind in "fV" and value.dtype.itemsize <= 4
    return value.astype(dtype, copy=False) if is_array and value.size >= least else value
