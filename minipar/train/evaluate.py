"""The validation loss: the mean loss on a text that training never sees, the same in every layout.

Each sample is a batch of its own, so its loss has the same bits on whichever rank it is computed, and losses are added
in the order of the samples. Only tensor parallelism adds in another order, within its matrix products. The loss is
therefore rounded to DIGITS; two losses beside a rounding boundary can still differ, by one in the last digit.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from minipar.autograd import Tensor, no_grad
from minipar.backend import from_host, xp
from minipar.errors import UsageError
from minipar.train.config import TrainConfig
from minipar.train.data import Tokens, load_tokens
from minipar.train.trainer import Trainer

SAMPLES = 64  # at most, evenly spaced in the text
HELD_OUT = 10  # at most one token in HELD_OUT of the training text is kept back
DIGITS = {"bfloat16": 2, "float16": 2, "float32": 5, "float64": 10}  # significant ones


@dataclass(frozen=True)
class Evaluation:
    """The text to evaluate on, and its samples: position k of sample i is token starts[i] + k."""

    tokens: Tokens
    starts: np.ndarray  # (samples,)

    def loss(self, trainer: Trainer) -> float:
        """Return the mean loss in nats per token. Collective over the trainer's mesh.

        Sends what forward sends with B = 1, for each sample, and the losses (8 bytes per sample) over dp and pp.
        """
        dp, count, length = trainer.mesh.dp, len(self.starts), trainer.config.model.seq_len
        losses = np.zeros(-(-count // dp.size) * dp.size)
        with no_grad():  # outside of `dropping`, so dropout is off
            for sample in range(dp.rank, len(losses), dp.size):  # the same number on every rank: ZeRO 3 gathers
                start = self.starts[min(sample, count - 1)]
                window = self.tokens.read(slice(start, start + length + 1))
                inputs, targets = (trainer.context.part(tokens[None]) for tokens in (window[:-1], window[1:]))
                losses[sample] = _sample_loss(trainer, inputs, targets)
        for comm in (trainer.mesh.dp_cp, trainer.mesh.pp):
            comm.all_reduce(losses, algorithm="ordered")
        total = np.cumsum(losses[:count])[-1]  # adds from left to right; sum would add in pairs
        return float(f"{total / (count * length):.{DIGITS[trainer.config.run.dtype]}g}")


def _sample_loss(trainer: Trainer, inputs: np.ndarray, targets: np.ndarray) -> float:
    """Return the summed loss of one sample, (1, T) inputs and targets; 0 on a rank without the model's last stage."""
    model, pipeline = trainer.model, trainer.pipeline
    if pipeline is None:
        return model.loss_sum(from_host(inputs), from_host(targets)).item()
    comm, executor, home = pipeline.comm, trainer.executor, trainer.executor.schedule.home
    shape, last = (1, *executor.shape[1:]), len(home) - 1
    x: Any = from_host(inputs)
    for number, stage in sorted(pipeline.stages.items()):
        if number > 0 and home[number - 1] != comm.rank:
            x = Tensor(comm.irecv(xp.empty(shape, dtype=executor.dtype), home[number - 1], number).wait())
        for part in stage.parts:
            x = part.run(x)
        if number < last and home[number + 1] != comm.rank:
            comm.isend(xp.ascontiguousarray(x.data), home[number + 1], number + 1).wait()
    return model.criterion(x, from_host(targets)).item() if home[last] == comm.rank else 0.0


def hold_out(config: TrainConfig, tokens: Tokens) -> tuple[Tokens, Evaluation | None]:
    """Return the tokens to train on, and the evaluation, if any: on `--eval-data`, or on the end of the tokens."""
    length = config.model.seq_len
    if config.data.eval_every is None:
        return tokens, None
    if config.data.eval_data is not None:
        text = load_tokens(config.data.eval_data, vocab_size=tokens.vocab_size, seq_len=length, flag="--eval-data")
    else:
        kept = min(SAMPLES * length + 1, len(tokens.ids) // HELD_OUT)
        if kept < length + 1:
            less = f"is less than a sample, seq-len + 1 = {length + 1}; give --eval-data PATH"
            raise UsageError(f"--eval-every: a tenth of the {len(tokens.ids)} tokens of {tokens.name} {less}")
        text = replace(tokens, ids=tokens.ids[-kept:], name=f"the end of {tokens.name}")
        tokens = replace(tokens, ids=tokens.ids[:-kept])
    count = min(SAMPLES, (len(text.ids) - 1) // length)
    starts = np.linspace(0, len(text.ids) - 1 - length, count).astype(np.int64)
    text.check(starts[:, None] + np.arange(length + 1))
    return tokens, Evaluation(text, starts)
