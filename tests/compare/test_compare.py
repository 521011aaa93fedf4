"""Equal runs are equal in any layout, and a mistake is named by its group of parameters, its factor and its cause."""

import math
import re

import numpy as np
import pytest
from recorded import FACTS, MODEL, SERIAL, TEXT, times, write
from training import config_for, ranks_of, trainer_for

from minipar.comm import run_local
from minipar.compare.differences import as_text, compare
from minipar.compare.record import Record, strips
from minipar.compare.recorder import Recorder

LAYOUTS = [
    ("float64", "--dp 3 --zero-stage 2 --global-batch 6"),
    ("float32", "--tp 4 --sequence-parallel"),
    ("float64", "--dp 2 --tp 2 --pp 2 --zero-stage 1 --sequence-parallel --microbatches 2 --clip-grad 0.5"),
]


def record(directory, flags, dtype="float64"):
    """Train on threads and record in `directory`."""
    args = config_for(f"{MODEL} {flags} --dtype {dtype}")

    def rank(comm):
        recorder = Recorder(trainer_for(args, TEXT, comm), str(directory))
        return [recorder.step(step) for step in range(args.steps)]

    return run_local(ranks_of(args), rank)[0]


@pytest.mark.parametrize(("dtype", "flags"), LAYOUTS)
def test_the_record_of_a_layout_equals_one_devices(flags, dtype, tmp_path):
    values = re.findall(r"--(?:global-batch|clip-grad) \S+", flags)
    results = record(tmp_path / "many", flags, dtype)
    record(tmp_path / "one", " ".join(values), dtype)
    finding = compare(tmp_path / "one", tmp_path / "many")
    assert finding.equal and finding.steps == 3, finding.differences
    for result in results:
        with np.load(tmp_path / "many" / f"step-{result.step}.npz") as file:
            assert (file["loss"], file["grad_norm"]) == (result.loss, result.grad_norm)
            of_dim_0 = [file[f"gradient/{n}"][0, : strips(p.shape)[0]] for n, p in SERIAL.named_parameters()]
            norm = math.sqrt(sum((norms**2).sum() for norms in of_dim_0))
            assert norm == pytest.approx(result.grad_norm, rel=1e-12 if dtype == "float64" else 1e-5)


# ---- mistakes in a record --------------------------------------------------------------------------------------------


def part_of_rank_1(name, gradient):
    """Double what rank 1 of 4 has: columns of the first layers, rows of the second ones."""
    if "c_attn" in name:
        gradient.reshape(-1, 3, 4, 8)[:, :, 1] *= 2
    elif "c_fc" in name:
        gradient.reshape(-1, 4, 32)[:, 1] *= 2
    elif "c_proj.weight" in name:
        gradient.reshape(4, -1)[1] *= 2
    return gradient


MISTAKES = {
    "summed over dp": (times(3), 3, "all parameters", "3 = dp"),
    "divided by dp twice": (times(1 / 3), 1 / 3, "all parameters", "1/3 = 1/dp"),
    "the loss times cp": (times(5), 5, "all parameters", "5 = cp"),
    "not summed over cp": (times(1 / 5), 1 / 5, "all parameters", "1/5 = 1/cp"),
    "up to an attention": (times(7, r"wte|\.[01]\.|2.ln_1|2.attn.c_attn"), 7, "some from wte.weight to h.2.attn", ""),
    "a whole MLP": (times(7, "2.mlp"), 7, "h.2.mlp.c_fc.weight to h.2.mlp.c_proj.bias", ""),
    "microbatches forgotten": (times(8), 8, "all parameters", "8 = microbatches"),
    "a sum over tokens": (times(512), 512, "all parameters", "512 = tokens"),
    "a wrong sign": (times(-1), -1, "all parameters", "a wrong sign"),
    "norms summed over tp": (times(4, "ln_"), 4, "the norms", "4 = tp"),
    "row biases": (times(4, "c_proj.bias"), 4, "attn.c_proj.bias, mlp.c_proj.bias of every block", "4 = tp"),
    "biases": (times(4, "bias"), 4, "the biases", "4 = tp"),
    "the tied embedding": (times(2, "wte"), 2, "the token embedding", "2 = pp"),
    "the embeddings": (times(1 / 2, "wte|wpe"), 1 / 2, "the embeddings", "1/2 = 1/pp"),
    "a pipeline stage": (times(8, r"\.[23]\.|ln_f"), 8, "blocks 2 to 3 and ln_f.weight", "8 = micro"),
    "one block": (times(8, r"\.1\."), 8, "block 1", "8 = microbatches"),
    "all but the norms": (times(3, r"^((?!ln_).)*$"), 3, "all parameters but the norms", "3 = dp: "),
    "frozen positions": (times(0, "wpe"), 0, "wpe.weight", "missing in B"),
    "a tp rank": (part_of_rank_1, 2, "tp rank 1's part (of 4) of attn.c_attn.weight", "2 = pp"),
    "noise": (lambda name, gradient: gradient + np.indices(gradient.shape)[0], None, "all parameters", "other data"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named_by_group_factor_and_cause(name, tmp_path):
    change, ratio, group, cause = MISTAKES[name]
    write(tmp_path / "a")
    write(tmp_path / "b", change)
    finding = compare(tmp_path / "a", tmp_path / "b")
    assert finding.step == 0 and len(finding.differences) == 1
    found = finding.differences[0]
    assert found.quantity == "gradient" and found.group.startswith(group)
    assert found.ratio == (None if ratio is None else pytest.approx(ratio, rel=1e-9))
    assert any(text.startswith(cause) for text in found.causes) or not cause


@pytest.mark.parametrize("dtype", ["float32", "torch.bfloat16"])
def test_no_dtype_and_no_late_step_hides_a_factor(dtype, tmp_path):
    write(tmp_path / "a")
    write(tmp_path / "b", times(1.2))
    for name in "ab":
        folder = tmp_path / name
        (folder / "run.json").write_text((folder / "run.json").read_text().replace("float64", dtype))
        for step in (0, 1):
            (folder / f"step-{step}.npz").rename(folder / f"step-{step + 1000}.npz")
    found = compare(tmp_path / "a", tmp_path / "b").differences
    assert [(each.ratio, each.group) for each in found] == [(pytest.approx(1.2), "all parameters")]


def test_the_loss_the_norm_and_the_update_are_compared(tmp_path):
    write(tmp_path / "a")
    write(tmp_path / "log t", loss=5.0 + math.log(4))
    write(tmp_path / "norm", norm=2.0)
    write(tmp_path / "decay", decay=1e-3)
    for name, quantity, ratio, cause in (
        ("log t", "loss", 1 + math.log(4) / 5, "B - A = log 4 = log tp"),
        ("norm", "grad_norm", 2, "the root of 4 = tp"),
        ("decay", "update", None, "weight decay"),
    ):
        finding = compare(tmp_path / "a", tmp_path / name)
        found = finding.differences[0]
        assert (finding.step, found.quantity) == (0, quantity)
        assert found.ratio == (ratio if ratio is None else pytest.approx(ratio))
        assert any(text.startswith(cause) for text in found.causes), found.causes


@pytest.mark.parametrize(
    ("mistakes", "named"),
    [
        ({"change": times(2), "loss": 6.0, "norm": 2.0}, ["gradient", "loss"]),
        ({"norm": 2.0, "decay": 1e-3}, ["grad_norm"]),
    ],
)
def test_what_may_be_a_consequence_is_not_named(mistakes, named, tmp_path):
    write(tmp_path / "a")
    write(tmp_path / "b", **mistakes)
    assert [found.quantity for found in compare(tmp_path / "a", tmp_path / "b").differences] == named


def drifted(directory, sizes, factor=1.0, dtype="float32"):
    """Record a step for each size, by which gradients are off; in the last step they are multiplied by `factor`."""
    random = np.random.Generator(np.random.Philox(7))
    before = SERIAL.state_dict()
    written = Record(directory, before, **{**FACTS, "dtype": dtype})
    for step, size in enumerate(sizes):
        gradients = {name: random.standard_normal(values.shape) for name, values in before.items()}
        off = {name: random.standard_normal(values.shape) for name, values in before.items()}
        right = 1.0 if step + 1 < len(sizes) else factor
        changed = {name: right * gradients[name] + size * off[name] for name in gradients}
        written.step(step, 5.0, 1.0, changed, before)


@pytest.mark.parametrize(("dtype", "least"), [("float32", 1e-6), ("float64", 1e-15)])
def test_what_grows_from_rounding_is_named_with_a_test(dtype, least, tmp_path):
    drifted(tmp_path / "a", [0.0] * 8, dtype=dtype)
    drifted(tmp_path / "b", [least * 4**step for step in range(8)], dtype=dtype)
    finding = compare(tmp_path / "a", tmp_path / "b")
    assert finding.step is not None and finding.step > 3
    assert finding.may_be_rounding and "float64" in as_text(finding)


@pytest.mark.parametrize(
    ("sizes", "factor"),
    [([1e-6] * 7 + [0.3], 1.0), ([1e-6] * 8, 1.2), ([0.3] * 8, 1.0)],
    ids=["a jump", "a factor", "from step 0 on"],
)
def test_a_mistake_is_not_said_to_be_rounding(sizes, factor, tmp_path):
    drifted(tmp_path / "a", [0.0] * 8)
    drifted(tmp_path / "b", sizes, factor=factor)
    finding = compare(tmp_path / "a", tmp_path / "b")
    assert not finding.equal and not finding.may_be_rounding


def test_the_keys_bias_which_is_noise_is_no_difference(tmp_path):
    def noisy(sign):
        return lambda name, gradient: gradient if "wpe" not in name else sign * 1e-16 * gradient

    write(tmp_path / "a", noisy(1))
    write(tmp_path / "b", noisy(-1))
    assert compare(tmp_path / "a", tmp_path / "b").equal


@pytest.mark.parametrize(("dim", "strip"), [(0, 4), (1, 0)])
def test_the_strips_that_differ_are_named(dim, strip, tmp_path):
    gradients = {"a": np.random.default_rng(4).normal(size=(5, 4))}
    gradients["b"] = gradients["a"].copy()
    np.moveaxis(gradients["b"], dim, 0)[strip] *= 2
    for run in "ab":
        zeros = {"w": np.zeros((5, 4))}
        Record(tmp_path / run, zeros).step(0, 5.0, 1.0, {"w": gradients[run]}, zeros)
    (found,) = compare(tmp_path / "a", tmp_path / "b").differences
    count = gradients["a"].shape[dim]
    assert found.group == f"1 of {count} strips ({strip} to {strip}) along dim {dim} of all parameters"


@pytest.mark.parametrize("gradients", [(0.0, 0.0), (0.0, 1e-16)])
def test_an_update_without_any_gradient_is_compared(gradients, tmp_path):
    """An expert without tokens has a gradient of exactly zero, and its weights decay."""
    for name, after, gradient in zip("ab", (0.9, 1.0), gradients, strict=True):
        written = Record(tmp_path / name, {"x": np.ones(2), "idle": np.ones(2)})
        idle = {"x": np.ones(2), "idle": np.full(2, gradient)}
        written.step(0, 1.0, 1.0, idle, {"x": np.zeros(2), "idle": np.full(2, after)})
    found = compare(tmp_path / "a", tmp_path / "b").differences
    seen = [(each.quantity, each.ratio, each.parameters) for each in found]
    assert seen == ([("update", 0.0, ("idle",))] if not any(gradients) else [])
