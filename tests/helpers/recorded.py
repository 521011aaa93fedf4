"""A small model, a text, and records of two steps of SGD, in which a test may plant a mistake."""

import re

import numpy as np

from minipar.compare.record import Record
from minipar.nn import GPT, GPTConfig
from minipar.train.data import Tokens

TEXT = Tokens(np.random.Generator(np.random.Philox(5)).integers(0, 64, 2000).astype(np.uint8), "random text")
MODEL = "--layers 4 --hidden 32 --heads 4 --seq-len 8 --vocab-size 64 --global-batch 8 --steps 3 --lr 1e-2"
SERIAL = GPT(GPTConfig(64, 8, 32, 4, 4), dtype="float64")
FACTS = {"dtype": "float64", "dp": 3, "cp": 5, "tp": 4, "pp": 2, "microbatches": 8, "tokens": 512}


def write(directory, change=lambda name, gradient: gradient, loss=5.0, norm=1.0, decay=0.0):
    """Record two steps of SGD, with gradients that `change` alters."""
    random = np.random.Generator(np.random.Philox(7))
    before = SERIAL.state_dict()
    written = Record(directory, before, **FACTS)
    for step in range(2):
        gradients = {name: random.standard_normal(values.shape) for name, values in before.items()}
        changed = {name: change(name, gradient.copy()) for name, gradient in gradients.items()}
        after = {name: values - 1e-2 * changed[name] - decay * values for name, values in before.items()}
        written.step(step, loss, norm, changed, after)
        before = after


def times(factor, pattern=""):
    """Return what multiplies the gradients of the parameters whose names match."""

    def change(name, gradient):
        return gradient * factor if re.search(pattern, name) else gradient

    return change
