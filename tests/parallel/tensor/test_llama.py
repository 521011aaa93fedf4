"""Claims about Llama over tensor-parallel ranks: one device's loss and gradients, and what each rank keeps."""

import pytest
from planning import layout
from tensor_cases import ROWS
from training import joined

from chapters.support.whole_runs import relative_difference
from minipar.comm import run_local
from minipar.errors import UsageError
from minipar.memory import MemoryLedger
from minipar.nn import Llama, LlamaConfig
from minipar.parallel.placement import Partial
from minipar.parallel.tensor.plan import tensor_parallel
from minipar.plan.layout import MINIPAR, PRECISIONS
from minipar.plan.model import ModelShape
from minipar.plan.rank_bytes import layer_activations

LENGTH = 8


def config_of(tied=False, layers=2):
    return LlamaConfig(13, 32, 40, layers, 8, 4, LENGTH, tie_word_embeddings=tied)


def loss_and_gradients(comm, config, sequence=False, recompute=False, parallel=True):
    model = Llama(config, seed=4, dtype="float64", recompute=recompute)
    if parallel:
        tensor = tensor_parallel(model, comm, sequence=sequence)
    loss = model.loss_sum(ROWS[:, :LENGTH], ROWS[:, 1 : LENGTH + 1])
    loss.backward()
    for parameter in model.parameters():
        parameter.fold_tied_gradients()
    if parallel:
        tensor.sum_partial(model.parameters())
        assert all(isinstance(p.placement.tp, Partial) == (sequence and p.ndim == 1) for p in model.parameters())
    gradients = {name: joined(comm, p, p.grad) if parallel else p.grad for name, p in model.named_parameters()}
    return loss.item(), gradients


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("tp", "sequence", "recompute"), [(2, False, True), (2, True, False), (4, False, False), (4, True, True)]
)
def test_loss_and_gradients_are_one_devices(tp, sequence, recompute, tied):
    loss, expected = loss_and_gradients(None, config_of(tied), parallel=False)
    for other, gradients in run_local(tp, loss_and_gradients, config_of(tied), sequence, recompute):
        assert abs(other - loss) <= 1e-12 * abs(loss) and list(gradients) == list(expected)
        for name, gradient in gradients.items():
            assert relative_difference(gradient, expected[name]) <= 1e-12, name


@pytest.mark.parametrize("tp", [3, 8])
def test_ranks_that_cannot_share_the_kv_heads_are_refused(tp):
    config = LlamaConfig(13, 48, 48, 1, 24, 4, LENGTH)
    with pytest.raises(UsageError, match=f"kv-heads/tp = 4/{tp} is not a whole number"):
        run_local(tp, lambda comm: tensor_parallel(Llama(config), comm))


@pytest.mark.parametrize(("tp", "sequence"), [(1, False), (2, False), (2, True), (4, True)])
def test_a_layer_keeps_what_the_planner_says(tp, sequence):
    """The planner's elements of each token, and the angles of the positions, which are no sample's."""

    def held(comm, layers):
        ledger = MemoryLedger()
        with ledger.recording():
            model = Llama(config_of(layers=layers), dtype="float64")
            if tp > 1:
                tensor_parallel(model, comm, sequence=sequence)
            loss = model.loss_sum(ROWS[:, :LENGTH], ROWS[:, 1 : LENGTH + 1])
            total = ledger.held["activations"]
        del loss
        return total

    shape = ModelShape(1, 32, 8, 13, kv_heads=4, ffn=40, gated=True, tied=False, biases=False, norm_biases=False)
    given = layout(tp=tp, microbatch=3, sequence_parallel=sequence, precision=PRECISIONS["bf16"])
    planned = layer_activations(shape, given, LENGTH, MINIPAR.kept) * 8 / 2  # float64 instead of bf16
    one, two = run_local(tp, held, 1), run_local(tp, held, 2)
    assert {more - less for less, more in zip(one, two, strict=True)} == {planned + 8 * LENGTH * 2}
