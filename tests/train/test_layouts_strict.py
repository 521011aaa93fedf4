"""Claims about tensor parallelism, pipelines and their compositions on a device: with ZeRO, every kind of schedule and
checkpoints, arrays stay on the device and travel through host buffers, shown on an array that refuses implicit copies
as CuPy does; on CuPy itself, several ranks on one GPU, where one is found (`-k cupy` shows which it was).
"""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
from training import config_for, reports, trainer_for, using

from minipar import backend
from minipar.comm import run_local
from minipar.train.data import load_tokens
from minipar.train.verify import Verifier

pytestmark = pytest.mark.sampled(3)

SHAPE = "--layers 4 --hidden 16 --heads 2 --seq-len 8 --vocab-size 257 --global-batch 8 --steps 2 --dtype float64"
CASES = [
    (2, "--layers 1 --tp 2 --global-batch 4 --clip-grad 1"),
    (
        2,
        "--layers 1 --tp 2 --global-batch 4 --dropout 0.1 --sequence-parallel --recompute full --reduction ordered "
        "--microbatches 2",
    ),
    (4, "--layers 1 --tp 2 --global-batch 4 --dropout 0.1 --sequence-parallel --zero-stage 3 --clip-grad 1"),
    (4, "--layers 1 --tp 2 --global-batch 4 --dropout 0.1 --zero-stage 1 --reduction ordered"),
    (4, "--layers 1 --tp 2 --global-batch 4 --model llama --heads 4 --kv-heads 2 --zero-stage 3 --sequence-parallel"),
    (4, "--layers 1 --zero-stage 1 --zero-replicas 2 --clip-grad 1"),
    (4, "--layers 1 --zero-stage 3 --zero-replicas 2 --microbatches 2 --sync-every-microbatch --reduction ordered"),
    (4, "--layers 1 --tp 2 --global-batch 4 --model mixtral --heads 4 --experts 3 --zero-stage 3 --sequence-parallel"),
    (4, "--layers 1 --dp 4 --ep 2 --global-batch 4 --model mixtral --heads 4 --experts 4 --zero-stage 1 --clip-grad 1"),
    (4, "--dp 2 --pp 2 --model llama --heads 4 --kv-heads 2 --schedule 1f1b --microbatches 2 --recompute full"),
    (4, "--dp 2 --pp 2 --schedule gpipe --microbatches 2 --zero-stage 3 --reduction ordered --dropout 0.1"),
    (4, "--tp 2 --pp 2 --schedule 1f1b --microbatches 4 --sequence-parallel --clip-grad 0.5"),
    (4, "--dp 2 --pp 2 --schedule interleaved-1f1b --microbatches 4 --zero-stage 1 --recompute full"),
    (4, "--dp 2 --pp 2 --schedule zb-h2 --microbatches 4 --zero-stage 2 --reduction ordered"),
    (8, "--dp 2 --tp 2 --pp 2 --schedule 1f1b --microbatches 4 --zero-stage 1 --sequence-parallel --clip-grad 1"),
    (8, "--dp 2 --tp 2 --pp 2 --schedule zbv --microbatches 4 --zero-stage 3 --sequence-parallel --dropout 0.1"),
    (8, "--dp 2 --tp 2 --pp 2 --schedule zb-h1 --microbatches 2 --zero-stage 2 --recompute full"),
]


def train(comm, flags, directory=None, resume=False):
    """Losses and norms, the parameters (on rank 0), and the verdict."""
    tokens = load_tokens(None, vocab_size=257, seq_len=8)
    line = f"{SHAPE} --eps 1e-6 {flags} {f'--resume {directory}' if resume else ''}"
    trainer = trainer_for(config_for(line, comm.size), tokens, comm)
    verifier, results = Verifier(trainer), []
    for result in trainer.train():
        verifier.check_step(result)
        results.append(result)
        if directory is not None and not resume and result.step == 0:
            trainer.save(directory, 1)
    return reports(results), trainer.state_dict(), verifier.verdict()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("ranks", "flags"),
    [pytest.param(*case, marks=pytest.mark.long) if "--pp" in case[1] else case for case in CASES[:-1]] + CASES[-1:],
)
def test_every_layout_trains_on_a_device(device, ranks, flags):
    outcomes = run_local(ranks, train, flags)
    with using(np):
        expected_numbers, expected, _ = run_local(ranks, train, flags)[0]
    for numbers, state, verdict in outcomes:
        assert verdict.passed, verdict.line
        assert numbers == outcomes[0][0]
        np.testing.assert_allclose(numbers, expected_numbers, rtol=1e-11)
        assert all(type(array) is np.ndarray for array in state.values())
        for name, array in state.items():  # on rank 0
            np.testing.assert_allclose(array, expected[name], rtol=1e-8, atol=1e-11)
    assert list(outcomes[0][1]) == list(expected)


@pytest.mark.parametrize("gpus", [1, 2, 3])
def test_ranks_take_the_gpus_in_turns(gpus, monkeypatch):
    used = []

    class Device:
        def __init__(self, number):
            self.number = number

        def use(self):
            used.append(self.number)

    cuda = SimpleNamespace(runtime=SimpleNamespace(getDeviceCount=lambda: gpus), Device=Device)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    with using(np):
        for rank in range(4):
            backend.use_device("cuda", rank)
    assert used == [rank % gpus for rank in range(4)]


@pytest.mark.sampled(2)
def test_device_arrays_are_resumed_under_another_layout(device, tmp_path):
    before = "--dp 2 --tp 2 --pp 2 --schedule 1f1b --microbatches 4 --zero-stage 1 --sequence-parallel --clip-grad 1"
    after = "--dp 2 --pp 2 --schedule gpipe --microbatches 2 --zero-stage 3 --reduction ordered --clip-grad 1"
    whole = run_local(8, train, before, str(tmp_path))[0]
    numbers, state, verdict = run_local(4, train, after, str(tmp_path), True)[0]
    assert verdict.passed, verdict.line
    np.testing.assert_allclose(numbers, whole[0][1:], rtol=1e-11)
    for name, array in whole[1].items():
        np.testing.assert_allclose(state[name], array, rtol=1e-8, atol=1e-11)
