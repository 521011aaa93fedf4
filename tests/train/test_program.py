"""Claims about the program on one rank, in this process: what it prints, resumes, writes and returns."""

import json
import os
import signal
from contextlib import nullcontext
from pathlib import Path
from threading import current_thread

import numpy as np
import pytest
from safetensors.numpy import load_file

from minipar.comm import run_local, serial
from minipar.errors import UsageError
from minipar.train import __main__ as program
from minipar.train.__main__ import is_due, noting_signals, run_job
from minipar.train.config import parse
from minipar.train.progress import Progress
from minipar.train.verify import Verdict, Verifier

TEXT = b"It was a bright cold day in April, and the clocks were striking thirteen. " * 10
SMALL = "--layers 1 --hidden 8 --heads 2 --seq-len 8 --global-batch 4 --data text"


@pytest.fixture(autouse=True)
def _place(tmp_path, monkeypatch):
    """Run where the text is, and leave the process's settings as they were."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    Path("text").write_bytes(TEXT)
    with np.errstate():
        yield


def run(flags, comm=None):
    return run_job(parse(f"{SMALL} {flags}".split()), serial() if comm is None else comm)


def refused(flags):
    with pytest.raises(UsageError) as caught:
        run(flags)
    return str(caught.value)


# ---- resumed ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(capsys):
    """Checkpoints of steps 1 and 2 in `run`."""
    assert run("--steps 2 --save run --save-every 1 --metrics m.jsonl") == 0
    capsys.readouterr()


def test_a_resumed_run_says_from_where_and_goes_on(saved, monkeypatch, capsys):
    made = []

    class Noting(Progress):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            made.append((self.steps, self.first, self.done))

    monkeypatch.setattr(program, "Progress", Noting)
    assert run("--resume run --steps 4 --metrics m.jsonl") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "minipar: resumed after step 2 from run/step-00000002"
    assert [line[:9] for line in lines[3:5]] == ["step 3/4 ", "step 4/4 "]
    assert lines[5:] == ["minipar: wrote m.jsonl (--metrics)"] and made == [(4, 2, 2)]
    assert [json.loads(line)["step"] for line in Path("m.jsonl").read_text().splitlines()] == [0, 1, 2, 3]


def test_a_run_without_a_step_left_asks_for_more(saved, capsys):
    assert run("--resume run") == 0
    line = "minipar: resumed after step 2 from run/step-00000002; this is the last step: give more --steps"
    assert capsys.readouterr().out.splitlines()[2:] == [line]


def test_a_text_that_has_moved_is_asked_for(saved):
    """It is not asked for if this run names it, and no other text is."""
    Path("text").rename("moved")
    missing = "cannot be read: No such file or directory"
    names = "run/step-00000002/manifest.json names this file: give --data with its new path"
    with pytest.raises(UsageError) as caught:
        run_job(parse(["--resume", "run"]), serial())
    assert str(caught.value) == f"--data text {missing}; {names}"
    assert refused("--resume run") == f"--data text {missing}"
    assert refused("--steps 1") == f"--data text {missing}"
    with pytest.raises(UsageError) as caught:
        run_job(parse("--resume run --data moved --eval-every 1 --eval-data text".split()), serial())
    assert str(caught.value) == f"--eval-data text {missing}"


def test_another_mistake_does_not_ask_for_the_text(saved):
    Path("text").write_bytes(TEXT[:8])
    with pytest.raises(UsageError) as caught:
        run_job(parse(["--resume", "run"]), serial())
    assert str(caught.value) == "text holds 8 tokens, but a sample and its targets take seq-len + 1 = 8 + 1 = 9"


def test_a_new_run_does_not_save_over_an_earlier_one(saved):
    but = "but this run starts at step 0: --resume that one, or save to another directory"
    assert refused("--save run --steps 3") == f"--save run holds a checkpoint of step 2, {but}"
    assert run("--save run --resume auto --steps 3") == 0
    assert sorted(path.name for path in Path("run").iterdir()) == ["step-00000002", "step-00000003"]


# ---- what is due -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("every", "due"), [(None, [7]), (1, [1, 2, 3, 4, 5, 6, 7]), (2, [2, 4, 6, 7]), (3, [3, 6, 7]), (7, [7]), (9, [7])]
)
def test_something_is_due_every_so_many_steps_and_at_the_end(every, due):
    assert [done for done in range(1, 8) if is_due(done, 7, every)] == due


# ---- the outcome -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("passed", "code"), [(True, 0), (False, 1)])
def test_the_exit_code_is_that_of_the_verdict(passed, code, monkeypatch, capsys):
    monkeypatch.setattr(Verifier, "verdict", lambda self: Verdict(passed, "the verdict"))
    assert run_local(2, lambda comm: run("--steps 1 --verify", comm)) == [code, code]
    assert capsys.readouterr().out.splitlines()[-1] == "the verdict"


def test_a_failed_proof_is_told_once_and_training_continues(monkeypatch, capsys):
    def fail_in_step_2(self, result, state):
        return "the reason" if result.step == 1 else ""

    monkeypatch.setattr(Verifier, "_different_step", fail_in_step_2)
    assert run("--steps 4 --verify") == 1
    lines = capsys.readouterr().out.splitlines()
    failed = "verify: FAILED: after step 2 of 4: the reason"
    assert lines[3:] == [f"minipar: note: {failed}; training continues", *lines[4:7], failed]
    assert [line[:8] for line in lines[4:7]] == ["step 2/4", "step 3/4", "step 4/4"]


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [("", "float32"), ("--dtype float64", "float64"), ("--dtype float64 --export-dtype float32", "float32")],
)
def test_an_export_has_the_dtype_of_the_run_unless_given(flags, dtype):
    assert run(f"--steps 1 --export model {flags}") == 0
    tensors = load_file("model/model.safetensors")
    assert {str(tensor.dtype) for tensor in tensors.values()} == {dtype}


def test_numpy_does_not_warn_of_what_the_trainer_says():
    with np.errstate(over="warn", invalid="warn", divide="warn"):
        assert run("--steps 1") == 0
        assert (np.geterr()["over"], np.geterr()["invalid"], np.geterr()["divide"]) == ("ignore", "ignore", "warn")


def test_the_ledger_of_memory_begins_before_the_model():
    assert run("--steps 1 --memory memory") == 0
    (ledger,) = json.loads(Path("memory").read_text())["ranks"]
    assert ledger["rank"] == 0 and ledger["peak"] == sum(ledger["peak_parts"].values())
    assert min(ledger["peak_parts"][kind] for kind in ("parameters", "gradients", "optimizer")) > 0


# ---- signals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_after_a_first_signal_the_next_one_ends_the_process(number):
    both = (signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(each) for each in both]
    noting = noting_signals(True)
    noted = noting.__enter__()
    try:
        signal.raise_signal(number)
        assert noted == [number] and [signal.getsignal(each) for each in both] == [signal.SIG_DFL] * 2
        noted.clear()
    finally:
        noting.__exit__(None, None, None)
    assert [signal.getsignal(each) for each in both] == before


def test_a_signal_of_any_rank_saves_the_step_and_ends_all(capsys, monkeypatch):
    """The largest number counts; the step is saved although none is due."""
    monkeypatch.setattr(program, "noting_signals", noted_by_rank_1)
    codes = run_local(2, lambda comm: ended(lambda: run("--steps 3 --save run", comm)))
    assert codes == [128 + signal.SIGTERM] * 2
    assert capsys.readouterr().out.splitlines()[-1] == "minipar: SIGTERM: saved step 1 in run; --resume it"
    assert [path.name for path in Path("run").iterdir()] == ["step-00000001"]


def noted_by_rank_1(saving):
    """Give rank 1 two signals and the other threads none, in the place of `noting_signals`."""
    assert saving
    own = [signal.SIGINT, signal.SIGTERM] if current_thread().name == "rank 1" else []
    return nullcontext(own)


def ended(call):
    with pytest.raises(SystemExit) as leaving:
        call()
    return leaving.value.code
