"""Check your own framework: a tensor-parallel loop in plain torch.distributed, recorded, and compared with minipar.

    python check_torch.py OUT

trains two processes of torch and one device of minipar, and compares. Then it leaves out one all-reduce of backward and
compares again, to see that the check notices. It needs minipar and torch, no GPU and no MPI, and takes some seconds.
Copy the file, put your model in the place of `loss_of` and your layout in the place of SPLIT. The records stay in OUT.
"""

import argparse
import os
import sys
from pathlib import Path

import numpy as np

import minipar as mp
from minipar.compare.differences import as_text, compare
from minipar.compare.record import Record

try:
    import torch
    import torch.distributed as dist
    from torch.nn.functional import cross_entropy, embedding, rms_norm, scaled_dot_product_attention, silu
except ImportError:
    sys.exit("torch is not installed, so nothing was compared: pip install torch")

RANKS, STEPS, BATCH, LENGTH, LR = 2, 5, 8, 16, 3e-3
CONFIG = mp.LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=LENGTH,
)
FACTS = {"dtype": "float32", "microbatches": 1, "tokens": BATCH * LENGTH}
# Tensor parallelism: the dim along which a rank has its part of a weight (out, in). All others are whole.
SPLIT = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "o_proj": 1, "gate_proj": 0, "up_proj": 0, "down_proj": 1}


def batch(step):
    """Return inputs and targets (B, T) of a step: the same for both programs."""
    tokens = np.random.default_rng(step).integers(0, CONFIG.vocab_size, (BATCH, LENGTH + 1))
    return tokens[:, :-1], tokens[:, 1:]


def start():
    """Return the model that both programs start from."""
    return mp.Llama(CONFIG, seed=1)


# ---- minipar, on one device ------------------------------------------------------------------------------------------


def train_minipar(directory):
    """Train and record one device."""
    model = start()
    optimizer = mp.AdamW(model.parameters(), lr=LR)
    values = {name: parameter.data for name, parameter in model.named_parameters()}
    record = Record(directory, values, **FACTS)
    for step in range(STEPS):
        loss = model.loss_sum(*batch(step)) / (BATCH * LENGTH)
        loss.backward()
        gradients = {name: parameter.grad.copy() for name, parameter in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        record.step(step, loss.item(), norm_of(gradients), gradients, values)


def norm_of(gradients):
    return np.sqrt(sum((gradient.astype(float) ** 2).sum() for gradient in gradients.values()))


# ---- torch.distributed, on two processes -----------------------------------------------------------------------------


class Enter(torch.autograd.Function):
    """Megatron's f: the identity; backward sums the gradient over the ranks."""

    forget = False

    @staticmethod
    def forward(context, x):
        return x.view_as(x)

    @staticmethod
    def backward(context, gradient):
        gradient = gradient.contiguous()
        if not Enter.forget:
            dist.all_reduce(gradient)
        return gradient


class Leave(torch.autograd.Function):
    """Megatron's g: forward sums over the ranks; backward is the identity."""

    @staticmethod
    def forward(context, x):
        x = x.contiguous()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(context, gradient):
        return gradient


def rotate(x):
    """Apply rotary positions to queries or keys, (B, heads, T, D)."""
    half = x.shape[-1] // 2
    frequencies = CONFIG.rope_theta ** (-torch.arange(half) / half)
    angles = torch.outer(torch.arange(LENGTH), frequencies)  # (T, D/2)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


def loss_of(weights, inputs, targets):
    """Return the mean loss of a Llama whose blocks are split over the ranks; its names are Hugging Face's."""
    x = embedding(inputs, weights["model.embed_tokens.weight"])  # (B, T, h)

    def normed(x, name):
        return rms_norm(x, x.shape[-1:], weights[name], CONFIG.rms_norm_eps)

    for layer in range(CONFIG.num_hidden_layers):
        name = f"model.layers.{layer}"
        h = Enter.apply(normed(x, f"{name}.input_layernorm.weight"))
        parts = [h @ weights[f"{name}.self_attn.{kind}_proj.weight"].T for kind in "qkv"]  # (B, T, h/t)
        q, k, v = (part.unflatten(-1, (-1, CONFIG.head_size)).transpose(1, 2) for part in parts)
        y = scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + Leave.apply(y @ weights[f"{name}.self_attn.o_proj.weight"].T)
        h = Enter.apply(normed(x, f"{name}.post_attention_layernorm.weight"))
        gate, up = (h @ weights[f"{name}.mlp.{kind}_proj.weight"].T for kind in ("gate", "up"))  # (B, T, f/t)
        x = x + Leave.apply((silu(gate) * up) @ weights[f"{name}.mlp.down_proj.weight"].T)
    logits = normed(x, "model.norm.weight") @ weights["lm_head.weight"].T  # (B, T, V)
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def split_dim(name):
    """Return the dim along which a weight is split, None if it is whole."""
    return SPLIT.get(name.split(".")[-2])


def whole(tensors):
    """Put the ranks' parts together: whole arrays by name, as the record needs them."""
    arrays = {}
    for name, part in tensors.items():
        dim = split_dim(name)
        if dim is not None:
            parts = [torch.empty_like(part) for _ in range(RANKS)]
            dist.all_gather(parts, part.contiguous())
            part = torch.cat(parts, dim)
        arrays[name] = part.detach().numpy().copy()
    return arrays


def worker(rank, folder):
    """Train on this process as it should be, and then with a mistake."""
    torch.set_num_threads(1)
    meeting = dist.FileStore(f"{folder}/meeting", RANKS)
    dist.init_process_group("gloo", store=meeting, rank=rank, world_size=RANKS)
    train_torch(rank, f"{folder}/torch")
    Enter.forget = True
    train_torch(rank, f"{folder}/forgets")
    dist.barrier()  # or one process may end its threads while the other still sends
    # gloo's threads can abort a process that has computed everything, while the interpreter ends: end without it.
    os._exit(0)


def train_torch(rank, directory):
    """Train on this process; rank 0 records."""
    weights = {}
    for name, parameter in start().named_parameters():
        part = torch.tensor(parameter.data)
        if split_dim(name) is not None:
            part = part.chunk(RANKS, split_dim(name))[rank].contiguous()
        weights[name] = part.requires_grad_()
    matrices = [weight for weight in weights.values() if weight.ndim >= 2]
    vectors = [weight for weight in weights.values() if weight.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR)

    first = whole(weights)
    record = Record(directory, first, tp=RANKS, **FACTS) if rank == 0 else None
    for step in range(STEPS):
        inputs, targets = (torch.tensor(each) for each in batch(step))
        loss = loss_of(weights, inputs, targets)
        optimizer.zero_grad()
        loss.backward()
        gradients = whole({name: weight.grad for name, weight in weights.items()})  # every rank calls it
        optimizer.step()
        parameters = whole(weights)
        if record is not None:
            record.step(step, loss.item(), norm_of(gradients), gradients, parameters)


def main():
    """Record both programs, compare, and print what compare says. Exit with 1 if it is not what it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", metavar="OUT", help="a new directory")
    folder = Path(parser.parse_args().out).resolve()
    folder.mkdir(parents=True)
    train_minipar(folder / "minipar")
    torch.multiprocessing.spawn(worker, (str(folder),), nprocs=RANKS)
    right, wrong = (compare(folder / "minipar", folder / name) for name in ("torch", "forgets"))
    print(f"two processes of torch, one device of minipar\n{as_text(right)}")
    print(f"the same, without an all-reduce of backward\n{as_text(wrong)}", end="")
    return 0 if right.equal and not wrong.equal else 1


if __name__ == "__main__":
    sys.exit(main())
