"""Claims about what a run prints and writes, how it ends, and which paths it refuses before it trains."""

import json
import re
import signal

import numpy as np
import pytest

from minipar.comm import run_local, serial
from minipar.compare.differences import main as compare
from minipar.errors import UsageError
from minipar.nn import GPT, GPTConfig
from minipar.train import __main__ as program
from minipar.train.pretrained import load_pretrained, save_pretrained
from minipar.train.trainer import Trainer

TINY = "--layers 1 --hidden 16 --heads 2 --seq-len 16 --global-batch 6 --steps 3"


def run(flags, ranks=1):
    """Run `python -m minipar.train` on threads; return the exit code of each rank."""

    def rank(comm):
        return program.run(comm, f"{TINY} {flags}".split())

    with np.errstate(), pytest.MonkeyPatch.context() as patch:  # the program changes the process's settings
        if ranks == 1:
            return [rank(serial())]
        patch.setattr(program, "noted_signals", list)  # only a process's main thread may change its handlers
        return run_local(ranks, rank)


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


# ---- files -----------------------------------------------------------------------------------------------------------


def test_any_number_of_ranks_writes_the_same_files(tmp_path):
    losses = []
    for ranks in (1, 3):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        files = f"--metrics {folder}/m.jsonl --trace {folder}/t.json --clock cpu --export {folder}/gpt2"
        assert run(f"--dtype float64 --reduction ordered --microbatches 2 {files}", ranks) == [0] * ranks
        lines = rows(folder / "m.jsonl")
        assert [set(line) for line in lines] == [{"step", "loss", "grad_norm", "tokens_per_second"}] * 3
        assert [line["step"] for line in lines] == [0, 1, 2]
        events = json.loads((folder / "t.json").read_text())["traceEvents"]
        for rank in range(ranks):
            names = [e["name"] for e in events if e["ph"] == "X" and (e["pid"], e["cat"]) == (rank, "computation")]
            assert names.count("forward") == names.count("backward") == 6 and names.count("optimizer") == 3
        assert load_pretrained(folder / "gpt2").config == GPTConfig(256, 16, 16, 1, 2)
        losses.append([line["loss"] for line in lines])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-12)


def test_a_resumed_run_adds_to_its_metrics_another_begins_them(tmp_path):
    flags = f"--metrics {tmp_path}/m.jsonl --save {tmp_path}/run --dtype float64"
    assert run(flags, 2) == [0, 0]
    first = rows(tmp_path / "m.jsonl")
    assert run(f"{flags} --resume {tmp_path}/run --steps 5", 3) == [0] * 3
    again = rows(tmp_path / "m.jsonl")
    assert again[:3] == first and [row["step"] for row in again] == [0, 1, 2, 3, 4]
    assert run(f"--metrics {tmp_path}/m.jsonl") == [0]
    assert [row["step"] for row in rows(tmp_path / "m.jsonl")] == [0, 1, 2]


def test_evaluations_come_every_n_steps_and_at_the_end(tmp_path, capsys):
    assert run(f"--metrics {tmp_path}/m.jsonl --eval-every 2 --steps 5", 2) == [0, 0]
    lines = rows(tmp_path / "m.jsonl")
    assert ["eval_loss" in row for row in lines] == [False, True, False, True, True]
    printed = capsys.readouterr().out
    assert [f"eval loss {row['eval_loss']:g}" in printed for row in lines if "eval_loss" in row] == [True] * 3


def test_a_record_is_compared_with_that_of_one_rank(tmp_path, capsys):
    """--record, and `minipar compare`, which says that they do not differ, with exit code 0, or that they do."""
    for name, ranks, flags in (("one", 1, ""), ("two", 2, "--tp 2"), ("other", 1, "--seed 1")):
        assert run(f"--dtype float64 --record {tmp_path}/{name} {flags}", ranks) == [0] * ranks
        files = {path.name for path in (tmp_path / name).iterdir()}
        assert files == {"run.json", "step-0.npz", "step-1.npz", "step-2.npz"}
    assert compare([str(tmp_path / "one"), str(tmp_path / "two")]) == 0
    assert compare([str(tmp_path / "one"), str(tmp_path / "other")]) == 1
    with pytest.raises(UsageError, match=f"{tmp_path}/one"):
        run(f"--record {tmp_path}/one")


def test_a_model_directory_trains_on_from_its_weights(tmp_path):
    model = GPT(GPTConfig(300, 32, 16, 2, 4), seed=9, dtype="float64")
    save_pretrained(model, tmp_path / "start")
    np.random.Generator(np.random.Philox(1)).integers(0, 300, 2000).astype("<u2").tofile(tmp_path / "tokens.bin")
    flags = f"--init-from {tmp_path}/start --data {tmp_path}/tokens.bin --seq-len 16 --global-batch 4 --steps 2"
    flags += f" --lr 1e-9 --dtype float64 --reduction ordered --verify --export {tmp_path}/end --zero-stage 3"
    assert run_local(2, lambda comm: program.run(comm, flags.split())) == [0, 0]
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


@pytest.mark.parametrize("name", ["metrics", "trace", "memory", "export", "save", "record"])
def test_a_path_that_cannot_be_written_is_refused_at_the_start(tmp_path, name, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(Trainer, "step", None)
    for ranks in (1, 2):
        with pytest.raises(UsageError, match=f"{tmp_path}/file"):
            run(f"--{name} {tmp_path}/file/x", ranks)


# ---- the end ---------------------------------------------------------------------------------------------------------


def test_verify_is_the_exit_code(capsys, monkeypatch):
    assert run("--dtype float64 --verify --tp 2", 2) == [0, 0]
    assert "verify: 2 ranks = 1 device" in capsys.readouterr().out
    monkeypatch.setattr(program, "Trainer", type("Wrong", (Trainer,), {"send_tied_weight": lambda self: None}))
    assert run("--dtype float64 --verify --pp 2 --layers 2", 2) == [1, 1]
    assert "verify: FAILED" in capsys.readouterr().out


def test_each_line_begins_with_the_step_and_the_last_is_shown(capsys):
    assert run("--steps 12") == [0]
    lines = capsys.readouterr().out.splitlines()
    steps = [line for line in lines if line.startswith("step")]
    assert "minipar: gpt2 with 7,664 parameters" in lines[0] and "from step 1 on" in lines[1]
    assert re.match(r"step  1/12  loss \d+\.\d{4}  grad norm \d", steps[0]) and steps[-1].startswith("step 12/12  loss")
    assert len(steps) < 6  # at most one in some seconds between them


@pytest.mark.parametrize(
    ("ranks", "flags"), [(1, ""), (2, "--zero-stage 3"), (2, "--tp 2"), (2, "--pp 2 --layers 2"), (3, "--dp 3")]
)
def test_a_loss_that_is_not_finite_ends_the_run(ranks, flags, tmp_path, capsys):
    """With the step, a rank and a parameter. Nothing is saved, and NumPy does not warn."""
    with pytest.raises(UsageError) as caught:
        run(f"--steps 9 --lr 3e38 --save {tmp_path} --export {tmp_path} {flags}", ranks)
    message = str(caught.value)
    assert re.search(r" step [2-4] \(rank \d, \w+\.[\w.]+\)", message), message
    assert "--lr" in message and "3e+38" in message and "\n" not in message
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().err == ""


def test_one_rank_with_a_bad_gradient_is_named_on_all(monkeypatch):
    def spoil(self, step, right=Trainer.gradient):
        loss = right(self, step)
        if step == 1 and self.mesh.world.rank == 2:
            self.ddp.parameters()[3].grad.reshape(-1)[-1:] = np.inf
        return loss

    monkeypatch.setattr(Trainer, "gradient", spoil)

    def rank(comm):
        with pytest.raises(UsageError) as caught:
            program.run(comm, f"{TINY} --zero-stage 2 --steps 5".split())
        return str(caught.value)

    with np.errstate():
        messages = run_local(3, rank)
    assert len(set(messages)) == 1
    assert "step 2 " in messages[0] and "rank 2, " in messages[0]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_finishes_the_step_saves_and_says_so(number, tmp_path, monkeypatch, capsys):
    def raise_in_step(self, step, right=Trainer.step):
        if step == 1:
            signal.raise_signal(number)
        return right(self, step)

    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
    try:
        with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as leaving:
            patch.setattr(Trainer, "step", raise_in_step)
            run(f"--steps 9 --save {tmp_path}")
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    assert leaving.value.code == 128 + number
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]
    last = capsys.readouterr().out.splitlines()[-1]
    assert number.name in last and "step 2" in last and f"--resume {tmp_path}" in last
