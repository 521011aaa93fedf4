"""How torch resumes a checkpoint of minipar, with AdamW's state. Copy this file: it needs no minipar.

    load(model, optimizer, "run/step-00000020")

The model has the parameters of transformers' GPT2LMHeadModel, and FSDP2 (`fully_shard`) may have sharded it. The
learning rate and AdamW's other settings stay the optimizer's own.
"""

import json
from pathlib import Path

import numpy as np
import torch
from torch.distributed.tensor import DTensor, distribute_tensor

PREFIX = "transformer."  # before the names of minipar


def read_run(directory):
    """Read run.json: the steps that were taken, and the flags, in which `shape` has the model's sizes."""
    return json.loads((Path(directory) / "run.json").read_text())


def load(model, optimizer, directory):
    """Fill the parameters and AdamW's two means and step counts. Sends nothing: each process reads its own part."""
    steps = torch.tensor(float(read_run(directory)["optimizer_steps"]))
    for name, parameter in model.named_parameters():
        file = f"{name.removeprefix(PREFIX)}.npy"
        with torch.no_grad():
            parameter.copy_(read(Path(directory) / "parameter" / file, parameter))
        state = {kind: read(Path(directory) / kind / file, parameter) for kind in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": steps.clone()} | state


def read(path, parameter):
    """Read an array of the whole model, and return this process's part of it if the parameter is sharded."""
    whole = torch.from_numpy(np.load(path))
    if not isinstance(parameter, DTensor):
        return whole
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
