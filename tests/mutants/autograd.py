"""Mistakes in minipar/autograd: a gradient, or the graph that it goes through, is wrong."""

from mutants.mutant import mistakes

MUTANTS = [
    *mistakes(
        "minipar/autograd/attention.py",
        "autograd/test_fused.py",
        ("attention: scores divided by the head's size, not its root", "q.shape[-1] ** -0.5", "1 / q.shape[-1]"),
        ("attention: a token sees the one after it", "xp.triu(everywhere, 1)", "xp.triu(everywhere, 2)"),
        ("attention: one maximum for all rows", "p -= p.max(axis=-1, keepdims=True)", "p -= p.max()"),
        ("attention: backward without the scale", "dscores *= scale_of(q)", "dscores *= 1"),
        (
            "attention: the keys' gradient without the transpose",
            "product(transposed(dscores), join_rows(q), out=dk)",
            "product(dscores, join_rows(q), out=dk)",
        ),
        (
            "attention: backward without the dropout mask",
            "dscores = dropped(dp, keep, self.probability)",
            "dscores = dp",
        ),
    ),
    *mistakes(
        "minipar/autograd/attention.py",
        "autograd/test_attention.py",
        (
            "blocks: merged with the other's share",
            "share_2 = xp.where(difference > 0,",
            "share_2 = xp.where(difference < 0,",
        ),
        ("blocks: a row without keys becomes nan", "sees_none = lse == -xp.inf", "sees_none = False"),
        ("blocks: no maximum is subtracted", "new_max = xp.maximum(running_max, block_max)", "new_max = 0 * block_max"),
        (
            "blocks: what was added up stays relative to the old maximum",
            "                weighted *= correction",
            "                pass",
        ),
        ("blocks: the diagonal block is not masked", "    scores[..., -rows:] += mask[:rows, :rows]", "    pass"),
        ("blocks: the queries' gradient without the scale", "            dqueries *= scale", "            pass"),
        (
            "blocks: the keys' gradient of the last head only",
            "dkeys.sum(axis=-3, keepdims=True)",
            "dkeys[..., -1:, :, :]",
        ),
        ("blocks: dropout keeps no whole matrix", "drops or length <= QUERY_BLOCK", "length <= QUERY_BLOCK"),
        ("blocks: dropout is forgotten", "    if keep is not None:\n        remedy", "    if False:\n        remedy"),
    ),
    *mistakes(
        "minipar/autograd/attention.py",
        "autograd/test_documents.py",
        ("documents: whole scores cross boundaries", "p += other_documents(position_ids, q.dtype)", "pass"),
        ("documents: blocks cross boundaries", "    if position_ids is None:", "    if True:"),
    ),
    *mistakes(
        "minipar/autograd/documents.py",
        "autograd/test_documents.py",
        ("documents: the last document is lost", "ends = [*starts[1:], length]", "ends = [*starts[1:], starts[-1]]"),
        (
            "documents: a document loses its first token",
            "starts = tokens - position_ids ",
            "starts = tokens - position_ids + 1 ",
        ),
    ),
    *mistakes(
        "minipar/autograd/recompute.py",
        "autograd/test_documents.py",
        (
            "documents: the second forward has none",
            "setting(position_ids, self.position_ids)",
            "setting(position_ids, None)",
        ),
    ),
    *mistakes(
        "minipar/autograd/backward.py",
        "autograd/test_graph.py autograd/test_autograd.py",
        (
            "backward: the last user's gradient replaces those before it",
            "result = gradients[input_node] + result",
            "pass",
        ),
        ("backward: callbacks run after an inner pass too", "    if outer is None:", "    if True:"),
        ("backward: a recomputed block's input stays until the outer pass ends", "del self.uses[leaf]", "pass"),
        ("backward: saved arrays are not freed", "            node.free()", "            pass"),
        ("backward: deferred gradients are computed in reverse order", "self.popleft()", "self.pop()"),
        ("backward: a leaf's hooks do not run", "            hook(leaf)", "            pass"),
    ),
    *mistakes(
        "minipar/autograd/recompute.py",
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
        ("rotary: backward rotates forward", "_rotate(g[..., :start_k], -angles)", "_rotate(g[..., :start_k], angles)"),
        ("rotary: neighbours are pairs", "x.reshape(shape)", "x.reshape(*shape[:3], half, 2).swapaxes(-1, -2)"),
        ("gelu: another constant", "GELU_CUBIC = 0.044715", "GELU_CUBIC = 0.04715"),
        ("gelu: a factor of the derivative", "inner *= 3 * GELU_CUBIC", "inner *= 2 * GELU_CUBIC"),
        (
            "cross entropy: ignored targets get a gradient",
            "dlogits *= xp.where(counted, grad, 0)[:, None]",
            "dlogits *= grad",
        ),
        ("dropout: what stays is not scaled in backward", "return g * keep * scale", "return g * keep"),
    ),
    *mistakes(
        "minipar/autograd/rules.py",
        "autograd/test_graph.py autograd/test_autograd.py",
        ("division: the divisor's gradient has the wrong sign", "-g * a / (b * b)", "g * a / (b * b)"),
        ("tanh: a sign in the derivative", "g * (1 - y * y)", "g * (1 + y * y)"),
        ("indexing: repeated elements keep one gradient", "xp.add.at(full, index, g)", "full[index] = g"),
        ("transpose: backward permutes as forward", "g.transpose(inverse)", "g.transpose(order)"),
    ),
    *mistakes(
        "minipar/autograd/tensor.py",
        "autograd/test_graph.py autograd/test_autograd.py",
        ("the first gradient is not copied", "self.grad = xp.array(contribution)", "self.grad = contribution"),
        (
            "mean: divided by all elements, whatever the dim",
            "total * (total.size / self.size)",
            "total * (1 / self.size)",
        ),
        (
            "operation: what no gradient needs is saved, too",
            "            if not self.needs[i]:\n                continue\n",
            "",
        ),
    ),
    *mistakes(
        "minipar/autograd/rules.py",
        "autograd/test_operations.py",
        ("relu: a slope at 0", "positive = x > 0", "positive = x >= 0"),
        ("softmax: backward forgets the sum's gradient", "y * (g - (g * y).sum(axis=dim, keepdims=True))", "y * g"),
        ("softmax: the largest value is not subtracted", "xp.exp(x - x.max(axis=dim, keepdims=True))", "xp.exp(x)"),
        (
            "max: equal elements get the whole gradient each",
            "is_top / is_top.sum(axis=dim, keepdims=True)",
            "is_top / 1",
        ),
        ("swapaxes: backward leaves the dims", "g.swapaxes(dim, other)", "g"),
    ),
    *mistakes(
        "minipar/autograd/guards.py",
        "autograd/test_operations.py",
        ("transpose: two dims of a matrix are an order", "if known and len(chosen) == 2:", "if False:"),
    ),
]
