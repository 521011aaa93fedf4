"""A training step of a pipeline: the schedule's actions on the step's microbatches."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import numpy as np

from minipar.autograd import Tensor
from minipar.backend import from_host
from minipar.errors import UsageError
from minipar.memory import enter
from minipar.nn.layers import DropoutKeys, dropping
from minipar.parallel.pipeline import PipelineExecutor, Schedule, check, load_csv, make
from minipar.parallel.pipeline.actions import Action
from minipar.parallel.pipeline.stage import PipelineParallel
from minipar.parallel.wrapper import Wrapper
from minipar.train.config import TrainConfig
from minipar.train.data import Batches


def schedule_of(config: TrainConfig) -> Schedule:
    """Return the schedule that `--schedule` names, checked, for the mesh and the number of microbatches. UsageError."""
    name, pp, microbatches = config.mesh.schedule or "1f1b", config.mesh.pp, config.data.microbatches
    if not name.endswith(".csv"):
        schedule = make(name, pp, microbatches, config.mesh.virtual_stages)
    else:
        schedule = load_csv(name)
        if config.mesh.virtual_stages is not None:
            raise UsageError(f"--virtual-stages is for a named schedule; {name} says which rank has which stages")
        if (len(schedule.ranks), schedule.microbatches) != (pp, microbatches):
            raise UsageError(
                f"schedule {name} is for {len(schedule.ranks)} ranks and {schedule.microbatches} microbatches, but "
                f"pp = {pp} and microbatches = {microbatches}"
            )
    check(schedule)
    return schedule


class PipelinedStep:
    """A runner of the schedule for one replica.

    Gradients accumulate in `ddp`'s buffers. The reduction of its buckets starts in the backward of the last microbatch,
    while the pipeline cools down.
    """

    def __init__(
        self, config: TrainConfig, schedule: Schedule, pipeline: PipelineParallel, ddp: Wrapper, shape: tuple[int, ...]
    ) -> None:
        self.pipeline, self.ddp, self.dtype = pipeline, ddp, np.dtype(config.run.dtype)
        self.seed, self.last = config.run.seed, config.data.microbatches - 1
        self.executor = PipelineExecutor(schedule, pipeline.comm, pipeline.stages, shape, self.dtype)

    def run(self, step: int, samples: Sequence[range], data: Batches, scale: float) -> float:
        """Run forward and backward of all microbatches of `scale` * loss, and return the replica's summed loss.

        samples[m] are those of microbatch m. Sends over pp B T h elements per microbatch, cut and direction, V h for
        the gradient of the embedding, and one float64.
        """
        pipeline = self.pipeline
        losses = np.zeros(1)
        # All batches are read before the first action; between two actions, the other ranks would wait for it.
        is_end = pipeline.comm.rank in (pipeline.first, pipeline.last)
        batches = [tuple(map(from_host, data.batch(step, each))) for each in samples] if is_end else []

        def loss(m: int, logits: Tensor) -> Tensor:
            value = pipeline.model.criterion(logits, batches[m][1])
            losses[0] += value.item()
            return value

        @contextmanager
        def around(action: Action) -> Iterator[None]:
            enter("forward" if action.kind == "F" else "backward")
            keys = dropping(DropoutKeys(self.seed, step, samples[action.microbatch]))
            sync = nullcontext() if action.microbatch == self.last else self.ddp.no_sync()
            with keys, sync, self.ddp.scaled_backward(), pipeline.comm.tracer.region(str(action)):
                yield

        self.executor.run(lambda m: batches[m][0], loss, scale, around)
        pipeline.fetch_tied_gradient()
        self.ddp.synchronize()
        pipeline.comm.all_reduce(losses, algorithm="ordered")  # zero on all stages but the last
        return float(losses[0])
