"""Eighteen layouts of one small Llama from one set of weights: the losses of 100 steps, in three precisions.

    python -m chapters.support.ch14.layouts OUT.json --lr 3e-3

trains them on threads in every precision, about ten minutes on two cores, and writes every loss, and how far the
gradient is from that of one device at a few steps. The first thirteen layouts are in the tables of torchtitan's issue
3029. The files losses-*.json beside this one are what it wrote, one for each learning rate.
"""

from __future__ import annotations

import argparse
import json
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from chapters.support.training import parsed, trainer_for
from minipar.bench.layouts import ranks_of
from minipar.comm import Communicator, run_local
from minipar.train.data import Tokens

RATES = ("3e-3", "1e-2")
DTYPES = ("float64", "float32", "bfloat16")
STEPS = 100
LOOKED_AT = (1, 2, 5, 10, 20, 50, 100)  # steps, counted from 1, whose gradients are compared
BATCH = 8  # samples of a step
MODEL = "--model llama --layers 8 --hidden 32 --heads 4 --seq-len 16 --vocab-size 256 --order sequential"
FFN = 64  # inner size of an MLP
FSDP = "--dp 2 --zero-stage 3"
LAYOUTS = {
    "single": "",
    "fsdp2": FSDP,
    "pp2": "--pp 2",
    "cp2": "--cp 2",
    "tp2": "--tp 2",
    "fsdp2 tp2 pp2": f"{FSDP} --tp 2 --pp 2",
    "fsdp2 tp2 cp2": f"{FSDP} --tp 2 --cp 2",
    "tp2 pp2 cp2": "--tp 2 --pp 2 --cp 2",
    "fsdp2 pp2 cp2": f"{FSDP} --pp 2 --cp 2",
    "pp4": "--pp 4",
    "pp8": "--pp 8",
    "tp4": "--tp 4",
    "cp4": "--cp 4",
    "ddp2": "--dp 2",
    "zero4": "--dp 4 --zero-stage 1",
    "fsdp8": "--dp 8 --zero-stage 3",
    "tp2 sp": "--tp 2 --sequence-parallel",
    "ulysses2": "--cp 2 --context-parallel ulysses",
}


@cache
def text() -> Tokens:
    """Return 512 tokens and the first again: four batches, which the steps repeat and the model learns by heart."""
    random = np.random.Generator(np.random.Philox(14))
    ids = random.integers(0, 256, 512)
    return Tokens(np.append(ids, ids[0]).astype(np.uint8), "a text")


@dataclass(frozen=True)
class Run:
    """The losses of a run, and the gradient of all parameters, (Psi,), at the steps of LOOKED_AT that it took."""

    losses: list[float]
    gradients: list[np.ndarray]


def args_of(layout: str, dtype: str, lr: str, steps: int = STEPS) -> Namespace:
    """Return the flags of a layout, read; a pipeline has a microbatch for each of its ranks."""
    words = LAYOUTS[layout].split()
    microbatches = words[words.index("--pp") + 1] if "--pp" in words else "1"
    flags = f"{MODEL} {LAYOUTS[layout]} --global-batch {BATCH} --microbatches {microbatches} --lr {lr}"
    return parsed(f"{flags} --dtype {dtype} --steps {steps}", ranks_of(words), intermediate_size=FFN)


def train(comm: Communicator, args: Namespace) -> Run:
    """Train on one rank. The gradients are there on rank 0 only."""
    trainer = trainer_for(comm, args, text())
    found = Run([], [])
    for step in range(args.steps):
        loss = trainer.gradient(step)
        if step + 1 in LOOKED_AT:
            gradient = trainer.state_dict(gradients=True)
            if gradient:
                found.gradients.append(np.concatenate([each.astype(float).reshape(-1) for each in gradient.values()]))
        trainer.update(step, loss)
        found.losses.append(loss)
    return found


def run(layout: str, dtype: str, lr: str, steps: int = STEPS) -> Run:
    """Train a layout on threads."""
    first: Run = run_local(ranks_of(LAYOUTS[layout].split()), train, args_of(layout, dtype, lr, steps))[0]
    return first


def relative_difference(gradient: np.ndarray, reference: np.ndarray) -> float:
    """Return the norm of the difference, as a part of the reference's norm."""
    return float(np.linalg.norm(gradient - reference) / np.linalg.norm(reference))


def spread(found: Mapping[str, Mapping[str, Sequence[float]]]) -> np.ndarray:
    """Return the largest relative difference of each step's loss to that of one device, over the layouts."""
    single = np.array(found["single"]["losses"])
    return np.max([np.abs(np.array(run["losses"]) / single - 1) for run in found.values()], axis=0)


def gradient_range(found: Mapping[str, Mapping[str, Sequence[float]]]) -> np.ndarray:
    """Return the smallest and the largest relative difference of the gradient that is not zero: (2, steps)."""
    values = np.array([run["gradients"] for name, run in found.items() if name != "single"])  # (layouts, steps)
    values[values == 0] = np.nan
    return np.array([np.nanmin(values, axis=0), np.nanmax(values, axis=0)])


def main() -> None:
    """Train every layout in every precision, and write what was found after each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", metavar="OUT.json")
    parser.add_argument("--lr", default=RATES[0])
    options = parser.parse_args()
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    for dtype in DTYPES:
        found[dtype] = {}
        for layout in LAYOUTS:
            start = time.perf_counter()
            each = run(layout, dtype, options.lr)
            if layout == "single":
                single = each
            differences = [
                relative_difference(gradient, reference)
                for gradient, reference in zip(each.gradients, single.gradients, strict=True)
            ]
            found[dtype][layout] = {"losses": each.losses, "gradients": differences}
            Path(options.out).write_text(json.dumps(found), encoding="utf-8")
            few = " ".join(f"{each.losses[step - 1]:.6f}" for step in (1, 50, 100))
            print(f"{dtype} {layout:<14} {few}  {time.perf_counter() - start:.0f} s", flush=True)


def recorded(lr: str) -> dict[str, dict[str, dict[str, list[float]]]]:
    """Read what `main` wrote: by precision and layout, the `losses` and the `gradients`' relative differences."""
    found: dict[str, dict[str, dict[str, list[float]]]] = json.loads(file_of(lr).read_text(encoding="utf-8"))
    return found


def file_of(lr: str) -> Path:
    """Return the path of the record of a learning rate."""
    return Path(__file__).with_name(f"losses-{lr}.json")


if __name__ == "__main__":
    main()
