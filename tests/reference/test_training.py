"""Against 20 steps of PyTorch: transformers' GPT-2 and torch.optim.AdamW on the tokens that --order sequential defines.

The whole program is compared, from the command line to the metrics file, on one rank and on several.
"""

import json
import math

import numpy as np
import pytest
import torch
from launcher import run_mpi
from transformers import GPT2LMHeadModel

from minipar.nn import GPT, GPTConfig
from minipar.train.pretrained import save_pretrained

SEQ_LEN, BATCH, STEPS, LR = 16, 12, 20, 3e-3
CONFIG = GPTConfig(vocab_size=300, n_positions=SEQ_LEN, n_embd=32, n_layer=2, n_head=4)
VARIANTS = {
    "plain": ("", {}),
    "schedule, decay, clipping": (
        "--weight-decay 0.1 --clip-grad 0.8 --warmup-steps 4 --lr-schedule cosine --betas 0.9 0.95",
        {"weight_decay": 0.1, "clip": 0.8, "warmup": 4, "cosine": True, "betas": (0.9, 0.95)},
    ),
}


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A directory with weights, and a .bin short enough that the text wraps round during the 20 steps."""
    folder = tmp_path_factory.mktemp("start")
    save_pretrained(GPT(CONFIG, seed=4, dtype="float64"), folder / "gpt2")
    random = np.random.Generator(np.random.Philox(11))
    random.integers(0, 20, 2501).astype("<u2").tofile(folder / "tokens.bin")
    return folder


def torch_losses(start, *, weight_decay=0.01, clip=None, warmup=0, cosine=False, betas=(0.9, 0.999)):
    model = GPT2LMHeadModel.from_pretrained(start / "gpt2", dtype=torch.float64)
    model.eval()  # GPT-2's configuration here has dropout; the training below has none
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=betas, eps=1e-8)
    tokens = np.fromfile(start / "tokens.bin", "<u2").astype(np.int64)
    losses, norms = [], []
    for step in range(STEPS):
        # Position k of sample i of step s is token ((s*B + i)*T + k) mod (n - 1), its target the one after it.
        position = (step * BATCH + np.arange(BATCH))[:, None] * SEQ_LEN + np.arange(SEQ_LEN)
        position %= len(tokens) - 1
        logits = model(torch.tensor(tokens[position])).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.tensor(tokens[position + 1]).flatten())
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip or math.inf).item())
        rate = LR
        if step < warmup:
            rate = LR * (step + 1) / (warmup + 1)
        elif cosine:
            rate = LR * (0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / (STEPS - 1 - warmup))))
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        losses.append(loss.item())
    return losses, norms


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("name", VARIANTS)
def test_20_steps_of_adamw_agree_with_torch(name, ranks, start, tmp_path):
    flags, settings = VARIANTS[name]
    line = (
        f"-m minipar.train --init-from {start}/gpt2 --data {start}/tokens.bin --order sequential --seq-len {SEQ_LEN} "
        f"--global-batch {BATCH} --microbatches 3 --steps {STEPS} --lr {LR} --dtype float64 "
        f"--metrics {tmp_path}/m.jsonl {flags}"
    )
    result = run_mpi(ranks, line.split(), timeout=120)
    assert result.returncode == 0, result.stderr
    ours = [json.loads(text) for text in (tmp_path / "m.jsonl").read_text().splitlines()]
    losses, norms = torch_losses(start, **settings)
    assert losses[-1] < losses[0] - 0.05
    np.testing.assert_allclose([step["loss"] for step in ours], losses, rtol=0, atol=1e-9)
    np.testing.assert_allclose([step["grad_norm"] for step in ours], norms, rtol=1e-8)
