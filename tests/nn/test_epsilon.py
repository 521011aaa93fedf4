"""Claims about LayerNorm's epsilon: it is that of the GPT's configuration, in every LayerNorm and in its files."""

import numpy as np
import pytest

from minipar.nn import GPT, GPTConfig
from minipar.nn.pretrained import load_pretrained, save_pretrained

EPSILON = 0.5  # as large as the variance, so that it changes the first digit


def layer_norms(model):
    return {"ln_f": model.ln_f} | {f"{i}.{n}": getattr(b, n) for i, b in enumerate(model.h) for n in ("ln_1", "ln_2")}


@pytest.mark.parametrize("kind", ["made", "loaded"])
def test_every_layer_norm_has_the_configurations_epsilon(kind, tmp_path):
    model = GPT(GPTConfig(7, 6, 8, 2, 2, layer_norm_epsilon=EPSILON), dtype="float64")
    if kind == "loaded":
        save_pretrained(model, tmp_path)
        model = load_pretrained(tmp_path, dtype="float64")
    x = np.random.Generator(np.random.Philox(4)).standard_normal((5, 8))
    centred = x - x.mean(axis=1, keepdims=True)
    expected = centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + EPSILON)
    assert len(layer_norms(model)) == 5
    for name, layer in layer_norms(model).items():
        np.testing.assert_allclose(layer(x).data, expected, rtol=1e-12, err_msg=name)
