"""What a training step is, without the Trainer: a GPT's loss and backward, and everything else in NumPy.

`--verify` compares the Trainer with the Trainer, so a flag that it ignores is ignored on both sides. This loop computes
the same steps from the documented formulas and imports nothing from minipar.train or minipar.parallel.
"""

import hashlib
import math
from dataclasses import dataclass

import numpy as np

from minipar.nn import GPT
from minipar.nn.layers import DropoutKeys, dropping


@dataclass(frozen=True)
class Recipe:
    """What decides a step besides the model and the text, under the names of the flags."""

    steps: int
    seq_len: int
    global_batch: int
    microbatches: int
    order: str
    seed: int
    lr: float
    lr_schedule: str
    warmup_steps: int
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    clip_grad: float
    replicas: int = 1  # whose gradients are computed one after another, and added in this order


def sample_starts(recipe: Recipe, step: int, text_length: int) -> np.ndarray:
    """Return the text position of the first token of each sample of the step, (B,)."""
    if recipe.order == "sequential":
        return (step * recipe.global_batch + np.arange(recipe.global_batch)) * recipe.seq_len
    key = int.from_bytes(hashlib.sha256(f"{recipe.seed}:data".encode()).digest()[:16], "little")
    draws = np.random.Philox(key=key, counter=step << 64).random_raw(recipe.global_batch)
    return (draws % np.uint64(text_length - recipe.seq_len)).astype(np.int64)


def learning_rate(recipe: Recipe, step: int) -> float:
    """Return the rate of a step: a linear rise, then constant or half a cosine that ends at a tenth in the last."""
    if step < recipe.warmup_steps:
        return recipe.lr * (step + 1) / (recipe.warmup_steps + 1)
    if recipe.lr_schedule == "constant":
        return recipe.lr
    progress = (step - recipe.warmup_steps) / max(1, recipe.steps - 1 - recipe.warmup_steps)
    return recipe.lr * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress)))


def global_norm(gradients: dict[str, np.ndarray]) -> float:
    """Return the 2-norm of all gradients. The squares of a block, and of all that is outside of blocks, add up first.

    This order, and float64 for the sums, give the Trainer's bits for parameters of up to 32,768 elements.
    """
    sums = {"outside": 0.0}
    for name, g in gradients.items():
        unit = ".".join(name.split(".")[:2]) if name.startswith("h.") else "outside"
        sums[unit] = sums.get(unit, 0.0) + float((g * g).reshape(-1).sum(dtype="float64"))
    total = 0.0
    for unit_sum in sums.values():  # not sum(), which is compensated from Python 3.12 on
        total += unit_sum
    return math.sqrt(total)


def train(model: GPT, text: np.ndarray, recipe: Recipe) -> list[tuple[float, float]]:
    """Train `model` in place; return the mean loss in nats per token and the gradient norm of each step."""
    parameters = dict(model.named_parameters())
    m = {name: np.zeros_like(p.data) for name, p in parameters.items()}
    v = {name: np.zeros_like(p.data) for name, p in parameters.items()}
    beta1, beta2 = recipe.betas
    tokens, reports = recipe.global_batch * recipe.seq_len, []
    for step in range(recipe.steps):
        positions = sample_starts(recipe, step, len(text))[:, None] + np.arange(recipe.seq_len)  # (B, T)
        if recipe.order == "sequential":
            positions %= len(text) - 1  # the text again and again

        # The gradient of the global batch's mean loss, replica after replica and microbatch after microbatch.
        gradients, loss_sum = {}, 0.0
        size = recipe.global_batch // (recipe.replicas * recipe.microbatches)
        for replica in range(recipe.replicas):
            model.zero_grad()
            replica_loss = 0.0
            for microbatch in range(recipe.microbatches):
                first = (replica * recipe.microbatches + microbatch) * size
                samples = range(first, first + size)
                inputs, targets = (text[positions[first : first + size] + k].astype(np.int64) for k in (0, 1))
                with dropping(DropoutKeys(recipe.seed, step, samples)):
                    loss = model.loss_sum(inputs, targets)
                loss.backward(np.full_like(loss.data, 1 / tokens))
                replica_loss += loss.item()
            model.wte.weight.fold_tied_gradients()  # the head's gradient is the embedding's too
            for name, p in parameters.items():
                gradients[name] = p.grad if replica == 0 else gradients[name] + p.grad
            loss_sum += replica_loss
        norm = global_norm(gradients)
        if recipe.clip_grad and norm > recipe.clip_grad:
            gradients = {name: g * (recipe.clip_grad / (norm + 1e-6)) for name, g in gradients.items()}

        # AdamW as torch.optim.AdamW orders it: m + (1 - b1)(g - m) and b1 m + (1 - b1) g round differently.
        lr, t = learning_rate(recipe, step), step + 1
        for name, p in parameters.items():
            g = gradients[name]
            m[name] = m[name] + (1 - beta1) * (g - m[name])
            v[name] = beta2 * v[name] + (1 - beta2) * (g * g)
            decay = recipe.weight_decay if p.ndim >= 2 else 0.0
            denominator = np.sqrt(v[name]) / math.sqrt(1 - beta2**t) + recipe.eps
            p.data[...] = (1 - lr * decay) * p.data - lr / (1 - beta1**t) * (m[name] / denominator)
        reports.append((loss_sum / tokens, norm))
    return reports
