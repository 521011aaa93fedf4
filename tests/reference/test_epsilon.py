"""Against transformers' GPT2LMHeadModel with another LayerNorm epsilon than the usual one, in float64."""

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from minipar.nn.pretrained import load_pretrained


def test_another_epsilon_computes_the_same_here(tmp_path):
    torch.manual_seed(0)
    sizes = {"vocab_size": 31, "n_positions": 16, "n_embd": 24, "n_layer": 2, "n_head": 3, "initializer_range": 0.3}
    theirs = GPT2LMHeadModel(GPT2Config(**sizes, layer_norm_epsilon=0.1, bos_token_id=None, eos_token_id=None))
    theirs.double().eval().save_pretrained(tmp_path)
    ours = load_pretrained(tmp_path, dtype="float64")
    tokens = np.random.Generator(np.random.Philox(2)).integers(0, 31, (3, 16))
    expected = theirs(torch.tensor(tokens)).logits.detach().numpy()
    np.testing.assert_allclose(ours(tokens).data, expected, rtol=1e-10, atol=1e-10)
    theirs.config.layer_norm_epsilon = 1e-5
    usual = GPT2LMHeadModel(theirs.config).double().eval()
    usual.load_state_dict(theirs.state_dict())
    assert np.abs(usual(torch.tensor(tokens)).logits.detach().numpy() - expected).max() > 1e-3  # so it is seen
