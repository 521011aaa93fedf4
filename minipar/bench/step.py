"""The wall time of a training step: next to PyTorch's, at each ZeRO stage, and with its synchronization.

    step      in one process, a step of ours next to PyTorch's: the same GPT, weights and batch, on one thread
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

from minipar.bench import add_sizes, largest, publish
from minipar.comm.communicator import Communicator
from minipar.comm.threads import serial
from minipar.errors import UsageError
from minipar.more.context.blockwise import use_blockwise
from minipar.nn.gpt import GPT, GPTConfig
from minipar.nn.optim import AdamW
from minipar.parallel.ddp import DistributedDataParallel
from minipar.parallel.wrap import shard
from minipar.parallel.wrapper import DataParallel

WARMUP = 2
VOCABULARY = 256


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of these three benchmarks."""
    add_sizes(parser, layers=4, hidden=256, heads=8, seq_len=128, batch=8, repeat=11)


def model_of(args: argparse.Namespace) -> GPT:
    """Make the model of these flags, as minipar.train makes it. UsageError if it cannot be."""
    try:
        config = GPTConfig(VOCABULARY, args.seq_len, args.hidden, args.layers, args.heads)
    except ValueError as error:
        raise UsageError(str(error)) from None
    return use_blockwise(GPT(config))


def random_batch(args: argparse.Namespace, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (tokens, targets), each (B, T)."""
    random = np.random.Generator(np.random.Philox(seed))
    tokens, targets = random.integers(0, VOCABULARY, (2, args.batch, args.seq_len))
    return tokens, targets


def training_step(wrapper: DataParallel, inputs: np.ndarray, targets: np.ndarray) -> Callable[[], float]:
    """Return a step of this project's model: each call trains on the batch and returns the loss."""
    optimizer = AdamW(wrapper.parameters(), weight_decay=0.0)

    def step() -> float:
        optimizer.zero_grad()
        loss = wrapper.loss(inputs, targets)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def measure(comm: Communicator, steps: list[Callable[[], float]], repeat: int) -> np.ndarray:
    """Call the steps in turns. Return (wall seconds, this rank's CPU seconds) of each: medians over `repeat`.

    The wall time ends when every rank is done.
    """
    times = np.zeros((WARMUP + repeat, len(steps), 2))
    for row in times:
        for i, step in enumerate(steps):
            comm.barrier()
            start, cpu_start = time.perf_counter(), time.thread_time()
            step()
            cpu = time.thread_time() - cpu_start
            comm.barrier()
            row[i] = time.perf_counter() - start, cpu
    return np.asarray(np.median(times[WARMUP:], axis=0))


# ---- one process, next to PyTorch ------------------------------------------------------------------------------------


def run_step(comm: Communicator, args: argparse.Namespace) -> None:
    """Measure a whole step, forward, backward and AdamW, next to PyTorch's."""
    inputs, targets = random_batch(args, seed=0)
    model = model_of(args)
    theirs = torch_step(model, inputs, targets)
    ours = training_step(DistributedDataParallel(model, serial()), inputs, targets)
    seconds, torch_seconds = measure(comm, [ours, theirs], args.repeat)[:, 0].tolist()
    row = {"hidden": args.hidden, "seq_len": args.seq_len, "batch": args.batch}
    row |= {"seconds": seconds, "torch_seconds": torch_seconds, "ratio": seconds / torch_seconds}
    publish(comm, [row], args.json)


def torch_step(model: GPT, inputs: np.ndarray, targets: np.ndarray) -> Callable[[], float]:
    """Return a step of the same model in PyTorch eager, from the same weights, with torch.optim.AdamW.

    UsageError if torch is not installed.
    """
    try:
        import torch
    except ImportError:
        raise UsageError("bench step compares with PyTorch: pip install torch") from None
    torch.set_num_threads(1)
    functional = torch.nn.functional
    config = model.config
    p = {name: torch.nn.Parameter(torch.tensor(x)) for name, x in model.state_dict().items()}
    optimizer = torch.optim.AdamW(p.values(), weight_decay=0.0)
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


def run_zero(comm: Communicator, args: argparse.Namespace) -> None:
    """Measure a data-parallel step at each ZeRO stage, next to stage 0."""
    inputs, targets = random_batch(args, seed=comm.rank)
    wrappers = [shard(model_of(args), comm, stage) for stage in range(4)]
    steps = [training_step(wrapper, inputs, targets) for wrapper in wrappers]
    seconds = [largest(comm, wall) for wall in measure(comm, steps, args.repeat)[:, 0]]
    rows = []
    for stage in range(4):
        row = {"zero_stage": stage, "ranks": comm.size, "hidden": args.hidden, "batch": args.batch}
        rows.append(row | {"seconds": seconds[stage], "ratio": seconds[stage] / seconds[0]})
    publish(comm, rows, args.json)


def run_overlap(comm: Communicator, args: argparse.Namespace) -> None:
    """Measure the wall time of a data-parallel step next to the CPU time of its computation.

    On a machine with c cores, N ranks that each compute for s CPU seconds need at least N s / c seconds. `ratio` is the
    wall time over that. A step without synchronization gives s; cpu_seconds is the sum of its medians over the ranks.
    """
    inputs, targets = random_batch(args, seed=comm.rank)
    wrappers = [DistributedDataParallel(model_of(args), each) for each in (serial(), comm)]
    steps = [training_step(wrapper, inputs, targets) for wrapper in wrappers]
    (_, cpu), (wall, _) = measure(comm, steps, args.repeat)
    cpu_seconds = float(comm.all_reduce(np.array([cpu]))[0])
    wall_seconds = largest(comm, wall)
    cores = min(len(os.sched_getaffinity(0)), comm.size)
    row: dict[str, Any] = {"ranks": comm.size, "cores": cores, "hidden": args.hidden, "batch": args.batch}
    row |= {"wall_seconds": wall_seconds, "cpu_seconds": cpu_seconds, "ratio": wall_seconds * cores / cpu_seconds}
    publish(comm, [row], args.json)
