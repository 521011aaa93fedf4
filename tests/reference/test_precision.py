"""Claims about 2-byte training against torch: casts to the bit, a block in bfloat16 within a number of roundings."""

import ml_dtypes  # noqa: F401 adds bfloat16 to NumPy
import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

from minipar.autograd import Tensor
from minipar.more.precision import MixedPrecisionAdamW, enable_two_bytes
from minipar.nn import GPT, GPTConfig, Parameter
from minipar.train.pretrained import save_pretrained

enable_two_bytes()

KINDS = {"bfloat16": torch.bfloat16, "float16": torch.float16}
ROUNDINGS = 16  # of a relative 2^-8 or 2^-11, on the scale of an array's largest element


def from_torch(x, dtype):
    """The same bits as a NumPy array."""
    return x.detach().contiguous().view(torch.uint16).numpy().view(dtype)


def to_torch(x, dtype):
    return torch.from_numpy(x.view(np.uint16)).view(KINDS[dtype])


@pytest.mark.parametrize("dtype", KINDS)
def test_a_million_values_round_as_torchs(dtype):
    random = np.random.Generator(np.random.Philox(3))
    values = random.integers(0, 2**32, 1_000_000, dtype=np.uint32).view(np.float32)  # of every size, NaN among them
    ties = (np.arange(2**15, dtype=np.uint32) << 16 | 0x8000).view(np.float32)  # halfway between two bfloat16
    special = np.array(
        [0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-40, 3.4e38, 65504, 65519.9, 65520, 6e-8], np.float32
    )
    values = np.concatenate(
        [values, ties, -ties, np.array(special, np.float32), random.standard_normal(100_000).astype(np.float32)]
    )
    with np.errstate(over="ignore", invalid="ignore"):
        own = values.astype(dtype)
    other = from_torch(torch.from_numpy(values).to(KINDS[dtype]), dtype)
    nan = np.isnan(values)
    assert np.isnan(own[nan].astype(np.float32)).all() and np.isnan(other[nan].astype(np.float32)).all()
    assert np.array_equal(own[~nan].view(np.uint16), other[~nan].view(np.uint16))


def test_a_block_agrees_with_torchs_within_16_roundings():
    """Forward and backward of a GPT-2 block in bfloat16: the result, the input's and every weight's gradient."""
    config = GPTConfig(vocab_size=8, n_positions=32, n_embd=64, n_layer=1, n_head=4)
    model = GPT(config, dtype="float32", seed=3)
    theirs = GPT2Block(
        GPT2Config(vocab_size=8, n_positions=32, n_embd=64, n_layer=1, n_head=4, attn_implementation="eager",
                   resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    )  # fmt: skip
    narrow = GPT(config, dtype="bfloat16", seed=3)
    state = {name.removeprefix("h.0."): values for name, values in model.state_dict().items() if name.startswith("h.0")}
    with torch.no_grad():
        for name, p in theirs.named_parameters():
            p.copy_(torch.from_numpy(state[name]))
    theirs = theirs.to(torch.bfloat16).eval()
    x = np.random.Generator(np.random.Philox(4)).standard_normal((2, 32, 64)).astype("bfloat16")
    g = np.random.Generator(np.random.Philox(5)).standard_normal((2, 32, 64)).astype("bfloat16")
    own_x, their_x = Tensor(x, requires_grad=True), to_torch(x, "bfloat16").requires_grad_()
    y = narrow.h[0](own_x)
    y.backward(g)
    mask = torch.full((32, 32), float("-inf")).triu(1).to(torch.bfloat16)[None, None]
    result = theirs(their_x, attention_mask=mask)
    result = result[0] if isinstance(result, tuple) else result
    result.backward(to_torch(g, "bfloat16"))
    pairs = {"result": (y.data, result), "input": (own_x.grad, their_x.grad)}
    pairs |= {name: (p.grad, dict(theirs.named_parameters())[name].grad) for name, p in narrow.h[0].named_parameters()}
    errors = {}
    for name, (own, other) in pairs.items():
        own, other = own.astype("float32"), other.detach().float().numpy()
        errors[name] = float(np.abs(own - other).max() / np.abs(other).max()) * 2**8
    worst = max(errors, key=errors.get)
    assert errors[worst] <= ROUNDINGS, (worst, errors[worst])


@pytest.mark.parametrize("dtype", KINDS)
def test_transformers_reads_what_2_bytes_export(tmp_path, dtype):
    model = GPT(GPTConfig(vocab_size=8, n_positions=32, n_embd=64, n_layer=1, n_head=4), dtype=dtype)
    save_pretrained(model, tmp_path)
    theirs = GPT2LMHeadModel.from_pretrained(tmp_path, dtype="auto")
    parameters = {name.removeprefix("transformer."): p for name, p in theirs.named_parameters()}
    for name, values in model.state_dict().items():
        assert parameters[name].dtype == KINDS[dtype]
        assert np.array_equal(from_torch(parameters[name], dtype), values)


@pytest.mark.parametrize("dtype", KINDS)
def test_adamw_with_masters_is_torchs_on_float32(dtype):
    """The masters take the steps of torch's AdamW on float32 parameters; the parameters are their rounded values."""
    random = np.random.Generator(np.random.Philox(6))
    p = Parameter(random.standard_normal((5, 7)).astype(dtype))
    q = torch.from_numpy(p.data.astype("float32")).requires_grad_()
    own, other = MixedPrecisionAdamW([p], lr=1e-2, weight_decay=0.1), torch.optim.AdamW([q], lr=1e-2, weight_decay=0.1)
    for _ in range(20):
        p.grad = random.standard_normal((5, 7)).astype(dtype)
        q.grad = torch.from_numpy(p.grad.astype("float32"))
        own.step()
        other.step()
    assert np.allclose(own.masters[0], q.detach().numpy(), rtol=2e-6, atol=1e-7)
    assert np.array_equal(p.data, own.masters[0].astype(dtype))
