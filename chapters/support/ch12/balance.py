"""Train a small Mixtral on one device with different options of its routers (section 12.7)."""

from chapters.support.training import make_trainer
from minipar.comm import serial

MODEL = "--model mixtral --layers 2 --hidden 32 --heads 4 --kv-heads 2 --ffn 32 --experts 8 --top-k 2 --seq-len 32"
RUN = "--global-batch 16 --lr 5e-3 --steps 200"


def train_balance(options: str, run: str = RUN) -> tuple[list[float], list[list[int]]]:
    """Train with these flags. Return the losses, and the rows of each of the last layer's experts, step by step."""
    trainer = make_trainer(serial(), f"{MODEL} {run} {options}")
    losses, loads = [], []
    for result in trainer.train():
        losses.append(result.loss)
        loads.append(trainer.moes[-1].load.tolist())
    return losses, loads
