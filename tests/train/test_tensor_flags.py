"""Claims about `mpirun -n N python -m minipar.train --tp T`: the proof, the export, and bad input that ends at once."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from launcher import run_each, run_mpi

from chapters.support.whole_runs import bound, relative_difference
from minipar.nn import GPT, GPTConfig
from minipar.nn.pretrained import load_pretrained, save_pretrained
from minipar.train.config import parse, resolve
from minipar.train.data import load_tokens
from minipar.train.from_config import make_model
from minipar.train.one_device import train_on_one_device

TRAIN = ["-m", "minipar.train"]
MODEL = "--layers 2 --hidden 32 --heads 4 --seq-len 16 --global-batch 8 --dtype float64".split()


def test_tp_4_x_dp_2_with_zero_1_equals_one_device():
    command = "--tp 4 --dp 2 --zero-stage 1 --sequence-parallel --steps 5 --verify".split()
    result = run_mpi(8, [*TRAIN, *MODEL, *command], timeout=120)
    assert result.returncode == 0, result.stderr
    last = result.stdout.splitlines()[-1]
    assert last.startswith("verify: 8 ranks = 1 device within rounding: loss, ") and "bound 3.6e-15" in last


@pytest.mark.long
def test_tp_with_dropout_recompute_and_zero_3_equals_one_device():
    """Dropout, recompute, microbatches, a norm that clips, parameters sharded, 259 tokens over 2 ranks."""
    flags = "--tp 2 --zero-stage 3 --sequence-parallel --steps 5 --dropout 0.1 --vocab-size 259 --microbatches 2"
    result = run_mpi(4, [*TRAIN, *MODEL, *flags.split(), *"--clip-grad 1 --recompute full --verify".split()])
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1].startswith("verify: 4 ranks = 1 device within rounding: loss, ")


@pytest.mark.long
@pytest.mark.parametrize("sequence", [pytest.param([], marks=pytest.mark.long), ["--sequence-parallel"]])
def test_a_model_exported_from_3_ranks_is_one_devices(tmp_path, sequence):
    """6 heads, and 257 tokens: the padding that makes them 258 is not exported."""
    flags = "--layers 2 --hidden 24 --heads 6 --seq-len 9 --vocab-size 257 --global-batch 4 --steps 20".split()
    flags += "--dtype float64 --dropout 0.1".split()
    files = f"--export {tmp_path}/gpt2 --metrics {tmp_path}/m.jsonl".split()
    result = run_mpi(3, [*TRAIN, *flags, "--tp", "3", *sequence, *files], timeout=60)
    assert result.returncode == 0, result.stderr
    loaded = load_pretrained(tmp_path / "gpt2", dtype="float64")
    assert loaded.config == GPTConfig(257, 9, 24, 2, 6)
    config = resolve(parse(flags), 1)
    state, results = train_on_one_device(config, load_tokens(None, vocab_size=257, seq_len=9))
    assert set(loaded.state_dict()) == set(state)
    for name, array in loaded.state_dict().items():
        assert relative_difference(array, state[name]) <= bound("float64", 20), name
    losses = [json.loads(line)["loss"] for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    np.testing.assert_allclose(losses, [r.loss for r in results], rtol=1e-12)
    # And it trains on from there, split anew over 2 ranks.
    again = f"--init-from {tmp_path}/gpt2 --seq-len 8 --global-batch 4 --steps 2 --dtype float64 --verify --tp 2"
    result = run_mpi(2, [*TRAIN, *again.split(), *sequence, "--eps", "1e-6"], timeout=60)
    assert result.returncode == 0 and "2 ranks = 1 device within rounding" in result.stdout, result.stderr


BAD_INPUT = {
    "heads that tp does not divide": (4, "--tp 4 --heads 6 --hidden 24",
        "heads/tp = 6/4 is not a whole number"),
    "heads that tp does not divide, with dp": (4, "--tp 2 --dp 2 --heads 3 --hidden 24",
        "heads/tp = 3/2 is not a whole number"),
    "more tp than ranks": (2, "--tp 4", "tp = 4, but mpirun started 2 ranks"),
    "tp that does not divide the ranks": (4, "--tp 3 --heads 3 --hidden 24",
        "tp = 3 does not divide the 4 ranks that mpirun started"),
    "tp times dp that is not the world": (2, "--tp 2 --dp 2", "dp*tp = 2*2 = 4, but mpirun started 2 ranks"),
    "no ranks at all": (2, "--tp 0", "tp"),
    "a sequence that tp does not divide": (2, "--tp 2 --sequence-parallel --seq-len 63",
        "tokens/tp = 63/2 is not a whole number"),
    "sequence parallelism without tp": (2, "--sequence-parallel", "--sequence-parallel does nothing without --tp 2"),
    "everything dropped": (2, "--tp 2 --dropout 1", "dropout"),
    "less than nothing dropped": (2, "--tp 2 --dropout -0.1", "dropout"),
    "a batch that dp does not divide": (4, "--tp 2 --global-batch 5", "global-batch 5 is not divisible by"),
}  # fmt: skip


@pytest.fixture(scope="module")
def refusals():
    """What each bad input ends with. Those on the same number of ranks are one job, which ends in 30 s."""
    results = {}
    for ranks in (2, 4):
        names = [name for name in BAD_INPUT if BAD_INPUT[name][0] == ranks]
        commands = [["minipar.train", *BAD_INPUT[name][1].split()] for name in names]
        results |= zip(names, run_each(ranks, commands, timeout=30), strict=True)
    return results


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_is_one_line_and_exit_code_2_soon(name, refusals):
    result = refusals[name]
    assert result.returncode == 2 and result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("minipar: error: ") and BAD_INPUT[name][2] in lines[0], result.stderr


def test_the_heads_of_an_initial_model_must_divide_too(tmp_path):
    save_pretrained(GPT(GPTConfig(256, 64, 24, 1, 3)), tmp_path)
    result = run_mpi(2, [*TRAIN, "--init-from", str(tmp_path), "--tp", "2"], timeout=30)
    assert result.returncode == 2
    assert "heads/tp = 3/2 is not a whole number" in result.stderr and len(result.stderr.splitlines()) == 1


def test_verify_exits_with_1_if_a_rank_forgets_its_sum():
    """The proof itself can fail, and by far more than rounding: replicated parameters' gradients left as they are."""
    flags = [*MODEL, *"--tp 2 --sequence-parallel --steps 2 --verify".split()]
    script = f"""
import sys
sys.argv[1:] = {flags!r}
from minipar.comm import main
from minipar.parallel.tensor.plan import TensorParallel
from minipar.train import __main__ as program

TensorParallel.sum_partial = lambda self, parameters: None
main(program.run)
"""
    result = run_mpi(2, script, timeout=60)
    assert result.returncode == 1 and "verify: FAILED: after step 1 of" in result.stdout, result.stderr
    assert float(re.search(r"they differ by (\S+),", result.stdout)[1]) > 1e-3


def test_tensor_flags_reach_the_model():
    config = resolve(parse("--tp 4 --sequence-parallel --dropout 0.1".split()), 8)
    assert (config.mesh.tp, config.mesh.dp, config.mesh.sequence_parallel) == (4, 2, True)
    assert config.optimizer.dropout == 0.1
    assert make_model(config).drop.p == 0.1
    assert make_model(replace(config, optimizer=replace(config.optimizer, dropout=0.0))).drop.p == 0.0
