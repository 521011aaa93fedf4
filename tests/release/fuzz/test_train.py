"""The trainer on one rank: its flags, its data files, and the model directories of --init-from."""

from __future__ import annotations

import dataclasses
import json
import struct
from functools import cache
from typing import Any

from fuzz.strategies import changed, command_lines, damaged, names, or_no_file, to_json
from fuzz.worker import Case
from hypothesis import strategies as st

TRAIN = "fuzz.worker:train"
BIN = struct.pack("<40H", *(i % 16 for i in range(40)))
SIZES = "--layers 1 --hidden 4 --heads 1 --vocab-size 16".split()
SHORT = "--seq-len 4 --global-batch 1 --steps 1".split()
WARM = Case((*SIZES, *SHORT, "--data", "d.bin", "--save", "s", "--export", "e"), {"d.bin": BIN})


# ---- data ------------------------------------------------------------------------------------------------------------


def data_case(name: str, content: bytes | str, evaluates: bool, order: str) -> Case:
    argv = [*SIZES, *SHORT, "--order", order, "--data", name]
    argv += ["--eval-every", "1"] if evaluates else []
    return Case(tuple(argv), {name: content})


def test_a_data_file_is_trained_on_or_refused(fuzzed):
    ids = st.lists(st.integers(0, 17) | st.sampled_from((15, 65535)), max_size=60)
    binary = ids.map(lambda values: struct.pack(f"<{len(values)}H", *values)).flatmap(damaged)
    text = st.lists(st.integers(0, 16), max_size=60).map(bytes).flatmap(damaged)
    files = st.one_of(st.tuples(names(".bin"), or_no_file(binary)), st.tuples(names(".txt"), or_no_file(text)))
    strategy = st.builds(
        lambda file, evaluates, order: data_case(*file, evaluates, order),
        files,
        st.sampled_from((False, False, True)),
        st.sampled_from(("random", "sequential")),
    )
    count = fuzzed(TRAIN, strategy, share=0.08, warm=WARM)
    assert 0 < count.succeeded < count.cases


# ---- model directories -----------------------------------------------------------------------------------------------


@cache
def exported(model: str = "gpt2") -> dict[str, bytes]:
    """Return the files that --export writes for a tiny model."""
    from safetensors.numpy import save

    from minipar import GPTConfig, LlamaConfig, MixtralConfig

    config = {
        "gpt2": GPTConfig(16, 4, 4, 1, 1),
        "llama": LlamaConfig(16, 4, 8, 1, 2, 1, 4),
        "mixtral": MixtralConfig(16, 4, 8, 1, 2, 1, 4, num_local_experts=2, num_experts_per_tok=1),
    }[model]
    content = dataclasses.asdict(config) | {"model_type": model}
    content |= {"n_inner": None} if model == "gpt2" else {"head_dim": 2, "rope_scaling": None, "hidden_act": "silu"}
    weights = save(config.build().state_dict(), metadata={"format": "pt"})
    return {"config.json": json.dumps(content).encode(), "model.safetensors": weights}


def with_header(data: bytes, header: Any) -> bytes:
    """Return a safetensors file with another header: 8 bytes of its length, JSON, then the tensors."""
    (length,) = struct.unpack("<Q", data[:8])
    text = to_json(header).encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(text)) + text + data[8 + length :]


def header_of(data: bytes) -> Any:
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length])


def tensors(data: bytes) -> st.SearchStrategy[bytes]:
    """safetensors files: damaged ones, and ones whose header is changed."""
    return damaged(data) | changed(header_of(data)).map(lambda header: with_header(data, header)).flatmap(damaged)


@st.composite
def model_directories(draw: st.DrawFn) -> Case:
    model = exported(draw(st.sampled_from(("gpt2", "llama", "mixtral"))))
    files: dict[str, bytes | str] = {f"m/{name}": content for name, content in model.items()}
    if draw(st.booleans()):
        config = damaged(model["config.json"])
        files["m/config.json"] = draw(or_no_file(config))
    else:
        files["m/model.safetensors"] = draw(or_no_file(tensors(model["model.safetensors"])))
    if draw(st.integers(0, 19)) == 0:
        del files[draw(st.sampled_from(sorted(files)))]
    return Case(
        (*SHORT, "--data", "d.bin", "--init-from", draw(st.sampled_from(("m", "m", "m/", "m/config.json")))),
        files | {"d.bin": BIN},
    )


def test_a_model_directory_is_loaded_or_refused(fuzzed):
    count = fuzzed(TRAIN, model_directories(), share=0.12, warm=WARM)
    assert 0 < count.succeeded < count.cases


# ---- flags -----------------------------------------------------------------------------------------------------------

FLAGS = {
    "--dp": ["1", "2"],
    "--tp": ["1", "2"],
    "--pp": ["1", "2"],
    "--schedule": ["1f1b", "gpipe", "missing.csv"],
    "--virtual-stages": ["2"],
    "--sequence-parallel": [],
    "--cp": ["1", "2", "3", "0"],
    "--context-parallel": ["ring", "all-gather", "ulysses"],
    "--ep": ["1", "2", "3", "0"],
    "--zero-stage": ["0", "1", "2", "3"],
    "--zero-replicas": ["1", "2", "3", "0"],
    "--sync-every-microbatch": [],
    "--layers": ["1", "2"],
    "--hidden": ["4", "8"],
    "--heads": ["1", "2", "3"],
    "--seq-len": ["1", "4", "39", "40"],
    "--vocab-size": ["16", "1", "256", "70000"],
    "--model": ["gpt2", "llama", "mixtral"],
    "--init-from": ["missing", "directory"],
    "--data": ["d.bin", "missing", "directory"],
    "--order": ["random", "sequential"],
    "--global-batch": ["1", "4"],
    "--microbatches": ["1", "2"],
    "--eval-every": ["1", "2"],
    "--steps": ["1", "2"],
    "--lr": ["1e-3", "1e6", "3e38", "1e-320"],
    "--lr-schedule": ["constant", "cosine"],
    "--warmup-steps": ["0", "1"],
    "--betas": ["0.9 0.99", "0 0", "0.9", "1 1"],
    "--weight-decay": ["0", "1e300"],
    "--dropout": ["0.5", "0.999999"],
    "--clip-grad": ["1", "1e-320"],
    "--seed": ["0", "18000000000000000000"],
    "--dtype": ["float32", "float64", "bfloat16", "float16", "bf16"],
    "--device": ["cpu", "gpu"],  # not cuda: it would load CuPy and, where there is one, a GPU
    "--recompute": ["none", "full"],
    "--reduction": ["ring", "ordered", "tree"],
    "--metrics": ["o.jsonl", "new/o.jsonl", "directory", "/dev/null"],
    "--trace": ["o.json", "new/t.json", "directory"],
    "--clock": ["wall", "cpu", "model"],
    "--memory": ["o.json", "m.json"],
    "--record": ["r", "directory"],
    "--network": ["1e-6 1e-9", "0 0", "1e300 1e300"],
    "--save": ["s", "new/s", "d.bin", "directory"],
    "--save-every": ["1", "2"],
    "--resume": ["missing", "directory", "s"],
    "--export": ["e", "new/e", "d.bin", "directory"],
    "--verify": [],
}
VALID = {
    "--layers": ["1"], "--hidden": ["4"], "--heads": ["1"], "--vocab-size": ["16"], "--seq-len": ["4"],
    "--global-batch": ["1"], "--steps": ["1"], "--data": ["d.bin"],
}  # fmt: skip
OUTPUTS = ("--metrics", "--trace", "--memory", "--record", "--save", "--export")


def flags_case(argv: tuple[str, ...]) -> Case:
    named = [value for flag, value in zip(argv, argv[1:], strict=False) if flag in OUTPUTS]
    named += [word.partition("=")[2] for word in argv if word.startswith(tuple(f"{flag}=" for flag in OUTPUTS))]
    return Case(argv, {"d.bin": BIN, "directory": "directory"}, outputs=tuple(named))


def ends_soon(argv: tuple[str, ...]) -> bool:
    """Return whether --steps has no value of nine digits or more, which is a long training and no defect."""
    words = [word for each in argv for word in each.split("=", 1)]
    return not any(
        flag == "--steps" and len(value.strip()) > 8 and value.strip().isdecimal()
        for flag, value in zip(words, words[1:], strict=False)
    )


flag_cases = st.builds(flags_case, command_lines(VALID, FLAGS, most=4).filter(ends_soon))


def test_flags_train_or_are_refused(fuzzed):
    count = fuzzed(TRAIN, flag_cases, share=0.15, warm=WARM)
    assert 0 < count.succeeded < count.cases


def test_every_flag_is_fuzzed():
    from minipar.train.flags import make_parser

    assert {action.option_strings[-1] for action in make_parser(False)._actions} == {*FLAGS, "--help", "--version"}
