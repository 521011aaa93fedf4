"""Claims about training with balanced or limited experts: equal to one device in every layout, and bytes."""

from math import ceil

import numpy as np
import pytest
from combinations import TEXT, VOCAB, differences, run_steps
from routing import ep_bytes
from training import bits, config_for, on_each_rank, ranks_of, trainer_for

from minipar.autograd import no_grad
from minipar.comm import run_local
from minipar.errors import UsageError
from minipar.generate import load
from minipar.nn.moe import moe_layers
from minipar.parallel.traffic import predicted_traffic
from minipar.train.from_config import step_layout
from minipar.train.one_device import OneDevice
from minipar.train.trainer import Trainer

E = 6
SHAPE = f"--model mixtral --layers 3 --hidden 16 --heads 4 --kv-heads 2 --ffn 12 --seq-len 8 --vocab-size {VOCAB}"
RUN = f"--experts {E} --top-k 2 --dtype float64 --eps 1e-5 --steps 2 --reduction ordered --weight-decay 0.3"
AUX = "--aux-loss 0.5"  # large, so that a mistake in it shows
TO_THE_BIT = [
    "--dp 2 --global-batch 8 --clip-grad 0.5",
    "--dp 2 --pp 3 --global-batch 8 --microbatches 2",
    "--dp 4 --global-batch 8 --recompute full",
]
LAYOUTS = [
    "--dp 3 --ep 3 --global-batch 6 --microbatches 2",
    "--dp 2 --ep 2 --global-batch 8 --zero-stage 3 --microbatches 2 --sync-every-microbatch",
    "--dp 2 --tp 2 --ep 2 --global-batch 4 --sequence-parallel --zero-stage 2",
    "--tp 4 --kv-heads 4 --global-batch 2 --recompute full --clip-grad 0.5",
    "--cp 4 --global-batch 6 --microbatches 2 --zero-stage 3 --context-parallel all-gather",
    "--dp 2 --cp 2 --tp 2 --kv-heads 4 --global-batch 4 --context-parallel ulysses --sequence-parallel",
    "--dp 2 --pp 2 --ep 2 --global-batch 8 --microbatches 4 --schedule zb-h1 --zero-stage 2 --recompute full",
]


def config_of(layout, flags=AUX):
    return config_for(f"{SHAPE} {RUN} {flags} {layout}")


class Noting(Trainer):
    """A trainer that keeps what each step dropped."""

    def step(self, step):
        result = super().step(step)
        self.dropped = [*getattr(self, "dropped", []), result.dropped]
        return result


def trained(config):
    """Each rank's (parameters after each step, what each step reported, bytes of each step by axis, trainer)."""

    def program(comm):
        trainer = trainer_for(config, TEXT, comm, Noting)
        return *run_steps(trainer), trainer

    return run_local(ranks_of(config), program)


def checked(config, exact=False):
    """One device and each rank's trainer, after both have trained; what they differ in is an error."""
    single, ranks = OneDevice(config, TEXT), trained(config)
    states, reported, _ = run_steps(single)
    assert differences(*ranks[0][:2], (states, reported), exact=exact) == []
    for rank, (_, reports_of_rank, sent, trainer) in enumerate(ranks):
        assert reports_of_rank == ranks[0][1] and biases_of(trainer) == biases_of(single)
        assert sent == [predicted_traffic(step_layout(config), rank)] * len(sent)
    return single, [trainer for *_, trainer in ranks]


def biases_of(trainer):
    return [moe.bias.tolist() for moe in trainer.moes]


# ---- the auxiliary loss ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_auxiliary_loss_trains_as_on_one_device(layout):
    checked(config_of(layout))


@pytest.mark.parametrize("layout", TO_THE_BIT)
def test_without_split_tokens_the_bits_are_one_devices(layout):
    checked(config_of(layout), exact=True)


def test_every_zero_stage_has_the_bits_of_plain_dp():
    layout = "--dp 2 --cp 2 --ep 2 --global-batch 8 --clip-grad 0.3 --reduction ring --zero-stage"
    runs = [trained(config_of(f"{layout} {stage}"))[0] for stage in range(4)]
    for states, reported, *_ in runs[1:]:
        assert reported == runs[0][1]
        assert [bits(state) for state in states] == [bits(state) for state in runs[0][0]]


def objective(trainer, loads=None):
    """The global batch's mean loss plus 0.5 times the mean over layers and samples; and the loads of each of them."""
    moes, found, values = trainer.moes, [], []
    for moe in moes:

        def route(x, samples, moe=moe, route=moe.route):
            powers = np.exp(x.data @ moe.gate.weight.data.T)
            p = (powers / powers.sum(axis=1, keepdims=True)).reshape(samples, -1, E)
            indices, weights = route(x, samples)
            found.append(np.array([np.bincount(each, minlength=E) for each in indices.reshape(samples, -1)]))
            load = found[-1] if loads is None else loads[len(found) - 1]
            values.extend(E * (load / load.sum(axis=1, keepdims=True) * p.mean(axis=1)).sum(axis=1))
            return indices, weights

        moe.route = route
    with no_grad():
        inputs, targets = trainer.batches.batch(0, range(4))
        mean = trainer.model.loss_sum(inputs, targets).item() / targets.size
    for moe in moes:
        del moe.route
    assert len(values) == 4 * len(moes)
    return mean + 0.5 * float(np.mean(values)), found


def test_the_gradient_is_that_of_both_losses():
    """The difference quotient of what the flag says is minimized; the loss that is reported is the cross entropy."""
    config = config_of("--global-batch 4 --microbatches 2 --lr 1e-300 --weight-decay 0")
    trainer = trainer_for(config, TEXT)
    plain = trainer_for(config_of("--global-batch 4 --microbatches 2", flags=""), TEXT)
    assert trainer.step(0).loss == plain.step(0).loss
    gradients = trainer.state_dict(gradients=True)
    random = np.random.Generator(np.random.Philox(5))
    directions = {name: random.standard_normal(gradient.shape) for name, gradient in gradients.items()}

    def total(step):
        for name, p in trainer.model.named_parameters():
            p.data += step * directions[name]
        value = objective(trainer, loads)[0]
        for name, p in trainer.model.named_parameters():
            p.data -= step * directions[name]
        return value

    _, loads = objective(trainer)
    found = sum((gradients[name] * directions[name]).sum() for name in gradients)
    assert found == pytest.approx((total(1e-6) - total(-1e-6)) / 2e-6, rel=1e-7)


# ---- biases ----------------------------------------------------------------------------------------------------------

BIAS = "--router-bias 0.02"
BIASED = [
    "--dp 3 --ep 3 --global-batch 6 --microbatches 2",
    "--dp 2 --tp 2 --global-batch 4 --zero-stage 3 --recompute full --aux-loss 0.5",
    "--dp 2 --cp 2 --global-batch 4 --zero-stage 1",
    "--dp 2 --pp 3 --ep 2 --global-batch 8 --microbatches 4 --zero-stage 2",
    "--cp 2 --tp 2 --pp 2 --layers 4 --global-batch 4 --microbatches 2 --schedule interleaved-1f1b",
]


@pytest.mark.parametrize("layout", BIASED)
def test_biases_are_the_same_bits_in_every_layout(layout):
    single, _ = checked(config_of(layout, BIAS))
    assert np.any(biases_of(single))


def test_each_step_moves_biases_towards_the_mean_load():
    config = config_of("--dp 2 --pp 3 --global-batch 4 --microbatches 2", BIAS)

    def program(comm):
        trainer = trainer_for(config, TEXT, comm)
        steps = []
        for step in range(2):
            trainer.step(step)
            steps.append(([moe.load.copy() for moe in trainer.moes], biases_of(trainer)))
        return steps

    expected = np.zeros((3, E))
    for ranks in zip(*run_local(6, program), strict=True):
        loads = np.sum([load for load, _ in ranks], axis=0)
        assert (loads.sum(axis=1) == 2 * 4 * 8).all()  # k B T of the global batch
        expected += 0.02 * np.sign(loads.mean(axis=1, keepdims=True) - loads)
        assert all(np.array_equal(biases, expected) for _, biases in ranks)


@pytest.mark.parametrize(("before", "after"), [("--dp 2 --pp 3", "--tp 2"), ("--cp 2", "--dp 2 --ep 2 --zero-stage 3")])
def test_a_resumed_run_has_the_biases_of_one_that_never_stopped(before, after, tmp_path):
    flags = "--global-batch 12 --microbatches 2 --steps 4"
    whole = OneDevice(config_of(f"{after} {flags}", BIAS), TEXT)
    results = list(whole.train())
    first = config_of(f"{before} {flags} --steps 2", BIAS)
    on_each_rank(first, TEXT, lambda trainer, results: trainer.save(tmp_path, 2))
    rest = config_of(f"{after} {flags} --resume {tmp_path}", BIAS)
    for biases, later in on_each_rank(rest, TEXT, lambda trainer, results: (biases_of(trainer), results)):
        assert biases == biases_of(whole)
        assert [x.loss for x in later] == pytest.approx([x.loss for x in results[2:]], rel=1e-11)


def test_biases_stay_where_they_are_without_the_flag(tmp_path):
    """They are part of the model: a run that resumes with rate 0 still routes by them, and so does generate."""
    on_each_rank(config_of("--global-batch 4", BIAS), TEXT, lambda trainer, results: trainer.save(tmp_path, 2))
    frozen = trainer_for(config_of(f"--global-batch 4 --steps 3 --resume {tmp_path}", ""), TEXT)
    biases = biases_of(frozen)
    list(frozen.train())
    assert biases_of(frozen) == biases and np.any(biases)
    frozen.save(tmp_path, 3)
    assert [moe.bias.tolist() for moe in moe_layers(load(str(tmp_path)))] == biases


def test_a_model_with_biases_is_not_exported(tmp_path):
    """transformers would send tokens to other experts."""
    with pytest.raises(UsageError, match="--router-bias"):
        trainer_for(config_of(f"--global-batch 4 --export {tmp_path}", BIAS), TEXT)
    trainer_for(config_of(f"--global-batch 4 --export {tmp_path}", AUX), TEXT)


# ---- capacity --------------------------------------------------------------------------------------------------------

CAPACITY = "--capacity-factor 0.8"
LIMITED = [
    "--dp 2 --global-batch 4 --clip-grad 0.5 --capacity-factor 1.5",
    "--dp 3 --ep 3 --global-batch 6 --microbatches 2 --zero-stage 3",
    "--dp 4 --ep 2 --global-batch 8 --zero-stage 2 --recompute full --router-bias 0.02",
    "--dp 2 --tp 2 --ep 2 --global-batch 4 --sequence-parallel --zero-stage 1 --aux-loss 0.5",
    "--dp 2 --pp 3 --ep 2 --global-batch 8 --microbatches 4 --capacity-factor 0.1",
    "--dp 2 --pp 2 --ep 2 --tp 2 --global-batch 8 --microbatches 2 --schedule zb-h1",
]


@pytest.mark.parametrize("layout", LIMITED)
def test_a_device_that_drops_the_same_tokens_is_equal(layout):
    config = config_of(layout, CAPACITY)
    dropped = [result.dropped for result in OneDevice(config, TEXT).train()]
    _, trainers = checked(config)
    assert all(dropped) and all(trainer.dropped == dropped for trainer in trainers)


@pytest.mark.parametrize(
    "layout",
    [
        "--dp 3 --ep 3 --global-batch 6 --microbatches 2",
        "--dp 2 --pp 3 --tp 2 --ep 2 --global-batch 4 --microbatches 2",
    ],
)
def test_with_a_capacity_each_rank_sends_c_rows_per_expert(layout):
    config = config_of(layout, CAPACITY)
    sizes, m = step_layout(config), config.data.microbatches
    c, h, p = ceil(0.8 * sizes.tokens * 2 / E), sizes.model.n_embd, sizes.ep

    def sent(comm):
        trainer = trainer_for(config, TEXT, comm)
        trainer.step(0)
        return comm.traffic.bytes(axis="ep"), trainer.mesh.ep.rank, sizes.blocks(trainer.mesh.pp.rank)

    for count, rank, layers in run_local(ranks_of(config), sent):
        ways = 6 if sizes.recompute else 4  # dispatch and combine, in each forward and in backward
        assert count == ways * layers * m * E * c * h * (p - 1) // p * 8
        assert count == ep_bytes(sizes, rank, [[[c * E // p] * p] * p] * (layers * m))


def test_what_is_dropped_is_counted_over_the_global_batch():
    """Each replica's microbatches have tokens of their own and a capacity of their own."""
    config = config_of("--dp 2 --pp 3 --global-batch 8 --microbatches 2", f"{CAPACITY} --lr 1e-300 --weight-decay 0")
    dropped = on_each_rank(config, TEXT, lambda trainer, results: [result.dropped for result in results])[0]
    trainer = trainer_for(config_of("--global-batch 8", CAPACITY), TEXT)
    for step, count in enumerate(dropped):
        loads = []
        for first in range(0, 8, 2):
            for moe in trainer.moes:
                moe.load[:] = 0
            inputs, targets = trainer.batches.batch(step, range(first, first + 2))
            with trainer.ddp.scaled_backward():
                trainer.model.loss_sum(inputs, targets).backward()
            loads += [moe.load.copy() for moe in trainer.moes]
        assert count == sum(int(np.maximum(load - ceil(0.8 * 2 * 8 * 2 / E), 0).sum()) for load in loads) > 0
