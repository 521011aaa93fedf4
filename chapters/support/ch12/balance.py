"""Train a small Mixtral on one device with different remedies for its routers (section 12.7)."""

import numpy as np

from chapters.support.training import parsed, text_for, trainer_for
from minipar.autograd import Tensor
from minipar.comm import serial
from minipar.more.experts.mixtral import MoE, moe_layers

MODEL = "--model mixtral --layers 2 --hidden 32 --heads 4 --seq-len 32"
RUN = "--global-batch 16 --lr 5e-3 --steps 200"
SHAPE = {"num_key_value_heads": 2, "intermediate_size": 32, "num_local_experts": 8, "num_experts_per_tok": 2}


class Router:
    """The router of a layer of experts, with a bias for each expert, which moves by `rate` after each step."""

    def __init__(self, moe: MoE, rate: float) -> None:
        self.moe = moe
        self.rate = rate
        self.bias = np.zeros(len(moe.experts))
        self.load = np.zeros(len(moe.experts), int)  # rows of each expert in this step
        self.plain = moe.route
        moe.route = self.route  # type: ignore[method-assign]

    def route(self, x: Tensor, samples: int = 1) -> tuple[np.ndarray, Tensor]:
        """Return each token's experts and their weights, (N, k) each, and count the rows."""
        chosen, weights = self.plain(x, samples) if self.rate == 0 else self.route_with_bias(x)
        self.load += np.bincount(chosen.reshape(-1), minlength=len(self.load))
        return chosen, weights

    def route_with_bias(self, x: Tensor) -> tuple[np.ndarray, Tensor]:
        """Return the same, with the biases where experts are chosen, and only there."""
        logits = self.moe.gate(x)  # (N, E)
        powers = (logits - logits.data.max(axis=-1, keepdims=True)).exp()
        p = powers / powers.sum(-1, keepdims=True)
        chosen = np.argsort(-(p.data + self.bias), axis=-1, kind="stable")[:, : self.moe.top_k]  # (N, k)
        weights = p[np.arange(len(chosen))[:, None], chosen]
        return chosen, weights / weights.sum(-1, keepdims=True)

    def finish_step(self) -> list[int]:
        """Move the biases towards the mean load; return the rows of each expert in the step."""
        load = self.load.tolist()
        self.bias += self.rate * np.sign(self.load.mean() - self.load)
        self.load[:] = 0
        return load


def train_balance(aux_loss: float, bias_rate: float, run: str = RUN) -> tuple[list[float], list[list[int]]]:
    """Train with this coefficient of the auxiliary loss and this rate of the biases, 0 for none.

    Return the losses, and the rows of each of the last layer's experts, step by step.
    """
    balance = {"output_router_logits": aux_loss > 0, "router_aux_loss_coef": aux_loss}
    args = parsed(f"{MODEL} {run}", **SHAPE, **balance)
    trainer = trainer_for(serial(), args, text_for(args))
    routers = [Router(moe, bias_rate) for moe in moe_layers(trainer.model)]
    losses, loads = [], []
    for result in trainer.train():
        losses.append(result.loss)
        loads.append([router.finish_step() for router in routers][-1])
    return losses, loads
