"""Claims about experts on a mesh of their own, edp x ep x etp over the ranks of dp x cp x tp, with etp below tp."""

from dataclasses import replace

import numpy as np
import pytest
from combinations import TEXT, VOCAB

from chapters.support.whole_runs import relative_difference
from minipar.comm import DeviceMesh, run_local
from minipar.nn import Mixtral, MixtralConfig
from minipar.parallel.context import context_parallel
from minipar.parallel.expert import expert_parallel
from minipar.parallel.layout import StepLayout
from minipar.parallel.placement_table import placements
from minipar.parallel.state import gather_state
from minipar.parallel.tensor.plan import tensor_parallel
from minipar.parallel.traffic import norm_bytes, tp_bytes
from minipar.parallel.wrap import shard


def groups_of(world, **sizes):
    mesh = DeviceMesh(world, **sizes)
    return [comm.ranks for comm in (mesh.etp, mesh.ep, mesh.edp, mesh.ep_edp)]


def test_etp_is_fastest_then_ep_then_edp():
    for rank, (etp, ep, edp, both) in enumerate(run_local(16, groups_of, dp=2, cp=2, tp=4, ep=4, etp=2)):
        edp_rank, rest = divmod(rank, 8)
        ep_rank, etp_rank = divmod(rest, 2)
        assert etp == [8 * edp_rank + 2 * ep_rank + e for e in range(2)]
        assert ep == [8 * edp_rank + 2 * p + etp_rank for p in range(4)]
        assert edp == [8 * q + 2 * ep_rank + etp_rank for q in range(2)]
        assert both == list(range(etp_rank, 16, 2))


APART = MixtralConfig(VOCAB, 16, 12, 2, 4, 2, 8, num_local_experts=12, num_experts_per_tok=2)


def on_a_mesh(world, dp, cp, tp, ep, etp, stage, recompute=False):
    """The mesh of a script whose experts are cut over etp of the ranks of tp, its context, and the wrapper."""
    mesh = DeviceMesh(world, dp=dp, cp=cp, tp=tp, ep=ep, etp=etp)
    model = Mixtral(APART, dtype="float64", recompute=recompute)
    context = context_parallel(model, mesh.cp)
    tensor = tensor_parallel(model, mesh.tp, sequence=tp > 1, experts=mesh.etp)
    experts = expert_parallel(model, mesh.ep, mesh.edp)
    groups = experts.groups(mesh.dp_cp)
    return mesh, context, shard(model, mesh.dp_cp, stage, groups=groups, before_reduce=tensor.sum_partial)


def script(world, *sizes):
    """The loss, what this rank sends over tp in forward and backward and is predicted to, and the gradient."""
    mesh, context, wrapper = on_a_mesh(world, *sizes)
    dp, cp, tp, ep, etp, stage, recompute = sizes
    rows = np.array_split(TEXT.ids[: 4 * 9].astype(np.int64).reshape(4, 9), dp)[mesh.dp.rank]
    world.traffic.reset()
    loss = wrapper.loss(context.part(rows[:, :-1]), context.part(rows[:, 1:]))
    loss.backward()
    sent = world.traffic.bytes(axis="tp")
    layout = StepLayout(APART, 8, len(rows), 1, itemsize=8, dp=dp, cp=cp, tp=tp, ep=ep, etp=etp)
    layout = replace(layout, zero_stage=stage, sequence_parallel=tp > 1, recompute=recompute)
    norm = norm_bytes(layout, layout.norm_rows, tp, mesh.tp.rank)  # which the script does not compute
    parameters = wrapper.parameters()
    gradient = gather_state(wrapper.model, parameters, world, [p.grad for p in parameters])
    return loss.item(), sent, tp_bytes(layout, mesh.tp.rank, 0) - norm, gradient


@pytest.mark.parametrize(
    ("dp", "cp", "tp", "ep", "etp", "stage", "recompute"),
    [
        (2, 1, 2, 2, 1, 0, False),
        (1, 1, 2, 1, 1, 0, False),  # all experts on each rank, summed over tp
        (2, 1, 2, 4, 1, 1, False),
        (1, 1, 4, 2, 2, 3, True),
        (2, 1, 4, 2, 2, 2, False),
        (1, 2, 2, 4, 1, 1, False),
    ],
)
def test_experts_apart_from_tp_have_one_devices_gradients(dp, cp, tp, ep, etp, stage, recompute):
    expected, _, _, single = run_local(1, script, 1, 1, 1, 1, 1, 0, False)[0]
    outcomes = run_local(dp * cp * tp, script, dp, cp, tp, ep, etp, stage, recompute)
    for loss, sent, predicted, _ in outcomes:
        assert loss == pytest.approx(expected, rel=1e-12) and sent == predicted
    gradient = outcomes[0][-1]
    assert gradient.keys() == single.keys()
    assert all(relative_difference(gradient[name], single[name]) <= 1e-12 for name in single)


def test_the_table_shows_a_ranks_experts_and_their_columns():
    for rank, table in enumerate(run_local(8, lambda world: placements(on_a_mesh(world, 2, 1, 4, 4, 2, 1)[2].model))):
        held = [p for p in table if ".experts." in p.name]
        ep = rank // 2 % 4
        assert {int(p.name.split(".experts.")[1].split(".")[0]) for p in held} == {3 * ep, 3 * ep + 1, 3 * ep + 2}
        assert {p.local_shape for p in held} == {(6, 16), (16, 6)}
        assert {(str(p.tp), p.tp.rank, p.ep) for p in held} == {(f"Shard({dim})", rank % 2, ep) for dim in (0, 1)}
