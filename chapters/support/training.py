"""Make the trainers of chapters 6 to 14 from flags of the command line."""

from argparse import Namespace
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from minipar.comm import Communicator, DeviceMesh
from minipar.more.context.context_traffic import cp_bytes
from minipar.more.experts.expert_traffic import ExpertLayout, load_bytes
from minipar.more.hybrid_traffic import replica_bytes
from minipar.more.tree.tree_traffic import TreeLayout
from minipar.parallel.layout import StepLayout
from minipar.parallel.pipeline.actions import Schedule
from minipar.parallel.pipeline.schedules import make
from minipar.parallel.predicted_traffic import predicted_traffic
from minipar.train.data import Tokens, load_tokens
from minipar.train.flags import parse
from minipar.train.trainer import Trainer


def parsed(flags: str, ranks: int = 1, **shape: Any) -> Namespace:
    """Return flags as `python -m minipar.train` reads them on so many ranks.

    `shape` are values of the model's config that have no flag; the command line reads them from a config.json.
    """
    args = parse(flags.split(), ranks)
    args.shape = replace(args.shape, **shape)
    return args


def text_for(args: Namespace) -> Tokens:
    """Return the text on which the program trains without `--data`."""
    return load_tokens(None, vocab_size=args.vocab_size, seq_len=args.seq_len)


def trainer_for(comm: Communicator, args: Namespace, tokens: Tokens, kind: type[Trainer] = Trainer) -> Trainer:
    """Return this rank's trainer on a mesh of the sizes in `args`."""
    mesh = DeviceMesh(comm, dp=args.dp, tp=args.tp, pp=args.pp, cp=args.cp, ep=args.ep)
    return kind(args, mesh, tokens)


def make_trainer(comm: Communicator, flags: str, kind: type[Trainer] = Trainer) -> Trainer:
    """Return this rank's trainer of these flags, on the text for them."""
    args = parsed(flags, comm.size)
    return trainer_for(comm, args, text_for(args), kind)


def step_layout(args: Namespace, schedule: Schedule | None = None) -> StepLayout:
    """Return the layout of parsed flags for closed forms; `schedule` replaces that of the flags."""
    if schedule is None and args.pp > 1:
        schedule = make(args.schedule, args.pp, args.microbatches, args.virtual_stages)
    itemsize = np.dtype(args.dtype).itemsize
    layout = partial(TreeLayout if args.reduction == "tree" else StepLayout)
    if args.ep > 1:
        layout = partial(ExpertLayout, ep=args.ep)
    return layout(
        args.shape,
        length=args.seq_len,
        tokens=args.global_batch // (args.dp * args.microbatches) * args.seq_len // args.cp,
        microbatches=args.microbatches,
        itemsize=itemsize,
        reduce_itemsize=max(4, itemsize),  # gradients of 2 bytes are added up, and summed over ranks, in float32
        dp=args.dp * args.cp,
        tp=args.tp,
        pp=args.pp,
        zero_stage=args.zero_stage,
        chunk_ranks=args.dp * args.cp // args.zero_replicas,
        schedule=schedule,
        sequence_parallel=args.sequence_parallel,
        recompute=args.recompute == "full",
        reduction="ordered" if args.reduction == "tree" else args.reduction,  # a tree sends as many bytes
        sync_every_microbatch=args.sync_every_microbatch,
    )


def step_traffic(args: Namespace, rank: int) -> dict[str, int]:
    """Compute the bytes that a rank sends on each axis in a step: the core's, and those of the later axes.

    What experts exchange over ep is not in it: that depends on the routing.
    """
    layout = step_layout(args)
    place = layout.coordinates(rank)
    sent = predicted_traffic(layout, rank)
    sent["dp"] += replica_bytes(layout, place["dp"], place["pp"])
    sent["cp"] = cp_bytes(layout, args.context_parallel, args.cp, place["pp"])
    if getattr(args.shape, "aux_coefficient", 0.0):  # only a Mixtral has one
        sent["cp"] += load_bytes(layout, args.shape.num_local_experts, args.cp, place["dp"] % args.cp, place["pp"])
    return sent
