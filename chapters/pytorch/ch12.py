"""Chapter 12 in PyTorch: experts over two processes, with all_to_all_single of unequal counts (12.4).

Run it with: python chapters/pytorch/ch12.py
"""

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import (
    all_to_all_single_autograd,
)  # dist.all_to_all_single has no backward
from torch.nn.functional import silu
from two_processes import checksum, start

E, K, H, F = 8, 2, 8, 10  # experts, of which each token gets K; sizes of a token and of an expert's inside
TOKENS = [7, 8]  # of each process


def main(rank):
    ranks = dist.get_world_size()
    random = np.random.default_rng(12)
    tokens, router = random.normal(size=(2, sum(TOKENS), H)), torch.tensor(random.normal(size=(E, H)))
    experts = torch.tensor(random.normal(size=(E, 3, F, H))).chunk(ranks)[rank].clone().requires_grad_()
    x, dy = (torch.tensor(each).split(TOKENS)[rank] for each in tokens)
    x.requires_grad_()

    weights, chosen = (x @ router.T).softmax(dim=-1).topk(K)  # (N, K)
    weights = weights / weights.sum(dim=-1, keepdim=True)
    order, counts = chosen.flatten().argsort(stable=True), chosen.flatten().bincount(minlength=E)
    here = torch.empty_like(counts)
    dist.all_to_all_single(here, counts)  # how many rows each process has for each expert that lives here
    leaving, arriving = (each.view(ranks, -1).sum(dim=1).tolist() for each in (counts, here))
    expert_of_row = torch.arange(E // ranks).repeat(ranks).repeat_interleave(here)
    by_expert = expert_of_row.argsort(stable=True)

    def exchange(rows, sends, receives):  # torch asks for the counts that arrive before those that leave
        return all_to_all_single_autograd(rows, receives, sends, dist.group.WORLD)

    rows = exchange(x[order // K], leaving, arriving)[by_expert].split(here.view(ranks, -1).sum(dim=0).tolist())
    results = [(silu(r @ gate.T) * (r @ up.T)) @ down for r, (gate, up, down) in zip(rows, experts, strict=True)]
    back = exchange(torch.cat(results)[by_expert.argsort()], arriving, leaving)[order.argsort()]
    y = (weights[..., None] * back.view(-1, K, H)).sum(dim=1)
    y.backward(dy)  # dispatch and combine in exchanged roles

    others = sum(leaving) - leaving[rank] + sum(arriving) - arriving[rank]  # rows, in forward; as many in backward
    sent = 2 * others * H * 8 + (E - E // ranks) * 8  # and the counts
    every = [None] * ranks
    dist.all_gather_object(every, (counts.tolist(), sent, [checksum(each) for each in (y, x.grad, experts.grad)]))
    if rank == 0:
        for r, (rows_of, nbytes, sums) in enumerate(every):
            print(f"rows for each expert from process {r}:", rows_of)
            print(f"bytes sent by process {r}:", nbytes)
            print(f"checksums of y, dx and the experts' gradients on process {r}:", sums)


if __name__ == "__main__":
    start(main)
