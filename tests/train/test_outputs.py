"""Claims about what a run prints and writes: no escape code in a log, no foreign file replaced, one line per error."""

import dataclasses
import json
import os
import resource
import subprocess
import sys

import pytest
from launcher import ROOT, run_each, run_mpi

from minipar.errors import UsageError, printable
from minipar.nn import GPT, GPTConfig
from minipar.nn.pretrained import save_pretrained
from minipar.train.config import parse
from minipar.train.progress import Metrics, prepare_outputs, progress_stream, write_export
from minipar.train.settings import TrainConfig
from minipar.train.trainer import StepResult
from visualize.measurements import read_metrics

TINY = "-m minipar.train --layers 1 --hidden 16 --heads 2 --seq-len 16 --global-batch 6 --steps 3".split()
RESULT = StepResult(0, 0.5, 1.0, 0.1, 10.0)


def outputs(**paths: object) -> TrainConfig:
    return parse([text for name, path in paths.items() for text in (f"--{name}", str(path))])


# ---- before training -------------------------------------------------------------------------------------------------


def test_output_directories_are_made_and_earlier_files_kept(tmp_path):
    (tmp_path / "m.jsonl").write_text("earlier\n")
    prepare_outputs(outputs(metrics=tmp_path / "m.jsonl", trace=tmp_path / "a/b/t.json", export=tmp_path / "c/model"))
    assert (tmp_path / "m.jsonl").read_text() == "earlier\n"
    assert (tmp_path / "a/b/t.json").is_file() and list((tmp_path / "c/model").iterdir()) == []


@pytest.mark.parametrize("name", ["metrics", "trace", "export"])
def test_an_unwritable_path_is_refused_before_training(tmp_path, name):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=f"^--{name} .*file/x cannot be written: "):
        prepare_outputs(outputs(**{name: tmp_path / "file/x"}))
    with pytest.raises(UsageError, match=f"^--{name} "):
        prepare_outputs(outputs(**{name: "/proc/self/no/x" if os.path.isdir("/proc/self") else "/dev/null/x"}))
    if name != "export":
        with pytest.raises(UsageError, match=f"^--{name} .* is a directory; expected a file"):
            prepare_outputs(outputs(**{name: tmp_path}))


def test_two_outputs_need_two_files(tmp_path):
    with pytest.raises(UsageError, match="--metrics and --trace would both write"):
        prepare_outputs(outputs(metrics=tmp_path / "x", trace=tmp_path / "." / "x"))


def test_an_export_replaces_only_an_export(tmp_path):
    model = GPT(GPTConfig(16, 8, 8, 1, 2))
    prepare_outputs(outputs(export=tmp_path / "new"))
    save_pretrained(model, tmp_path / "new")
    prepare_outputs(outputs(export=tmp_path / "new"))
    (tmp_path / "new" / "model.safetensors.partial").write_text("left by a kill")
    prepare_outputs(outputs(export=tmp_path / "new"))


def foreign(change):
    """A directory that no export wrote: an export, changed."""

    def make(folder):
        save_pretrained(GPT(GPTConfig(16, 8, 8, 1, 2)), folder)
        config = json.loads((folder / "config.json").read_text())
        change(folder, config)
        if (folder / "config.json").exists():
            (folder / "config.json").write_text(json.dumps(config))

    return make


FOREIGN = {
    "another file": (foreign(lambda folder, config: (folder / "thesis.tex").write_text("")), "thesis.tex"),
    "a tokenizer": (foreign(lambda folder, config: (folder / "vocab.json").write_text("")), "vocab.json"),
    "OpenAI's": (foreign(lambda folder, config: config.update(bos_token_id=50256)), "config.json"),
    "transformers'": (foreign(lambda folder, config: config.update(transformers_version="5.0")), "config.json"),
    "another model's": (foreign(lambda folder, config: config.pop("bos_token_id")), "config.json"),
    "weights alone": (foreign(lambda folder, config: (folder / "config.json").unlink()), "model.safetensors"),
    "a directory": (lambda folder: (folder / "model.safetensors").mkdir(parents=True), "model.safetensors"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_an_export_into_a_foreign_directory_is_refused(kind, tmp_path):
    make, name = FOREIGN[kind]
    make(tmp_path / "model")
    before = {path.name: path.is_file() and path.read_bytes() for path in (tmp_path / "model").iterdir()}
    with pytest.raises(UsageError, match=f"model holds .*{name}.*, which no export of minipar wrote"):
        prepare_outputs(outputs(export=tmp_path / "model"))
    assert {path.name: path.is_file() and path.read_bytes() for path in (tmp_path / "model").iterdir()} == before


def test_a_pipe_without_a_reader_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name in ("trace", "memory"):  # written after the training, when the reader may have gone
        with pytest.raises(UsageError, match=f"^--{name} .*/pipe is a pipe; expected a file"):
            prepare_outputs(outputs(**{name: tmp_path / "pipe"}))
    with pytest.raises(UsageError, match="--metrics .*pipe cannot be written: No such device or address"):
        Metrics(str(tmp_path / "pipe"))


# ---- while and after training ----------------------------------------------------------------------------------------


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_a_full_disk_ends_with_one_line_after_the_training():
    result = run_mpi(2, [*TINY, "--metrics", "/dev/full"])
    assert result.returncode == 2 and "step 3/3" in result.stdout
    assert "minipar: note: --metrics /dev/full cannot be written: No space left on device; training" in result.stdout
    assert result.stderr == "minipar: error: --metrics /dev/full cannot be written: No space left on device\n"


def test_metrics_into_a_device_are_written():
    for path in ("/dev/null", "/dev/stderr"):
        result = run_mpi(1, [*TINY, "--metrics", path])
        assert result.returncode == 0, result.stderr
    assert [json.loads(line)["step"] for line in result.stderr.splitlines()] == [0, 1, 2]


@pytest.mark.parametrize("replaced", [False, True])
def test_metrics_that_are_removed_or_renamed_are_an_error(replaced, tmp_path):
    metrics = Metrics(str(tmp_path / "m.jsonl"))
    metrics.write(RESULT)
    (tmp_path / "m.jsonl").rename(tmp_path / "earlier.jsonl")
    if replaced:
        (tmp_path / "m.jsonl").touch()
    with pytest.raises(UsageError, match="m.jsonl was removed or renamed during the training"):
        metrics.close()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("flag", ["--export", "--trace", "--memory"])
def test_a_file_that_the_disk_cannot_hold_is_not_left(flag, tmp_path):
    """A real write that fails: files may have at most 4 KiB."""
    script = f"""
import resource, sys
from minipar.comm import main
from minipar.train.__main__ import run

sys.argv[1:] = {[*TINY[2:], flag, str(tmp_path / "model")]!r}
def limited(comm):
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    return run(comm)
main(limited)
"""
    result = run_mpi(2, script, timeout=30)
    assert result.returncode == 2
    assert result.stderr.startswith(f"minipar: error: {flag} {tmp_path}/model")
    assert result.stderr.endswith(": File too large\n") and result.stderr.count("\n") == 1
    assert list(tmp_path.rglob("*")) == ([tmp_path / "model"] if flag == "--export" else [])


@pytest.mark.parametrize("first_step", [0, 2])
def test_metrics_of_a_full_disk_end_with_a_whole_line(first_step, tmp_path):
    """A real write that fails in the middle of a line: files may have at most 500 bytes."""
    path = tmp_path / "m.jsonl"
    earlier = [
        json.dumps({"step": step, "loss": 1.0, "grad_norm": 1.0, "seconds": 1.0, "tokens_per_second": 1.0}) + "\n"
        for step in range(4)
    ]
    path.write_text("".join(earlier))
    metrics = Metrics(str(path), first_step)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, before[1]))
    try:
        for step in range(first_step, 9):
            metrics.write(dataclasses.replace(RESULT, step=step))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    text = path.read_text()
    assert text.endswith("}\n") and 200 < len(text) <= 500
    steps = [json.loads(line)["step"] for line in text.splitlines()]
    assert steps == list(range(len(steps))) and len(steps) > first_step
    assert len(read_metrics(str(path))) == len(steps)  # what `visualize loss` reads
    with pytest.raises(UsageError, match="m.jsonl cannot be written: File too large"):
        metrics.close()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("full", [0, 1])
def test_a_save_that_the_disk_cannot_hold_leaves_nothing(full, tmp_path):
    """One rank's files may have at most 4 KiB, from the second checkpoint on."""
    script = f"""
import resource, sys
from minipar.comm import main
from minipar.train import checkpoint
from minipar.train.__main__ import run

sys.argv[1:] = {[*TINY[2:], "--save", str(tmp_path / "run"), "--save-every", "1"]!r}
pieces = checkpoint.owned_pieces
def limited(comm):
    def second(parameters):
        if comm.rank == {full} and list(checkpoint.checkpoints(checkpoint.Path({str(tmp_path / "run")!r}))):
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        return pieces(parameters)
    checkpoint.owned_pieces = second
    return run(comm)
main(limited)
"""
    result = run_mpi(2, script, timeout=30)
    assert result.returncode == 2 and result.stderr.count("\n") == 1
    assert result.stderr == f"minipar: error: --save {tmp_path}/run: rank {full}: [Errno 27] File too large\n"
    assert [path.name for path in (tmp_path / "run").glob("step-*")] == ["step-00000001"]


def test_a_failed_export_keeps_the_earlier_one(tmp_path, monkeypatch):
    model = GPT(GPTConfig(16, 8, 8, 1, 2))
    save_pretrained(model, tmp_path)
    earlier = (tmp_path / "model.safetensors").read_bytes()
    model.wte.weight.data[...] = 0

    def full(old, new):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(UsageError, match="--export .* cannot be written: No space left on device"):
        write_export(model, str(tmp_path), model.state_dict())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    assert (tmp_path / "model.safetensors").read_bytes() == earlier


# ---- a training that diverges ----------------------------------------------------------------------------------------

INFINITE = "minipar: error: training has diverged: its last update made a parameter or a mean of the optimizer inf"


def test_what_the_last_update_made_infinite_is_not_written(tmp_path):
    """The loss and the norm of the only step are finite: they are those before its update."""
    every = ("--tp 2 --save", "--zero-stage 3 --export", "--dp 2 --verify --record")
    commands = [
        [*TINY[1:], "--steps", "1", "--lr", "3e38", *flags.split(), str(tmp_path / str(i))]
        for i, flags in enumerate(every)
    ]
    for i, result in enumerate(run_each(2, commands)):
        assert result.returncode == 2 and result.stderr.startswith(INFINITE) and result.stderr.count("\n") == 1
        written = [path.name for path in (tmp_path / str(i)).glob("*")]  # none without a directory
        assert written == [] or "--record" in every[i] and "verify" not in result.stdout
        assert "step 1/1  loss 5.5" in result.stdout


def test_a_validation_loss_that_is_not_finite_ends_the_run(tmp_path):
    flags = f"--steps 1 --lr 3e38 --eval-every 1 --metrics {tmp_path}/m.jsonl"
    result = run_mpi(1, [*TINY, *flags.split()])
    problem = "training has diverged: validation loss nan in step 1; try a smaller --lr"
    assert result.returncode == 2 and problem in result.stderr
    assert (tmp_path / "m.jsonl").read_text() == ""


# ---- what is printed -------------------------------------------------------------------------------------------------


def test_metrics_on_standard_output_send_progress_elsewhere(capsys):
    config = parse(["--metrics", "-"])
    prepare_outputs(config)
    assert not os.path.exists("-")
    print("progress", file=progress_stream(config))
    assert capsys.readouterr() == ("", "progress\n")
    print("progress", file=progress_stream(parse([])))
    assert capsys.readouterr() == ("progress\n", "")


@pytest.mark.parametrize("place", ["| head -1", "> /dev/full"])
def test_a_training_goes_on_where_nobody_reads_it(place, tmp_path):
    command = f"{sys.executable} {' '.join(TINY)} --export {tmp_path}/model {place}; exit ${{PIPESTATUS[0]}}"
    result = subprocess.run(
        ["bash", "-c", command], env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60
    )
    note = "minipar: note: progress cannot be written: No space left on device\n"
    assert result.returncode == 0 and result.stderr == (note if "full" in place else "")
    assert sorted(os.listdir(tmp_path / "model")) == ["config.json", "model.safetensors"]


def test_a_path_cannot_steer_the_terminal():
    assert printable("a\x1b[2Jb\n\rß/日本") == "a\\x1b[2Jb\\n\\rß/日本"
