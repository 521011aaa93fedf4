"""Claims about manifests that somebody wrote on purpose: the checksum fits, and one line refuses what cannot be."""

import copy
import hashlib
import json
import shutil
import sys

import numpy as np
import pytest
from launcher import run_each
from safetensors.numpy import load, save
from training import config_for, open_checkpoint, ranks_of, trainer_for

from minipar.comm import run_local, serial
from minipar.errors import UsageError
from minipar.parallel.state import Cut, Piece
from minipar.train.checkpoint import Checkpoint, checksum
from minipar.train.data import Tokens
from minipar.train.manifest import MOST_BYTES, check_pieces
from minipar.train.schema import Number

TOKENS = Tokens(np.arange(500, dtype=np.uint8) % 15, "a text", 15)
SMALL = "--layers 2 --hidden 8 --heads 2 --seq-len 8 --vocab-size 15 --global-batch 4 --steps 2"
MODELS = {
    "gpt2": f"{SMALL} --dtype float64 --dp 2 --tp 2 --zero-stage 1",
    "llama": f"{SMALL} --model llama --ffn 8 --dtype fp16 --reduction ordered --dp 2 --zero-stage 3",
    "mixtral": f"{SMALL} --model mixtral --ffn 8 --experts 4 --top-k 1 --router-bias 0.01 --pp 2",
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints of step 2 of three models: model -> directory."""
    folders = {}
    for model, words in MODELS.items():
        config, folder = config_for(words), tmp_path_factory.mktemp(model)

        def rank(comm, config=config, folder=folder):
            trainer = trainer_for(config, TOKENS, comm)
            for _ in trainer.train():
                pass
            trainer.save(folder, 2)

        run_local(ranks_of(config), rank)
        folders[model] = folder / "step-00000002"
    return folders


def manifest_of(place) -> dict:
    return json.loads((place / "manifest.json").read_text())


def signed(manifest: dict) -> bytes:
    """A manifest's text, with a checksum that fits."""
    return json.dumps(manifest | {"checksum": checksum(manifest)}).encode()


def refusal(place, change) -> str:
    """The message of the error of a manifest that `change` has changed."""
    manifest = manifest_of(place)
    change(manifest)
    with pytest.raises(UsageError) as caught:
        Checkpoint(place, signed(manifest))
    message = str(caught.value)
    assert message.startswith(f"{place}/manifest.json: ") and "\n" not in message and len(message) < 1000
    return message.removeprefix(f"{place}/manifest.json: ")


def at(manifest, path):
    """The object that holds a value, and the value's key: for "files.0.bytes", (the first file, "bytes")."""
    *keys, last = path.split(".")
    for key in keys:
        manifest = manifest[int(key) if isinstance(manifest, list) else key]
    return manifest, int(last) if isinstance(manifest, list) else last


def put(path, value):
    """A change: the value at this place is another one."""

    def change(manifest):
        parent, key = at(manifest, path)
        parent[key] = value

    return change


FIRST = (
    "files.0.pieces.0"  # of wte.weight, whose shape is (15, 8): each of two tp ranks has 8 rows, one of them padding
)
FLAG = "history.0.flags"
INFINITE, NAN = float("inf"), float("nan")
# Values that their place cannot have, whatever the others are.
WRONG = {
    "step": [-1, True, 2.0, "2", None, [2], 2**63, 10**30, NAN],
    "optimizer_steps": [-1, 3, True, 2.0, "2", None, 10**400],
    "skipped": [-1, 3, True, 1.5, None],
    "dtype": ["U5", "x", "O", "f8", "(3,)f4", "datetime64", "complex128", "", None, 5, ["float64"], "float32"],
    "data": ["", "0" * 31, "0" * 33, "G" * 32, None, 5],
    "model": [None, [], "gpt2", 5],
    "model.n_layer": [-1, 0, 1, 3, 10**8, 2**63, True, 2.0, "2", None],
    "model.n_embd": [0, 4, 16, 10**12, "8"],
    "model.n_head": [0, 3, 4, 10**12],
    "model.n_positions": [0, 4, 9, 10**12],
    "model.vocab_size": [0, 16, 10**15],
    "model.layer_norm_epsilon": [-1, NAN, INFINITE, "x", None, True],
    "model.more": [1],
    "model.hidden_size": [8],
    "model.num_local_experts": [8],
    "parameters": [None, [], {}, [1], {"wte.weight": [15, 8]}],
    "parameters.ln_f\\bias": [[], [0], [-2, -4], [8.0], ["8"], "8", 8, None, [10**15], [2, 4], [9], [True]],
    "parameters.more": [[2], [0]],
    "loss_scale": [[0.5, 0], [0, 0], [-1, -5], [NAN, 0], [INFINITE, 0], [1, -1], [1, 3], [1, True], [2, 0], [1], "x"],
    "router_bias": [[[1.0]], [[]], "x", [None], 5, None],
    "history": [[], None, {}, "x", [None], [[]]],
    "history.0.step": [-1, 1, 3, True, 0.5, None],
    "history.0.flags": [None, [], "x"],
    f"{FLAG}.--layers": [1, 3, 10**9, "2", None, True],
    f"{FLAG}.--hidden": [16, 8.0],
    f"{FLAG}.--dtype": ["float32", "bf16", None, 5],
    f"{FLAG}.--model": ["llama", "../x", 5, None],
    f"{FLAG}.--seq-len": [9, 0, 10**15, "8"],
    f"{FLAG}.--data": [5, "a\0b", "\ud800", ["x"], {}],
    f"{FLAG}.--lr": ["x", -1, 0, NAN, INFINITE, None, [0.1], True, 10**400],
    f"{FLAG}.--steps": [0, -1, 10**30, "5", 5.0, None],
    f"{FLAG}.--dp": ["x", 0, -1, 1.0],
    f"{FLAG}.--seed": [-1, 2**65, 0.0, None],
    f"{FLAG}.--betas": [[1, 2, 3], [0.9], [0.9, 1], [0.9, NAN], "x", None, 0.9, [[0.9], 0.9], [True, 0.9]],
    f"{FLAG}.--dropout": [2, -1, "x"],
    f"{FLAG}.--global-batch": [0, 2.5, 10**30],
    f"{FLAG}.--reduction": ["x", 5, None, ["ring"]],
    f"{FLAG}.--gradients": ["float64", 5],
    f"{FLAG}.--skip-nonfinite": [1, 0, "yes", None],
    f"{FLAG}.--memory-limit": [0, "1GB"],
    "files": [[], None, {}, "x", [None], [[]]],
    "files.1.name": ["../step-00000001/rank-00001.safetensors", "/etc/passwd", "a/b", "", ".", "x\0", 5, None,
                     ["rank-00001.safetensors"], "rank-00001.safetensors/", "rank-00001.safetensors\n",
                     "rank-00000.safetensors", "rank-000001.safetensors"],
    "files.0.bytes": [0, -1, 100, "1", 1e4, None],
    "files.0.sha256": ["", "0" * 63, "0" * 64 + "\n", "G" * 64, [1], None],
    "files.0.pieces": [None, {}, {"a": 1}, [None], []],
    f"{FIRST}.name": ["wpe.weight", "nothing", "", 5, None],
    f"{FIRST}.start": [-5, 1, 0.0, True, "0", None, 10**15],
    f"{FIRST}.stop": [0, -1, 63, 65, 10**15, 32.0, None],
    f"{FIRST}.cut": [None, {}, {"x": 1}, [], 5, {"dim": 0, "groups": 1, "rank": 0, "ranks": 2, "size": 3}],
    f"{FIRST}.cut.dim": [-1, 1, 7, 0.0, True],
    f"{FIRST}.cut.groups": [0, -1, 2, 10**9],
    f"{FIRST}.cut.rank": [-1, 1, 2, True],
    f"{FIRST}.cut.ranks": [0, 1, 3, 10**9],
}  # fmt: skip
CASES = [(path.replace("\\", "."), value) for path, values in WRONG.items() for value in values]


def change_at(path, value):
    """As `put`, for the names of parameters, which have dots."""
    if path.startswith("parameters."):
        return lambda manifest: manifest["parameters"].update({path.removeprefix("parameters."): value})
    return put(path, value)


@pytest.mark.parametrize(("path", "value"), CASES, ids=[f"{path}={str(value)[:20]!r}" for path, value in CASES])
def test_a_value_that_cannot_be_is_refused_in_one_line(path, value, saved):
    refusal(saved["gpt2"], change_at(path, value))


OPTIONAL = {"loss_scale", "router_bias", "skipped"}


def test_what_an_older_version_did_not_write_may_be_missing(saved):
    for place in saved.values():
        manifest = manifest_of(place)
        for key in OPTIONAL - {"skipped"}:
            del manifest[key]
        Checkpoint(place, signed(manifest))
        Checkpoint(place, signed(manifest | {"skipped": 2, "a key of a later version": [None]}))


def keys_of(value, path=()):
    """The path to every key of every object inside of a JSON value."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield (*path, key)
            yield from keys_of(each, (*path, key))
    if isinstance(value, list):
        for i, each in enumerate(value[:1]):
            yield from keys_of(each, (*path, i))


def test_each_other_key_that_is_missing_is_named(saved):
    place = saved["gpt2"]
    manifest = manifest_of(place)
    for path in keys_of(manifest):
        if path[0] in {*OPTIONAL, "checksum"} or path[:1] == ("model",) and len(path) > 1 or "flags" in path[:-1]:
            continue  # missing flags and sizes have their defaults
        spoilt = copy.deepcopy(manifest)
        parent = spoilt
        for key in path[:-1]:
            parent = parent[key]
        del parent[path[-1]]
        with pytest.raises(UsageError) as caught:
            Checkpoint(place, signed(spoilt))
        assert path[-1] in str(caught.value)


PLACES = {
    "step": ("step", -1, "step is -1, expected a whole number from 0 to 9223372036854775807"),
    "a piece": (f"{FIRST}.stop", "x", "files[0].pieces[0].stop is 'x', expected a whole number from 1"),
    "a name": ("files.1.name", "../x", "files[1].name is '../x', expected rank-00001.safetensors"),
    "a dim": ("parameters.ln_f\\bias", [2**31], "[0] is 2147483648, expected a whole number from 1 to 2147483647"),
    "a flag": (f"{FLAG}.--lr", -1, "history[0].flags.--lr is -1, expected a value inside (0, inf)"),
    "a choice": (f"{FLAG}.--order", 1, "history[0].flags.--order is 1, expected one of random, sequential"),
    "layers": ("model.n_layer", 1, "parameters: unexpected 12 names: h.1.ln_1.weight, h.1.ln_1.bias, "),
    "too many layers": ("model.n_layer", 10**8, "the number of layers times experts is 100000000, expected at most 28"),
    "bytes": ("files.0.bytes", 100, "files[0].bytes is 100, expected those of"),
    "a gap": (f"{FIRST}.stop", 63, "its files hold 127 elements of wte.weight of shape (15, 8), not each element once"),
    "the dtype": (f"{FLAG}.--dtype", "float32", "flags.--dtype is 'float32', expected float64, as in the rest"),
    "counts": ("optimizer_steps", 3, "optimizer_steps is 3, expected at most step, 2"),
}


@pytest.mark.parametrize("case", PLACES)
def test_the_line_names_the_place_the_value_and_what_fits(case, saved):
    path, value, message = PLACES[case]
    assert message in refusal(saved["gpt2"], change_at(path.replace("\\", "."), value))


def test_a_piece_of_a_parameter_that_is_not_listed_is_refused(saved):
    def change(manifest):
        pieces = manifest["files"][0]["pieces"]
        pieces.append(pieces[-1] | {"name": "nothing"})

    number = len(manifest_of(saved["gpt2"])["files"][0]["pieces"])
    assert f"files[0].pieces[{number}].name is 'nothing', expected a parameter's name" in refusal(saved["gpt2"], change)


OTHERS = {
    "fp16: good steps": ("llama", put("loss_scale", [65536.0, 3]), "loss_scale[1] is 3"),
    "fp16: a scale below 1": ("llama", put("loss_scale", [0.5, 0]), "loss_scale[0] is 0.5"),
    "llama: kv heads": ("llama", put("model.num_key_value_heads", 3), "heads 2 are not divisible by kv-heads 3"),
    "llama: theta": ("llama", put("model.rope_theta", -1), "model.rope_theta is -1"),
    "llama: tied": ("llama", put("model.tie_word_embeddings", 1), "model.tie_word_embeddings is 1"),
    "llama: a bias": ("llama", put("router_bias", [[0.0] * 4]), "the sizes of router_bias is [4], expected []"),
    "mixtral: a layer's biases": ("mixtral", put("router_bias", [[0.0] * 4]), "the sizes of router_bias is [4]"),
    "mixtral: an expert's bias": ("mixtral", put("router_bias", [[0.0] * 4, [0.0] * 3]), "expected [4, 4]"),
    "mixtral: an infinite bias": ("mixtral", put("router_bias.1.3", INFINITE), "router_bias[1][3] is inf"),
    "mixtral: experts": (
        "mixtral",
        put("model.num_local_experts", 10**8),
        "the number of layers times experts is 200000000",
    ),
    "mixtral: top k": ("mixtral", put("model.num_experts_per_tok", 5), "top-k 5 is more than experts 4"),
    "mixtral: another top k": ("mixtral", put("model.num_experts_per_tok", 2), "flags.--top-k is 1, expected 2"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_other_models_and_dtypes_are_checked_too(case, saved):
    model, change, message = OTHERS[case]
    assert message in refusal(saved[model], change)


def test_a_file_holds_all_of_its_elements(saved):
    """Three arrays: the parameters and two moments."""

    def change(manifest):
        file = manifest["files"][0]
        elements = sum(piece["stop"] - piece["start"] for piece in file["pieces"])
        file["bytes"] = 3 * elements * np.dtype(manifest["dtype"]).itemsize - 1

    assert "files[0].bytes is " in refusal(saved["gpt2"], change)


def repeat(path, times):
    def change(manifest):
        parent, key = at(manifest, path)
        parent[key] = parent[key] * times

    return change


REPEATED = {"files": 1000, "files.0.pieces": 2, "history.0.flags.--betas": 2, "loss_scale": 2}


@pytest.mark.parametrize("path", REPEATED)
def test_what_is_there_twice_is_refused(path, saved):
    refusal(saved["gpt2"], repeat(path, REPEATED[path]))


def shift(manifest):
    """Let the first piece of a parameter begin and end one element later: the number of elements is right."""
    pieces = [piece for file in manifest["files"] for piece in file["pieces"] if piece["name"] == "wpe.weight"]
    assert len(pieces) == 2
    pieces[0].update(start=1, stop=pieces[0]["stop"] + 1)


def test_a_gap_as_long_as_an_overlap_is_refused(saved):
    assert "hold 64 elements of wpe.weight of shape (8, 8), not each element once" in refusal(saved["gpt2"], shift)


def piece(start, stop, rank=None, ranks=2):
    cut = None if rank is None else Cut(dim=0, groups=1, rank=rank, ranks=ranks)
    return Piece("p", start, stop, cut)


COMPLETE = [
    [piece(0, 12)],
    [piece(5, 12), piece(0, 5)],
    [piece(0, 6, 0), piece(0, 6, 1)],
    [piece(3, 6, 1), piece(0, 6, 0), piece(0, 3, 1)],
]
INCOMPLETE = [
    [],
    [piece(0, 11)],
    [piece(0, 13)],
    [piece(0, 6), piece(5, 11)],
    [piece(0, 6), piece(0, 6)],
    [piece(0, 12), piece(0, 12)],
    [piece(0, 6, 0)],
    [piece(0, 6, 1)],
    [piece(0, 6, 0), piece(0, 6, 0)],
    [piece(0, 12, 0)],
    [piece(0, 6, 0), piece(0, 6, 1), piece(0, 6, 2)],
    [piece(0, 6, 0), piece(0, 6, 1, ranks=3)],
    [piece(0, 6, 0), piece(6, 12)],
]


def test_pieces_are_each_element_once():
    for pieces in COMPLETE:
        check_pieces("p", (4, 3), pieces)
    for pieces in INCOMPLETE:
        with pytest.raises(ValueError, match="elements of p of shape"):
            check_pieces("p", (4, 3), pieces)


def test_a_manifest_that_is_too_large_is_refused_unread(saved, tmp_path):
    shutil.copytree(saved["gpt2"], tmp_path / "step-00000002")
    path = tmp_path / "step-00000002" / "manifest.json"
    path.write_bytes(path.read_bytes() + b" " * MOST_BYTES)
    config = config_for(f"{MODELS['gpt2']} --resume {tmp_path}", 4)
    with pytest.raises(UsageError, match=r"manifest.json has 33,\d\d\d,\d\d\d bytes, expected at most 33,554,432"):
        open_checkpoint(config, TOKENS, serial())


# ---- files that do not hold what the manifest says -------------------------------------------------------------------


def forge(place, change) -> None:
    """Change a file's tensors, and its size and digest in the manifest."""
    path, manifest = place / "rank-00000.safetensors", manifest_of(place)
    data = save(change(load(path.read_bytes())))
    path.write_bytes(data)
    manifest["files"][0] |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (place / "manifest.json").write_bytes(signed(manifest))


KEY = "exp_avg/wte.weight"
FORGED = {
    "longer": (lambda tensors: tensors | {KEY: np.zeros(65)}, "shape (65,), but the manifest says 64 of float64"),
    "shorter": (lambda tensors: tensors | {KEY: np.zeros(1), "more": np.zeros(99)}, f"{KEY} is float64 of shape (1,)"),
    "2-D": (lambda tensors: tensors | {KEY: np.zeros((8, 8))}, f"{KEY} is float64 of shape (8, 8)"),
    "another dtype": (lambda tensors: tensors | {KEY: np.zeros(64, np.int64)}, f"{KEY} is int64 of shape (64,)"),
    "missing": (lambda tensors: {key: tensors[key] for key in tensors if key != KEY} | {"x": np.zeros(99)}, KEY),
}  # fmt: skip


@pytest.mark.parametrize("case", FORGED)
def test_a_file_without_what_the_manifest_says_is_refused(case, saved, tmp_path):
    change, message = FORGED[case]
    place = tmp_path / "step-00000002"
    shutil.copytree(saved["gpt2"], place)
    forge(place, change)
    config = config_for(f"{MODELS['gpt2']} --dp 1 --tp 1 --zero-stage 0 --resume {tmp_path}")
    with pytest.raises(UsageError) as caught:
        trainer_for(config, TOKENS)
    assert str(place / "rank-00000.safetensors") in str(caught.value) and message in str(caught.value)


def test_under_mpirun_every_rank_refuses_in_one_line(saved, tmp_path):
    """One command for each kind of value, on 3 ranks."""
    paths = [path for path in WRONG if not path.startswith("parameters.")][::3]
    commands = []
    for i, path in enumerate(paths):
        place = tmp_path / str(i) / "step-00000002"
        shutil.copytree(saved["gpt2"], place)
        manifest = manifest_of(place)
        put(path, WRONG[path][0])(manifest)
        (place / "manifest.json").write_bytes(signed(manifest))
        commands.append(["minipar.train", "--resume", str(place.parent)])
    for path, result in zip(paths, run_each(3, commands), strict=True):
        assert result.returncode == 2 and result.stdout == "" and result.stderr.count("\n") == 1, (path, result)


@pytest.mark.parametrize("value", [2 * int(sys.float_info.max), INFINITE, NAN], ids=["whole", "inf", "nan"])
def test_a_number_is_at_most_the_largest_float(value):
    """Whole or not: json reads whole numbers of any length."""
    for right in (sys.float_info.max, int(sys.float_info.max), -sys.float_info.max):
        Number().check(right, "here")
    with pytest.raises(ValueError, match="here is .*a finite number"):
        Number().check(value, "here")
