"""Claims about what a configuration makes: the model, its limit of memory, a step's loss and seconds, and its files."""

import json
import os
from types import SimpleNamespace

import numpy as np
import pytest
from training import config_for, on_each_rank, ranks_of, trainer_for

from minipar.comm import run_local
from minipar.errors import UsageError
from minipar.memory import KINDS, MemoryLedger
from minipar.nn import GPT, GPTConfig
from minipar.nn.moe import moe_layers
from minipar.nn.parameter import Parameter
from minipar.nn.pretrained import save_pretrained
from minipar.record import measure
from minipar.train import checkpoint
from minipar.train import trainer as trainer_module
from minipar.train.checkpoint import prepare_directory
from minipar.train.config import parse
from minipar.train.data import Tokens
from minipar.train.from_config import make_model, refuse_export_of_biases
from minipar.train.recording import Recorder

TEXT = Tokens((np.arange(500) % 16).astype(np.uint8), "a text", 16)
SMALL = "--layers 2 --hidden 8 --heads 2 --seq-len 8 --vocab-size 16 --global-batch 8 --steps 2"


def config_of(flags=""):
    return config_for(f"{SMALL} {flags}")


# ---- the model -------------------------------------------------------------------------------------------------------


def values_of(config, made=None):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Parameter, "materialize", None)  # no parameter gets its values yet
        model = make_model(config, made)
    assert all(p.make is not None for p in model.parameters())
    model.materialize()
    return {name: p.data.copy() for name, p in model.named_parameters()}


def test_a_model_has_no_values_until_they_are_asked_for(tmp_path):
    """Those of the seed, of a model directory, or of a checkpoint, each in the run's dtype."""
    drawn = values_of(config_of("--seed 7 --dtype float64"))
    assert np.array_equal(drawn["wte.weight"], GPT(GPTConfig(16, 8, 8, 2, 2), seed=7, dtype="float64").wte.weight.data)
    save_pretrained(GPT(GPTConfig(16, 8, 8, 2, 2), seed=3), tmp_path / "model")
    config = config_of("--seed 7 --dtype float64")
    start = config_for(f"--init-from {tmp_path}/model --seq-len 8 --global-batch 8 --dtype float64", 1)
    read = values_of(start)
    assert read["wte.weight"].dtype == "float64"
    assert np.array_equal(read["wte.weight"], GPT(GPTConfig(16, 8, 8, 2, 2), seed=3).wte.weight.data)
    trainer = trainer_for(config, TEXT)
    trainer.save(tmp_path / "run", 1)
    place = tmp_path / "run" / "step-00000001"
    saved = checkpoint.Checkpoint(place, (place / "manifest.json").read_bytes())
    assert all(np.array_equal(values, drawn[name]) for name, values in values_of(config, saved).items())


@pytest.mark.parametrize("flags", ["--dp 4", "--dp 2 --cp 2", "--cp 2 --tp 2", "--tp 2 --pp 2"])
def test_the_least_memory_is_that_of_a_rank_of_four(flags):
    config = config_for(f"--layers 1000000000000 --seq-len 8 --global-batch 8 {flags}")
    with pytest.raises(UsageError, match=r"parameters \* 16 bytes / 4 = "):
        make_model(config)


def test_a_model_that_is_not_trained_is_held_by_one_process():
    """`minipar.generate` makes such a model: its configuration has no number of ranks."""
    with pytest.raises(UsageError, match=r"parameters \* 16 bytes / 1 = "):
        make_model(parse(["--layers", "1000000000000"]))


# ---- the limit of memory ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ("--zero-stage 0", (1, 1, 1)),
        ("--zero-stage 1", (1, 1, 2)),
        ("--zero-stage 2", (1, 2, 2)),
        ("--zero-stage 3", (2, 2, 2)),
        ("--zero-stage 2 --microbatches 2 --sync-every-microbatch", (1, 2, 2)),
        ("--zero-stage 1 --microbatches 2", (1, 1, 2)),
    ],
)
def test_a_limit_counts_what_each_of_two_ranks_holds(flags, parts):
    """The model has 2,136 parameters, and a rank holds half of whatever is sharded."""
    config = config_of(f"--dp 2 {flags} --memory-limit 1KB")
    with pytest.raises(UsageError) as caught:
        on_each_rank(config, TEXT, lambda *_: None)
    size = trainer_for(config_of(), TEXT).size
    held = [size // part for part in parts]
    terms = f"4*{held[0]:,} (parameters) + 4*{held[1]:,} (gradients) + 8*{held[2]:,} (optimizer)"
    total = f"{4 * held[0] + 4 * held[1] + 8 * held[2]:,}"
    stage = flags.split()[1]
    assert f"but --zero-stage {stage} on 2 data-parallel ranks holds {terms} = {total} bytes" in str(caught.value)
    assert ("whole gradients while microbatches accumulate" in str(caught.value)) is (flags.endswith("batches 2"))


def test_a_limit_counts_the_ranks_that_share_a_state():
    """Those of one group of replicas, and of the parts of a sequence too."""
    for flags, ranks in (("--dp 4 --zero-replicas 2", 2), ("--dp 2 --cp 2", 4), ("--cp 2", 2)):
        config = config_of(f"{flags} --zero-stage 1 --memory-limit 1KB")
        with pytest.raises(UsageError, match=f"--zero-stage 1 on {ranks} data-parallel ranks holds "):
            on_each_rank(config, TEXT, lambda *_: None)


# ---- biases of routers -----------------------------------------------------------------------------------------------

MIXTRAL = "--model mixtral --experts 2 --ffn 8"


def test_an_export_has_no_place_for_biases(tmp_path):
    """Those that the flag will make, or that a checkpoint has."""
    line = "^--export: a Mixtral's files have no place for the biases of --router-bias; --save has$"
    export = f"--export {tmp_path}/model"
    for flags, bias, refused in (
        (f"--router-bias 0.01 {export}", 0.0, True),
        (f"--router-bias 1.5 {export}", 0.0, True),
        (export, 0.25, True),
        (export, 0.0, False),
        ("--router-bias 0.01", 0.25, False),
    ):
        config = config_of(f"{MIXTRAL} {flags}")
        model = make_model(config)
        layers = moe_layers(model)
        layers[1].bias[1] = bias
        if refused:
            with pytest.raises(UsageError, match=line):
                refuse_export_of_biases(config, model)
        else:
            refuse_export_of_biases(config, model)


# ---- a step ----------------------------------------------------------------------------------------------------------


def test_the_loss_of_one_target_is_its_own():
    config = config_for("--layers 1 --hidden 8 --heads 2 --seq-len 1 --vocab-size 16 --global-batch 1 --steps 1")
    trainer = trainer_for(config, TEXT)
    inputs, targets = trainer.batches.batch(0, [0])
    assert trainer.compute_gradient(0) == trainer.model.loss_sum(inputs, targets).item()


def test_what_reports_do_is_no_part_of_a_steps_seconds(monkeypatch):
    """The clock moves by 1 s in a forward, by 10 s where gradients are recorded, and by 100 s after the step."""
    now = [1000.0]
    monkeypatch.setattr(trainer_module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    trainer = trainer_for(config_of("--microbatches 2"), TEXT)
    loss_sum = trainer.model.loss_sum

    def move(seconds, result=None):
        now[0] += seconds
        return result

    trainer.model.loss_sum = lambda *batch: move(1.0, loss_sum(*batch))
    trainer.gradient_callbacks += [lambda: move(10.0), lambda: move(10.0)]
    trainer.step_callbacks.append(lambda result: move(100.0))
    assert [(result.seconds, result.tokens_per_second) for result in trainer.train()] == [(2.0, 32.0)] * 2


def phases_of(flags):
    """Each rank's phases of a step, in the ledger of memory, each as often as it began anew."""
    config = config_of(flags)

    def rank(comm):
        with MemoryLedger().recording() as ledger:
            trainer_for(config, TEXT, comm).step(0)
        names = [name for name, _ in ledger.moments]
        return [name for number, name in enumerate(names) if number == 0 or names[number - 1] != name]

    return run_local(ranks_of(config), rank)


def test_a_step_is_forward_backward_and_the_optimizer():
    """In a pipeline each stage alternates as its schedule says: 1F1B of 2 ranks and 2 microbatches."""
    assert phases_of("") == [["forward", "backward", "optimizer"]]
    assert phases_of("--microbatches 2") == [["forward", "backward"] * 2 + ["optimizer"]]
    first, last = ["forward", "backward", "optimizer"], ["forward", "backward"] * 2 + ["optimizer"]
    assert phases_of("--pp 2 --microbatches 2") == [first, last]


def test_the_leaves_of_a_tree_are_buffers():
    """Each microbatch's gradients are copied, so at the end of backward as many bytes are held besides."""
    with MemoryLedger().recording() as ledger:
        trainer = trainer_for(config_of("--reduction tree --microbatches 8"), TEXT)
        trainer.step(0)
    most = max(held[KINDS.index("buffers")] for phase, held in ledger.moments if phase == "backward")
    assert most >= 4 * trainer.size


# ---- files -----------------------------------------------------------------------------------------------------------


def test_a_record_has_the_runs_facts_and_what_each_step_made(tmp_path):
    """Until it is stopped."""
    config = config_of("--dp 2 --microbatches 2 --clip-grad 0.01 --dtype float64")

    def rank(comm):
        trainer = trainer_for(config, TEXT, comm)
        recorder = Recorder(trainer, str(tmp_path / "record"))
        before = trainer.state_dict()
        result = trainer.step(0)
        recorder.stop()
        trainer.step(1)
        return before, recorder.gradients, result.grad_norm

    (before, gradients, norm), (_, others, _) = run_local(2, rank)
    assert others == {} and sorted(path.name for path in (tmp_path / "record").iterdir()) == ["run.json", "step-0.npz"]
    facts = json.loads((tmp_path / "record" / "run.json").read_text())
    shapes = facts.pop("shapes")
    assert shapes == {name: list(values.shape) for name, values in before.items()}
    axes = {"dp": 2, "cp": 1, "ep": 1, "tp": 1, "pp": 1}
    assert facts == axes | {"microbatches": 2, "tokens": 64, "dtype": "float64"}
    whole = np.sqrt(sum((values**2).sum() for values in gradients.values()))
    assert whole == pytest.approx(norm) and norm > 0.01  # before they were clipped
    with np.load(tmp_path / "record" / "step-0.npz") as file:
        for name, values in gradients.items():
            assert np.array_equal(file[f"gradient/{name}"], measure(name, values))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_save_that_fails_leaves_nothing_half_written(ranks, tmp_path, monkeypatch):
    """Every rank raises the error, whichever rank it was."""
    config = config_of(f"--dp {ranks}")
    made = []

    def full(tensors):
        made.append(tensors)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "serialize", full)

    def rank(comm):
        with pytest.raises(UsageError) as caught:
            trainer_for(config, TEXT, comm).save(tmp_path / "a" / "run", 1)
        return str(caught.value)

    line = f"--save {tmp_path}/a/run: rank 0: [Errno 28] No space left on device"
    assert run_local(ranks, rank) == [line] * ranks
    assert len(made) == ranks and list((tmp_path / "a" / "run").iterdir()) == []


def test_a_save_closes_what_it_opens(tmp_path):
    trainer = trainer_for(config_of(), TEXT)
    trainer.save(tmp_path / "run", 1)
    before = len(os.listdir("/proc/self/fd"))
    trainer.save(tmp_path / "run", 2)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_directory_to_save_into_is_made_with_those_above(tmp_path):
    prepare_directory(str(tmp_path / "a" / "b" / "run"), 0)
    assert list((tmp_path / "a" / "b" / "run").iterdir()) == []
    prepare_directory(str(tmp_path / "a" / "b" / "run"), 0)


def test_ranks_write_what_they_own_once(tmp_path):
    config = config_of("--dp 2 --zero-stage 1")
    on_each_rank(config, TEXT, lambda trainer, _: trainer.save(tmp_path, 2))
    manifest = json.loads((tmp_path / "step-00000002" / "manifest.json").read_text())
    elements = [sum(piece["stop"] - piece["start"] for piece in file["pieces"]) for file in manifest["files"]]
    size = trainer_for(config_of(), TEXT).size
    assert sum(elements) == size and elements[0] - elements[1] in (0, 1) and ranks_of(config) == 2
    assert [file["bytes"] for file in manifest["files"]] == [
        os.path.getsize(tmp_path / "step-00000002" / file["name"]) for file in manifest["files"]
    ]
