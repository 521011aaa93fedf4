"""Combinations of everything, as processes: each trains what one device trains, and sends what the closed forms say."""

import json

import pytest
from launcher import run_mpi

# By the number of ranks: rows with the bits of one device, and rows whose sums are taken in another order.
ROWS = {
    2: (
        ["--dp 2 --zero-stage 3 --microbatches 2 --dropout 0.1", "--pp 2 --schedule zbv --microbatches 4"],
        ["--tp 2 --sequence-parallel", "--cp 2 --zero-stage 1"],
    ),
    3: (
        ["--dp 3 --zero-stage 2 --microbatches 2 --clip-grad 0.5", "--pp 3 --schedule dualpipev --microbatches 8"],
        ["--tp 3 --recompute full", "--dp 3 --zero-stage 1 --reduction ring --model llama"],
    ),
    4: (
        [
            "--dp 2 --pp 2 --schedule interleaved-1f1b --microbatches 4 --zero-stage 1",
            "--pp 4 --schedule zb-h1 --microbatches 5 --model llama",
        ],
        [
            "--dp 4 --zero-stage 2 --zero-replicas 2 --clip-grad 0.5",
            "--tp 2 --dp 2 --zero-stage 3 --sequence-parallel",
            "--tp 4 --model llama --sequence-parallel",
            "--model mixtral --experts 4 --dp 2 --cp 2 --ep 4 --zero-stage 1",
        ],
    ),
    6: (
        [
            "--dp 3 --pp 2 --schedule zb-h2 --microbatches 3 --zero-stage 2 --dropout 0.1",
            "--model mixtral --dp 3 --pp 2 --schedule gpipe --microbatches 2",
        ],
        [
            "--dp 6 --zero-stage 3 --zero-replicas 3 --microbatches 2 --recompute full",
            "--tp 3 --pp 2 --schedule zbv --microbatches 4 --clip-grad 0.5",
            "--cp 3 --tp 2 --sequence-parallel --model llama",
            "--model mixtral --experts 6 --dp 6 --ep 3 --zero-stage 2",
        ],
    ),
    8: (
        [
            "--dp 8 --zero-stage 3 --clip-grad 0.5 --recompute full",
            "--pp 8 --schedule 1f1b --microbatches 3",
            "--dp 2 --pp 4 --schedule dualpipev --microbatches 8 --zero-stage 1",
        ],
        [
            "--dp 2 --tp 2 --pp 2 --schedule 1f1b --microbatches 4 --zero-stage 1 --sequence-parallel",
            "--dp 2 --tp 2 --pp 2 --schedule zb-h1 --microbatches 2 --zero-stage 3 --clip-grad 0.5 --recompute full",
            "--dp 2 --tp 4 --zero-stage 2 --reduction ring --model llama",
            "--cp 2 --tp 2 --pp 2 --schedule interleaved-1f1b --microbatches 2 --zero-stage 3",
            "--context-parallel ulysses --cp 2 --dp 4 --zero-stage 2 --zero-replicas 2",
        ],
    ),
    16: ([], ["--dp 2 --tp 4 --pp 2 --schedule 1f1b --microbatches 4 --zero-stage 1"]),  # Narayanan et al. 2021
}


@pytest.mark.parametrize("ranks", ROWS)
def test_combinations_train_as_one_device_and_send_as_said(ranks):
    """One job for all rows; rank 0 prints what any rank finds wrong in each."""
    exact, within_rounding = ROWS[ranks]
    script = f"""
import json
from combinations import check_config, config_of
from minipar.comm.launch import launch

def program(comm):
    found = []
    for exact, rows in ((True, {exact!r}), (False, {within_rounding!r})):
        for flags in rows:
            wrong = check_config(comm, config_of(flags), exact)
            found.append([flags, [text.decode() for text in comm.all_gather_bytes("; ".join(wrong).encode())]])
    if comm.rank == 0:
        print(json.dumps(found))

launch(program)
"""
    result = run_mpi(ranks, script, timeout=150)
    assert result.returncode == 0, result.stdout + result.stderr
    assert json.loads(result.stdout) == [[flags, [""] * ranks] for flags in exact + within_rounding]


SMALL = "--layers 4 --hidden 24 --heads 6 --seq-len 12 --steps 3 --dtype float64"
COMMANDS = {
    "3D with ZeRO 1, default sizes": (
        8,
        "--dp 2 --tp 2 --pp 2 --zero-stage 1 --microbatches 4 --sequence-parallel --clip-grad 1.0 "
        "--dtype float64 --steps 5",
        "verify: 8 ranks = 1 device",
    ),
    "3D with ZeRO 3": (
        8,
        f"{SMALL} --dp 2 --tp 2 --pp 2 --zero-stage 3 --schedule zbv --microbatches 2 --global-batch 8 "
        "--recompute full",
        "verify: 8 ranks = 1 device",
    ),
    "ZeRO 2 in a pipeline": (
        6,
        f"{SMALL} --dp 3 --pp 2 --zero-stage 2 --schedule zb-h2 --microbatches 4 --global-batch 12 "
        "--reduction ordered --dropout 0.1",
        "verify: 6 ranks = 1 device bit for bit",
    ),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_command_line_proves_it(name):
    ranks, flags, proved = COMMANDS[name]
    result = run_mpi(ranks, ["-m", "minipar.train", *flags.split(), "--verify"], timeout=150)
    assert result.returncode == 0, result.stdout + result.stderr
    assert proved in result.stdout
