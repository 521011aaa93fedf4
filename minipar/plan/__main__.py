"""`python -m minipar.plan`: the layouts of a model on a cluster that fit, fastest first. It needs
no MPI.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from math import prod

from minipar.cli import UsageParser, write_json, write_out
from minipar.errors import UsageError, error_line, print_line, printable
from minipar.parallel.context import METHODS
from minipar.parallel.pipeline.schedules import SCHEDULES
from minipar.parallel.token_order import ORDERS
from minipar.plan.cluster import GPUS, Cluster, Gpu
from minipar.plan.layout import ATTENTION, PRECISIONS, check_experts
from minipar.plan.model import MODELS, RECOMPUTE, ModelShape, find_model
from minipar.plan.programs import PROGRAMS, find_gpu, find_program
from minipar.plan.report import as_json, as_text
from minipar.plan.request import Request
from minipar.plan.search import TOP, plan
from minipar.plan.space import LEAST_TOKENS, SearchSpace

MOST = dict.fromkeys(("gpus", "gpus_per_node", "dp", "tp", "pp"), 1 << 20)
MOST |= {"global_batch": 1 << 24, "seq_len": 1 << 24, "top": 50}


def count(text: str) -> int:
    """Read a whole number from 1 up."""
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def stages(text: str) -> tuple[int, ...]:
    """Read ZeRO stages: 1, or several as 0,1,3."""
    read = tuple(int(stage) for stage in text.split(","))
    if not set(read) <= set(range(4)):
        raise ValueError(text)
    return read


def sizes(text: str) -> tuple[int, ...]:
    """Read whole numbers from 1 up: 4, or several as 1,2,4."""
    return tuple(count(size) for size in text.split(","))


count.__name__ = "whole number from 1 up"  # argparse's name for it
sizes.__name__ = "list of whole numbers from 1 up, such as 1,2,4"
stages.__name__ = "list of stages from 0 to 3, such as 0,1,3"


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = UsageParser(prog="python -m minipar.plan", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add(
        "--model",
        required=True,
        metavar="NAME|DIR",
        help=f"{', '.join(MODELS)}, or a directory: with a config.json of Hugging Face, or of minipar.train --save",
    )
    add("--gpus", required=True, type=count, metavar="N", help="in all")
    add(
        "--gpu",
        required=True,
        metavar="NAME|FILE",
        help=f"{', '.join(GPUS)}, or a JSON file with your own values",
    )
    add("--gpus-per-node", type=count, default=8, metavar="N", help="in one host (default 8)")
    add("--global-batch", required=True, type=count, metavar="B", help="sequences per step")
    add("--seq-len", required=True, type=count, metavar="S", help="tokens per sequence")
    new = "on a GPU as fast as an h100, else"
    what = f"16 bytes per parameter, or bf16's 18 (default: bf16 {new} fp16)"
    add("--precision", choices=list(PRECISIONS), help=what)
    add(
        "--program",
        default="megatron",
        metavar="NAME|FILE",
        help=f"{', '.join(PROGRAMS)}, or a JSON file of your own",
    )
    what = f"scores kept for backward, or flash attention (default: flash {new} stored)"
    add("--attention", choices=ATTENTION, help=what)
    narrow = parser.add_argument_group("narrow the search")
    narrow.add_argument("--dp", type=count, metavar="N", help="replicas")
    narrow.add_argument("--cp", type=sizes, metavar="1,2,4", help="one context-parallel size, or those to try; unless "
                        f"given, those that leave a rank {LEAST_TOKENS} tokens of a sequence")  # fmt: skip
    narrow.add_argument(
        "--context-parallel", choices=METHODS, help="where cp > 1 (default: what is faster)"
    )
    narrow.add_argument(
        "--cp-order", choices=ORDERS, help="of a sequence's tokens, where cp > 1 (default zigzag)"
    )
    narrow.add_argument("--ep", type=sizes, metavar="1,2,4", help="one expert-parallel size, or those to try: ranks "
                        "of dp*cp that share a Mixtral's experts; over hosts only if given")  # fmt: skip
    narrow.add_argument(
        "--tp", type=count, metavar="N", help="tensor-parallel size; over hosts only if given here"
    )
    narrow.add_argument("--pp", type=count, metavar="N", help="stages")
    narrow.add_argument("--microbatch", type=count, metavar="N", help="sequences in one")
    narrow.add_argument(
        "--zero-stage", type=stages, metavar="0,1,2,3", help="one ZeRO stage, or those to try"
    )
    narrow.add_argument("--zero-replicas", type=sizes, metavar="1,Q", help="groups of near ranks within which ZeRO "
                        "shards (HSDP), or several to try (default 1)")  # fmt: skip
    # Not dualpipev: the planner's times are those of one action after the other, and it overlaps
    # two.
    narrow.add_argument("--schedule", choices=[name for name in SCHEDULES if name != "dualpipev"])
    narrow.add_argument("--recompute", choices=RECOMPUTE)
    narrow.add_argument(
        "--sequence-parallel", choices=("on", "off"), help="where tp > 1 (default: what is faster)"
    )
    add(
        "--top",
        type=count,
        default=TOP,
        metavar="K",
        help=f"how many meshes to show (default {TOP}, 50 at most)",
    )
    add(
        "--json",
        metavar="FILE",
        help="everything; - is standard output. `minipar visualize plan FILE` draws it",
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Plan, and return the exit code: 2 when the input is wrong or nothing fits, with one line on
    standard error.

    A reader of the output that has gone, as in `| head`, is code 2 without a line.
    """
    try:
        args = parser().parse_args(argv)
        request = read_request(args)
        result = plan(
            request.model,
            request.cluster,
            request.global_batch,
            request.length,
            request.space,
            top=args.top,
        )
        if args.json:
            write_json(args.json, as_json(request, result))
        if args.json != "-":
            write_out(as_text(request, result) + "\n")
    except UsageError as error:
        if not isinstance(error.__context__, BrokenPipeError):
            print_line(error_line(error))
        return 2
    return 0


def read_request(args: argparse.Namespace) -> Request:
    """Return the request that the command line makes. UsageError for what cannot be."""
    for name, most in MOST.items():
        given = getattr(args, name)
        if given is not None and given > most:
            raise UsageError(f"--{name.replace('_', '-')} {given}: at most {most}")
    for name in ("cp", "ep"):
        if max(getattr(args, name) or (1,)) > MOST["gpus"]:
            raise UsageError(f"--{name} {max(getattr(args, name))}: at most {MOST['gpus']}")
    gpu = find_gpu(args.gpu)
    space = read_space(args, gpu)
    contexts = space.context_sizes(args.seq_len)
    if (args.context_parallel or args.cp_order) and max(contexts) == 1:
        raise UsageError(
            "--context-parallel and --cp-order are about context parallelism; give --cp 2 or more"
        )
    if args.pp == 1 and args.schedule is not None:
        raise UsageError(f"--schedule {args.schedule} is a pipeline's, but --pp 1 is none")
    if args.tp == 1 and args.sequence_parallel == "on":
        raise UsageError(
            "--sequence-parallel on divides the sequence over tensor-parallel ranks, but --tp is 1"
        )
    axes = {"dp": args.dp, "tp": args.tp, "pp": args.pp} | (
        {"cp": max(contexts)} if max(contexts) > 1 else {}
    )
    if None not in axes.values() and len(contexts) == 1 and prod(axes.values()) != args.gpus:
        product = " * ".join(f"--{axis} {size}" for axis, size in axes.items())
        raise UsageError(f"{product} = {prod(axes.values())}, but --gpus {args.gpus}")
    if args.dp is not None and args.global_batch % args.dp:
        raise UsageError(f"--dp {args.dp} does not divide --global-batch {args.global_batch}")
    model, program = find_model(args.model), find_program(args.program)
    check_expert_flags(args, model)
    if 0 < model.positions < args.seq_len:
        if args.model.lower() not in MODELS:
            raise UsageError(
                f"--seq-len {args.seq_len}: {args.model} has {model.positions} learned positions"
            )
        model = replace(model, positions=args.seq_len)  # a named size, to be trained from scratch
    return Request(
        name=printable(args.model),
        model=model,
        gpu=printable(args.gpu),
        program=printable(args.program),
        evidence=program.evidence,
        cluster=Cluster(
            gpu=gpu,
            gpus=args.gpus,
            per_host=args.gpus_per_node,
            assumptions=program.assumptions,
            framework=program.framework,
        ),
        global_batch=args.global_batch,
        length=args.seq_len,
        space=space,
    )


def check_expert_flags(args: argparse.Namespace, model: ModelShape) -> None:
    """Raise UsageError for an --ep that the model, or another flag, contradicts."""
    sizes = args.ep or (1,)
    for ep in sizes:
        if ep > 1 and model.experts is None:
            raise UsageError(
                f"--ep {ep} is for a model with experts, as mixtral-8x7b: {args.model[:40]} has none"
            )
        check_experts(model, ep)
        if args.dp and args.cp and len(args.cp) == len(sizes) == 1 and args.dp * args.cp[0] % ep:
            raise UsageError(f"dp*cp/ep = {args.dp}*{args.cp[0]}/{ep} is not a whole number")
    if min(sizes) > 1 and min(args.zero_replicas or (1,)) > 1:
        q = min(args.zero_replicas)
        raise UsageError(
            f"--zero-replicas {q} with --ep {min(sizes)}: shards of experts have no replicas; give one of them"
        )


def read_space(args: argparse.Namespace, gpu: Gpu) -> SearchSpace:
    """Return the choices that the command line fixes, and what is usual on such a GPU for dtype and
    attention.
    """
    precision = "fp16"  # and stored scores, as in the published runs on a V100 and an A100
    attention = "stored"
    if gpu.peak >= GPUS["h100"].peak:
        precision = "bf16"
        attention = "flash"
    if args.recompute == "selective":
        attention = "stored"  # flash attention keeps no scores that could be computed again
    return SearchSpace(
        dp=args.dp,
        tp=args.tp,
        pp=args.pp,
        zero=args.zero_stage,
        zero_replicas=args.zero_replicas,
        recompute=args.recompute,
        schedule=args.schedule,
        microbatch=args.microbatch,
        sequence_parallel=None
        if args.sequence_parallel is None
        else args.sequence_parallel == "on",
        attention=args.attention or attention,
        precision=PRECISIONS[args.precision or precision],
        cp=args.cp,
        context_parallel=args.context_parallel,
        cp_order=args.cp_order or "zigzag",
        ep=args.ep,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
