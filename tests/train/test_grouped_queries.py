"""Claims about more tensor-parallel ranks than heads of keys and values: one device's training, bytes and files."""

import json

import numpy as np
import pytest
from combinations import STEPS, TEXT, VOCAB, check_config
from launcher import run_mpi
from training import config_for, on_each_rank, ranks_of, run_until, trainer_for, verdicts

from chapters.support.whole_runs import relative_difference
from minipar.comm import run_local
from minipar.errors import UsageError
from minipar.nn import LlamaConfig
from minipar.nn.pretrained import load_pretrained
from minipar.train.checkpoint import Checkpoint
from minipar.train.progress import write_export
from minipar.train.trainer import Trainer
from minipar.train.verify import same_on_all_ranks

pytestmark = pytest.mark.sampled(3)

SHAPE = f"--model llama --layers 2 --hidden 32 --heads 8 --ffn 24 --seq-len 8 --vocab-size {VOCAB}"
RUN = f"--global-batch 4 --dtype float64 --steps {STEPS} --eps 1e-4 --weight-decay 0.1 --clip-grad 0.5"
MIXTRAL = "--model mixtral --experts 4 --top-k 2"

FEW = [
    "--tp 2 --kv-heads 1",
    "--tp 8 --kv-heads 4 --sequence-parallel",
    "--tp 4 --kv-heads 2 --dp 2 --zero-stage 1 --microbatches 2",
    "--tp 4 --kv-heads 2 --dp 2 --zero-stage 3 --sequence-parallel --sync-every-microbatch --microbatches 2",
    "--tp 4 --kv-heads 2 --pp 2 --microbatches 2 --schedule zb-h1 --recompute full",
    "--tp 4 --kv-heads 2 --cp 2 --reduction ordered",
    f"{MIXTRAL} --tp 4 --kv-heads 2 --dp 2 --ep 2 --zero-stage 2",
]
MORE = [
    "--tp 4 --kv-heads 1",
    "--tp 4 --kv-heads 2 --recompute full",
    "--tp 4 --kv-heads 4 --sequence-parallel",
    "--tp 8 --kv-heads 1 --sequence-parallel",
    "--tp 8 --kv-heads 2",
    "--tp 8 --kv-heads 2 --pp 2 --microbatches 2 --sequence-parallel",
    "--tp 2 --kv-heads 1 --dp 4 --zero-stage 3 --zero-replicas 2",
    "--tp 4 --kv-heads 1 --dp 2 --zero-stage 2 --sequence-parallel",
    "--tp 4 --kv-heads 2 --cp 2 --context-parallel all-gather --zero-stage 3",
    "--tp 2 --kv-heads 1 --dp 2 --pp 2 --schedule zbv --layers 4 --zero-stage 1 --microbatches 2",
    f"{MIXTRAL} --tp 8 --kv-heads 2 --sequence-parallel",
]


def configured(flags):
    return config_for(f"{SHAPE} {RUN} {flags}")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("flags", [*FEW, *(pytest.param(flags, marks=pytest.mark.long) for flags in MORE)])
def test_a_layout_trains_as_one_device_and_sends_as_said(flags):
    """Parameters, losses and clipped norms within 1e-12, the same copies on all their ranks, bytes with ==."""
    config = configured(flags)
    assert run_local(ranks_of(config), check_config, config) == [[]] * ranks_of(config)


@pytest.mark.parametrize(
    "flags", ["--tp 8 --kv-heads 2 --sequence-parallel", "--tp 4 --kv-heads 1 --dtype bf16 --eps 1e-8"]
)
def test_verify_passes(flags):
    verdict = verdicts(configured(flags), TEXT)[0]
    assert verdict.passed and "within rounding" in verdict.line, verdict.line


# ---- mistakes --------------------------------------------------------------------------------------------------------


class ForgetsCopies(Trainer):
    """The gradients of copied heads stay those of each rank's own queries."""

    def __init__(self, *args):
        super().__init__(*args)
        tensor = self.ddp.before_reduce.__self__
        tensor.groups = tensor.groups[:1]


def test_copies_that_are_not_summed_are_noticed():
    config = configured("--tp 4 --kv-heads 2")
    found = run_local(4, check_config, config, False, ForgetsCopies)
    assert all(any("replicas hold different parameters" in line for line in wrong) for wrong in found)
    assert any("gradient norm" in line for line in found[0])
    assert all(any("sent" in line for line in wrong) for wrong in found)
    line = verdicts(config, TEXT, ForgetsCopies)[0].line
    assert "verify: FAILED: after step 1 of 2: gradient of model.layers." in line


@pytest.mark.sampled(1)
@pytest.mark.parametrize("rank", range(4))
def test_a_copy_that_differs_on_any_rank_is_seen(rank):
    """Ranks 0 and 1 have the one head, 2 and 3 the other; a head that nobody copies may differ."""

    def same(comm, name):
        trainer = trainer_for(configured("--tp 4 --kv-heads 2"), TEXT, comm)
        if comm.rank == rank:
            weights = dict(trainer.model.named_parameters())
            weights[f"model.layers.1.self_attn.{name}.weight"].data[0, 0] += 1e-9
        return same_on_all_ranks(trainer)

    assert run_local(4, same, "k_proj") == run_local(4, same, "v_proj") == [False] * 4
    assert run_local(4, same, "q_proj") == [True] * 4


# ---- what ranks cannot share -----------------------------------------------------------------------------------------

REFUSED = {
    "--heads 12 --hidden 48 --kv-heads 3 --tp 4": "tp/kv-heads = 4/3 is not a whole number: as many .* copy each head",
    "--heads 6 --hidden 24 --kv-heads 3 --tp 2": "kv-heads/tp = 3/2 is not a whole number: .* whole heads of k and v",
    "--kv-heads 2 --tp 16": "heads/tp = 8/16 is not a whole number",
    "--kv-heads 2 --tp 4 --cp 2 --context-parallel ulysses": "kv-heads/cp = 1/2 is not a whole number",
    "--kv-heads 2 --tp 4 --vocab-size 16 --reduction tree": "--reduction tree with tp = 4: .* has 2, the largest power",
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("flags", REFUSED)
def test_ranks_that_cannot_share_or_copy_heads_are_refused(flags):
    with pytest.raises(UsageError, match=REFUSED[flags]):
        configured(flags)


# ---- checkpoints and files -------------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("--tp 8 --kv-heads 2", "--tp 2 --kv-heads 2 --dp 2 --zero-stage 1"),
        ("--tp 4 --kv-heads 1 --dp 2 --zero-stage 3", "--kv-heads 1"),
        ("--kv-heads 4", "--tp 8 --kv-heads 4 --sequence-parallel"),
    ],
)
def test_a_run_resumes_on_fewer_and_on_more_ranks_than_heads(before, after, tmp_path):
    kv_heads = after.partition("--kv-heads ")[2][0]
    state, results = run_until(TEXT, configured(f"--kv-heads {kv_heads}"))
    run_until(TEXT, configured(before), tmp_path, 1)
    again, later = run_until(TEXT, configured(f"{after} --resume {tmp_path}"))
    assert list(again) == list(state)
    assert all(relative_difference(again[name], state[name]) <= 1e-11 for name in state)
    assert np.allclose(later, results[1:], rtol=1e-12, atol=0)


def test_a_checkpoint_has_each_copied_head_once(tmp_path):
    """The first rank of those with a copy writes it, as one of as many parts as there are heads."""
    run_until(TEXT, configured("--tp 8 --kv-heads 2"), tmp_path, 1)
    manifest = tmp_path / "step-00000001" / "manifest.json"
    Checkpoint(manifest.parent, manifest.read_bytes())  # refuses elements that are there twice, or not at all
    pieces = {}
    for file in json.loads(manifest.read_text())["files"]:
        for piece in file["pieces"]:
            pieces.setdefault(piece["name"], []).append(
                (file["name"][9], piece["cut"]["rank"] if piece["cut"] else None)
            )
    for layer in range(2):
        for name in ("k_proj", "v_proj"):
            assert pieces[f"model.layers.{layer}.self_attn.{name}.weight"] == [("0", 0), ("4", 1)]
        assert len(pieces[f"model.layers.{layer}.self_attn.q_proj.weight"]) == 8


def test_an_exported_model_is_the_trained_one(tmp_path):
    def export(trainer, results):
        state = trainer.state_dict()
        if state:
            write_export(trainer.model, str(tmp_path), state)
        return state

    state = on_each_rank(configured("--tp 8 --kv-heads 2"), TEXT, export)[0]
    loaded = load_pretrained(tmp_path, dtype="float64")
    assert loaded.config == LlamaConfig(VOCAB, 32, 24, 2, 8, 2, 8)
    assert all(np.array_equal(array, state[name]) for name, array in loaded.state_dict().items())


@pytest.mark.long
def test_under_mpirun_a_run_verifies_and_resumes_on_one_rank(tmp_path):
    flags = f"{SHAPE} --vocab-size 256 {RUN} --kv-heads 1 --verify --save {tmp_path}"
    first = run_mpi(4, ["-m", "minipar.train", *flags.split(), "--tp", "4", "--steps", "1"])
    assert first.returncode == 0 and "verify: 4 ranks = 1 device within rounding" in first.stdout, first.stderr
    second = run_mpi(1, ["-m", "minipar.train", "--resume", str(tmp_path), "--steps", "2", "--verify"])
    assert second.returncode == 0 and "bit for bit" in second.stdout, second.stderr
