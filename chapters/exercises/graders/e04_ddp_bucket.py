"""Grader of exercise 4, a bucket of gradients."""

from chapters.exercises.grading import RingCommunicator, expect, on_ranks, random, require

SIZES = (3, 5, 2)
ORDERS = ((2, 1, 0), (1, 2, 0))  # of the calls of `ready`, in two steps
SOLVED = "One all-reduce carries all gradients of the bucket while backward goes on (section 4.4)."


class WatchedCommunicator(RingCommunicator):
    """A communicator that lists its all-reduces: (elements, started without waiting)."""

    def __init__(self, comm, early="ready waits for the all-reduce; wait in `wait`"):
        super().__init__(comm)
        self.all_reduces, self.may_wait, self.early = [], False, early

    def all_reduce(self, x, *arguments, async_op=False, **options):
        self.all_reduces.append((x.size, async_op))
        work = super().all_reduce(x, *arguments, async_op=async_op, **options)
        return WatchedWork(work, self) if async_op else work


class WatchedWork:
    """An all-reduce on its way, which may be waited for once `wait` of the bucket has been called."""

    def __init__(self, work, comm):
        self.work, self.comm = work, comm

    def __getattr__(self, name):
        return getattr(self.work, name)

    def wait(self):
        require(self.comm.may_wait, f"{self.comm.early}, so that backward goes on")
        return self.work.wait()


def gradient_of(step, rank, parameter):
    return random(step, rank, parameter).normal(size=SIZES[parameter])


def grade(solution):
    for ranks in (1, 2, 3, 4):

        def program(comm, ranks=ranks):
            watched = WatchedCommunicator(comm)
            bucket = solution.Bucket(watched, SIZES)
            for step, order in enumerate(ORDERS):
                del watched.all_reduces[:]
                watched.may_wait = False
                for calls, parameter in enumerate(order, start=1):
                    bucket.ready(parameter, gradient_of(step, comm.rank, parameter))
                    check_calls(watched.all_reduces, calls, f"{ranks} ranks, step {step}")
                watched.may_wait = True
                check_values(bucket.wait(), ranks, comm.rank, step)

        on_ranks(solution, ranks, program)


def check_calls(all_reduces, calls, where):
    if calls < len(SIZES):
        sizes = [size for size, _ in all_reduces]
        one_each = "; a bucket sends its gradients together, not one by one" if sizes and sizes[-1] < sum(SIZES) else ""
        require(
            not all_reduces,
            f"{where}: an all-reduce starts after {calls} of {len(SIZES)} gradients{one_each}; "
            "count the calls of ready, anew in each step",
        )
        return
    require(
        len(all_reduces) == 1,
        f"{where}: {len(all_reduces)} all-reduces after the last gradient, expected one of all {sum(SIZES)} elements; "
        "does your count of missing gradients start anew in each step?",
    )
    size, started = all_reduces[0]
    require(size == sum(SIZES), f"{where}: the all-reduce has {size} elements, the bucket has {sum(SIZES)}")
    require(started, f"{where}: ready waits for the all-reduce; start it with async_op=True, and wait in `wait`")


def check_values(gradients, ranks, rank, step):
    require(gradients is not None and len(gradients) == len(SIZES), "wait returns one array for each parameter")
    for parameter, value in enumerate(gradients):
        all_ranks = [gradient_of(step, r, parameter) for r in range(ranks)]
        before = sum(gradient_of(0, r, parameter) for r in range(ranks))
        stale = {
            "the gradients of the step before are still in the buffer: replace them": before + sum(all_ranks) / ranks
        }
        expect(
            value,
            sum(all_ranks) / ranks,
            f"parameter {parameter} on rank {rank} of {ranks}, step {step}",
            (stale if step > 0 else {})
            | {
                "this is the sum of the ranks' gradients, their mean is asked for": sum(all_ranks),
                "divided by the number of ranks twice": sum(all_ranks) / ranks**2,
                "this is your own gradient: wait for the all-reduce before you read the buffer": all_ranks[rank],
                "this is your own gradient, divided: wait for the all-reduce before you read": all_ranks[rank] / ranks,
            },
        )
