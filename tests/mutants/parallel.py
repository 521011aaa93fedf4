"""Mistakes in minipar/parallel: data parallelism, ZeRO, and what spans all axes. (Tensor and pipeline: tensor.py.)"""

from mutants.mutant import mistakes

MUTANTS = [
    *mistakes(
        "minipar/parallel/groups.py",
        "parallel/test_bucket_sizes.py parallel/test_ddp.py",
        (
            "groups: first_bucket_bytes is ignored",
            "bucket_bytes if len(groups) > 1 else first_bucket_bytes",
            "bucket_bytes",
        ),
    ),
    *mistakes(
        "minipar/parallel/buckets.py",
        "parallel/test_bucket_sizes.py parallel/test_ddp.py",
        ("buckets: an unused parameter sends what was there", "view[...] = 0", "pass"),
        ("buckets: a bucket does not wait for the head", "[(p, *p.ties) for p", "[(p,) for p"),
    ),
    *mistakes(
        "minipar/parallel/ddp.py",
        "parallel/test_ddp.py",
        ("ddp: the naive form leaves the tied gradient out", "            p.fold_tied_gradients()\n", ""),
        ("ddp: the naive form sums nothing", "self.comm.all_reduce(p.grad, algorithm=self.algorithm)", "pass"),
    ),
    *mistakes(
        "minipar/parallel/ddp.py",
        "parallel/test_expert.py",
        (
            "ddp: experts are summed over all ranks",
            "self.works.append(bucket.comm.all_reduce(",
            "self.works.append(self.comm.all_reduce(",
        ),
    ),
    *mistakes(
        "minipar/parallel/expert.py",
        "parallel/test_expert.py",
        (
            "expert: rows in the order of their source",
            'np.argsort(expert_of_row, kind="stable")',
            "np.arange(len(expert_of_row))",
        ),
        (
            "expert: an expert's rows in any order",
            'np.argsort(expert_of_row, kind="stable")',
            "np.argsort(expert_of_row[::-1])[::-1]",
        ),
        ("expert: rows leave the sum to dp", "p.owners.append(owner)", "pass"),
        ("expert: every rank keeps the first experts", "comm.rank * count : (comm.rank + 1) * count", ": count"),
    ),
    *mistakes(
        "minipar/parallel/expert.py",
        "parallel/test_expert.py",
        ("expert: experts are summed over dp", "Group(experts, self.replicas,", "Group(experts, group.comm,"),
    ),
    *mistakes(
        "minipar/parallel/grad_norm.py",
        "parallel/test_expert.py",
        ("norm: of this rank's experts", "or is_expert(p) for p", "for p"),
    ),
    *mistakes(
        "minipar/parallel/traffic.py",
        "parallel/test_expert.py",
        ("traffic: experts are reduced over all of dp", "p.ep is not None] += p.dp.size", "False] += p.dp.size"),
    ),
    *mistakes(
        "minipar/parallel/expert.py",
        "train/test_balance.py",
        ("expert: a capacity's counts travel too", "if moe.capacity_factor is None:", "if True:"),
    ),
    *mistakes(
        "minipar/parallel/traffic.py",
        "train/test_balance.py",
        ("traffic: loads stay on their pipeline rank", "ordered_sum(layout.loads, layout.pp, rank)", "0"),
        (
            "traffic: the loads of one sample",
            "layout.samples * layout.model.num_local_experts",
            "layout.model.num_local_experts",
        ),
    ),
    *mistakes(
        "minipar/parallel/layout.py",
        "parallel/test_layout.py",
        (
            "layout: all ranks of tp route the same tokens",
            "return (replica * self.tp + tp) // self.expert_tp",
            "return replica",
        ),
    ),
    *mistakes(
        "minipar/parallel/traffic.py",
        "parallel/test_expert_mesh.py",
        ("traffic: recompute enters no experts again", "crossings = passes *", "crossings = 2 *"),
        ("traffic: loads stay on a rank of tp", "crossed + load_bytes(layout, layout.tp, rank, pp)", "crossed"),
        (
            "traffic: experts are entered over tp",
            "crossings, crossings, layout.expert_tp)",
            "crossings, crossings, layout.tp)",
        ),
    ),
    *mistakes(
        "minipar/parallel/split_guards.py",
        "parallel/test_expert_mesh.py",
        ("guards: experts are shared among those that cut them", " or other == EXPERTS):", "):"),
        ("guards: tokens that all of tp have are routed t times", "    if not sequence:\n", "    if False:\n"),
        (
            "guards: nobody shares the experts out",
            'if "expert_parallel" not in dict(self.model.split_over):',
            "if False:",
        ),
    ),
    *mistakes(
        "minipar/parallel/expert.py",
        "parallel/test_expert_mesh.py",
        (
            "expert: one rank of ep has no groups",
            "if comm.size == 1 and EXPERTS not in",
            "if comm.size == 1 or EXPERTS not in",
        ),
        ("expert: a wrapper over ranks of tp", "is_one_of_tp and comm.size * len(tp)", "comm.size * len(tp)"),
    ),
    *mistakes(
        "minipar/parallel/step_guard.py",
        "parallel/test_expert.py",
        (
            "guard: ranks compare experts that only one holds",
            "by_ranks((bucket.holders, [bucket])",
            "by_ranks((self.strategy.comm, [bucket])",
        ),
    ),
    *mistakes(
        "minipar/parallel/fsdp.py",
        "parallel/test_fsdp.py parallel/test_zero.py parallel/test_contract.py",
        ("fsdp: parameters are never freed", "leaf.data = placeholder(leaf.shape, self.dtype)", "pass"),
        (
            "fsdp: the first unit is not released after its backward",
            "queue_callback(partial(self.post_backward, needs))",
            "pass",
        ),
        (
            "fsdp: after a step the old values are read",
            "                unit.wait_for_unshard()\n                unit.reshard()\n",
            "                pass\n",
        ),
        ("fsdp: the embedding is gathered for its backward", "if needs.segment.reads_in_backward:", "if True:"),
        ("fsdp: does not wait for what it gathers", "        work.wait()\n        for p, view", "        for p, view"),
    ),
    *mistakes(
        "minipar/parallel/grad_norm.py",
        "parallel/test_grad_norm.py parallel/tensor/test_mistakes.py",
        (
            "norm: a split parameter counts on one rank only",
            "SPLIT if isinstance(placement.tp, Shard) else WHOLE",
            "WHOLE",
        ),
        ("norm: stages do not add theirs", "if pp is not None and pp.size > 1:", "if False:"),
        ("norm: shards do not add theirs", 'dp.all_reduce(totals, algorithm="ordered")', "pass"),
    ),
    *mistakes(
        "minipar/parallel/memory.py",
        "parallel/test_memory.py",
        ("memory: stage 1 does not shard the optimizer", "own if stage >= 1 else psi", "own if stage >= 2 else psi"),
        ("memory: whole gradients of microbatches are forgotten", "own + psi if accumulating else own", "own"),
        ("memory: exactly the limit is refused", "if totals[stage] <= limit:", "if totals[stage] < limit:"),
    ),
    *mistakes(
        "minipar/parallel/placement.py",
        "parallel/test_placement.py parallel/test_state.py",
        (
            "placement: a part's size is rounded down",
            "-(-self.size // (self.groups * self.ranks))",
            "self.size // (self.groups * self.ranks)",
        ),
        (
            "placement: joined rank by rank, not stretch by stretch",
            "            ordered += [stretches[rank][group] for rank in range(self.ranks)]\n",
            "            pass\n        for groups in stretches:\n            ordered += groups\n",
        ),
        ("placement: a chunk ignores the parameter's offset", "max(position - self.offset, 0)", "max(position, 0)"),
        ("placement: a shard never decays", "self.decays = whole.decays", "pass"),
    ),
    *mistakes(
        "minipar/parallel/shards.py",
        "parallel/test_zero.py parallel/test_contract.py parallel/test_fsdp.py",
        ("zero: a second sum replaces the first", "if all(shard.grad is None for shard in self.shards):", "if True:"),
        ("zero: all whole gradients exist at once", "for work in works[:-1]:", "for work in ():"),
    ),
    *mistakes(
        "minipar/parallel/step_guard.py",
        "parallel/test_zero.py parallel/test_contract.py parallel/test_fsdp.py",
        (
            "zero: zero_grad leaves the shards' gradients",
            "            for p in (*self.leaves, *self.given):\n",
            "            for p in self.leaves:\n",
        ),
    ),
    *mistakes(
        "minipar/parallel/buckets.py",
        "parallel/test_zero.py parallel/test_contract.py parallel/test_fsdp.py",
        ("zero: what arrived before the buffer is lost", "view[...] = p.grad", "view[...] = 0"),
    ),
    *mistakes(
        "minipar/parallel/state.py",
        "parallel/test_state.py",
        (
            "state: every tp rank owns what all hold",
            "if not is_first_holder(placement.tp):",
            "if not is_first_holder(placement.tp) and False:",
        ),
        ("state: every replica of a shard owns it", "placement.dp.replica > 0:", "placement.dp.replica > 99:"),
        (
            "state: a shard is read at its place in the whole",
            "slice(own.start - held.start, own.stop - held.start)",
            "slice(own.start, own.stop)",
        ),
    ),
    *mistakes(
        "minipar/parallel/hybrid.py",
        "parallel/test_hybrid.py",
        (
            "hybrid: nothing is summed over the replicas",
            "return _TwoSums(first, self.across, out, algorithm)",
            "return first",
        ),
    ),
    *mistakes(
        "minipar/parallel/parallelize.py",
        "parallel/test_contract.py",
        ("shard: stage 3 keeps whole parameters", "    if stage == 2:\n", "    if stage in (2, 3):\n"),
    ),
    *mistakes(
        "minipar/parallel/parallelize.py",
        "parallel/test_parallelize.py",
        (
            "parallelize: trees leave a rank's tokens unsummed",
            "if tensor is None else",
            "if tensor is None or leaves else",
        ),
        ("parallelize: leaves of no tokens", 'if reduction == "tree" and length == 0:', "if False:"),
    ),
    *mistakes(
        "minipar/parallel/traffic.py",
        "parallel/test_traffic.py",
        (
            "traffic: recompute sends nothing again",
            "forwards = 2 if layout.recompute else 1\n    entered",
            "forwards = 1\n    entered",
        ),
        (
            "traffic: the norm's units without the two ends",
            "2 * (layout.model.n_layer + 2)",
            "2 * layout.model.n_layer",
        ),
        (
            "traffic: stage 3 gathers once per microbatch",
            "return 2 * layout.microbatches",
            "return layout.microbatches",
        ),
        (
            "traffic: the embedding's rows are rounded down",
            "-(-layout.model.vocab_size // layout.tp)",
            "layout.model.vocab_size // layout.tp",
        ),
    ),
    *mistakes(
        "minipar/parallel/buckets.py",
        "parallel/test_ddp.py parallel/tensor/test_plan.py",
        ("buckets: no_sync sends all the same", "if not self.enabled:", "if False:"),
    ),
    *mistakes(
        "minipar/parallel/ddp.py",
        "parallel/test_ddp.py parallel/tensor/test_plan.py",
        ("ddp: gradients are read before they have arrived", "            work.wait()", "            pass"),
        ("ddp: partial gradients travel before their sum over tp", "self.before_reduce(bucket.parameters)", "pass"),
    ),
    *mistakes(
        "minipar/parallel/layout.py",
        "parallel/test_layout.py",
        (
            "traffic: neighbours hold the same experts",
            "elif holder == own % self.ep:",
            "elif holder == own // self.ep:",
        ),
        ("traffic: a pipeline rank numbers its own units", "unit=i, units=len(units)", "unit=0, units=len(units)"),
        (
            "traffic: every rank is in the first replica",
            "in_bucket(shared, shard, self.shards, replica)",
            "in_bucket(shared, shard, self.shards, 0)",
        ),
    ),
    *mistakes(
        "minipar/parallel/traffic.py",
        "parallel/test_hybrid.py",
        ("traffic: the norm of replicas is summed over all ranks", "shards, rank % shards)", "replicas, rank)"),
    ),
    *mistakes(
        "minipar/parallel/loss.py",
        "parallel/test_contract.py",
        (
            "loss: a rank's own count times the ranks",
            "total[0] / max(1.0, total[1])",
            "total[0] / max(1.0, count * comm.size)",
        ),
    ),
    *mistakes(
        "minipar/parallel/step_guard.py",
        "parallel/test_contract.py parallel/test_first_step.py",
        ("guard: a step before the sum is accepted", 'if self.state == "local":', "if False:"),
        ("guard: ranks may start from different models", "check_start(comm, [bucket", "_ = (comm, [bucket"),
        (
            "guard: a failed backward lets the next one through",
            "self.is_scaled = False  # a backward pass that failed",
            "pass  # a backward pass that failed",
        ),
        ("guard: ranks may have other learning rates", "check_settings(self.strategy.comm, optimizers)", "pass"),
        (
            "guard: an update on one rank alone",
            "                self.check_divergence()\n        self.losses",
            "                pass\n        self.losses",
        ),
        ("guard: two optimizers of one parameter", "reference() not in (None, optimizer):", "False:"),
    ),
    *mistakes(
        "minipar/parallel/ddp.py",
        "parallel/test_contract.py",
        ("ddp: every loss of a pass starts a sum", "if self.hooks.enabled and self.hooks.has_gradients:", "if True:"),
    ),
    *mistakes(
        "minipar/parallel/zero.py",
        "parallel/test_zero.py parallel/test_contract.py",
        (
            "zero: parameters are used before they are gathered",
            "        for work in works:\n            work.wait()",
            "        pass",
        ),
    ),
    *mistakes(
        "minipar/parallel/zero.py",
        "parallel/test_fsdp.py",
        ("zero: a gradient that was sent is kept", "        bucket.drop_gradient()\n", ""),
        (
            "zero: backward writes into arrays that are not the bucket's",
            "                    segment.run = partial(self.run, bucket, segment.run)\n",
            "",
        ),
        ("zero: a gradient is allocated at the head already", "                    break\n", ""),
    ),
    *mistakes(
        "minipar/parallel/zero_optimizer.py",
        "parallel/test_zero.py parallel/test_contract.py parallel/pipeline/test_executor.py",
        (
            "zero: an optimizer reads gradients that are not there",
            "gradient = self.bucket.complete()",
            "gradient = self.bucket.gradient",
        ),
    ),
    *mistakes(
        "minipar/parallel/guards.py",
        "parallel/test_clear_errors.py",
        ("guards: a second wrapper passes", "        if owner.wrapper:\n", "        if False:\n"),
        ("guards: a wrapper is a model", "    if is_wrapper(model):\n", "    if False:\n"),
        (
            "guards: replicas need not divide the ranks",
            'check_divides("ranks/replicas", comm.size',
            'check_divides("", 0',
        ),
    ),
    *mistakes(
        "minipar/parallel/guards.py",
        "parallel/test_refusals.py",
        ("guards: experts are summed over all ranks", "if placement.ep is not None and over_all:", "if False:"),
        ("guards: partial gradients stay partial", "and before_reduce is None:", "and False:"),
    ),
    *mistakes(
        "minipar/parallel/tensor/layers.py",
        "parallel/test_clear_errors.py",
        ("guards: split logits are taken for all", "border.group.size * weight", "weight"),
    ),
    *mistakes(
        "minipar/parallel/tree.py",
        "train/test_tree.py",
        (
            "tree: q, k and v are cut together",
            "matrix.reshape(rows, groups, leaves, width)",
            "matrix.reshape(rows, leaves, groups, width).swapaxes(1, 2)",
        ),
        ("tree: far leaves first", "terms[0::2] + terms[1::2]", "terms[: len(terms) // 2] + terms[len(terms) // 2 :]"),
        ("tree: tp has more ranks than there are leaves", "model.vocab_size, length)", "length)"),
    ),
    *mistakes(
        "minipar/parallel/exact_norm.py",
        "train/test_tree.py",
        ("exact norm: each rank of tp counts what all have", "if is_first_holder(placement_of(p).tp):", "if True:"),
        ("exact norm: the sum of too many squares is wrong", "    if elements > most:", "    if False:"),
        ("exact norm: the lower halves are dropped", "totals[1] += low", "totals[1] += 0 * low"),
    ),
]
