"""The record of a training of minipar: every step, taken by hand so that gradients are seen before they are clipped."""

from minipar.compare.record import Record
from minipar.errors import UsageError
from minipar.train.trainer import StepResult, Trainer


class Recorder:
    """The record of each step of a trainer, for `minipar.compare`. All ranks call each method, and rank 0 writes."""

    def __init__(self, trainer: Trainer, directory: str) -> None:
        self.trainer = trainer
        args = trainer.args
        state = trainer.state_dict()
        self.record: Record | None = None  # on rank 0
        facts = {
            name: getattr(args, name) for name in ("dtype", "dp", "cp", "ep", "tp", "pp", "microbatches")
        }
        if state:
            try:
                self.record = Record(directory, state, tokens=trainer.tokens_per_step, **facts)
            except OSError as error:
                raise UsageError(f"--record: {error}") from None

    def step(self, step: int) -> StepResult:
        """Take a step, and write its loss, norm, gradients and updates."""
        trainer = self.trainer
        loss = trainer.gradient(step)
        gradients = trainer.state_dict(gradients=True)
        result = trainer.update(step, loss)
        state = trainer.state_dict()
        if self.record is not None:
            self.record.step(step, result.loss, result.grad_norm, gradients, state)
        return result
