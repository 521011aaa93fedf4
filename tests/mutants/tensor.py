"""Mistakes in minipar/parallel/tensor and minipar/parallel/pipeline."""

from mutants.mutant import mistakes

MUTANTS = [
    *mistakes(
        "minipar/parallel/tensor/layers.py",
        "parallel/tensor/test_layers.py parallel/tensor/test_vocabulary.py",
        ("tensor: a row layer's bias counts t times", "y + self.bias", "y + self.bias * self.border.group.size"),
        (
            "tensor: another rank's tokens look up row 0",
            "return y * is_own[..., None].astype(self.weight.dtype)",
            "return y",
        ),
        ("tensor: sequence parallelism gathers along the samples", "SEQUENCE = 1 ", "SEQUENCE = 0 "),
        (
            "tensor: a position is looked up for other tokens",
            "self.border.group.part(index, index.ndim - 1)",
            "index[: len(index) // self.border.group.size]",
        ),
    ),
    *mistakes(
        "minipar/parallel/tensor/vocabulary.py",
        "parallel/tensor/test_vocabulary.py",
        ("tensor: the loss subtracts a sum of maxima", 'op="max"', 'op="sum"'),
        ("tensor: padding takes part in the softmax", "= -xp.inf", "= 0"),
    ),
    *mistakes(
        "minipar/parallel/tensor/mappings.py",
        "parallel/tensor/test_mappings.py parallel/tensor/test_layers.py parallel/tensor/test_vocabulary.py",
        ("tensor: copy_to sums no gradients", "(x, _same, group.sum)", "(x, _same, _same)"),
        ("tensor: every rank takes the first part", "start = self.rank * size", "start = 0"),
        ("tensor: a gather is always a ring", "algorithm=GATHER[self.reduction]", 'algorithm="ring"'),
    ),
    *mistakes(
        "minipar/parallel/tensor/plan.py",
        "parallel/tensor/test_plan.py parallel/tensor/test_mistakes.py",
        ("tensor: heads cut across q, k and v", '"c_attn": Split(1, 3,', '"c_attn": Split(1, 1,'),
        (
            "tensor: every rank draws the first rank's heads' masks",
            "part = partial(group.part, dim=0)",
            "part = lambda whole: whole[: len(whole) // group.size]",
        ),
        ("tensor: a step does not sum partial gradients", "p.owners.append(tensor)", "pass"),
        (
            "tensor: tp need not divide the heads",
            'check_divides("heads/tp", model.n_head, tp,',
            'check_divides("heads/tp", model.n_head, 1,',
        ),
    ),
    *mistakes(
        "minipar/parallel/tensor/plan.py",
        "parallel/tensor/test_llama.py parallel/tensor/test_plan.py",
        ("tensor: the columns of up go another way", '"up_proj": Split(0, 1,', '"up_proj": Split(1, 1,'),
        (
            "tensor: Llama's MLP has no sum after its rows",
            '"down_proj": Split(1, 1, RowLinear)',
            '"down_proj": Split(1, 1, RowLinear, crosses=False)',
        ),
        ("tensor: the MLP's input gradients stay apart", "llama.Attention | llama.MLP)", "llama.Attention)"),
        (
            "tensor: q, k and v sum their input's gradients one by one and together",
            '"q_proj": Split(0, 1, ColumnLinear, crosses=False)',
            '"q_proj": Split(0, 1, ColumnLinear)',
        ),
        ("tensor: tp need not divide the K/V heads", "model.n_kv_head, tp,", "model.n_kv_head, 1,"),
        ("tensor: the K/V heads are not divided", "module.kv_heads = max(1, module.kv_heads // group.size)", "pass"),
    ),
    *mistakes(
        "minipar/parallel/tensor/plan.py",
        "parallel/tensor/test_llama.py train/test_grouped_queries.py",
        (
            "tensor: copies of other heads are added up",
            "sharers, _ = comm.levels(comm.size // copies)",
            "_, sharers = comm.levels(copies)",
        ),
        ("tensor: copies wait for a wrapper to sum them", "if terms(own) > 1:", "if isinstance(own, Partial):"),
        ("tensor: any number of ranks may copy a head", '"tp/kv-heads", tp, model.n_kv_head,', '"tp/kv-heads", tp, 1,'),
        (
            "tensor: v is whole heads or nothing",
            'ColumnLinear, crosses=False, of_kv_heads=True),\n    "o_',
            'ColumnLinear, crosses=False),\n    "o_',
        ),
    ),
    *mistakes(
        "minipar/parallel/placement.py",
        "parallel/tensor/test_llama.py parallel/test_placement.py",
        (
            "placement: the gradients of copies are not summed",
            "return 1 if isinstance(placement, Replicate)",
            "return 1 if not isinstance(placement, Partial)",
        ),
        ("placement: each holder is the first", "return placement.copy == 0 if", "return True if"),
        ("placement: a table without copies", "if self.copies > 1 else", "if False else"),
    ),
    *mistakes(
        "minipar/parallel/grad_norm.py",
        "parallel/test_grad_norm.py",
        ("norm: each copy of a head counts", "if kind == SPLIT and not is_first_holder(placement.tp):", "if False:"),
    ),
    *mistakes(
        "minipar/parallel/state.py",
        "train/test_grouped_queries.py",
        (
            "state: a saved head has its rank's number",
            "tp.groups, tp.rank, tp.ranks)",
            "tp.groups, tp.rank, tp.ranks * tp.copies)",
        ),
    ),
    *mistakes(
        "minipar/parallel/traffic.py",
        "train/test_grouped_queries.py parallel/test_traffic.py",
        (
            "traffic: the sum of copies is free",
            "for ranks in {layout.tp, kv_copies(layout.model.n_kv_head, layout.tp)} - {1}:",
            "for ranks in {layout.tp}:",
        ),
        ("traffic: heads of keys on fewer ranks", "kv_heads = max(1, layout.", "kv_heads = max(0, layout."),
    ),
    *mistakes(
        "minipar/plan/model.py",
        "parallel/tensor/test_llama.py",
        (
            "model: copies of heads need no room",
            "return self if self.groups >= min(tp, self.heads) else replace",
            "return self or replace",
        ),
    ),
    *mistakes(
        "minipar/parallel/tensor/plan.py",
        "parallel/tensor/test_mixtral.py",
        ("tensor: the router's gradient is a rank's part", "if sequence or layer == ROUTER", "if sequence"),
        ("tensor: the experts' results stay apart", "module.leave = border_of_experts.leave", "pass"),
        ("tensor: w3 is whole on every rank", '    "w3": Split(0, 1, ColumnLinear, crosses=False),\n', ""),
    ),
    *mistakes(
        "minipar/parallel/traffic.py",
        "train/test_llama.py",
        (
            "traffic: an untied embedding is gathered for its backward",
            "(unit == 0 and not layout.model.tie_word_embeddings)",
            "False",
        ),
        (
            "traffic: an untied head is exchanged",
            "if layout.model.tie_word_embeddings and layout.first",
            "if layout.first",
        ),
    ),
    *mistakes(
        "minipar/parallel/tensor/plan.py",
        "parallel/test_expert_mesh.py",
        ("tensor: each expert is cut over all of tp", 'if etp is not None and ".experts." in name:', "if False:"),
        ("tensor: a rank of tp balances its own tokens", "moe.load_sums.append(partial(comm", "(partial(comm"),
        ("tensor: experts have the ranks of all else", "placement.update(p, ep=0)", "pass"),
        ("tensor: a forgotten expert_parallel passes", "p.owners.append(guard)", "pass"),
        (
            "tensor: experts are entered over tp",
            "module.enter = border_of_experts.enter",
            "module.enter = border.enter",
        ),
    ),
    *mistakes(
        "minipar/parallel/context.py",
        "train/test_balance.py",
        ("context: a rank balances its own tokens", "module.load_sums.append(partial(comm", "(partial(comm"),
    ),
    *mistakes(
        "minipar/parallel/token_order.py",
        "parallel/test_context.py",
        ("context: zigzag without the zag", "np.concatenate([early, late[::-1]]", "np.concatenate([early, late]"),
        ("context: an early query sees later keys", "return [(whole, first_half)]", "return [(whole, whole)]"),
        (
            "context: a late query does not see all keys",
            "return [(second_half, whole)]",
            "return [(second_half, first_half)]",
        ),
    ),
    *mistakes(
        "minipar/parallel/token_order.py",
        "parallel/test_documents.py",
        ("documents: a rank sees others' earlier documents", "[starts[first], queries[first]]", "[0, queries[first]]"),
        ("documents: chunks of a document see one another", "ends_before |= np.diff(queries) > 1", "pass"),
        ("documents: what does not divide is dealt anew", "dealt[i] += rest", "pass"),
        ("documents: the zag is missing", "np.minimum(places, 2 * ranks - 1 - places)", "places % ranks"),
    ),
    *mistakes(
        "minipar/parallel/context.py",
        "parallel/test_documents.py",
        ("documents: the ring's backward has none", "with packed(ids):", "with packed(None):"),
        ("documents: positions are those of other ranks", "from_host(context.part(ids))", "from_host(ids[:, :count])"),
    ),
    *mistakes(
        "minipar/parallel/context.py",
        "parallel/test_context.py",
        (
            "context: gradients of keys stop one hop short",
            "        dk, dv = received.wait()",
            "        dk, dv = dblock",
        ),
        (
            "context: a rank passes on its own part of a gradient alone",
            "                dblock += received.wait()",
            "                received.wait()",
        ),
        (
            "context: the ring sends its own keys again and again",
            "                message.wait()\n            block = next_block\n        return",
            "                message.wait()\n        return",
        ),
        (
            "context: the next block waits for this one",
            "            attend_block(context, context.source(step), q, wide, scale, out, lse)",
            "            [m.wait() for m in messages]\n"
            "            attend_block(context, context.source(step), q, wide, scale, out, lse)",
        ),
        (
            "context: the gather's gradients are in the order of arrival",
            "            dblocks[source] = dblock",
            "            dblocks[step] = dblock",
        ),
        (
            "context: positions from 0",
            "return from_host(own(np.arange(c * count)))",
            "return from_host(np.arange(count))",
        ),
        (
            "context: tokens' masks are cut inside the tensor-parallel cut",
            "mask_slices.insert(0, MaskSlice(1, c, own))",
            "mask_slices.append(MaskSlice(1, c, own))",
        ),
        ("context: a ring forgets dropout", '    if context.size > 1 and method != "ulysses":', "    if False:"),
        (
            "context: a ring ignores its masks",
            "    if keep is not None:\n        refuse_dropout",
            "    if False:\n        refuse_dropout",
        ),
    ),
    *mistakes(
        "minipar/parallel/ulysses.py",
        "parallel/test_context.py",
        ("context: ulysses takes the first heads' masks", "by_rank[self.context.rank].copy()", "by_rank[0].copy()"),
        (
            "context: ulysses keeps the order of arrival",
            "whole[:, self.context.positions(length)] = ",
            "whole.reshape(batch, self.context.size, tokens, -1)[...] = ",
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
        ("executor: a pair's F is sent after its B", "lower(schedule.unpaired())", "lower(schedule).unpaired()"),
        ("executor: one tag for both directions", "else 2 * receiver + 1", "else 2 * receiver"),
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
        ("schedules: dualpipev's last rank pairs its first B", "i == 0 and r == p - 1:", "i == 0 and r == p:"),
        ("schedules: dualpipev puts off no W after step 3", "if i < r + 1:", "if True:"),
    ),
    *mistakes(
        "minipar/parallel/pipeline/actions.py",
        "parallel/pipeline/test_schedules.py",
        (
            "simulator: a message within a rank takes time",
            "durations.comm if schedule.home[need.stage] != rank else 0",
            "durations.comm",
        ),
        ("simulator: the bubble is idle / busy", "Fraction(idle, total)", "Fraction(idle, total - idle)"),
        ("simulator: a pair hides nothing", "forward + backward - 2 * self.exchange", "forward + backward"),
        (
            "simulator: W takes no time in B",
            "return self.backward_input + self.backward_weight",
            "return self.backward_input",
        ),
    ),
    *mistakes(
        "minipar/parallel/pipeline/actions.py",
        "parallel/pipeline/test_check.py",
        ("actions: a pair is written with its B first", "({forward};{backward})", "({backward};{forward})"),
    ),
    *mistakes(
        "minipar/parallel/pipeline/check.py",
        "parallel/pipeline/test_check.py",
        (
            "checker: a pair's F is sent and its B is not",
            "for result in action.halves:",
            "for result in action.halves[:1]:",
        ),
        ("checker: an action may be done twice", "if count[action] > 1:", "if count[action] > 2:"),
        ("checker: sends that block are not tried", "    simulate_in_order(lowered, Durations(), channel)", "    pass"),
        ("checker: a message that nobody needs is accepted", "(action, rank) not in expected", "False"),
    ),
    *mistakes(
        "minipar/parallel/pipeline/in_order.py",
        "parallel/pipeline/test_in_order.py",
        ("channels: a computation does not wait for its message", "if receive in received:", "if False:"),
        (
            "channels: a message is posted before the computations before it",
            "if computed is not None else []",
            "if computed is not None and action.computes else []",
        ),
        ("channels: one per direction is one per pair", 'if channel == "pair":', 'if channel != "rank":'),
        ("channels: messages take no time", "else durations.comm", "else 0"),
        ("channels: a circle's stretch ends where it begins", "stretch[-1].later", "stretch[0].later"),
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
        ("pipeline module: plain optimizers are accepted", "p.owners.append(self)", "pass"),
        ("pipeline module: counts its own replica's targets", 'dp.all_reduce(totals, algorithm="ordered")\n', "pass\n"),
    ),
    *mistakes(
        "minipar/parallel/tensor/layers.py",
        "parallel/pipeline/test_module.py",
        (
            "layers: the input's gradient is put off as a weight's",
            "return PendingGradient(wait), dweight",
            "from minipar.autograd import LazyGradient\n\n        return LazyGradient(lambda out: wait()), dweight",
        ),
    ),
    *mistakes(
        "minipar/parallel/tensor/user_layers.py",
        "parallel/tensor/test_layers.py",
        ("layers: the bias of groups is one group", "group.shard(0, n_out, groups)", "group.shard(0, n_out)"),
    ),
]
