"""Mistakes in minipar/robust_start: a start that hangs, is refused without a cause, or leaves files behind."""

from mutants.mutant import mistakes

MUTANTS = [
    *mistakes(
        "minipar/robust_start/launchers.py",
        "comm/test_launch.py",
        (
            "launch: torchrun's number of ranks counts under mpirun",
            'if row[0] == "mpirun"] or rows',
            'if row[0] == "mpirun" or True]',
        ),
    ),
    *mistakes(
        "minipar/robust_start/watch.py",
        "robust_start/test_left_behind.py comm/test_leaving.py comm/test_multi_host.py",
        ("launch: a start has no timeout", "elif time.monotonic() - begin > timeout:", "elif False:"),
        ("launch: hosts that mpirun has lost count as reached", '.startswith("mpi")', '.startswith("none")'),
        ("launch: a repeated block of hosts counts once", "* int(repeated[2])", "* 1"),
        ("watch: what a frozen start has made stays", "        clean_up()", "        pass"),
        ("watch: every rank says why the job ends", "WATCH_SECONDS + TURN_SECONDS * (me - first)", "WATCH_SECONDS"),
    ),
    *mistakes(
        "minipar/robust_start/start.py",
        "robust_start/test_shared_memory.py robust_start/test_left_behind.py",
        ("launch: MPI's shared memory keeps its name", "Path(line.split()[-1]).unlink(missing_ok=True)", "pass"),
        ("start: UCX shares memory too", 'os.environ.setdefault("UCX_TLS", "^posix")', "pass"),
        (
            "start: the user's transports are replaced",
            'os.environ.setdefault("UCX_TLS", "^posix")',
            'os.environ["UCX_TLS"] = "^posix"',
        ),
        ("start: every rank checks the memory", 'os.environ.get("MPI_LOCALRANKID") == "0"', "True"),
        ("start: the last rank checks the memory", 'os.environ.get("MPI_LOCALRANKID") == "0"', "False"),
        ("start: mpirun's file of the processors stays", "Path(topology).unlink(missing_ok=True)", "pass"),
        ("start: memory of half of the ranks is enough", "if free >= needed:", "if 2 * free >= needed:"),
        ("start: memory of killed jobs is not named", "if kept > 0:", "if kept < 0:"),
        ("start: too little memory ends one rank", "mpirun.end_job(2)", "pass"),
    ),
    *mistakes(
        "minipar/robust_start/interrupt.py",
        "robust_start/test_interrupt.py",
        ("interrupt: a rank that does not listen holds the job", "mpirun.end_job(CODE)", "pass"),
        ("interrupt: every rank prints the line", 'os.environ.get("PMI_RANK", "0") == "0"', "True"),
        (
            "interrupt: a program's own handler is replaced",
            " and signal.getsignal(signal.SIGINT) is signal.",
            " and signal.",
        ),
        (
            "interrupt: Ctrl-C is never an exception again",
            "signal.signal(signal.SIGINT, signal.default_int_handler)",
            "pass",
        ),
    ),
]
