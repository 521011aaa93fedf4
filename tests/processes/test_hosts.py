"""Two hosts: training over TCP between them equals one device, and what crosses the cable is what was counted."""

import pytest
import two_hosts
from launcher import run_mpi

from chapters.support.training import step_layout
from minipar.comm import wire_bytes
from minipar.more.hybrid_traffic import replica_bytes
from minipar.train.flags import parse
from visualize import mesh_traffic, read_trace

SMALL = "--layers 2 --hidden 64 --heads 4 --seq-len 32 --steps 3 --dtype float64".split()
SLACK = 200_000  # bytes: headers, and MPI's and mpirun's own messages


@pytest.fixture(scope="module", autouse=True)
def machine(tmp_path_factory):
    reason = two_hosts.why_not(tmp_path_factory.mktemp("try"))
    if reason is not None:
        pytest.skip(reason)


def run(folder, per_host, program, ranks=4, **env):
    """Run it with so many ranks on host a, as many on host b, and so on in turn."""
    before, options = two_hosts.prefix(folder), two_hosts.options(folder, per_host)
    return run_mpi(ranks, program, 90, env=env, before=before, options=options)


def train(folder, per_host, flags):
    """Train, and check it against one device. Then train again, and return the bytes that each pair of ranks counts.

    Not in one run, because a check sends state to rank 0.
    """
    command = ["-m", "minipar.train", *SMALL, *flags.split()]
    done = run(folder, per_host, [*command, "--verify"])
    assert done.returncode == 0 and "verify: 4 ranks = 1 device" in done.stdout, done.stdout + done.stderr
    trace = folder / "trace.json"
    done = run(folder, per_host, [*command, "--trace", str(trace)])
    assert done.returncode == 0, done.stderr
    return mesh_traffic(read_trace(str(trace))).links, trace.stat().st_size


@pytest.mark.parametrize(("per_host", "across"), [(2, "dp"), (1, "tp")])
def test_training_on_two_hosts_equals_one_device(tmp_path, per_host, across):
    """dp=2, tp=2. With two ranks on each host only gradients cross; dealt one by one, every sum of activations does."""
    links, trace_bytes = train(tmp_path, per_host, "--dp 2 --tp 2")
    hosts = [rank // per_host % 2 for rank in range(4)]
    assert {axis for axis, source, dest in links if hosts[source] != hosts[dest]} == {across}
    wire = two_hosts.on_the_wire(tmp_path)
    for way, host in (("sent", 0), ("received", 1)):
        crossing = [link for link in links if hosts[link[1]] == host != hosts[link[2]]]
        counted = sum(links[link][1] for link in crossing)
        assert counted > 500_000
        slack = SLACK + (trace_bytes if way == "received" else 0)  # the trace itself goes to rank 0
        assert counted < wire[way] < 1.1 * counted + slack


def test_hybrid_sharding_sends_sums_of_shards_over_the_cable(tmp_path):
    """Stage 3 of two microbatches: parameters are gathered inside each host; the chunks' gradients cross once."""
    flags = "--zero-stage 3 --zero-replicas 2 --microbatches 2"
    links, _ = train(tmp_path, 2, flags)
    layout = step_layout(parse([*SMALL, *flags.split()], 4))
    losses = 3 * 2 * 8  # of each step: those of host b's ranks, to rank 0, and the sum back to each of them
    for host in (0, 1):
        crossing = sum(count for (_, s, d), (_, count) in links.items() if s // 2 == host != d // 2)
        assert crossing == 3 * sum(replica_bytes(layout, rank, 0) for rank in (2 * host, 2 * host + 1)) + losses


@pytest.mark.parametrize("hierarchical", [True, False])
def test_a_hierarchical_all_reduce_sends_less_over_the_cable(tmp_path, hierarchical):
    """8 MB on 2 x 2 ranks: 2(n/s)(q-1)/q from each rank of a host, 8 MB; a ring of four sends 2n(3/4), 12 MB."""
    script = f"""
import numpy as np
from minipar.comm import world
from transports import hierarchical_all_reduce
comm, x = world(), np.ones(2**20)
inside, across = comm.split_into(2)
if {hierarchical}:
    hierarchical_all_reduce(x, inside, across)
else:
    comm.all_reduce(x, algorithm="ring")
assert (x == 4).all()
"""
    done = run(tmp_path, 2, script)
    assert done.returncode == 0, done.stderr
    n = 8 * 2**20
    counted = 2 * wire_bytes("all_reduce", "ring", 2**19, 8, 2, 0) if hierarchical else 2 * n * 3 // 4
    for nbytes in two_hosts.on_the_wire(tmp_path).values():
        assert counted < nbytes < 1.1 * counted + SLACK


def test_a_file_that_one_host_lacks_is_one_line_and_exit_code_2(tmp_path):
    data = tmp_path / "of_host_a" / "text.txt"
    data.parent.mkdir()
    data.write_text("what only one host has. " * 1000)
    done = run(tmp_path, 2, ["-m", "minipar.train", *SMALL, "--data", str(data)])
    assert done.returncode == 2 and done.stdout == ""
    lines = [line for line in done.stderr.splitlines() if line.startswith("minipar: error: ")]
    assert lines and all(str(data) in line for line in lines)  # of each rank of the host that lacks it


def test_a_rank_that_fails_on_the_other_host_ends_the_job(tmp_path):
    script = "from minipar.comm import world\ncomm = world()\n"
    script += "if comm.rank == 3: raise ValueError('here')\ncomm.barrier()"
    done = run(tmp_path, 2, script)
    assert done.returncode not in (0, None) and "rank 3:" in done.stderr and "ValueError: here" in done.stderr
