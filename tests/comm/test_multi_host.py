"""Two hosts: training over TCP between them equals one device; tensor parallelism and shards stay inside a host."""

import pytest
import two_hosts
from launcher import run_mpi

from minipar.comm import wire_bytes
from minipar.parallel.traffic import replica_bytes
from minipar.train.config import parse, resolve
from minipar.train.from_config import step_layout
from visualize import mesh_traffic, read_trace

SMALL = "--layers 2 --hidden 64 --heads 4 --seq-len 32 --steps 3 --dtype float64".split()


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    reason = two_hosts.why_not(tmp_path_factory.mktemp("try"))
    if reason is not None:
        pytest.skip(reason)


def run(folder, per_host, *flags):
    return run_mpi(
        4,
        ["-m", "minipar.train", *SMALL, *flags],
        timeout=90,
        before=two_hosts.prefix(folder),
        options=two_hosts.options(folder, per_host),
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("per_host", "inside", "across"), [(2, "tp", "dp"), (1, "dp", "tp")])
def test_training_on_two_hosts_equals_one_device(machine, tmp_path, per_host, inside, across):
    """dp=2, tp=2. With two ranks on each host only gradients cross; dealt one by one, every sum of activations does."""
    trace = tmp_path / "trace.json"
    done = run(tmp_path, per_host, "--dp", "2", "--tp", "2", "--verify")
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "verify: 4 ranks = 1 device" in done.stdout
    done = run(tmp_path, per_host, "--dp", "2", "--tp", "2", "--trace", str(trace))  # a check sends state to rank 0
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    traffic = mesh_traffic(read_trace(str(trace)))
    hosts = [rank // per_host % 2 for rank in range(4)]
    assert {axis for axis, source, dest in traffic.links if hosts[source] != hosts[dest]} == {across}
    wire = two_hosts.on_the_wire(tmp_path)
    for way, host in (("sent", 0), ("received", 1)):
        counted = sum(nbytes for (_, source, dest), (_, nbytes) in traffic.links.items() if (
            hosts[source] == host != hosts[dest]
        ))  # fmt: skip
        assert counted > 500_000
        # Above what the ranks count: headers, MPI's and Hydra's own messages, the trace itself on its way to rank 0.
        slack = 200_000 + (trace.stat().st_size if way == "received" else 0)
        assert counted < wire[way] < 1.1 * counted + slack


@pytest.mark.sampled(2)
@pytest.mark.parametrize("hierarchical", [True, False])
def test_a_hierarchical_all_reduce_sends_less_over_the_cable(machine, tmp_path, hierarchical):
    """8 MB on 2 x 2 ranks: 2(n/s)(q-1)/q from each rank of a host, 8 MB; a ring of four sends 2n(3/4), 12 MB."""
    script = f"""
import numpy as np
from minipar.comm import world
from minipar.comm.communicator import hierarchical_all_reduce
comm, x = world(), np.ones(2**20)
inside, across = comm.levels(2)
if {hierarchical}:
    hierarchical_all_reduce(x, inside, across)
else:
    comm.all_reduce(x, algorithm="ring")
assert (x == 4).all()
"""
    done = run_mpi(4, script, 60, before=two_hosts.prefix(tmp_path), options=two_hosts.options(tmp_path, 2))
    assert done.returncode == 0, done.stderr[-2000:]
    n = 8 * 2**20
    counted = 2 * wire_bytes("all_reduce", "ring", 2**19, 8, 2, 0) if hierarchical else 2 * n * 3 // 4
    assert counted == (n if hierarchical else 3 * n // 2)
    for nbytes in two_hosts.on_the_wire(tmp_path).values():
        assert counted < nbytes < 1.1 * counted + 200_000


@pytest.mark.long
def test_hybrid_sharding_sends_sums_of_shards_over_the_cable(machine, tmp_path):
    """Stage 3 of two microbatches: parameters are gathered inside each host; the chunks' gradients cross once."""
    trace, flags = tmp_path / "trace.json", ["--zero-stage", "3", "--zero-replicas", "2", "--microbatches", "2"]
    done = run(tmp_path, 2, *flags, "--reduction", "ordered", "--verify")
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "verify: 4 ranks = 1 device, bit for bit" in done.stdout
    done = run(tmp_path, 2, *flags, "--reduction", "ordered", "--trace", str(trace))
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    layout = step_layout(resolve(parse([*SMALL, *flags]), 4))
    losses = 3 * 2 * 8  # of each step: those of host b's ranks, to rank 0, and the sum back to each of them
    links = mesh_traffic(read_trace(str(trace))).links
    for way, host in (("sent", 0), ("received", 1)):
        crossing = {(s, d): nbytes for (_, s, d), (_, nbytes) in links.items() if s // 2 == host != d // 2}
        counted = 3 * sum(replica_bytes(layout, rank, 0) for rank in (2 * host, 2 * host + 1))
        assert sum(crossing.values()) == counted + losses, crossing
        slack = 200_000 + (trace.stat().st_size if way == "received" else 0)
        assert counted < two_hosts.on_the_wire(tmp_path)[way] < 1.1 * counted + slack


@pytest.mark.long
def test_a_pipeline_across_hosts_equals_one_device(machine, tmp_path):
    done = run(tmp_path, 2, "--pp", "2", "--dp", "2", "--microbatches", "4", "--reduction", "ordered", "--verify")
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "verify: 4 ranks = 1 device, bit for bit" in done.stdout


def test_a_file_that_one_host_lacks_is_one_line_and_exit_code_2(machine, tmp_path):
    data = tmp_path / "of_host_a" / "text.txt"
    data.parent.mkdir()
    data.write_text("what only one host has. " * 1000)
    done = run(tmp_path, 2, "--data", str(data))
    assert done.returncode == 2 and done.stdout == ""
    errors = [line for line in done.stderr.splitlines() if line.startswith("minipar: error: ")]
    assert len(errors) == 1 and str(data) in errors[0]


def test_a_rank_that_fails_on_the_other_host_ends_the_job(machine, tmp_path):
    script = (
        "from minipar.comm import world\ncomm = world()\nif comm.rank == 3: raise ValueError('here')\ncomm.barrier()"
    )
    done = run_mpi(4, script, 60, before=two_hosts.prefix(tmp_path), options=two_hosts.options(tmp_path, 2))
    assert done.returncode not in (0, None) and "rank 3:" in done.stderr and "ValueError: here" in done.stderr


STARTS = "import os, time\nrank = os.environ['PMI_RANK']\n{}\nfrom minipar.comm import world\nworld().barrier()"


def start(folder, ranks, per_host, first_line, **env):
    hosts, options = two_hosts.prefix(folder), two_hosts.options(folder, per_host)
    return run_mpi(ranks, STARTS.format(first_line), 60, before=hosts, options=options, env=env)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("ranks", "end"), [(2, "raise ImportError('here')"), (3, "os._exit(0)"), (4, "os._exit(1)")])
def test_a_rank_alone_on_its_host_that_never_starts_is_named(machine, tmp_path, ranks, end):
    """And two on one host, where four ranks are dealt to two hosts in turn."""
    done = start(tmp_path, ranks, 1, f"if int(rank) % 2: {end}")
    odd = "1, 3" if ranks == 4 else "1"
    assert done.returncode not in (0, None) and f"minipar: rank {odd} has ended before MPI started" in done.stderr


@pytest.mark.long
@pytest.mark.parametrize("ranks", [pytest.param(3, marks=pytest.mark.long), 4])
def test_ranks_dealt_one_by_one_to_hosts_may_start_late(machine, tmp_path, ranks):
    done = start(tmp_path, ranks, 1, "if rank == '1': time.sleep(3)")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.long
def test_a_start_that_no_other_host_sees_fail_has_a_timeout(machine, tmp_path):
    done = start(tmp_path, 2, 1, "if rank == '0': os._exit(0)", MINIPAR_TIMEOUT="3")
    assert done.returncode not in (0, None) and "MPI has not started within 20 s (MINIPAR_TIMEOUT)" in done.stderr
