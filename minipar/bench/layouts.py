"""minipar's runs in the planner's terms: predictions next to measured steps, on the `cpu` clock."""

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np

from minipar.bench import largest
from minipar.bench.costs import Machine, compute_time
from minipar.bench.pipeline import random_tokens
from minipar.comm.clock import Network
from minipar.comm.communicator import Communicator
from minipar.comm.mesh import DeviceMesh
from minipar.memory import MemoryLedger
from minipar.more.context.blockwise import QUERY_BLOCK
from minipar.more.experts.mixtral import MixtralConfig
from minipar.parallel.pipeline.schedules import make
from minipar.parallel.predicted_memory import OF_DTYPE
from minipar.plan.cluster import AlphaBeta, model_clock_cluster
from minipar.plan.layout import MINIPAR, PRECISIONS, Framework, Layout
from minipar.plan.model import LLAMA, ModelShape
from minipar.plan.rank_bytes import Memory, memory
from minipar.plan.step_time import StepTime, step_time
from minipar.train.flags import parse
from minipar.train.trainer import Trainer

# As `python -m minipar.train` takes them.
LAYOUTS = (
    "",
    "--microbatches 4",
    "--recompute full --microbatches 2",
    "--dp 2",
    "--dp 2 --zero-stage 3 --microbatches 4",
    "--tp 2",
    "--tp 2 --sequence-parallel --microbatches 4",
    "--pp 2 --schedule gpipe --microbatches 4",
    "--dp 4 --zero-stage 1",
    "--dp 4 --zero-stage 2 --sync-every-microbatch --microbatches 2",
    "--dp 4 --zero-stage 3",
    "--tp 4",
    "--pp 4 --schedule naive --microbatches 4",
    "--pp 4 --schedule 1f1b --microbatches 8",
    "--pp 4 --schedule interleaved-1f1b --microbatches 8",
    "--pp 4 --schedule zb-h1 --microbatches 8",
    "--dp 2 --pp 2 --zero-stage 1 --microbatches 4",
    "--dp 8",
    "--dp 8 --zero-stage 3",
    "--tp 8",
    "--tp 8 --sequence-parallel --recompute full",
    "--pp 8 --schedule gpipe --microbatches 8",
    "--pp 8 --schedule 1f1b --microbatches 16",
    "--dp 4 --tp 2 --zero-stage 1",
    "--dp 2 --pp 4 --zero-stage 3 --microbatches 4",
    "--tp 2 --pp 4 --schedule zb-h1 --microbatches 8",
    "--dp 2 --tp 2 --pp 2 --zero-stage 2 --microbatches 4",
    "--dp 2 --tp 2 --pp 2 --sequence-parallel --recompute full --microbatches 4",
)
RECORDED = 2  # steps with the ledger: the second begins with all that the first one left


# ---- minipar's runs in the planner's terms ---------------------------------------------------------------------------


def shape_of(args: Namespace) -> ModelShape:
    """Return the model of parsed flags."""
    shape = args.shape
    is_llama = shape.model_type != "gpt2"
    return ModelShape(
        shape.n_layer,
        shape.n_embd,
        shape.n_head,
        shape.vocab_size,
        positions=0 if is_llama else shape.n_positions,
        kv_heads=shape.n_kv_head,
        ffn=shape.n_inner,
        tied=shape.tie_word_embeddings,
        experts=shape.num_local_experts if isinstance(shape, MixtralConfig) else None,
        top_k=shape.num_experts_per_tok if isinstance(shape, MixtralConfig) else 1,
        **(LLAMA if is_llama else {}),
    )


def layout_of(args: Namespace) -> Layout:
    """Return the planner's layout of parsed flags."""
    return Layout(
        dp=args.dp,
        tp=args.tp,
        pp=args.pp,
        microbatch=args.global_batch // (args.dp * args.microbatches),
        microbatches=args.microbatches,
        zero=args.zero_stage,
        zero_replicas=args.zero_replicas,
        schedule=args.schedule,
        virtual_stages=stages_of(args) // args.pp,
        sequence_parallel=args.sequence_parallel,
        recompute=args.recompute,
        attention="stored" if args.dropout > 0 or args.seq_len <= QUERY_BLOCK else "flash",
        precision=OF_DTYPE.get(args.dtype, PRECISIONS["bf16"]),
        cp=args.cp,
        context_parallel=args.context_parallel,
        ep=args.ep,
    )


def stages_of(args: Namespace) -> int:
    """Return the number of pipeline stages."""
    return make(args.schedule, args.pp, args.microbatches, args.virtual_stages).stages


def framework_of(args: Namespace) -> Framework:
    """Return minipar's habits in such a run."""
    return replace(MINIPAR, every_microbatch=args.sync_every_microbatch)


def predict(args: Namespace, machine: Machine) -> tuple[StepTime, Memory]:
    """Predict a step of parsed flags on the `cpu` clock, and the memory of the fullest rank."""
    model, layout, framework = shape_of(args), layout_of(args), framework_of(args)
    link = AlphaBeta(machine.network.alpha, machine.network.beta)
    # 0 where every measured shape is so small that its products take no time beside its calls.
    products = 1 / max(machine.costs["seconds_per_flop"], 1e-15)
    cluster = replace(
        model_clock_cluster(layout.gpus, products, link, link, layout.gpus),
        framework=framework,
        measured=partial(compute_time, machine.costs),
    )
    return step_time(model, layout, cluster, args.seq_len), memory(model, layout, args.seq_len, framework)


@dataclass(frozen=True)
class Agreement:
    """The agreement of predictions with several measured layouts.

    median, largest, memory_largest: relative errors of seconds and of peak memory. spearman: the rank correlation of
    predicted with measured seconds; 1 means the same order.
    """

    median: float
    largest: float
    spearman: float
    memory_largest: float

    def __str__(self) -> str:
        return (
            f"seconds predicted within {self.largest:.1%}, median {self.median:.1%}, Spearman {self.spearman:.3f}; "
            f"memory within {self.memory_largest:.1%}"
        )


def agreement(rows: Sequence[Mapping[str, Any]]) -> Agreement:
    """Compare two or more rows' seconds and peak_bytes with their predicted_seconds and predicted_bytes."""
    measured, predicted = (np.array([row[key] for row in rows]) for key in ("seconds", "predicted_seconds"))
    held, planned = (np.array([row[key] for row in rows]) for key in ("peak_bytes", "predicted_bytes"))
    errors = np.abs(predicted / measured - 1)
    order, planned_order = (np.argsort(np.argsort(each)) for each in (measured, predicted))
    return Agreement(
        median=float(np.median(errors)),
        largest=float(errors.max()),
        spearman=float(np.corrcoef(order, planned_order)[0, 1]),
        memory_largest=float(np.abs(planned / held - 1).max()),
    )


# ---- measured --------------------------------------------------------------------------------------------------------


def runs_of(sizes: str, ranks: int) -> list[Namespace]:
    """Return LAYOUTS of at most `ranks` ranks, parsed, with these flags of the model and the batch."""
    sized = [(layout, ranks_of(layout.split())) for layout in LAYOUTS]
    return [parse(f"{layout} {sizes}".split(), size) for layout, size in sized if size <= ranks]


def ranks_of(words: Sequence[str]) -> int:
    """Return the product of the mesh's sizes in a command line of minipar.train, which says each at most once."""
    return prod(int(size) for flag, size in pairwise(words) if flag in ("--dp", "--tp", "--pp", "--cp"))


def measure(comm: Communicator, runs: Sequence[Namespace], repeat: int, network: Network) -> list[dict[str, Any]]:
    """Measure a row for each layout, complete on rank 0 alone. Collective; no layout has more ranks than `comm`.

    A layout of n ranks runs on the first n while the others wait. On the `cpu` clock a rank's time is its own CPU time
    between communication calls, and a message takes alpha + beta*bytes, so that ranks which share cores show the time
    of as many cores with that network.

    seconds       of a step, from a moment that is the same on all ranks to the last rank's end; median over `repeat`
                  steps (seconds_min, seconds_max: over the same)
    peak_bytes    of the fullest rank, from the ledger in RECORDED steps before the others
    """
    timed = Communicator(comm.transport, clock="cpu", network=network)
    rows = []
    for args in runs:
        gpus = layout_of(args).gpus
        takes_part = comm.rank < gpus
        world = timed.new_group(range(gpus) if takes_part else range(gpus, comm.size), "world")
        seconds, ledger = [0.0], MemoryLedger()
        if takes_part:
            with ledger.recording():
                trainer = Trainer(args, DeviceMesh(world, args.dp, args.tp, args.pp), random_tokens(args))
                for step in range(RECORDED):
                    trainer.step(step)
            seconds = [_step_seconds(trainer, RECORDED + i) for i in range(repeat)]
        rows.append(row_of(args, np.array(seconds), largest(comm, ledger.peak)))
    return rows


def _step_seconds(trainer: Trainer, step: int) -> float:
    """Return the seconds of one step, the same value on all of its ranks."""
    world = trainer.mesh.world
    start = largest(world, world.clock.now())
    world.clock.resume(start)
    trainer.step(step)
    return largest(world, world.clock.now()) - start


def row_of(args: Namespace, seconds: np.ndarray, peak: float) -> dict[str, Any]:
    """Return the row of a layout: its settings, the median and the range of its seconds, and its peak in bytes."""
    settings = ("dp", "tp", "pp", "zero_stage", "sequence_parallel", "microbatches", "recompute")
    row = {setting: getattr(args, setting) for setting in settings}
    row["schedule"] = args.schedule if args.pp > 1 else None
    row |= {"seconds": float(np.median(seconds)), "seconds_min": float(seconds.min())}
    return row | {"seconds_max": float(seconds.max()), "peak_bytes": int(peak)}
