"""Mistakes in minipar/autograd: a gradient, or the graph that it goes through, is wrong."""

from mutants.mutant import mistakes

MUTANTS = [
    *mistakes(
        "minipar/autograd/attention.py",
        "autograd/test_fused.py",
        ("attention: scores divided by the head's size, not its root", "q.shape[-1] ** -0.5", "1 / q.shape[-1]"),
        (
            "attention: a token sees the one after it",
            "p += xp.triu(xp.full((length, length), -xp.inf, dtype=q.dtype), 1)",
            "p += xp.triu(xp.full((length, length), -xp.inf, dtype=q.dtype), 2)",
        ),
        ("attention: one maximum for all rows", "p -= p.max(axis=-1, keepdims=True)", "p -= p.max()"),
        ("attention: backward without the scale", "dscores *= scale", "dscores *= 1"),
        ("attention: the keys' gradient without the transpose", "x.swapaxes(-1, -2), y", "x, y"),
        (
            "attention: backward without the dropout mask",
            "dscores = _dropped(product(g, v_.swapaxes(-1, -2)), keep_",
            "dscores = _dropped(product(g, v_.swapaxes(-1, -2)), None",
        ),
    ),
    *mistakes(
        "minipar/autograd/attention.py",
        "autograd/test_attention.py",
        ("blocks: merged without the weights", "out += out_2 * xp.exp(lse_2 - finite)[..., None]", "out += out_2"),
        ("blocks: a row without keys becomes nan", "xp.where(lse == -xp.inf, 0, lse)", "lse"),
        ("blocks: no maximum is subtracted", "                p -= top", "                top = 0 * top"),
        ("blocks: the diagonal block is not masked", "if causal and c.stop == seen else None", "if False else None"),
        ("blocks: later keys are computed too", "rows.stop if causal else", "k.shape[2] if causal else"),
        ("blocks: the queries' gradient without the scale", "            dqueries *= scale", "            pass"),
        (
            "blocks: dropout in backward scales delta too",
            "                    dscores -= row_delta",
            "                    pass",
        ),
        ("blocks: the keys' gradient of the last head only", "dk_.sum(axis=-3)", "dk_[..., -1, :, :]"),
    ),
    *mistakes(
        "minipar/autograd/backward.py",
        "autograd/test_graph.py autograd/test_autograd.py",
        (
            "backward: the last user's gradient replaces those before it",
            "gradients[edge] + result if edge in gradients else result",
            "result",
        ),
        ("backward: callbacks run after an inner pass too", "    if outer is None:", "    if True:"),
        ("backward: a recomputed block's input stays until the outer pass ends", "del uses[leaf]", "pass"),
        ("backward: saved arrays are not freed", "vars(node).clear()", "pass"),
        ("backward: deferred gradients are computed in reverse order", "self.popleft()", "self.pop()"),
        ("backward: a leaf's hooks do not run", "            hook(leaf)", "            pass"),
    ),
    *mistakes(
        "minipar/autograd/tensor.py",
        "autograd/test_recompute.py autograd/test_graph.py autograd/test_autograd.py",
        (
            "recompute: a block's gradient is lost when its input needs none",
            "len(inputs), *inputs, *parameters)",
            "len(inputs), *inputs)",
        ),
        (
            "recompute: the second forward draws other masks",
            "setting(randomness, self.randomness)",
            "setting(randomness, None)",
        ),
    ),
    *mistakes(
        "minipar/autograd/fused.py",
        "autograd/test_fused.py",
        ("linear: the bias's gradient is a mean", "g.sum(axis=0, out=out)", "g.mean(axis=0, out=out)"),
        (
            "embedding: a token's gradient is its last row's",
            "xp.add.reduceat(rows[order], starts, axis=0)",
            "rows[order][starts]",
        ),
        ("embedding: rows of absent tokens keep what was there", "out[...] = 0", "pass"),
        ("layer norm: the unbiased variance", "/ x.shape[-1]  # (..., 1)", "/ (x.shape[-1] - 1)  # (..., 1)"),
        ("layer norm: epsilon outside of the root", "xp.sqrt(variance + eps)", "(xp.sqrt(variance) + eps)"),
        ("layer norm: backward forgets the mean's gradient", "dx -= dx.mean(axis=-1, keepdims=True)", "dx -= 0"),
        ("rms norm: centers as layer norm does", "if self.centers else x.copy()", "if True else x.copy()"),
        ("swiglu: backward forgets the gate's own slope", "(sigmoid + silu * (1 - sigmoid))", "sigmoid"),
        (
            "rotary: backward rotates forward",
            "lambda g: _rotate(g[..., :a], -angles)",
            "lambda g: _rotate(g[..., :a], angles)",
        ),
        ("rotary: neighbours are pairs", "-1, 2, angles.shape[-1])", "-1, angles.shape[-1], 2).swapaxes(-1, -2)"),
        ("gelu: another constant", "GELU_CUBIC = 0.044715", "GELU_CUBIC = 0.04715"),
        ("gelu: a factor of the derivative", "inner *= 3 * GELU_CUBIC", "inner *= 2 * GELU_CUBIC"),
        (
            "cross entropy: ignored targets get a gradient",
            "dlogits *= xp.where(self.counted, grad, 0)[:, None]",
            "dlogits *= grad",
        ),
        ("dropout: what stays is not scaled in backward", "lambda g: g * keep * scale", "lambda g: g * keep"),
    ),
    *mistakes(
        "minipar/autograd/tensor.py",
        "autograd/test_graph.py autograd/test_autograd.py",
        (
            "division: the divisor's gradient has the wrong sign",
            "lambda g: g / b, lambda g: -g",
            "lambda g: g / b, lambda g: g",
        ),
        ("tanh: a sign in the derivative", "g * (1 - y * y)", "g * (1 + y * y)"),
        ("the first gradient is not copied", "self.grad = xp.array(contribution)", "self.grad = contribution"),
        ("indexing: repeated elements keep one gradient", "xp.add.at(full, index, g)", "full[index] = g"),
        (
            "mean: divided by all elements, whatever the dim",
            "total * (total.size / self.size)",
            "total * (1 / self.size)",
        ),
        ("transpose: backward permutes as forward", "g.transpose(inverse)", "g.transpose(axes)"),
    ),
]
