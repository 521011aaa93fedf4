"""Claims about Llama and Mixtral over tensor-parallel ranks: one device's loss and gradients, what a rank keeps."""

from dataclasses import replace

import pytest
from planning import layout
from tensor_cases import ROWS
from training import joined

from chapters.support.whole_runs import relative_difference
from minipar.comm import run_local
from minipar.errors import UsageError
from minipar.memory import MemoryLedger
from minipar.more.experts.mixtral import Mixtral, MixtralConfig
from minipar.more.llama import Llama, LlamaConfig
from minipar.nn import AdamW
from minipar.parallel.placement import Partial
from minipar.parallel.tensor.plan import tensor_parallel
from minipar.plan.layout import MINIPAR, PRECISIONS
from minipar.plan.model import ModelShape
from minipar.plan.rank_bytes import layer_activations

LENGTH = 8


def llama(layers=2, **options):
    heads = {"num_key_value_heads": 4, **options}
    return Llama, LlamaConfig(13, 32, 40, layers, 8, max_position_embeddings=LENGTH, **heads)


MIXTRAL = Mixtral, MixtralConfig(13, 32, 40, 2, 8, 4, LENGTH, num_local_experts=5, num_experts_per_tok=2)
MODELS = {
    "llama": llama(),
    "llama, tied": llama(tie_word_embeddings=True),
    "llama, two heads of keys": llama(num_key_value_heads=2),
    "mixtral": MIXTRAL,
    "mixtral, columns that 4 ranks do not divide": (Mixtral, replace(MIXTRAL[1], intermediate_size=42)),
}


def loss_of(model):
    return model.loss_sum(ROWS[:, :LENGTH], ROWS[:, 1 : LENGTH + 1])


def loss_and_gradients(comm, name, sequence=False, recompute=False):
    """Loss and gradients, made whole; without `comm` those of one device."""
    kind, config = MODELS[name]
    model = kind(config, seed=4, dtype="float64", recompute=recompute)
    tensor = tensor_parallel(model, comm, sequence=sequence) if comm else None
    loss = loss_of(model)
    loss.backward()
    for parameter in model.parameters():
        parameter.fold_tied_gradients()
    if comm:
        tensor.sum_partial(model.parameters())
        assert partial_names(model) == expected_partials(model, sequence)
    return loss.item(), {name: joined(comm, p, p.grad) if comm else p.grad for name, p in model.named_parameters()}


def partial_names(model):
    return {name for name, p in model.named_parameters() if isinstance(p.placement.tp, Partial)}


def expected_partials(model, sequence):
    """Routers, and with sequence parallelism the norms."""
    return {name for name, _ in model.named_parameters() if ".gate." in name or (sequence and "norm" in name)}


@pytest.mark.parametrize(
    ("name", "tp", "sequence", "recompute"),
    [
        ("llama", 2, False, True),
        ("llama", 4, True, True),
        ("llama, tied", 2, True, False),
        ("llama, tied", 4, False, False),
        ("llama, two heads of keys", 2, True, False),
        ("mixtral", 2, False, True),
        ("mixtral", 4, True, False),
        ("mixtral", 4, True, True),
        ("mixtral, columns that 4 ranks do not divide", 4, True, False),
    ],
)
def test_loss_and_gradients_are_one_devices(name, tp, sequence, recompute):
    loss, expected = loss_and_gradients(None, name)
    for other, gradients in run_local(tp, loss_and_gradients, name, sequence, recompute):
        assert abs(other - loss) <= 1e-12 * abs(loss) and list(gradients) == list(expected)
        for key, gradient in gradients.items():
            assert relative_difference(gradient, expected[key]) <= 1e-12, key


def test_an_optimizer_without_a_wrapper_sums_partial_gradients():
    """Tensor parallelism alone: the optimizer asks for the sum before it steps."""

    def updated(comm):
        kind, config = MODELS["llama, two heads of keys"]
        model = kind(config, seed=4, dtype="float64")
        if comm:
            tensor_parallel(model, comm, sequence=True)
        optimizer = AdamW(model.parameters(), lr=1e-2, eps=1e-4)
        loss_of(model).backward()
        optimizer.step()
        return {name: joined(comm, p, p.data) if comm else p.data for name, p in model.named_parameters()}

    expected = updated(None)
    for values in run_local(2, updated):
        assert all(relative_difference(values[name], expected[name]) <= 1e-12 for name in expected)


def test_each_rank_has_columns_of_every_expert():
    def shapes(comm):
        kind, config = MIXTRAL
        model = kind(config, dtype="float64")
        tensor_parallel(model, comm)
        return [[p.shape for p in expert.parameters()] for expert in model.model.layers[1].mlp.experts]

    assert run_local(2, shapes) == [[[(20, 32), (32, 20), (20, 32)]] * 5] * 2


@pytest.mark.parametrize(
    ("tp", "equation", "config"),
    [(3, "4/3", LlamaConfig(13, 48, 48, 1, 24, 4, LENGTH)), (6, "4/6", LlamaConfig(13, 48, 48, 1, 24, 4, LENGTH))],
)
def test_ranks_that_cannot_share_a_layer_are_refused(tp, equation, config):
    with pytest.raises(UsageError, match=equation):
        run_local(tp, lambda comm: tensor_parallel(Llama(config), comm))


@pytest.mark.parametrize(("tp", "kv_heads", "sequence"), [(1, 4, False), (2, 4, True), (4, 4, False), (8, 8, True)])
def test_a_layer_keeps_what_the_planner_says(tp, kv_heads, sequence):
    """The planner's elements of each token, and the angles of the positions, which are no sample's."""

    def held(comm, layers):
        ledger = MemoryLedger()
        with ledger.recording():
            kind, config = llama(layers, num_key_value_heads=kv_heads)
            model = kind(config, dtype="float64")
            if tp > 1:
                tensor_parallel(model, comm, sequence=sequence)
            loss = loss_of(model)
            total = ledger.held["activations"]
        del loss
        return total

    shape = ModelShape(1, 32, 8, 13, kv_heads=kv_heads, ffn=40, gated=True, tied=False, biases=False, norm_biases=False)
    given = layout(tp=tp, microbatch=3, sequence_parallel=sequence, precision=PRECISIONS["bf16"])
    planned = layer_activations(shape, given, LENGTH, MINIPAR.kept) * 8 / 2  # float64 instead of bf16
    one, two = run_local(tp, held, 1), run_local(tp, held, 2)
    assert {more - less for less, more in zip(one, two, strict=True)} == {planned + 8 * LENGTH * 2}
