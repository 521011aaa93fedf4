"""Model directories as Hugging Face transformers writes and reads them: config.json next to model.safetensors."""

import json
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from minipar.errors import UsageError
from minipar.nn.gpt import GPT, GPTConfig
from minipar.nn.llama import LlamaConfig
from minipar.nn.moe import MixtralConfig
from minipar.nn.transformer import LanguageModel, TransformerConfig

CONFIGS: dict[str, type[GPTConfig | LlamaConfig]] = {"gpt2": GPTConfig, "llama": LlamaConfig, "mixtral": MixtralConfig}
# With other values of these settings the model would be another function than the one here.
REQUIRED: dict[str, object] = {
    "activation_function": "gelu_new",
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "rope_scaling": None,
    "rope_type": "default",
    "router_jitter_noise": 0.0,
    "sliding_window": None,
}
PREFIX = "transformer."  # begins each name in GPT2LMHeadModel's files; GPT2Model's files have none
HEAD = "lm_head.weight"  # the token embedding once more, in some files
BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")  # no parameters, in old files


def read_json(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file. UsageError for anything else."""
    try:
        if not path.is_file():  # a pipe or a device may never end
            raise OSError("it is not a file")
        content = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise UsageError(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content


def load_config(directory: str | Path) -> TransformerConfig:
    """Read config.json. UsageError if it describes none of the models in CONFIGS."""
    path = Path(directory) / "config.json"
    content = read_json(path)
    kind = content.get("model_type", "gpt2")
    if kind not in CONFIGS:
        raise UsageError(f"{path}: model_type is {kind!r}, expected {', '.join(CONFIGS)}")
    content |= content.get("rope_parameters") or {}  # transformers 5 has it; version 4 rope_theta alone
    tied = CONFIGS[kind].tie_word_embeddings  # always, in a GPT-2
    required = REQUIRED | ({"tie_word_embeddings": tied} if kind == "gpt2" else {})
    for name, value in required.items():
        if content.get(name, value) != value:
            but = f"but minipar's models have {value!r}"
            raise UsageError(f"{path}: {name} is {content[name]!r}, {but}")
    known = {}
    for field in fields(CONFIGS[kind]):
        if content.get(field.name) is not None:
            known[field.name] = content[field.name]
    try:
        return CONFIGS[kind](**known)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{path}: {error}") from None


def load_pretrained(directory: str | Path, **options: Any) -> LanguageModel:
    """Load the model of a directory; `options` are those of the model's class, such as its dtype.

    The weights are in model.safetensors or, without that, in the files that model.safetensors.index.json names.
    UsageError for tensors that are missing, misshapen or unexpected.
    """
    config = load_config(directory)
    tensors = read_tensors(Path(directory))
    model = config.build(**options)
    if config.tie_word_embeddings:
        tensors.pop(HEAD, None)
    try:
        model.load_state_dict(tensors)
    except ValueError as error:
        raise UsageError(f"{directory}: {error}") from None
    return model


def read_tensors(directory: Path) -> dict[str, np.ndarray]:
    """Read all tensors of a directory, by their parameters' names. UsageError."""
    index = directory / "model.safetensors.index.json"
    names = {"model.safetensors"}
    if not (directory / "model.safetensors").exists() and index.exists():
        names = set(read_json(index)["weight_map"].values())
    tensors = {}
    for name in sorted(names):
        try:
            for key, tensor in load_file(directory / name).items():
                if not key.endswith(BUFFERS):
                    tensors[key.removeprefix(PREFIX)] = tensor
        except (SafetensorError, OSError) as error:
            raise UsageError(f"{directory / name} cannot be read: {error}") from None
    return tensors


def save_pretrained(model: LanguageModel, directory: str | Path, state: dict[str, np.ndarray] | None = None) -> None:
    """Write config.json and model.safetensors so that transformers' `from_pretrained` loads them.

    `state` has the parameters if the model itself does not hold them all, as in ZeRO stage 3. Each file is written
    under another name and renamed, so that a reader never sees half of one.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    config = model.config.to_dict()
    config["model_type"] = model.config.model_type
    config["bos_token_id"] = None
    config["eos_token_id"] = None
    config["architectures"] = [f"{type(model).__name__}ForCausalLM"]
    if isinstance(model, GPT):
        config["architectures"] = ["GPT2LMHeadModel"]
        for name in ("embd_pdrop", "attn_pdrop", "resid_pdrop"):  # without them transformers assumes 0.1
            config[name] = model.drop.p
    arrays = {}
    for name, array in (state or model.state_dict()).items():
        arrays[name] = np.ascontiguousarray(array)
    save_file(arrays, directory / "model.safetensors.partial", metadata={"format": "pt"})
    (directory / "config.json.partial").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    for name in ("model.safetensors", "config.json"):
        os.replace(directory / f"{name}.partial", directory / name)
