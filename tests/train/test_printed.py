"""Claims about each line that a run prints: the whole text, and when it comes."""

import os
import sys
import tempfile
from io import StringIO

import pytest
from training import config_for

from minipar.errors import UsageError
from minipar.train import progress as module
from minipar.train.config import parse
from minipar.train.progress import Metrics, Progress, describe, notes, prepare_outputs, progress_stream, written
from minipar.train.trainer import StepResult

NOTE = "minipar: note: "
ALONE = "--global-batch 8"
TWICE = f"{NOTE}--zero-stage 3 gathers parameters for each microbatch's forward and backward: 2*2 = 4 times per step"
SENDS = "; --sync-every-microbatch keeps them sharded and sends them each time"


def whole(stage):
    return f"{NOTE}2 microbatches add up in whole gradients, which --zero-stage {stage} then shards"


def nothing(stage, ranks, replicas=""):
    return f"{NOTE}--zero-stage {stage} shards nothing: dp = {ranks}{replicas}"


APART = "--model mixtral --tp 2 --etp 1 --sequence-parallel"
NOTES = {
    "--zero-stage 3 --microbatches 2": [nothing(3, 1)],
    "--zero-stage 1": [nothing(1, 1)],
    "--dp 2 --zero-stage 1 --zero-replicas 2": [nothing(1, 2, " in 2 replicas")],
    "--dp 4 --zero-stage 1 --zero-replicas 2": [],
    "--cp 2 --zero-stage 3": [],
    "--dp 2 --zero-stage 3": [],
    "--dp 2 --zero-stage 1 --microbatches 2": [],
    "--dp 2 --zero-stage 2 --microbatches 2": [whole(2) + SENDS],
    "--dp 2 --zero-stage 3 --microbatches 2": [TWICE, whole(3) + SENDS],
    "--dp 2 --zero-stage 3 --microbatches 2 --sync-every-microbatch": [TWICE],
    "--dp 2 --zero-stage 2 --microbatches 2 --reduction tree": [whole(2)],
    "--dp 2 --pp 2 --zero-stage 2 --microbatches 2": [whole(2)],
    "--pp 2": [f"{NOTE}one microbatch: the pipeline's ranks work one after another"],
    "--pp 2 --schedule naive": [f"{NOTE}one microbatch: the pipeline's ranks work one after another"],
    "--pp 2 --microbatches 2 --schedule naive": [
        f"{NOTE}--schedule naive: the pipeline's ranks work one after another"
    ],
    "--pp 2 --microbatches 2": [],
    f"{APART} --zero-stage 1": [],
    "--model mixtral --tp 2 --etp 2 --dp 2 --zero-stage 1 --zero-replicas 2": [nothing(1, 2, " in 2 replicas")],
    f"{APART} --ep 2 --zero-stage 1": [nothing(1, 1)],
    "--model mixtral --tp 4 --etp 2 --ep 2 --sequence-parallel --zero-stage 1": [nothing(1, 1)],
    "--model mixtral --tp 4 --etp 2 --sequence-parallel --zero-stage 1": [],
    f"{APART} --cp 2 --ep 4 --zero-stage 1": [],
    f"{APART} --dp 2 --ep 4 --zero-stage 3 --microbatches 2": [TWICE, whole(3) + SENDS],
}  # fmt: skip


@pytest.mark.parametrize("flags", NOTES)
def test_each_note_has_this_text(flags):
    assert notes(config_for(f"{ALONE} {flags}")) == NOTES[flags]


DESCRIBED = {
    "--microbatches 1": (
        "GPT with 12,345 parameters (2 layers, hidden 128, 4 heads, float32) on 6,789 tokens of a\\ntext",
        "1 rank: --dp 1, global batch 8 x 64 tokens, 1 microbatch per replica, ring reduction",
    ),
    "--dp 2 --tp 2 --sequence-parallel --microbatches 2 --model llama --kv-heads 2 --dtype bf16": (
        "Llama with 12,345 parameters (2 layers, hidden 128, 4 heads on 2 of keys and values, bfloat16) "
        "on 6,789 tokens of a\\ntext",
        "4 ranks: --dp 2 --tp 2 --sequence-parallel, global batch 8 x 64 tokens, 2 microbatches per replica, "
        "ring reduction",
    ),
    "--dp 2 --ep 2 --model mixtral --experts 4 --top-k 1 --reduction ordered": (
        "Mixtral with 12,345 parameters (2 layers, hidden 128, 4 heads on 4 of keys and values, 4 experts of which a "
        "token goes through 1, float32) on 6,789 tokens of a\\ntext",
        "2 ranks: --dp 2 --ep 2, global batch 8 x 64 tokens, 1 microbatch per replica, ordered reduction",
    ),
}


@pytest.mark.parametrize("flags", DESCRIBED)
def test_a_run_begins_with_its_model_data_and_layout(flags):
    config = config_for(f"{ALONE} {flags}")
    ranks = config.mesh.dp * config.mesh.tp
    model, layout = DESCRIBED[flags]
    assert describe(config, ranks, 12345, 6789, "a\ntext") == f"minipar: {model}\nminipar: {layout}"


def test_every_file_that_was_written_is_named_with_its_flag():
    flags = "--metrics m --trace t --memory l --record r --save c --export e"
    names = "m (--metrics), t (--trace), l (--memory), r (--record), c (--save), e (--export)"
    assert written(parse(flags.split())) == names
    assert written(parse([])) == "" and written(parse(["--metrics", "-"])) == ""
    assert written(parse(["--export", "a\nb"])) == "a\\nb (--export)"


def test_rank_0_alone_prints():
    for argv, stream in (([], sys.stdout), (["--metrics", "-"], sys.stderr)):
        assert progress_stream(parse(argv)) is progress_stream(parse(argv), 0) is stream
        assert progress_stream(parse(argv), 1) is None


# ---- progress --------------------------------------------------------------------------------------------------------


class Clock:
    """A clock that the test moves."""

    now = 100.0

    def __call__(self):
        return self.now


def lines_of(steps, seconds, first=0, **report):
    """The lines of a run of steps of so many seconds, nothing but steps."""
    clock, stream = Clock(), StringIO()
    progress = Progress(steps, stream, done=first, clock=clock)
    for step in range(first, steps):
        clock.now += seconds
        progress(StepResult(step, 0.5, 1.25, 0.1, 12345.6, **report))
    return stream.getvalue().splitlines()


@pytest.mark.parametrize(
    ("steps", "reported"),
    [
        (3, [1, 2, 3]),
        (19, list(range(1, 20))),
        (20, [*range(1, 20, 2), 20]),
        (25, list(range(1, 26, 2))),
        (100, [*range(1, 100, 10), 100]),
    ],
)
def test_every_tenth_part_of_a_run_has_a_line(steps, reported):
    assert [int(line.removeprefix("step").partition("/")[0]) for line in lines_of(steps, 0.0)] == reported


def test_a_line_has_the_step_its_values_and_the_time_left():
    loss = "loss 0.5000  grad norm 1.250  12,346 tokens/s"
    assert lines_of(12, 30.0, first=9, skipped=0) == [
        f"step 10/12  {loss}  0:01:00 left", f"step 11/12  {loss}  0:00:30 left", f"step 12/12  {loss}",
    ]  # fmt: skip
    assert lines_of(3, 0.75, skipped=1)[0] == f"step 1/3  {loss}  0:00:02 left  1 steps skipped"
    assert lines_of(2, 1.0) == [f"step 1/2  {loss}  0:00:01 left", f"step 2/2  {loss}"]
    assert lines_of(2, 0.9)[0] == f"step 1/2  {loss}"  # less than a second


def test_a_step_that_ends_after_ten_seconds_has_a_line():
    """It also has one if the next step would end later: each step of 5 seconds, and each second one of 4.9 seconds."""
    assert len(lines_of(100, 5.0)) == 100
    assert len(lines_of(100, 4.9)) == 50 + 1  # and the last one


def test_the_thread_waits_until_silence_is_over():
    """It looks again after what is left of ten seconds, and at once if they are over."""
    clock, waits = Clock(), []
    progress = Progress(3, StringIO(), clock=clock)
    progress._ended.wait = lambda seconds: waits.append(seconds) or True
    for now in (100.0, 109.5, 112.0):
        clock.now = now
        progress._watch()
    assert waits == [10.0, 0.5, 0.0]
    assert progress._thread.daemon and progress._thread.name == "progress"


# ---- files that are proved and written -------------------------------------------------------------------------------


def outputs(**paths):
    return parse([text for name, path in paths.items() for text in (f"--{name}", str(path))])


def test_who_reads_the_metrics_pipe_is_not_told_of_an_end(tmp_path):
    """It is opened once, when the training writes to it."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    opened = []
    original = module.open_to_append
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "open_to_append", lambda path: opened.append(path) or original(path))
            prepare_outputs(outputs(metrics=pipe, trace=tmp_path / "trace"))
            assert opened == [str(tmp_path / "trace")]
            Metrics(str(pipe)).close()
            assert opened == [str(tmp_path / "trace"), str(pipe)]
    finally:
        os.close(reader)


def test_an_export_directory_is_proved_with_a_file_in_it(tmp_path, monkeypatch):
    tried = []

    def refuse(dir=None):
        tried.append(dir)
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    with pytest.raises(UsageError, match="^--export .*model cannot be written: Read-only file system$"):
        prepare_outputs(outputs(export=tmp_path / "model"))
    assert tried == [str(tmp_path / "model")]


def test_a_new_run_refuses_a_directory_of_checkpoints(tmp_path):
    (tmp_path / "step-00000001").mkdir()
    but = "holds a checkpoint of step 1, but this run starts at step 0: --resume that one, or save to another directory"
    with pytest.raises(UsageError) as refused:
        prepare_outputs(outputs(save=tmp_path))
    assert str(refused.value) == f"--save {tmp_path} {but}"
    prepare_outputs(outputs(save=tmp_path), 1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


LINE = '{"step": %d, "loss": 0.5, "grad_norm": 1.0, "seconds": 0.1, "tokens_per_second": 10.0}\n'


@pytest.mark.parametrize(("first", "kept"), [(0, 0), (1, 1), (2, 2), (3, 3), (9, 3)])
def test_metrics_keep_the_lines_before_the_first_step(first, kept, tmp_path):
    path = tmp_path / "m.jsonl"
    earlier = "".join(LINE % step for step in range(3))
    path.write_text(earlier + '{"step": 3, "lo')
    metrics = Metrics(str(path), first)
    assert path.read_text() == "".join(LINE % step for step in range(kept))
    metrics.write(StepResult(5, 0.5, 1.0, 0.1, 10.0))
    assert path.read_text() == "".join(LINE % step for step in range(kept)) + LINE % 5  # at once
    metrics.close()
    assert metrics.file.closed


def test_a_run_from_the_start_replaces_earlier_metrics(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text(LINE % 0)
    Metrics(str(path)).close()
    assert path.read_text() == ""
