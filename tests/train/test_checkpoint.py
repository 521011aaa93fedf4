"""Claims about checkpoints: resuming is never having stopped, whatever layout wrote them and whatever goes on.

tests/release/train/test_checkpoint.py has more pairs of layouts.
"""

import json
from dataclasses import replace

import numpy as np
import pytest
from combinations import TEXT, config_of
from training import bits, on_each_rank, ranks_of, reports, run_until, trainer_for

from chapters.support.whole_runs import relative_difference
from minipar.comm import run_local
from minipar.parallel.state import gather_state
from minipar.train import checkpoint
from minipar.train.flags import KEPT, parse
from minipar.train.pretrained import load_pretrained, save_pretrained

RUN = "--layers 4 --hidden 20 --heads 4 --seq-len 8 --global-batch 24 --steps 4 --weight-decay 0.1"
BITS = "bit for bit"
THREE_AXES = "--dp 2 --tp 2 --pp 2 --microbatches 2 --zero-stage 3"
ULYSSES = "--cp 2 --context-parallel ulysses"
TREE = "--reduction tree --vocab-size 16 --global-batch 8"
MIXTRAL = "--model mixtral --hidden 16 --kv-heads 2 --experts 4"
PAIRS = [  # written under one and resumed under the other
    ("--dropout 0.1", "--dropout 0.1", BITS),
    ("--dp 3 --dropout 0.1", "--dp 3 --dropout 0.1", BITS),
    ("--dp 8 --zero-stage 3", "--dp 8 --zero-stage 3", BITS),
    (THREE_AXES, THREE_AXES, BITS),
    ("--dp 2 --microbatches 2 --zero-stage 1", "--dp 2 --pp 4 --microbatches 2 --schedule zb-h1 --zero-stage 2", BITS),
    ("--dp 2 --pp 2 --microbatches 2 --schedule interleaved-1f1b", "--dp 2 --microbatches 2 --zero-stage 3", BITS),
    (f"{TREE} --tp 2 --dp 2 --zero-stage 1", f"{TREE} --pp 4", BITS),
    ("--dp 3 --zero-stage 2 --reduction ring", "--tp 2 --sequence-parallel", ""),
    ("--tp 4", THREE_AXES, ""),
    ("--dp 3 --tp 2 --zero-stage 1 --sequence-parallel", "--dp 4 --zero-stage 3 --zero-replicas 2", ""),
    ("--pp 3 --tp 2 --microbatches 3 --schedule gpipe", "--dp 8 --zero-stage 3", ""),
    (f"{ULYSSES} --zero-stage 1", f"{ULYSSES} --tp 2", ""),
    (f"{MIXTRAL} --ep 2 --dp 2 --zero-stage 1", f"{MIXTRAL} --tp 2 --pp 2 --microbatches 2", ""),
]


def config_for(flags):
    return config_of(f"{RUN} {flags}")


@pytest.mark.parametrize(("saved", "resumed", "how"), PAIRS)
def test_resuming_under_any_layout_is_never_having_stopped(saved, resumed, how, tmp_path):
    """To the bit where the layout is the same or adds in the same order; else within the bound of so many steps."""
    state, whole = run_until(TEXT, config_for(resumed))
    run_until(TEXT, config_for(saved), tmp_path, 2)
    again, later = run_until(TEXT, config_for(f"{resumed} --resume {tmp_path}"))
    if how == BITS:
        assert bits(again) == bits(state) and later == whole[2:]
        return
    assert max(relative_difference(again[name], state[name]) for name in state) <= 4e-12
    np.testing.assert_allclose(later, whole[2:], rtol=4e-12)


def test_a_device_saves_and_resumes_too(device, tmp_path):
    flags = "--dp 2 --zero-stage 2"
    state, whole = run_until(TEXT, config_for(flags))
    run_until(TEXT, config_for(flags), tmp_path, 1)
    again, later = run_until(TEXT, config_for(f"{flags} --resume {tmp_path}"))
    assert bits(again) == bits(state) and later == whole[1:]


# ---- the state -------------------------------------------------------------------------------------------------------


def all_state(trainer):
    """Every field of the optimizer's and the loss scale's state, on rank 0: arrays of the serial model, and numbers."""
    optimizer, world = trainer.optimizer, trainer.mesh.world
    arrays = {"data": [p.data for p in optimizer.parameters], "value": optimizer.values()}
    arrays |= {"exp_avg": optimizer.exp_avg, "exp_avg_sq": optimizer.exp_avg_sq}
    found = dict(trainer.extra)
    for kind, values in arrays.items():
        whole = gather_state(trainer.model, optimizer.parameters, world, values)
        found |= {f"{kind} of {name}": array.tobytes() for name, array in whole.items()}
    for name in ("steps", "betas", "eps", "weight_decay"):
        found[name] = getattr(optimizer, name)
    return found


WRITERS = {
    "float64": "--betas 0.8 0.95",
    "bf16, which has masters": "--dtype bfloat16",
    "fp16, whose first steps are skipped": "--dtype float16",
}
READERS = ["--dp 2 --zero-stage 1", "--dp 1", "--dp 3 --zero-stage 3", "--tp 4", "--pp 2 --dp 2"]


def with_large_scale(trainer, dtype):
    """In fp16 the first gradients overflow, and their steps are skipped."""
    if dtype == "float16":
        trainer.scale.values["factor"] = 2.0**22
    return trainer


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("writer", WRITERS)
def test_each_field_of_the_state_is_that_of_the_writer(writer, tmp_path):
    """Values, moments, masters, the count of updates, the loss scale with its counts: in the same and other layouts."""
    config = config_for(f"{WRITERS[writer]} --dp 2 --zero-stage 1")

    def write(comm):
        trainer = with_large_scale(trainer_for(config, TEXT, comm), config.dtype)
        for step in range(3):
            trainer.step(step)
        checkpoint.save(trainer, str(tmp_path), 3)
        return all_state(trainer)

    written = run_local(2, write)[0]
    assert {"value of ln_f.bias", "exp_avg of ln_f.bias", "exp_avg_sq of ln_f.bias", "steps", "betas"} <= written.keys()
    if config.dtype == "float16":
        assert 0 < written["steps"] < 3 == written["steps"] + written["skipped"]
    for reader in READERS:
        reading = config_for(f"{WRITERS[writer]} {reader} --resume {tmp_path}")
        read = run_local(ranks_of(reading), lambda comm, c=reading: all_state(trainer_for(c, TEXT, comm)))[0]
        assert {name for name in written if read[name] != written[name]} == set(), reader
        assert set(read) == set(written)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_run_goes_on_after_a_skipped_step(tmp_path):
    flags = "--dtype float16 --dp 2 --zero-stage 2"

    def rank(comm, config, stop):
        trainer = trainer_for(config, TEXT, comm)
        if config.resume is None:
            with_large_scale(trainer, config.dtype)
        results = []
        for result in trainer.train():
            results.append(result)
            if result.step + 1 == stop:
                checkpoint.save(trainer, str(tmp_path), stop)
        return reports(results), all_state(trainer)

    whole, state = run_local(2, rank, config_for(flags), 1)[0]
    assert not np.isfinite(whole[0][1]) and np.isfinite(whole[-1][1])
    assert run_local(2, rank, config_for(f"{flags} --resume {tmp_path}"), None)[0] == (whole[1:], state)


@pytest.mark.parametrize("stage", [1, 3])
def test_an_export_from_three_axes_is_the_serial_model(stage, tmp_path):
    single, _ = run_until(TEXT, config_for(""))

    def export(trainer, results):
        state = trainer.state_dict()
        if state:
            save_pretrained(trainer.model, tmp_path, state)

    on_each_rank(config_for(f"--dp 2 --tp 2 --pp 2 --microbatches 2 --zero-stage {stage}"), TEXT, export)
    exported = load_pretrained(tmp_path, dtype="float64").state_dict()
    assert list(exported) == list(single)
    assert all(relative_difference(exported[name], single[name]) <= 4e-12 for name in single)


# ---- the directory ---------------------------------------------------------------------------------------------------


def test_the_files_are_the_serial_models_arrays(tmp_path):
    """What anyone reads with NumPy: by the serial model's names, in its shapes, of the step that run.json names."""
    state, _ = run_until(TEXT, config_for("--dp 2 --tp 2 --zero-stage 1"), tmp_path, 3)
    folder = tmp_path / "step-00000003"
    saved = {name: np.load(folder / "parameter" / f"{name}.npy", allow_pickle=False) for name in state}
    assert bits(saved) == bits(state)
    names = {f"{name}.npy" for name in state}
    for kind in ("parameter", "exp_avg", "exp_avg_sq"):
        assert {path.name for path in (folder / kind).iterdir()} == names
    run = json.loads((folder / "run.json").read_text())
    assert (run["step"], run["optimizer_steps"], run["flags"]["tp"]) == (3, 3, 2)


@pytest.mark.parametrize("layout", ["--dp 2 --tp 2 --zero-stage 3", "--dp 3 --pp 2 --microbatches 2", "--dp 4"])
def test_a_resume_sends_no_array_but_the_tied_weight(layout, tmp_path):
    """Each rank reads its own part. A pipeline sends its tied weight, as after a step: over 3 replicas, thrice."""

    def arrays_sent(comm):
        return comm.traffic.bytes()

    run_until(TEXT, config_for(layout), tmp_path, 1)
    config = config_for(f"{layout} --resume {tmp_path}")
    sent = run_local(ranks_of(config), lambda comm: (trainer_for(config, TEXT, comm), arrays_sent(comm))[1])
    tied = 11 * 20 * 8
    assert sum(sent) == (3 * tied if "--pp" in layout else 0)


def test_every_checkpoint_is_kept_and_a_leftover_goes(tmp_path):
    leftover = tmp_path / "step-00000001.partial"
    leftover.mkdir()
    (leftover / "run.json").write_bytes(b"half of")
    (tmp_path / "metrics.jsonl").write_text("not a checkpoint, and not ours to remove\n")

    def rank(comm):
        trainer = trainer_for(config_for("--dp 2"), TEXT, comm)
        for result in trainer.train():
            checkpoint.save(trainer, str(tmp_path), result.step + 1)

    run_local(2, rank)
    kept = [f"step-{step:08d}" for step in (1, 2, 3, 4)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", *kept]


# ---- flags -----------------------------------------------------------------------------------------------------------


def test_a_resumed_run_takes_all_that_decides_its_values(tmp_path):
    given = (
        "--order sequential --lr 3e-3 --lr-schedule cosine --warmup-steps 2 --betas 0.8 0.95 "
        "--weight-decay 0.2 --dropout 0.2 --clip-grad 1 --seed 7 --eval-every 3"
    )
    written = config_for(f"--dp 2 --microbatches 2 {given}")
    run_until(TEXT, written, tmp_path, 2)
    taken = parse(["--resume", str(tmp_path)])
    assert taken.shape == written.shape
    assert {name: getattr(taken, name) for name in KEPT} == {name: getattr(written, name) for name in KEPT}
    default = vars(parse([]))
    names = [word[2:].replace("-", "_") for word in given.split() if word.startswith("--")]
    assert [name for name in names if default[name] == vars(taken)[name]] == []
    changed = parse(["--resume", str(tmp_path), "--steps", "9", "--lr", "0.5", "--pp", "4"], 4)
    assert (changed.steps, changed.lr, changed.pp, changed.betas) == (9, 0.5, 4, [0.8, 0.95])


def test_a_model_keeps_positions_beyond_its_sequence(tmp_path):
    """A model directory's, with more positions than a sample has tokens."""
    config = config_for("--seq-len 4")
    config.shape = replace(config.shape, n_positions=32)
    save_pretrained(config.shape.build(dtype="float64"), tmp_path / "gpt2")
    flags = f"--init-from {tmp_path}/gpt2 --seq-len 4"
    state, whole = run_until(TEXT, config_for(flags))
    run_until(TEXT, config_for(flags), tmp_path / "run", 2)
    again, later = run_until(TEXT, config_for(f"{flags} --resume {tmp_path}/run"))
    assert state["wpe.weight"].shape == (32, 20)
    assert bits(again) == bits(state) and later == whole[2:]
