"""Claims about tensor parallelism on a device: nothing crosses between host and device unasked, shown on an array that
refuses as CuPy does; on CuPy itself where a GPU is found (`-k cupy` shows which it was).
"""

import numpy as np
import pytest

from minipar import backend
from minipar.comm import DeviceMesh, run_local
from minipar.train.config import parse, resolve
from minipar.train.data import load_tokens
from minipar.train.trainer import Trainer
from minipar.train.verify import verify


def tensor_parallel_training(comm, flags):
    """Losses, norms, the parameters put together (which every tensor-parallel rank has), and the verdict."""
    tokens = load_tokens(None, vocab_size=257, seq_len=8)
    shape = "--layers 1 --hidden 16 --heads 2 --seq-len 8 --vocab-size 257 --steps 2 --tp 2 --dtype float64 --eps 1e-6"
    config = resolve(parse(f"{shape} {flags}".split()), comm.size)
    trainer = Trainer(config, DeviceMesh(comm, tp=2), tokens)
    results = list(trainer.train())
    numbers = [(r.loss, r.grad_norm) for r in results]
    return numbers, trainer.ddp.state_dict(), verify(trainer, results, tokens)


CASES = [
    (2, "--global-batch 4 --clip-grad 1"),
    (2, "--global-batch 4 --dropout 0.1 --sequence-parallel --recompute full --reduction ordered --microbatches 2"),
    (4, "--global-batch 4 --dropout 0.1 --sequence-parallel --zero-stage 3 --clip-grad 1"),
    (4, "--global-batch 4 --dropout 0.1 --zero-stage 1 --reduction ordered"),
]


@pytest.mark.parametrize(("ranks", "flags"), CASES)
def test_tensor_parallel_ranks_train_on_a_device(device, ranks, flags):
    outcomes = run_local(ranks, tensor_parallel_training, flags)
    with backend.using(np):
        expected_numbers, expected, _ = run_local(ranks, tensor_parallel_training, flags)[0]
    for numbers, state, verdict in outcomes:
        assert verdict.passed, verdict.line
        assert numbers == outcomes[0][0]
        np.testing.assert_allclose(numbers, expected_numbers, rtol=1e-11)
        assert all(type(array) is np.ndarray for array in state.values())
        for name, array in state.items():
            np.testing.assert_allclose(array, expected[name], rtol=1e-8, atol=1e-11)
