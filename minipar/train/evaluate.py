"""The validation loss, which is the same in every layout."""

import numpy as np

from minipar.autograd import Tensor, no_grad, packed
from minipar.backend import Array, from_host, xp
from minipar.train.data import Evaluation, document_positions, targets_in_documents
from minipar.train.trainer import Trainer

DIGITS = {"bfloat16": 3, "float16": 4, "float32": 5, "float64": 10}  # significant ones of the loss


def validation_loss(trainer: Trainer, evaluation: Evaluation) -> float:
    """Return the mean loss in nats per token of the evaluation's samples, the same in every layout.

    All ranks call it. Each sample is a batch of its own, so its loss has the same bits on whichever rank
    it is computed, and losses are added in the order of the samples. Only tensor parallelism adds
    in another order, within its products of matrices. The loss is therefore rounded to DIGITS; two
    losses beside a rounding boundary can still differ, by one in the last digit. Sends what forward
    sends with B = 1, for each sample, and the losses (8 bytes per sample) over dp and pp.
    """
    dp = trainer.mesh.dp
    count = len(evaluation.starts)
    length = trainer.config.model.seq_len
    separator = trainer.config.data.pack
    rounds = -(-count // dp.size)
    losses = np.zeros(rounds * dp.size)
    with no_grad():  # outside of `dropping`, so dropout is off
        # Every rank computes the same number of samples, because ZeRO stage 3 gathers parameters in
        # each.
        for sample in range(dp.rank, len(losses), dp.size):
            start = evaluation.starts[min(sample, count - 1)]
            window = evaluation.tokens.read(start + np.arange(length + 1))
            inputs = window[None, :-1]  # (1, T)
            targets = targets_in_documents(inputs, window[None, 1:], separator)
            with packed(document_positions(inputs, separator)):
                part = trainer.context.part  # (1, T/c)
                losses[sample] = sample_loss(trainer, part(inputs), part(targets))
    trainer.mesh.dp_cp.all_reduce(losses, algorithm="ordered")
    trainer.mesh.pp.all_reduce(losses, algorithm="ordered")
    total = np.cumsum(losses[:count])[-1]  # adds from left to right; sum would add in pairs
    targets_of_all = count * length
    if separator is not None:
        windows = evaluation.starts[:, None] + np.arange(length)
        targets_of_all -= int((evaluation.tokens.read(windows) == separator).sum())
    return float(f"{total / max(1, targets_of_all):.{DIGITS[trainer.config.run.dtype]}g}")


def sample_loss(trainer: Trainer, inputs: np.ndarray, targets: np.ndarray) -> float:
    """Return the summed loss of one sample, (1, T) inputs and targets; 0 on a rank without the last stage."""
    if trainer.pipeline is None or trainer.executor is None:
        return trainer.model.loss_sum(from_host(inputs), from_host(targets)).item()
    comm = trainer.pipeline.comm
    executor = trainer.executor
    home = executor.schedule.home  # the rank of each stage
    last = len(home) - 1
    x: Tensor | Array = from_host(inputs)
    for number, stage in sorted(trainer.pipeline.stages.items()):
        if number > 0 and home[number - 1] != comm.rank:
            received = xp.empty((1, *executor.shape[1:]), dtype=executor.dtype)
            x = Tensor(comm.irecv(received, home[number - 1], number).wait())
        for segment in stage.segments:
            x = segment.run(x)
        if number < last and home[number + 1] != comm.rank:
            comm.isend(xp.ascontiguousarray(x.data), home[number + 1], number + 1).wait()
    if home[last] != comm.rank:
        return 0.0
    return trainer.model.criterion(x, from_host(targets)).item()
