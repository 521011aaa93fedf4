"""The planner: its flags, a GPU's file and a model's directory, each changed at random."""

from __future__ import annotations

from fuzz.strategies import cases, command_lines, json_files, names, or_no_file, words
from fuzz.worker import Case
from hypothesis import strategies as st

PLAN = "minipar.plan.__main__:main"
SMALL = "--gpus 1 --global-batch 1 --seq-len 8 --tp 1 --pp 1 --zero-stage 0 --recompute none --top 1".split()
WARM = Case(("--model", "gpt2", "--gpu", "a100", *SMALL))

MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2, "model_type": "mixtral"}
GPU = {"peak": 1e14, "memory": 8e10, "memory_bandwidth": 1e12, "inside": 3e11, "between": 2.5e10}
LIKE = {"like": "a100", "memory": 4e10}


def gpu_case(name: str, content: bytes | str) -> Case:
    return Case(("--model", "gpt2", "--gpu", name, *SMALL), {name: content})


gpu_files = cases(gpu_case, name=names(".json"), content=or_no_file(json_files(GPU) | json_files(LIKE)))


def test_a_gpu_file_plans_or_is_refused(fuzzed):
    count = fuzzed(PLAN, gpu_files, share=0.12, warm=WARM)
    assert 0 < count.succeeded < count.cases


PROGRAM = {"like": "nanotron", "products": 0.5, "host_layer": 1e-3}


def program_case(name: str, content: bytes | str) -> Case:
    return Case(("--model", "gpt2", "--gpu", "a100", "--program", name, *SMALL), {name: content})


def test_a_programs_file_plans_or_is_refused(fuzzed):
    contents = or_no_file(json_files(PROGRAM))
    count = fuzzed(PLAN, cases(program_case, name=names(".json"), content=contents), share=0.12, warm=WARM)
    assert 0 < count.succeeded < count.cases


GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": 64, "n_positions": 16}
LLAMA = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 64,
    "intermediate_size": 24, "num_key_value_heads": 1, "tie_word_embeddings": False,
}  # fmt: skip


def model_case(name: str, content: bytes | str) -> Case:
    return Case(("--model", name, "--gpu", "a100", *SMALL), {f"{name}/config.json": content})


def test_a_models_directory_plans_or_is_refused(fuzzed):
    contents = or_no_file(json_files(GPT2 | {"n_inner": None}) | json_files(LLAMA) | json_files(LLAMA | MIXTRAL))
    count = fuzzed(PLAN, cases(model_case, name=names(), content=contents), share=0.12, warm=WARM)
    assert 0 < count.succeeded < count.cases


FLAGS = {
    "--model": ["gpt2", "gpt2-xl", "llama-3-8b", "mixtral-8x7b", "megatron-1t", "GPT2", "directory"],
    "--gpu": ["a100", "v100", "H100", "h200"],
    "--gpus": ["1", "2", "6", "8", "16"],
    "--gpus-per-node": ["1", "2", "8"],
    "--global-batch": ["1", "2", "8", "12"],
    "--seq-len": ["1", "64", "1024", "4096", "65536"],
    "--precision": ["fp16", "bf16"],
    "--attention": ["stored", "flash"],
    "--program": ["megatron", "nanotron", "Minipar"],
    "--dp": ["1", "2", "8"],
    "--tp": ["1", "2", "8", "16"],
    "--pp": ["1", "2", "8"],
    "--cp": ["1", "2", "1,2,4", "3"],
    "--ep": ["1", "2", "1,2,4", "3"],
    "--etp": ["1", "2", "1,2,4", "3"],
    "--context-parallel": ["ring", "all-gather", "ulysses"],
    "--cp-order": ["zigzag", "contiguous"],
    "--microbatch": ["1", "2"],
    "--zero-stage": ["0", "1", "2", "3", "0,1,3"],
    "--zero-replicas": ["1", "2", "1,2", "0", "999999999999"],
    "--schedule": ["1f1b", "gpipe", "naive", "interleaved-1f1b", "zb-h1", "zb-h2", "zbv"],
    "--recompute": ["none", "selective", "full"],
    "--sequence-parallel": ["on", "off"],
    "--top": ["1", "5", "50"],
    "--json": ["-", "out.json", "/dev/null", "/dev/full"],
}
VALID = {"--model": ["gpt2"], "--gpus": ["2"], "--gpu": ["a100"], "--global-batch": ["2"], "--seq-len": ["64"]}


def flags_case(argv: tuple[str, ...]) -> Case:
    return Case(argv, {"directory": "directory"}, outputs=outputs(argv))


def outputs(argv: tuple[str, ...]) -> tuple[str, ...]:
    """Return what follows a flag that names an output."""
    named = [value for flag, value in zip(argv, argv[1:], strict=False) if flag == "--json"]
    return (*named, *(word.partition("=")[2] for word in argv if word.startswith("--json=")))


def test_flags_plan_or_are_refused(fuzzed):
    lines = command_lines(VALID, FLAGS, most=5)
    count = fuzzed(PLAN, cases(flags_case, argv=lines), share=0.06, warm=WARM)
    assert 0 < count.succeeded < count.cases


def test_the_command_names_its_commands(fuzzed):
    # Always with an output that is read: `minipar --help > /dev/full` is an OSError of minipar/__main__.py.
    first = st.sampled_from(("plan", "visualize", "Train", "trian", "--help", "-h", "")) | words
    lines = st.lists(first, max_size=2).map(tuple)
    fuzzed("fuzz.worker:minipar", st.builds(Case, argv=lines), share=0.02, warm=Case(("visualize", "--help")))
