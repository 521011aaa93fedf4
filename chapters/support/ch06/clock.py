"""Time the sums of a small tensor-parallel GPT on the model clock, where products cost nothing (section 6.6)."""

import numpy as np

from minipar.comm import Network, run_local
from minipar.comm.communicator import Communicator
from minipar.nn import GPT, GPTConfig
from minipar.parallel.tensor.plan import tensor_parallel

RANKS, WORDS, HEADS = 4, 48, 24


def seconds_on_the_clock(link: Network, layers: int, tokens: int, width: int) -> float:
    """Return the seconds that forward and backward of one sample take on 4 ranks, joined by `link`."""
    shape = GPTConfig(vocab_size=WORDS, n_positions=tokens, n_embd=width, n_layer=layers, n_head=HEADS)
    return max(run_local(RANKS, _forward_and_backward, shape, clock="model", network=link))


def _forward_and_backward(comm: Communicator, shape: GPTConfig) -> float:
    model, ids = GPT(shape), np.zeros((1, shape.n_positions), int)
    tensor_parallel(model, comm)
    loss = model.loss_sum(ids, ids)
    loss.backward(np.full_like(loss.data, 1))
    return comm.clock.now()
