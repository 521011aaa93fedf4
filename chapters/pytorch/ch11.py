"""Chapter 11 in PyTorch: ring attention, forward and backward, on torch's kernel for a block (11.5, contiguous order).

Run it with: python chapters/pytorch/ch11.py
"""

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import P2POp
from two_processes import checksum, start

SHAPE = (4, 1, 4, 24, 4)  # q, k, v and dout; samples, heads, tokens, elements of a head
attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # what scaled_dot_product_attention calls: with lse
attend_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
sent = []  # bytes of each message


def pass_on(x):
    """Send to the right, and return what arrives from the left."""
    r, c, arrived = dist.get_rank(), dist.get_world_size(), torch.empty_like(x)
    pair = [P2POp(dist.isend, x, (r + 1) % c), P2POp(dist.irecv, arrived, (r - 1) % c)]
    for work in dist.batch_isend_irecv(pair):
        work.wait()
    sent.append(x.nbytes)
    return arrived


def blocks(kv):
    """Yield (step, keys and values that pass by, whether they are this process's own)."""
    for step in range(dist.get_world_size()):
        yield step, kv, step == 0
        if step < dist.get_world_size() - 1:
            kv = pass_on(kv)


def main(rank):
    c = dist.get_world_size()
    # This process's tokens: (1, 4, T/c, 4) each.
    q, k, v, dout = torch.tensor(np.random.default_rng(11).normal(size=SHAPE)).chunk(c, dim=3)[rank].contiguous()
    out, lse = torch.zeros_like(q), torch.full(q.shape[:-1], -torch.inf).double()
    for step, kv, own in blocks(torch.stack([k, v])):
        if step <= rank:  # keys of earlier tokens, or own ones; the rank waits while others compute (11.6)
            new_out, new_lse = attend(q, *kv, is_causal=own)
            both = torch.logaddexp(lse, new_lse)  # 11.1's `merge`
            out = (lse - both).exp()[..., None] * out + (new_lse - both).exp()[..., None] * new_out
            lse = both
    dq, dkv = torch.zeros_like(q), torch.zeros(2, *k.shape).double()
    for step, kv, own in blocks(torch.stack([k, v])):
        if step <= rank:  # with the lse of all keys the kernel computes this block's terms
            terms = attend_backward(dout, q, *kv, out, lse, 0.0, own)
            dq, dkv = dq + terms[0], dkv + torch.stack(terms[1:])
        dkv = pass_on(dkv)  # the sum follows its keys; the last hop brings it home
    sums = [None] * c
    dist.all_gather_object(sums, [checksum(x) for x in (out, dq, *dkv)])
    if rank == 0:
        print("bytes sent by each process:", sum(sent))
        for r, four in enumerate(sums):
            print(f"checksums of out, dq, dk, dv of process {r}:", four)


if __name__ == "__main__":
    start(main)
