"""Claims about progress: about ten lines in a run, a line at least every ten seconds, and none after the end."""

import io
import threading

import pytest
from launcher import run_mpi
from training import config_for

from minipar.train.progress import LINES, Progress, notes
from minipar.train.trainer import StepResult

WAIT = 30.0  # seconds in which a thread surely has its turn


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Stream(io.StringIO):
    """A stream that tells when something was written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = threading.Event()

    def write(self, text: str) -> int:
        count = super().write(text)
        self.written.set()
        return count

    @property
    def lines(self) -> list[str]:
        return self.getvalue().splitlines()


def result(step, skipped=None):
    return StepResult(step, 0.5, 1.0, 0.1, 10.0, skipped=skipped)


def spoken(steps, seconds, first=0, looks=1.0):
    """When each line comes, and the lines, in a run of steps of so many seconds, at whose thread one looks as often."""
    clock, stream, times = Clock(), Stream(), []
    progress = Progress(steps, stream, done=first, clock=clock)

    def note():
        times.extend([clock.now - 100.0] * (len(stream.lines) - len(times)))

    for step in range(first, steps):
        for _ in range(int(seconds / looks)):
            clock.now += looks
            progress.remind()
            note()
        progress(result(step))
        note()
    return times, stream.lines


def test_a_short_run_has_about_ten_lines():
    for steps in (1, 9, 10, 14, 99, 1000):
        times, lines = spoken(steps, seconds=0.0)
        assert min(steps, LINES) <= len(lines) <= 2 * LINES
        assert lines[0].startswith(f"step {1:>{len(str(steps))}}/{steps}  loss")
        assert lines[-1].startswith(f"step {steps}/{steps}  loss")


@pytest.mark.parametrize("seconds", [1, 4, 6, 9, 10, 11, 35])
def test_no_silence_is_longer_than_ten_seconds(seconds):
    times, _ = spoken(steps=300, seconds=float(seconds))
    gaps = [later - earlier for earlier, later in zip([0.0, *times], times, strict=False)]
    assert max(gaps) <= Progress.silence == 10


def test_steps_of_less_than_ten_seconds_need_no_reminder():
    for seconds in (1, 3, 5):
        times, lines = spoken(steps=300, seconds=float(seconds))
        assert all("  loss 0.5000" in line for line in lines)
        assert len(lines) <= 300 * seconds / 4  # not one line per step where steps are short


def test_a_long_step_is_named_with_its_seconds():
    _, lines = spoken(steps=5, seconds=25.0, first=3)
    assert [line for line in lines if "loss" not in line] == [
        "step 4/5 has run for 10 s", "step 4/5 has run for 20 s",
        "step 5/5 has run for 10 s", "step 5/5 has run for 20 s",
    ]  # fmt: skip


def test_what_follows_the_last_step_is_not_silent():
    clock, stream = Clock(), Stream()
    progress = Progress(1, stream, clock=clock)
    progress(result(0))
    clock.now += 12
    progress.remind()
    assert stream.lines[-1] == "step 1/1 is done, and what follows has run for 12 s"


def test_progress_says_how_long_the_rest_takes():
    _, lines = spoken(steps=14, seconds=30.0, first=10, looks=30.0)
    ends = [line.partition("tokens/s")[2].strip() for line in lines if "tokens/s" in line]
    assert ends == ["0:01:30 left", "0:01:00 left", "0:00:30 left", ""]


def test_an_evaluation_and_skipped_steps_have_their_words():
    stream = Stream()
    Progress(1000, stream, clock=Clock())(result(5, skipped=2), 1.25)
    assert stream.lines[0].endswith("  2 steps skipped  eval loss 1.25")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--zero-stage 3 --microbatches 2", ["shards nothing: dp = 1"]),
        ("--dp 2 --zero-stage 1 --zero-replicas 2 --microbatches 2", ["shards nothing: dp = 2 in 2 replicas"]),
        ("--dp 2 --zero-stage 2", []),
        ("--dp 2 --zero-stage 2 --microbatches 2", ["shards; --sync-every-microbatch keeps them sharded"]),
        ("--dp 2 --zero-stage 2 --microbatches 2 --sync-every-microbatch", []),
        ("--dp 2 --pp 2 --zero-stage 3 --microbatches 2", ["2*2 = 4 times per step", "--zero-stage 3 then shards"]),
        ("--dp 2 --cp 2 --zero-stage 1", []),
        ("--pp 2", ["one microbatch: the pipeline's"]),
        ("--pp 2 --microbatches 2 --schedule naive", ["--schedule naive: the pipeline's"]),
        ("--pp 2 --microbatches 2", []),
    ],
)
def test_a_wasteful_layout_has_its_notes_and_no_others(flags, words):
    lines = notes(config_for(f"--global-batch 8 {flags}"))
    assert len(lines) == len(words)
    for line, part in zip(lines, words, strict=True):
        assert line.startswith("minipar: note: ") and part in line


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(Progress, "silence", 0.001)


def test_the_thread_speaks_while_a_step_runs(impatient):
    stream = Stream()
    with Progress(300, stream, done=2):
        assert stream.written.wait(WAIT)
    assert stream.lines[0] == "step 3/300 has run for 0 s"


@pytest.mark.parametrize("error", [None, KeyboardInterrupt, SystemExit])
def test_nothing_is_written_after_the_end(error, impatient):
    before = threading.active_count()
    stream = Stream()
    try:
        with Progress(300, stream) as progress:
            assert threading.active_count() == before + 1 and stream.written.wait(WAIT)
            if error is not None:
                raise error
    except (KeyboardInterrupt, SystemExit):
        pass
    assert threading.active_count() == before and not progress._thread.is_alive()


def test_a_rank_without_a_stream_has_no_thread(impatient):
    before = threading.active_count()
    with Progress(3, None) as progress:
        assert threading.active_count() == before
        progress(result(0))


def test_a_step_that_hangs_is_named_on_rank_0_alone():
    """Through the real entry point: steps that take long, and a silence that is short."""
    script = """
import sys, time
from minipar.comm import main
from minipar.train import __main__ as program, progress, trainer

sys.argv[1:] = "--layers 1 --hidden 16 --heads 2 --seq-len 16 --global-batch 2 --steps 2 --verify".split()
progress.Progress.silence = 0.2
step = trainer.Trainer.step
def slow(self, index):
    time.sleep(0.5)
    return step(self, index)
trainer.Trainer.step = slow
main(program.run)
"""
    done = run_mpi(2, script, timeout=60)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    lines = done.stdout.splitlines()
    assert lines.count("step 2/2 has run for 0 s") >= 1 and lines[-1].startswith("verify: ")
