"""Master weights: float32 copies of parameters in 2 bytes (Micikevicius et al. 2018, section 3.1)."""

from collections.abc import Sequence
from typing import Any

from minipar.backend import Array
from minipar.nn.module import Parameter


class MasterWeights:
    """The float32 copies that an optimizer updates: parameters in 2 bytes are too coarse for small updates.

    `copies` has a float32 array for each parameter in 2 bytes, and None for each other one.
    """

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self.parameters = parameters
        self.copies: list[Any] = [p.data.astype("float32") if p.dtype.itemsize == 2 else None for p in parameters]

    def value(self, i: int) -> Array:
        """Return what is updated of parameter i: its copy, or its data."""
        return self.parameters[i].data if self.copies[i] is None else self.copies[i]

    def follow(self, i: int) -> None:
        """Before the first update: take the values of a state that was loaded after the optimizer was made."""
        copy = self.copies[i]
        if copy is None:
            return
        loaded = self.parameters[i].data
        if (copy.astype(loaded.dtype) != loaded).any():
            copy[...] = loaded

    def round(self, i: int) -> None:
        """After an update: round the copy to the parameter's 2 bytes."""
        if self.copies[i] is not None:
            self.parameters[i].data[...] = self.copies[i]
