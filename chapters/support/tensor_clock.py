"""A step of tensor parallelism on the model clock, for chapter 6: matrix products and messages cost time, nothing else.

A function in the place of `matmul` charges each product to the clock of the rank that runs in its thread.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any
from unittest.mock import patch

import numpy as np

from minipar.autograd import Tensor, linear
from minipar.backend import xp
from minipar.comm import Network, run_local
from minipar.nn import GPT, GPTConfig
from minipar.parallel.tensor import TensorGroup, layers, tensor_parallel

_simulated: ContextVar[Any] = ContextVar("simulated", default=None)  # the communicator of this thread's rank
_product = xp.matmul


def simulate(
    config: GPTConfig, ranks: int, speed: float, link: tuple[float, float], sequence: bool = False, overlap: bool = True
) -> list[tuple[float, list[dict[str, Any]]]]:
    """Run forward and backward of one sample on `ranks` threads. Return (seconds, trace events) of each rank.

    `speed` is in operations per second and `link` is (seconds per message, bytes per second). Without `overlap` a
    column layer is two operations, f and the product, so that its backward sends when it has computed everything.
    """
    network = Network(link[0], 1 / link[1])
    column = layers.column_linear if overlap else _plain_column_linear
    with patch.object(xp, "matmul", _charged_matmul), patch.object(layers, "column_linear", column):
        results: list[Any] = run_local(ranks, _one_step, config, speed, sequence, clock="model", network=network)
    return results


def _one_step(comm: Any, config: GPTConfig, speed: float, sequence: bool) -> tuple[float, list[dict[str, Any]]]:
    comm.clock.flops_per_second = speed
    model, ids = GPT(config), np.zeros((1, config.n_positions), int)
    tensor_parallel(model, comm, "ring", sequence)
    comm.tracer.enabled, comm.phase = True, "forward"
    _simulated.set(comm)
    loss = model.loss_sum(ids, ids)
    comm.phase = "backward"
    loss.backward(np.full_like(loss.data, 1))
    return comm.clock.now(), comm.tracer.chrome_events(comm.rank)


def _charged_matmul(a: Any, b: Any, **options: Any) -> Any:
    result, comm = _product(a, b, **options), _simulated.get()
    if comm is not None:
        is_weight = a.ndim == 2 and "out" in options  # LazyGradients of weights are written into a given place
        with comm.tracer.region("weight gradient" if is_weight else comm.phase, 2 * a.shape[-1] * result.size):
            pass
    return result


def _plain_column_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: TensorGroup, sequence: bool, transposed: bool = False
) -> Tensor:
    return linear(layers.enter(x, group, sequence), weight, bias, transposed)
