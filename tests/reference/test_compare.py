"""A torch loop writes the records of `minipar.compare` with a copy of minipar/compare/record.py, and nothing else.

Its record equals that of minipar on one rank and on several. Then mistakes are planted in the loop, and `compare` names
the parameters and the factor of each.
"""

import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from launcher import ROOT, run_mpi
from transformers import GPT2LMHeadModel

from minipar.compare.differences import as_text, compare
from minipar.nn import GPT, GPTConfig
from minipar.train.pretrained import save_pretrained

SEQ_LEN, BATCH, MICROBATCHES, STEPS, LR = 16, 12, 3, 3, 3e-3
CONFIG = GPTConfig(vocab_size=64, n_positions=SEQ_LEN, n_embd=32, n_layer=2, n_head=4)
FLAGS = f"--seq-len {SEQ_LEN} --global-batch {BATCH} --steps {STEPS} --lr {LR} --order sequential --dtype float64"
LINES = (ROOT / "minipar" / "compare" / "record.py").read_text()


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A directory with weights, of which no bias is zero, tokens, and minipar's record on one rank."""
    folder = tmp_path_factory.mktemp("start")
    model = GPT(CONFIG, seed=4, dtype="float64")
    random = np.random.Generator(np.random.Philox(11))
    for parameter in model.parameters():
        parameter.data += 0.05 * random.standard_normal(parameter.shape)
    save_pretrained(model, folder / "gpt2")
    random.integers(0, 64, 2501).astype("<u2").tofile(folder / "tokens.bin")
    record_of_minipar(folder, folder / "one", 1, f"--microbatches {MICROBATCHES}")
    return folder


def record_of_minipar(start: Path, directory: Path, ranks: int, flags: str) -> None:
    files = ["--init-from", str(start / "gpt2"), "--data", str(start / "tokens.bin"), "--record", str(directory)]
    result = run_mpi(ranks, ["-m", "minipar.train", *FLAGS.split(), *flags.split(), *files])
    assert result.returncode == 0, result.stderr


class Loop:
    """The training loop of a torch user, with a method for each place in which somebody made a mistake."""

    dp, tp, microbatches = 1, 1, MICROBATCHES

    def __init__(self, start: Path, directory: Path) -> None:
        self.model = GPT2LMHeadModel.from_pretrained(start / "gpt2", dtype=torch.float64).eval()
        self.tokens = np.fromfile(start / "tokens.bin", "<u2").astype(np.int64)
        self.directory = directory

    def train(self) -> None:
        copied: dict = {}
        exec(LINES, copied)  # what the user has pasted into the loop's file
        optimizer = self.optimizer()
        facts = {
            "dtype": "float64",
            "dp": self.dp,
            "tp": self.tp,
            "microbatches": self.microbatches,
            "tokens": BATCH * SEQ_LEN,
        }
        record = copied["Record"](self.directory, self.arrays(lambda p: p), **facts)
        for step in range(STEPS):
            optimizer.zero_grad()
            total = 0.0
            for microbatch in range(self.microbatches):
                loss = self.loss(*self.batch(step, microbatch))
                self.backward(loss, microbatch)
                total += loss.item() / self.microbatches
            self.after_backward()
            gradients = self.arrays(lambda p: p.grad)
            norm = math.sqrt(sum((gradient**2).sum() for gradient in gradients.values()))
            optimizer.step()
            record.step(step, total, norm, gradients, self.arrays(lambda p: p))

    def arrays(self, what) -> dict[str, np.ndarray]:
        """Return what of each parameter, by the name that minipar gives it."""
        named = self.model.named_parameters()
        return {name.removeprefix("transformer."): what(p).detach().numpy().copy() for name, p in named}

    def optimizer(self):
        matrices = [p for p in self.model.parameters() if p.ndim >= 2]
        vectors = [p for p in self.model.parameters() if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=LR)

    def batch(self, step: int, microbatch: int):
        size = BATCH // self.microbatches
        first = step * BATCH + microbatch * size
        position = (first + np.arange(size))[:, None] * SEQ_LEN + np.arange(SEQ_LEN)
        position %= len(self.tokens) - 1
        return torch.tensor(self.tokens[position]), torch.tensor(self.tokens[position + 1])

    def loss(self, inputs, targets):
        logits = self.model(inputs).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def backward(self, loss, microbatch: int) -> None:
        (loss / self.microbatches).backward()

    def after_backward(self) -> None:
        pass

    def scale(self, factor: float, *patterns: str) -> None:
        """Multiply the gradients of the parameters whose names contain one of the patterns."""
        for name, p in self.model.named_parameters():
            if any(pattern in name for pattern in patterns):
                p.grad *= factor


def test_a_torch_loop_that_copies_the_lines_has_an_equal_record(start, tmp_path):
    assert len(LINES.splitlines()) <= 80
    Loop(start, tmp_path / "torch").train()
    record_of_minipar(start, tmp_path / "four", 4, "--dp 2 --tp 2 --zero-stage 2 --microbatches 3")
    for record in ("four", "torch"):
        finding = compare(start / "one", tmp_path / record)
        assert finding.equal and finding.steps == STEPS, as_text(finding)


# ---- mistakes --------------------------------------------------------------------------------------------------------


class NotDivided(Loop):
    """Accumulation without the division by its steps (nanoGPT's readers, build-nanogpt)."""

    def backward(self, loss, microbatch):
        loss.backward()


class DividedTwice(Loop):
    """The trainer divides by the accumulation steps, and the library does so again."""

    def backward(self, loss, microbatch):
        (loss / self.microbatches**2).backward()


class SummedTokens(Loop):
    """reduction="sum" in one place."""

    def backward(self, loss, microbatch):
        (loss * BATCH * SEQ_LEN / self.microbatches).backward()


class LastOnly(Loop):
    """zero_grad() inside the loop over microbatches."""

    def backward(self, loss, microbatch):
        self.model.zero_grad()
        super().backward(loss, microbatch)


class Scaled(Loop):
    """The gradients of some parameters are multiplied, as where ranks or microbatches are counted once too often."""

    def __init__(self, start, directory, factor, only=("",), dp=1):
        super().__init__(start, directory)
        self.factor, self.only, self.dp = factor, only, dp

    def after_backward(self):
        self.scale(self.factor, *self.only)


class RowsOfOneRank(Loop):
    """The gradient of one tensor-parallel rank's rows is summed twice."""

    tp = 2

    def after_backward(self):
        for name, p in self.model.named_parameters():
            if name.endswith("c_proj.weight"):
                p.grad[len(p) // 2 :] *= 2


class LossOnly(Loop):
    """Only the reported loss is wrong: that of logits that were gathered twice (Megatron-LM 7452)."""

    dp = 2

    def loss(self, inputs, targets):
        return super().loss(inputs, targets) + math.log(2)


class DecaysEverything(Loop):
    """Weight decay of norms and biases too."""

    def optimizer(self):
        return torch.optim.AdamW(self.model.parameters(), lr=LR, weight_decay=0.01)


class HalfTheRate(Loop):
    """A warm-up that the other run has not."""

    def optimizer(self):
        optimizer = super().optimizer()
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
        return optimizer


MISTAKES = {  # the loop; and the quantity, the factor, the parameters and the cause that are named
    "not divided": (NotDivided, "gradient", 3, "all parameters", "3 = microbatches: "),
    "divided twice": (DividedTwice, "gradient", 1 / 3, "all parameters", "1/3 = 1/microbatches: "),
    "summed tokens": (SummedTokens, "gradient", 192, "all parameters", "192 = tokens: "),
    "the last microbatch only": (LastOnly, "gradient", None, "all parameters", "other data, masks or order"),
    "a part of tensor parallelism": (
        RowsOfOneRank, "gradient", 2, "tp rank 1's part (of 2) of attn.c_proj.weight, mlp.c_proj.weight", "2 = tp: ",
    ),
    "the loss only": (LossOnly, "loss", None, "", "B - A = log 2 = log dp: "),
    "everything decays": (DecaysEverything, "update", None, "", "weight decay, betas, eps"),
    "half the rate": (HalfTheRate, "update", 0.5, "all parameters", "the learning rate"),
    "summed over ranks": (partial(Scaled, factor=4, dp=4), "gradient", 4, "all parameters", "4 = dp: "),
    "norms summed": (partial(Scaled, factor=2, only=("ln_",), dp=2), "gradient", 2, "the norms", "2 = dp: "),
    "frozen positions": (partial(Scaled, factor=0, only=("wpe",)), "gradient", 0, "wpe.weight", "missing in B"),
    "tied twice": (partial(Scaled, factor=2, only=("wte",), dp=2), "gradient", 2, "the token embedding", "2 = dp"),
    "one stage": (
        partial(Scaled, factor=3, only=(".h.1.", "ln_f")), "gradient", 3, "block 1 and ln_f.weight", "3 = microb",
    ),
    "a wrong sign": (
        partial(Scaled, factor=-1, only=(".h.0.mlp.",)), "gradient", -1, "h.0.mlp.c_fc.weight", "a wrong sign",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_the_torch_loop_is_named(name, start, tmp_path):
    loop, quantity, ratio, group, cause = MISTAKES[name]
    loop(start, tmp_path / "torch").train()
    finding = compare(start / "one", tmp_path / "torch")
    assert finding.step == 0, as_text(finding)
    found = finding.differences[0]
    assert found.quantity == quantity and group in found.group, as_text(finding)
    if quantity != "loss":
        assert found.ratio == (None if ratio is None else pytest.approx(ratio, rel=1e-3))
    assert any(text.startswith(cause) for text in found.causes), as_text(finding)
