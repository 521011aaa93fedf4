"""Deferred values: a parameter's values are computed when they are needed, where they are needed."""

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import DTypeLike

from minipar.backend import Array, xp


def placeholder(shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """Return a read-only NaN of this shape, in one element's memory.

    It is a parameter's data while the values are not on this rank.
    """
    return xp.broadcast_to(xp.full((), np.nan, dtype=dtype), shape)


class DeferredValues:
    """The part of a Parameter that computes its values later.

    Until then `data` is a placeholder, and `make` computes the values. So a model may be larger
    than a rank's memory. NB: PyTorch puts such parameters on its meta device.
    """

    __slots__ = ()

    data: Array
    make: Callable[[], Array] | None  # None when the values are here

    def materialize(self) -> None:
        """Compute deferred values, in an array of their own."""
        if self.make is not None:
            self._set(self.make())

    def map_value(self, shape: tuple[int, ...], function: Callable[[Array], Array]) -> None:
        """Replace the value by `function(value)`, of this shape, such as a rank's slice.

        Deferred values stay deferred.
        """
        if self.make is None:
            self._set(function(self.data))
        else:
            later = partial(_apply, function, self.make)
            self._set(placeholder(shape, self.data.dtype), make=later)

    def move_to(self, storage: Array) -> None:
        """Move the values into `storage`, such as a range of flat storage.

        Deferred values are computed there.
        """
        storage[...] = self.data if self.make is None else self.make()
        self._set(storage)

    def _set(self, data: Array, make: Callable[[], Array] | None = None) -> None:
        """Set both attributes."""
        self.data = data
        self.make = make  # type: ignore[misc] # it is a slot of Parameter


def _apply(function: Callable[[Array], Array], make: Callable[[], Array]) -> Array:
    """Return the function of what `make` makes."""
    return function(make())
