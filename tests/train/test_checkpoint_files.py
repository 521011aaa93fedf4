"""Claims about a checkpoint's files: what is not whole, or not ours, is refused by name before anything is loaded."""

import os
import shutil

import pytest
from launcher import run_each, run_mpi
from training import bits, config_for, open_checkpoint, trainer_for

from minipar.comm import run_local, serial
from minipar.errors import UsageError
from minipar.nn import GPT, GPTConfig
from minipar.nn.pretrained import save_pretrained
from minipar.train.checkpoint import Checkpoint, agreeing, prepare_directory
from minipar.train.config import parse, resolve, with_shape
from minipar.train.data import Tokens, load_tokens
from minipar.train.lock import saving_alone

FLAGS = "--layers 1 --hidden 8 --heads 2 --seq-len 8 --global-batch 4 --steps 2 --dtype float64"
TOKENS = Tokens(load_tokens(None, vocab_size=256, seq_len=8).ids[:5000], "a text", 256)
SECOND = "step-00000002/rank-00001.safetensors"  # of rank 1, in the newer of two


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Checkpoints of steps 1 and 2, written by dp 2 x tp 2 at stage 1: four files each."""
    folder = tmp_path_factory.mktemp("whole")
    config = config_for(f"{FLAGS} --dp 2 --tp 2 --zero-stage 1")

    def rank(comm):
        trainer = trainer_for(config, TOKENS, comm)
        for result in trainer.train():
            trainer.save(folder, result.step + 1)

    run_local(4, rank)
    return folder


@pytest.fixture
def copy(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    return tmp_path / "run"


def refused(folder, flags="", ranks=2):
    """The message of every rank's error; the trainer is not built yet, so nothing can have been loaded."""
    config = config_for(f"{FLAGS} --resume {folder} {flags}", ranks)

    def rank(comm):
        with pytest.raises(UsageError) as caught:
            open_checkpoint(config, TOKENS, comm)
        return str(caught.value)

    messages = run_local(ranks, rank)
    assert len(set(messages)) == 1, messages
    return messages[0]


def save_into(folder):
    """Do what the start of a run with `--save` does."""
    with saving_alone(serial(), str(folder)):
        prepare_directory(str(folder), 2)


def accepted(folder, flags=""):
    return trainer_for(config_for(f"{FLAGS} --resume {folder} {flags}"), TOKENS)


def flip(path, place):
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def as_link(path):
    target = path.with_name("elsewhere")
    path.rename(target)
    shutil.move(target, path.parents[2] / "elsewhere")
    path.symlink_to(path.parents[2] / "elsewhere")


def replace_by(other):
    return lambda path: shutil.copy(path.parents[1] / other, path)


DAMAGE = {
    "a bit flipped in the numbers": (lambda path: flip(path, -9), "corrupted"),
    "a bit flipped in the header": (lambda path: flip(path, 20), "corrupted"),
    "the last byte cut off": (lambda path: os.truncate(path, path.stat().st_size - 1), "bytes were written"),
    "emptied": (lambda path: os.truncate(path, 0), "has 0 bytes, but"),
    "longer": (lambda path: path.write_bytes(path.read_bytes() + b"\0"), "bytes were written"),
    "gone": (lambda path: path.unlink(), "No such file or directory"),
    "a link": (as_link, "is a link; expected a file"),
    "a directory": (lambda path: (path.unlink(), path.mkdir()), "is not a file"),
    "the same rank's of another step": (replace_by("step-00000001/rank-00001.safetensors"), "corrupted"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_refused_by_name(damage, copy):
    spoil, message = DAMAGE[damage]
    spoil(copy / SECOND)
    refusal = refused(copy)
    assert str(copy / SECOND) in refusal and message.replace("bytes were", "were") in refusal
    assert accepted(copy / "step-00000001").first_step == 1  # the one before is whole


def test_a_file_that_is_not_of_the_checkpoint_is_left_alone(copy):
    (copy / "step-00000002" / "notes.txt").write_text("")
    assert accepted(copy).first_step == 2


MANIFESTS = {
    "cut in the middle": (lambda text: text[: len(text) // 2], "not JSON"),
    "empty": (lambda text: b"", "not JSON"),
    "not text": (lambda text: b"\xff\xfe\x00", "not JSON"),
    "very deep": (lambda text: b"[" * 100_000, "not JSON"),
    "a list": (lambda text: b"[]", "not a checkpoint of minipar"),
    "another program's": (lambda text: b'{"metadata": {}, "weight_map": {}}', "not a checkpoint of minipar"),
    "of a later version": (lambda text: text.replace(b'"version": 1', b'"version": 2'), "version 2 of the format"),
    "with one digit changed": (lambda text: text.replace(b'"step": 2', b'"step": 1'), "checksum does not fit"),
    "with one name changed": (lambda text: text.replace(b"ln_f.bias", b"ln_f.bjas", 1), "checksum does not fit"),
}


@pytest.mark.parametrize("damage", MANIFESTS)
def test_a_damaged_manifest_is_refused_by_name(damage, copy):
    change, message = MANIFESTS[damage]
    path = copy / "step-00000002" / "manifest.json"
    assert change(path.read_bytes()) != path.read_bytes()
    path.write_bytes(change(path.read_bytes()))
    refusal = refused(copy)
    assert refusal.startswith(f"{path}: ") and message in refusal and "\n" not in refusal


# ---- directories and flags -------------------------------------------------------------------------------------------


def test_a_directory_without_a_checkpoint_is_refused_by_name(copy, tmp_path):
    assert "No such file or directory" in refused(tmp_path / "nowhere")
    (tmp_path / "empty" / "step-00000007.partial").mkdir(parents=True)
    assert f"--resume {tmp_path}/empty: no checkpoint in it" in refused(tmp_path / "empty")
    (copy / "step-00000002" / "manifest.json").unlink()
    assert refused(copy) == f"{copy}/step-00000002/manifest.json: No such file or directory"
    shutil.rmtree(copy / "step-00000002")
    (copy / "step-00000002").symlink_to(copy / "step-00000001")
    assert refused(copy) == f"{copy}/step-00000002 is a link; expected a directory"
    (copy / "step-00000002").unlink()
    (copy / "step-00000002").write_text("")
    assert refused(copy) == f"{copy}/step-00000002 is a file; expected a directory"


def test_a_manifest_that_is_a_link_is_refused(copy):
    as_link(copy / "step-00000002" / "manifest.json")
    assert refused(copy) == f"{copy}/step-00000002/manifest.json is a link; expected a file"


DIFFERENT = {
    "--seed 1": "written with --seed 0, but this run has --seed 1",
    "--order sequential --betas 0.8 0.9": (
        "written with --order random, --betas [0.9, 0.999], but this run has --order sequential, --betas [0.8, 0.9]"
    ),
    "--layers 2 --hidden 16": "written with --layers 1, --hidden 8, but this run has --layers 2, --hidden 16",
    "--dtype float32": "written with --dtype float64, but this run has --dtype float32",
    "--global-batch 8": "written with --global-batch 4, but this run has --global-batch 8",
    "--steps 1": "step 2 is beyond --steps 1",
}


@pytest.mark.parametrize("flags", DIFFERENT)
def test_another_run_is_refused_with_each_difference(flags, whole):
    refusal = refused(whole, flags)
    assert refusal.startswith(f"{whole}/step-00000002/manifest.json: ") and DIFFERENT[flags] in refusal


def test_another_text_is_refused(whole, tmp_path):
    (tmp_path / "other.txt").write_text("another text" * 10)
    config = config_for(f"{FLAGS} --resume {whole}")
    with pytest.raises(UsageError, match="written while training on another text than .*other.txt"):
        open_checkpoint(config, load_tokens(str(tmp_path / "other.txt"), vocab_size=256, seq_len=8), serial())


def test_what_may_change_may_change(whole):
    trainer = accepted(whole, "--steps 4 --lr 0.5 --lr-schedule cosine --weight-decay 0 --clip-grad 1 --dropout 0.1")
    assert [result.step for result in trainer.train()] == [2, 3]
    assert list(accepted(whole).train()) == []  # nothing is left to do: it can be exported or verified still


def test_a_checkpoint_keeps_positions_beyond_its_sequence(tmp_path):
    shape = GPTConfig(256, 32, 8, 1, 2)
    save_pretrained(GPT(shape), tmp_path / "gpt2")
    words = "--seq-len 8 --global-batch 4 --steps 1 --dtype float64"
    config = parse(f"{words} --init-from {tmp_path}/gpt2".split())
    config = resolve(with_shape(config, shape), 1)
    trainer = trainer_for(config, TOKENS)
    list(trainer.train())
    trainer.save(tmp_path / "run", 1)
    resumed = accepted(tmp_path / "run")
    assert resumed.model.config.n_positions == 32
    assert bits(resumed.state_dict()) == bits(trainer.state_dict())


def test_a_directory_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="^--save .*file/x cannot be written: Not a directory"):
        save_into(tmp_path / "file/x")
    for place in (tmp_path / "file/x", "/proc/self/fd"):  # in which even root makes no directory
        with pytest.raises(UsageError, match=f"^--save {place} cannot be written: "):
            prepare_directory(str(place), 2)


def test_a_checkpoint_cannot_be_saved_into_a_checkpoint(copy):
    """It would be refused from then on, for a file that is not its own; also under another name."""
    place = copy / "step-00000001"
    place.rename(copy / "best")
    (copy / "link").symlink_to(copy / "best")
    (copy / "deep").symlink_to(copy / "best" / "deep")
    ways = ("step-00000002", "step-00000002/new", "best", "best/new/deep", "link/../best", "deep", "step-00000003")
    for inside in ways:
        with pytest.raises(UsageError, match=f"^--save {copy}/{inside}: {copy}/.* is a checkpoint; save to"):
            save_into(copy / inside)
    (copy / "best").rename(place)
    assert sorted(path.name for path in copy.iterdir()) == ["deep", "link", "step-00000001", "step-00000002"]
    assert accepted(copy).first_step == 2
    save_into(copy)


def test_only_a_checkpoints_own_files_are_ever_removed(tmp_path):
    kept = tmp_path / "step-00000001.partial"
    kept.mkdir()
    (kept / "rank-00000.safetensors").write_text("")
    (kept / "thesis.tex").write_text("")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "rank-00000.safetensors").write_text("")
    (tmp_path / "step-00000002.partial").symlink_to(tmp_path / "outside")
    prepare_directory(str(tmp_path), 0)
    with pytest.raises(UsageError, match=r"step-00000001.partial holds files that are not a checkpoint's"):
        trainer_for(config_for(FLAGS), TOKENS).save(tmp_path, 1)
    assert len(list(kept.iterdir())) == 2 and len(list((tmp_path / "outside").iterdir())) == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--save-every 2", "--save-every 2 does nothing without --save DIR"),
        ("--save d --save-every 0", "--save-every 0 is outside [1, inf)"),
        ("--resume a --init-from b", "--resume and --init-from both say which weights to start from; give one of them"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(flags, message):
    with pytest.raises(UsageError) as caught:
        parse(flags.split())
    assert str(caught.value) == message


BAD_FLAGS = {
    "--resume {run} --seed 3": "written with --seed 0, but this run has --seed 3",
    "--resume {run}/step-00000002 --save {run}/step-00000002": "step-00000002 is a checkpoint; save to the directory",
    "--save {run}": "holds a checkpoint of step 2, but this run starts at step 0",
    "--resume {cut}": "rank-00001.safetensors has 100 bytes, but",
}


def test_under_mpirun_it_is_one_line_and_exit_code_2(copy, whole):
    os.truncate(copy / SECOND, 100)
    text = copy.parent / "text.txt"
    text.write_bytes(TOKENS.ids.tobytes())
    commands = [
        f"minipar.train {FLAGS} --data {text} {flags.format(run=whole, cut=copy)}".split() for flags in BAD_FLAGS
    ]
    for result, message in zip(run_each(2, commands, 30), BAD_FLAGS.values(), strict=True):
        assert result.returncode == 2 and result.stdout == ""
        assert result.stderr.count("\n") == 1 and message in result.stderr


def test_a_full_disk_on_one_rank_ends_every_rank_with_one_line(tmp_path):
    """A real write that fails: rank 1 may not write files of more than 4 KiB."""
    script = f"""
import resource, sys
from minipar.comm import main
from minipar.train.__main__ import run

sys.argv[1:] = {[*FLAGS.split(), "--save", str(tmp_path / "run")]!r}
def limited(comm):
    if comm.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    return run(comm)
main(limited)
"""
    result = run_mpi(2, script, timeout=30)
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert result.stderr.count("\n") == 1 and "rank 1: " in result.stderr and "File too large" in result.stderr
    assert not any((tmp_path / "run").glob("step-*[0-9]"))


def test_a_checkpoint_is_read_without_ranks(whole):
    """What the docstring promises: whoever sees the directory can read it."""
    place = whole / "step-00000002"
    checkpoint = Checkpoint(place, (place / "manifest.json").read_bytes())
    assert checkpoint.step == 2 and checkpoint.array("exp_avg_sq", "h.0.attn.c_attn.weight").shape == (8, 24)
    assert (checkpoint.array("exp_avg_sq", "wte.weight") >= 0).all()


def test_a_saved_checkpoint_leaves_no_file_open(tmp_path):
    if not os.path.isdir("/dev/fd"):
        pytest.skip("the system does not list open files")
    trainer = trainer_for(config_for(FLAGS), TOKENS)
    before = os.listdir("/dev/fd")
    trainer.save(tmp_path, 1)
    assert len(os.listdir("/dev/fd")) == len(before)


@pytest.mark.parametrize("kind", ["link", "file"])
def test_a_checkpoint_that_is_no_directory_is_refused(kind, copy):
    newest = copy / "step-00000003"
    if kind == "link":
        newest.symlink_to(copy / "step-00000002")
    else:
        newest.touch()
    assert f"{newest} is a {kind}; expected a directory" in refused(copy)


def test_an_error_with_half_a_character_reaches_every_rank():
    """As a path may have one whose name is in another encoding."""

    def rank(comm):
        with pytest.raises(UsageError) as caught, agreeing(comm, "--save"):
            if comm.rank == 1:
                raise UsageError("no directory a\udcff")
        return str(caught.value)

    assert run_local(2, rank) == ["no directory a\\udcff"] * 2
