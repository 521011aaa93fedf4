"""Claims about Llama over tensor-parallel ranks: one device's loss and gradients, and what each rank keeps."""

import pytest
from planning import layout
from tensor_cases import ROWS
from training import joined

from chapters.support.whole_runs import relative_difference
from minipar.comm import run_local
from minipar.errors import UsageError
from minipar.memory import MemoryLedger
from minipar.nn import AdamW, Llama, LlamaConfig
from minipar.parallel.placement import Partial
from minipar.parallel.tensor.plan import tensor_parallel
from minipar.plan.layout import MINIPAR, PRECISIONS
from minipar.plan.model import ModelShape
from minipar.plan.rank_bytes import layer_activations

LENGTH = 8


def config_of(tied=False, layers=2, kv_heads=4):
    return LlamaConfig(13, 32, 40, layers, 8, kv_heads, LENGTH, tie_word_embeddings=tied)


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
        check_copies(comm, model)
    gradients = {name: joined(comm, p, p.grad) if parallel else p.grad for name, p in model.named_parameters()}
    return loss.item(), gradients


def check_copies(comm, model):
    """The ranks with copies of a head of keys have the same initial values of it, and the same gradient."""
    copies = max(1, comm.size // model.config.n_kv_head)
    for name, p in model.named_parameters():
        if "k_proj" in name or "v_proj" in name:
            assert p.placement.tp.copies == copies and len(p.data) == 4 * max(1, model.config.n_kv_head // comm.size)
            held = comm.all_gather_bytes(p.data.tobytes() + p.grad.tobytes())
            assert [held.index(each) for each in held] == [rank - rank % copies for rank in range(comm.size)]


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


@pytest.mark.sampled(3)
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize(("tp", "kv_heads"), [(2, 1), (4, 1), (4, 2), (8, 1), (8, 2), (8, 4)])
def test_more_ranks_than_kv_heads_have_one_devices_gradients(tp, kv_heads, sequence):
    config = config_of(kv_heads=kv_heads)
    loss, expected = loss_and_gradients(None, config, parallel=False)
    for other, gradients in run_local(tp, loss_and_gradients, config, sequence):
        assert abs(other - loss) <= 1e-12 * abs(loss)
        for name, gradient in gradients.items():
            assert relative_difference(gradient, expected[name]) <= 1e-12, name


def test_an_optimizer_without_a_wrapper_sums_the_copies():
    """Tensor parallelism alone: the optimizer asks for the sum before it steps."""

    def updated(comm, parallel=True):
        model = Llama(config_of(kv_heads=2), seed=4, dtype="float64")
        if parallel:
            tensor_parallel(model, comm)
        optimizer = AdamW(model.parameters(), lr=1e-2, eps=1e-4)
        loss = model.loss_sum(ROWS[:, :LENGTH], ROWS[:, 1 : LENGTH + 1])
        loss.backward()
        optimizer.step()
        return {name: joined(comm, p, p.data) if parallel else p.data for name, p in model.named_parameters()}

    expected = updated(None, parallel=False)
    for values in run_local(8, updated):
        assert all(relative_difference(values[name], expected[name]) <= 1e-12 for name in expected)


@pytest.mark.parametrize(("tp", "equation"), [(3, "kv-heads/tp = 4/3"), (6, "tp/kv-heads = 6/4")])
def test_ranks_that_cannot_share_the_kv_heads_are_refused(tp, equation):
    config = LlamaConfig(13, 48, 48, 1, 24, 4, LENGTH)
    with pytest.raises(UsageError, match=f"{equation} is not a whole number"):
        run_local(tp, lambda comm: tensor_parallel(Llama(config), comm))


@pytest.mark.parametrize(
    ("tp", "kv_heads", "sequence"),
    [(1, 4, False), (2, 4, False), (2, 4, True), (4, 4, True), (4, 2, False), (8, 1, True)],
)
def test_a_layer_keeps_what_the_planner_says(tp, kv_heads, sequence):
    """The planner's elements of each token, and the angles of the positions, which are no sample's."""

    def held(comm, layers):
        ledger = MemoryLedger()
        with ledger.recording():
            model = Llama(config_of(layers=layers, kv_heads=kv_heads), dtype="float64")
            if tp > 1:
                tensor_parallel(model, comm, sequence=sequence)
            loss = model.loss_sum(ROWS[:, :LENGTH], ROWS[:, 1 : LENGTH + 1])
            total = ledger.held["activations"]
        del loss
        return total

    shape = ModelShape(1, 32, 8, 13, kv_heads=kv_heads, ffn=40, gated=True, tied=False, biases=False, norm_biases=False)
    given = layout(tp=tp, microbatch=3, sequence_parallel=sequence, precision=PRECISIONS["bf16"])
    planned = layer_activations(shape, given, LENGTH, MINIPAR.kept) * 8 / 2  # float64 instead of bf16
    one, two = run_local(tp, held, 1), run_local(tp, held, 2)
    assert {more - less for less, more in zip(one, two, strict=True)} == {planned + 8 * LENGTH * 2}
