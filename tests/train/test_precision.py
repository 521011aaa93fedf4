"""Claims about training in 2 bytes: bits, bytes and memory in every layout; masters; where each operation rounds."""

import re
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from combinations import TEXT, VOCAB
from launcher import run_mpi
from safetensors.numpy import load_file
from training import bits, config_for, on_each_rank, ranks_of, trained, trainer_for, verdicts

from minipar.autograd import Tensor
from minipar.comm import run_local, serial
from minipar.errors import UsageError
from minipar.memory import MemoryLedger
from minipar.nn import GPT, AdamW, GPTConfig, Linear, Parameter
from minipar.parallel.ddp import DistributedDataParallel
from minipar.parallel.memory import elements_placed, model_state, precision_of
from minipar.parallel.parallelize import fully_shard
from minipar.parallel.tensor.user_layers import RowParallelLinear
from minipar.parallel.traffic import predicted_traffic
from minipar.train.config import parse
from minipar.train.data import hold_out
from minipar.train.evaluate import validation_loss
from minipar.train.from_config import step_layout
from minipar.train.resume import continued, find_checkpoint

pytestmark = pytest.mark.sampled(3)

SHAPE = f"--layers 4 --hidden 12 --heads 2 --seq-len 8 --vocab-size {VOCAB} --global-batch 8 --steps 3 --lr 1e-2"
LAYOUTS = [
    "--dp 2",
    "--dp 3 --global-batch 6 --clip-grad 1",
    "--dp 2 --microbatches 2 --recompute full",
    *(f"--dp 3 --zero-stage {stage} --global-batch 12 --microbatches 2" for stage in (1, 2, 3)),
    "--dp 4 --zero-stage 2 --zero-replicas 2 --sync-every-microbatch --microbatches 2",
    *(f"--pp 2 --microbatches 4 --schedule {name}" for name in ("gpipe", "1f1b", "zb-h1", "zbv")),
    "--dp 2 --pp 2 --microbatches 2 --zero-stage 3 --clip-grad 0.5 --model llama --kv-heads 1",
]
DTYPES = ["--dtype bf16", "--dtype bf16 --reduce-dtype bf16", "--dtype bf16 --gradients bf16", "--dtype fp16"]


def config_of(flags):
    return config_for(f"{SHAPE} {flags}")


@pytest.mark.sampled(7)
@pytest.mark.parametrize(("layout", "dtype"), [*product(LAYOUTS, DTYPES)])
def test_any_layout_has_the_bits_of_one_device(layout, dtype):
    for verdict in verdicts(config_of(f"{layout} {dtype} --reduction ordered"), TEXT):
        assert verdict.passed and "bit for bit" in verdict.line, verdict.line


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", ["ring", "ordered"])
def test_all_zero_stages_have_the_same_bits(reduction, dtype):
    runs = [trained(config_of(f"--dp 3 --global-batch 6 --zero-stage {k} {dtype} --reduction {reduction}"), TEXT)
            for k in range(4)]  # fmt: skip
    assert runs[0] == runs[1] == runs[2] == runs[3]


SPLIT = [
    "--tp 2",
    "--tp 2 --sequence-parallel",
    "--tp 2 --dp 2 --pp 2 --microbatches 2",
    *(f"--cp 2 --context-parallel {method}" for method in ("ring", "all-gather", "ulysses")),
    "--cp 4 --dp 2 --recompute full",
    "--cp 2 --tp 2 --zero-stage 3",
]


@pytest.mark.sampled(7)
@pytest.mark.parametrize(("layout", "dtype"), [*product(SPLIT, DTYPES)])
def test_split_layers_and_tokens_agree_within_roundings(layout, dtype):
    """A sum over two ranks rounds its terms, so single values differ by some roundings (2^-8), losses by less."""
    losses = [[loss for loss, _ in trained(config_of(f"{each} {dtype}"), TEXT)[1]] for each in (layout, "--dp 1")]
    assert np.allclose(*losses, rtol=2**-8)


SENT = [
    *LAYOUTS,
    *SPLIT,
    "--tp 2 --dp 2 --pp 2 --microbatches 2 --sequence-parallel --zero-stage 1",
    "--tp 2 --pp 2 --microbatches 2",
    "--tp 2 --dp 2 --recompute full --zero-stage 3",
]


@pytest.mark.sampled(9)
@pytest.mark.parametrize(("dtype", "layout"), [*product(DTYPES, SENT)])
def test_bytes_are_those_of_each_dtype(layout, dtype):
    config = config_of(f"{layout} {dtype}")

    def rank(comm):
        trainer = trainer_for(config, TEXT, comm)
        trainer.step(0)
        comm.traffic.reset()
        trainer.step(1)
        return {axis: comm.traffic.bytes(axis=axis) for axis in ("dp", "cp", "tp", "pp")}

    counted = run_local(ranks_of(config), rank)
    assert counted == [predicted_traffic(step_layout(config), rank) for rank in range(ranks_of(config))]


@pytest.mark.parametrize("method", ["ring", "all-gather"])
def test_gradients_of_keys_travel_in_the_reduce_dtype(method):
    def sent(dtype):
        config = config_of(f"--cp 2 --context-parallel {method} --dtype bf16 --reduce-dtype {dtype}")

        def rank(comm):
            trainer_for(config, TEXT, comm).step(0)
            return comm.traffic.bytes(axis="cp")

        counted = run_local(2, rank)
        assert counted == [predicted_traffic(step_layout(config), rank)["cp"] for rank in range(2)]
        return counted[0]

    assert sent("fp32") > sent("bf16")


def test_activations_of_2_bytes_send_half():
    four, two = (
        predicted_traffic(step_layout(config_of(f"--pp 2 --dp 2 --microbatches 2 --dtype {dtype}")), 1)
        for dtype in ("fp32", "bf16")
    )
    fixed = four["pp"] - 2 * two["pp"]  # float64 values, and the gradient of the tied embedding, which stays float32
    assert two["dp"] == four["dp"] and fixed < four["pp"] / 4
    layouts = ("--cp 2 --dtype fp32", "--cp 2 --dtype bf16", "--cp 2 --dtype bf16 --reduce-dtype bf16")
    four, two, sums = (predicted_traffic(step_layout(config_of(layout)), 1)["cp"] for layout in layouts)
    assert sums == four / 2 and two == four * (2 * 2 + 2 * 4) // (4 * 4)  # keys and values twice, their gradients' sums


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("sums", "width"), [("bf16", 16), ("fp32", 18)])
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("stage", range(4))
def test_model_state_is_the_papers_formulas(stage, size, sums, width):
    flags = f"--dtype bf16 --gradients {sums} --reduce-dtype {sums}"
    config = config_of(f"--dp {size} --zero-stage {stage} --global-batch 6 {flags}")
    precision = precision_of("bfloat16", config.run.gradients, config.run.reduce_dtype)
    assert sum((precision.parameters, precision.gradients, precision.optimizer)) == width

    def rank(comm):
        with (ledger := MemoryLedger()).recording():
            trainer = trainer_for(config, TEXT, comm)
            for _ in trainer.train():
                pass
        return list(ledger.moments), *elements_placed(step_layout(config).placements(), comm.rank)

    for moments, psi, own in run_local(size, rank):
        state = model_state(psi, own, stage, precision)
        assert {held[:3] for _, held in moments} == {(state.parameters, state.gradients, state.optimizer)}
        assert stage > 0 or state.total == width * psi


@pytest.mark.parametrize("sums", ["--gradients fp32 --reduce-dtype bf16", "--gradients bf16 --reduce-dtype fp32"])
def test_sums_in_another_dtype_take_20_bytes(sums):
    config = config_of(f"--dp 2 --dtype bf16 {sums}")
    precision = precision_of("bfloat16", config.run.gradients, config.run.reduce_dtype)
    assert (precision.parameters, precision.gradients, precision.optimizer) == (2, 4 + 2, 12)

    def rank(comm):
        with (ledger := MemoryLedger()).recording():
            trainer = trainer_for(config, TEXT, comm)
            trainer.step(0)
        return max(sum(held[:3]) for _, held in ledger.moments), trainer.size

    assert [most for most, _ in run_local(2, rank)] == [20 * trainer_for(config_of(""), TEXT).size] * 2


def test_activations_take_half_the_bytes():
    """A little more: row sums stay float32, and operations keep copies of inputs where float32 shares one array."""

    def most(dtype):
        with (ledger := MemoryLedger()).recording():
            trainer_for(config_of(f"--hidden 48 --seq-len 64 --dtype {dtype}"), TEXT).step(0)
        return max(held[3] for phase, held in ledger.moments if phase == "forward")

    assert 0.5 < most("bf16") / most("fp32") < 0.6


def test_sums_over_tp_are_float32_where_nobody_says_otherwise():
    def rank(comm, dtype):
        layer = RowParallelLinear(4, 3, comm, name="layer", bias=False, dtype=dtype)
        layer(Tensor(np.ones((2, 2), dtype)))
        return comm.traffic.bytes()

    assert run_local(2, rank, "bfloat16") == run_local(2, rank, "float32")


# ---- masters ---------------------------------------------------------------------------------------------------------


def test_masters_keep_updates_that_2_bytes_lose():
    """An update of a tenth of the distance of two neighbouring values: ten of them move the weight, one does not."""
    p = Parameter(np.ones(1, "bfloat16"))
    optimizer = AdamW([p], lr=2**-7 / 10, weight_decay=0.0)
    seen = []
    for _ in range(12):
        p.grad = -np.ones(1, "bfloat16")
        optimizer.step()
        seen.append(float(p.data[0]))
    assert seen[0] == 1.0 and seen[-1] == 1 + 2**-7
    assert np.allclose(optimizer.masters[0], 1 + 12 * 2**-7 / 10)


def test_a_state_loaded_after_the_optimizer_is_trained():
    model, source = (Linear(4, 3, name=name, dtype="bfloat16") for name in ("layer", "source"))
    optimizer = AdamW(model.parameters(), lr=1e-3)
    model.load_state_dict(source.state_dict())
    for p in model.parameters():
        p.grad = np.ones(p.shape, "bfloat16")
    optimizer.step()
    assert np.allclose(optimizer.masters[0], source.weight.data.astype("float32"), atol=2e-3)


@pytest.mark.parametrize("wrap", [DistributedDataParallel, fully_shard])
def test_wrappers_add_up_in_float32_where_nobody_says_otherwise(wrap):
    def rank(comm):
        model = GPT(GPTConfig(vocab_size=16, n_positions=8, n_embd=16, n_layer=1, n_head=2), dtype="bfloat16")
        wrapper = wrap(model, comm)
        tokens = np.arange(8)[None]
        wrapper.loss(tokens, tokens).backward()
        return {str(p.grad.dtype) for p in wrapper.parameters()}

    assert run_local(2, rank) == [{"float32"}] * 2


def test_the_refusal_of_a_limit_counts_each_stage_by_itself():
    config = config_of("--dp 2 --dtype bf16 --gradients bf16 --memory-limit 1")
    with pytest.raises(UsageError) as refused:
        on_each_rank(config, TEXT, lambda *_: None)
    assert re.search(
        r"--zero-stage 0 .* 6\*[\d,]+ \(gradients\).*--zero-stage 3, .* 2\*[\d,]+ \(grad", str(refused.value)
    )


@pytest.mark.sampled(4)
@pytest.mark.parametrize("layout", ["--dp 2", "--pp 2 --microbatches 2", "--tp 2", "--cp 2", "--dp 2 --zero-stage 3"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_the_validation_loss_is_the_same_in_every_layout(layout, dtype):
    def losses(flags):
        config = config_of(f"{flags} --dtype {dtype} --eval-every 1")
        tokens, evaluation = hold_out(config, TEXT)
        return on_each_rank(config, tokens, lambda trainer, _: validation_loss(trainer, evaluation))

    assert set(losses(layout)) == set(losses("--dp 1"))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("layout", ["--dp 2 --zero-stage 1", "--dp 2 --zero-stage 3", "--pp 2 --microbatches 2"])
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(tmp_path, layout, dtype):
    flags = f"{layout} --dtype {dtype} --reduction ordered"
    on_each_rank(config_of(f"{flags} --steps 2"), TEXT, lambda trainer, _: trainer.save(tmp_path, 2))
    state, steps = trained(config_of(f"{flags} --steps 4"), TEXT)
    resumed, last = trained(config_of(f"{flags} --steps 4 --resume {tmp_path}"), TEXT)
    assert resumed == state and last == steps[2:]
    layouts = trained(config_of(f"--dp 2 --dtype {dtype} --reduction ordered --steps 2 --resume {tmp_path}"), TEXT)
    assert layouts[0] == bits(on_each_rank(config_of(f"{flags} --steps 2"), TEXT, lambda t, _: t.state_dict())[0])


@pytest.mark.long
def test_mpirun_trains_in_2_bytes_and_exports_either_precision(tmp_path):
    flags = "--layers 1 --hidden 16 --heads 2 --seq-len 8 --global-batch 8 --steps 3 --dtype bf16 --reduction ordered"
    for precision in ("bf16", "fp32"):
        out = ["--save", str(tmp_path / precision), "--export", str(tmp_path / f"model-{precision}"), "--verify"]
        run = run_mpi(2, ["-m", "minipar.train", *flags.split(), *out, "--export-dtype", precision])
        assert run.returncode == 0 and "2 ranks = 1 device, bit for bit" in run.stdout, run.stderr
    two, four = (load_file(tmp_path / f"model-{precision}" / "model.safetensors") for precision in ("bf16", "fp32"))
    assert {(str(two[name].dtype), str(four[name].dtype)) for name in two} == {("bfloat16", "float32")}
    assert all(np.array_equal(two[name], four[name].astype("bfloat16")) for name in two)
    assert any(not np.array_equal(two[name].astype("float32"), four[name]) for name in two)


def test_a_resumed_run_takes_its_dtypes_from_the_checkpoint(tmp_path):
    flags = "--dtype bf16 --gradients bf16 --reduce-dtype bf16 --skip-nonfinite"
    on_each_rank(config_of(f"{flags} --steps 1"), TEXT, lambda trainer, _: trainer.save(tmp_path, 1))
    config = parse(["--resume", str(tmp_path)])
    run = continued(config, find_checkpoint(config, serial())).run
    assert (run.dtype, run.gradients, run.reduce_dtype, run.skip_nonfinite) == (*["bfloat16"] * 3, True)
    config = parse(["--resume", str(tmp_path), "--dtype", "float32"])
    with pytest.raises(UsageError, match="written with --dtype bfloat16, but this run has --dtype float32"):
        continued(config, find_checkpoint(config, serial()))


# ---- where each operation rounds -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_product_adds_up_in_float32_and_rounds_once(dtype):
    layer = Linear(300, 5, name="layer", dtype=dtype, std=1.0)
    x = Tensor(np.random.Generator(np.random.Philox(1)).standard_normal((7, 300)).astype(dtype), requires_grad=True)
    y = layer(x)
    exact = x.data.astype("float32") @ layer.weight.data.astype("float32")
    assert y.dtype == dtype and np.array_equal(y.data, exact.astype(dtype))
    y.backward(np.ones(y.shape, dtype))
    assert x.grad.dtype == layer.weight.grad.dtype == dtype


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_other_dtypes_are_as_they_were(dtype):
    x = Tensor(np.ones((2, 3), dtype), requires_grad=True)
    assert (x @ x.transpose()).node.narrow is None and (x * 2).dtype == dtype


# ---- flags -----------------------------------------------------------------------------------------------------------

REFUSED = {
    "--gradients bf16": "--gradients bfloat16 is for --dtype bf16 or fp16",
    "--reduce-dtype fp32": "--reduce-dtype float32 is for --dtype bf16 or fp16",
    "--dtype bf16 --gradients fp16": "--gradients float16 is for --dtype fp16, which scales the loss into its range",
    "--export-dtype bf16": "--export-dtype bfloat16 does nothing without --export DIR",
    "--dtype fp8": "argument --dtype: invalid choice: 'fp8'",
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("flags", REFUSED)
def test_what_2_bytes_do_not_have_is_refused(flags):
    with pytest.raises(UsageError, match=re.escape(REFUSED[flags])):
        config_of(flags)


def test_defaults_are_float32_sums_and_gradients():
    run = config_of("--dtype bf16").run
    assert (run.dtype, run.gradients, run.reduce_dtype) == ("bfloat16", "float32", "float32")
    assert replace(config_of("").run, seed=0).gradients is None
