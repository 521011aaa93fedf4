"""Against transformers, in float64: packed position ids and a block-diagonal mask, in eager attention."""

import numpy as np
import pytest
import torch
from reference.double_precision import compute_in_float64
from reference.their_models import compute_everything_in_float64, their_gradients, theirs
from training import with_attention
from transformers.models.llama import modeling_llama
from transformers.models.mixtral import modeling_mixtral

from minipar.autograd import packed
from minipar.nn import GPTConfig, LlamaConfig, MixtralConfig
from minipar.train.pretrained import load_pretrained

VOCAB, LENGTH = 31, 20
RANDOM = np.random.Generator(np.random.Philox(19))
TOKENS, TARGETS = RANDOM.integers(0, VOCAB, (2, 3, LENGTH))
LENGTHS = [[20], [1, 4, 9, 6], [11, 9]]
IDS = np.array([[place for n in sample for place in range(n)] for sample in LENGTHS])
TARGETS[:, -1] = -100
TARGETS[:, :-1][IDS[:, 1:] == 0] = -100  # a document's last token has no target
SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": LENGTH, "vocab_size": VOCAB}
SIZES |= {"hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2}
MODELS = {
    "gpt2": GPTConfig(vocab_size=VOCAB, n_positions=LENGTH, n_embd=24, n_layer=2, n_head=3),
    "llama": LlamaConfig(**SIZES),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=3, num_experts_per_tok=2),
}


def block_diagonal() -> torch.Tensor:
    """Return what to add to scores, (B, 1, T, T): 0 for a token's own document up to itself, -inf elsewhere."""
    numbers = np.cumsum(IDS == 0, axis=1)
    same = numbers[:, :, None] == numbers[:, None, :]
    mask = np.where(same & np.tri(LENGTH, dtype=bool), 0.0, -np.inf)
    return torch.tensor(mask)[:, None]


@pytest.fixture(autouse=True)
def float64_throughout(monkeypatch):
    compute_everything_in_float64(monkeypatch)
    for modeling in (modeling_llama, modeling_mixtral):
        compute_in_float64(monkeypatch, modeling, "eager_attention_forward")


@pytest.mark.parametrize("method", ["full", "blockwise"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral"])
def test_packed_documents_are_theirs(name, method, tmp_path):
    reference = theirs(MODELS[name])
    reference.set_attn_implementation("eager")
    reference.save_pretrained(tmp_path)
    model = with_attention(load_pretrained(tmp_path, dtype="float64"), method)
    logits = reference(
        torch.tensor(TOKENS), attention_mask=block_diagonal(), position_ids=torch.tensor(IDS), use_cache=False
    ).logits
    flat = logits.reshape(-1, VOCAB)
    loss = torch.nn.functional.cross_entropy(flat, torch.tensor(TARGETS).reshape(-1), reduction="sum")
    loss.backward()
    with packed(IDS):
        np.testing.assert_allclose(model(TOKENS).data, logits.detach().numpy(), rtol=0, atol=1e-9)
        ours = model.loss_sum(TOKENS, TARGETS)
    assert ours.item() == pytest.approx(loss.item(), rel=1e-12)
    ours.backward()
    gradients = their_gradients(reference)
    for key, p in model.named_parameters():
        p.fold_tied_gradients()
        np.testing.assert_allclose(p.grad, gradients[key], rtol=1e-9, atol=1e-9, err_msg=key)
