"""Claims about the lock of a `--save` directory: a second job is refused, and the first goes on."""

import os

import pytest

from minipar.comm import run_local, serial
from minipar.errors import UsageError
from minipar.train.lock import LOCK, saving_alone


def refused(path) -> str:
    with pytest.raises(UsageError) as caught, saving_alone(serial(), str(path)):
        pass
    return str(caught.value)


def test_every_rank_of_a_second_job_is_refused(tmp_path):
    def rank(comm):
        with pytest.raises(UsageError) as caught, saving_alone(comm, str(tmp_path)):
            pass
        return str(caught.value)

    with saving_alone(serial(), str(tmp_path)):
        messages = run_local(3, rank)
    assert len(set(messages)) == 1 and f"{tmp_path}" in messages[0] and f"{os.getpid()}" in messages[0]


def test_another_path_to_the_directory_is_the_same_directory(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with saving_alone(serial(), str(tmp_path / "run")):
        assert f"{tmp_path}/link" in refused(tmp_path / "link")
        with saving_alone(serial(), str(tmp_path / "other")):
            pass


@pytest.mark.parametrize("leaving", [None, UsageError("a mistake"), SystemExit(143)])
def test_the_lock_ends_with_the_job_however_it_ends(leaving, tmp_path):
    for _ in range(3):
        try:
            with saving_alone(serial(), str(tmp_path)):
                assert f"{os.getpid()}" in (tmp_path / LOCK).read_text()
                if leaving is not None:
                    raise leaving
        except type(leaving) as error:
            assert error is leaving
        assert list(tmp_path.iterdir()) == []


def test_the_file_of_a_killed_job_locks_nothing(tmp_path):
    (tmp_path / LOCK).write_text("process 1 on a host with a very long name that is cut off\n" * 100)
    with saving_alone(serial(), str(tmp_path)):
        assert len((tmp_path / LOCK).read_text().splitlines()) == 1


def test_what_is_not_a_file_is_refused_and_not_followed(tmp_path):
    path, target = tmp_path / LOCK, tmp_path / "precious"
    target.write_text("kept")
    path.symlink_to(target)
    assert str(tmp_path) in refused(tmp_path) and target.read_text() == "kept"
    path.unlink()
    os.mkfifo(path)
    assert str(tmp_path) in refused(tmp_path)


def test_a_missing_directory_is_made_and_an_empty_one_removed(tmp_path):
    with saving_alone(serial(), str(tmp_path / "new" / "run")):
        assert (tmp_path / "new" / "run").is_dir()
    assert list(tmp_path.iterdir()) == []
