"""Chapter 10 in PyTorch: a model of 7.5 billion parameters on the device "meta", counted and not computed.

Run it with: python chapters/pytorch/ch10.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.flop_counter import FlopCounterMode
from two_processes import start

LAYERS, H, HEADS, V, T = 36, 4096, 32, 51_200, 2048  # megatron-7.5b


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.c_attn, self.c_proj = nn.LayerNorm(H), nn.Linear(H, 3 * H), nn.Linear(H, H)
        self.mlp = nn.Sequential(nn.LayerNorm(H), nn.Linear(H, 4 * H), nn.GELU(), nn.Linear(4 * H, H))

    def forward(self, x):  # (T, H): one sample
        q, k, v = self.c_attn(self.ln_1(x)).view(T, 3, HEADS, H // HEADS).permute(1, 2, 0, 3)  # (HEADS, T, H/HEADS)
        attention = (q @ k.mT).softmax(dim=-1) @ v  # scale and mask are no products; every token sees all, as in 10.1
        x = x + self.c_proj(attention.transpose(0, 1).reshape(T, H))
        return x + self.mlp(x)


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe, self.ln_f = nn.Embedding(V, H), nn.Embedding(T, H), nn.LayerNorm(H)
        self.h = nn.Sequential(*[Block() for _ in range(LAYERS)])

    def forward(self, tokens):
        return self.ln_f(self.h(self.wte(tokens) + self.wpe.weight)) @ self.wte.weight.T  # the head is tied


def main(rank):
    with torch.device("meta"):  # shapes without values: no memory, no time
        model, tokens, x = GPT(), torch.zeros(T, dtype=torch.long), torch.zeros(T, H, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()

    kept = {}  # elements of each storage that autograd saves of one layer for backward; views share one

    def keep(tensor):
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes() // tensor.itemsize
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = model.h[0](x)
    for p in model.parameters():  # weights are saved too, and are no activations
        kept.pop(p.untyped_storage()._cdata, None)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    shard = sum(p.to_local().numel() for p in model.parameters())
    if rank == 0:
        print("parameters:", sum(p.numel() for p in model.parameters()))
        print("operations of a sample, forward and backward:", counter.get_total_flops())
        print(f"elements that a layer keeps for {tuple(y.shape)}:", sum(kept.values()))
        print("bytes of model state on each process, ZeRO-3:", (2 + 2 + 12) * shard)


if __name__ == "__main__":
    start(main)
