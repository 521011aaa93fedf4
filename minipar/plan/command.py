"""The command line with which `minipar.train` runs a plan, to copy."""

import json
import os
from shlex import quote
from typing import Any

from minipar.errors import UsageError, check_divides
from minipar.plan.layout import PRECISIONS, Layout
from minipar.plan.model import KEYS, ModelShape


def train_command(name: str, model: ModelShape, layout: Layout, length: int) -> str:
    """Return `mpirun -n N python -m minipar.train ...` with the flags of a layout. UsageError if it trains no such one.

    `name` is the model's, or the directory it was read from. A second line is the config.json that a directory DIR
    needs, if flags cannot say the shape.
    """
    if layout.expert_tp < layout.tp:
        remedy = f"it cuts each expert over all of tp; plan with --etp {layout.tp}"
        raise UsageError(f"etp {layout.etp} with tp {layout.tp}: {remedy}")
    if layout.cp > 1 and layout.cp_order != "zigzag":
        raise UsageError(f"cp-order {layout.cp_order}: its order is zigzag")
    check_divides("ffn/tp", model.inner, layout.tp, "minipar.train has whole columns on each rank")
    if layout.sequence_parallel:
        why = "minipar.train has as many tokens on each rank of sequence parallelism"
        check_divides("tokens/tp", length // layout.cp, layout.tp, why)
    config = ""
    if os.path.isdir(name):
        shape = f"--model {quote(name)}"
    elif needs_directory(model):
        shape = "--model DIR"
        config = f"\nDIR/config.json: {json.dumps(config_json(model, length))}"
    else:
        shape = model_flags(model)
    command = f"mpirun -n {layout.gpus} python -m minipar.train {shape} --seq-len {length}"
    return f"{command} {mesh_flags(layout)} {precision_flags(layout)}{config}"


def model_type(model: ModelShape) -> str:
    """Return Hugging Face's name of the kind of model."""
    if model.experts is not None:
        return "mixtral"
    return "llama" if model.gated else "gpt2"


def needs_directory(model: ModelShape) -> bool:
    """Return whether flags of minipar.train leave out a part of the shape: heads of keys, ffn, experts."""
    return model.gated or model.inner != 4 * model.hidden


def model_flags(model: ModelShape) -> str:
    """Return the flags of a GPT-2's shape."""
    sizes = f"--layers {model.layers} --hidden {model.hidden} --heads {model.heads}"
    return f"{sizes} --vocab-size {model.vocab_size}"


def config_json(model: ModelShape, length: int) -> dict[str, Any]:
    """Return the config.json of a model directory, as minipar.train and transformers read it."""
    kind = model_type(model)
    sizes: dict[str, Any] = {key: getattr(model, field) for field, key in KEYS[kind].items()}
    if kind == "gpt2":
        return {"model_type": kind, **sizes}
    sizes["num_key_value_heads"] = model.groups
    return {
        "model_type": kind,
        **sizes,
        "max_position_embeddings": length,
        "tie_word_embeddings": model.tied,
    }


def mesh_flags(layout: Layout) -> str:
    """Return the flags of the mesh, of what its axes share, and of the batch."""
    flags = [f"--dp {layout.dp}"]
    if layout.cp > 1:
        flags.append(f"--cp {layout.cp} --context-parallel {layout.context_parallel}")
    if layout.ep > 1:
        flags.append(f"--ep {layout.ep}")
    if layout.tp > 1:
        flags.append(f"--tp {layout.tp}")
    if layout.sequence_parallel:
        flags.append("--sequence-parallel")
    if layout.pp > 1:
        flags.append(f"--pp {layout.pp} --schedule {layout.schedule}")
    if layout.virtual_stages > 1:
        flags.append(f"--virtual-stages {layout.virtual_stages}")
    flags.append(f"--zero-stage {layout.zero}")
    if layout.zero_replicas > 1:
        flags.append(f"--zero-replicas {layout.zero_replicas}")
    flags.append(f"--global-batch {layout.samples} --microbatches {layout.microbatches}")
    return " ".join(flags)


def precision_flags(layout: Layout) -> str:
    """Return the flags of the dtype, and of what is computed again in backward.

    Attention of long sequences always computes its scores again, as flash attention does.
    """
    dtype = "float16" if layout.precision == PRECISIONS["fp16"] else "bfloat16"
    recompute = "full" if layout.recompute == "full" else "none"
    return f"--dtype {dtype} --recompute {recompute}"
