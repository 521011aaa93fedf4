"""Model directories as Hugging Face transformers writes and reads them: config.json next to model.safetensors."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from minipar.errors import UsageError
from minipar.more.experts.mixtral import MixtralConfig
from minipar.more.llama import LlamaConfig
from minipar.nn.gpt import GPT, GPTConfig, LanguageModel, TransformerConfig

CONFIGS: dict[str, type[GPTConfig | LlamaConfig]] = {
    "gpt2": GPTConfig,
    "llama": LlamaConfig,
    "mixtral": MixtralConfig,
}
# With other values of these settings the model would be another function than the one here.
REQUIRED: dict[str, object] = {
    "activation_function": "gelu_new",
    "hidden_act": "silu",
    "rope_scaling": None,
    "rope_type": "default",
    "sliding_window": None,
}
BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")  # no parameters, in old files


def read_json(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file. UsageError for anything else."""
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:  # TypeError: it is not an object
        raise UsageError(f"{path} cannot be read: {error}") from None


def load_config(directory: str | Path) -> TransformerConfig:
    """Read config.json. UsageError if it describes none of the models in CONFIGS."""
    path = Path(directory) / "config.json"
    content = read_json(path)
    kind = content.get("model_type", "gpt2")
    if kind not in CONFIGS:
        raise UsageError(f"{path}: model_type is {kind!r}, expected {', '.join(CONFIGS)}")
    content |= content.get("rope_parameters") or {}  # transformers 5 has it; version 4 rope_theta alone
    for name, value in REQUIRED.items():
        if content.get(name, value) != value:
            raise UsageError(f"{path}: {name} is {content[name]!r}, but minipar's models have {value!r}")
    names = [field.name for field in fields(CONFIGS[kind])]
    known = {name: content[name] for name in names if content.get(name) is not None}
    try:
        return CONFIGS[kind](**known)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{path}: {error}") from None


def load_pretrained(directory: str | Path, **options: Any) -> LanguageModel:
    """Load the model of a directory; `options` are those of the model's class, such as its dtype.

    UsageError for tensors that are missing, misshapen or unexpected.
    """
    config = load_config(directory)
    tensors = read_tensors(Path(directory) / "model.safetensors")
    model = config.build(**options)
    if config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)  # the token embedding once more, in some files
    try:
        model.load_state_dict(tensors)
    except ValueError as error:
        raise UsageError(f"{directory}: {error}") from None
    return model


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    """Read all tensors of a file, by their parameters' names. UsageError if it cannot be read."""
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
    # Each name in a file of GPT2LMHeadModel begins so; in one of GPT2Model none does.
    return {
        key.removeprefix("transformer."): tensor
        for key, tensor in tensors.items()
        if not key.endswith(BUFFERS)
    }


def save_pretrained(
    model: LanguageModel, directory: str | Path, state: dict[str, np.ndarray] | None = None
) -> None:
    """Write config.json and model.safetensors so that transformers' `from_pretrained` loads them.

    `state` has the parameters if the model itself does not hold them all, as in ZeRO stage 3.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    config = vars(model.config) | {
        "model_type": model.config.model_type,
        "bos_token_id": None,
        "eos_token_id": None,
        "architectures": [f"{type(model).__name__}ForCausalLM"],
    }
    if isinstance(model, GPT):
        config["architectures"] = ["GPT2LMHeadModel"]
        for name in ("embd_pdrop", "attn_pdrop", "resid_pdrop"):  # without them transformers assumes 0.1
            config[name] = model.drop.p
    arrays = {name: np.ascontiguousarray(array) for name, array in (state or model.state_dict()).items()}
    save_file(arrays, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
