"""Text from a model: every flag, and a model directory or a checkpoint that is not there or not one."""

from __future__ import annotations

import json
from functools import cache

from fuzz.strategies import command_lines, damaged, json_files, or_no_file
from fuzz.worker import Case
from hypothesis import strategies as st

MAIN = "minipar.generate:main"
FLAGS = {
    "--prompt": ["def ", "", "é\n", "\x00"],
    "--temperature": ["0", "0.7", "1e-300", "1e300", "inf"],
    "--seed": ["0", "1"],
    "--from": ["m", "missing", "empty", "m/config.json", "auto"],
}


@cache
def exported() -> dict[str, bytes]:
    """Return the files of a tiny model whose tokens are bytes."""
    from safetensors.numpy import save

    from minipar.nn import GPT, GPTConfig

    config = {"vocab_size": 256, "n_positions": 4, "n_embd": 4, "n_layer": 1, "n_head": 1}
    weights = save(GPT(GPTConfig(**config)).state_dict(), metadata={"format": "pt"})
    return {"config.json": json.dumps(config | {"model_type": "gpt2"}).encode(), "model.safetensors": weights}


def case(argv: tuple[str, ...], config: bytes | str, weights: bytes | str) -> Case:
    return Case(argv, {"m/config.json": config, "m/model.safetensors": weights, "empty/note": b""})


def test_a_text_is_continued_or_refused(fuzzed):
    whole = exported()
    configs = st.just(whole["config.json"]) | or_no_file(json_files(json.loads(whole["config.json"])))
    weights = st.just(whole["model.safetensors"]) | or_no_file(damaged(whole["model.safetensors"]))
    lines = command_lines({"--from": ["m"], "--tokens": ["2"]}, FLAGS)
    warm = case(("--from", "m", "--tokens", "2"), whole["config.json"], whole["model.safetensors"])
    count = fuzzed(MAIN, st.builds(case, lines, configs, weights), share=0.02, warm=warm)
    assert 0 < count.succeeded < count.cases
