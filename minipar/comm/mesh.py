"""DeviceMesh: the ranks as a grid, one axis per kind of parallelism."""

from itertools import product
from math import prod

from minipar.comm.communicator import Communicator
from minipar.errors import UsageError, check_divides


class DeviceMesh:
    """The ranks as a grid: world = pp x dp x cp x tp, rank = ((pp*DP + dp)*CP + cp)*TP + tp.

    tp is fastest because it communicates most and profits from near ranks. `mesh.dp`, `mesh.cp`,
    `mesh.tp` and `mesh.pp` are the Communicators of this rank's row along each axis, and
    `mesh.coordinates` are its coordinates. `mesh.dp_cp`, whose axis is named dp, has the ranks of
    both: they hold different tokens and the same parameters, so gradients are summed over it.
    dp=None takes what the others leave. UsageError for sizes that do not fit.

    The axis ep is folded from two others: dp x cp = edp x ep. `mesh.ep` are neighbours, which share
    each layer's experts; `mesh.edp` (axis dp) are the ranks that hold the same ones. NB: Megatron's
    order (tp-cp-ep-dp-pp) is the same.
    """

    AXES: tuple[str, ...] = ("tp", "cp", "dp", "pp")  # fastest first

    def __init__(
        self,
        comm: Communicator,
        dp: int | None = None,
        tp: int = 1,
        pp: int = 1,
        cp: int = 1,
        ep: int = 1,
    ) -> None:
        self.world = comm
        self.shape = mesh_shape(comm.size, comm.transport.launcher, dp, tp, pp, cp)
        self.coordinates: dict[str, int] = {}
        rest = comm.rank
        for axis in self.AXES:
            rest, self.coordinates[axis] = divmod(rest, self.shape[axis])
        self.tp, self.cp, self.dp, self.pp = map(self._along, ("tp", "cp", "dp", "pp"))
        self.dp_cp = self.dp if self.cp.size == 1 else self._along("dp", "cp")
        check_divides("dp*cp/ep", self.dp_cp.size, ep, "edp*ep are the ranks of dp*cp")
        self.ep, self.edp = self.dp_cp.split_into(self.dp_cp.size // ep, "ep")

    def rank_at(self, **coordinates: int) -> int:
        """Return the world rank at these coordinates.

        An axis that is not named keeps this rank's own.
        """
        point = self.coordinates | coordinates
        rank = 0
        for axis in reversed(self.AXES):
            rank = rank * self.shape[axis] + point[axis]
        return rank

    def _along(self, *axes: str) -> Communicator:
        """Make the Communicator of this rank's row along one axis, or its plane along several, the slowest first."""
        points = product(*(range(self.shape[axis]) for axis in axes))
        return self.world.new_group(
            [self.rank_at(**dict(zip(axes, point, strict=True))) for point in points], axes[0]
        )


def mesh_shape(ranks: int, launcher: str, dp: int | None, tp: int, pp: int, cp: int) -> dict[str, int]:
    """Return the size of each axis; dp=None takes what the others leave.

    UsageError if the sizes do not fit.
    """
    given = {} if dp is None else {"dp": dp}  # shown in errors
    for axis, size in (("cp", cp), ("tp", tp), ("pp", pp)):
        if size != 1:
            given[axis] = size
    needed = prod(given.values())
    if dp is None:
        dp = max(1, ranks // needed)
    if dp * cp * tp * pp != ranks:
        equation = f"{'*'.join(given)} = {'*'.join(map(str, given.values()))}"
        if len(given) > 1:
            equation += f" = {needed}"
        if ranks == 1:
            start = f"start {needed} with mpirun -n {needed} python ..."
            raise UsageError(f"{equation}, but this process is one rank; {start}")
        raise UsageError(f"{equation}, but {launcher} started {ranks} ranks")
    return {"tp": tp, "cp": cp, "dp": dp, "pp": pp}
