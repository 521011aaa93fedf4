"""The manifest of a checkpoint: what each of its values can be, and which of them must agree.

A manifest may come from anybody, and its checksum shows damage, not intent. So all of it is checked
before it decides what is read, allocated or trained: first each value by itself, as the table
MANIFEST says, then the values together. What is too large is found by what it would need: layers
need parameters, parameters need pieces, and pieces need bytes. All functions here raise ValueError
with the place and the value.
"""

import hashlib
import json
import math
import reprlib
import textwrap
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import Field, dataclass, fields, replace
from typing import Any

from minipar.nn.pretrained import CONFIGS
from minipar.nn.transformer import TransformerConfig
from minipar.parallel.state import Piece
from minipar.train.config import inside
from minipar.train.schema import Kind, ListOf, MapOf, Nullable, Number, OneOf, Record, Row, Text, Truth, Whole, refuse
from minipar.train.settings import CHOICES, DTYPES, INTERVALS, TrainConfig, flags, sizes_of

FORMAT = "minipar checkpoint"
VERSION = 1
KINDS = ("parameter", "exp_avg", "exp_avg_sq")  # the arrays of each parameter
MOST_BYTES = 2**25  # a larger manifest is refused
LONGEST_MESSAGE = 400
LARGEST_SIZE = 2**31 - 1  # a larger dim is refused


@dataclass(frozen=True)
class FlagValue:
    """A value that a flag of `minipar.train` can have."""

    flag: str
    field: Field[Any]

    def check(self, value: Any, place: str) -> None:
        values = [value]
        if isinstance(self.field.default, tuple):
            Row([Number()] * len(self.field.default)).check(value, place)
            values = value
        if value is None and self.field.default is None:
            return
        for each in values:
            self.kind().check(each, place)
            within = INTERVALS.get(self.flag)
            if within is not None and not inside(each, within):
                refuse(value, place, f"a value inside {within}")

    def kind(self) -> Kind:
        if self.flag in CHOICES:
            return OneOf(CHOICES[self.flag])
        if self.flag == "--memory-limit":
            return Whole(1)
        return KINDS_OF_TYPE.get(self.field.type, Text())


KINDS_OF_TYPE: dict[Any, Kind] = {
    bool: Truth(),
    int: Whole(0, 2**64),
    int | None: Whole(0, 2**64),
    float: Number(),
    float | None: Number(),
    tuple[float, float]: Number(),
}
FLAGS = Record({}, optional={flag: FlagValue(flag, field) for _, field, flag, _ in flags(TrainConfig())})
CUT = Record({"dim": Whole(), "groups": Whole(1), "rank": Whole(), "ranks": Whole(1)}, closed=True)
PIECE = Record({"name": Text(), "start": Whole(), "stop": Whole(1), "cut": Nullable(CUT)})
FILE = Record({"name": Text(), "bytes": Whole(1), "sha256": Text("[0-9a-f]{64}"), "pieces": ListOf(PIECE)})
MANIFEST = Record(
    {
        "step": Whole(),
        "optimizer_steps": Whole(),
        "dtype": OneOf(DTYPES),
        "data": Text("[0-9a-f]{32}"),
        "model": Record({}),  # its sizes are those of MODELS
        "parameters": MapOf(ListOf(Whole(1, LARGEST_SIZE), least=1)),
        "history": ListOf(Record({"step": Whole(), "flags": FLAGS}), least=1),
        "files": ListOf(FILE, least=1),
    },
    optional={
        "loss_scale": Row([Number(1), Whole()]),  # and the steps since it last changed
        "router_bias": ListOf(ListOf(Number())),
        "skipped": Whole(),
    },
)
SIZES: dict[type, Kind] = {int: Whole(1, LARGEST_SIZE), float: Number(0), bool: Truth(), type(None): Whole(1)}
MODELS = {
    kind: Record({}, optional={field.name: SIZES[type(field.default)] for field in fields(config)}, closed=True)
    for kind, config in CONFIGS.items()
}


def checksum(manifest: dict[str, Any]) -> str:
    """Compute the SHA-256 of all other entries of a manifest."""
    rest = {key: value for key, value in manifest.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def parse(text: bytes) -> dict[str, Any]:
    """Parse a manifest and check each of its values by itself."""
    try:
        manifest = json.loads(text)
        own = isinstance(manifest, dict) and manifest.get("format") == FORMAT
        expected = checksum(manifest) if own else ""
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
    if not own:
        raise ValueError(f'not a checkpoint of minipar: "format" is not "{FORMAT}"')
    if manifest.get("version") != VERSION:
        raise ValueError(f"version {reprlib.repr(manifest.get('version'))} of the format; this minipar reads {VERSION}")
    if manifest.get("checksum") != expected:
        raise ValueError("its checksum does not fit: the manifest was changed after it was written")
    MANIFEST.check(manifest, "")
    return manifest


def model_shape(manifest: dict[str, Any]) -> TransformerConfig:
    """Return the sizes of the model, which has exactly the manifest's parameters."""
    sizes = manifest["model"]
    parameters = manifest["parameters"]
    kind = "gpt2"
    if "hidden_size" in sizes:
        kind = "mixtral" if "num_local_experts" in sizes else "llama"
    MODELS[kind].check(sizes, "model")
    shape: TransformerConfig = CONFIGS[kind](**sizes)
    mlps = shape.n_layer * (shape.num_local_experts if kind == "mixtral" else 1)
    if mlps > len(parameters):  # before so many are made
        refuse(mlps, "the number of layers times experts", f"at most {len(parameters)}, the number of parameters")
    shapes = {name: tuple(sizes) for name, sizes in parameters.items()}
    try:
        shape.build(deferred=True).check_shapes(shapes)
    except ValueError as error:
        raise ValueError(f"parameters: {textwrap.shorten(str(error), LONGEST_MESSAGE)}") from None
    return shape


def check_files(manifest: dict[str, Any], itemsize: int) -> None:
    """Check the files' names and sizes, and that their pieces are all elements of all parameters, each once.

    `itemsize` is that of an element in the files.
    """
    pieces: dict[str, list[Piece]] = defaultdict(list)
    for rank, file in enumerate(manifest["files"]):
        name = f"rank-{rank:05d}.safetensors"  # any other name could lead out of the directory
        if file["name"] != name:
            refuse(file["name"], f"files[{rank}].name", name)
        elements = 0
        for i, piece in enumerate(file["pieces"]):
            place = f"files[{rank}].pieces[{i}]"
            if piece["name"] not in manifest["parameters"]:
                refuse(piece["name"], f"{place}.name", "a parameter's name")
            if piece["start"] >= piece["stop"]:
                refuse(piece["stop"], f"{place}.stop", f"more than its start, {piece['start']}")
            pieces[piece["name"]].append(Piece.from_json(piece))
            elements += piece["stop"] - piece["start"]
        if file["bytes"] < len(KINDS) * elements * itemsize:
            refuse(file["bytes"], f"files[{rank}].bytes", f"those of {elements:,} elements of {', '.join(KINDS)}")
    for name, shape in manifest["parameters"].items():
        check_pieces(name, tuple(shape), pieces[name])


def check_pieces(name: str, shape: tuple[int, ...], pieces: list[Piece]) -> None:
    """Check that these pieces are all elements of one parameter, each once."""
    held = sum(piece.size for piece in pieces)
    wrong = ValueError(f"its files hold {held:,} elements of {name} of shape {shape}, not each element once")
    if not pieces:
        raise wrong
    cut = pieces[0].cut
    ranks = 1
    size = math.prod(shape)
    if cut is not None:  # equal parts, of which the last ones may be padded
        if cut.dim >= len(shape):
            refuse(cut.dim, f"cut.dim of {name}", f"a dim of its shape {shape}")
        ranks = cut.ranks
        size = math.prod(cut.shard(shape).local_shape(shape))
    rank = 0
    element = 0  # the next piece has to start with it
    for piece in sorted(pieces, key=_order):
        expected = None if cut is None else replace(cut, rank=rank)
        if piece.cut != expected or piece.start != element:
            raise wrong
        element = piece.stop
        if element == size:
            rank = rank + 1
            element = 0
    if (rank, element) != (ranks, 0):
        raise wrong


def _order(piece: Piece) -> tuple[int, int]:
    rank = 0 if piece.cut is None else piece.cut.rank
    return rank, piece.start


def check_run(manifest: dict[str, Any], shape: TransformerConfig, periods: Sequence[dict[str, Any]]) -> None:
    """Check that counts, loss scale, biases and flags are those of one run of this model.

    `periods` are the flags of each period of the history, with the default of each flag that is not
    there.
    """
    step = manifest["step"]
    scale, good_steps = manifest.get("loss_scale", (1, 0))
    counts = {"optimizer_steps": manifest["optimizer_steps"], "loss_scale[1]": good_steps}
    counts["skipped"] = manifest.get("skipped", 0)
    for name, count in counts.items():
        if count > step:
            refuse(count, name, f"at most step, {step}")
    if scale != 1 and manifest["dtype"] != "float16":
        refuse(scale, "loss_scale[0]", f"1 with dtype {manifest['dtype']}")
    sizes = [len(biases) for biases in manifest.get("router_bias", [])]
    expected = [shape.num_local_experts] * shape.n_layer if shape.model_type == "mixtral" else []
    if "router_bias" in manifest and sizes != expected:
        refuse(sizes, "the sizes of router_bias", f"{expected}")
    starts = [period["step"] for period in manifest["history"]]
    if starts[0] != 0 or starts != sorted(starts) or starts[-1] > step:
        refuse(starts, "the steps of history", f"ascending ones from 0 to at most {step}")
    for i, values in enumerate(periods):
        for flag, own in flags_of(manifest, shape).items():
            if values[flag] != own:
                refuse(values[flag], f"history[{i}].flags.{flag}", f"{own}, as in the rest of the manifest")
        if values["--seq-len"] > shape.n_positions:
            refuse(values["--seq-len"], f"history[{i}].flags.--seq-len", f"at most {shape.n_positions} positions")


def flags_of(manifest: dict[str, Any], shape: TransformerConfig) -> dict[str, Any]:
    """Return the flags whose values the manifest has a second time: the dtype and the model's sizes."""
    own = {"--dtype": manifest["dtype"]}
    for flag, size in sizes_of(shape.model_type).items():
        own[flag] = getattr(shape, size)
    return own
