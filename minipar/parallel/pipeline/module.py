"""A pipeline of stages that the user wrote, on the axes of a mesh."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import TypeAlias

import numpy as np

from minipar.autograd.modes import grad_enabled
from minipar.autograd.tensor import Tensor
from minipar.backend import Array, from_host, xp
from minipar.comm.communicator import Communicator
from minipar.comm.mesh import DeviceMesh
from minipar.errors import UsageError, check_divides
from minipar.nn.module import Module, Segment
from minipar.nn.parameter import Owner, Parameter
from minipar.parallel.agreement import check_alike
from minipar.parallel.pipeline.schedules import make
from minipar.parallel.pipeline.stage import Key, PipelineExecutor, PipelineStage
from minipar.parallel.placement import Replicate, Shard, attach_placements, placement_of, update
from minipar.parallel.state import gather_state, local_part

HEADER = 8  # int64 values ahead of each activation: dtype, number of dims, dims
DTYPES = ("float32", "float64", "bfloat16", "float16")
Stage: TypeAlias = Module | Callable[[DeviceMesh], Module]


class PipelineModule(Module, Owner):
    """The user's stages over mesh.pp; `model(x, y)` runs forward and backward of all microbatches.

    `stages` are Modules, or callables (such as classes) that make one from the mesh, on the ranks
    that hold it. A stage's `forward` takes the result of the previous stage. The last stage defines
    `loss_sum(x, y)` instead. If there are more stages than the schedule has, consecutive stages
    share a rank. UsageError if they do not divide evenly, and for a batch of fewer samples than
    microbatches.

    Every rank of a replica calls `model(x, y)` with the same batch, (B, ...) arrays, which is cut
    into microbatches along dim 0. The call returns the mean loss over the targets of all replicas,
    the same on every rank, and leaves this replica's share of that mean's gradient in the
    parameters; under `no_grad` it runs forward alone. ZeroOptimizer sums the shares over mesh.dp.

    Sends each activation, and its gradient back, once per microbatch and cut. A header of 64 bytes
    before each activation holds its shape. Three float64 values are all-reduced per step over dp,
    and one over pp.
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
        self.mesh = mesh
        self.num_microbatches = num_microbatches
        self.count = len(stages)
        segments: dict[int, Segment] = {}  # this rank's of the user's stages, by number
        segment_lists: dict[int, list[Segment]] = {}  # the same by stage of the schedule
        for s, rank in order.home.items():
            if rank == pp.rank:
                segment_lists[s] = []
                for i in range(s * per_stage, (s + 1) * per_stage):
                    segments[i] = self._segment(stages[i], i)
                    segment_lists[s].append(segments[i])
        attach_placements(self)
        check_names_over(pp, self.parameters())
        for i, segment in segments.items():
            for p in segment.parameters:
                update(p, pp=pp.rank, unit=i, units=len(stages))
                if not isinstance(placement_of(p).tp, Shard):
                    update(p, tp=Replicate(mesh.tp.rank, mesh.tp.size))
                p.owners.append(self)
        self._batch_checked = False
        if self.loss_module is not None:
            segment_lists[order.stages - 1].pop()  # its loss_sum is called instead of its forward
        held = {s: PipelineStage(own) for s, own in segment_lists.items()}
        self.executor = _HeadedExecutor(order, pp, held, shape=(), dtype=None)

    def _segment(self, stage: Stage, i: int) -> Segment:
        module = stage if isinstance(stage, Module) else stage(self.mesh)
        self.set_submodule(f"stage{i}", module)  # its parameters are named stage{i}.NAME
        return Segment(str(i), module, module.parameters())

    def check_optimizer(self, parameters: Sequence[Parameter]) -> None:
        """Raise ValueError for a plain optimizer: the replicas would drift apart."""
        if self.mesh.dp.size == 1:
            return
        replicas = f"its {self.mesh.dp.size} data-parallel replicas"
        remedy = "ZeroOptimizer(model.parameters(), AdamW, mesh.dp, ...)"
        raise ValueError(
            f"the gradients of a PipelineModule are not summed over {replicas}: "
            f"write {remedy} instead of AdamW(model.parameters(), ...)"
        )

    def check_sum(self, parameters: Sequence[Parameter], group: Communicator, is_complete: bool) -> None:
        """Raise UsageError if gradients would be summed over other ranks than those of mesh.dp."""
        if group.ranks != self.mesh.dp.ranks:
            why = f"its replicas are those of mesh.dp, ranks {self.mesh.dp.ranks}"
            raise UsageError(f"a PipelineModule summed over {group.axis}, ranks {group.ranks}: {why}")

    def state_dict(self) -> dict[str, np.ndarray]:
        """Collect the parameters of all stages, whole, on rank 0 of the mesh; the other ranks get {}.

        All ranks call it.
        """
        return gather_state(self, self.parameters(), self.mesh.world)

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Copy this rank's part of a whole `state`, in any layout, into its parameters.

        Every rank gives all of it. UsageError, on every rank, with all differences of names and
        shapes that one rank sees; then nothing changes. All ranks call it.
        """
        differences = "; ".join(self._differences(state))
        for text in self.mesh.world.all_gather_bytes(differences.encode()):
            if text:
                raise UsageError(text.decode())
        for p in self.parameters():
            placement = placement_of(p)
            whole = from_host(np.ascontiguousarray(state[placement.name], dtype=p.dtype))
            p.data[...] = local_part(placement.tp, whole, range(p.size)).reshape(p.shape)

    def _differences(self, state: Mapping[str, np.ndarray]) -> list[str]:
        """Return what is missing, unexpected or of another shape in this rank's stages."""
        shapes = {placement_of(p).name: placement_of(p).shape for p in self.parameters()}
        own = {name.partition(".")[0] for name in shapes}
        others = {f"stage{i}" for i in range(self.count)} - own
        problems = [f"missing {name}" for name in shapes if name not in state]
        for name, array in state.items():
            if name in shapes and tuple(array.shape) != shapes[name]:
                problems.append(f"{name} has shape {tuple(array.shape)}, expected {shapes[name]}")
            elif name not in shapes and name.partition(".")[0] not in others:
                problems.append(f"unexpected {name}")
        return problems

    def _check_batch(self, x: Array, y: Array) -> None:
        """Raise UsageError, in the first call, if a replica's ranks were given different batches."""
        if not self._batch_checked:
            for comm in (self.mesh.tp, self.mesh.pp):
                replica = f"the ranks of {comm.axis} compute one replica together"
                check_alike(
                    comm,
                    [("x", np.asarray(x)), ("y", np.asarray(y))],
                    f"{replica}, but were given different batches",
                    "cut the global batch by mesh.dp.rank alone",
                )
            self._batch_checked = True

    @property
    def loss_module(self) -> Module | None:
        """The last stage, on the ranks that hold it."""
        return dict(self.named_modules()).get(f"stage{self.count - 1}")

    def forward(self, x: Array, y: Array) -> Tensor:
        m = self.num_microbatches
        dp = self.mesh.dp
        self._check_batch(x, y)
        if len(x) < m:
            raise UsageError(f"{len(x)} samples are fewer than {m} microbatches")
        inputs = np.array_split(x, m)
        targets = np.array_split(y, m)
        totals = np.zeros(2)  # summed loss, count of targets
        scale = 0.0
        last_stage = self.loss_module
        if last_stage is not None:
            totals[1] = last_stage.target_count(y)
            dp.all_reduce(totals, algorithm="ordered")
            scale = 1 / max(1.0, totals[1])

        def loss(i: int, stage_input: Array | Tensor) -> Tensor:
            assert last_stage is not None
            value = last_stage.loss_sum(stage_input, from_host(targets[i]))
            totals[0] += value.item()
            return value

        def microbatch(i: int) -> Array:
            return from_host(inputs[i])

        if grad_enabled.get():
            self.executor.run(microbatch, loss, scale, around=nullcontext)
        else:
            self.executor.run_forward(microbatch, loss)
        mean = np.zeros(1)
        if last_stage is not None:
            loss_sum = dp.all_reduce(totals[:1].copy(), algorithm="ordered")
            mean[0] = float(loss_sum[0]) * scale
        return Tensor(self.mesh.pp.all_reduce(mean, algorithm="ordered")[0])


def check_names_over(comm: Communicator, parameters: Sequence[Parameter]) -> None:
    """Raise UsageError, on every rank, if parameters on two ranks of a pipeline are drawn by one name.

    Sends the names as control data.
    """
    if comm.size == 1:
        return
    own = [p.drawn_by for p in parameters if p.drawn_by is not None]
    first: dict[tuple[int, str], int] = {}
    for rank, text in enumerate(comm.all_gather_bytes(json.dumps(own).encode())):
        for seed, name in json.loads(text):
            other = first.setdefault((seed, name), rank)
            if other != rank:
                where = f"on the pipeline's ranks {other} and {rank}"
                remedy = "give each layer a name of its own"
                raise UsageError(
                    f'two parameters {where} are drawn by the name "{name}" and seed {seed}, '
                    f"and so start from the same values: {remedy}"
                )


class _HeadedExecutor(PipelineExecutor):
    """A PipelineExecutor that does not know the activations' shapes; a header announces each one."""

    def _send(self, key: Key, array: Array, peer: int, tag: int) -> None:
        _, direction, _ = key
        if direction == "F":
            header = np.zeros(HEADER, np.int64)
            header[0] = DTYPES.index(str(array.dtype))
            header[1] = array.ndim
            header[2 : 2 + array.ndim] = array.shape
            self._sent.append(self.comm.isend(header, peer, tag))
        super()._send(key, array, peer, tag)

    def _receive(self, key: Key, peer: int, tag: int) -> Callable[[], Array]:
        stage, direction, m = key
        if direction == "B":  # a gradient has its activation's shape and dtype
            _, activation = self.stages[stage].alive[m]
            gradient = xp.empty(activation.shape, dtype=activation.dtype)
            return self.comm.irecv(gradient, peer, tag).wait
        header = np.empty(HEADER, np.int64)
        message = self.comm.irecv(header, peer, tag)

        def announced() -> Array:
            message.wait()
            kind, ndim, *dims = header.tolist()
            activation = xp.empty(dims[:ndim], dtype=DTYPES[kind])
            return self.comm.irecv(activation, peer, tag).wait()

        return announced
