"""Model directories as Hugging Face transformers writes and reads them: config.json next to model.safetensors."""

import json
import os
import re
import reprlib
import stat
import sys
from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from minipar.backend import Array, from_host
from minipar.errors import UsageError
from minipar.nn.gpt import GPT, GPTConfig
from minipar.nn.llama import LlamaConfig
from minipar.nn.moe import MixtralConfig
from minipar.nn.transformer import LanguageModel, TransformerConfig

CONFIGS: dict[str, type[GPTConfig | LlamaConfig]] = {  # by model_type
    "gpt2": GPTConfig,
    "llama": LlamaConfig,
    "mixtral": MixtralConfig,
}
PREFIX = "transformer."  # begins each name in GPT2LMHeadModel's files; GPT2Model's files have none
HEAD = "lm_head.weight"  # the token embedding once more, in some files
_BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")  # not parameters, in files of old versions
_NUMBERED = {"layer": re.compile(r"(?:h|model\.layers)\.(\d+)\."), "expert": re.compile(r".*\.experts\.(\d+)\.")}
_READABLE = ("F64", "F32", "F16", "BF16")  # dtypes, by safetensors' names
_LARGEST_SIZE = 2**31 - 1
LONGEST_HEADER = 2**24  # bytes; a header has about 100 for each tensor
_DROPOUT = ("embd_pdrop", "attn_pdrop", "resid_pdrop")  # without these keys transformers assumes 0.1
# With other values of these settings the model would be another function than the one implemented
# here.
_REQUIRED_SETTINGS: dict[str, dict[str, object]] = {
    "gpt2": {
        "activation_function": "gelu_new",
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "tie_word_embeddings": True,
        "add_cross_attention": False,
    },
    "llama": {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "rope_scaling": None},
    "mixtral": {"hidden_act": "silu", "router_jitter_noise": 0.0, "sliding_window": None, "rope_scaling": None},
}


def refuse_checkpoint(directory: str | Path) -> None:
    """Raise UsageError for a directory that --save wrote, or a checkpoint in it."""
    path = Path(directory)
    if (path / "config.json").exists():
        return
    if (path / "manifest.json").exists() or any(path.glob("step-*/manifest.json")):
        remedy = f"go on from it with --resume {directory}, or write a model with --export DIR"
        raise UsageError(f"{directory} holds checkpoints of --save, and no config.json: {remedy}")


def load_config(directory: str | Path) -> TransformerConfig:
    """Read config.json. Raises UsageError if it cannot be read or describes none of the models in CONFIGS."""
    path = Path(directory) / "config.json"
    if not os.path.isdir(directory):  # Path.is_dir would raise for a name that is too long
        missing = f"{directory} is not a directory with a config.json and a model.safetensors"
        call = "GPT2LMHeadModel.from_pretrained('gpt2').save_pretrained(DIR)"
        raise UsageError(f"{missing}. minipar downloads nothing: with transformers, {call} writes such a directory")
    refuse_checkpoint(directory)
    content = read_json(path)

    def check(name: str, accepted: bool, expected: str) -> None:
        if not accepted:
            raise UsageError(f"{path}: {name} is {reprlib.repr(content.get(name, 'missing'))}, {expected}")

    kind = content.setdefault("model_type", "gpt2")
    check("model_type", kind in list(CONFIGS), f"expected {' or '.join(CONFIGS)}")
    for name, wanted in _REQUIRED_SETTINGS[kind].items():
        check(name, content.get(name, wanted) == wanted, f"but minipar's {kind} has {wanted!r}")
    rope = content.get("rope_parameters", {"rope_type": "default"})  # transformers 5; in files of version 4, rope_theta
    accepted = isinstance(rope, dict) and {**rope, "rope_theta": 0} == {"rope_type": "default", "rope_theta": 0}
    check("rope_parameters", accepted, f"but minipar's {kind} has a rope_theta of rope_type 'default'")
    content |= rope
    for field in fields(CONFIGS[kind]):
        name, default = field.name, field.default
        if type(default) is float:
            value = content.get(name, default)
            accepted = type(value) in (int, float) and 0 <= value <= sys.float_info.max
            check(name, accepted, "expected a finite number of at least 0")
        elif type(default) is bool:
            check(name, type(content.get(name, default)) is bool, "expected true or false")
        elif content.get(name) is not None or default is not None:
            check(name, type(content.get(name)) is int, "expected an integer")
            check(name, content[name] <= _LARGEST_SIZE, f"expected at most {_LARGEST_SIZE}")
    try:
        config = CONFIGS[kind](**{f.name: content[f.name] for f in fields(CONFIGS[kind]) if f.name in content})
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from None
    name, wanted = ("n_inner", config.n_inner) if kind == "gpt2" else ("head_dim", config.n_embd // config.n_head)
    check(name, content.get(name) in (None, wanted), f"expected {wanted}")
    return config


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises UsageError for anything else, without waiting for a pipe."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise OSError("not a regular file")
        if status.st_size > 2**24:
            raise OSError(f"{status.st_size:,} bytes, expected at most 16 MiB")
        content = json.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None
    except RecursionError:
        raise UsageError(f"{path}: nested too deeply") from None
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise UsageError(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file."""

    file: Path
    key: str  # its name in the file
    shape: tuple[int, ...]
    kind: str  # its dtype, by safetensors' name

    def check_kind(self) -> None:
        """Raise UsageError unless the dtype can be converted."""
        if self.kind not in _READABLE:
            expected = f"expected one of {', '.join(_READABLE)}"
            raise UsageError(f"{self.file}: {self.key} is stored as {self.kind}; {expected}")

    def read(self) -> np.ndarray:
        """Read the values in their own dtype."""
        with safe_open(self.file, "np") as file:
            return file.get_tensor(self.key)

    def read_as(self, dtype: str) -> Array:
        """Read the values, converted to `dtype`."""
        return from_host(np.ascontiguousarray(self.read(), dtype=dtype))


def load_pretrained(
    directory: str | Path, dtype: str = "float32", deferred: bool = False, **options: Any
) -> LanguageModel:
    """Load the model of a directory, converted to `dtype`. With `deferred=True` each tensor is read later.

    The weights are in model.safetensors or, without that, in the files that
    model.safetensors.index.json names. `options` are those of the model's class. Raises UsageError
    that names the file, and every misshapen tensor and the first of those that are missing or
    unexpected.
    """
    config = load_config(directory)
    path, weight_map = read_index(Path(directory))  # errors name this path
    tensors = list_tensors(Path(directory), weight_map)
    head = tensors.pop(HEAD, None) if config.tie_word_embeddings else None
    check_counts(path, tensors, config)
    try:
        model = config.build(dtype=dtype, deferred=True, **options)
    except ValueError as error:  # the sizes may be such that no array can have them
        raise UsageError(f"{path.with_name('config.json')}: {error}") from None
    try:
        model.check_shapes({name: tensor.shape for name, tensor in tensors.items()})
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from None
    for name, parameter in model.named_parameters():
        tensor = tensors[name]
        tensor.check_kind()
        if head is not None and parameter is model.token_embedding:
            head.check_kind()
            if not np.array_equal(head.read(), tensor.read()):
                raise UsageError(f"{path}: {HEAD} differs from {name}, but the head is tied to it")
        parameter.make = partial(tensor.read_as, dtype)
    if not deferred:
        config.check_memory(np.dtype(dtype).itemsize)
        model.materialize()
    return model


def read_index(directory: Path) -> tuple[Path, dict[str, str]]:
    """Return the path of model.safetensors and {}, or of the index of several files, and each tensor's file."""
    path = directory / "model.safetensors"
    index = directory / "model.safetensors.index.json"
    if os.path.exists(path) or not os.path.isfile(index):
        return path, {}
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or any(Path(str(file)).name != file for file in weight_map.values()):
        raise UsageError(f"{index}: weight_map: expected for each tensor the name of a file in this directory")
    return index, weight_map


def list_tensors(directory: Path, weight_map: dict[str, str]) -> dict[str, StoredTensor]:
    """List the tensors of a directory by their parameters' names."""
    tensors = {}
    for name in sorted(set(weight_map.values())) or ["model.safetensors"]:
        path = directory / name
        if not os.path.isfile(path):
            raise UsageError(f"{path}: {'not a regular file' if os.path.exists(path) else 'no such file'}")
        try:
            check_header(path)
            with safe_open(path, "np") as file:
                for key in file.keys():
                    if weight_map.get(key, name) == name and not key.endswith(_BUFFERS):
                        values = file.get_slice(key)
                        tensor = StoredTensor(path, key, tuple(values.get_shape()), values.get_dtype())
                        tensors[key.removeprefix(PREFIX)] = tensor
        except (SafetensorError, OSError, TypeError, KeyError) as error:
            raise UsageError(f"{path} is not a safetensors file that can be read: {error}") from None
    return tensors


def check_counts(path: Path, names: Iterable[str], config: TransformerConfig) -> None:
    """Raise UsageError if a layer or an expert has no tensor, before so many are made: a count may be a mistake."""
    for what, count in (("layer", config.n_layer), ("expert", getattr(config, "num_local_experts", 0))):
        present = {match[1] for match in map(_NUMBERED[what].match, names) if match}
        for i in range(count):
            if str(i) not in present:
                raise UsageError(f"{path}: no tensor of {what} {i}; it has {i} {what}s, config.json {count}")


def check_header(path: Path) -> None:
    """Raise UsageError if a safetensors file has a header of more than LONGEST_HEADER bytes, or OSError.

    The header is parsed again for each tensor. One that is longer than its file is left to
    safetensors to refuse.
    """
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
    if LONGEST_HEADER < length < os.path.getsize(path):
        raise UsageError(f"{path}: its header takes {length:,} bytes, expected at most {LONGEST_HEADER:,}")


def save_pretrained(model: LanguageModel, directory: str | Path, state: dict[str, np.ndarray] | None = None) -> None:
    """Write `directory`/config.json and model.safetensors so that transformers' `from_pretrained` loads them.

    `state` has the parameters if the model itself does not hold them all (ZeRO stage 3).
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    kind = model.config.model_type
    config = {
        **_REQUIRED_SETTINGS[kind],
        **model.config.to_dict(),
        **(dict.fromkeys(_DROPOUT, model.drop.p) | {"n_inner": None} if isinstance(model, GPT) else {}),
        "model_type": kind,
        "architectures": ["GPT2LMHeadModel" if kind == "gpt2" else f"{type(model).__name__}ForCausalLM"],
        "bos_token_id": None,
        "eos_token_id": None,
    }
    weights = save(state or model.state_dict(), metadata={"format": "pt"})
    described = (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()
    for name, data in (("model.safetensors", weights), ("config.json", described)):
        partial_file = directory / f"{name}.partial"  # a reader never sees half of a file
        partial_file.write_bytes(data)
        os.replace(partial_file, directory / name)
