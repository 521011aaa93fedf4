"""Mistakes in minipar/parallel: data parallelism, ZeRO, and what spans all axes. (Tensor and pipeline: tensor.py.)"""

from mutants.mutant import mistakes

MUTANTS = [
    *mistakes(
        "minipar/parallel/buckets.py",
        "parallel/test_bucket_sizes.py parallel/test_ddp.py",
        (
            "buckets: first_bucket_bytes is ignored",
            "(bucket_bytes if len(groups) > 1 else first_bucket_bytes)",
            "bucket_bytes",
        ),
        ("buckets: an unused parameter sends what was there", "p.grad_buffer[...] = 0", "pass"),
        ("buckets: a bucket does not wait for the head", "for leaf in (p, *p.ties)}", "for leaf in (p,)}"),
    ),
    *mistakes(
        "minipar/parallel/ddp.py",
        "parallel/test_expert.py",
        ("ddp: experts are summed over all ranks", "return bucket.comm.all_reduce(", "return self.comm.all_reduce("),
    ),
    *mistakes(
        "minipar/parallel/expert.py",
        "parallel/test_expert.py",
        ("expert: rows in the order of their source", 'np.argsort(expert, kind="stable")', "np.arange(len(expert))"),
        (
            "expert: an expert's rows in any order",
            'np.argsort(expert, kind="stable")',
            "np.argsort(expert[::-1])[::-1]",
        ),
        ("expert: rows leave the sum to dp", "p.owner = owner", "p.owner = None"),
        ("expert: every rank keeps the first experts", "comm.rank * count : (comm.rank + 1) * count", ": count"),
    ),
    *mistakes(
        "minipar/parallel/buckets.py",
        "parallel/test_expert.py",
        ("buckets: experts are summed over dp", "(p.owner and p.owner.replicas) or comm", "comm"),
    ),
    *mistakes(
        "minipar/parallel/grad_norm.py",
        "parallel/test_expert.py",
        ("norm: of this rank's experts", "or placement_of(p).ep is not None for p", "for p"),
    ),
    *mistakes(
        "minipar/parallel/traffic.py",
        "parallel/test_expert.py",
        ("traffic: experts are reduced over all of dp", "1 if p.ep is None else layout.ep]", "1]"),
    ),
    *mistakes(
        "minipar/parallel/expert.py",
        "train/test_balance.py",
        ("expert: a capacity's counts travel too", "(counts if moe.capacity_factor else", "(counts if False else"),
    ),
    *mistakes(
        "minipar/parallel/traffic.py",
        "train/test_balance.py",
        (
            "traffic: loads stay on their pipeline rank",
            "* layout.norm_rows, 1, layout.loads)",
            "* layout.norm_rows, 1)",
        ),
        (
            "traffic: the loads of one sample",
            "layout.samples * layout.model.num_local_experts",
            "layout.model.num_local_experts",
        ),
    ),
    *mistakes(
        "minipar/parallel/wrapper.py",
        "parallel/test_expert.py",
        ("contract: ranks compare experts that only one holds", " if self.holders(bucket) is comm]", "]"),
    ),
    *mistakes(
        "minipar/parallel/fsdp.py",
        "parallel/test_fsdp.py parallel/test_zero.py parallel/test_contract.py",
        ("fsdp: parameters are never freed", "leaf.data = placeholder(leaf.shape, leaf.dtype)", "pass"),
        (
            "fsdp: the first unit is not released after its backward",
            "queue_callback(lambda: self._release(unit))",
            "pass",
        ),
        ("fsdp: after a step the old values are read", "self._gathered = {}\n", "pass\n"),
        ("fsdp: the embedding is gathered for its backward", "if unit.part.reads_in_backward:", "if True:"),
        (
            "fsdp: does not wait for what it gathers",
            "            work.wait()\n            for p, view",
            "            for p, view",
        ),
    ),
    *mistakes(
        "minipar/parallel/grad_norm.py",
        "parallel/test_grad_norm.py parallel/tensor/test_mistakes.py",
        ("norm: a split parameter counts on one rank only", "int(isinstance(placement.tp, Shard))", "0"),
        ("norm: stages do not add theirs", "if pp is not None and pp.size > 1:", "if False:"),
        ("norm: shards do not add theirs", 'float(dp.all_reduce(totals, algorithm="ordered")[0])', "float(totals[0])"),
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
            "for g in range(self.groups) for piece in pieces",
            "for piece in pieces for g in range(self.groups)",
        ),
        ("placement: a chunk ignores the parameter's offset", "max(end - self.offset, 0)", "max(end, 0)"),
        ("placement: a shard never decays", "= whole.decays, whole.placement", "= self.decays, whole.placement"),
    ),
    *mistakes(
        "minipar/parallel/sharding.py",
        "parallel/test_zero.py parallel/test_contract.py parallel/test_fsdp.py",
        (
            "zero: a second sum replaces the first",
            "if any(shard.grad is not None for shard in chunk.shards):",
            "if False:",
        ),
        ("zero: all whole gradients exist at once", "for work in self._works[:-1]:", "for work in ():"),
        ("zero: zero_grad leaves the shards' gradients", "(*self.parameters(), *self._bucket_of)", "self._bucket_of"),
        ("zero: what arrived before the buffer is lost", "view[...] = p.grad", "view[...] = 0"),
    ),
    *mistakes(
        "minipar/parallel/state.py",
        "parallel/test_state.py",
        ("state: every tp rank owns what all hold", "placement.tp.rank > 0\n", "placement.tp.rank > 99\n"),
        ("state: every replica of a shard owns it", "placement.dp.replica > 0)", "placement.dp.replica > 99)"),
        (
            "state: a shard is read at its place in the whole",
            "slice(own.start - held.start, own.stop - held.start)",
            "slice(own.start, own.stop)",
        ),
    ),
    *mistakes(
        "minipar/parallel/sharding.py",
        "parallel/test_hybrid.py",
        ("hybrid: nothing is summed over the replicas", "work.then(lambda: self._across.append(start()))", "pass"),
    ),
    *mistakes(
        "minipar/parallel/stages.py",
        "parallel/test_contract.py",
        (
            "stages: fully_shard keeps whole parameters",
            "return FullyShardedDataParallel(model, comm, algorithm, **options)",
            "return shard(model, comm, 2, algorithm, **options)",
        ),
    ),
    *mistakes(
        "minipar/parallel/traffic.py",
        "parallel/test_traffic.py",
        ("traffic: recompute sends nothing again", "(6 if layout.recompute else 4)", "4"),
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
        "minipar/parallel/wrapper.py",
        "parallel/test_ddp.py parallel/tensor/test_plan.py",
        ("wrapper: no_sync sends all the same", "if not self.syncing:", "if False:"),
        ("wrapper: gradients are read before they have arrived", "            work.wait()", "            pass"),
        ("wrapper: partial gradients travel before their sum over tp", "self.before_reduce(bucket.parameters)", "pass"),
    ),
    *mistakes(
        "minipar/parallel/traffic.py",
        "parallel/test_layout.py",
        ("traffic: neighbours hold the same experts", "Ranks(shard % self.ep,", "Ranks(shard // self.ep,"),
        ("traffic: a pipeline rank numbers its own units", "unit=i, units=len(units)", "unit=0, units=len(units)"),
        (
            "traffic: every rank is in the first replica",
            "Ranks(shard, self.shards), replica)",
            "Ranks(shard, self.shards))",
        ),
    ),
    *mistakes(
        "minipar/parallel/traffic.py",
        "parallel/test_hybrid.py",
        ("traffic: the norm of replicas is summed over all ranks", "rank // fold % ranks)", "rank // fold)"),
    ),
    *mistakes(
        "minipar/parallel/wrapper.py",
        "parallel/test_contract.py",
        (
            "wrapper: a rank's own count times the ranks",
            "total[0] / max(1.0, total[1])",
            "total[0] / max(1.0, count * comm.size)",
        ),
        ("wrapper: a step before the sum is accepted", 'if self._state == "local":', "if False:"),
        ("wrapper: ranks may start from different models", "            self._check_start()", "            pass"),
        (
            "wrapper: a failed backward lets the next one through",
            "self._scaled = False  # a backward pass that failed",
            "pass  # a backward pass that failed",
        ),
        ("wrapper: every loss of a pass starts a sum", "if self._scaled and self.syncing:", "if self.syncing:"),
    ),
    *mistakes(
        "minipar/parallel/zero.py",
        "parallel/test_zero.py parallel/test_contract.py parallel/pipeline/test_executor.py",
        ("zero: parameters are used before they are gathered", "        work.wait()", "        pass"),
        ("zero: an optimizer reads gradients that are not there", "        self.bucket.complete()", "        pass"),
    ),
]
