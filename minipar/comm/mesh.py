"""DeviceMesh: the ranks as a grid, one axis per kind of parallelism."""

from __future__ import annotations

from minipar.comm.communicator import Communicator
from minipar.errors import UsageError


class DeviceMesh:
    """world = pp x dp x tp, rank = (pp*DP + dp)*TP + tp: tp fastest, because it talks most and wants the nearest ranks.

    `mesh.dp`, `mesh.tp`, `mesh.pp` are the Communicators of this rank's row along each axis; `mesh.coordinates` is its
    place. With dp=None the data axis takes what tp*pp leaves. Sizes that do not fit: UsageError with the product.
    NB: Megatron's order (tp-cp-ep-dp-pp) and PyTorch's DeviceMesh agree with this one on these three axes.
    """

    AXES = ("tp", "dp", "pp")  # fastest first

    def __init__(self, comm: Communicator, dp: int | None = None, tp: int = 1, pp: int = 1) -> None:
        ranks = f"{comm.transport.launcher} started {comm.size} ranks"
        for name, size in (("dp", dp), ("tp", tp), ("pp", pp)):
            if size is not None and size < 1:
                raise UsageError(f"{name} = {size}: a mesh axis has at least 1 rank")
        if dp is None:
            if comm.size % (tp * pp):
                raise UsageError(f"tp*pp = {tp}*{pp} = {tp * pp} does not divide the ranks: {ranks}")
            dp = comm.size // (tp * pp)
        if dp * tp * pp != comm.size:
            raise UsageError(f"dp*tp*pp = {dp}*{tp}*{pp} = {dp * tp * pp}, but {ranks}")
        self.world = comm
        self.shape = {"tp": tp, "dp": dp, "pp": pp}
        self.coordinates: dict[str, int] = {}
        rest = comm.rank
        for axis in self.AXES:
            rest, self.coordinates[axis] = divmod(rest, self.shape[axis])
        self.tp = self._along("tp")
        self.dp = self._along("dp")
        self.pp = self._along("pp")

    def rank_at(self, **coordinates: int) -> int:
        """The world rank at these coordinates; an axis that is not named keeps this rank's own."""
        place = self.coordinates | coordinates
        return (place["pp"] * self.shape["dp"] + place["dp"]) * self.shape["tp"] + place["tp"]

    def _along(self, axis: str) -> Communicator:
        return self.world.row([self.rank_at(**{axis: place}) for place in range(self.shape[axis])], axis)
