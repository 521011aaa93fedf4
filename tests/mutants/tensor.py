"""Mistakes in minipar/parallel/tensor and minipar/parallel/pipeline."""

from mutants.mutant import mistakes

MUTANTS = [
    *mistakes(
        "minipar/parallel/tensor/layers.py",
        "parallel/tensor/test_layers.py parallel/tensor/test_vocabulary.py",
        ("tensor: a row layer's bias counts t times", "else y + self.bias", "else y + self.bias * self.group.size"),
        (
            "tensor: another rank's tokens look up row 0",
            "leave(y * is_own[..., None].astype(self.weight.dtype),",
            "leave(y,",
        ),
        ("tensor: the loss subtracts a sum of maxima", 'op="max"', 'op="sum"'),
        ("tensor: padding takes part in the softmax", "= -xp.inf", "= 0"),
        ("tensor: sequence parallelism gathers along the samples", "SEQUENCE = 1 ", "SEQUENCE = 0 "),
    ),
    *mistakes(
        "minipar/parallel/tensor/mappings.py",
        "parallel/tensor/test_mappings.py parallel/tensor/test_layers.py parallel/tensor/test_vocabulary.py",
        ("tensor: copy_to sums no gradients", "(x, _same, group.sum)", "(x, _same, _same)"),
        (
            "tensor: every rank takes the first part",
            "slice(self.rank * size, (self.rank + 1) * size)",
            "slice(0, size)",
        ),
        ("tensor: a gather is always a ring", "algorithm=GATHER[self.reduction]", 'algorithm="ring"'),
    ),
    *mistakes(
        "minipar/parallel/tensor/plan.py",
        "parallel/tensor/test_plan.py parallel/tensor/test_mistakes.py",
        ("tensor: heads cut across q, k and v", '"c_attn.weight": (1, 3)', '"c_attn.weight": (1, 1)'),
        (
            "tensor: every rank draws the first rank's heads' masks",
            "MaskSlice(1, group.size, partial(group.part, dim=0))",
            "MaskSlice(1, group.size, lambda whole: whole[: len(whole) // group.size])",
        ),
        ("tensor: a step does not sum partial gradients", "p.owner = tensor", "pass"),
        (
            "tensor: tp need not divide the heads",
            'check_divides("heads/tp", model.n_head, tp,',
            'check_divides("heads/tp", model.n_head, 1,',
        ),
    ),
    *mistakes(
        "minipar/parallel/tensor/plan.py",
        "parallel/tensor/test_llama.py parallel/tensor/test_plan.py",
        ("tensor: the columns of up go another way", '"gate_proj", "up_proj",', '"gate_proj",'),
        ("tensor: Llama's MLP has no sum after its rows", '("c_proj", "o_proj", "down_proj")', '("c_proj", "o_proj")'),
        (
            "tensor: the MLP's input gradients stay apart",
            '"input_layernorm", "post_attention_layernorm"',
            '"input_layernorm",',
        ),
        ("tensor: tp need not divide the K/V heads", "model.n_kv_head, tp,", "model.n_kv_head, 1,"),
        ("tensor: the K/V heads are not divided", "module.kv_heads //= group.size", "pass"),
    ),
    *mistakes(
        "minipar/parallel/tensor/plan.py",
        "parallel/tensor/test_mixtral.py",
        ("tensor: the router's gradient is a rank's part", "if sequence or name == ROUTER", "if sequence"),
        ("tensor: the experts' results stay apart", "module.leave = partial(layers.leave,", "partial(layers.leave,"),
        ("tensor: w3 is whole on every rank", '"w1", "w3")', '"w1")'),
    ),
    *mistakes(
        "minipar/parallel/traffic.py",
        "train/test_llama.py",
        (
            "traffic: an untied embedding is gathered for its backward",
            "(unit == 0 and not layout.model.tie_word_embeddings)",
            "False",
        ),
        ("traffic: an untied head is exchanged", "if layout.model.tie_word_embeddings and first", "if first"),
    ),
    *mistakes(
        "minipar/parallel/context.py",
        "train/test_balance.py",
        ("context: a rank balances its own tokens", "module.sum_loads = partial(comm", "partial(comm"),
    ),
    *mistakes(
        "minipar/parallel/context.py",
        "parallel/test_context.py",
        ("context: zigzag without the zag", "np.concatenate([early, late[::-1]]", "np.concatenate([early, late]"),
        (
            "context: an early query sees later keys",
            "[(whole, slice(0, half))] if source < rank",
            "[(whole, whole)] if source < rank",
        ),
        (
            "context: a late query does not see all keys",
            "else [(slice(half, tokens), whole)]",
            "else [(slice(half, tokens), slice(0, half))]",
        ),
        ("context: gradients of keys stop one hop short", "        return messages[1].wait()", "        return part"),
        ("context: the ring sends its own keys again and again", "            kv = following", "            pass"),
        (
            "context: the next block waits for this one",
            "            yield source, kv.astype",
            "            [m.wait() for m in messages]\n            yield source, kv.astype",
        ),
        (
            "context: the gather's gradients are in the order of arrival",
            "sorted(zip(self.sources, parts, strict=True), key=lambda x: x[0])",
            "list(zip(self.sources, parts, strict=True))",
        ),
        ("context: dropout of the first rank's keys", "[source, columns]\n", "[0, columns]\n"),
        (
            "context: positions from 0",
            "return from_host(tokens(np.arange(c * count)))",
            "return from_host(np.arange(count))",
        ),
        (
            "context: tokens' masks are cut inside the tensor-parallel cut",
            "mask_slices.insert(0, MaskSlice(1, c, tokens))",
            "mask_slices.append(MaskSlice(1, c, tokens))",
        ),
        (
            "context: ulysses takes the first heads' masks",
            "np.split(np.arange(heads), c)[self.rank]",
            "np.split(np.arange(heads), c)[0]",
        ),
        (
            "context: ulysses keeps the order of arrival",
            "whole[:, self.places(whole.shape[1])] = ",
            "whole.reshape(x.shape[0], self.size, x.shape[1], -1)[...] = ",
        ),
    ),
    *mistakes(
        "minipar/parallel/pipeline/stage.py",
        "parallel/pipeline/test_sent_arrays.py parallel/pipeline/test_executor.py",
        (
            "executor: never frees what it has sent",
            "self._sent = [message for message in self._sent if not message.test()]",
            "pass",
        ),
        ("executor: a pair's F is sent after its B", "if a.pair}.intersection(lowered)", "if a.pair}.intersection([])"),
        ("executor: one tag for both directions", '(receiver * 2 + (direction == "B"))', "(receiver * 2)"),
        ("executor: a step ends before its messages have left", "            message.wait()", "            pass"),
        ("executor: the loss's gradient is not scaled", "xp.full_like(y, scale)", "xp.full_like(y, 1.0)"),
    ),
    *mistakes(
        "minipar/parallel/pipeline/schedules.py",
        "parallel/pipeline/test_schedules.py",
        ("schedules: 1f1b warms up one forward too many", "ahead=min(p - 1 - r, m)) for", "ahead=min(p - r, m)) for"),
        (
            "schedules: interleaved warms up for one hop each",
            "min(2 * (p - r - 1) + (v - 1) * p",
            "min((p - r - 1) + (v - 1) * p",
        ),
        ("schedules: zb-h2 puts W off as little as zb-h1", "delay=2 * r", "delay=r"),
        ("schedules: dualpipev's last rank pairs its first B", "        if r == p - 1:", "        if r == p:"),
        ("schedules: dualpipev puts off no W after step 3", '*"Ii" * (r + 1)', '*"Bb" * (r + 1)'),
    ),
    *mistakes(
        "minipar/parallel/pipeline/actions.py",
        "parallel/pipeline/test_schedules.py",
        (
            "simulator: a message within a rank takes time",
            "durations.comm if schedule.home[n.stage] != rank else 0",
            "durations.comm",
        ),
        ("simulator: the bubble is idle / busy", "Fraction(idle, total)", "Fraction(idle, total - idle)"),
        ("simulator: a pair hides nothing", "forward + backward - 2 * self.exchange", "forward + backward"),
        (
            "simulator: W takes no time in B",
            "both = self.backward_input + self.backward_weight",
            "both = self.backward_input",
        ),
    ),
    *mistakes(
        "minipar/parallel/pipeline/actions.py",
        "parallel/pipeline/test_check.py",
        ("actions: a pair is written with its B first", "map(str, self.pair)", "map(str, self.pair[::-1])"),
    ),
    *mistakes(
        "minipar/parallel/pipeline/check.py",
        "parallel/pipeline/test_check.py",
        (
            "checker: a pair's F is sent and its B is not",
            "for half in action.halves for user in",
            "for half in action.halves[:1] for user in",
        ),
        ("checker: an action may be done twice", "if count[action] > 1:", "if count[action] > 2:"),
        ("checker: sends that block are not tried", "    _check_blocking_sends(lowered)", "    pass"),
        ("checker: a message that nobody needs is accepted", "(action, rank) not in expected", "False"),
    ),
    *mistakes(
        "minipar/parallel/pipeline/stage.py",
        "parallel/pipeline/test_stage.py parallel/pipeline/test_executor.py",
        ("stages: the head does not count in the cut", "load[-1] += costs[-1]", "pass"),
        ("stages: activations stay after their backward", "self.alive.pop(microbatch)", "self.alive[microbatch]"),
        (
            "stages: the head's gradient of the embedding is not sent",
            "self.comm.isend(leaf.grad, self.first",
            "self.comm.isend(0 * leaf.grad, self.first",
        ),
    ),
    *mistakes(
        "minipar/parallel/pipeline/module.py",
        "parallel/pipeline/test_module.py",
        ("pipeline module: plain optimizers are accepted", "p.owner = self", "pass"),
        ("pipeline module: counts its own replica's targets", 'dp.all_reduce(totals, algorithm="ordered")\n', "pass\n"),
    ),
]
