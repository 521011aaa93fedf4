"""Claims about training in 2 bytes: bits, bytes and memory in every layout; masters; where each operation rounds."""

import numpy as np
import pytest
from combinations import TEXT, config_of, equals_one_device, run_steps
from training import on_each_rank, ranks_of, trained, trainer_for

from minipar.autograd import Tensor
from minipar.comm import run_local, serial
from minipar.errors import UsageError
from minipar.memory import MemoryLedger
from minipar.nn import GPT, AdamW, GPTConfig, Linear, Parameter
from minipar.nn.pretrained import load_pretrained
from minipar.parallel.ddp import DistributedDataParallel
from minipar.parallel.memory import elements_placed, model_state, precision_of
from minipar.parallel.parallelize import fully_shard
from minipar.parallel.tensor.user_layers import RowParallelLinear
from minipar.parallel.traffic import predicted_traffic
from minipar.train import __main__ as program
from minipar.train.config import parse
from minipar.train.data import hold_out
from minipar.train.evaluate import validation_loss
from minipar.train.from_config import step_layout
from minipar.train.resume import continued, find_checkpoint

BF16_SUMS = "--dtype bf16 --reduce-dtype bf16"
ALL_BF16 = "--dtype bf16 --gradients bf16"
TO_THE_BIT = [
    "--dtype bf16 --dp 2",
    "--dtype bf16 --dp 3 --zero-stage 2 --microbatches 2 --clip-grad 1",
    "--dtype fp16 --dp 3 --zero-stage 1 --microbatches 2 --recompute full",
    "--dtype fp16 --dp 4 --zero-stage 2 --zero-replicas 2 --microbatches 2 --sync-every-microbatch",
    "--dtype fp16 --dp 2 --pp 2 --microbatches 2 --zero-stage 3 --clip-grad 0.5 --model llama --kv-heads 1",
    f"{BF16_SUMS} --dp 3 --zero-stage 3 --microbatches 2",
    f"{BF16_SUMS} --dp 5 --clip-grad 1",
    f"{BF16_SUMS} --pp 2 --schedule zb-h1 --microbatches 4",
    f"{ALL_BF16} --dp 3 --zero-stage 3",
    f"{ALL_BF16} --dp 4 --zero-stage 2 --zero-replicas 2 --sync-every-microbatch --microbatches 2",
    f"{ALL_BF16} --pp 3 --schedule zbv --microbatches 4",
    f"{ALL_BF16} --pp 2 --dp 2 --schedule 1f1b --microbatches 4",
]


@pytest.mark.parametrize("flags", TO_THE_BIT)
def test_a_layout_has_the_bits_of_one_device_and_sends_as_said(flags):
    assert equals_one_device(flags, exact=True) == []


@pytest.mark.parametrize("dtype", ["--dtype fp16", BF16_SUMS, ALL_BF16])
def test_all_zero_stages_have_the_same_bits_round_a_ring(dtype):
    runs = [trained(config_of(f"--dp 3 --zero-stage {stage} {dtype} --reduction ring"), TEXT) for stage in range(4)]
    assert runs[0] == runs[1] == runs[2] == runs[3]


SPLIT = [
    "--dtype bf16 --tp 2 --recompute full",
    "--dtype fp16 --tp 2 --dp 2 --pp 2 --microbatches 2 --sequence-parallel --zero-stage 1",
    f"{ALL_BF16} --tp 3 --sequence-parallel",
    "--dtype bf16 --cp 2",
    f"{BF16_SUMS} --cp 2 --context-parallel all-gather",
    "--dtype fp16 --cp 2 --context-parallel ulysses",
    f"{BF16_SUMS} --cp 4 --dp 2 --recompute full",
    f"{ALL_BF16} --cp 2 --tp 2 --zero-stage 3",
]


@pytest.mark.parametrize("flags", SPLIT)
def test_split_layers_and_tokens_agree_within_roundings(flags):
    """A sum over two ranks rounds its terms, so single values differ by some roundings (2^-8), losses by less."""
    config = config_of(flags)
    ranks = run_local(ranks_of(config), lambda comm: run_steps(trainer_for(config, TEXT, comm)))
    model = config.model
    shape = f"--layers {model.layers} --hidden {model.hidden} --heads {model.heads} --seq-len {model.seq_len}"
    batch = f"--global-batch {config.data.global_batch} --dtype {config.run.dtype}"
    _, single, _ = run_steps(trainer_for(config_of(f"{shape} {batch}"), TEXT))
    for rank, (_, reports, sent) in enumerate(ranks):
        assert np.allclose([loss for loss, _ in reports], [loss for loss, _ in single], rtol=2**-8)
        assert sent == [predicted_traffic(step_layout(config), rank)] * 2


@pytest.mark.parametrize(
    ("sums", "width", "size", "stage"),
    [("bf16", 16, 1, 0), ("fp32", 18, 3, 0), ("bf16", 16, 3, 1), ("fp32", 18, 3, 2), ("bf16", 16, 3, 3)],
)
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


@pytest.mark.parametrize(
    ("layout", "dtype"), [("--dp 2 --zero-stage 3", "bf16"), ("--pp 2 --microbatches 2", "fp16"), ("--tp 2", "fp16")]
)
def test_the_validation_loss_is_the_same_in_every_layout(layout, dtype):
    def losses(flags):
        config = config_of(f"--layers 3 --global-batch 8 {flags} --dtype {dtype} --eval-every 1")
        tokens, evaluation = hold_out(config, TEXT)
        return on_each_rank(config, tokens, lambda trainer, _: validation_loss(trainer, evaluation))

    assert set(losses(layout)) == set(losses("--dp 1"))


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [("--dp 2 --zero-stage 1", "bf16"), ("--dp 2 --zero-stage 3", "fp16"), ("--pp 2 --microbatches 2", "bf16")],
)
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(tmp_path, layout, dtype):
    flags = f"{layout} --dtype {dtype} --reduction ordered"
    on_each_rank(config_of(f"{flags} --steps 2"), TEXT, lambda trainer, _: trainer.save(tmp_path, 2))
    state, steps = trained(config_of(f"{flags} --steps 4"), TEXT)
    resumed, last = trained(config_of(f"{flags} --steps 4 --resume {tmp_path}"), TEXT)
    assert resumed == state and last == steps[2:]


def test_an_export_has_either_precision(tmp_path):
    states = {}
    for precision in ("bf16", "fp32"):
        flags = "--layers 1 --hidden 16 --heads 2 --seq-len 8 --global-batch 8 --steps 3 --dtype bf16 --export"
        flags = f"{flags} {tmp_path}/{precision} --export-dtype {precision}"
        with np.errstate():
            run_local(2, lambda comm, flags=flags: program.run_job(parse(flags.split(), comm.rank), comm))
        states[precision] = load_pretrained(tmp_path / precision, dtype="float32").state_dict()
    two, four = states["bf16"], states["fp32"]
    assert all(np.array_equal(two[name], four[name].astype("bfloat16").astype("float32")) for name in two)
    assert any(not np.array_equal(two[name], four[name]) for name in two)


def test_a_resumed_run_takes_its_dtypes_from_the_checkpoint(tmp_path):
    flags = "--dtype bf16 --gradients bf16 --reduce-dtype bf16 --skip-nonfinite"
    on_each_rank(config_of(f"{flags} --steps 1"), TEXT, lambda trainer, _: trainer.save(tmp_path, 1))
    config = parse(["--resume", str(tmp_path)])
    run = continued(config, find_checkpoint(config, serial())).run
    assert (run.dtype, run.gradients, run.reduce_dtype, run.skip_nonfinite) == (*["bfloat16"] * 3, True)
    config = parse(["--resume", str(tmp_path), "--dtype", "float32"])
    with pytest.raises(UsageError, match="--dtype bfloat16.* --dtype float32"):
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


def test_defaults_are_float32_sums_and_gradients():
    run = config_of("--dtype bf16").run
    assert (run.dtype, run.gradients, run.reduce_dtype) == ("bfloat16", "float32", "float32")
    assert config_of("").run.gradients is None
