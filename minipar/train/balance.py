"""The balance of experts: what makes the routers send about as many tokens to each expert."""

import numpy as np

from minipar.comm.mesh import DeviceMesh
from minipar.nn.moe import moe_layers
from minipar.nn.transformer import LanguageModel
from minipar.train.settings import ModelConfig


class RouterBalance:
    """The auxiliary loss, the routers' biases and the experts' capacity, in a model's layers of experts.

    loads           (L, E + 1) after a step: the assignments of the global batch to each expert of
                    each layer, and those that were dropped; empty if no flag needs them
    counts_loads    whether a flag needs them
    """

    def __init__(self, model: LanguageModel, flags: ModelConfig, mesh: DeviceMesh, tokens_per_step: int) -> None:
        self.moes = moe_layers(model)
        self.flags = flags
        self.mesh = mesh
        self.tokens_per_step = tokens_per_step
        self.counts_loads = flags.router_bias > 0 or flags.capacity_factor is not None
        self.loads: np.ndarray = np.zeros(0, np.int64)
        for moe in self.moes:
            moe.capacity_factor = flags.capacity_factor

    def start_step(self, loss_scale: float) -> None:
        """Forget the loads of the last step, and scale the auxiliary loss like the loss."""
        for moe in self.moes:
            moe.load[:] = 0
            moe.dropped = 0
            # Gradients of the router are summed over tp. The ranks of etp route the same tokens, so each
            # of them adds its share.
            count = len(self.moes) * self.tokens_per_step * self.mesh.etp.size
            moe.aux_loss = loss_scale * self.flags.aux_loss / count

    def finish_step(self) -> int | None:
        """Move each router's biases towards the mean load; return how much experts dropped.

        The result is None without `--capacity-factor`. Sends L (E + 1) integers over ep x edp and
        pp. The rule is algorithm 1 of arXiv 2408.15664.
        """
        if not self.counts_loads:
            return None
        counts = np.array([[*moe.load, moe.dropped] for moe in self.moes])  # (L, E + 1)
        self.mesh.ep_edp.all_reduce(counts, algorithm="ordered")  # ranks with other tokens
        self.mesh.pp.all_reduce(counts, algorithm="ordered")  # ranks with other layers
        self.loads = counts
        for moe, load in zip(self.moes, counts[:, :-1], strict=True):
            sign = np.sign(load.sum() - load.size * load)  # the sign of mean - load, in integers
            moe.bias += self.flags.router_bias * sign
        if self.flags.capacity_factor is None:
            return None
        return int(counts[:, -1].sum())
