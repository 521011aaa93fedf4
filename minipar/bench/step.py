"""The wall time of a training step: next to PyTorch's, at each ZeRO stage, and with its synchronization.

    step      on one rank, a step of ours next to PyTorch's: the same GPT, weights and batch, on one thread
    zero      on several ranks, the ZeRO stages next to stage 0
    overlap   on several ranks, data parallelism next to the CPU time of its computation

The things compared alternate step by step, so that other load on the machine affects all of them. Times are medians.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from minipar.backend import Array, xp
from minipar.bench import add_model_flags, check_positive, largest, publish
from minipar.comm.communicator import Communicator
from minipar.comm.threads import serial
from minipar.errors import UsageError
from minipar.more.precision import MixedPrecisionAdamW, enable_two_bytes
from minipar.nn.gpt import GPT, GPTConfig
from minipar.parallel.ddp import DistributedDataParallel
from minipar.parallel.fsdp import FullyShardedDataParallel
from minipar.parallel.wrap import shard
from minipar.parallel.wrapper import DataParallel
from minipar.train.flags import DTYPES

WARMUP = 2
ZERO_STAGES = ((0, False), (1, False), (2, False), (3, True), (3, False))  # and whether stage 3 prefetches parameters


def add_step_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `bench step` and `bench zero`."""
    parser.add_argument("--hidden", nargs="+", default=["256", "512"], metavar="H", help="hidden sizes (256 512)")
    add_model_flags(parser, layers=4, heads=8, seq_len=128, vocab_size=256)
    parser.add_argument("--batch", type=int, default=8, help="samples per step and rank (8)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--repeat", type=int, default=11, help="steps measured (11)")


def add_overlap_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `bench overlap`."""
    add_model_flags(parser, layers=4, hidden=256, heads=8, seq_len=128)
    parser.add_argument("--batch", type=int, default=4, help="samples per rank (4)")
    parser.add_argument("--repeat", type=int, default=7, help="steps measured of each kind (7)")


def run_step(comm: Communicator, args: argparse.Namespace) -> None:
    """Measure a step next to PyTorch's (if torch is installed) and its matrix products; on several ranks as zero."""
    if comm.size > 1:
        run_zero(comm, args)
        return
    prepare(args.dtype)
    rows = [measure(config, args.batch, args.dtype, args.repeat) for config in configs(args)]
    publish(comm, rows, args.json, hidden=["dtype"])


def run_zero(comm: Communicator, args: argparse.Namespace) -> None:
    """Measure a data-parallel step at each ZeRO stage, next to stage 0."""
    prepare(args.dtype)
    rows = [row for config in configs(args) for row in measure_zero(comm, config, args.batch, args.dtype, args.repeat)]
    publish(comm, rows, args.json)


def prepare(dtype: str) -> None:
    """Let operations round, if the floats have 2 bytes."""
    if dtype.endswith("16"):
        enable_two_bytes()


def configs(args: argparse.Namespace) -> list[GPTConfig]:
    """Return the model of each hidden size. UsageError for flags that cannot be."""
    check_positive(args, "repeat", "batch")
    vocab_size = getattr(args, "vocab_size", 256)
    words = args.hidden if isinstance(args.hidden, list) else [str(args.hidden)]
    sizes = ",".join(words).split(",")  # 256 512, or 256,512
    if not all(size.isdecimal() for size in sizes):
        raise UsageError(f"--hidden {' '.join(words)}: expected whole numbers")
    try:
        return [GPTConfig(vocab_size, args.seq_len, int(size), args.layers, args.heads) for size in sizes]
    except ValueError as error:
        raise UsageError(str(error)) from None


def random_batch(config: GPTConfig, batch: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (tokens, targets), each (B, T)."""
    random = np.random.Generator(np.random.Philox(seed))
    tokens, targets = random.integers(0, config.vocab_size, (2, batch, config.n_positions))
    return tokens, targets


def training_step(wrapper: DataParallel, inputs: np.ndarray, targets: np.ndarray) -> Callable[[], float]:
    """Return a step of this project's model: each call trains on the batch and returns the loss."""
    optimizer = MixedPrecisionAdamW(wrapper.parameters())

    def step() -> float:
        optimizer.zero_grad()
        loss = wrapper.loss(inputs, targets)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def _sizes(config: GPTConfig, batch: int) -> dict[str, int]:
    """Return the columns that say what was trained."""
    sizes = {"layers": config.n_layer, "hidden": config.n_embd, "heads": config.n_head, "seq_len": config.n_positions}
    return sizes | {"batch": batch}


# ---- one rank, next to PyTorch ---------------------------------------------------------------------------------------


def measure(config: GPTConfig, batch: int, dtype: str, repeat: int) -> dict[str, Any]:
    """Measure a whole step: forward, backward, AdamW. torch_seconds is None where torch is not installed."""
    inputs, targets = random_batch(config, batch, seed=0)
    model = GPT(config, dtype=dtype)
    calls: dict[str, Callable[[], object]] = {"gemm_seconds": _matrix_products(config, batch, dtype)}
    theirs = torch_step(model, inputs, targets)
    if theirs is not None:
        calls["torch_seconds"] = theirs
    calls["seconds"] = training_step(DistributedDataParallel(model, serial()), inputs, targets)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(WARMUP + repeat):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    median = {name: float(np.median(seconds[WARMUP:])) for name, seconds in times.items()}
    torch_seconds = median.get("torch_seconds")
    return {
        **_sizes(config, batch),
        "dtype": dtype,
        "seconds": median["seconds"],
        "torch_seconds": torch_seconds,
        "ratio": median["seconds"] / torch_seconds if torch_seconds else None,
        "gemm_seconds": median["gemm_seconds"],
    }


def _matrix_products(config: GPTConfig, batch: int, dtype: str) -> Callable[[], object]:
    """Return a call that computes the large products of a step alone.

    They are forward, input gradient and weight gradient of every linear layer and of the head, and attention's two
    products with their four gradients.
    """
    n, h, t = batch * config.n_positions, config.n_embd, config.n_positions
    linear = [(n, h, 3 * h), (n, h, h), (n, h, 4 * h), (n, 4 * h, h)] * config.n_layer + [(n, h, config.vocab_size)]
    random = np.random.Generator(np.random.Philox(1))
    computed = "float32" if np.dtype(dtype).itemsize == 2 else dtype  # in which the step multiplies

    def normal(*shape: int) -> np.ndarray:
        return random.standard_normal(shape).astype(computed)

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
    """Return a step of the same model in PyTorch eager, from the same weights, with torch.optim.AdamW.

    None if torch is not installed.
    """
    try:
        import torch
    except ImportError:
        return None
    torch.set_num_threads(1)
    functional = torch.nn.functional
    config = model.config
    decayed: list[Any] = []
    plain: list[Any] = []
    state = {name: torch.tensor(x.astype("float64")) for name, x in model.state_dict().items()}
    p = {name: torch.nn.Parameter(x.to(getattr(torch, model.dtype))) for name, x in state.items()}
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


# ---- several ranks ---------------------------------------------------------------------------------------------------


def measure_zero(comm: Communicator, config: GPTConfig, batch: int, dtype: str, repeat: int) -> list[dict[str, Any]]:
    """Measure a step at each ZeRO stage. Collective; `batch` samples per rank.

    seconds: until the last rank is done; ratio: to stage 0.
    """
    inputs, targets = random_batch(config, batch, seed=comm.rank)

    def at_stage(stage: int, prefetch: bool) -> Callable[[], float]:
        model = GPT(config, dtype=dtype)
        wrapper: DataParallel = shard(model, comm, stage)
        if isinstance(wrapper, FullyShardedDataParallel):
            wrapper.prefetch = prefetch
        return training_step(wrapper, inputs, targets)

    steps = [at_stage(*stage) for stage in ZERO_STAGES]
    times = np.array([[_timed(comm, step)[0] for step in steps] for _ in range(WARMUP + repeat)])
    comm.all_reduce(times, op="max")
    seconds = np.median(times[WARMUP:], axis=0)
    return [
        {
            "zero_stage": stage,
            "prefetch": prefetch if stage == 3 else None,
            "ranks": comm.size,
            **_sizes(config, batch),
            "seconds": float(seconds[i]),
            "ratio": float(seconds[i] / seconds[0]),
        }
        for i, (stage, prefetch) in enumerate(ZERO_STAGES)
    ]


def run_overlap(comm: Communicator, args: argparse.Namespace) -> None:
    """Measure the wall time of a data-parallel step next to the CPU time of its computation.

    Publish a row for one all-reduce after backward ("naive") and one for buckets during backward.

    On a machine with c cores, N ranks that each compute for s CPU seconds need at least N s / c seconds. `ratio` is the
    wall time over that. A step without synchronization gives s; cpu_seconds is the sum of its medians over the ranks.
    """
    (config,) = configs(args)
    inputs, targets = random_batch(config, args.batch, seed=comm.rank)
    plain, ddp = GPT(config), DistributedDataParallel(GPT(config), comm)
    optimizers = {"plain": MixedPrecisionAdamW(plain.parameters()), "buckets": MixedPrecisionAdamW(ddp.parameters())}

    def step(sync: str) -> None:
        optimizer = optimizers.get(sync, optimizers["plain"])
        optimizer.zero_grad()
        if sync == "buckets":
            ddp.loss(inputs, targets).backward()
        else:
            (plain.loss(inputs, targets) / comm.size).backward()  # each rank has as many targets
            if sync == "naive":
                _all_reduce_gradients(plain, comm)
        optimizer.step()

    kinds = ("none", "naive", "buckets")
    times = np.array([[_timed(comm, step, kind) for kind in kinds] for _ in range(WARMUP + args.repeat)])
    wall, cpu = np.median(times[WARMUP:], axis=0).T  # (kinds,) each
    cpu_seconds = float(comm.all_reduce(np.array([cpu[0]]))[0])
    cores = min(len(os.sched_getaffinity(0)), comm.size)
    rows = []
    for sync, seconds in zip(kinds[1:], wall[1:], strict=True):
        slowest = largest(comm, seconds)
        row = {"sync": sync, "ranks": comm.size, "cores": cores, **_sizes(config, args.batch)}
        rows.append(
            row | {"wall_seconds": slowest, "cpu_seconds": cpu_seconds, "ratio": slowest / (cpu_seconds / cores)}
        )
    publish(comm, rows, args.json)


def _all_reduce_gradients(model: GPT, comm: Communicator) -> None:
    """Sum the whole gradient over the ranks in one all-reduce."""
    for p in model.parameters():
        p.fold_tied_gradients()
    gradients: list[Array] = [p.grad for p in model.parameters()]
    flat = comm.all_reduce(xp.concatenate([gradient.reshape(-1) for gradient in gradients]))
    for gradient, total in zip(gradients, xp.split(flat, np.cumsum([g.size for g in gradients])[:-1]), strict=True):
        gradient[...] = total.reshape(gradient.shape)


def _timed(comm: Communicator, call: Callable[..., object], *arguments: object) -> tuple[float, float]:
    """Return (wall seconds until every rank is done, this rank's CPU seconds)."""
    comm.barrier()
    start, cpu_start = time.perf_counter(), time.thread_time()
    call(*arguments)
    cpu = time.thread_time() - cpu_start
    comm.barrier()
    return time.perf_counter() - start, cpu
