"""Claims about Mixtral over tensor-parallel ranks: one device's loss and gradients, and the sum of the router's."""

import pytest
from tensor_cases import ROWS
from training import joined

from chapters.support.whole_runs import relative_difference
from minipar.comm import run_local
from minipar.errors import UsageError
from minipar.nn import Mixtral, MixtralConfig
from minipar.parallel.placement import Partial
from minipar.parallel.tensor.plan import tensor_parallel

LENGTH = 8
CONFIG = MixtralConfig(13, 32, 40, 2, 8, 4, LENGTH, num_local_experts=5, num_experts_per_tok=2)


def loss_and_gradients(comm, sequence=False, recompute=False, parallel=True, summed=True):
    model = Mixtral(CONFIG, seed=4, dtype="float64", recompute=recompute)
    if parallel:
        tensor = tensor_parallel(model, comm, sequence=sequence)
    loss = model.loss_sum(ROWS[:, :LENGTH], ROWS[:, 1 : LENGTH + 1])
    loss.backward()
    if parallel and summed:
        tensor.sum_partial(model.parameters())
    gradients = {name: joined(comm, p, p.grad) if parallel else p.grad for name, p in model.named_parameters()}
    return loss.item(), gradients


@pytest.mark.parametrize(
    ("tp", "sequence", "recompute"), [(2, False, True), (2, True, False), (4, False, False), (4, True, True)]
)
def test_loss_and_gradients_are_one_devices(tp, sequence, recompute):
    loss, expected = loss_and_gradients(None, parallel=False)
    for other, gradients in run_local(tp, loss_and_gradients, sequence, recompute):
        assert abs(other - loss) <= 1e-12 * abs(loss) and list(gradients) == list(expected)
        for name, gradient in gradients.items():
            assert relative_difference(gradient, expected[name]) <= 1e-12, name


def test_without_the_sum_only_the_routers_gradients_are_wrong():
    """The mistake of torchtitan issue 2387: a rank's results of its columns give it a part of the router's gradient."""
    _, expected = loss_and_gradients(None, parallel=False)
    for _, gradients in run_local(2, loss_and_gradients, summed=False):
        wrong = {name for name, array in gradients.items() if relative_difference(array, expected[name]) > 1e-3}
        assert wrong == {f"model.layers.{i}.block_sparse_moe.gate.weight" for i in range(2)}


@pytest.mark.parametrize("sequence", [False, True])
def test_each_expert_is_split_and_the_router_is_partial(sequence):
    def kinds(comm):
        model = Mixtral(CONFIG, dtype="float64")
        tensor_parallel(model, comm, sequence=sequence)
        layer = model.model.layers[1].mlp
        for expert in layer.experts:
            assert [p.shape for p in expert.parameters()] == [(20, 32), (32, 20), (20, 32)]
            assert [p.placement.tp.dim for p in expert.parameters()] == [0, 1, 0]
        return {name for name, p in model.named_parameters() if isinstance(p.placement.tp, Partial)}

    expected = {f"model.layers.{i}.block_sparse_moe.gate.weight" for i in range(2)}
    if sequence:
        expected |= {name for name, _ in Mixtral(CONFIG).named_parameters() if "norm" in name}
    assert run_local(2, kinds) == [expected] * 2


def test_ranks_that_cannot_share_an_experts_columns_are_refused():
    config = MixtralConfig(13, 32, 42, 1, 8, 4, LENGTH)
    with pytest.raises(UsageError, match="ffn/tp = 42/4 is not a whole number"):
        run_local(4, lambda comm: tensor_parallel(Mixtral(config), comm))
