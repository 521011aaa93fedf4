"""Combinations of everything that training can combine: a covering choice of them, and the check of one against one
device. The check runs on every rank of any transport: in-process in the suite, and under mpirun.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections import Counter
from dataclasses import dataclass
from functools import cache

import numpy as np
from training import config_for

from chapters.support.whole_runs import bound, relative_difference
from minipar.comm import DeviceMesh
from minipar.parallel.pipeline.schedules import SCHEDULES
from minipar.parallel.placement import Shard
from minipar.parallel.traffic import predicted_traffic
from minipar.train.data import Tokens
from minipar.train.from_config import step_layout
from minipar.train.one_device import OneDevice
from minipar.train.trainer import Trainer
from minipar.train.verify import same_on_all_ranks

VOCAB = 11  # a multiple of no tp: the last ranks hold padding
TEXT = Tokens(np.random.Generator(np.random.Philox(51)).integers(0, VOCAB, 500).astype(np.uint8), "random text", VOCAB)
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

SIZES = (1, 2, 3, 4, 8)
# fmt: off
AXES = {
    "layout": [sizes for sizes in itertools.product(SIZES, repeat=3) if np.prod(sizes) <= 8],  # dp, tp, pp
    "context": [
        "", "--cp 2", "--cp 3", "--cp 8", "--cp 4 --cp-order contiguous", "--cp 2 --context-parallel all-gather",
        "--cp 2 --context-parallel ulysses",
    ],
    "schedule": [None, *SCHEDULES],
    "sequence": [False, True],
    "microbatches": [1, 2, 3, 4, 8],
    "replicas": [1, 2, 4],  # of ZeRO's shards
    "zero": [0, 1, 2, 3],
    "recompute": [False, True],
    "dropout": [False, True],
    "model": ["gpt2", "llama", "mixtral"],
    "clip": [False, True],
    "reduction": ["ordered", "ring"],
}
# fmt: on


@dataclass(frozen=True)
class Combination:
    """One value of each axis. `str` is its command line."""

    layout: tuple[int, int, int]
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
    replicas: int = 1

    @property
    def cp(self) -> int:
        return context_ranks(self.context)

    @property
    def ranks(self) -> int:
        return int(np.prod(self.layout)) * self.cp

    @property
    def exact(self) -> bool:
        """Whether sums are taken in one device's order: a split matrix product adds its parts in another."""
        return self.reduction == "ordered" and self.layout[1] == 1 and not self.context

    def __str__(self) -> str:
        (dp, tp, pp), m = self.layout, self.microbatches
        line = f"--dp {dp} --tp {tp} --pp {pp} --zero-stage {self.zero} --microbatches {m}"
        line += f" --global-batch {dp * m * (2 if m < 3 else 1)} --reduction {self.reduction}"
        line += f" --model {self.model}" if self.model != "gpt2" else ""
        line += f" --schedule {self.schedule}" if self.schedule else ""
        line += f" {self.context}" if self.context else ""
        line += f" --zero-replicas {self.replicas}" if self.replicas > 1 else ""
        for flag, given in (("--sequence-parallel", self.sequence), ("--recompute full", self.recompute)):
            line += f" {flag}" if given else ""
        for flag, given in (("--dropout 0.1", self.dropout), ("--clip-grad 0.5", self.clip)):
            line += f" {flag}" if given else ""
        return line

    def config(self):
        stages = self.layout[2] * (2 if self.schedule in TWO_PER_RANK else 1)
        layers = next(n for n in LAYERS if n >= stages)
        tp, cp = self.layout[1], self.cp
        if self.model == "gpt2":
            hidden, heads, length = SHAPES[tp] if cp == 1 else CONTEXT_SHAPES[cp * tp % 3 == 0]
            shape = f"--hidden {hidden} --heads {heads} --seq-len {length}"
        else:
            sizes = LLAMAS[tp] if cp == 1 else CONTEXT_LLAMAS[cp * tp % 3 == 0]
            hidden, heads, kv_heads, ffn, length = sizes
            shape = f"--hidden {hidden} --heads {heads} --kv-heads {kv_heads} --ffn {ffn} --seq-len {length}"
            shape += " --experts 5 --top-k 2" if self.model == "mixtral" else ""
        line = f"--layers {layers} {shape} --vocab-size {VOCAB} --dtype float64 --eps {EPS} --steps {STEPS} {self}"
        return config_for(line, self.ranks)


# ---- which combinations ----------------------------------------------------------------------------------------------


def context_ranks(flags: str) -> int:
    """The cp of a value of the axis "context"."""
    return int(flags.split()[1]) if flags else 1


def legal(some: dict) -> bool:
    """Whether these values of some axes go together; the rest is refused, and other tests say how."""
    dp, tp, pp = some.get("layout", (None, None, None))
    if (replicas := some.get("replicas", 1)) > 1 and (some.get("zero") == 0 or (dp is not None and dp % replicas)):
        return False  # nothing to repeat, or groups of unequal size
    if {"layout", "context"} <= some.keys() and not 2 <= np.prod(some["layout"]) * context_ranks(some["context"]) <= 8:
        return False
    schedule, m = some.get("schedule", ...), some.get("microbatches")
    if pp is not None:
        if schedule is not ... and (schedule is None) != (pp == 1):
            return False  # a schedule is a pipeline's
        if m == 8 and pp < 8 and (schedule not in (..., "dualpipev") or pp < 3):
            return False  # allowed, and slow
        if schedule == "dualpipev" and (pp == 8 or (m is not None and m < 2 * pp)):
            return False  # it needs 2 pp microbatches
        if schedule == "interleaved-1f1b" and m is not None and m % pp:
            return False  # microbatches go through in groups of pp
    if some.get("dropout") and some.get("model") in ("llama", "mixtral"):
        return False  # which have none
    if some.get("dropout") and some.get("context", "") and "ulysses" not in some["context"]:
        return False  # no rank has all probabilities of a head
    return not (some.get("sequence") and tp == 1)


def pairs(some: dict) -> set:
    """The pairs of values of two axes that a choice covers."""
    return set(itertools.combinations([(axis, some[axis]) for axis in AXES if axis in some], 2))


def every_legal_pair() -> set:
    """Of all legal combinations, one by one."""
    found = set()
    for values in itertools.product(*list(AXES.values())[:6]):
        some = dict(zip(AXES, values, strict=False))
        if legal(some):
            found |= pairs(some)
    # The last six axes go with everything, but for stage 0 and replicas of shards, and dropout with Llama, Mixtral, or
    # a ring or an all-gather of keys.
    single = {item for pair in found for item in pair}
    free = [(axis, value) for axis in list(AXES)[6:] for value in AXES[axis]]
    found |= {(a, b) for a, b in itertools.product(single, free) if legal(dict([a, b]))}
    return found | {(a, b) for a, b in itertools.combinations(free, 2) if a[0] != b[0] and legal(dict([a, b]))}


@cache
def covering() -> tuple[Combination, ...]:
    """Combinations in which every legal pair of values occurs, each layout with each schedule and each stage included.

    Greedy and without chance: each begins with the first pair not covered yet, and takes axis after axis the value that
    covers most further ones; of equally good values the one whose pairs were taken least so far. Mixtral's combinations
    come after all others, which are thus the same with and without it.
    """
    taken: Counter = Counter()
    chosen: list[Combination] = []
    every = sorted(every_legal_pair(), key=repr)
    later = [pair for pair in every if ("model", "mixtral") in pair]
    for missing, models in (
        (dict.fromkeys(pair for pair in every if pair not in later), ["gpt2", "llama"]),
        (dict.fromkeys(later), ["mixtral"]),
    ):
        cover(missing, models, taken, chosen)
    return tuple(chosen)


def cover(missing: dict, models: list[str], taken: Counter, chosen: list[Combination]) -> None:
    """Append to `chosen` combinations with one of these models until no pair is missing."""
    while missing:
        some = dict(next(iter(missing)))
        for axis in AXES:
            if axis not in some:
                values = models if axis == "model" else AXES[axis]
                options = [v for v in values if legal({**some, axis: v})]

                def gain(value, axis=axis, some=some):
                    covered = pairs({**some, axis: value})
                    return sum(pair in missing for pair in covered), -sum(taken[pair] for pair in covered)

                some[axis] = max(options, key=gain)
        for pair in pairs(some):
            missing.pop(pair, None)
            taken[pair] += 1
        chosen.append(Combination(**some))


# ---- the check -------------------------------------------------------------------------------------------------------


def run_steps(trainer):
    """Take all steps: the parameters after each, what each reported, and the bytes that each sent by axis."""
    states, reports, sent = [], [], []
    traffic = trainer.mesh.world.traffic
    for step in range(STEPS):
        traffic.reset()
        result = trainer.step(step)
        sent.append({axis: traffic.bytes(axis=axis) for axis in DeviceMesh.AXES})
        reports.append((result.loss, result.grad_norm))
        states.append(trainer.state_dict())
    return states, reports, sent


@cache
def trained(config):
    return run_steps(OneDevice(config, TEXT))[:2]


def reference(config):
    """One device instead of all ranks: (parameters after each step, (loss, gradient norm) of each step).

    What cannot change a bit there is set to one value, so that combinations share a reference: how layers and steps
    are cut (but for whether they are: a pipeline's norm is summed part by part), and recompute.
    """
    mesh = dataclasses.replace(
        config.mesh, dp=config.mesh.dp, cp=1, context_parallel="ring", cp_order="zigzag", tp=1, ep=1, etp=None,
        pp=min(2, config.mesh.pp), schedule=None, zero_stage=0, sequence_parallel=False,
    )  # fmt: skip
    run = dataclasses.replace(config.run, recompute="none", reduction="ordered")
    return trained(dataclasses.replace(config, mesh=mesh, run=run))


def differences(states, reports, expected, exact: bool) -> list[str]:
    """Where states and reports differ from one device's: bit for bit, or by more than 1e-12 of an array's largest value
    after the first step and `bound` after the second.
    """
    wrong = []
    for step, (state, single) in enumerate(zip(states, expected[0], strict=True)):
        if list(state) != list(single):
            wrong.append(f"step {step}: parameters {sorted(set(state) ^ set(single))}")
            continue
        for name, array in single.items():
            limit = 1e-12 if step == 0 else bound("float64", step + 1)
            same = state[name].tobytes() == array.tobytes()
            if state[name].shape != array.shape or not (same or not exact):
                wrong.append(f"step {step}: {name} is not bit for bit")
            elif not relative_difference(state[name], array) <= limit:  # nan is no number's equal
                wrong.append(f"step {step}: {name} by {relative_difference(state[name], array):.3g}")
    for step, (report, single) in enumerate(zip(reports, expected[1], strict=True)):
        for what, x, y in zip(("loss", "gradient norm"), report, single, strict=True):
            if x != y if exact else not abs(x - y) <= 1e-12 * abs(y):
                wrong.append(f"step {step}: {what} {x!r} is not {y!r}")
    return wrong


def same_on_tensor_ranks(trainer) -> bool:
    """Whether the ranks of this tp axis hold the same bits of what each of them holds whole."""
    whole = [p.data.tobytes() for p in trainer.ddp.parameters() if not isinstance(p.placement.tp, Shard)]
    return len(set(trainer.mesh.tp.all_gather_bytes(hashlib.sha256(b"".join(whole)).digest()))) == 1


def check(comm, combination: Combination, kind: type[Trainer] = Trainer) -> list[str]:
    """What this rank finds wrong with a combination; collective."""
    return check_config(comm, combination.config(), combination.exact, kind)


def check_config(comm, config, exact: bool = False, kind: type[Trainer] = Trainer) -> list[str]:
    """What this rank finds wrong with a run of STEPS steps; collective. Rank 0 compares with one device; all compare
    what they report and hold with one another, and what they sent in a step with the closed form.
    """
    mesh = config.mesh
    trainer = kind(config, DeviceMesh(comm, mesh.dp, mesh.tp, mesh.pp, mesh.cp, mesh.ep, mesh.etp), TEXT)
    states, reports, sent = run_steps(trainer)
    wrong = []
    expected = predicted_traffic(step_layout(config), comm.rank)
    wrong += [f"sent {count}, predicted {expected}" for count in sent if count != expected]
    if not same_on_all_ranks(trainer):
        wrong.append("replicas hold different parameters")
    if not same_on_tensor_ranks(trainer):
        wrong.append("tensor-parallel ranks hold different parameters")
    everyone = comm.all_gather_bytes(repr(reports).encode())
    if everyone[comm.rank] != everyone[0]:
        wrong.append("differs from rank 0")
    if comm.rank == 0:
        wrong += differences(states, reports, reference(config), exact)
    return wrong


def check_all(comm, combinations) -> int:
    """Check combinations in a job under mpirun: rank 0 prints a line for each. Returns the exit code."""
    bad = 0
    for combination in combinations:
        wrong = [line.decode() for line in comm.all_gather_bytes("; ".join(check(comm, combination)).encode())]
        bad += any(wrong)
        if comm.rank == 0:
            print(f"{'WRONG' if any(wrong) else 'equal'} {combination} {wrong if any(wrong) else ''}", flush=True)
    return 1 if bad else 0
