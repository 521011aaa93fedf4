"""A small Mixtral that chapter 12 trains on one device with different options of its routers."""

from __future__ import annotations

from minipar.comm import DeviceMesh, serial
from minipar.train.config import parse, resolve
from minipar.train.data import load_tokens
from minipar.train.trainer import Trainer

MODEL = "--model mixtral --layers 2 --hidden 32 --heads 4 --kv-heads 2 --ffn 32 --experts 8 --top-k 2 --seq-len 32"
RUN = "--global-batch 16 --lr 5e-3 --steps 200"


def train_balance(options: str, run: str = RUN) -> tuple[list[float], list[list[int]]]:
    """Train with these flags. Return the losses, and the rows of each of the last layer's experts, step by step."""
    config = resolve(parse(f"{MODEL} {run} {options}".split()), 1)
    trainer = Trainer(config, DeviceMesh(serial()), load_tokens(None, vocab_size=256, seq_len=32))
    losses, loads = [], []
    for result in trainer.train():
        losses.append(result.loss)
        loads.append(trainer.moes[-1].load.tolist())
    return losses, loads
