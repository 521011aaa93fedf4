"""Claims about experts on a mesh of their own, edp x ep x etp over the ranks of dp x cp x tp: `--etp` below `--tp`."""

import re

import pytest
from combinations import TEXT, VOCAB, check_config
from launcher import run_mpi
from training import bits, config_for, on_each_rank, ranks_of, reports, trainer_for, verdicts

from chapters.support.whole_runs import bound, relative_difference
from minipar.comm import DeviceMesh, run_local
from minipar.errors import UsageError
from minipar.nn import AdamW, Mixtral, MixtralConfig
from minipar.parallel.expert import expert_parallel
from minipar.parallel.grad_norm import clip_grad_norm
from minipar.parallel.parallelize import shard
from minipar.parallel.placement import placements
from minipar.parallel.tensor.plan import tensor_parallel
from minipar.parallel.zero_optimizer import ZeroOptimizer
from minipar.train.progress import notes
from minipar.train.trainer import Trainer

SHAPE = f"--model mixtral --layers 2 --hidden 16 --heads 4 --kv-heads 2 --ffn 12 --seq-len 8 --vocab-size {VOCAB}"
RUN = "--experts 8 --top-k 2 --dtype float64 --eps 1e-4 --steps 2 --reduction ordered --weight-decay 0.3"


def config_of(layout, flags="--sequence-parallel"):
    return config_for(f"{SHAPE} {RUN} {flags} {layout}")


# ---- the mesh --------------------------------------------------------------------------------------------------------


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


def test_a_stage_of_the_pipeline_has_a_mesh_of_experts():
    for rank, (etp, ep, edp, both) in enumerate(run_local(8, groups_of, dp=2, tp=2, pp=2, ep=2, etp=1)):
        first = 4 * (rank // 4)
        assert (etp, both) == ([rank], list(range(first, first + 4)))
        assert ep == [rank - rank % 2, rank - rank % 2 + 1]
        assert edp == [first + rank % 2, first + rank % 2 + 2]


def test_without_etp_experts_are_cut_as_all_else():
    def program(world):
        mesh = DeviceMesh(world, dp=2, cp=2, tp=2, ep=2)
        assert mesh.etp.ranks == mesh.tp.ranks and mesh.ep_edp.ranks == mesh.dp_cp.ranks

    run_local(8, program)


# ---- training --------------------------------------------------------------------------------------------------------

LAYOUTS = [
    "--dp 2 --tp 2 --etp 1 --ep 2 --global-batch 4 --clip-grad 0.5",
    "--tp 2 --etp 1 --global-batch 4 --clip-grad 0.5",  # ep 1: all experts on each rank, summed over tp
    "--dp 2 --tp 2 --etp 1 --ep 4 --global-batch 4 --zero-stage 1 --reduction ring --ffn 13",
    "--tp 4 --etp 2 --ep 2 --global-batch 4 --clip-grad 0.5 --zero-stage 3 --recompute full",
    "--dp 2 --tp 2 --etp 1 --ep 2 --global-batch 8 --zero-stage 2 --microbatches 2",
    "--dp 2 --tp 2 --etp 1 --ep 2 --global-batch 8 --zero-stage 3 --microbatches 2 --sync-every-microbatch",
    "--cp 2 --tp 2 --etp 1 --ep 4 --global-batch 4 --zero-stage 1 --aux-loss 0.5 --router-bias 0.01 --clip-grad 0.5",
    "--dp 2 --tp 2 --pp 2 --etp 1 --ep 2 --global-batch 8 --microbatches 4 --schedule zb-h1 --zero-stage 2",
    "--tp 4 --etp 2 --global-batch 4 --aux-loss 0.5 --router-bias 0.01 --recompute full",
    "--tp 2 --pp 2 --etp 1 --ep 2 --global-batch 4 --microbatches 2 --recompute full --clip-grad 0.5",
    "--dp 2 --tp 4 --etp 2 --ep 4 --global-batch 4 --zero-stage 3 --clip-grad 0.5",
    "--tp 4 --etp 1 --ep 2 --global-batch 4 --experts 40 --top-k 1",  # most experts have no tokens
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_trains_as_one_device_and_sends_what_is_predicted(layout):
    config = config_of(layout)
    assert run_local(ranks_of(config), check_config, config) == [[]] * ranks_of(config)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mesh", ["--tp 2 --etp 1 --dp 2 --ep 2", "--tp 4 --etp 2"])
def test_every_zero_stage_has_the_bits_of_plain_dp(mesh):
    def inspect(trainer, results):
        return bits(trainer.state_dict()), reports(results)

    layout = f"{mesh} --global-batch 4 --clip-grad 0.3 --reduction ring --zero-stage"
    runs = [on_each_rank(config_of(f"{layout} {stage}"), TEXT, inspect)[0] for stage in range(4)]
    assert runs[1:] == [runs[0]] * 3


def test_etp_equal_to_tp_is_the_default():
    def inspect(trainer, results):
        return bits(trainer.state_dict()), reports(results), trainer.mesh.world.traffic.bytes()

    one, other = (config_of(f"--tp 2 --global-batch 2 {etp}", "") for etp in ("", "--etp 2"))
    assert on_each_rank(one, TEXT, inspect) == on_each_rank(other, TEXT, inspect)


class NormOfOneTensorRank(Trainer):
    """Each rank of tp counts its own experts alone."""

    def _clip_grad_norm(self, max_norm):
        return clip_grad_norm(self.ddp.parameters(), max_norm, self.ddp.norm_comm, None, self.mesh.pp)


class ExpertsOfOneReplica(Trainer):
    """The gradients of experts are those of one rank's tokens, as if ep had all ranks."""

    def __init__(self, *args):
        super().__init__(*args)
        for bucket in self.ddp.buckets:
            if bucket.parameters[0].placement.ep is not None:
                bucket.comm = bucket.comm.levels(bucket.comm.size)[0]


@pytest.mark.parametrize("kind", [Trainer, NormOfOneTensorRank, ExpertsOfOneReplica])
def test_verify_compares_with_one_device(kind):
    config = config_of("--dp 2 --tp 2 --etp 1 --ep 2 --global-batch 4")
    assert {verdict.passed for verdict in verdicts(config, TEXT, kind)} == {kind is Trainer}


@pytest.mark.long
def test_it_trains_under_mpirun():
    flags = "--dtype float64 --tp 2 --etp 1 --ep 4 --sequence-parallel --model mixtral --steps 2 --verify"
    done = run_mpi(4, ["-m", "minipar.train", *flags.split()])
    assert done.returncode == 0 and "4 ranks = 1 device within rounding" in done.stdout, done.stderr


# ---- what a rank holds, and checkpoints ------------------------------------------------------------------------------


def test_a_rank_holds_its_share_of_the_experts():
    config = config_of("--dp 2 --tp 4 --etp 2 --ep 4 --global-batch 4 --zero-stage 1")

    tables = run_local(8, lambda comm: placements(trainer_for(config, TEXT, comm).model))
    for rank, table in enumerate(tables):
        held = [p for p in table if ".experts." in p.name]
        ep = rank // 2 % 4
        assert {int(p.name.split(".experts.")[1].split(".")[0]) for p in held} == {2 * ep, 2 * ep + 1}
        assert {p.local_shape for p in held} == {(6, 16), (16, 6)}
        assert {(str(p.tp), p.tp.rank, p.ep) for p in held} == {(f"Shard({dim})", rank % 2, ep) for dim in (0, 1)}


def test_the_table_calls_an_expert_of_one_rank_whole():
    config = config_of("--tp 2 --etp 1 --global-batch 4")
    for table in run_local(2, lambda comm: placements(trainer_for(config, TEXT, comm).model)):
        assert {str(p.tp) for p in table if ".experts." in p.name} == {"whole"}
        assert {p.describe() for p in table if ".experts.7.w1" in p.name} == {
            f"model.layers.{i}.block_sparse_moe.experts.7.w1.weight" for i in range(2)
        }


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("--tp 2 --etp 1 --dp 2 --ep 2 --zero-stage 1 --sequence-parallel", "--dp 2 --tp 2 --ep 2"),
        ("--dp 2 --ep 2", "--tp 2 --etp 1 --ep 2 --zero-stage 3 --sequence-parallel"),
        ("--tp 4 --etp 2 --ep 2 --sequence-parallel", ""),
        ("--tp 2 --pp 2 --etp 1 --sequence-parallel", "--tp 4 --etp 1 --ep 2 --sequence-parallel"),
    ],
)
def test_a_checkpoint_moves_between_meshes_of_experts(tmp_path, before, after):
    common = "--steps 4 --clip-grad 0.5 --global-batch 4"
    whole = on_each_rank(config_of(f"{common} {before}", ""), TEXT, lambda trainer, results: trainer.state_dict())[0]
    half = config_of(f"{common} {before} --steps 2", "")
    on_each_rank(half, TEXT, lambda trainer, results: trainer.save(tmp_path, 2))
    rest = config_of(f"{common} {after} --resume {tmp_path}", "")
    resumed = on_each_rank(rest, TEXT, lambda trainer, results: trainer.state_dict())[0]
    assert list(resumed) == list(whole)
    for name, array in whole.items():
        assert relative_difference(resumed[name], array) <= bound("float64", 4)


# ---- what is refused -------------------------------------------------------------------------------------------------

REFUSED = {
    "--tp 2 --etp 1": "--etp 1 with --tp 2: each rank of tp routes its own tokens, which it has with --sequence-paral",
    "--dp 2 --etp 1": "--etp 1 does nothing without --tp 2 or more",
    "--tp 2 --etp 0": "--etp 0 is outside [1, inf)",
    "--tp 4 --etp 3 --sequence-parallel": "tp/etp = 4/3 is not a whole number: the ranks of etp are neighbours of tp",
    "--tp 2 --etp 4": "tp/etp = 2/4 is not a whole number",
    "--tp 2 --etp 1 --ep 4 --sequence-parallel": "dp*cp*tp/(ep*etp) = 1*1*2/(4*1) is not a whole number",
    "--tp 4 --etp 2 --ffn 15 --sequence-parallel": "ffn/etp = 15/2 is not a whole number",
    "--tp 2 --etp 1 --sequence-parallel --capacity-factor 1": "of whole samples, of which --etp 1 gives a rank a part",
    "--dp 2 --tp 2 --etp 1 --sequence-parallel --zero-stage 1 --zero-replicas 2": "shards of experts have no replicas",
}


@pytest.mark.parametrize("layout", REFUSED)
def test_a_mesh_that_does_not_fit_is_refused_on_each_rank(layout):
    def program(comm):
        with pytest.raises(UsageError, match=re.escape(REFUSED[layout])):
            trainer_for(config_of(f"{layout} --global-batch 4", ""), TEXT, comm)

    run_local(int(layout.split()[1]) * (2 if "--dp 2 --tp 2" in layout else 1), program)


def test_experts_may_be_all_that_zero_shards():
    layout = "--tp 2 --etp 1 --zero-stage 1 --global-batch 4"
    assert notes(config_of(layout)) == []
    assert "--zero-stage 1 shards nothing: dp = 1" in notes(config_of(f"{layout} --ep 2"))[0]


def test_other_models_have_no_experts():
    with pytest.raises(UsageError, match="--etp 1 is for --model mixtral: a layer of other models has one MLP"):
        config_for("--model llama --tp 2 --etp 1 --sequence-parallel")


EXPERTS = MixtralConfig(VOCAB, 16, 12, 2, 4, 2, 8, num_local_experts=4, num_experts_per_tok=2)


def split(mesh):
    """Return a model that tensor parallelism has split, and the strategy."""
    model = Mixtral(EXPERTS, dtype="float64")
    return model, tensor_parallel(model, mesh.tp, sequence=True, experts=mesh.etp)


@pytest.mark.parametrize("stage", range(4))
def test_experts_that_nobody_shares_out_are_refused(stage):
    """Their gradients cover a rank's own tokens, and a sum over dp alone would lack those of the other ranks of tp."""

    def program(world):
        mesh = DeviceMesh(world, dp=1, tp=2, etp=1)
        model, tensor = split(mesh)
        for use in (lambda: AdamW(model.parameters()), lambda: ZeroOptimizer(model.parameters(), AdamW, mesh.dp)):
            with pytest.raises(UsageError, match=r"nobody sums over their ranks: call mp.expert_parallel\("):
                use()
        with pytest.raises(UsageError, match="is an expert's, and the ranks of ep hold different experts"):
            shard(model, mesh.dp_cp, stage, before_reduce=tensor.sum_partial)
        groups = expert_parallel(model, mesh.ep, mesh.edp).groups(mesh.dp_cp)
        shard(model, mesh.dp_cp, stage, groups=groups, before_reduce=tensor.sum_partial)

    run_local(2, program)


@pytest.mark.parametrize("axis", ["ep", "edp", "tp", "world"])
def test_a_wrapper_has_one_rank_of_tp(axis):
    def program(world):
        mesh = DeviceMesh(world, dp=2, cp=2, tp=2, ep=4, etp=1)
        model, _ = split(mesh)
        experts = expert_parallel(model, mesh.ep, mesh.edp)
        comm = {"ep": mesh.ep, "edp": mesh.edp, "tp": mesh.tp, "world": world}[axis]
        with pytest.raises(
            UsageError, match="the 8 ranks of ep = 4 and edp = 2 hold different tokens; wrap it over me"
        ):
            experts.groups(comm)
        experts.groups(mesh.dp_cp)

    run_local(8, program)


def test_tensor_parallelism_comes_first_and_with_sequences():
    def program(world):
        mesh = DeviceMesh(world, dp=1, tp=2, etp=1)
        model = Mixtral(EXPERTS)
        with pytest.raises(UsageError, match="tp = 2 with etp = 1: .*; give sequence=True"):
            tensor_parallel(model, mesh.tp, experts=mesh.etp)
        expert_parallel(model, mesh.ep, mesh.edp)
        with pytest.raises(UsageError, match="tp = 2 with etp = 1: expert_parallel comes after tensor_parallel"):
            tensor_parallel(model, mesh.tp, sequence=True, experts=mesh.etp)

    run_local(2, program)


def test_experts_are_not_shared_among_the_ranks_that_cut_them():
    def program(world):
        mesh = DeviceMesh(world, dp=1, tp=4, etp=2, ep=2)
        model, _ = split(mesh)
        with pytest.raises(
            UsageError, match="expert_parallel over ranks .*: tensor_parallel of experts has split this"
        ):
            expert_parallel(model, mesh.etp, mesh.ep)
        expert_parallel(model, mesh.ep, mesh.edp)
        with pytest.raises(
            UsageError, match=r"experts over ranks .*split over neighbours of tp; give experts=mesh.etp"
        ):
            tensor_parallel(Mixtral(EXPERTS), mesh.tp, sequence=True, experts=mesh.ep)

    run_local(4, program)
