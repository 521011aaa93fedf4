"""Claims about what a run prints and writes: its files, no foreign file replaced, and no long silence."""

import dataclasses
import io
import json
import os
import resource
import subprocess
import sys
import threading

import numpy as np
import pytest
from launcher import ROOT, run_mpi

from minipar.comm import run_local, serial
from minipar.errors import UsageError, printable
from minipar.nn import GPT, GPTConfig
from minipar.nn.pretrained import load_pretrained, save_pretrained
from minipar.train import __main__ as program
from minipar.train import progress as progress_module
from minipar.train.config import parse
from minipar.train.progress import LINES, Metrics, Progress, prepare_outputs, write_export
from minipar.train.trainer import StepResult
from visualize.measurements import read_metrics

TINY = "--layers 1 --hidden 16 --heads 2 --seq-len 16 --global-batch 6 --steps 3"
RESULT = StepResult(0, 0.5, 1.0, 0.1, 10.0)


def run(flags, ranks=1):
    """Run `python -m minipar.train` on threads; return the exit code of each rank."""

    def rank(comm):
        return program.run_job(parse(f"{TINY} {flags}".split(), comm.rank), comm)

    with np.errstate():  # the program changes the process's settings
        return run_local(ranks, rank) if ranks > 1 else [rank(serial())]


# ---- files -----------------------------------------------------------------------------------------------------------


def test_any_number_of_ranks_writes_the_same_files(tmp_path):
    losses = []
    for ranks in (1, 3):
        folder = tmp_path / str(ranks)
        files = f"--metrics {folder}/m.jsonl --trace {folder}/deep/t.json --clock cpu --export {folder}/gpt2"
        assert run(f"--dtype float64 --reduction ordered --microbatches 2 {files}", ranks) == [0] * ranks
        lines = [json.loads(line) for line in (folder / "m.jsonl").read_text().splitlines()]
        assert [set(line) for line in lines] == [{"step", "loss", "grad_norm", "seconds", "tokens_per_second"}] * 3
        assert [line["step"] for line in lines] == [0, 1, 2]
        events = json.loads((folder / "deep" / "t.json").read_text())["traceEvents"]
        for rank in range(ranks):
            names = [e["name"] for e in events if e["ph"] == "X" and (e["pid"], e["cat"]) == (rank, "computation")]
            assert names.count("forward") == names.count("backward") == 6 and names.count("optimizer") == 3
        assert load_pretrained(folder / "gpt2").config == GPTConfig(256, 16, 16, 1, 2)
        losses.append([line["loss"] for line in lines])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-12)


def test_metrics_on_standard_output_are_alone_there(capsys):
    assert run("--metrics - --verify --dtype float64 --eval-every 2", 2) == [0, 0]
    out, err = capsys.readouterr()
    lines = [json.loads(line) for line in out.splitlines()]
    assert [(line["step"], "eval_loss" in line) for line in lines] == [(0, False), (1, True), (2, True)]
    assert "verify: 2 ranks = 1 device" in err and "step 3/3" in err


def test_a_model_directory_trains_on_from_its_weights(tmp_path):
    model = GPT(GPTConfig(300, 32, 16, 2, 4), seed=9, dtype="float64")
    save_pretrained(model, tmp_path / "start")
    np.random.Generator(np.random.Philox(1)).integers(0, 300, 2000).astype("<u2").tofile(tmp_path / "tokens.bin")
    flags = f"--init-from {tmp_path}/start --data {tmp_path}/tokens.bin --seq-len 16 --global-batch 4 --steps 2"
    flags += f" --lr 1e-9 --dtype float64 --reduction ordered --verify --export {tmp_path}/end --zero-stage 3"
    codes = run_local(2, lambda comm: program.run_job(parse(flags.split(), comm.rank), comm))
    assert codes == [0, 0]
    end = load_pretrained(tmp_path / "end", dtype="float64")
    assert end.config == model.config
    for name, x in model.state_dict().items():
        np.testing.assert_allclose(end.state_dict()[name], x, atol=1e-8)


def test_the_networks_prices_are_alpha_and_then_beta(tmp_path):
    """Each message in the trace is a second under way, and a microsecond for each of its bytes."""
    run(f"--clock model --network 1 1e-6 --trace {tmp_path}/trace.json", 2)
    ends = {}
    for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]:
        if event["name"] == "message":
            ends.setdefault(event["id"], {})[event["ph"]] = event
    late = [pair["f"]["ts"] - pair["s"]["ts"] - (1e6 + pair["s"]["args"]["bytes"]) for pair in ends.values()]
    assert len(late) > 10 and min(late) > -1.0  # microseconds; later only where a rank waits for another message too
    assert sum(abs(each) < 1.0 for each in late) > len(late) / 2


def outputs(**paths):
    return parse([text for name, path in paths.items() for text in (f"--{name}", str(path))])


def test_output_directories_are_made_and_earlier_files_kept(tmp_path):
    (tmp_path / "m.jsonl").write_text("earlier\n")
    prepare_outputs(outputs(metrics=tmp_path / "m.jsonl", trace=tmp_path / "a/b/t.json", export=tmp_path / "c/model"))
    assert (tmp_path / "m.jsonl").read_text() == "earlier\n"
    assert (tmp_path / "a/b/t.json").is_file() and list((tmp_path / "c/model").iterdir()) == []


@pytest.mark.parametrize("name", ["metrics", "trace", "memory", "export"])
def test_a_path_that_cannot_be_written_is_refused_at_once(tmp_path, name):
    (tmp_path / "file").write_text("")
    os.mkfifo(tmp_path / "pipe")
    bad = [tmp_path / "file/x"]
    if name != "export":
        bad.append(tmp_path)
    if name in ("trace", "memory"):
        bad.append(tmp_path / "pipe")  # written after the training, when the reader may have gone
    for path in bad:
        with pytest.raises(UsageError, match=f"--{name} .*{path.name}"):
            prepare_outputs(outputs(**{name: path}))
    with pytest.raises(UsageError, match="--metrics and --trace"):
        prepare_outputs(outputs(metrics=tmp_path / "x", trace=tmp_path / "." / "x"))


FOREIGN = {
    "another file": lambda folder, config: (folder / "thesis.tex").write_text(""),
    "OpenAI's": lambda folder, config: config.update(bos_token_id=50256),
    "transformers'": lambda folder, config: config.update(transformers_version="5.0"),
    "another model's": lambda folder, config: config.pop("bos_token_id"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_an_export_replaces_only_an_export(kind, tmp_path):
    save_pretrained(GPT(GPTConfig(16, 8, 8, 1, 2)), tmp_path)
    prepare_outputs(outputs(export=tmp_path))
    config = json.loads((tmp_path / "config.json").read_text())
    FOREIGN[kind](tmp_path, config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(UsageError, match=str(tmp_path)):
        prepare_outputs(outputs(export=tmp_path))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


# ---- while and after training ----------------------------------------------------------------------------------------


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_a_full_disk_is_an_error_after_the_training(capsys):
    with pytest.raises(UsageError, match="--metrics /dev/full"):
        run("--metrics /dev/full", 2)
    assert "step 3/3" in capsys.readouterr().out


@pytest.mark.parametrize("replaced", [False, True])
def test_metrics_that_are_removed_or_renamed_are_an_error(replaced, tmp_path):
    metrics = Metrics(str(tmp_path / "m.jsonl"))
    metrics.write(RESULT)
    (tmp_path / "m.jsonl").rename(tmp_path / "earlier.jsonl")
    if replaced:
        (tmp_path / "m.jsonl").touch()
    with pytest.raises(UsageError, match="m.jsonl"):
        metrics.close()


@pytest.mark.parametrize("first_step", [0, 2])
def test_metrics_of_a_full_disk_end_with_a_whole_line(first_step, tmp_path):
    """A real write that fails in the middle of a line: files may have at most 500 bytes."""
    path = tmp_path / "m.jsonl"
    earlier = {"loss": 1.0, "grad_norm": 1.0, "seconds": 1.0, "tokens_per_second": 1.0}
    path.write_text("".join(json.dumps({"step": step} | earlier) + "\n" for step in range(4)))
    metrics = Metrics(str(path), first_step)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, before[1]))
    try:
        for step in range(first_step, 9):
            metrics.write(dataclasses.replace(RESULT, step=step))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    text = path.read_text()
    steps = [json.loads(line)["step"] for line in text.splitlines()]
    assert text.endswith("}\n") and steps == list(range(len(steps))) and len(steps) > first_step
    assert len(read_metrics(str(path))) == len(steps)  # what `visualize loss` reads
    with pytest.raises(UsageError, match="m.jsonl"):
        metrics.close()


@pytest.mark.parametrize("flag", ["--export", "--trace"])
def test_a_file_that_the_disk_cannot_hold_is_not_left(flag, tmp_path):
    """A real write that fails: files may have at most 4 KiB."""
    script = f"""
import resource, sys
from minipar.comm import main
from minipar.train.__main__ import run

sys.argv[1:] = {[*TINY.split(), flag, str(tmp_path / "model")]!r}
def limited(comm):
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    return run(comm)
main(limited)
"""
    result = run_mpi(2, script, timeout=30)
    assert result.returncode == 2 and result.stderr.count("\n") == 1 and f"{flag} {tmp_path}/model" in result.stderr
    assert list(tmp_path.rglob("*")) == ([tmp_path / "model"] if flag == "--export" else [])


def test_a_failed_export_keeps_the_earlier_one(tmp_path, monkeypatch):
    model = GPT(GPTConfig(16, 8, 8, 1, 2))
    save_pretrained(model, tmp_path)
    earlier = (tmp_path / "model.safetensors").read_bytes()
    model.wte.weight.data[...] = 0

    def full(old, new):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(UsageError, match="--export"):
        write_export(model, str(tmp_path), model.state_dict())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    assert (tmp_path / "model.safetensors").read_bytes() == earlier


@pytest.mark.parametrize(
    ("ranks", "flags"), [(1, "--save"), (2, "--zero-stage 3 --export"), (2, "--tp 2 --verify --record")]
)
def test_what_the_last_update_made_infinite_is_not_written(ranks, flags, tmp_path, capsys):
    """The loss and the norm of the only step are finite: they are those before its update."""
    with pytest.raises(UsageError, match="diverged"):
        run(f"--steps 1 --lr 3e38 {flags} {tmp_path}/out", ranks)
    written = [path.name for path in (tmp_path / "out").glob("*")]
    assert written == [] or "--record" in flags
    assert "step 1/1  loss 5.5" in capsys.readouterr().out


def test_a_validation_loss_that_is_not_finite_ends_the_run(tmp_path):
    with pytest.raises(UsageError, match="step 1"):
        run(f"--steps 1 --lr 3e38 --eval-every 1 --metrics {tmp_path}/m.jsonl")
    assert (tmp_path / "m.jsonl").read_text() == ""


# ---- progress --------------------------------------------------------------------------------------------------------


class Clock:
    """A clock that the test moves."""

    now = 100.0

    def __call__(self):
        return self.now


def spoken(steps, seconds, first=0):
    """When each line comes, and the lines, in a run of steps of so many seconds, whose thread looks every second."""
    clock, stream, times = Clock(), io.StringIO(), []
    progress = Progress(steps, stream, done=first, clock=clock)

    def note():
        times.extend([clock.now - 100.0] * (stream.getvalue().count("\n") - len(times)))

    for step in range(first, steps):
        for _ in range(seconds):
            clock.now += 1.0
            progress.remind()
            note()
        progress(dataclasses.replace(RESULT, step=step))
        note()
    return times, stream.getvalue().splitlines()


@pytest.mark.parametrize("steps", [1, 9, 10, 14, 99, 1000])
def test_a_short_run_has_about_ten_lines(steps):
    _, lines = spoken(steps, seconds=0)
    assert min(steps, LINES) <= len(lines) <= 2 * LINES
    assert f"/{steps}  loss" in lines[0] and lines[-1].startswith(f"step {steps}/{steps}  loss")


@pytest.mark.parametrize("seconds", [1, 4, 6, 9, 10, 11, 35])
def test_no_silence_is_longer_than_ten_seconds(seconds):
    times, lines = spoken(steps=300, seconds=seconds)
    assert max(later - earlier for earlier, later in zip([0.0, *times], times, strict=False)) <= 10
    assert seconds > 5 or len(lines) <= 300 * seconds / 4  # not one line per step where steps are short


def test_a_long_step_is_named_and_the_rest_is_timed():
    _, lines = spoken(steps=5, seconds=25, first=3)
    assert [line for line in lines if "loss" not in line] == [
        "step 4/5 has run for 10 s", "step 4/5 has run for 20 s",
        "step 5/5 has run for 10 s", "step 5/5 has run for 20 s",
    ]  # fmt: skip
    assert "0:00:25 left" in lines[2]


def test_a_step_that_hangs_is_named(monkeypatch, capsys):
    """Through the program: the thread speaks while a step runs, on rank 0 alone, and has ended with the run."""
    stop = threading.Event()

    def slow(self, step, right=program.Trainer.step):
        stop.wait(0.2)
        return right(self, step)

    monkeypatch.setattr(program.Trainer, "step", slow)
    monkeypatch.setattr(progress_module.Progress, "silence", 0.05)
    before = threading.active_count()
    run("--steps 2", 2)
    assert "step 2/2 has run for 0 s" in capsys.readouterr().out
    assert threading.active_count() == before


@pytest.mark.parametrize("place", ["| head -1", "> /dev/full"])
def test_a_training_goes_on_where_nobody_reads_it(place, tmp_path):
    command = f"{sys.executable} -m minipar.train {TINY} --export {tmp_path}/model {place}; exit ${{PIPESTATUS[0]}}"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0 and result.stderr.count("\n") == (1 if "full" in place else 0)
    assert sorted(os.listdir(tmp_path / "model")) == ["config.json", "model.safetensors"]


def test_a_path_cannot_steer_the_terminal():
    assert printable("a\x1b[2Jb\n\rß/日本") == "a\\x1b[2Jb\\n\\rß/日本"
