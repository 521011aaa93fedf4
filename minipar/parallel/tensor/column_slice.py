"""The result of a ColumnParallelLinear: operations over its columns are refused, because a rank has some of them."""

from typing import Any

from minipar.autograd.tensor import Tensor
from minipar.errors import UsageError


class ColumnSlice(Tensor):
    """This rank's columns, (..., n/t) of n. Elementwise operations and products are those of a Tensor."""

    @classmethod
    def of(cls, y: Tensor) -> "ColumnSlice":
        """Return y as a ColumnSlice, with the node that has computed it."""
        own = cls(y.data, y.requires_grad)
        own.node = y.node
        return own

    def refuse(self, *inputs: Any, **options: Any) -> Any:
        """Raise UsageError: each rank would compute with its own columns alone."""
        raise UsageError(
            "an operation over the columns of a ColumnParallelLinear, of which this rank has "
            f"{self.shape[-1]}: give them to a RowParallelLinear, or to mp.vocab_parallel_cross_entropy_sum"
        )

    softmax = log_softmax = check_whole = refuse

    def whole_dims(self, dim: Any, axis: Any) -> Any:
        """Return the dims of a reduction. UsageError if the last one is among them."""
        dims = dim if axis is None else axis
        if dims is None or self.ndim - 1 in [each % self.ndim for each in _as_tuple(dims)]:
            self.refuse()
        return dims

    def sum(self, dim: Any = None, keepdims: bool = False, axis: Any = None) -> Tensor:
        return super().sum(self.whole_dims(dim, axis), keepdims)

    def max(self, dim: Any = None, keepdims: bool = False, axis: Any = None) -> Tensor:
        return super().max(self.whole_dims(dim, axis), keepdims)

    def __getitem__(self, index: Any) -> Tensor:
        entries = _as_tuple(index)
        reaches_columns = len(entries) >= self.ndim or any(entry is Ellipsis for entry in entries)
        if reaches_columns and not (isinstance(entries[-1], slice) and entries[-1] == slice(None)):
            self.refuse()
        return super().__getitem__(index)


def _as_tuple(value: Any) -> tuple[Any, ...]:
    """Return a tuple as it is, and another value as a tuple of one."""
    return value if isinstance(value, tuple) else (value,)
