"""A pipeline of stages that the user wrote, on the axes of a mesh."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

from minipar.autograd import Tensor
from minipar.backend import Array, from_host, xp
from minipar.comm.mesh import DeviceMesh
from minipar.errors import UsageError, check_divides
from minipar.nn.module import Module, Owner, Parameter, Part
from minipar.parallel.pipeline.schedules import make
from minipar.parallel.pipeline.stage import Key, PipelineExecutor, PipelineStage
from minipar.parallel.placement import Replicate, Shard, place, placement_of, update

HEADER = 8  # int64 values ahead of each activation: dtype, number of dims, dims
DTYPES = ("float32", "float64", "bfloat16", "float16")
Stage = Module | Callable[[DeviceMesh], Module]


class PipelineModule(Module, Owner):
    """The user's stages over mesh.pp; `model(x, y)` runs forward and backward of all microbatches.

    `stages` are Modules, or callables (such as classes) that make one from the mesh, on the ranks that hold it. A
    stage's `forward` takes the result of the previous stage. The last stage defines `loss_sum(x, y)` instead. If there
    are more stages than the schedule has, consecutive stages share a rank. UsageError if they do not divide evenly.

    Every rank of a replica calls `model(x, y)` with the same batch, (B, ...) arrays, which is cut into microbatches
    along dim 0. The call returns the mean loss over the targets of all replicas, the same on every rank, and leaves
    this replica's share of that mean's gradient in the parameters. ZeroOptimizer sums the shares over mesh.dp.

    Sends each activation, and its gradient back, once per microbatch and cut. A header of 64 bytes before each
    activation holds its shape. Three float64 values are all-reduced per step over dp, and one over pp.
    """

    def __init__(
        self, stages: Sequence[Stage], mesh: DeviceMesh, num_microbatches: int, schedule: str = "1f1b"
    ) -> None:
        pp = mesh.pp
        virtual = max(1, len(stages) // pp.size) if schedule == "interleaved-1f1b" else None
        order = make(schedule, pp.size, num_microbatches, virtual)
        what = f"stages/(stages of {schedule} on pp = {pp.size})"
        check_divides(what, len(stages), order.stages, "each stage of the schedule has as many")
        per_stage = len(stages) // order.stages
        self.mesh, self.num_microbatches, self.count = mesh, num_microbatches, len(stages)
        own = [s for s, rank in order.home.items() if rank == pp.rank]
        runs = {s: [self._part(stages[i], i) for i in range(s * per_stage, (s + 1) * per_stage)] for s in own}
        place(self)
        for p in self.parameters():
            update(p, pp=pp.rank)
            if not isinstance(placement_of(p).tp, Shard):
                update(p, tp=Replicate(mesh.tp.rank, mesh.tp.size))
            if mesh.dp.size > 1:
                p.owner = self
        if self.loss_module is not None:
            runs[order.stages - 1].pop()  # its loss_sum is called instead of its forward
        held = {s: PipelineStage(run) for s, run in runs.items()}
        self.executor = _HeadedExecutor(order, pp, held, shape=(), dtype=None)

    def _part(self, stage: Stage, i: int) -> Part:
        module = stage if isinstance(stage, Module) else stage(self.mesh)
        setattr(self, f"stage{i}", module)  # its parameters are named stage{i}.NAME
        return Part(str(i), module, module.parameters())

    def check(self, parameters: Sequence[Parameter]) -> None:
        """Raise ValueError for a plain optimizer: the replicas would drift apart."""
        why = f"the gradients of a PipelineModule are not summed over its {self.mesh.dp.size} data-parallel replicas"
        remedy = "ZeroOptimizer(model.parameters(), AdamW, mesh.dp, ...) instead of AdamW(model.parameters(), ...)"
        raise ValueError(f"{why}: write {remedy}")

    @property
    def loss_module(self) -> Module | None:
        """The last stage, on the ranks that hold it."""
        return getattr(self, f"stage{self.count - 1}", None)

    def forward(self, x: Array, y: Array) -> Tensor:
        m, dp = self.num_microbatches, self.mesh.dp
        if len(x) < m:
            raise UsageError(f"{len(x)} samples are fewer than {m} microbatches")
        inputs, targets = (np.array_split(array, m) for array in (x, y))
        totals = np.zeros(2)  # summed loss, count of targets
        scale = 0.0
        if self.loss_module is not None:
            totals[1] = self.loss_module.target_count(y)
            dp.all_reduce(totals, algorithm="ordered")
            scale = 1 / max(1.0, totals[1])

        def loss(i: int, stage_input: Any) -> Tensor:
            assert self.loss_module is not None
            value = self.loss_module.loss_sum(stage_input, from_host(targets[i]))
            totals[0] += value.item()
            return value

        self.executor.run(lambda i: from_host(inputs[i]), loss, scale, lambda action: nullcontext())
        mean = np.zeros(1)
        if self.loss_module is not None:
            mean[0] = float(dp.all_reduce(totals[:1].copy(), algorithm="ordered")[0]) * scale
        return Tensor(self.mesh.pp.all_reduce(mean, algorithm="ordered")[0])


class _HeadedExecutor(PipelineExecutor):
    """A PipelineExecutor that does not know the activations' shapes; a header announces each one."""

    def _send(self, key: Key, array: Array, peer: int, tag: int) -> None:
        if key[1] == "F":
            header = np.zeros(HEADER, np.int64)
            header[: 2 + array.ndim] = DTYPES.index(str(array.dtype)), array.ndim, *array.shape
            self._sent.append(self.comm.isend(header, peer, tag))
        super()._send(key, array, peer, tag)

    def _receive(self, key: Key, peer: int, tag: int) -> Callable[[], Any]:
        stage, direction, m = key
        if direction == "B":  # a gradient has its activation's shape and dtype
            _, activation = self.stages[stage].alive[m]
            return self.comm.irecv(xp.empty(activation.shape, dtype=activation.dtype), peer, tag).wait
        header = np.empty(HEADER, np.int64)
        message = self.comm.irecv(header, peer, tag)

        def announced() -> Any:
            message.wait()
            kind, ndim, *dims = header.tolist()
            return self.comm.irecv(xp.empty(dims[:ndim], dtype=DTYPES[kind]), peer, tag).wait()

        return announced
