"""Claims about the trainer: any number of ranks trains what one device trains, and `verify` notices when not."""

import re
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
from training import Proxy, chunk_of, talk_through, verified

from minipar.comm import DeviceMesh, Network, run_local
from minipar.errors import UsageError
from minipar.parallel.context import context_parallel
from minipar.parallel.ddp import DistributedDataParallel
from minipar.train.config import parse, resolve
from minipar.train.data import load_tokens
from minipar.train.from_config import make_model
from minipar.train.one_device import train_on_one_device
from minipar.train.trainer import Trainer
from minipar.train.verify import Verifier

pytestmark = pytest.mark.sampled(3)

SHAPE = "--layers 1 --hidden 16 --heads 2 --seq-len 8 --steps 3 --dtype float64"
TOKENS = load_tokens(None, vocab_size=256, seq_len=8)


def config_for(flags, size):
    return resolve(parse(f"{SHAPE} {flags}".split()), size)


def train(size, flags, kind=Trainer):
    """Each rank's (parameters, step results, verdict)."""
    config = config_for(flags, size)

    def rank(comm):
        trainer = kind(config, DeviceMesh(comm), TOKENS)
        results, verdict = verified(trainer)
        return trainer.model.state_dict(), results, verdict

    return run_local(size, rank)


def test_the_samples_of_a_replica_follow_one_another():
    """Microbatch after microbatch, and replica after replica."""
    config = config_for("--dp 2 --microbatches 3 --global-batch 12", 2)

    def rank(comm):
        trainer = Trainer(config, DeviceMesh(comm), TOKENS)
        return [list(trainer.samples(comm.rank, m)) for m in range(3)]

    assert run_local(2, rank) == [[[0, 1], [2, 3], [4, 5]], [[6, 7], [8, 9], [10, 11]]]


def bits(state, results):
    return {name: x.tobytes() for name, x in state.items()}, [(r.loss, r.grad_norm) for r in results]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--microbatches 3 --clip-grad 0.5",
        "--order sequential --recompute full --lr-schedule cosine --warmup-steps 1 --weight-decay 0.1",
        "--dtype float32 --microbatches 2",
    ],
)
def test_ordered_ranks_train_one_devices_bits(size, flags):
    flags = f"--global-batch {size * 6} --reduction ordered {flags}"
    expected = bits(*train_on_one_device(config_for(flags, size), TOKENS))
    for state, results, verdict in train(size, flags):
        assert bits(state, results) == expected
        assert verdict.passed and verdict.line.startswith(
            f"verify: {size} rank{'s' if size > 1 else ''} = 1 device, bit for bit: loss, norm, gradients "
        )


@pytest.mark.sampled(1)
@pytest.mark.parametrize("digits", [12, 23, 4000])
@pytest.mark.parametrize("flag", ["--vocab-size", "--layers", "--hidden", "--seq-len"])
@pytest.mark.parametrize(("dtype", "nbytes"), [("float32", 16), ("float64", 32)])
def test_a_model_larger_than_the_ranks_memory_is_refused(flag, digits, dtype, nbytes):
    what = r"positions: 8 bytes .* tokens" if flag == "--seq-len" else rf" parameters \* {nbytes} bytes / 2"
    with pytest.raises(UsageError, match=rf"{what} = .*\+.* bytes, but this machine "):
        make_model(config_for(f"{flag} 1{digits * '0'} --dtype {dtype} --zero-stage 3", 2))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("steps", [1, 20])
@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_ring_ranks_agree_with_one_device_within_rounding(size, steps):
    flags = f"--global-batch {size * 2} --steps {steps}"
    outcomes = train(size, flags)
    assert all(bits(*outcome[:2]) == bits(*outcomes[0][:2]) for outcome in outcomes)
    assert all(verdict.passed for *_, verdict in outcomes), outcomes[0][2].line
    if size > 2:  # of two ranks, a + b = b + a
        assert "within rounding" in outcomes[0][2].line and f"bound {16 * 2**-52:.2g}; updates" in outcomes[0][2].line


def test_the_layout_changes_rounding_but_not_the_training():
    """2 and 6 ranks, and 1 rank with 6 microbatches, train on the same tokens from the same weights."""
    losses = [
        [r.loss for r in train(size, f"--global-batch 12 {flags}")[0][1]]
        for size, flags in ((1, ""), (1, "--microbatches 6"), (2, "--reduction ordered"), (6, ""))
    ]
    for other in losses[1:]:
        np.testing.assert_allclose(other, losses[0], rtol=1e-12)


def test_two_runs_of_anything_are_the_same_bits():
    for flags in ("--global-batch 6", "--global-batch 6 --reduction ordered --seed 3"):
        assert bits(*train(3, flags)[0][:2]) == bits(*train(3, flags)[0][:2])


class WrongCount(Trainer):
    """Divides each rank's loss by its own tokens: the gradients' sum is then `dp` times too large."""

    def backward_microbatch(self, step, replica, microbatch):
        self.targets //= self.mesh.dp.size
        try:
            return super().backward_microbatch(step, replica, microbatch)
        finally:
            self.targets *= self.mesh.dp.size


class SkipsAnAllReduce(Proxy):
    """A communicator whose second all-reduce leaves the array as it is."""

    calls = 0

    def all_reduce(self, array, **options):
        self.calls += 1
        return self.comm.all_reduce(array.copy() if self.calls == 2 else array, **options)


class ForgottenBucket(Trainer):
    """Never sends the second bucket of its first step."""

    def __init__(self, *args):
        super().__init__(*args)
        talk_through(SkipsAnAllReduce, self.ddp)


@pytest.mark.parametrize("reduction", ["ring", "ordered"])
def test_verify_catches_a_wrong_count(reduction):
    """AdamW hides the factor from the parameters almost wholly; the gradient norms show it."""
    for *_, verdict in train(3, f"--global-batch 6 --reduction {reduction}", WrongCount):
        assert not verdict.passed and verdict.line.startswith("verify: FAILED: after step 1 of 3: gradient of ")


def test_verify_catches_a_bucket_that_is_never_sent():
    for *_, verdict in train(2, "--global-batch 4", ForgottenBucket):
        first = re.match(r"verify: FAILED: after step 1 of 3: gradient of (\S+) \(and 3 more\)", verdict.line)
        assert first and first[1] in ("wte.weight", "wpe.weight", "ln_f.weight", "ln_f.bias")  # the bucket's


def test_verify_catches_ranks_with_different_parameters():
    config = config_for("--global-batch 4", 2)

    def rank(comm):
        trainer = Trainer(config, DeviceMesh(comm), TOKENS)
        verifier = Verifier(trainer)
        for result in trainer.train():
            verifier.check_step(result)
        trainer.model.wte.weight.data[5, 3] += 1e-9 * comm.rank
        return verifier.verdict()

    for verdict in run_local(2, rank):
        assert verdict.line == "verify: FAILED: the ranks do not hold the same parameters or state as one another"


def test_verify_catches_replicas_of_shards_that_differ():
    config = config_for("--global-batch 4 --zero-stage 3 --zero-replicas 2", 4)

    def rank(comm):
        trainer = Trainer(config, DeviceMesh(comm), TOKENS)
        verifier = Verifier(trainer)
        for result in trainer.train():
            verifier.check_step(result)
        bucket = trainer.ddp.buckets[0]
        chunk_of(trainer.ddp, bucket).data[0] += 1e-9 * (comm.rank == 2)
        return verifier.verdict()

    for verdict in run_local(4, rank):
        assert verdict.line == "verify: FAILED: the ranks do not hold the same parameters or state as one another"


def seconds_on_the_model_clock(bucket_bytes):
    """Each rank's end of three steps, on a network that takes about as long as backward."""

    def other_buckets(config, mesh, model):
        sizes = {"bucket_bytes": bucket_bytes, "first_bucket_bytes": bucket_bytes}
        context = context_parallel(model, mesh.cp)
        ddp = DistributedDataParallel(model, mesh.dp, **sizes)
        return SimpleNamespace(ddp=ddp, context=context, pipeline=None), None

    config = config_for("--global-batch 8 --layers 4", 4)

    def rank(comm):
        for _ in Trainer(config, DeviceMesh(comm), TOKENS).train():
            pass
        return comm.clock.now()

    with patch("minipar.train.trainer.apply_strategies", other_buckets):
        return run_local(4, rank, clock="model", network=Network(alpha=1e-9, beta=2e-11))


def test_buckets_overlap_backward_on_the_model_clock():
    one_bucket = seconds_on_the_model_clock(2**30)
    assert one_bucket == seconds_on_the_model_clock(2**30)
    many_buckets = seconds_on_the_model_clock(4096)
    assert max(many_buckets) < 0.9 * min(one_bucket)
