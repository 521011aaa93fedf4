"""Mistakes in minipar/comm: collectives, their bytes, their time, and the end of a program."""

from mutants.mutant import mistakes

MUTANTS = [
    *mistakes(
        "minipar/comm/clock.py",
        "comm/test_clock.py",
        ("clock: a message costs no alpha", "return self.alpha + self.beta * nbytes", "return self.beta * nbytes"),
        (
            "clock: hosts are told apart by the wrong digits",
            "source // self.per_host != dest // self.per_host",
            "source % self.per_host != dest % self.per_host",
        ),
        (
            "clock: a region takes no time on the model clock",
            "self.clock.advance(flops / self.clock.flops_per_second)",
            "pass",
        ),
    ),
    *mistakes(
        "minipar/comm/communicator.py",
        "comm/test_collectives.py comm/test_async.py comm/test_threads.py",
        ("agree: the highest rank's error", "for text in texts:", "for text in reversed(texts):"),
        ("auto: one array too many is small", "nbytes < FEW_STEPS_BELOW", "nbytes <= FEW_STEPS_BELOW"),
        ("gather_bytes: every rank is sent all bytes", "(0, len(data) if rank in ranks else 0)", "(0, len(data))"),
        ("a message to a rank that does not exist", "if not 0 <= peer < self.size:", "if not 0 <= peer <= self.size:"),
    ),
    *mistakes(
        "minipar/comm/operation.py",
        "comm/test_collectives.py comm/test_disagreement.py comm/test_threads.py",
        ("collectives: a maximum is a sum", '"max": np.maximum', '"max": np.add'),
        ("tags: without the number of elements", "tag = tag * 128 + elements % 128", "tag = tag * 128"),
    ),
    *mistakes(
        "minipar/comm/guards.py",
        "comm/test_collectives.py comm/test_threads.py",
        (
            "all_to_all: counts that do not add up",
            "if not is_complete or min(sends + receives) < 0 or sum(sends) != elements:",
            "if not is_complete or min(sends + receives) < 0:",
        ),
    ),
    *mistakes(
        "minipar/comm/communicator.py",
        "comm/test_disagreement.py comm/test_leaving.py",
        ("an operation that nobody waits for is not reported", "self.engine.unwaited[work] =", "_ ="),
    ),
    *mistakes(
        "minipar/comm/communicator.py",
        "comm/test_hierarchical.py",
        (
            "levels: ranks dealt in turn are neighbours",
            "range(first, first + near)",
            "range(local_rank, self.size, hosts)",
        ),
        ("levels: groups of unequal size", "self.size % hosts", "False"),
        ("hierarchical: the whole array crosses", "across.all_reduce(chunk,", "across.all_reduce(x,"),
    ),
    *mistakes(
        "minipar/comm/algorithms.py",
        "comm/test_barrier.py comm/test_collectives.py comm/test_delays.py",
        (
            "barrier: one round short",
            "for step in range((p - 1).bit_length()):",
            "for step in range((p - 1).bit_length() - 1):",
        ),
        ("broadcast: from rank 0 whatever the root", "virtual = (link.rank - root) % p", "virtual = link.rank"),
        (
            "chunks: the last ones are longer, not the first",
            "r * size + min(r, longer)",
            "r * size + max(0, r - p + longer)",
        ),
        (
            "all_to_all: chunks in the order of their arrival",
            "link.irecv(received[source], source)",
            "link.irecv(received[dest], source)",
        ),
        (
            "all_to_all: receives as much as it sends",
            "received = chunks(out, p, receives)",
            "received = chunks(out, p, sends)",
        ),
        ("all_gather: does not wait for what it sends", "    yield requests", "    yield requests[::2]"),
    ),
    *mistakes(
        "minipar/comm/algorithms.py",
        "comm/test_collectives.py comm/test_delays.py",
        ("ring: receives into what it is still sending", "incoming, outgoing = outgoing, incoming", "pass"),
        ("ordered: does not wait for what it sends", "    yield sends", "    yield ()"),
        ("halving: overwrites its input", "total = x.copy()", "total = x"),
        ("ordered: starts from its own part", "total = contributions[0]", "total = contributions[r]"),
        ("tree: adds a neighbour twice", "rows[left], rows[left + distance]", "rows[left], rows[left + 1]"),
    ),
    *mistakes(
        "minipar/comm/mpi.py",
        "comm/test_mpi.py comm/test_disagreement.py",
        (
            "mpi: a collective's tag is not compared",
            "if STATUS.Get_tag() != self.tag or has_another_size:",
            "if has_another_size:",
        ),
    ),
    *mistakes(
        "minipar/comm/mpi.py",
        "comm/test_launch.py comm/test_leaving.py",
        ("abort: MPI prints a line on each rank", "mpirun.end_job(code)", "pass"),
        ("abort: 256 is an exit code of 0", "code %= 256", "pass"),
    ),
    *mistakes(
        "minipar/comm/threads.py",
        "comm/test_threads.py comm/test_launch.py",
        ("threads: BLAS has a thread for each core on each rank", "with one_blas_thread():", "if True:"),
        ("threads: a failed rank's number is not named", "if world.fail(error):", "if world.fail(error) and False:"),
        ("threads: a message wakes nobody", "                    self.wake[rank].notify()", "                    pass"),
        ("threads: a failure wakes nobody", "                condition.notify_all()", "                pass"),
    ),
    *mistakes(
        "minipar/comm/trace.py",
        "comm/test_trace.py comm/test_clock.py",
        ("trace: transmission counts as waiting", "max(0.0, sent - self.time)", "max(0.0, sent + seconds - self.time)"),
        ("trace: messages of a rank leave all at once", "leaves + self._seconds(array, self.rank, dest)", "leaves"),
        ("trace: a slice does not say its bytes", "self.nbytes += array.nbytes", "pass"),
        ("trace: events of an earlier trace stay", "comm.tracer.events.clear()", "pass"),
    ),
    *mistakes(
        "minipar/comm/traffic.py",
        "comm/test_collectives.py",
        ("traffic: the ring's closed form for equal chunks only", "2 * n - own - right", "2 * n - 2 * own"),
        ("traffic: a broadcast's children from the wrong root", "(rank - root) % p", "rank % p"),
    ),
    *mistakes(
        "minipar/comm/work.py",
        "comm/test_collectives.py comm/test_disagreement.py comm/test_threads.py",
        ("traffic: elements are counted as bytes", "count[1] += array.nbytes", "count[1] += array.size"),
    ),
    *mistakes(
        "minipar/comm/work.py",
        "comm/test_async.py",
        (
            "a blocking call overtakes asynchronous ones",
            "work = self if self.is_message else self.stream.queue[0]",
            "work = self",
        ),
        (
            "an error is raised again by other streams",
            "        if self in self.stream.queue:\n            self.leave_queue()",
            "        pass",
        ),
        ("the caller of a failed operation is not told", "            raise self.error", "            pass"),
        ("an error ends another operation than the failed one", "work.fail(error)", "self.fail(error)"),
    ),
    *mistakes(
        "minipar/comm/trace.py",
        "parallel/test_hybrid.py",
        ("then: what follows starts when the program notices", "        self.clock.resume(self.link.time)\n", ""),
    ),
    *mistakes(
        "minipar/comm/work.py",
        "parallel/test_hybrid.py",
        (
            "then: nothing follows what is done already",
            "        if self.done:\n            self.call_back()",
            "        pass",
        ),
    ),
    *mistakes(
        "minipar/comm/work.py",
        "comm/test_leaving.py",
        ("a patient wait ends at the timeout", "        self.timeout = math.inf\n", ""),
    ),
    *mistakes(
        "minipar/comm/mesh.py",
        "parallel/test_expert_mesh.py",
        ("mesh: etp is slowest", "stage.levels(stage.size // etp, ", "stage.levels(etp, "),
        ("mesh: etp need not divide tp", "if etp < 1 or tp % etp:", "if False:"),
    ),
    *mistakes(
        "minipar/comm/mesh.py",
        "comm/test_mesh.py",
        (
            "mesh: pp and dp exchanged",
            'AXES: tuple[str, ...] = ("tp", "cp", "dp", "pp")',
            'AXES: tuple[str, ...] = ("tp", "cp", "pp", "dp")',
        ),
        (
            "mesh: sizes that do not divide the ranks are accepted",
            "fits = ranks % needed == 0 if",
            "fits = ranks >= needed if",
        ),
    ),
    *mistakes(
        "minipar/comm/launch.py",
        "comm/test_launch.py comm/test_leaving.py",
        ("launch: a wrong timeout is seen once MPI starts", "start_mpi(wait_timeout())", "start_mpi(1800.0)"),
    ),
    *mistakes(
        "minipar/comm/ending.py",
        "comm/test_launch.py comm/test_leaving.py",
        ("launch: a usage error exits with 1", "        code = 2\n", "        code = 1\n"),
        ("launch: Ctrl-C exits with 1", "code = 130", "code = 1"),
    ),
    *mistakes(
        "minipar/comm/launch.py",
        "comm/test_leaving.py comm/test_multi_host.py",
        ("launch: a rank leaves without a word", "atexit.register(notices.leave)", "pass"),
    ),
    *mistakes(
        "minipar/comm/work.py",
        "comm/test_leaving.py",
        ("work: no timeout after a patient wait", "            self.timeout = timeout", "            pass"),
        (
            "work: one test makes a work waited for",
            "        if self.done:\n            self.stream.engine.unwaited.pop(self, None)",
            "        self.stream.engine.unwaited.pop(self, None)",
        ),
    ),
    *mistakes(
        "minipar/comm/mpi.py",
        "comm/test_launch.py",
        ("exceptions: a text is lost with the rank that should print it", "time.sleep(2 * RAISED_SECONDS)", "return"),
        ("exceptions: every rank prints the same", "if digest in [raised.get(rank) for rank in lower]:", "if False:"),
    ),
    *mistakes(
        "minipar/comm/launch.py",
        "comm/test_launch.py",
        (
            "launch: threads are called run_local",
            'launcher=f"mp.launch(main, threads={threads})"',
            'launcher="run_local"',
        ),
    ),
]
