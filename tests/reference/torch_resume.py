"""FSDP2 takes the next step of checkpoints of minipar: mpirun -n 2 python torch_resume.py FOLDER, which tests start.

FOLDER/job.json has the names of the cases, the checkpoints' name and the settings of AdamW. FOLDER/CASE/CHECKPOINT is
a checkpoint. Each case writes FOLDER/CASE.npz: the loss, the gradient norm before clipping and the parameters of two
steps. "resumed/..." starts from the checkpoint. Then transformers writes the parameters to FOLDER/CASE/written, and
"written/..." starts from them, with a new AdamW.
"""

import json
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch_checkpoint import load, read_run
from torch_ranks import LIMIT, accumulate, whole
from transformers import GPT2Config, GPT2LMHeadModel


def adamw(model, settings):
    """Make AdamW, which decays arrays of two dims."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings["weight_decay"]},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings["lr"], eps=settings["eps"], foreach=False)


def step(model, optimizer, mesh, batch, settings):
    """Take a step, and return loss, norm and the parameters under minipar's names; collective."""
    loss = accumulate(lambda tokens: model(tokens).logits, nullcontext, 1, mesh, *batch)
    norm = whole(torch.nn.utils.clip_grad_norm_(model.parameters(), settings["clip"])).item()
    optimizer.step()
    optimizer.zero_grad()
    parameters = {name.removeprefix("transformer."): whole(p) for name, p in model.named_parameters()}
    return {"loss": loss, "norm": norm} | {name: p.detach().numpy().copy() for name, p in parameters.items()}


def resume(checkpoint, mesh, batches, settings):
    """Load a checkpoint, take both steps and return their results; collective. Writes the directory `written`."""
    flags = read_run(checkpoint)["flags"]
    sizes = {"n_embd": flags["hidden"], "n_layer": flags["layers"], "n_head": flags["heads"]}
    sizes |= {"vocab_size": flags["vocab_size"], "n_positions": flags["seq_len"]}
    model = GPT2LMHeadModel(GPT2Config(**sizes, embd_pdrop=0, attn_pdrop=0, resid_pdrop=0)).double()
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = adamw(model, settings)
    load(model, optimizer, checkpoint)
    resumed = step(model, optimizer, mesh, batches["resumed"], settings)
    complete = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:  # the others have got nothing
        model.save_pretrained(checkpoint.with_name("written"), state_dict=complete)
    written = step(model, adamw(model, settings), mesh, batches["written"], settings)
    results = {"resumed": resumed, "written": written}
    return {f"{key}/{name}": array for key, result in results.items() for name, array in result.items()}


def main():
    """Take the steps of every case."""
    folder = Path(sys.argv[1])
    job = json.loads((folder / "job.json").read_text())
    torch.set_num_threads(1)
    rank, processes = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    store = dist.FileStore(str(folder / "store"), processes)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=processes, timeout=LIMIT)
    mesh = init_device_mesh("cpu", (processes,), mesh_dim_names=("dp",))
    batches = {name: torch.tensor(arrays) for name, arrays in np.load(folder / "batches.npz").items()}
    for case in job["cases"]:
        results = resume(folder / case / job["checkpoint"], mesh, batches, job["settings"])
        if rank == 0:
            np.savez(folder / f"{case}.npz", **results)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
