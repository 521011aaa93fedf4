"""DeviceMesh: the ranks as a grid, one axis per kind of parallelism."""

from math import prod

from minipar.comm.communicator import Communicator
from minipar.errors import UsageError


class DeviceMesh:
    """The ranks as a grid: world = pp x dp x tp, rank = (pp*DP + dp)*TP + tp.

    tp is fastest because it communicates most and profits from near ranks. `mesh.dp`, `mesh.tp` and `mesh.pp` are the
    Communicators of this rank's row along each axis, and `mesh.coordinates` is its place. With dp=None the data axis
    takes what tp*pp leaves. UsageError with the product for sizes that do not fit.
    NB: Megatron's order (tp-cp-ep-dp-pp) and PyTorch's DeviceMesh agree with this one on these three axes.
    """

    AXES: tuple[str, ...] = ("tp", "dp", "pp")  # fastest first

    def __init__(self, comm: Communicator, dp: int | None = None, tp: int = 1, pp: int = 1) -> None:
        self.world = comm
        self.shape = mesh_shape(comm.size, comm.transport.launcher, dp, tp, pp)
        self.coordinates: dict[str, int] = {}
        rest = comm.rank
        for axis in self.AXES:
            rest, self.coordinates[axis] = divmod(rest, self.shape[axis])
        self.tp = self._along("tp")
        self.dp = self._along("dp")
        self.pp = self._along("pp")

    def rank_at(self, **coordinates: int) -> int:
        """Return the world rank at these coordinates. An axis that is not named keeps this rank's own."""
        place = self.coordinates | coordinates
        return (place["pp"] * self.shape["dp"] + place["dp"]) * self.shape["tp"] + place["tp"]

    def _along(self, axis: str) -> Communicator:
        return self.world.row([self.rank_at(**{axis: place}) for place in range(self.shape[axis])], axis)


def mesh_shape(ranks: int, launcher: str, dp: int | None, tp: int, pp: int) -> dict[str, int]:
    """Return the size of each axis; dp=None takes what tp*pp leaves. UsageError if the sizes do not fit the ranks."""
    given = {} if dp is None else {"dp": dp}  # shown in errors
    given |= {axis: size for axis, size in (("tp", tp), ("pp", pp)) if size != 1}
    for axis, size in given.items():
        if size < 1:
            raise UsageError(f"{axis} = {size}: a mesh axis has at least 1 rank")
    product = prod(given.values())
    if ranks != product if dp is not None else ranks % product:
        equation = f"{'*'.join(given)} = {'*'.join(map(str, given.values()))}" + (f" = {product}" * (len(given) > 1))
        if ranks == 1:
            start = f"start {product} with mpirun -n {product} python ..."
            raise UsageError(f"{equation}, but this process is one rank; {start}")
        if dp is None and product < ranks:
            raise UsageError(f"{equation} does not divide the {ranks} ranks that {launcher} started")
        raise UsageError(f"{equation}, but {launcher} started {ranks} ranks")
    return {"tp": tp, "dp": dp or ranks // product, "pp": pp}
