"""A training step beside PyTorch's, on one thread: the same GPT, the same weights, the same batch, in one run. On
several ranks: the ZeRO stages beside one another (stages.py).

They take turns, step by step, so that whatever else the machine does happens to all; times are medians.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from minipar.bench import stages
from minipar.bench.report import publish
from minipar.comm import Communicator, serial
from minipar.errors import UsageError
from minipar.nn import GPT, AdamW, GPTConfig
from minipar.parallel import DistributedDataParallel

HELP = (
    "on one rank: a training step beside PyTorch's (where torch is installed), and its matrix products alone; on "
    "several: the ZeRO stages beside one another"
)
COLUMNS = ("layers", "hidden", "heads", "seq_len", "batch", "seconds", "torch_seconds", "ratio", "gemm_seconds")
WARMUP = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `bench step`."""
    parser.add_argument("--json", metavar="FILE", help="write the rows as JSON (- for standard output)")
    parser.add_argument("--layers", type=int, default=4, help="Transformer layers (4)")
    parser.add_argument("--hidden", default="256,512", help="hidden sizes, one row each")
    parser.add_argument("--heads", type=int, default=8, help="attention heads (8)")
    parser.add_argument("--seq-len", type=int, default=128, help="tokens per sample (128)")
    parser.add_argument("--batch", type=int, default=8, help="samples per step and rank (8)")
    parser.add_argument("--vocab-size", type=int, default=256, help="tokens that exist (256)")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    parser.add_argument("--repeat", type=int, default=11, help="steps measured")


def run(comm: Communicator, args: argparse.Namespace) -> None:
    """One row for each hidden size; on several ranks one for each hidden size and ZeRO stage."""
    if args.repeat < 1 or args.batch < 1:
        raise UsageError(f"--repeat {args.repeat} --batch {args.batch}: expected at least 1 of each")
    configs = []
    for text in args.hidden.split(","):
        if not text.isdigit():
            raise UsageError(f"--hidden {args.hidden}: expected sizes separated by commas")
        try:
            configs.append(GPTConfig(args.vocab_size, args.seq_len, int(text), args.layers, args.heads))
        except ValueError as error:
            raise UsageError(str(error)) from None
    if comm.size > 1:
        publish(
            comm, [row for config in configs for row in stages.measure(comm, config, args)], stages.COLUMNS, args.json
        )
    else:
        publish(comm, [measure(config, args.batch, args.dtype, args.repeat) for config in configs], COLUMNS, args.json)


def measure(config: GPTConfig, batch: int, dtype: str, repeat: int) -> dict[str, Any]:
    """Times of a whole step: forward, backward, AdamW. torch_seconds is None where torch is not installed."""
    random = np.random.Generator(np.random.Philox(0))
    inputs, targets = random.integers(0, config.vocab_size, (2, batch, config.n_positions))
    model = GPT(config, dtype=dtype)
    calls: dict[str, Callable[[], object]] = {"gemm_seconds": _matrix_products(config, batch, dtype)}
    theirs = torch_step(model, inputs, targets)
    if theirs is not None:
        calls["torch_seconds"] = theirs
    calls["seconds"] = our_step(model, inputs, targets)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(WARMUP + repeat):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if i >= WARMUP:
                times[name].append(time.perf_counter() - start)
    median = {name: float(np.median(values)) for name, values in times.items()}
    torch_seconds = median.get("torch_seconds")
    return {
        "layers": config.n_layer,
        "hidden": config.n_embd,
        "heads": config.n_head,
        "seq_len": config.n_positions,
        "batch": batch,
        "dtype": dtype,
        "seconds": median["seconds"],
        "torch_seconds": torch_seconds,
        "ratio": median["seconds"] / torch_seconds if torch_seconds else None,
        "gemm_seconds": median["gemm_seconds"],
    }


def our_step(model: GPT, inputs: np.ndarray, targets: np.ndarray) -> Callable[[], float]:
    """A step of this project's model; each call trains on and returns the loss."""
    ddp = DistributedDataParallel(model, serial())  # flat buffers, as in every training run
    optimizer = AdamW(model.parameters())

    def step() -> float:
        model.zero_grad()
        loss = model.loss(inputs, targets)
        loss.backward()
        ddp.synchronize()
        optimizer.step()
        return loss.item()

    return step


def _matrix_products(config: GPTConfig, batch: int, dtype: str) -> Callable[[], object]:
    """The step's large products and nothing else: forward, input gradient and weight gradient of every linear layer,
    the head, and attention's two products with their four gradients."""
    n, h, t = batch * config.n_positions, config.n_embd, config.n_positions
    linear = [(n, h, 3 * h), (n, h, h), (n, h, 4 * h), (n, 4 * h, h)] * config.n_layer + [(n, h, config.vocab_size)]
    random = np.random.Generator(np.random.Philox(1))

    def normal(*shape: int) -> np.ndarray:
        return random.standard_normal(shape).astype(dtype)

    operands = {
        shape: (normal(shape[0], shape[1]), normal(shape[1], shape[2]), normal(shape[0], shape[2])) for shape in linear
    }
    d = h // config.n_head
    q, k, p = normal(batch, config.n_head, t, d), normal(batch, config.n_head, d, t), normal(batch, config.n_head, t, t)

    def products() -> None:
        for shape in linear:
            x, w, y = operands[shape]
            np.matmul(x, w)
            np.matmul(y, w.T)
            np.matmul(x.T, y)
        for _ in range(config.n_layer):
            for _ in range(2):
                np.matmul(q, k)  # scores; gradient of the probabilities
            for _ in range(4):
                np.matmul(p, q)  # output; gradients of q, k and v

    return products


def torch_step(model: GPT, inputs: np.ndarray, targets: np.ndarray) -> Callable[[], float] | None:
    """The same model in PyTorch eager, from the same weights, with torch.optim.AdamW; None without torch."""
    try:
        import torch
    except ImportError:
        return None
    torch.set_num_threads(1)
    functional = torch.nn.functional
    config = model.config
    decayed: list[Any] = []
    plain: list[Any] = []
    p = {name: torch.nn.Parameter(torch.from_numpy(x)) for name, x in model.state_dict().items()}
    for parameter in p.values():
        (decayed if parameter.ndim >= 2 else plain).append(parameter)
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}])
    tokens, labels = torch.from_numpy(inputs), torch.from_numpy(targets)
    batch, length, h = *inputs.shape, config.n_embd

    def norm(name: str, x: Any) -> Any:
        return functional.layer_norm(x, (h,), p[f"{name}.weight"], p[f"{name}.bias"], config.layer_norm_epsilon)

    def linear(name: str, x: Any) -> Any:
        return torch.addmm(p[f"{name}.bias"], x.reshape(-1, x.shape[-1]), p[f"{name}.weight"]).view(batch, length, -1)

    def attention(name: str, x: Any) -> Any:
        qkv = linear(f"{name}.c_attn", x).view(batch, length, 3, config.n_head, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind()
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return linear(f"{name}.c_proj", out.transpose(1, 2).reshape(batch, length, h))

    def step() -> float:
        optimizer.zero_grad()
        x = p["wte.weight"][tokens] + p["wpe.weight"]
        for i in range(config.n_layer):
            x = x + attention(f"h.{i}.attn", norm(f"h.{i}.ln_1", x))
            inner = functional.gelu(linear(f"h.{i}.mlp.c_fc", norm(f"h.{i}.ln_2", x)), approximate="tanh")
            x = x + linear(f"h.{i}.mlp.c_proj", inner)
        logits = norm("ln_f", x) @ p["wte.weight"].T
        loss = functional.cross_entropy(logits.view(-1, config.vocab_size), labels.view(-1))
        loss.backward()
        optimizer.step()
        return loss.item()

    return step
