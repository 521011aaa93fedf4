"""Claims about `mpirun -n N python -m minipar.train`: the proof, the files, and bad input that ends at once."""

import json
import time

import numpy as np
import pytest
from launcher import run_each, run_mpi, seconds_of_help

from minipar.nn import GPT, GPTConfig
from minipar.nn.pretrained import load_pretrained, save_pretrained

TRAIN = ["-m", "minipar.train"]
PROOF = (
    "--layers 2 --hidden 32 --heads 4 --seq-len 32 --global-batch 16 --steps 8 --dtype float64 --verify --dp 8"
).split()
# Buckets of 2,197 and 3,562 elements, which 8 ranks do not divide.
ZERO = (
    "--layers 2 --hidden 13 --heads 1 --seq-len 16 --global-batch 16 --steps 8 --dtype float64 --verify --dp 8 "
    "--clip-grad 1 --reduction ordered"
).split()
TINY = "--layers 1 --hidden 16 --heads 2 --seq-len 16 --global-batch 6 --steps 3".split()


@pytest.fixture(scope="module")
def on_8_ranks():
    """The proof in rank order, and that of stage 3, in one job."""
    commands = [[*PROOF, "--reduction", "ordered"], [*ZERO, "--zero-stage", "3"]]
    return run_each(8, [["minipar.train", *flags] for flags in commands], timeout=120)


def test_8_ranks_equal_one_device_bit_for_bit_in_rank_order(on_8_ranks):
    result = on_8_ranks[0]
    assert result.returncode == 0, result.stderr
    last = result.stdout.splitlines()[-1]
    assert last.startswith(
        "verify: 8 ranks = 1 device, bit for bit: loss, norm, gradients and updates of 28 parameters"
    )


@pytest.mark.parametrize("stage", [*(pytest.param(each, marks=pytest.mark.long) for each in "12"), "3"])
def test_8_ranks_with_sharded_state_equal_one_device_to_the_bit(stage, on_8_ranks):
    result = on_8_ranks[1] if stage == "3" else run_mpi(8, [*TRAIN, *ZERO, "--zero-stage", stage], timeout=60)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert f"minipar: 8 ranks: --dp 8 --zero-stage {stage}, global batch" in lines[1]
    assert lines[-1] == (
        "verify: 8 ranks = 1 device, bit for bit: "
        "loss, norm, gradients and updates of 28 parameters (7,956 values) in each of 8 steps"
    )


@pytest.mark.parametrize("ranks", [1, 3, *(pytest.param(ranks, marks=pytest.mark.long) for ranks in (2, 4, 5, 7))])
def test_any_number_of_ranks_equals_one_device_bit_for_bit(ranks):
    flags = [*TINY, "--global-batch", str(4 * ranks), "--microbatches", "2", "--reduction", "ordered", "--verify"]
    result = run_mpi(ranks, [*TRAIN, *flags, "--recompute", "full", "--clip-grad", "1"], timeout=60)
    assert result.returncode == 0, result.stderr
    assert f"verify: {ranks} rank" in result.stdout and "= 1 device, bit for bit" in result.stdout


@pytest.mark.long
def test_ranks_in_a_ring_equal_one_device_within_the_bound():
    result = run_mpi(4, [*TRAIN, *PROOF, "--dp", "4", "--reduction", "ring"], timeout=120)
    assert result.returncode == 0, result.stderr
    last = result.stdout.splitlines()[-1]
    assert "4 ranks = 1 device within rounding" in last and "bound 3.6e-15; updates equal" in last


def test_a_run_without_mpirun_is_a_run_on_one_rank(tmp_path):
    """... and its files are those of three ranks under mpirun, to the last digit of every loss."""
    losses = []
    for ranks in (1, 3):
        folder = tmp_path / str(ranks)
        files = f"--metrics {folder}/m.jsonl --trace {folder}/deep/t.json --clock cpu --export {folder}/gpt2"
        flags = [*TINY, "--dtype", "float64", "--reduction", "ordered", "--microbatches", "2", *files.split()]
        result = run_mpi(ranks, [*TRAIN, *flags], timeout=60)
        assert result.returncode == 0, result.stderr
        lines = [json.loads(line) for line in (folder / "m.jsonl").read_text().splitlines()]
        assert [set(line) for line in lines] == [{"step", "loss", "grad_norm", "seconds", "tokens_per_second"}] * 3
        assert [line["step"] for line in lines] == [0, 1, 2]
        events = json.loads((folder / "deep" / "t.json").read_text())["traceEvents"]
        slices = [e for e in events if e["ph"] == "X"]
        assert {e["pid"] for e in slices} == set(range(ranks))
        for rank in range(ranks):
            names = [e["name"] for e in slices if e["pid"] == rank and e["cat"] == "computation"]
            assert names.count("forward") == names.count("backward") == 6 and names.count("optimizer") == 3
        assert load_pretrained(folder / "gpt2").config == GPTConfig(256, 16, 16, 1, 2)
        losses.append([line["loss"] for line in lines])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-12)


def test_metrics_on_standard_output_are_alone_there():
    result = run_mpi(2, [*TRAIN, *TINY, "--metrics", "-", "--verify"], timeout=60)
    assert result.returncode == 0, result.stderr
    assert [json.loads(line)["step"] for line in result.stdout.splitlines()] == [0, 1, 2]
    assert "verify: 2 ranks = 1 device" in result.stderr


def test_a_memory_limit_refuses_a_stage_and_names_the_next():
    """A block of 3,280 and the rest, 4,384 parameters, of which rank 0 of 3 has 1,094 and 1,462."""
    flags = [*TINY, "--memory-limit", "50KB", "--verify", "--reduction", "ordered"]
    commands = [["minipar.train", *flags, *more] for more in ([], ["--zero-stage", "3"])]
    refused, trained = run_each(3, commands, timeout=30)
    assert refused.returncode == 2 and refused.stdout == ""
    assert refused.stderr == (
        "minipar: error: --memory-limit 50,000 bytes of model state per rank, but --zero-stage 0 on 3 data-parallel "
        "ranks holds 4*7,664 (parameters) + 4*7,664 (gradients) + 8*7,664 (optimizer) = 122,624 bytes; "
        "--zero-stage 3 fits: 4*2,556 (parameters) + 4*2,556 (gradients) + 8*2,556 (optimizer) = 40,896 bytes\n"
    )
    assert trained.returncode == 0, trained.stderr
    assert "verify: 3 ranks = 1 device, bit for bit" in trained.stdout


@pytest.mark.sampled(2)
@pytest.mark.parametrize("stage", ["0", "3"])
def test_a_gpt2_directory_trains_on_from_its_weights(stage, tmp_path):
    model = GPT(GPTConfig(300, 32, 16, 2, 4), seed=9, dtype="float64")
    save_pretrained(model, tmp_path / "start")
    np.random.Generator(np.random.Philox(1)).integers(0, 300, 2000).astype("<u2").tofile(tmp_path / "tokens.bin")
    flags = f"--init-from {tmp_path}/start --data {tmp_path}/tokens.bin --seq-len 16 --global-batch 4 --steps 2"
    flags += f" --lr 1e-9 --dtype float64 --reduction ordered --verify --export {tmp_path}/end --zero-stage {stage}"
    result = run_mpi(2, [*TRAIN, *flags.split()], timeout=60)
    assert result.returncode == 0, result.stderr
    assert "verify: 2 ranks = 1 device, bit for bit" in result.stdout
    end = load_pretrained(tmp_path / "end", dtype="float64")
    assert end.config == model.config
    for name, x in model.state_dict().items():
        np.testing.assert_allclose(end.state_dict()[name], x, atol=1e-8)


BAD_INPUT = {
    "a mesh that is not the world": (2, "--dp 3", "dp = 3, but mpirun started 2 ranks"),
    "a batch that does not divide": (4, "--global-batch 10 --microbatches 3",
        "global-batch 10 is not divisible by dp*microbatches = 4*3 = 12"),
    "a batch that no memory holds": (2, "--global-batch 1000000000000 --seq-len 8",
        "positions: 8 bytes * 1000000000000 samples * 8 tokens = 6.40000e+13 bytes, but this machine has"),
    "heads that do not divide hidden": (2, "--hidden 64 --heads 5", "hidden 64 is not divisible by heads 5"),
    "a missing data file": (2, "--data {tmp}/nowhere.txt", "nowhere.txt"),
    "an empty data file": (2, "--data {tmp}/empty.txt", "empty.txt is empty"),
    "a directory for data": (2, "--data {tmp}", "directory"),
    "too short a text": (2, "--data {tmp}/short.txt --seq-len 64", "holds 10 tokens"),
    "a token beyond the vocabulary": (2, "--vocab-size 100 --data {tmp}/short.txt --seq-len 4",
        "token 120 at position 3 is not below vocab-size 100"),
    "half a token": (2, "--data {tmp}/odd.bin", "odd number"),
    "no GPT-2 directory": (2, "--init-from {tmp}/nowhere", "config.json"),
    "a model's name": (2, "--init-from gpt2", "gpt2 is not a directory with a config.json"),
    "a tensor missing": (2, "--init-from {tmp}/gpt2", "missing ln_f.bias"),
    "an unknown flag": (2, "--layer 3", "unrecognized arguments: --layer 3; did you mean --layers?"),
    "an unknown choice": (2, "--reduction star", "star"),
    "not a number": (2, "--steps many", "many"),
    "a negative rate": (2, "--lr -1", "lr"),
    "not a finite rate": (2, "--lr nan", "nan"),
    "a file that cannot be written": (2, "--metrics {tmp}/short.txt/m.jsonl", "--metrics"),
    "a clock without a trace": (2, "--clock cpu", "--clock cpu does nothing without --trace FILE.json"),
    "a network without a logical clock": (2, "--network 1e-6 1e-9", "does nothing without --clock cpu or model"),
    "a rate at which training diverges": (2, "--lr 1e30 --steps 5 --layers 1 --hidden 16 --heads 2",
        "training has diverged"),
    "a ZeRO stage that does not exist": (2, "--zero-stage 4", "--zero-stage 4 is outside [0, 3]"),
    "a negative ZeRO stage": (2, "--zero-stage -1", "--zero-stage -1 is outside [0, 3]"),
    "a limit of nothing": (2, "--memory-limit 0", "'0' is not a number of bytes"),
    "a limit that is no number": (2, "--memory-limit x", "'x' is not a number of bytes such as 1500000, 1.5MB or 512"),
    "a limit too small for any stage": (2, "--memory-limit 1MB --layers 1 --hidden 256 --zero-stage 1",
        "8*436,096 (optimizer) = 10,466,304 bytes; the least, --zero-stage 3, holds 4*436,096 (parameters)"),
    "a limit too small for half of the shards": (4,
        "--memory-limit 500KB --layers 1 --hidden 64 --zero-stage 3 --zero-replicas 2",
        "--zero-stage 3 on 2 data-parallel ranks holds 4*35,296 (parameters) + 4*35,296"),
    "gradients kept sharded at stage 1": (2, "--sync-every-microbatch --zero-stage 1",
        "with --zero-stage 1 every rank has them whole; it needs stage 2 or 3"),
    "gradients kept sharded without a stage": (2, "--sync-every-microbatch", "with --zero-stage 0 every rank has them"),
    "replicas of shards that there are not": (2, "--zero-replicas 2",
        "--zero-replicas 2 does nothing without --zero-stage 1, 2 or 3"),
    "replicas of experts' shards": (4, "--model mixtral --ep 4 --zero-stage 1 --zero-replicas 4 --memory-limit 1GB",
        "zero-replicas 4 with ep 4: shards of experts have no replicas; give 1 replica or ep = 1"),
    "groups of unequal size": (4, "--zero-stage 3 --zero-replicas 3", "dp/zero-replicas = 4/3 is not a whole number"),
    "no such device": (2, "--device tpu", "tpu"),
}  # fmt: skip


@pytest.fixture(scope="module")
def bad_files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bad")
    (folder / "empty.txt").touch()
    (folder / "short.txt").write_text("abcxefghij")
    (folder / "odd.bin").write_bytes(bytes(2001))
    save_pretrained(GPT(GPTConfig(256, 64, 16, 1, 2)), folder / "gpt2")
    from safetensors.numpy import load_file, save_file

    tensors = load_file(folder / "gpt2" / "model.safetensors")
    del tensors["ln_f.bias"]
    save_file(tensors, folder / "gpt2" / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def refusals(bad_files):
    """What each bad input ends with. Those on the same number of ranks are one job, which ends in 30 s."""
    results = {}
    for ranks in sorted({ranks for ranks, _, _ in BAD_INPUT.values()}):
        names = [name for name in BAD_INPUT if BAD_INPUT[name][0] == ranks]
        commands = [["minipar.train", *BAD_INPUT[name][1].format(tmp=bad_files).split()] for name in names]
        results |= zip(names, run_each(ranks, commands, timeout=30), strict=True)
    return results


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_is_one_line_and_exit_code_2_soon(name, refusals):
    message, result = BAD_INPUT[name][2], refusals[name]
    assert result.returncode == 2 and (result.stdout == "" or "diverged" in message)
    lines = result.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("minipar: error: ") and message in lines[0], result.stderr


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["an unknown flag", "a missing data file"])
def test_the_exit_code_of_a_refusal_is_mpiruns(name, bad_files):
    ranks, flags, message = BAD_INPUT[name]
    start = time.monotonic()
    result = run_mpi(ranks, [*TRAIN, *flags.format(tmp=bad_files).split()], timeout=30)
    assert time.monotonic() - start < max(5, 2 * seconds_of_help(ranks))  # twice: a machine may be busy
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.startswith("minipar: error: ") and result.stderr.count("\n") == 1 and message in result.stderr


def test_help_is_printed_once():
    result = run_mpi(3, [*TRAIN, "--help"], timeout=30)
    assert result.returncode == 0 and result.stdout.count("usage:") == 1 and result.stderr == ""


def test_an_exception_on_one_rank_ends_the_job():
    script = """
import sys
from minipar.comm import main
from minipar.train import __main__ as program, trainer

step = trainer.Trainer.step
def failing(self, index):
    if self.mesh.dp.rank == 2 and index == 1:
        raise RuntimeError("a bug on one rank")
    return step(self, index)
trainer.Trainer.step = failing
main(program.run)
"""
    start = time.monotonic()
    with_flags = script.replace("import sys\n", f"import sys\nsys.argv[1:] = {TINY!r}\n")
    result = run_mpi(3, with_flags, timeout=30)
    assert result.returncode not in (0, 2) and time.monotonic() - start < 8
    assert "rank 2:" in result.stderr and 'raise RuntimeError("a bug on one rank")' in result.stderr
