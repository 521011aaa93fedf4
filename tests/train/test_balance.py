"""Claims about the auxiliary loss of experts: equal to one device in every layout, bytes, and the gradient it adds."""

import numpy as np
import pytest
from combinations import TEXT, VOCAB, differences, run_steps
from training import config_for, one_device, ranks_of, trainer_for

from chapters.support.training import step_traffic
from minipar.autograd import no_grad
from minipar.comm import run_local
from minipar.more.experts.mixtral import moe_layers

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


def trained(args):
    """Each rank's (parameters after each step, what each step reported, bytes of each step by axis)."""
    return run_local(ranks_of(args), lambda comm: run_steps(trainer_for(args, TEXT, comm)))


def check_layout(layout, exact):
    """Train on one device and on all ranks; what they differ in is an error."""
    args = config_of(layout)
    states, reported, _ = run_steps(one_device(args, TEXT))
    ranks = trained(args)
    assert differences(*ranks[0][:2], (states, reported), exact=exact) == []
    for rank, (_, reports_of_rank, sent) in enumerate(ranks):
        assert reports_of_rank == ranks[0][1]
        assert sent == [step_traffic(args, rank)] * len(sent)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_auxiliary_loss_trains_as_on_one_device(layout):
    check_layout(layout, exact=False)


@pytest.mark.parametrize("layout", TO_THE_BIT)
def test_without_split_tokens_the_bits_are_one_devices(layout):
    check_layout(layout, exact=True)


def objective(trainer, loads=None):
    """The global batch's mean loss plus 0.5 times the mean over layers and samples; and the loads of each of them."""
    moes, found, values = moe_layers(trainer.model), [], []
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
    trainer = trainer_for(config_of("--global-batch 4 --microbatches 2 --lr 1e-300 --weight-decay 0"), TEXT)
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
