"""Claims about the look at the other ranks while MPI starts, and about a host's shared memory, without any MPI."""

import os
import time
from types import SimpleNamespace

import psutil
import pytest
from process_end import Ended

from minipar.errors import UsageError
from minipar.robust_start import mpirun, start, watch


class Process:
    """A process as psutil describes it."""

    def __init__(self, name, command="", rank=None, children=(), parent=None):
        self.own_name = name
        self.command = command
        self.rank = rank
        self.own_children = list(children)
        self.own_parent = parent

    def name(self):
        return self.own_name

    def cmdline(self):
        return self.command.split()

    def environ(self):
        return {} if self.rank is None else {"PMI_RANK": str(self.rank)}

    def children(self):
        return self.own_children

    def parent(self):
        return self.own_parent


class Gone(Process):
    def cmdline(self):
        raise psutil.NoSuchProcess(1)


def rank(number):
    return Process("python", rank=number)


@pytest.fixture
def job(monkeypatch):
    """Start a job of so many ranks, so many of them here, as mpirun's proxy and its answer describe it."""

    def begin(ranks, here, proxy=None, mapping="", connected=True):
        monkeypatch.setenv("PMI_SIZE", str(ranks))
        monkeypatch.setenv("MPI_LOCALNRANKS", str(here))
        monkeypatch.setattr(watch, "own_proxy", lambda: proxy)
        monkeypatch.setattr(mpirun, "connected", lambda: connected)
        asked = {"PMI_process_mapping": mapping}
        monkeypatch.setattr(mpirun, "value_of", asked.__getitem__)

    return begin


# ---- the host of each rank -------------------------------------------------------------------------------------------


def proxy_of(number):
    return Process("hydra_pmi_proxy", f"hydra_pmi_proxy --control-port a:1 --proxy-id {number}")


@pytest.mark.parametrize(
    ("mapping", "own", "here", "hosts"),
    [
        ("(vector,(0,2,2))", 0, 2, [0, 0, 1, 1]),
        ("(vector,(0,2,1),(0,2,1))", 1, 2, [0, 1, 0, 1]),
        ("(vector,[(0,2,1)]x2,0)", 0, 3, [0, 1, 0, 1, 0]),
        ("(vector,(0,1,3),(1,1,1))", 1, 1, [0, 0, 0, 1]),
        ("(vector,(2,1,1),(0,1,2))", 2, 1, [2, 0, 0]),
        ("(vector,(0,2,4))", 0, 4, [0, 0, 0, 0, 1]),  # more places than ranks
        ("(vector,1,0,1)", 1, 2, [1, 0, 1]),
    ],
)
def test_mpiruns_answer_is_the_host_of_each_rank(mapping, own, here, hosts, job):
    job(len(hosts), here, proxy_of(own), mapping)
    assert watch.host_of_each_rank() == hosts


def test_without_mpiruns_answer_hosts_are_not_known(job):
    good = "(vector,(0,2,2))"
    for proxy, mapping, connected in (
        (None, good, True),
        (proxy_of(0), good, False),
        (Process("hydra_pmi_proxy", "hydra_pmi_proxy"), good, True),
        (proxy_of(0), "", True),
        (proxy_of(0), "(vector,(0,4,1))", True),  # says that one rank is here
    ):
        job(4, 2, proxy, mapping, connected)
        assert watch.host_of_each_rank() == []


def test_ranks_of_one_host_ask_nobody(job, monkeypatch):
    job(3, 3)
    assert watch.host_of_each_rank() == [0, 0, 0]
    for variable in ("PMI_SIZE", "MPI_LOCALNRANKS"):
        monkeypatch.delenv(variable)
    assert watch.ranks_and_those_here() == (1, 1) and watch.host_of_each_rank() == [0]


# ---- the ranks that are alive ----------------------------------------------------------------------------------------


def test_the_children_of_the_proxy_are_the_ranks_here(job):
    hosts = [0, 0, 1, 1]
    for children, alive in (
        ([rank(0), rank(1)], {0, 1}),
        ([rank(1)], {1}),
        ([rank(1), Gone("python", rank=0)], {1}),
        ([rank(1), Process("sh")], {1}),
        ([rank(1), rank(9)], {1}),  # of another job
        ([rank(9)], set()),
        ([], set()),
    ):
        mpiexec = Process("mpiexec.hydra")
        proxy = Process("hydra_pmi_proxy", children=children, parent=mpiexec)
        job(4, 2, proxy)
        assert watch.ranks_alive(hosts) == alive


def test_on_mpiruns_host_each_other_host_has_a_process(job):
    hosts = [0, 0, 1, 1, 2]
    for reached, alive in (([], {0}), ([1], {0, 2, 3}), ([2], {0, 4}), ([1, 2], {0, 2, 3, 4}), ([0], {0})):
        shells = [Process("ssh", f"ssh host hydra_pmi_proxy --proxy-id {number}") for number in reached]
        mpiexec = Process("mpiexec.hydra", children=shells)
        job(5, 2, Process("hydra_pmi_proxy", children=[rank(0)], parent=mpiexec))
        assert watch.ranks_alive(hosts) == alive


def test_ranks_of_hosts_that_cannot_be_seen_count_as_alive(job):
    """On another host than mpirun's the proxy is a child of ssh's server, or has no parent left.

    The first process of a host may have children of another job, whose numbers mean nothing here.
    """
    orphans = [Process("sshd", "x --proxy-id 0"), rank(0)]
    for parent in (None, Process("sshd", children=orphans[:1]), Process("init", children=orphans)):
        job(4, 2, Process("hydra_pmi_proxy", children=[rank(3)], parent=parent))
        assert watch.ranks_alive([0, 0, 1, 1]) == {0, 1, 3}


def test_without_a_proxy_no_rank_can_be_seen(job):
    job(2, 2)
    assert watch.ranks_alive([0, 0]) == set()


def test_the_proxy_is_the_nearest_parent_of_that_name(monkeypatch):
    proxy = Process("hydra_pmi_proxy")
    for parents, found in (
        ([Process("bash"), proxy, Process("hydra_pmi_proxy")], proxy),
        ([Process("bash"), Process("mpiexec.hydra")], None),
        ([], None),
    ):
        monkeypatch.setattr(psutil, "Process", lambda parents=parents: SimpleNamespace(parents=lambda: parents))
        assert watch.own_proxy() is found


# ---- the watch -------------------------------------------------------------------------------------------------------


LOOK = watch.WATCH_SECONDS


class Started:
    """The event that MPI has started: set at the look of this number, and what was waited for."""

    def __init__(self, look):
        self.left = look
        self.waits = []

    def wait(self, seconds):
        self.waits.append(seconds)
        self.left -= 1
        return self.left < 0


def watched(monkeypatch, alive, *, me=0, hosts=(0, 0, 0), started=99, timeout=60.0, second=1.0):
    """Watch on rank `me`, with looks of so many seconds; return what was waited for, and whether it cleaned up."""
    monkeypatch.setenv("PMI_RANK", str(me))
    answers = iter(alive)
    monkeypatch.setattr(watch, "ranks_alive", lambda hosts: next(answers))
    seconds = iter(range(1000))
    monkeypatch.setattr(time, "monotonic", lambda: next(seconds) * second)
    event, cleaned = Started(started), []
    try:
        watch.watch(list(hosts), timeout, event, lambda: cleaned.append(True))
    except Ended:
        pass
    return event.waits, cleaned


ALL = {0, 1, 2}


def test_a_start_ends_the_watch(ends, monkeypatch, capsys):
    assert watched(monkeypatch, [ALL] * 3, started=3) == ([LOOK] * 4, [])
    assert ends == [] and capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("alive", "me", "hosts", "turn", "ended"),
    [
        ({0, 2}, 0, (0, 0, 0), 0, "1"),
        ({0, 2}, 2, (0, 0, 0), 2, "1"),
        ({2}, 2, (0, 0, 0), 0, "0, 1"),
        ({0, 1, 3}, 1, (0, 1, 0, 1), 0, "2"),  # the first of its host
        ({0, 1, 3}, 3, (0, 1, 0, 1), 2, "2"),
    ],
)
def test_ranks_that_have_ended_are_named_in_turn(alive, me, hosts, turn, ended, ends, monkeypatch, capsys):
    everybody = set(range(len(hosts)))
    waits, cleaned = watched(monkeypatch, [everybody, alive], me=me, hosts=hosts)
    assert (
        waits == [LOOK, LOOK, LOOK + turn * watch.TURN_SECONDS]
        and cleaned == [True]
        and ends == [("job", 1), ("exit", 1)]
    )
    assert capsys.readouterr().err == f"minipar: rank {ended} has ended before MPI started\n"


def test_a_start_in_a_ranks_turn_is_no_error(ends, monkeypatch, capsys):
    assert watched(monkeypatch, [{0, 1}], started=1) == ([LOOK] * 2, [])
    assert ends == [] and capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("alive", "timeout", "said"), [(ALL, 25.0, 25), (set(), 25.0, 25), (ALL, 3.0, 20), (ALL, 20.0, 20)]
)
def test_a_start_that_takes_too_long_is_one_line(alive, timeout, said, ends, monkeypatch, capsys):
    """The clock moves by a second at each look; 20 seconds are the least. Ranks that nobody sees have not ended."""
    waits, cleaned = watched(monkeypatch, [alive] * 100, me=2, timeout=timeout)
    assert waits == [LOOK] * (said + 1) + [LOOK + 2 * watch.TURN_SECONDS]
    assert cleaned == [True] and ends == [("job", 1), ("exit", 1)]
    reason = f"MPI has not started within {said} s (MINIPAR_TIMEOUT): a rank has ended, or comes too late"
    assert capsys.readouterr().err == f"minipar: {reason}\n"


# ---- shared memory ---------------------------------------------------------------------------------------------------


@pytest.fixture
def shared(tmp_path, monkeypatch):
    """Let a directory be the host's shared memory, of which so many bytes are free."""
    monkeypatch.setattr(start, "SHARED", tmp_path)

    def free(size):
        monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=size // 2, f_frsize=2))

    free(10**12)
    return free


def test_too_little_shared_memory_is_named_with_a_remedy(shared, tmp_path, monkeypatch):
    monkeypatch.setenv("MPI_LOCALNRANKS", "4")
    needed = 4 * start.BYTES_OF_RANK
    shared(needed)
    start.check_shared_memory()
    shared(needed - 4)
    needs = f"{tmp_path} has {needed - 4:,} bytes left, but MPI needs about {needed:,} for 4 ranks; "
    with pytest.raises(UsageError) as caught:
        start.check_shared_memory()
    assert str(caught.value) == needs + "enlarge it (docker run --shm-size=1g), or start fewer ranks"
    (tmp_path / "mpich_shm_1").write_bytes(b"xy")
    with pytest.raises(UsageError) as caught:
        start.check_shared_memory()
    jobs = f"{tmp_path}/mpich_shm_* of jobs that were killed hold 2: remove them when no job runs"
    assert str(caught.value) == needs + jobs


def test_shared_memory_must_be_writable_if_there_is_any(shared, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: (path, mode) != (tmp_path, os.W_OK))
    line = f"^{tmp_path} cannot be written, where MPI shares memory between the ranks of a host$"
    with pytest.raises(UsageError, match=line):
        start.check_shared_memory()
    monkeypatch.setattr(start, "SHARED", tmp_path / "missing")
    start.check_shared_memory()
    start.remove_shared_memory()


def test_names_of_mapped_memory_are_removed_and_no_others(shared, tmp_path, monkeypatch):
    names = ["mpich_shm_1", "mpich_shm_2", "other"]
    for name in names:
        (tmp_path / name).touch()
    lines = [
        f"7f00-7f01 rw-s 00000000 00:01 12 {tmp_path}/mpich_shm_1",
        f"7f01-7f02 rw-s 00000000 00:01 12 {tmp_path}/mpich_shm_1",  # mapped twice
        f"7f02-7f03 rw-s 00000000 00:01 13 {tmp_path}/mpich_shm_2 (deleted)",
        f"7f03-7f04 rw-s 00000000 00:01 14 {tmp_path}/other",
        "7f04-7f05 r-xp 00000000 00:02 15 /usr/lib/libm.so",
        "7f05-7f06 rw-p 00000000 00:00 0",
    ]
    (tmp_path / "maps").write_text("\n".join(lines) + "\n")
    monkeypatch.setattr(start, "Path", lambda path: type(tmp_path)(str(path).replace("/proc/self", str(tmp_path))))
    start.remove_shared_memory()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["maps", "mpich_shm_2", "other"]


def test_mpiruns_file_of_the_processors_is_removed(shared, tmp_path, monkeypatch):
    """A file that the user has named, which mpirun reads in its place, stays."""
    monkeypatch.setattr(start, "TOPOLOGY", f"{tmp_path}/hydra_")
    own, user = tmp_path / "hydra_1", tmp_path / "mine"
    user.touch()
    own.touch()
    for path in (own, own, user):  # twice: it may have gone
        monkeypatch.setattr(mpirun, "value_of", {"PMI_hwloc_xmlfile": str(path)}.__getitem__)
        start.prepare_host()
    assert not own.exists() and user.exists()


def test_a_host_without_memory_ends_the_job_in_one_line(shared, tmp_path, ends, monkeypatch, capsys):
    shared(10)
    monkeypatch.setattr(mpirun, "value_of", lambda key: "")
    with pytest.raises(Ended):
        start.prepare_host()
    assert ends == [("job", 2), ("exit", 2)]
    line = capsys.readouterr().err
    assert line.startswith(f"minipar: error: {tmp_path} has 10 bytes left, but MPI needs") and line.count("\n") == 1
