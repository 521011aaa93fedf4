"""Claims about the lock of a `--save` directory: a second job is refused in one line, and the first goes on."""

import errno
import fcntl
import os
import re
import signal
import socket

import pytest
from launcher import interrupt_mpi, run_each, run_mpi

from minipar.comm import run_local, serial
from minipar.errors import UsageError
from minipar.train import lock
from minipar.train.checkpoint import checkpoints
from minipar.train.lock import LOCK, saving_alone

TRAIN = "-m minipar.train --layers 1 --hidden 16 --heads 2 --seq-len 16 --global-batch 6".split()


def lines(path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("ranks", "resume"), [(1, []), (3, ["--resume", "auto"])])
def test_a_second_job_is_refused_and_the_first_goes_on(ranks, resume, tmp_path):
    """What the first one is writing stays, although it looks like what a killed job has left."""
    folder, metrics, seconds = tmp_path / "run", tmp_path / "m.jsonl", []
    command = [*TRAIN, "--save", str(folder)]
    half = folder / "step-00000009.partial" / "rank-00000.safetensors"

    def second():
        if lines(metrics) < 2:
            return False
        half.parent.mkdir()
        half.write_text("half of it")
        seconds.append(run_mpi(ranks, [*command, "--steps", "2", *resume]))
        assert half.exists()
        return True

    long = [*command, "--steps", "1000000", "--metrics", str(metrics)]
    first = interrupt_mpi(2, long, second, number=signal.SIGTERM)
    assert first.returncode == 128 + signal.SIGTERM and first.stderr == ""
    step = lines(metrics)
    assert [each for each, _ in checkpoints(folder)] == [step] and not (folder / LOCK).exists()
    assert seconds[0].returncode == 2 and seconds[0].stdout == "" and seconds[0].stderr.count("\n") == 1
    holder = rf"{folder}/minipar.lock: process \d+ on {socket.gethostname()}"
    then = "wait until it has ended, end it, or save to another directory"
    line = rf"minipar: error: --save {folder}: another job saves there \({holder}\); {then}\n"
    assert re.fullmatch(line, seconds[0].stderr), seconds[0].stderr


def test_every_rank_is_refused_alike(tmp_path):
    def rank(comm):
        with pytest.raises(UsageError) as caught, saving_alone(comm, str(tmp_path)):
            pass
        return str(caught.value)

    with saving_alone(serial(), str(tmp_path)):
        messages = run_local(3, rank)
    assert len(set(messages)) == 1 and f"process {os.getpid()} on" in messages[0]


def test_everybody_may_read_the_locks_file_and_nobody_run_it(tmp_path):
    mask = os.umask(0)
    try:
        with saving_alone(serial(), str(tmp_path / "run")):
            assert os.stat(tmp_path / "run" / "minipar.lock").st_mode & 0o777 == 0o666
    finally:
        os.umask(mask)


def test_another_path_to_the_directory_is_the_same_directory(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with saving_alone(serial(), str(tmp_path / "run")):
        with (
            pytest.raises(UsageError, match="link: another job saves there"),
            saving_alone(serial(), str(tmp_path / "link")),
        ):
            pass
        with saving_alone(serial(), str(tmp_path / "other")):
            pass


@pytest.mark.parametrize("leaving", [None, UsageError("a mistake"), SystemExit(143)])
def test_the_lock_ends_with_the_job_however_it_ends(leaving, tmp_path):
    for _ in range(3):
        try:
            with saving_alone(serial(), str(tmp_path)):
                assert (tmp_path / LOCK).read_text() == f"process {os.getpid()} on {socket.gethostname()}\n"
                if leaving is not None:
                    raise leaving
        except type(leaving) as error:
            assert error is leaving
        assert list(tmp_path.iterdir()) == []


def test_the_file_of_a_killed_job_locks_nothing(tmp_path):
    (tmp_path / LOCK).write_text("process 1 on a host with a very long name that is cut off\n" * 100)
    with saving_alone(serial(), str(tmp_path)):
        assert (tmp_path / LOCK).read_text().startswith(f"process {os.getpid()} on")
        assert len((tmp_path / LOCK).read_text().splitlines()) == 1


def test_a_long_name_of_the_holder_is_cut_off(tmp_path):
    with saving_alone(serial(), str(tmp_path)):
        (tmp_path / LOCK).write_bytes(b"\xff" + b"x" * 300)  # nor does a name in another encoding matter
        with pytest.raises(UsageError) as caught, saving_alone(serial(), str(tmp_path)):
            pass
    assert str(caught.value).count("x" * 199) == 1 and "x" * 200 not in str(caught.value)


def test_a_file_that_the_last_job_removed_is_made_again(tmp_path, monkeypatch):
    """It is removed between this job's opening and locking it, so that a third job could lock another file."""
    real, removed = fcntl.flock, []

    def flock(file, operation):
        if not removed:
            removed.append((tmp_path / LOCK).unlink())
        real(file, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    with saving_alone(serial(), str(tmp_path)):
        with pytest.raises(UsageError, match="another job saves there"), saving_alone(serial(), str(tmp_path)):
            pass


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS])
def test_without_locks_a_note_says_so_and_the_job_goes_on(number, tmp_path, monkeypatch, capsys):
    def flock(file, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(lock.fcntl, "flock", flock)
    with saving_alone(serial(), str(tmp_path / "run")):
        assert (tmp_path / "run").is_dir()
    assert capsys.readouterr().err == (
        f"minipar: note: --save {tmp_path}/run: its file system cannot lock minipar.lock ({os.strerror(number)}); "
        "start no second job into it\n"
    )


def test_what_is_not_a_file_is_refused_and_not_followed(tmp_path):
    def refused() -> str:
        with pytest.raises(UsageError) as caught, saving_alone(serial(), str(tmp_path)):
            pass
        return str(caught.value)

    path, target = tmp_path / LOCK, tmp_path / "precious"
    target.write_text("kept")
    path.symlink_to(target)
    assert refused().startswith(f"--save {tmp_path} cannot be written: ") and target.read_text() == "kept"
    path.unlink()
    os.mkfifo(path)
    assert refused().startswith(f"--save {tmp_path} cannot be written: ")
    path.unlink()
    path.mkdir()
    assert refused() == f"--save {tmp_path} cannot be written: Is a directory"


def test_a_refused_command_line_leaves_no_directory(tmp_path):
    save = [*TRAIN[1:], "--save", str(tmp_path / "new" / "run")]
    (refused,) = run_each(2, [[*save, "--tp", "3"]])
    assert refused.returncode == 2 and list(tmp_path.iterdir()) == []


def test_a_missing_directory_is_made_and_an_empty_one_removed(tmp_path):
    with saving_alone(serial(), str(tmp_path / "new" / "run")):
        assert (tmp_path / "new" / "run").is_dir()
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_was_there_stays(tmp_path):
    for _ in range(2):
        with saving_alone(serial(), str(tmp_path)):
            pass
    assert tmp_path.is_dir()


def test_without_save_there_is_no_lock(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with saving_alone(serial(), None):
        assert list(tmp_path.iterdir()) == []
