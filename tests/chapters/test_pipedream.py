"""Claims about PipeDream and PipeDream-2BW: not synchronous training, but exactly training with known older weights."""

import numpy as np
import pytest

from chapters.support.ch08.pipedream import AsynchronousPipeline, Staleness, stale_reference
from minipar.comm import run_local
from minipar.errors import UsageError
from minipar.nn import GPT, AdamW, GPTConfig, Parameter
from minipar.parallel.pipeline.schedules import make

CONFIG = GPTConfig(vocab_size=13, n_positions=8, n_embd=16, n_layer=8, n_head=2)
TOKENS = np.random.Generator(np.random.Philox(3)).integers(0, 13, (24, 2, 9))


def batch(m):
    return TOKENS[m][:, :8], TOKENS[m][:, 1:]


def model():
    return GPT(CONFIG, dtype="float64")


def pipeline(comm, staleness, microbatches, kind=AsynchronousPipeline):
    """One rank's final weights by name, the losses, and the most versions it kept."""
    gpt = model()
    run = kind(gpt, comm, staleness, microbatches, (2, 8))
    run.run(batch)
    names = {p: name for name, p in gpt.named_parameters()}
    state = {names[p]: p.data for p in run.weights.parameters if p in names}
    return state, list(run.losses), run.weights.peak


def on_one_device(staleness, microbatches):
    gpt = model()
    losses = stale_reference(gpt, staleness, microbatches, 8, batch)
    return gpt.state_dict(), losses


@pytest.mark.parametrize(
    ("stages", "group", "microbatches"),
    [(1, 1, 5), (2, 1, 1), (3, 1, 21), (8, 1, 5), (2, 2, 21), (4, 3, 5), (8, 7, 21)],
)
def test_ranks_end_with_one_devices_bits_on_the_same_old_weights(stages, group, microbatches):
    staleness = Staleness(stages, group)
    expected, losses = on_one_device(staleness, microbatches)
    results = run_local(stages, pipeline, staleness, microbatches)
    found = {name: array for state, _, _ in results for name, array in state.items()}
    assert found.keys() == expected.keys()
    assert all(found[name].tobytes() == expected[name].tobytes() for name in expected)
    assert results[-1][1] == losses


def test_pipedream_keeps_a_version_per_later_stage_and_2bw_two():
    assert [peak for _, _, peak in run_local(4, pipeline, Staleness(4), 12)] == [4, 3, 2, 1]
    assert [peak for _, _, peak in run_local(4, pipeline, Staleness(4, 4), 24)] == [2, 2, 2, 2]


def test_neither_is_synchronous_training():
    fresh, _ = on_one_device(Staleness(1), 12)
    for staleness in (Staleness(4), Staleness(4, 3)):
        stale, _ = on_one_device(staleness, 12)
        assert stale["h.0.mlp.c_fc.weight"].tobytes() != fresh["h.0.mlp.c_fc.weight"].tobytes()
    assert [Staleness(4).version(3, m) for m in range(6)] == [0, 1, 2, 3, 4, 5]
    assert [Staleness(4).version(0, m) for m in range(6)] == [0, 0, 0, 0, 1, 2]
    assert [Staleness(4, 3).version(0, m) for m in range(9)] == [0, 0, 0, 0, 0, 0, 1, 1, 1]


def test_2bw_is_the_papers_update_rule():
    """W(t+1) = W(t) - step(grad f(W(t-1))), written down without stages: the gradient of a group is the mean of its
    microbatches' on the weights before the last."""
    gpt, staleness = model(), Staleness(2, 2)
    expected, _ = on_one_device(staleness, 8)
    head = model().wte.weight.data.copy()  # untied, as PipeDream's last stage has it
    gpt.wte.weight.ties.clear()

    lm_head = Parameter(head)
    gpt.segments[-1].run = lambda x: gpt.project(gpt.ln_f(x), lm_head)
    parameters = [*gpt.parameters(), lm_head]
    optimizer = AdamW(parameters)
    before = last = [p.data.copy() for p in parameters]
    for t in range(4):
        for p, numbers in zip(parameters, before, strict=True):
            p.data = numbers.copy()
            p.zero_grad()
        for m in (2 * t, 2 * t + 1):
            inputs, targets = batch(m)
            loss = gpt.loss_sum(inputs, targets)
            loss.backward(np.full_like(loss.data, 1 / (targets.size * 2)))
        for p, numbers in zip(parameters, last, strict=True):
            p.data = numbers.copy()
        optimizer.step()
        before, last = last, [p.data for p in parameters]
    for name, p in gpt.named_parameters():
        assert p.data.tobytes() == expected[name].tobytes(), name


class ForgetsToStash(AsynchronousPipeline):
    """Backward on the latest weights, not on those that forward used."""

    def __init__(self, *args):
        super().__init__(*args)
        self.use_version, self.weights.use = self.weights.use, self.use_latest

    def use_latest(self, version):
        self.use_version(self.weights.latest)


def test_a_pipeline_that_does_not_stash_is_caught():
    expected, _ = on_one_device(Staleness(3), 9)
    found = {n: x for state, _, _ in run_local(3, pipeline, Staleness(3), 9, ForgetsToStash) for n, x in state.items()}
    assert any(found[name].tobytes() != expected[name].tobytes() for name in expected)


def test_too_small_groups_and_synchronous_schedules_are_refused():
    with pytest.raises(UsageError, match="7"):
        Staleness(8, 4)
    for name in ("pipedream", "pipedream-2bw"):
        with pytest.raises(UsageError, match=name):
            make(name, 4, 8)
