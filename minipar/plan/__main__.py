"""`python -m minipar.plan`: the layouts of a model on a cluster that fit, fastest first. It needs
no MPI.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

from minipar.cli import UsageParser, report, write_json
from minipar.errors import UsageError, check_divides
from minipar.more.context.token_order import METHODS, ORDERS
from minipar.parallel.pipeline.schedules import SCHEDULES
from minipar.plan.cluster import GPUS, Cluster, Gpu
from minipar.plan.layout import ATTENTION, PRECISIONS, STAGES
from minipar.plan.model import MODELS, RECOMPUTE, find_model
from minipar.plan.programs import PROGRAMS, find_gpu, find_program
from minipar.plan.report import as_json, as_text
from minipar.plan.request import Request
from minipar.plan.search import TOP, plan
from minipar.plan.space import LEAST_TOKENS, SearchSpace

MOST = dict.fromkeys(("gpus", "gpus_per_node", "dp", "cp", "ep", "tp", "etp", "pp"), 1 << 20)
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
    if not set(read) <= set(STAGES):
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
    parser = UsageParser(prog="python -m minipar.plan", description=__doc__)
    add = parser.add_argument
    what = "or a directory with a config.json of Hugging Face"
    add("--model", required=True, metavar="NAME|DIR", help=f"{', '.join(MODELS)}, {what}")
    add("--gpus", required=True, type=count, metavar="N", help="in all")
    own = "or a JSON file with your own values"
    add("--gpu", required=True, metavar="NAME|FILE", help=f"{', '.join(GPUS)}, {own}")
    add("--gpus-per-node", type=count, default=8, metavar="N", help="in one host (default 8)")
    add("--global-batch", required=True, type=count, metavar="B", help="sequences per step")
    add("--seq-len", required=True, type=count, metavar="S", help="tokens per sequence")
    new = "on a GPU as fast as an h100, else"
    what = f"16 bytes per parameter, or bf16's 18 (default: bf16 {new} fp16)"
    add("--precision", choices=list(PRECISIONS), help=what)
    own = f"{', '.join(PROGRAMS)}, or a JSON file of your own"
    add("--program", default="megatron", metavar="NAME|FILE", help=own)
    what = f"scores kept for backward, or flash attention (default: flash {new} stored)"
    add("--attention", choices=ATTENTION, help=what)
    add_choices(parser.add_argument_group("narrow the search").add_argument)
    shown = f"how many meshes to show (default {TOP}, 50 at most)"
    add("--top", type=count, default=TOP, metavar="K", help=shown)
    picture = "everything; - is standard output. `minipar visualize plan FILE` draws it"
    add("--json", metavar="FILE", help=picture)
    return parser


def add_choices(add: Callable[..., argparse.Action]) -> None:
    """Add the flags of SearchSpace."""
    add("--dp", type=count, metavar="N", help="replicas")
    add(
        "--cp",
        type=sizes,
        metavar="1,2,4",
        help="one context-parallel size, or those to try; unless given, those that leave a rank "
        f"{LEAST_TOKENS} tokens of a sequence",
    )
    faster = "where cp > 1 (default: what is faster)"
    add("--context-parallel", choices=METHODS, help=faster)
    add("--cp-order", choices=ORDERS, help="of a sequence's tokens, where cp > 1 (default zigzag)")
    add(
        "--ep",
        type=sizes,
        metavar="1,2,4",
        help="one expert-parallel size, or those to try: ranks of dp*cp*tp/etp that share a "
        "Mixtral's experts; over hosts only if given",
    )
    over = "tensor-parallel size; over hosts only if given here"
    add("--tp", type=count, metavar="N", help=over)
    add(
        "--etp",
        type=sizes,
        metavar="1,2,4",
        help="over how many ranks of tp each expert is cut, or the sizes to try (default: 1 and all of tp)",
    )
    add("--pp", type=count, metavar="N", help="stages")
    add("--microbatch", type=count, metavar="N", help="sequences in one")
    add(
        "--zero-stage",
        type=stages,
        dest="zero",
        default=STAGES,
        metavar="0,1,2,3",
        help="one ZeRO stage, or those to try",
    )
    add(
        "--zero-replicas",
        type=sizes,
        default=1,
        metavar="1,Q",
        help="groups of near ranks within which ZeRO shards (HSDP), or several to try (default 1)",
    )
    # Not dualpipev: the planner's times are those of one action after the other, and it overlaps
    # two.
    add("--schedule", choices=[name for name in SCHEDULES if name != "dualpipev"])
    add("--recompute", choices=RECOMPUTE)
    faster = "where tp > 1 (default: what is faster)"
    add("--sequence-parallel", choices=("on", "off"), help=faster)


def main(argv: Sequence[str]) -> int:
    """Plan, and return the exit code: 2 when the input is wrong or nothing fits, with one line on
    standard error.

    A reader of the output that has gone, as in `| head`, is code 2 without a line.
    """
    try:
        args = parser().parse_args(argv)
        request = read_request(args)
        model = request.model
        cluster = request.cluster
        space = request.space
        result = plan(model, cluster, request.global_batch, request.length, space, args.top)
        if args.json:
            write_json(args.json, as_json(request, result))
        if args.json != "-":
            print(as_text(request, result))
    except UsageError as error:
        return report(error)
    return 0


def read_request(args: argparse.Namespace) -> Request:
    """Return the request that the command line makes. UsageError for what cannot be."""
    check_limits(args)
    gpu = find_gpu(args.gpu)
    space = read_space(args, gpu)
    check_axes(args, space.context_sizes(args.seq_len))
    model = find_model(args.model)
    program = find_program(args.program)
    if 0 < model.positions < args.seq_len:
        if args.model.lower() not in MODELS:
            raise UsageError(
                f"--seq-len {args.seq_len}: {args.model} has {model.positions} learned positions"
            )
        model = replace(model, positions=args.seq_len)  # a named size, to be trained from scratch
    cluster = Cluster(gpu, args.gpus, args.gpus_per_node, program.assumptions, program.framework)
    return Request(
        model=model,
        cluster=cluster,
        global_batch=args.global_batch,
        length=args.seq_len,
        space=space,
        name=args.model,
        gpu=args.gpu,
        program=args.program,
        spread=program.spread,
        evidence=program.evidence,
    )


def check_limits(args: argparse.Namespace) -> None:
    """Raise UsageError for a size that is too large to search."""
    for name, most in MOST.items():
        given = getattr(args, name)
        largest = max(given) if isinstance(given, tuple) else given
        if largest is not None and largest > most:
            raise UsageError(f"--{name.replace('_', '-')} {largest}: at most {most}")


def check_axes(args: argparse.Namespace, contexts: Sequence[int]) -> None:
    """Raise UsageError for a flag about an axis of one rank; `contexts` are the sizes of cp."""
    if (args.context_parallel or args.cp_order) and max(contexts) == 1:
        raise UsageError(
            "--context-parallel and --cp-order are about context parallelism; give --cp 2 or more"
        )
    if args.pp == 1 and args.schedule is not None:
        raise UsageError(f"--schedule {args.schedule} is a pipeline's, but --pp 1 is none")
    if args.etp is not None and args.tp is not None:
        for etp in args.etp:
            check_divides("tp/etp", args.tp, etp, "the ranks of etp are neighbours of tp")
        if min(args.etp) < args.tp and args.sequence_parallel == "off":
            raise UsageError(
                "--etp below --tp: each rank of tp routes its own tokens, which it has with sequence "
                "parallelism, but --sequence-parallel is off"
            )
    if args.tp == 1 and args.sequence_parallel == "on":
        raise UsageError(
            "--sequence-parallel on divides the sequence over tensor-parallel ranks, but --tp is 1"
        )


def read_space(args: argparse.Namespace, gpu: Gpu) -> SearchSpace:
    """Return the choices that the command line fixes, and what is usual on such a GPU for dtype and
    attention.
    """
    fast = gpu.peak >= GPUS["h100"].peak  # older ones as in the published runs on V100 and A100
    # Flash attention keeps no scores that selective recomputation could compute again.
    flash = fast and args.recompute != "selective"
    choices: dict[str, Any] = {
        field.name: getattr(args, field.name) for field in fields(SearchSpace)
    }
    choices["precision"] = PRECISIONS[args.precision or ("bf16" if fast else "fp16")]
    choices["attention"] = args.attention or ("flash" if flash else "stored")
    choices["cp_order"] = args.cp_order or "zigzag"
    if args.sequence_parallel is not None:
        choices["sequence_parallel"] = args.sequence_parallel == "on"
    return SearchSpace(**choices)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
