"""Against PyTorch's own distributed training: the same GPT, tokens and AdamW, one and three steps, 2 and 4 processes.

torch's processes talk over gloo; minipar's ranks are threads. Of every step these are compared: the loss, the gradient
norm before clipping, every gradient before clipping, and every parameter after the update. Both sides clip, so
that the norm is also in the parameters.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from training import config_for, on_each_rank

from chapters.support.whole_runs import relative_difference
from minipar.nn import GPT, GPTConfig
from minipar.parallel.state import gather_state
from minipar.train.data import Batches, Tokens
from minipar.train.pretrained import save_pretrained
from minipar.train.trainer import Trainer

VOCAB, LENGTH, HIDDEN, HEADS, BATCH, STEPS = 64, 8, 32, 4, 8, 3
# A keys' bias has no gradient but rounding, which AdamW divides by eps: see tests/helpers/tensor_cases.py.
SETTINGS = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-5, "clip": 0.25}
TEXT = Tokens(np.random.Generator(np.random.Philox(41)).integers(0, VOCAB, 500).astype(np.uint8), "random text")
DEADLINE = 400  # seconds, for all cases together


@dataclass(frozen=True)
class Case:
    """One strategy of torch's and minipar's flags for the same."""

    strategy: str
    flags: str
    processes: int
    microbatches: int = 1
    layers: int = 2
    heads: int = HEADS

    @property
    def name(self) -> str:
        return f"{self.strategy}-{self.processes}" + (f"-m{self.microbatches}" if self.microbatches > 1 else "")


CASES = [
    *[Case("ddp", f"--dp {n}", n, m) for n in (2, 4) for m in (1, 2)],
    *[Case("zero-1", f"--dp {n} --zero-stage 1", n) for n in (2, 4)],
    *[Case("fully-shard-keeps", f"--dp {n} --zero-stage 2", n) for n in (2, 4)],
    *[Case("fully-shard", f"--dp {n} --zero-stage 3", n, m) for n in (2, 4) for m in (1, 2)],
    *[Case("hybrid-shard", f"--dp {n} --zero-stage 3 --zero-replicas 2", n, m) for n in (2, 4) for m in (1, 2)],
    *[Case("tensor", f"--tp {n}", n) for n in (2, 4)],
    *[Case("tensor-sequence", f"--tp {n} --sequence-parallel", n) for n in (2, 4)],
    Case("fully-shard-tensor-sequence", "--dp 2 --tp 2 --zero-stage 3 --sequence-parallel", 4, 2),
    *[Case(name, f"--pp {n} --schedule {name}", n, 4, n) for n in (2, 4) for name in ("gpipe", "1f1b", "zb-h1")],
    # Two stages on each process.
    *[Case(name, f"--pp {n} --schedule {name}", n, 4, 2 * n) for n in (2, 4) for name in ("interleaved-1f1b", "zbv")],
    *[Case("dualpipev", f"--pp {n} --schedule dualpipev", n, 2 * n, 2 * n) for n in (2, 4)],
]


# ---- minipar ---------------------------------------------------------------------------------------------------------


class Recording(Trainer):
    """A trainer that keeps the gradients of each step before it clips them, and the parameters after the step."""

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self.gradients: list[dict] = []
        self.states: list[dict] = []

    def clip_grad_norm(self, max_norm):
        parameters = self.ddp.parameters()
        self.gradients.append(gather_state(self.model, parameters, self.mesh.world, [p.grad for p in parameters]))
        return super().clip_grad_norm(max_norm)

    def step(self, step):
        result = super().step(step)
        self.states.append(self.state_dict())
        return result


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A directory for each number of layers, with weights of which no bias is zero."""
    folder = tmp_path_factory.mktemp("start")
    for layers in {case.layers for case in CASES}:
        model = GPT(GPTConfig(VOCAB, LENGTH, HIDDEN, layers, HEADS), seed=4, dtype="float64")
        random = np.random.Generator(np.random.Philox(layers))
        for parameter in model.parameters():
            parameter.data += 0.1 * random.standard_normal(parameter.shape)
        save_pretrained(model, folder / f"{layers}")
        np.savez(folder / f"{layers}.npz", **model.state_dict())
    return folder


@cache
def minipar_steps(flags: str, microbatches: int, weights: Path) -> list[dict]:
    """Train with minipar on threads; return loss, norm, gradients and parameters of each step."""
    line = (
        f"--init-from {weights} --seq-len {LENGTH} --global-batch {BATCH} --microbatches {microbatches} "
        f"--steps {STEPS} --dtype float64 --order sequential --lr {SETTINGS['lr']} --eps {SETTINGS['eps']} "
        f"--weight-decay {SETTINGS['weight_decay']} --clip-grad {SETTINGS['clip']} {flags}"
    )

    def steps(trainer, results):
        arrays = zip(results, trainer.gradients, trainer.states, strict=True)
        return [
            {"loss": result.loss, "norm": result.grad_norm}
            | {f"gradient/{name}": array for name, array in gradients.items()}
            | {f"parameter/{name}": array for name, array in state.items()}
            for result, gradients, state in arrays
        ]

    return on_each_rank(config_for(line), TEXT, steps, Recording)[0]


# ---- torch -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def torch_folder(request, start, tmp_path_factory):
    """The folder with the results of torch's processes, which run once, and only the cases that pytest was asked for.

    The processes are one process group, which is killed at the deadline.
    """
    folder = tmp_path_factory.mktemp("torch")
    wanted = [item.callspec.params.get("case") for item in request.session.items if hasattr(item, "callspec")]
    cases = [{"name": case.name} | asdict(case) for case in CASES if case in wanted]
    (folder / "job.json").write_text(json.dumps({"settings": SETTINGS, "cases": cases}))
    batches = Batches(TEXT, LENGTH, BATCH, "sequential", seed=0)
    inputs, targets = zip(*(batches.batch(step, range(BATCH)) for step in range(STEPS)), strict=True)
    np.savez(folder / "batches.npz", inputs=inputs, targets=targets)
    for weights in start.glob("*.npz"):
        (folder / weights.name).symlink_to(weights)
    command = [sys.executable, str(Path(__file__).with_name("torch_ranks.py")), str(folder)]
    with open(folder / "stderr", "wb") as stderr:
        job = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=stderr, start_new_session=True)
        try:
            job.wait(DEADLINE)
        except subprocess.TimeoutExpired:
            stderr.write(f"torch's processes did not end in {DEADLINE} s".encode())
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
            job.wait()
    return folder


def torch_steps(case: Case, folder: Path) -> list[list[dict]]:
    """Return loss, norm, gradients and parameters of each step, of each process."""
    results = []
    for rank in range(case.processes):
        file = folder / f"{case.name}.{rank}.npz"
        assert file.exists(), f"process {rank} did not finish {case.name}\n{(folder / 'stderr').read_text()}"
        arrays = np.load(file)
        split = [key.split("/", 1) for key in arrays.files]
        results.append([{name: arrays[f"{s}/{name}"] for step, name in split if int(step) == s} for s in range(STEPS)])
    return results


# ---- the comparison --------------------------------------------------------------------------------------------------


def differences(ours: list[dict], theirs: list[list[dict]]) -> list[str]:
    """Return what differs: by 1e-12 of the array's largest element in the first step, by 1e-10 afterwards.

    Every process's arrays are compared. Together they have all of minipar's.
    """
    wrong = []
    for step, expected in enumerate(ours):
        limit = 1e-12 if step == 0 else 1e-10
        missing = set(expected) - {name for process in theirs for name in process[step]}
        wrong += [f"step {step}: no process has {name}" for name in sorted(missing)]
        for rank, process in enumerate(theirs):
            for name, array in process[step].items():
                difference = relative_difference(np.asarray(array), np.asarray(expected[name]))
                if not difference <= limit:  # nan is no number's equal
                    wrong.append(f"step {step}: {name} of process {rank} by {difference:.3g}")
    return wrong


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_torchs_own_strategy_gives_minipars_values(case, start, torch_folder):
    ours = minipar_steps(case.flags, case.microbatches, start / f"{case.layers}")
    assert all(step["norm"] > SETTINGS["clip"] for step in ours), "clipping did not happen"
    wrong = differences(ours, torch_steps(case, torch_folder))
    assert not wrong, "\n".join(wrong)
