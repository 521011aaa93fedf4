"""One oracle for all layouts: `equals_one_device(flags)` lists where a layout differs from one device.

Parameters, losses and norms are compared after each step, what ranks hold in common with one another, and the bytes
that each rank sends with the closed form. A row's flags get the smallest model that they allow; a flag of a row wins.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass

import numpy as np
import training
from training import one_device, ranks_of, same_on_all_ranks, trainer_for, using

from chapters.support.training import step_traffic
from chapters.support.whole_runs import relative_difference
from minipar.comm import DeviceMesh, run_local
from minipar.train.data import Tokens
from minipar.train.trainer import Trainer

VOCAB = 11  # a multiple of no tp: the last ranks hold padding
TEXT = Tokens(np.random.Generator(np.random.Philox(51)).integers(0, VOCAB, 500).astype(np.uint8), "random text")
# hidden, heads, seq-len by tp. What dp shares out does not divide: blocks by 3 and 8 at tp = 1, by any dp at tp = 4,
# the embedding by 3.
SHAPES = {1: (20, 4, 8), 2: (20, 4, 8), 3: (18, 6, 9), 4: (20, 4, 8), 8: (24, 8, 8)}
# hidden, heads, K/V heads, ffn, seq-len of Llama and Mixtral by tp: heads of 2 elements or more, an even number; groups
# of 2 heads. With cp: 2 cp divides the tokens, tp a rank's tokens, and cp*tp the heads.
CONTEXT_SHAPES = {False: (24, 8, 16), True: (24, 6, 24)}  # by whether cp*tp is a multiple of 3
CONTEXT_LLAMAS = {False: (32, 16, 8, 24, 16), True: (24, 12, 6, 24, 24)}
LLAMAS = {1: (20, 2, 1, 28, 8), 2: (16, 4, 2, 28, 8), 3: (24, 6, 3, 27, 9), 4: (16, 8, 4, 28, 8), 8: (32, 16, 8, 24, 8)}
LAYERS = (3, 5, 9, 16)  # the first of these that has a layer for each stage: mostly stages of unequal size
TWO_PER_RANK = ("interleaved-1f1b", "zbv", "dualpipev")
STEPS = 2
# AdamW's first update is lr*g/(|g| + eps): of a gradient that is zero but for rounding (the keys' bias), that rounding
# over eps; and of one that is tiny by chance. With the usual 1e-8 this is more than the 1e-12 asserted below (see
# tensor_cases.py), with 1e-6 in 1 of 162 such runs, and with 1e-5 in 1 of 244: an element whose terms of 0.1 cancel to
# 2.3e-7 differs by 1.3e-17, and its update by 1.2e-12. (The gradients themselves differ by 9e-16.) A larger eps hides
# nothing: a gradient that is wrong by a factor changes the update by eps/(|g| + eps) of that, so it shows it sooner.
EPS = 1e-4


# ---- a row -----------------------------------------------------------------------------------------------------------


def value(flags: str, flag: str, default: str) -> str:
    """Return the last value of a flag in a row, or the default."""
    words = flags.split()
    found = default
    for word, after in zip(words, words[1:], strict=False):
        if word == flag:
            found = after
    return found


def config_of(flags: str):
    """Return the parsed flags of a row, and of the smallest model and batch that they allow."""
    dp, tp, cp, pp = (int(value(flags, flag, "1")) for flag in ("--dp", "--tp", "--cp", "--pp"))
    stages = pp * (2 if value(flags, "--schedule", "") in TWO_PER_RANK else 1)
    layers = next(n for n in LAYERS if n >= stages)
    model = value(flags, "--model", "gpt2")
    if model == "gpt2":
        hidden, heads, length = SHAPES[tp] if cp == 1 else CONTEXT_SHAPES[cp * tp % 3 == 0]
        shape = f"--hidden {hidden} --heads {heads} --seq-len {length}"
    else:
        sizes = LLAMAS[tp] if cp == 1 else CONTEXT_LLAMAS[cp * tp % 3 == 0]
        hidden, heads, kv_heads, ffn, length = sizes
        shape = f"--hidden {hidden} --heads {heads} --kv-heads {kv_heads} --ffn {ffn} --seq-len {length}"
        shape += " --experts 5 --top-k 2" if model == "mixtral" else ""
    m = int(value(flags, "--microbatches", "1"))
    batch = f"--global-batch {dp * m * (2 if m < 3 else 1)} --eps {EPS} --steps {STEPS}"
    run = f"--layers {layers} {shape} --vocab-size {VOCAB} {batch} --dtype float64 --reduction ordered"
    return training.config_for(f"{run} {flags}")


@dataclass(frozen=True)
class Combination:
    """One value of each axis. `str` is its command line."""

    layout: tuple[int, int, int]  # dp, tp, pp
    schedule: str | None = None
    sequence: bool = False
    microbatches: int = 1
    zero: int = 0
    recompute: bool = False
    dropout: bool = False
    model: str = "gpt2"
    clip: bool = False
    reduction: str = "ordered"
    context: str = ""
    replicas: int = 1  # of ZeRO's shards

    @property
    def ranks(self) -> int:
        return int(np.prod(self.layout)) * int(value(self.context, "--cp", "1"))

    @property
    def exact(self) -> bool:
        """Whether sums are taken in one device's order: a split matrix product adds its parts in another."""
        adds_in_order = self.reduction == "ordered" and self.replicas == 1
        return adds_in_order and self.layout[1] == 1 and not self.context

    def __str__(self) -> str:
        dp, tp, pp = self.layout
        line = f"--dp {dp} --tp {tp} --pp {pp} --zero-stage {self.zero} --microbatches {self.microbatches}"
        line += f" --reduction {self.reduction} --model {self.model} {self.context}"
        line += f" --schedule {self.schedule}" if self.schedule else ""
        line += f" --zero-replicas {self.replicas}" if self.replicas > 1 else ""
        for flag, given in (("--sequence-parallel", self.sequence), ("--recompute full", self.recompute)):
            line += f" {flag}" if given else ""
        for flag, given in (("--dropout 0.1", self.dropout), ("--clip-grad 0.5", self.clip)):
            line += f" {flag}" if given else ""
        return line

    def config(self):
        return config_of(str(self))


# ---- the check -------------------------------------------------------------------------------------------------------


def run_steps(trainer):
    """Take all steps: the parameters after each, what each reported, and the bytes that each sent by axis."""
    states, reports, sent = [], [], []
    traffic = trainer.mesh.world.traffic
    for step in range(trainer.args.steps):
        traffic.reset()
        result = trainer.step(step)
        sent.append({axis: traffic.bytes(axis=axis) for axis in DeviceMesh.AXES})
        reports.append((result.loss, result.grad_norm))
        states.append(trainer.state_dict())
    return states, reports, sent


REFERENCES: dict[str, tuple[list, list]] = {}  # by the flags of one device


def reference(args: Namespace) -> tuple[list, list]:
    """One device instead of all ranks: (parameters after each step, (loss, gradient norm) of each step).

    What cannot change a bit there is set to one value, so that rows share a reference: how layers and steps are cut
    (but for whether they are: a pipeline's norm is summed part by part), and recompute. A tree depends on no layout.
    """
    alone = Namespace(**vars(args))
    alone.tp = alone.cp = alone.ep = alone.zero_replicas = 1
    alone.zero_stage = 0
    alone.sequence_parallel = alone.sync_every_microbatch = False
    alone.context_parallel, alone.recompute = "ring", "none"
    alone.pp, alone.schedule, alone.virtual_stages = min(2, args.pp), "1f1b", None
    if args.reduction == "tree":
        alone.dp, alone.pp, alone.microbatches = 1, 1, args.dp * args.microbatches
    else:
        alone.reduction = "ordered"
    key = str(sorted(vars(alone).items(), key=str))
    if key not in REFERENCES:
        with using(np):
            REFERENCES[key] = run_steps(one_device(alone, TEXT))[:2]
    return REFERENCES[key]


def differences(states, reports, expected, exact: bool) -> list[str]:
    """Where states and reports differ from one device's: bit for bit, or by more than 1e-12 of an array's largest value
    after the first step and 5e-12 more after each other one: AdamW divides a gradient by its own size.
    """
    wrong = []
    for step, (state, single) in enumerate(zip(states, expected[0], strict=True)):
        if list(state) != list(single):
            wrong.append(f"step {step}: parameters {sorted(set(state) ^ set(single))}")
            continue
        for name, array in single.items():
            limit = 1e-12 * (5 * step + 1)
            same = state[name].tobytes() == array.tobytes()
            if state[name].shape != array.shape or (exact and not same):
                wrong.append(f"step {step}: {name} is not bit for bit")
            elif not relative_difference(state[name], array) <= limit:  # nan is no number's equal
                wrong.append(f"step {step}: {name} by {relative_difference(state[name], array):.3g}")
    for step, (report, single) in enumerate(zip(reports, expected[1], strict=True)):
        for what, x, y in zip(("loss", "gradient norm"), report, single, strict=True):
            limit = 0.0 if exact else 1e-12 * abs(y)
            if not abs(x - y) <= limit:  # nan is no number's equal
                wrong.append(f"step {step}: {what} {x!r} is not {y!r}")
    return wrong


def check_config(comm, args: Namespace, exact: bool = False, kind: type[Trainer] | None = None) -> list[str]:
    """List what this rank finds wrong with a run, over any transport. Collective.

    Rank 0 compares with one device; all compare what they report and hold with one another, and what they
    sent in a step with the closed form.
    """
    trainer = trainer_for(args, TEXT, comm, kind)
    states, reports, sent = run_steps(trainer)
    wrong = []
    expected = step_traffic(args, comm.rank)
    wrong += [f"sent {count}, predicted {expected}" for count in sent if count != expected]
    if not same_on_all_ranks(trainer):
        wrong.append("ranks that hold the same parameters hold different bits")
    everyone = comm.all_gather_bytes(repr(reports).encode())
    if everyone[comm.rank] != everyone[0]:
        wrong.append("differs from rank 0")
    if comm.rank == 0:
        wrong += differences(states, reports, reference(args), exact)
    return wrong


def equals_one_device(flags: str, exact: bool, kind: type[Trainer] | None = None) -> list[str]:
    """List all that any rank of a row finds wrong, on threads: [] if the row is equal to one device.

    `exact` demands one device's bits; else the bound of `differences` holds.
    """
    args = config_of(flags)
    found = run_local(ranks_of(args), check_config, args, exact, kind)
    return sorted({line for lines in found for line in lines})
