"""Mistakes in what refuses a user's mistakes, and in promises that only rare cases test, by package."""

from mutants.mutant import mistakes

AUTOGRAD = [
    *mistakes(
        "minipar/autograd/guards.py",
        "autograd/test_graph.py autograd/test_recompute.py",
        ("tensor: any gradient of as many elements", "gradient.shape != shape:", "gradient.size != size:"),
    ),
    *mistakes(
        "minipar/autograd/recompute.py",
        "autograd/test_recompute.py",
        (
            "checkpoint: no_grad holds in backward",
            "setting(grad_enabled, True)",
            "setting(grad_enabled, grad_enabled.get())",
        ),
    ),
    *mistakes(
        "minipar/autograd/backward.py",
        "autograd/test_graph.py",
        (
            "backward: the last callback first",
            "for callback in current.callbacks:",
            "for callback in current.callbacks[::-1]:",
        ),
    ),
]

NN = [
    *mistakes(
        "minipar/nn/optim_guards.py",
        "nn/test_guards.py nn/test_optimizer_state.py",
        ("guards: any learning rate", 'if name in ("lr", "eps"', 'if name in ("eps"'),
        ("guards: a norm of NaN", "isinstance(max_norm, Real) and float(max_norm) > 0", "not max_norm <= 0"),
        ("guards: a negative norm", "isinstance(max_norm, Real) and float(max_norm) > 0", "isinstance(max_norm, Real)"),
        ("guards: a parameter twice", "    if twice:\n", "    if False:\n"),
        ("guards: no parameter is fine", "    if not parameters:\n", "    if False:\n"),
        ("guards: infinite settings", "isinstance(value, Real) and isfinite(value)", "isinstance(value, Real)"),
        ("guards: a beta of 1", "0 <= beta < 1", "0 <= beta <= 1"),
        ("guards: one gradient of all is needed", "all(parameter.grad is None for", "any(parameter.grad is None for"),
        (
            "guards: seeds do not tell layers apart",
            "seen.setdefault(parameter.drawn_by,",
            "seen.setdefault(parameter.drawn_by[1],",
        ),
        ("guards: a state of any shape", "if name in entry and tuple(entry[name].shape) != array.shape:", "if False:"),
        ("guards: a state of some parameters", 'set(state["state"]) != set(range(count))', "False"),
    ),
    *mistakes(
        "minipar/nn/optim.py",
        "nn/test_guards.py nn/test_optimizer_state.py nn/test_optim.py",
        ("optim: settings are checked once", "        check_setting(name, value)\n", "        pass\n"),
        (
            "optim: tied gradients come too late",
            "            parameter.fold_tied_gradients()\n        check_gradients",
            "            pass\n        check_gradients",
        ),
        ("optim: serial layers of one name", "        check_names(self.parameters)\n", "        pass\n"),
        ("optim: the saved moments are views", "name: np.array(to_host(array))", "name: to_host(array)"),
        ("optim: the steps are not resumed", 'self.steps = int(saved["step"])', "pass"),
        ("optim: the settings are not resumed", '        self.lr = group["lr"]\n', ""),
        ("optim: masters are not saved", "if self.masters[i] is not None:", "if False:"),
        (
            "optim: squares of 2 bytes in 2 bytes",
            '                block = block.astype("float32")',
            "                pass",
        ),
        (
            "optim: a cosine rises after its end",
            "math.cos(math.pi * min(1.0, progress))",
            "math.cos(math.pi * progress)",
        ),
    ),
    *mistakes(
        "minipar/nn/guards.py",
        "nn/test_guards.py",
        ("guards: a dropout of 1", "0 <= float(p) < 1", "0 <= float(p) <= 1"),
        ("guards: any model_type", 'getattr(config, "model_type", None) != expected.model_type', "config is None"),
        ("guards: dtypes have one name", "name = DTYPES.get(given, given)", "name = given"),
    ),
]

COMM = [
    *mistakes(
        "minipar/comm/threads.py",
        "comm/test_threads_exit.py",
        ("threads: an exit ends all silently", "                exits[rank] = leaving\n", "                raise\n"),
        ("threads: an exit with an error is none", "if exits[rank].code not in (0, None)]", "if False]"),
        ("threads: an exit hides an exception", "isinstance(failure, CommunicationError)):", "failure):"),
        (
            "threads: every rank's exit is a return",
            "    if len(exits) == ranks:\n        raise",
            "    if False:\n        raise",
        ),
    )
]

PARALLEL = [
    *mistakes(
        "minipar/autograd/guards.py",
        "parallel/test_ids.py",
        ("guards: the last row for -1", "(ids < 0) | (ids >= count)", "(ids >= count)"),
        ("guards: one id too many", "(ids < 0) | (ids >= count)", "(ids < 0) | (ids > count)"),
        (
            "guards: -100 is a token",
            'where: str = "", ignored: int | None = None)',
            'where: str = "", ignored: int | None = IGNORE_INDEX)',
        ),
        ("guards: booleans as ids", 'not in "iu":', 'not in "iub":'),
        (
            "guards: targets of as many elements",
            "if targets.shape != rows and targets.shape != (prod(rows),):",
            "if targets.size != prod(rows):",
        ),
        (
            "guards: flat targets are refused",
            "if targets.shape != rows and targets.shape != (prod(rows),):",
            "if targets.shape != rows:",
        ),
    ),
    *mistakes(
        "minipar/parallel/tensor/layers.py",
        "parallel/test_ids.py",
        (
            "tensor: an id of another rank is any id",
            "self.checked(tokens) - self.border.group.rank",
            "tokens - self.border.group.rank",
        ),
    ),
    *mistakes(
        "minipar/parallel/tensor/vocabulary.py",
        "parallel/test_ids.py",
        ("tensor: padding is a target", "if vocab_size is None:", "if True:"),
        ("tensor: targets below a rank's part", "vocab_size = group.size * logits", "vocab_size = logits"),
    ),
    *mistakes(
        "minipar/parallel/step_guard.py",
        "parallel/test_misuse.py parallel/test_promises.py",
        (
            "guard: a step is not noted",
            '        self.strategy.after_step()\n        self.state = "stepped"\n',
            "        self.strategy.after_step()\n",
        ),
        (
            "guard: forgotten gradients are still there",
            'if self.state == "stepped" and self.has_gradients():',
            'if self.state == "stepped":',
        ),
        ("guard: state_dict of ranks that parted", '_state")\n        self.check_divergence()\n', '_state")\n'),
        ("guard: a stage's norm for the whole", "placement.tp.ranks > 1 or placement.pp > 0", "placement.tp.ranks > 1"),
    ),
    *mistakes(
        "minipar/parallel/buckets.py",
        "parallel/test_misuse.py parallel/test_promises.py",
        (
            "buckets: no_sync ends an outer no_sync",
            "            self.enabled = previous\n",
            "            self.enabled = True\n",
        ),
    ),
    *mistakes(
        "minipar/parallel/fsdp.py",
        "parallel/test_misuse.py",
        ("fsdp: replicas of shards may part", "return replicas_of_shards(self.shard_comm, self.shards)", "return []"),
    ),
    *mistakes(
        "minipar/parallel/fsdp.py",
        "parallel/test_promises.py",
        (
            "fsdp: an error leaves the unit open",
            "        finally:\n            self.is_inside = False",
            "        finally:\n            pass",
        ),
    ),
    *mistakes(
        "minipar/parallel/shards.py",
        "parallel/test_promises.py",
        ("shards: an empty shard has no gradient", "shard.grad_buffer = self.gradient[start:stop]", "pass"),
    ),
    *mistakes(
        "minipar/parallel/zero_optimizer.py",
        "parallel/test_misuse.py parallel/pipeline/test_save_and_clip.py",
        (
            "zero: the algorithm is ignored",
            "out=self.chunk.gradient, algorithm=self.algorithm)",
            "out=self.chunk.gradient)",
        ),
        ("zero: any algorithm", "        check_algorithm(algorithm)\n", "        pass\n"),
        ("zero: any axis", "            owner.check_sum(comm)\n", "            pass\n"),
        ("zero: ranks that are no replicas", "        check_is_replica(comm, self.parameters)\n", "        pass\n"),
        ("zero: the schedule is ignored", "        self.optimizer.lr = value\n", "        pass\n"),
        (
            "zero: partial gradients stay partial",
            "                owner.before_step(self.optimizer, self.parameters)\n",
            "                pass\n",
        ),
        ("zero: clipping sums once more", '        if self.guard.state != "summed":\n', "        if True:\n"),
        ("zero: a step is not noted", "        self.guard.after_update()\n", "        pass\n"),
    ),
    *mistakes(
        "minipar/parallel/step_guard.py",
        "parallel/test_misuse.py parallel/pipeline/test_save_and_clip.py",
        (
            "zero: zero_grad forgets nothing of the sum",
            '        self.state = "none"\n        for shard',
            "        for shard",
        ),
        (
            "zero: another optimizer may step",
            '        raise ValueError("a ZeroOptimizer updates',
            '        print("a ZeroOptimizer updates',
        ),
    ),
    *mistakes(
        "minipar/parallel/placement.py",
        "parallel/test_promises.py parallel/pipeline/test_save_and_clip.py parallel/test_misuse.py",
        (
            "placement: shards are told apart by name",
            "{super().describe()}[{self.elements.start}:{self.elements.stop}]",
            "{self.placement.name}",
        ),
        ("placement: layers of one name", "    check_names(model.parameters())\n", "    pass\n"),
    ),
    *mistakes(
        "minipar/parallel/guards.py",
        "parallel/test_refusals.py parallel/test_misuse.py",
        (
            "guards: rank 1 alone is compared",
            "for rank, theirs in enumerate(everyone):",
            "for rank, theirs in enumerate(everyone[:2]):",
        ),
        ("guards: a mesh is an axis", 'if hasattr(comm, "dp_cp"):', "if False:"),
        ("guards: ranks of tp start differently", "    check_alike(comm, held, what,", "    _ = (comm, held, what,"),
        ("guards: names of a pipeline's other ranks", "            if other != rank:\n", "            if False:\n"),
    ),
    *mistakes(
        "minipar/parallel/pipeline/module.py",
        "parallel/pipeline/test_save_and_clip.py parallel/test_misuse.py",
        ("module: the norm of one stage", "self.mesh.dp, self.mesh.tp, self.mesh.pp)", "self.mesh.dp, self.mesh.tp)"),
        (
            "module: the norm of one tp rank",
            "self.mesh.dp, self.mesh.tp, self.mesh.pp)",
            "self.mesh.dp, None, self.mesh.pp)",
        ),
        (
            "module: a difference on one rank",
            'self.mesh.world.agree("; ".join(self._differences(state)))',
            "self._differences(state)",
        ),
        ("module: replicas that parted are saved", "        check_parted(self.mesh.dp,", "        _ = (self.mesh.dp,"),
        (
            "module: batches of pp are not compared",
            "for comm in (self.mesh.tp, self.mesh.pp):",
            "for comm in (self.mesh.tp,):",
        ),
        (
            "module: other axes are replicas",
            "if group.ranks != self.mesh.dp.ranks:",
            "if group.size != self.mesh.dp.size:",
        ),
    ),
    *mistakes(
        "minipar/parallel/split_guards.py",
        "parallel/test_refusals.py parallel/test_misuse.py",
        ("guards: a split of shards", "p.placement.dp is not None for p", "False for p"),
        ("guards: a split of a pipeline", "    if is_pipeline or any(", "    if any("),
        ("guards: split twice", "        if other == strategy:\n", "        if False:\n"),
        ("guards: cp over the ranks of tp", "if len(shared) > 1 and", "if False and"),
        ("guards: cp and ep share no ranks", '"tensor_parallel" in (strategy, other)', "True"),
    ),
    *mistakes(
        "minipar/parallel/expert.py",
        "parallel/test_refusals.py",
        ("expert: a wrapper over any ranks", "if self.experts and not fits:", "if False:"),
        ("expert: any model has experts", "    if comm.size > 1 and not moe_layers(model):\n", "    if False:\n"),
    ),
    *mistakes(
        "minipar/parallel/step_guard.py",
        "parallel/test_not_silent.py",
        (
            "guard: a model may change after the first loss",
            "        self.check_model()\n        if grad",
            "        if self.losses == 0:\n            self.check_model()\n        if grad",
        ),
        ("guard: the same batch has no note", "note_same_batch(self.strategy.comm, x, y)", "pass"),
        ("guard: an evaluated batch has the note", "if grad_enabled.get() and not self.batch", "if not self.batch"),
        ("guard: ranks are compared once", "if is_power_of_two(self.losses):", "if False:"),
        ("guard: ranks are compared at every loss", "if is_power_of_two(self.losses):", "if True:"),
        ("zero: ranks are compared once", "if is_power_of_two(self.updates):", "if False:"),
        ("zero: means are added up", "if ranks > 1 and (grad == 1).all():", "if False:"),
        ("zero: a divided mean is refused", "if ranks > 1 and (grad == 1).all():", "if ranks > 1:"),
        (
            "context: gradients of own tokens are trained",
            "check_alike(self.comm, [(self.names",
            "_ = (self.comm, [(self.names",
        ),
        ("context: experts are compared", "if p.placement is None or p.placement.ep is None]", "]"),
    ),
    *mistakes(
        "minipar/parallel/guards.py",
        "parallel/test_not_silent.py",
        ("guards: values in the place of freed ones", "if any(p.data.strides):", "if False:"),
        (
            "guards: deferred values of another seed",
            "if p.make is None else source",
            "if p.make is None else source[:0]",
        ),
        ("guards: samples alone are a batch", "checksum(x, y)", "checksum(x)"),
        ("guards: no samples are a batch", " and array.size for array in (x, y))", " for array in (x, y))"),
        (
            "guards: each rank notes a batch",
            "if batch and other != rank and comm.rank == 0:",
            "if batch and other != rank:",
        ),
    ),
    *mistakes(
        "minipar/parallel/tensor/layers.py",
        "parallel/test_not_silent.py",
        ("tensor: ranks look up other tokens", "check_same_tokens(self.border.group.comm, tokens)", "pass"),
    ),
    *mistakes(
        "minipar/parallel/pipeline/module.py",
        "parallel/test_not_silent.py",
        ("module: each stage notes a batch", "if self.mesh.pp.rank == 0 and self.mesh.tp.rank == 0:", "if True:"),
    ),
    *mistakes(
        "minipar/nn/guards.py",
        "parallel/test_not_silent.py",
        ("guards: forward makes layers", "if inside_loss.get() and grad", "if False and grad"),
        ("guards: no_grad makes no layers", "if inside_loss.get() and grad_enabled.get():", "if inside_loss.get():"),
    ),
]
