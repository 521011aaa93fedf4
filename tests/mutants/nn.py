"""Mistakes in minipar/nn: the model, its initial values, its optimizer and its files."""

from mutants.mutant import mistakes

MUTANTS = [
    *mistakes(
        "minipar/nn/gpt.py",
        "nn/test_epsilon.py nn/test_gpt.py nn/test_dropout.py",
        ("gpt: layer_norm_epsilon is ignored", "config.layer_norm_epsilon, self.dtype", "1e-5, self.dtype"),
        (
            "gpt: residual projections start as large as the rest",
            "config.initializer_range / math.sqrt(2 * config.n_layer)",
            "config.initializer_range",
        ),
        ("gpt: the MLP reads the stream without its norm", "self.mlp(self.ln_2(x))", "self.mlp(x)"),
        (
            "gpt: a sequence may be one token too long",
            "if length > self.config.n_positions:",
            "if length > self.config.n_positions + 1:",
        ),
        ("gpt: no dropout after attention", "return self.resid_dropout(self.c_proj(y))", "return self.c_proj(y)"),
    ),
    *mistakes(
        "minipar/nn/transformer.py",
        "nn/test_gpt.py nn/test_llama.py train/test_llama.py",
        (
            "models: the head does not follow the embedding's storage",
            "self.head_weight.data = self.token_embedding.data",
            "pass",
        ),
        (
            "models: the needed memory is of all ranks together",
            "check_memory(count * nbytes / shares, ",
            "check_memory(count * nbytes, ",
        ),
        ("models: an untied head is tied", "if self.config.tie_word_embeddings:", "if True:"),
        ("models: the operations of attention are halved", "+ 4 * tokens * length * h", "+ 2 * tokens * length * h"),
    ),
    *mistakes(
        "minipar/nn/llama.py",
        "nn/test_llama.py reference/test_llama.py",
        ("llama: rms_norm_eps is ignored", "config.rms_norm_eps, self.dtype", "1e-6, self.dtype"),
        ("llama: rope_theta is ignored", "theta=config.rope_theta", "theta=10000.0"),
        (
            "llama: the gate and the product change places",
            "swiglu(self.gate_proj(x), self.up_proj(x))",
            "swiglu(self.up_proj(x), self.gate_proj(x))",
        ),
        (
            "llama: the MLP reads the stream without its norm",
            "self.mlp(self.post_attention_layernorm(x))",
            "self.mlp(x)",
        ),
        ("llama: keys and values are swapped", "self.rotary(q, k, v,", "self.rotary(q, v, k,"),
        ("llama: a tied head counts as parameters", "(1 if self.tie_word_embeddings else 2)", "2"),
    ),
    *mistakes(
        "minipar/nn/moe.py",
        "nn/test_moe.py",
        ("moe: the weights of the chosen are not normalized", "chosen / chosen.sum(-1, keepdims=True)", "chosen"),
        (
            "moe: of equal probabilities the last expert wins",
            'argsort(-scores, axis=-1, kind="stable")',
            'argsort(scores, axis=-1, kind="stable")[:, ::-1]',
        ),
        ("moe: the least probable experts are chosen", "argsort(-scores", "argsort(scores"),
        ("moe: only the best expert is asked", "[:, : self.top_k]", "[:, :1]"),
        ("moe: results return to other tokens", "xp.argsort(order).reshape(", "order.reshape("),
        ("moe: the router gets no gradient", "self.route(tokens,", "self.route(tokens.detach(),"),
        ("moe: gate and up change places", "swiglu(self.w1(x), self.w3(x))", "swiglu(self.w3(x), self.w1(x))"),
        ("moe: every expert takes the first rows", "expert(xs[stop - count : stop])", "expert(xs[:count])"),
        ("moe: all experts count as active", "(self.num_experts_per_tok - 1)", "(self.num_local_experts - 1)"),
        ("moe: top-k may exceed the experts", "self.num_experts_per_tok > self.num_local_experts", "False"),
    ),
    *mistakes(
        "minipar/nn/moe.py",
        "nn/test_balance.py",
        ("balance: the shares of the whole batch", "loads.sum(axis=1, keepdims=True)", "loads.sum()"),
        ("balance: the auxiliary gradient takes the main one's place", "grad = grad + from_host", "grad = from_host"),
        (
            "balance: the load of a forward pass counts",
            "self.layer, self.loads = layer, loads",
            "self.layer, self.loads, layer.load = layer, loads, layer.load + loads.sum(axis=0)",
        ),
    ),
    *mistakes(
        "minipar/autograd/fused.py",
        "nn/test_moe.py",
        ("moe: a joined part's gradient is of other rows", "g[i:j]", "g[: j - i]"),
    ),
    *mistakes(
        "minipar/nn/pretrained.py",
        "reference/test_llama.py nn/test_llama.py",
        ("files: rope_theta of transformers 5 is not read", "content |= rope", "pass"),
        ("files: a rope_scaling is ignored", '"mlp_bias": False, "rope_scaling": None', '"mlp_bias": False'),
        ("files: another head size is accepted", 'content.get(name) in (None, wanted), f"expected', 'True, f"expected'),
    ),
    *mistakes(
        "minipar/nn/layers.py",
        "nn/test_dropout.py nn/test_module.py",
        ("layers: the seed is no part of a generator's key", 'f"{seed}:{name}"', 'f"{name}"'),
        ("dropout: the same masks in every step", "{keys.step} {sample}", "{sample}"),
        (
            "dropout: every rank takes the first slice of a mask",
            "= cut.part(own[cut.dim])",
            "= own[cut.dim][: len(own[cut.dim]) // cut.count]",
        ),
        ("dropout: drops what should stay", ">= ceil(", "< ceil("),
        ("dropout: a block is drawn from the beginning of its sample", "stream.advance(start // 8)", "pass"),
    ),
    *mistakes(
        "minipar/nn/module.py",
        "nn/test_optim.py nn/test_module.py nn/test_gpt.py",
        ("module: biases decay too", "self.decays = self.ndim >= 2", "self.decays = self.ndim >= 1"),
        (
            "module: a tied gradient is added again and again",
            "                leaf.grad = None",
            "                pass",
        ),
        ("module: ignored targets are counted", "int((y != IGNORE_INDEX).sum())", "int(y.size)"),
        (
            "module: loading replaces a parameter's storage",
            "parameter.data[...] = from_host",
            "parameter.data = from_host",
        ),
        ("module: the state is no copy", 'np.array(to_host(p.data), order="C")', "np.asarray(to_host(p.data))"),
    ),
    *mistakes(
        "minipar/nn/optim.py",
        "nn/test_optim.py",
        ("adamw: the first mean's weights are exchanged", "(1 - beta1) * (gradient - m)", "beta1 * (gradient - m)"),
        (
            "adamw: epsilon inside the root",
            "xp.sqrt(v) / root_correction + self.eps",
            "xp.sqrt(v + self.eps) / root_correction",
        ),
        ("adamw: decay without the learning rate", "1 - self.lr * self.weight_decay", "1 - self.weight_decay"),
        ("adamw: the first mean is not corrected", "self.lr / (1 - beta1**self.steps)", "self.lr"),
        ("clipping: small gradients are scaled up", "and norm > max_norm", "and norm > 0"),
        ("clipping: squares of float32 are summed in float32", '.sum(dtype="float64")', ".sum()"),
        ("warm-up: starts from 0", "lr * (step + 1) / (warmup_steps + 1)", "lr * step / (warmup_steps + 1)"),
        (
            "cosine: the last step is not the lowest",
            "max(1, total_steps - 1 - warmup_steps)",
            "max(1, total_steps - warmup_steps)",
        ),
    ),
    *mistakes(
        "minipar/nn/pretrained.py",
        "nn/test_gpt.py nn/test_epsilon.py nn/test_deferred.py",
        ("files: bfloat16 is read as the lower 16 bits", '"<u4") << 16', '"<u4") << 0'),
        ("files: a shard's name may be a path", "any(Path(str(file)).name != file", "any(str(file) != file"),
        (
            "export: config.json says no dropout",
            "dict.fromkeys(_DROPOUT, model.drop.p)",
            "dict.fromkeys(_DROPOUT, 0.0)",
        ),
        (
            "init: config.json's epsilon is not read",
            "if f.name in content})",
            'if f.name in content and "eps" not in f.name})',
        ),
        (
            "init: a head that differs from the embedding is accepted",
            "if not np.array_equal(",
            "if False and not np.array_equal(",
        ),
    ),
]
