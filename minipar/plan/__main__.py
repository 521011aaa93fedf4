"""`python -m minipar.plan`: the layouts of a model on a cluster that fit, fastest first. It needs no MPI."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from minipar.errors import UsageError, UsageParser, error_line
from minipar.parallel.pipeline import SCHEDULES
from minipar.plan.layout import ATTENTION, PRECISIONS
from minipar.plan.machine import GPUS, Cluster, find_gpu
from minipar.plan.model import MODELS, RECOMPUTE, find_model
from minipar.plan.planner import TOP, Search, plan
from minipar.plan.report import Question, as_json, as_text

MOST_GPUS = 1 << 20
MOST_BATCH = 1 << 24


def count(text: str) -> int:
    """A whole number from 1 up."""
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


count.__name__ = "whole number from 1 up"  # what argparse calls it


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = UsageParser(prog="python -m minipar.plan", description=__doc__, allow_abbrev=False)
    add = made.add_argument
    add("--model", required=True, metavar="NAME|DIR", help=f"{', '.join(MODELS)}, or a directory with a config.json")
    add("--gpus", required=True, type=count, metavar="N", help="in all")
    add("--gpu", required=True, metavar="NAME|FILE", help=f"{', '.join(GPUS)}, or a JSON file with numbers of your own")
    add("--gpus-per-node", type=count, default=8, metavar="N", help="in one host (default 8)")
    add("--global-batch", required=True, type=count, metavar="B", help="sequences per step")
    add("--seq-len", required=True, type=count, metavar="S", help="tokens per sequence")
    add("--precision", choices=list(PRECISIONS), default="fp16", help="16 bytes per parameter, or bf16's 18")
    add("--attention", choices=ATTENTION, default="stored", help="scores kept for backward, or flash attention")
    narrow = made.add_argument_group("narrow the search")
    for flag, what in (("--tp", "tensor-parallel size"), ("--pp", "stages"), ("--microbatch", "sequences in one")):
        narrow.add_argument(flag, type=count, metavar="N", help=what)
    narrow.add_argument("--zero-stage", type=int, choices=range(4))
    narrow.add_argument("--schedule", choices=list(SCHEDULES))
    narrow.add_argument("--recompute", choices=RECOMPUTE)
    narrow.add_argument("--sequence-parallel", choices=("on", "off"), help="where tp > 1 (default: what is faster)")
    add("--top", type=count, default=TOP, metavar="K", help=f"how many meshes to show (default {TOP}, 50 at most)")
    add("--json", metavar="FILE", help="everything; - is standard output. `python -m visualize plan FILE` draws it")
    return made


def main(argv: Sequence[str]) -> int:
    """Plan. Returns the exit code: 2 when the input is wrong or nothing fits, with one line on standard error."""
    try:
        told = parser().parse_args(argv)
        _plan(told)
    except UsageError as error:
        print(error_line(error), file=sys.stderr)
        return 2
    return 0


def _plan(told: argparse.Namespace) -> None:
    most_of = {"gpus": (told.gpus, MOST_GPUS), "global-batch": (told.global_batch, MOST_BATCH), "top": (told.top, 50)}
    for flag, (value, most) in most_of.items():
        if value > most:
            raise UsageError(f"--{flag} {value}: at most {most}")
    if told.pp == 1 and told.schedule is not None:
        raise UsageError(f"--schedule {told.schedule} is a pipeline's, but --pp 1 is none")
    if told.tp == 1 and told.sequence_parallel == "on":
        raise UsageError("--sequence-parallel on divides the sequence over tensor-parallel ranks, but --tp is 1")
    model, cluster = find_model(told.model), Cluster(find_gpu(told.gpu), told.gpus, told.gpus_per_node)
    if 0 < model.positions < told.seq_len:
        if told.model not in MODELS:
            raise UsageError(f"--seq-len {told.seq_len}: {told.model} has {model.positions} learned positions")
        model = replace(model, positions=told.seq_len)  # a named size, to be trained from scratch
    search = Search(
        told.tp,
        told.pp,
        told.zero_stage,
        told.recompute,
        told.schedule,
        told.microbatch,
        None if told.sequence_parallel is None else told.sequence_parallel == "on",
        told.attention,
        PRECISIONS[told.precision],
    )
    asked = Question(told.model, model, told.gpu, cluster, told.global_batch, told.seq_len, search)
    found = plan(model, cluster, told.global_batch, told.seq_len, search, told.top)
    text = json.dumps(as_json(asked, found), indent=1) + "\n"
    if told.json == "-":
        sys.stdout.write(text)
        return
    if told.json:
        try:
            Path(told.json).write_text(text)
        except OSError as error:
            raise UsageError(f"--json {told.json} cannot be written: {error.strerror}") from None
    print(as_text(asked, found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
