"""Claims about `--resume DIR`: it takes what the checkpoint says, and rejects only a flag that contradicts it."""

import dataclasses

import pytest
from launcher import run_each, run_mpi

from minipar.comm import DeviceMesh, run_local, serial
from minipar.errors import UsageError
from minipar.nn import GPT, GPTConfig
from minipar.nn.pretrained import save_pretrained
from minipar.train.config import parse, resolve
from minipar.train.data import load_tokens
from minipar.train.resume import MUST_AGREE, TAKEN, continued, find_checkpoint
from minipar.train.settings import TrainConfig, flags
from minipar.train.trainer import Trainer

# No flag has its default; those of the evaluation are resumed in test_evaluate.py.
FLAGS = (
    "--layers 1 --hidden 18 --heads 3 --seq-len 8 --vocab-size 257 --global-batch 12 --order sequential --steps 4 "
    "--lr 3e-3 --lr-schedule cosine --warmup-steps 2 --betas 0.8 0.95 --eps 1e-7 --weight-decay 0.1 --dropout 0.1 "
    "--clip-grad 1 --seed 7 --dtype float64 --reduction ordered"
)
TRAIN = ["-m", "minipar.train"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of step 2 of 4, and the text that it was trained on."""
    folder = tmp_path_factory.mktemp("saved")
    text = folder / "text.txt"
    text.write_bytes(load_tokens(None, vocab_size=256, seq_len=8).ids[:5000].tobytes())
    config = resolve(parse([*FLAGS.split(), "--data", str(text), "--microbatches", "2"]), 2)
    tokens = load_tokens(str(text), vocab_size=257, seq_len=8)

    def rank(comm):
        trainer = Trainer(config, DeviceMesh(comm), tokens)
        for step in range(2):
            trainer.step(step)
        trainer.save(folder / "run", 2)

    run_local(2, rank)
    return folder


def taken(folder, argv="") -> TrainConfig:
    """The configuration of a run with `--resume` and these flags."""
    config = parse(["--resume", str(folder / "run"), *argv.split()])
    return continued(config, find_checkpoint(config, serial()))


def refused(folder, argv="") -> str:
    with pytest.raises(UsageError) as caught:
        taken(folder, argv)
    return str(caught.value)


def test_resume_takes_model_data_optimizer_and_seed(saved):
    whole = parse([*FLAGS.split(), "--data", str(saved / "text.txt")])
    resumed = taken(saved)
    assert resumed == dataclasses.replace(whole, run=dataclasses.replace(whole.run, resume=str(saved / "run")))
    own = {flag: value for _, _, flag, value in flags(resumed)}
    default = {flag: value for _, _, flag, value in flags(TrainConfig())}
    # Those of other models are resumed in test_llama.py, test_mixtral.py and test_balance.py.
    of_others = {"--model", "--kv-heads", "--ffn", "--experts", "--top-k", "--aux-loss", "--router-bias"}
    of_others |= {"--capacity-factor", "--gradients", "--reduce-dtype", "--skip-nonfinite"}  # test_precision.py
    of_others |= {"--pack"}  # test_pack.py
    assert {flag for flag in TAKEN if own[flag] == default[flag]} == of_others | {"--eval-every", "--eval-data"}


def test_what_decides_the_values_is_taken_and_the_layout_is_not():
    all_flags = {flag for _, _, flag, _ in flags(TrainConfig())}
    assert set(MUST_AGREE) < set(TAKEN) < all_flags
    layout = (
        "--dp --cp --ep --etp --context-parallel --cp-order --tp --pp --schedule --virtual-stages --sequence-parallel "
    )
    layout += "--zero-stage --zero-replicas --sync-every-microbatch"
    files = "--metrics --trace --memory --record --save --save-every --resume --export --export-dtype --verify --clock "
    files += "--network"
    assert all_flags - set(TAKEN) == {
        *layout.split(), *files.split(), "--microbatches", "--memory-limit", "--init-from", "--device", "--recompute",
        "--attention",
    }  # fmt: skip


def test_a_given_flag_wins_where_it_may(saved):
    resumed = taken(saved, "--steps 9 --lr 0.5 --lr-schedule constant --reduction ring --tp 3 --microbatches 4")
    assert (resumed.optimizer.steps, resumed.optimizer.lr, resumed.optimizer.lr_schedule) == (9, 0.5, "constant")
    assert (resumed.run.reduction, resumed.mesh.tp, resumed.data.microbatches) == ("ring", 3, 4)
    assert taken(saved, "--hidden 18 --seed 7 --betas 0.8 0.95") == taken(saved)


def test_only_a_contradicting_flag_is_rejected(saved):
    line = refused(saved, "--hidden 24 --seed 7 --dtype float32 --steps 5")
    assert line.endswith(
        "manifest.json: written with --hidden 18, --dtype float64, but this run has --hidden 24, --dtype float32; "
        "these cannot change in a resumed run"
    )
    assert "written with --seed 7, but this run has --seed 0;" in refused(saved, "--seed 0")  # the default, but given


def test_one_shape_flag_is_compared_with_the_checkpoint_alone(saved):
    """18 is not divisible by the default 4 heads, and 400 warm-up steps are more than the default 300 steps."""
    assert taken(saved, "--hidden 18").model.heads == 3
    assert taken(saved, "--warmup-steps 400 --steps 500").optimizer.warmup_steps == 400
    with pytest.raises(UsageError, match="warmup-steps 9 is more than steps 4"):
        resolve(taken(saved, "--warmup-steps 9"), 1)


@pytest.mark.long
def test_4_ranks_go_on_where_2_ranks_stopped(saved, tmp_path):
    """The command of the manual: no flag but where and how far; it equals one device that never stopped."""
    argv = ["--resume", str(saved / "run"), "--steps", "6", "--lr-schedule", "constant"]
    result = run_mpi(4, [*TRAIN, *argv, "--export", str(tmp_path / "model")])
    assert result.returncode == 0, result.stderr
    assert "1 layers, hidden 18, 3 heads, float64" in result.stdout and "step 6/6" in result.stdout
    result = run_mpi(2, [*TRAIN, "--resume", str(saved / "run"), "--microbatches", "2", "--verify"])
    assert result.returncode == 0, result.stderr
    assert "2 ranks = 1 device, bit for bit" in result.stdout
    assert "resumed after 2, as one device that never stopped" in result.stdout


def test_a_finished_run_says_that_no_step_is_left(saved):
    result = run_mpi(2, [*TRAIN, "--resume", str(saved / "run"), "--steps", "2"])
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("this is the last step: give more --steps\n")


def test_a_text_that_is_gone_is_named_with_the_remedy(saved, tmp_path):
    """The manifest names the text where it was. With `--data` it may be anywhere, but it must be the same."""
    text = saved / "text.txt"
    moved, other = tmp_path / "moved.txt", tmp_path / "other.txt"
    text.rename(moved)
    other.write_bytes(moved.read_bytes()[:-1])
    resume = ["minipar.train", "--resume", str(saved / "run")]
    try:
        commands = [resume, [*resume, "--data", str(moved)], [*resume, "--data", str(other)]]
        gone, found, changed = run_each(1, commands)
        assert gone.returncode == 2 and gone.stderr.count("\n") == 1
        assert f"--data {text} cannot be read: No such file or directory; {saved}/run/step-00000002" in gone.stderr
        assert gone.stderr.endswith("manifest.json names this file: give --data with its new path\n")
        assert found.returncode == 0
        assert changed.returncode == 2 and "written while training on another text than" in changed.stderr
    finally:
        moved.rename(text)


@pytest.mark.long
def test_a_run_from_a_model_directory_resumes_without_it(tmp_path):
    save_pretrained(GPT(GPTConfig(256, 32, 12, 1, 3)), tmp_path / "gpt2")
    start = f"--init-from {tmp_path}/gpt2 --seq-len 16 --global-batch 4 --steps 2 --save {tmp_path}/run"
    first = run_mpi(2, [*TRAIN, *start.split()])
    assert first.returncode == 0, first.stderr
    (tmp_path / "gpt2" / "model.safetensors").unlink()
    then = run_mpi(2, [*TRAIN, "--resume", f"{tmp_path}/run", "--steps", "3"])
    assert then.returncode == 0 and "hidden 12, 3 heads" in then.stdout and "step 3/3" in then.stdout, then.stderr


def test_auto_starts_from_a_model_and_goes_on_without_it(tmp_path):
    """One command: what it starts from is not read again, and the same flags agree with the checkpoint."""
    save_pretrained(GPT(GPTConfig(256, 32, 12, 1, 3)), tmp_path / "gpt2")
    command = f"--init-from {tmp_path}/gpt2 --seq-len 16 --global-batch 6 --save {tmp_path}/run --resume auto --steps 2"
    first = run_mpi(1, [*TRAIN, *command.split()])
    assert first.returncode == 0 and "resumed" not in first.stdout, first.stderr
    (tmp_path / "gpt2" / "model.safetensors").unlink()
    (tmp_path / "run" / "step-00000009.partial").mkdir()
    then = run_mpi(2, [*TRAIN, *command.split()])
    assert then.returncode == 0 and f"resumed after step 2 from {tmp_path}/run" in then.stdout, then.stderr


def test_a_directory_called_auto_is_resumed_with_its_path(saved, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "auto").symlink_to(saved / "run")
    assert find_checkpoint(parse(["--resume", "./auto"]), serial()).step == 2
    assert find_checkpoint(parse(["--resume", "auto", "--save", "new"]), serial()) is None


def test_auto_needs_a_directory_and_ranks_that_divide(tmp_path):
    with pytest.raises(UsageError, match="^--resume auto continues from .* DIR of --save; give --save DIR too$"):
        parse(["--resume", "auto"])
    config = parse(f"--resume auto --save {tmp_path}/new --global-batch 8".split())
    assert find_checkpoint(config, serial()) is None and not (tmp_path / "new").exists()
    with pytest.raises(UsageError, match=r"^global-batch 8 is not divisible by dp\*microbatches = 6\*1 = 6$"):
        resolve(config, 6)
