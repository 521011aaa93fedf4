"""Claims about training in 2 bytes: bits, bytes and memory in every layout; masters; where each operation rounds."""

import numpy as np
import pytest
from combinations import TEXT, config_of, equals_one_device, run_steps
from training import on_each_rank, ranks_of, trained, trainer_for

from chapters.support.training import step_layout, step_traffic
from minipar.autograd import Tensor
from minipar.comm import run_local
from minipar.memory import MemoryLedger
from minipar.more.precision import MixedPrecisionAdamW, enable_two_bytes
from minipar.nn import GPT, GPTConfig, Linear, Parameter
from minipar.parallel.ddp import DistributedDataParallel
from minipar.parallel.predicted_memory import elements_placed, model_state
from minipar.parallel.tensor.user_layers import RowParallelLinear
from minipar.parallel.wrap import fully_shard
from minipar.plan.layout import PRECISIONS
from minipar.train import __main__ as program
from minipar.train import checkpoint
from minipar.train.data import load_tokens
from minipar.train.flags import parse
from minipar.train.pretrained import load_pretrained

enable_two_bytes()

TO_THE_BIT = [
    "--dtype bfloat16 --dp 2",
    "--dtype bfloat16 --dp 3 --zero-stage 2 --microbatches 2 --clip-grad 1",
    "--dtype bfloat16 --dp 3 --zero-stage 3 --microbatches 2",
    "--dtype bfloat16 --pp 2 --schedule zb-h1 --microbatches 4",
    "--dtype bfloat16 --pp 3 --schedule zbv --microbatches 4",
    "--dtype float16 --dp 3 --zero-stage 1 --microbatches 2 --recompute full",
    "--dtype float16 --dp 2 --pp 2 --microbatches 2 --zero-stage 3 --clip-grad 0.5 --model llama --kv-heads 1",
    "--dtype float16 --pp 2 --dp 2 --schedule 1f1b --microbatches 4",
]


@pytest.mark.parametrize("flags", TO_THE_BIT)
def test_a_layout_has_the_bits_of_one_device_and_sends_as_said(flags):
    assert equals_one_device(flags, exact=True) == []


@pytest.mark.parametrize("dtype", ["--dtype float16", "--dtype bfloat16"])
def test_all_zero_stages_have_the_same_bits_round_a_ring(dtype):
    runs = [trained(config_of(f"--dp 3 --zero-stage {stage} {dtype} --reduction ring"), TEXT) for stage in range(4)]
    assert runs[0] == runs[1] == runs[2] == runs[3]


SPLIT = [
    "--dtype bfloat16 --tp 2 --recompute full",
    "--dtype bfloat16 --tp 3 --sequence-parallel",
    "--dtype float16 --tp 2 --dp 2 --pp 2 --microbatches 2 --sequence-parallel --zero-stage 1",
    "--dtype bfloat16 --cp 2",
    "--dtype bfloat16 --cp 2 --context-parallel all-gather",
    "--dtype float16 --cp 2 --context-parallel ulysses",
    "--dtype bfloat16 --cp 4 --dp 2 --recompute full",
    "--dtype bfloat16 --cp 2 --tp 2 --zero-stage 3",
    "--dtype float16 --dp 4 --zero-stage 2 --zero-replicas 2 --microbatches 2 --sync-every-microbatch",
]


@pytest.mark.parametrize("flags", SPLIT)
def test_split_layers_and_tokens_agree_within_roundings(flags):
    """A sum over two ranks rounds its terms, so single values differ by some roundings (2^-8), losses by less."""
    args = config_of(flags)
    ranks = run_local(ranks_of(args), lambda comm: run_steps(trainer_for(args, TEXT, comm)))
    shape = f"--layers {args.layers} --hidden {args.hidden} --heads {args.heads} --seq-len {args.seq_len}"
    batch = f"--global-batch {args.global_batch} --dtype {args.dtype}"
    _, single, _ = run_steps(trainer_for(config_of(f"{shape} {batch}"), TEXT))
    for rank, (_, reports, sent) in enumerate(ranks):
        assert np.allclose([loss for loss, _ in reports], [loss for loss, _ in single], rtol=2**-8)
        assert sent == [step_traffic(args, rank)] * 2


@pytest.mark.parametrize(("size", "stage"), [(1, 0), (3, 0), (3, 1), (3, 2), (3, 3)])
def test_model_state_is_the_papers_formulas(stage, size):
    args = config_of(f"--dp {size} --zero-stage {stage} --global-batch 6 --dtype bfloat16")
    precision = PRECISIONS["bf16"]
    assert (precision.parameters, precision.gradients, precision.optimizer) == (2, 4, 12)

    def rank(comm):
        with (ledger := MemoryLedger()).recording():
            trainer = trainer_for(args, TEXT, comm)
            for _ in trainer.train():
                pass
        return list(ledger.moments), *elements_placed(step_layout(args).placements(), comm.rank)

    for moments, psi, own in run_local(size, rank):
        state = model_state(psi, own, stage, precision)
        assert {held[:3] for _, held in moments} == {(state.parameters, state.gradients, state.optimizer)}
        assert stage > 0 or state.total == 18 * psi


def test_activations_take_half_the_bytes():
    """A little more: row sums stay float32, and operations keep copies of inputs where float32 shares one array."""

    def most(dtype):
        with (ledger := MemoryLedger()).recording():
            trainer_for(config_of(f"--hidden 48 --seq-len 64 --dtype {dtype}"), TEXT).step(0)
        return max(held[3] for phase, held in ledger.moments if phase == "forward")

    assert 0.5 < most("bfloat16") / most("float32") < 0.6


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
    optimizer = MixedPrecisionAdamW([p], lr=2**-7 / 10, weight_decay=0.0)
    seen = []
    for _ in range(12):
        p.grad = -np.ones(1, "bfloat16")
        optimizer.step()
        seen.append(float(p.data[0]))
    assert seen[0] == 1.0 and seen[-1] == 1 + 2**-7
    assert np.allclose(optimizer.masters[0], 1 + 12 * 2**-7 / 10)


def test_a_state_loaded_after_the_optimizer_is_trained():
    model, source = (Linear(4, 3, name=name, dtype="bfloat16") for name in ("layer", "source"))
    optimizer = MixedPrecisionAdamW(model.parameters(), lr=1e-3)
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
    ("layout", "dtype"),
    [
        ("--dp 2 --zero-stage 1", "bfloat16"),
        ("--dp 2 --zero-stage 3", "float16"),
        ("--pp 2 --microbatches 2", "bfloat16"),
    ],
)
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(tmp_path, layout, dtype):
    flags = f"{layout} --dtype {dtype} --reduction ordered"
    on_each_rank(config_of(f"{flags} --steps 2"), TEXT, lambda trainer, _: checkpoint.save(trainer, tmp_path, 2))
    state, steps = trained(config_of(f"{flags} --steps 4"), TEXT)
    resumed, last = trained(config_of(f"{flags} --steps 4 --resume {tmp_path}"), TEXT)
    assert resumed == state and last == steps[2:]
    assert parse(["--resume", str(tmp_path)]).dtype == dtype


def test_an_export_has_the_masters(tmp_path):
    flags = "--layers 1 --hidden 16 --heads 2 --seq-len 8 --global-batch 8 --steps 3 --dtype bfloat16 --dp 2"
    with np.errstate():  # the program changes the process's settings
        run_local(2, lambda comm: program.run(comm, f"{flags} --export {tmp_path}".split()))
    exported = load_pretrained(tmp_path, dtype="float32").state_dict()
    masters = on_each_rank(parse(flags.split(), 2), load_tokens(None, 256, 8), lambda trainer, _: trainer.state_dict())[
        0
    ]
    for name, master in masters.items():
        assert exported[name].dtype == np.float32 and np.array_equal(exported[name], master)
