"""Claims about command lines: a mistake is one line that shows the user's values, on every rank, and exit code 2."""

import re
from dataclasses import replace

import pytest
from launcher import run_each, run_mpi
from refusals import check_message, refused, shown
from training import config_for

import minipar
from minipar import generate
from minipar.bench.__main__ import bench
from minipar.cli import report
from minipar.comm.threads import serial
from minipar.compare import differences
from minipar.errors import UsageError, printable
from minipar.hints import ELSEWHERE, letters
from minipar.nn import GPT, GPTConfig
from minipar.nn.pretrained import save_pretrained
from minipar.plan import __main__ as plan
from minipar.train.config import check_settings, parse
from minipar.train.settings import TrainConfig
from visualize import __main__ as visualize

# ---- the flags of a training -----------------------------------------------------------------------------------------

APART = "--model mixtral --sequence-parallel --tp 2 --etp 1"
TRAIN = {  # the flags, on how many ranks (as many as the mesh has), and what the line shows
    "--bogus 3": (1, "--bogus", "3"),
    "--hid 32": (1, "--hid", "32"),
    "--dtype float8": (1, "--dtype", "float8"),
    "--lr fast": (1, "--lr", "fast"),
    "--steps 1.5": (1, "--steps", "1.5"),
    "--steps": (1, "--steps"),
    "--betas 0.9": (1, "--betas", "2"),
    "--data=--": (1, "--data"),
    "--data=": (1, "--data"),
    "--export=": (1, "--export"),
    "--lr nan": (1, "--lr", "nan", "0", "inf"),
    "--lr 0": (1, "--lr", "0.0"),
    "--lr -1": (1, "--lr", "-1.0"),
    "--steps 0": (1, "--steps", "0", "1"),
    "--betas 0.9 1": (1, "--betas", "1.0"),
    "--eps 0": (1, "--eps", "0.0"),
    "--weight-decay -0.1": (1, "--weight-decay", "-0.1"),
    "--clip-grad nan": (1, "--clip-grad", "nan"),
    "--seed -1": (1, "--seed", "-1"),
    "--zero-stage 4": (1, "--zero-stage", "4", "3"),
    "--memory-limit 0": (1, "--memory-limit", "0"),
    "--memory-limit 1TB": (1, "--memory-limit", "1TB"),
    "--warmup-steps 5 --steps 4 --lr 0.001": (1, "5", "4", "0.001"),
    "--hidden 64 --heads 5": (1, "64", "5"),
    "--schedule gpipe": (1, "--schedule", "gpipe", "--pp"),
    "--virtual-stages 2": (1, "--virtual-stages", "2", "--pp"),
    "--sequence-parallel": (1, "--sequence-parallel", "--tp"),
    "--network 1e-6 0": (1, "--network", "1e-06", "--clock"),
    "--clock cpu": (1, "--clock", "cpu", "--trace"),
    "--save-every 3": (1, "--save-every", "3", "--save"),
    "--init-from d --layers 3": (1, "--init-from", "--layers"),
    "--resume a --init-from b": (1, "--resume", "--init-from"),
    "--zero-replicas 2": (1, "--zero-replicas", "2", "--zero-stage"),
    "--zero-stage 1 --sync-every-microbatch": (1, "--zero-stage", "1", "--sync-every-microbatch"),
    "--zero-stage 2 --sync-every-microbatch --pp 2": (2, "--sync-every-microbatch"),
    "--cp-order contiguous": (1, "--cp-order", "--cp"),
    "--cp 2 --dropout 0.1": (2, "--dropout", "0.1", "ring", "ulysses"),
    "--dropout 0.1 --attention blockwise": (1, "--dropout", "0.1", "blockwise", "full"),
    "--model mixtral --tp 2 --etp 1": (2, "--etp", "1", "2", "--sequence-parallel"),
    "--model mixtral --cp 2 --capacity-factor 1": (2, "--capacity-factor", "--cp"),
    f"{APART} --capacity-factor 1": (2, "--capacity-factor", "--etp"),
    "--model mixtral --dp 2 --ep 2 --zero-stage 1 --zero-replicas 2": (2, "zero-replicas", "2", "ep"),
    "--dp 4 --zero-stage 3 --zero-replicas 3": (4, "dp/zero-replicas", "4/3"),
    "--cp 2 --seq-len 6": (2, "seq-len/(2*cp)", "6/4"),
    "--cp 2 --cp-order contiguous --tp 2 --sequence-parallel --seq-len 6": (4, "3/2"),
    "--cp 4 --tp 2 --context-parallel ulysses": (8, "heads/cp", "2/4"),
    "--model llama --kv-heads 2 --cp 2 --tp 2 --context-parallel ulysses": (4, "kv-heads/cp", "1/2"),
    "--reduction tree --microbatches 3": (1, "--reduction", "tree", "3"),
    "--reduction tree --cp 2": (2, "--reduction", "tree", "--cp"),
    "--reduce-dtype fp32": (1, "--reduce-dtype", "float32", "--dtype"),
    "--dtype bf16 --reduce-dtype fp16": (1, "--reduce-dtype", "float16", "--dtype"),
    "--dp 3": (8, "dp", "3", "8"),
    "--dp 8": (1, "dp", "8", "mpirun"),
    "--tp 3 --heads 3 --hidden 24": (8, "tp", "3", "8"),
    "--tp 2 --pp 3": (8, "tp*pp", "2*3", "6", "8"),
    "--dp 2 --tp 2 --pp 3": (8, "dp*tp*pp", "2*2*3", "12", "8"),
    "--pp 4 --tp 2": (1, "tp*pp", "2*4", "8"),
    "--global-batch 10 --microbatches 3": (4, "global-batch", "10", "dp*microbatches", "4*3", "12"),
    "--global-batch 7": (2, "global-batch", "7", "2*1"),
}


@pytest.mark.parametrize("flags", TRAIN)
def test_a_wrong_flag_of_a_training_is_refused(flags):
    ranks, *values = TRAIN[flags]
    refused(UsageError, *values, by=lambda: config_for(flags, ranks))


def test_a_program_that_makes_a_configuration_is_checked_too():
    config = TrainConfig()
    wrong = replace(config, run=replace(config.run, dtype="int8"))
    refused(UsageError, "--dtype", "int8", "float32", "float64", by=lambda: check_settings(wrong))


# ---- the flag that was meant -----------------------------------------------------------------------------------------

MEANT = {  # what is written, of which command, and the answer
    "train --layer 2": "--layers",
    "train --LAYERS 2": "--layers",
    "train --zero_stage 1": "--zero-stage",
    "train --stage 2": "--zero-stage",
    "train --global_batch_size=4": "--global-batch",
    "train --sequence_paralel": "--sequence-parallel",
    "train --num-layers 2 --hidden-size 64 --nonsense": "--layers, --hidden",
    "train --batch-size 4": "--global-batch (the samples of all ranks)",
    "train --micro-batch-size 4": "--microbatches (how many, not how large)",
    "train --gradient_accumulation_steps 4": "--microbatches",
    "train --bf16": "--dtype bf16",
    "train --tensor-model-parallel-size 2": "--tp",
    "train --pipeline-model-parallel-size 2": "--pp",
    "train --context-parallel-size 2": "--cp",
    "train --data-parallel-size 2": "--dp",
    "train --learning_rate 1e-3": "--lr",
    "train -lr 1e-3": "--lr",
    "train --block_size 8": "--seq-len",
    "train --n_head 2": "--heads",
    "train --max_iters 3": "--steps",
    "train --output_dir d": "--save",
    "train --nproc_per_node 2": "mpirun -n N",
    "plan --bf16": "--precision bf16",
    "plan --micro-batch-size 3": "--microbatch",
    "bench step --batch-size 3": "--batch",
    "bench stp": "step",
    "visualize schedul": "schedule",
}


@pytest.fixture
def answer(capsys, monkeypatch):
    """A function that runs a command in this process, and returns its exit code, output and line of error."""

    def run(words):
        name, *argv = words.split()
        monkeypatch.setattr("sys.argv", ["program", *argv])
        programs = {"plan": plan.main, "generate": generate.main, "compare": differences.main}
        programs |= {"visualize": visualize.main, "train": parse, "bench": lambda argv: bench(serial())}
        code, line = 0, ""
        try:
            code = programs[name](argv)
        except UsageError as error:
            code, line = 2, str(error)
        except SystemExit as leaving:
            code = leaving.code
        printed = capsys.readouterr()
        return code, printed.out, line or printed.err.rstrip("\n")

    return run


@pytest.mark.parametrize("words", MEANT)
def test_an_unknown_flag_is_answered_with_the_one_that_was_meant(words, answer):
    code, out, line = answer(words)
    assert (code, out) == (2, "")
    check_message(line, MEANT[words])


@pytest.mark.parametrize("command", ["train", "plan", "generate", "compare", "bench step", "visualize schedule"])
def test_a_misspelt_flag_of_any_command_is_answered(command, answer):
    """Each flag with its last letter doubled; a flag is never abbreviated."""
    code, text, _ = answer(f"{command} --help")
    flags = re.findall(r"^  (?:-\w, )?(--[\w-]{3,})", text, re.MULTILINE)
    assert code == 0 and "--version" in flags
    for flag in flags:
        code, out, line = answer(f"{command} {flag}{flag[-1]} x")
        assert (code, out) == (2, "") and shown(line, flag) and shown(line, flag + flag[-1])
    code, out, line = answer(f"{command} --versio")
    assert (code, out) == (2, "") and "--version" in line
    assert answer(f"{command} --version") == (0, f"minipar {minipar.__version__}\n", "")


def test_every_answer_is_a_flag_that_some_command_has(answer):
    commands = ["train", "plan", "generate", "compare", "bench step", "bench modelled", "visualize schedule"]
    helps = "".join(answer(f"{command} --help")[1] for command in commands)
    flags = {*re.findall(r"--[\w-]+", helps), "mpirun"}
    assert [ours for ours in ELSEWHERE if ours.split()[0] not in flags] == []
    for theirs in ELSEWHERE.values():
        assert [name for name in theirs.split() if name != letters(name)] == []


def test_what_resembles_no_flag_is_answered_with_none(answer):
    for words in ("train --nonsense 1", "train --lr -1", "compare a b --zero 2", "generate --from nowhere --prompt x"):
        code, out, line = answer(words)
        flags = set(re.findall(r"--[\w-]+", line))
        assert (code, out) == (2, "") and flags <= set(words.split())


# ---- on ranks --------------------------------------------------------------------------------------------------------

TINY = "--layers 1 --hidden 16 --heads 2 --seq-len 16 --global-batch 6"
ON_TWO_RANKS = {
    "--data {}/nowhere.txt": ("nowhere.txt",),
    "--data {}/empty.txt": ("empty.txt",),
    "--data {}": ("--data",),
    "--data {}/short.txt --seq-len 64": ("short.txt", "10"),
    "--data {}/short.txt --seq-len 4 --vocab-size 100": ("120", "3", "100"),
    "--data {}/odd.bin": ("odd.bin",),
    "--init-from {}/nowhere": ("nowhere", "config.json"),
    "--init-from gpt2": ("gpt2", "config.json"),
    "--init-from {}/gpt2": ("ln_f.bias",),
    "--metrics {}/short.txt/m.jsonl": ("--metrics", "m.jsonl"),
    "--global-batch 1000000000000 --seq-len 8": ("1000000000000", "8"),
    "--device tpu": ("--device", "tpu"),
    "--layer 3": ("--layer", "--layers"),
    "--dp 3": ("3", "2"),
    f"{TINY} --memory-limit 50KB": ("50,000", "--zero-stage"),
    f"{TINY} --steps 5 --lr 1e30": ("--lr",),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Files that cannot be trained on; in short.txt the largest token, at position 3, is 120."""
    folder = tmp_path_factory.mktemp("bad")
    (folder / "empty.txt").touch()
    (folder / "short.txt").write_text("abcxefghij")
    (folder / "odd.bin").write_bytes(bytes(2001))
    model = GPT(GPTConfig(256, 64, 16, 1, 2))
    state = model.state_dict()
    del state["ln_f.bias"]
    save_pretrained(model, folder / "gpt2", state)
    return folder


def test_every_rank_refuses_and_one_of_them_says_why(folder):
    """In one job of two ranks, in which a rank that goes on would wait for the others."""
    commands = [["minipar.train", *flags.format(folder).split()] for flags in ON_TWO_RANKS]
    for result, (flags, values) in zip(run_each(2, commands), ON_TWO_RANKS.items(), strict=True):
        assert result.returncode == 2, flags
        (line,) = result.stderr.splitlines()
        assert line.startswith("minipar: error: ")
        assert [value for value in values if value not in line] == []


def test_the_exit_code_of_a_refusal_is_mpiruns():
    result = run_mpi(2, ["-m", "minipar.train", "--layer", "3"], timeout=30)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1) and "--layers" in result.stderr


# ---- lines -----------------------------------------------------------------------------------------------------------


def test_an_error_is_one_line_whatever_it_holds(capsys):
    assert report(UsageError("a\n  b\x1b[2J\r\n")) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "a b\\x1b[2J" in err
    assert printable("a\x1b[2Jb\n\rß/日本\x7f\u2028") == "a\\x1b[2Jb\\n\\rß/日本\\x7f\\u2028"
