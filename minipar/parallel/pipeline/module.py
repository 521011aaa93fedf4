"""A pipeline of stages that the user wrote, on the axes of a mesh."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext

import numpy as np

from minipar.autograd.tensor import Tensor, grad_enabled
from minipar.backend import Array, from_host, module_of, xp
from minipar.comm.communicator import Communicator
from minipar.comm.mesh import DeviceMesh
from minipar.errors import UsageError, check_divides
from minipar.nn.module import Module, Segment, array_of
from minipar.nn.parameter import Owner, Parameter, check_names, drawn_names
from minipar.parallel.pipeline.check import check
from minipar.parallel.pipeline.schedules import make
from minipar.parallel.pipeline.stage import Key, PipelineExecutor, PipelineStage
from minipar.parallel.placement import Replicate, Shard, attach_placements, placement_of, update
from minipar.parallel.split_guards import check_same_batch
from minipar.parallel.state import gather_state, local_part

HEADER = 8  # int64 values ahead of each activation: dtype, number of dims, dims
DTYPES = ("float32", "float64", "bfloat16", "float16")


class PipelineModule(Module, Owner):
    """The user's stages over mesh.pp; `model(x, y)` runs forward and backward of all microbatches.

    `stages` are callables, such as classes, that make a Module from the mesh, on the ranks that hold
    it. A stage's `forward` takes the result of the previous stage. The last stage defines
    `loss_sum(x, y)` instead. If there are more stages than the schedule has, consecutive stages
    share a rank. UsageError if they do not divide evenly.

    Every rank of a replica calls `model(x, y)` with the same batch, (B, ...) arrays, which is cut
    into microbatches along dim 0. The call returns the mean loss over the targets of all replicas,
    the same on every rank, and leaves this replica's share of that mean's gradient in the
    parameters; under `no_grad` it runs forward alone. ZeroOptimizer sums the shares over mesh.dp.

    Sends each activation, and its gradient back, once per microbatch and cut. A header of 64 bytes
    before each activation holds its shape. Two float64 values are all-reduced per step over dp, and
    one over pp.
    """

    def __init__(
        self,
        stages: Sequence[Callable[[DeviceMesh], Module]],
        mesh: DeviceMesh,
        num_microbatches: int,
        schedule: str = "1f1b",
    ) -> None:
        pp = mesh.pp
        virtual = max(1, len(stages) // pp.size) if schedule == "interleaved-1f1b" else None
        order = make(schedule, pp.size, num_microbatches, virtual)
        check(order)  # a script may have added the schedule
        if order.microbatches != num_microbatches:
            raise UsageError(
                f"schedule {schedule}: {order.microbatches} microbatches, not {num_microbatches}"
            )
        what = f"stages/(stages of {schedule} on pp = {pp.size})"
        check_divides(what, len(stages), order.stages, "each stage of the schedule has as many")
        per_stage = len(stages) // order.stages
        self.mesh = mesh
        self.num_microbatches = num_microbatches
        self.count = len(stages)
        segment_lists: dict[int, list[Segment]] = {}  # this rank's, by stage of the schedule
        for i, stage in enumerate(stages):
            s = i // per_stage
            if order.home[s] == pp.rank:
                module = stage(mesh)
                self.set_submodule(f"stage{i}", module)  # its parameters are named stage{i}.NAME
                segment = Segment(str(i), module, module.parameters())
                segment_lists.setdefault(s, []).append(segment)
        attach_placements(self)
        names = []
        for text in pp.all_gather_bytes(json.dumps(drawn_names(self.parameters())).encode()):
            names += json.loads(text)
        check_names(names)
        for segments in segment_lists.values():
            for segment in segments:
                for p in segment.parameters:
                    update(p, pp=pp.rank, unit=int(segment.name), units=len(stages))
                    if not isinstance(placement_of(p).tp, Shard):
                        update(p, tp=Replicate(mesh.tp.rank, mesh.tp.size))
                    p.owners.append(self)
        self._batch_checked = False
        if self.loss_module is not None:
            segment_lists[order.stages - 1].pop()  # its loss_sum is called instead of its forward
        held = {s: PipelineStage(own) for s, own in segment_lists.items()}
        self.executor = _HeadedExecutor(order, pp, held)
        self.evaluator = _HeadedExecutor(order.forwards(num_microbatches), pp, held)

    def check_optimizer(self, parameters: Sequence[Parameter]) -> None:
        """Raise ValueError for a plain optimizer: the replicas would drift apart."""
        if self.mesh.dp.size == 1:
            return
        raise ValueError(
            f"the gradients of a PipelineModule are not summed over its {self.mesh.dp.size} data-parallel "
            "replicas: write ZeroOptimizer(model.parameters(), AdamW, mesh.dp, ...) instead of "
            "AdamW(model.parameters(), ...)"
        )

    def check_sum(self, parameters: Sequence[Parameter], group: Communicator, is_complete: bool) -> None:
        """Raise UsageError if gradients would be summed over other ranks than those of mesh.dp."""
        if group.ranks != self.mesh.dp.ranks:
            raise UsageError(
                f"a PipelineModule summed over {group.axis}, ranks {group.ranks}: its replicas are those "
                f"of mesh.dp, ranks {self.mesh.dp.ranks}"
            )

    def state_dict(self) -> dict[str, np.ndarray]:
        """Collect the parameters of all stages, whole, on rank 0 of the mesh; the other ranks get {}.

        All ranks call it.
        """
        return gather_state(self, self.parameters(), self.mesh.world)

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Copy this rank's part of a whole `state`, in any layout, into its parameters.

        ValueError for a parameter of another shape, and KeyError for one that is missing.
        """
        for p in self.parameters():
            placement = placement_of(p)
            array = state[placement.name]
            if array.shape != placement.shape:
                raise ValueError(f"{placement.name} has shape {array.shape}, expected {placement.shape}")
            whole = from_host(np.ascontiguousarray(array, dtype=p.dtype))
            p.data[...] = local_part(placement.tp, whole, range(p.size)).reshape(p.shape)

    def _check_batch(self, x: Array, y: Array) -> None:
        """Raise UsageError, in the first call, if a replica's ranks were given different batches."""
        if self._batch_checked:
            return
        self._batch_checked = True
        for comm in (self.mesh.tp, self.mesh.pp):
            check_same_batch(comm, x=x, y=y)

    @property
    def loss_module(self) -> Module | None:
        """The last stage, on the ranks that hold it."""
        return dict(self.named_modules()).get(f"stage{self.count - 1}")

    def forward(self, x: Array, y: Array) -> Tensor:
        m = self.num_microbatches
        dp = self.mesh.dp
        x, y = array_of(x), array_of(y)
        self._check_batch(x, y)
        inputs = module_of(x).array_split(x, m)
        targets = module_of(y).array_split(y, m)
        scale = 0.0
        last_stage = self.loss_module
        if last_stage is not None:
            count = np.array([float(last_stage.target_count(y))])
            dp.all_reduce(count, algorithm="ordered")
            scale = 1 / max(1.0, count[0])

        def loss(i: int, stage_input: Array | Tensor) -> Tensor:
            assert last_stage is not None
            return last_stage.loss_sum(stage_input, targets[i])

        def microbatch(i: int) -> Array:
            return inputs[i]

        executor = self.executor if grad_enabled.get() else self.evaluator
        losses = executor.run(microbatch, loss, scale, around=nullcontext)
        loss_sum = np.array([sum(losses)])
        if last_stage is not None:
            dp.all_reduce(loss_sum, algorithm="ordered")
        mean = self.mesh.pp.all_reduce(loss_sum * scale, algorithm="ordered")
        return Tensor(mean[0])


class _HeadedExecutor(PipelineExecutor):
    """A PipelineExecutor that does not know the activations' shapes; a header announces each one."""

    def _send(self, key: Key, array: Array, peer: int, tag: int) -> None:
        _, direction, _ = key
        if direction == "F":
            header = np.zeros(HEADER, np.int64)
            header[: 2 + array.ndim] = [DTYPES.index(str(array.dtype)), array.ndim, *array.shape]
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
