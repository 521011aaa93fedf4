"""Two hosts: training over TCP between them equals one device, and tensor parallelism stays inside a host."""

import pytest
import two_hosts
from launcher import run_mpi

from visualize import mesh_traffic, read_trace

SMALL = "--layers 2 --hidden 64 --heads 4 --seq-len 32 --steps 3 --dtype float64 --verify".split()


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


@pytest.mark.parametrize(("per_host", "inside", "across"), [(2, "tp", "dp"), (1, "dp", "tp")])
def test_training_on_two_hosts_equals_one_device(machine, tmp_path, per_host, inside, across):
    """dp=2, tp=2. With two ranks on each host only gradients cross; dealt one by one, every sum of activations does."""
    trace = tmp_path / "trace.json"
    done = run(tmp_path, per_host, "--dp", "2", "--tp", "2", "--trace", str(trace))
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "verify: 4 ranks = 1 device" in done.stdout
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


def test_a_pipeline_across_hosts_equals_one_device(machine, tmp_path):
    done = run(tmp_path, 2, "--pp", "2", "--dp", "2", "--microbatches", "4", "--reduction", "ordered")
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
