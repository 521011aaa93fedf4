"""The recording of `--record`: callbacks that the command line gives to the trainer."""

import numpy as np

from minipar.cli import writing
from minipar.record import Record
from minipar.train.trainer import StepResult, Trainer


class Recorder:
    """The record of every further step of a trainer, for `minipar.compare`.

    All ranks call each method. Rank 0 is sent all gradients and parameters, and writes.
    """

    def __init__(self, trainer: Trainer, directory: str) -> None:
        self.trainer = trainer
        self.gradients: dict[str, np.ndarray] = {}  # the last step's, before clipping
        self.record: Record | None = None  # on rank 0
        config = trainer.config
        parameters = trainer.state_dict()
        if trainer.mesh.world.rank == 0:
            facts: dict[str, object] = {axis: getattr(config.mesh, axis) for axis in ("dp", "cp", "ep", "tp", "pp")}
            facts["microbatches"] = config.data.microbatches
            facts["tokens"] = trainer.tokens_per_step
            with writing(f"--record {directory}"):
                self.record = Record(directory, parameters, dtype=config.run.dtype, **facts)
        trainer.gradient_callbacks.append(self.collect_gradients)
        trainer.step_callbacks.append(self.write)

    def stop(self) -> None:
        """Record no further steps."""
        self.trainer.gradient_callbacks.remove(self.collect_gradients)
        self.trainer.step_callbacks.remove(self.write)

    def collect_gradients(self) -> None:
        """Collect the gradients of the step before they are clipped."""
        self.gradients = self.trainer.state_dict(gradients=True)

    def write(self, result: StepResult) -> None:
        """Write the step's loss, norm, gradients and updates."""
        parameters = self.trainer.state_dict()
        if self.record is None:
            return
        directory = self.record.directory
        with writing(f"--record {directory}", directory / f"step-{result.step}.npz"):
            self.record.step(result.step, result.loss, result.grad_norm, self.gradients, parameters)
