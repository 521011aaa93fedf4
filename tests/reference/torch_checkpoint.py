"""A reader with which torch.distributed.checkpoint loads minipar's checkpoints. Copy this file: it needs no minipar.

    model_state, optimizer_state = get_state_dict(model, optimizer)  # from torch.distributed.checkpoint.state_dict
    state = {"model": model_state, "optimizer": optimizer_state["state"]}
    torch.distributed.checkpoint.load(state, storage_reader=MiniparReader("run/step-00000020"))

This fills the parameters and AdamW's two means and step counts, however the model is sharded. The model has the
parameters of transformers' GPT2LMHeadModel. The learning rate and AdamW's other settings stay the optimizer's own.

Each parameter is one chunk for torch.distributed.checkpoint. A process joins it from all of its pieces, takes its own
part and forgets the rest, so one whole array at a time is in memory, as when minipar itself resumes.
"""

import hashlib
import json
import math
from pathlib import Path

import torch
from safetensors import safe_open
from torch.distributed.checkpoint import StorageReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.futures import Future


def read_manifest(path):
    """Read a manifest. ValueError if it is not that of a checkpoint of minipar, or was changed after it was written."""
    manifest = json.loads(path.read_text())
    if (manifest.get("format"), manifest.get("version")) != ("minipar checkpoint", 1):
        raise ValueError(f"{path}: not the manifest of a checkpoint of minipar, version 1")
    rest = {key: value for key, value in manifest.items() if key != "checksum"}
    if hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest() != manifest["checksum"]:
        raise ValueError(f"{path}: its checksum does not fit: the manifest was changed after it was written")
    return manifest


class MiniparReader(StorageReader):
    """A reader of a checkpoint, for a model that calls its parameters as minipar does with `prefix` in front.

    If the checkpoint is damaged or not minipar's, torch raises a CheckpointException that names the file and the cause.
    """

    def __init__(self, directory, prefix="transformer."):
        self.directory, self.prefix = Path(directory), prefix

    def read_metadata(self):
        """Describe every tensor that can be loaded."""
        self.manifest = read_manifest(self.directory / "manifest.json")
        names = {self.prefix + name: name for name in self.manifest["parameters"]}
        names["lm_head.weight"] = "wte.weight"  # the head is tied to the token embedding
        self.tensors = {f"model.{key}": ("parameter", name) for key, name in names.items()}
        for kind in ("exp_avg", "exp_avg_sq", "step"):
            self.tensors |= {f"optimizer.{key}.{kind}": (kind, name) for key, name in names.items()}
        return Metadata({key: self._describe(*tensor) for key, tensor in self.tensors.items()})

    def _describe(self, kind, name):
        size = torch.Size([] if kind == "step" else self.manifest["parameters"][name])
        properties = TensorProperties(getattr(torch, self.manifest["dtype"]))
        chunk = ChunkStorageMetadata(offsets=torch.Size([0] * len(size)), sizes=size)
        return TensorStorageMetadata(properties, size, [chunk])

    def set_up_storage_reader(self, metadata, is_coordinator, *args, **kwargs):
        """Check every file, on one process."""
        for file in self.manifest["files"] if is_coordinator else []:
            with open(self.directory / file["name"], "rb") as stream:
                if hashlib.file_digest(stream, "sha256").hexdigest() != file["sha256"]:
                    raise ValueError(f"{stream.name}: its SHA-256 is not that of what was written: it is damaged")

    def read_data(self, plan, planner):
        """Fill the tensors of this process: the plan has a rectangle of a chunk for each of them."""
        for item in plan.items:
            rectangle = zip(item.storage_offsets, item.lengths, strict=True)
            whole = self._join(*self.tensors[item.storage_index.fqn])
            target = planner.resolve_tensor(item).detach()
            target.copy_(whole[tuple(slice(start, start + length) for start, length in rectangle)])
            planner.commit_tensor(item, target)
        done = Future()
        done.set_result(None)
        return done

    def _join(self, kind, name):
        """Join a tensor from its pieces: elements start:stop of one tensor-parallel rank's part, or of the whole."""
        if kind == "step":
            return torch.tensor(self.manifest["optimizer_steps"])
        pieces = [
            (self.directory / file["name"], piece["start"], piece["stop"], piece["cut"])
            for file in self.manifest["files"]
            for piece in file["pieces"]
            if piece["name"] == name
        ]
        # `dim` is cut into as many groups, and each group into a stretch for each rank; the last ones may be padded.
        shape, cut = self.manifest["parameters"][name], pieces[0][3] or {"dim": 0, "groups": 1, "ranks": 1}
        dim, groups, ranks = cut["dim"], cut["groups"], cut["ranks"]
        stretch = math.ceil(shape[dim] / (groups * ranks))
        local = [*shape[:dim], groups * stretch, *shape[dim + 1 :]]
        parts = torch.empty(ranks, *local, dtype=getattr(torch, self.manifest["dtype"]))
        for path, start, stop, cut in pieces:
            with safe_open(path, "pt") as file:
                parts[cut["rank"] if cut else 0].view(-1)[start:stop] = file.get_tensor(f"{kind}/{name}")
        parts = parts.unflatten(dim + 1, (groups, stretch)).movedim(0, dim + 1)  # (..., groups, ranks, stretch, ...)
        return parts.flatten(dim, dim + 2).narrow(dim, 0, shape[dim])

    # What torch also asks of a reader. Its plans stay as they are.

    def reset(self, checkpoint_id=None):
        pass

    def prepare_local_plan(self, plan):
        return plan

    def prepare_global_plan(self, plans):
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id):
        return True
