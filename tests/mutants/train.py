"""Mistakes in minipar/train: a flag that does nothing, a proof that proves nothing, a wrong report. No checkpoints."""

from mutants.mutant import mistakes

MUTANTS = [
    *mistakes(
        "minipar/train/trainer.py",
        "train/test_plain_loop.py",
        ("trainer: --betas is ignored", "betas=adamw.betas", "betas=(0.9, 0.999)"),
        ("trainer: --eps is ignored", "eps=adamw.eps", "eps=1e-8"),
        ("trainer: --weight-decay is ignored", "weight_decay=adamw.weight_decay", "weight_decay=0.01"),
        ("trainer: --clip-grad is ignored", "self._clip_grad_norm(o.clip_grad or None)", "self._clip_grad_norm(None)"),
        ("trainer: --lr-schedule is ignored", "schedule=o.lr_schedule", 'schedule="constant"'),
        ("trainer: --warmup-steps is ignored", "warmup_steps=o.warmup_steps", "warmup_steps=0"),
        ("trainer: --order is ignored", "order=data.order", 'order="random"'),
        ("trainer: --seed does not choose the data", " seed=config.run.seed", " seed=0"),
        ("trainer: --seed does not choose the weights", "seed=run.seed", "seed=0"),
        (
            "trainer: --seed does not choose the masks",
            "DropoutKeys(self.config.run.seed, step, samples)",
            "DropoutKeys(0, step, samples)",
        ),
        (
            "trainer: --init-from drops --dropout",
            "load_pretrained(sizes.init_from, deferred=True, **options)",
            'load_pretrained(sizes.init_from, deferred=True, **options | {"dropout": 0.0})',
        ),
        ("trainer: the learning rate starts again after a resume", "step, lr=o.lr", "step - self.first_step, lr=o.lr"),
        (
            "trainer: the loss is one of a sample",
            "StepResult(step, loss / self.tokens_per_step",
            "StepResult(step, loss / self.config.data.global_batch",
        ),
        (
            "trainer: the gradient is that of the sum",
            "xp.full_like(loss.data, self.loss_scale / self.tokens_per_step)",
            "xp.full_like(loss.data, self.loss_scale)",
        ),
    ),
    *mistakes(
        "minipar/train/trainer.py",
        "train/test_balance.py",
        (
            "trainer: every tp rank adds the auxiliary gradient",
            "self.tokens_per_step * self.mesh.tp.size",
            "self.tokens_per_step",
        ),
        ("trainer: a layer's auxiliary loss is not averaged", "len(self.moes) * self.tokens", "self.tokens"),
        (
            "trainer: biases follow a replica's load",
            "for comm in (self.mesh.dp_cp, self.mesh.pp):  # ranks",
            "for comm in (self.mesh.pp,):  # ranks",
        ),
        ("trainer: biases leave the mean load", "load.sum() - load.size * load", "load.size * load - load.sum()"),
        ("trainer: a resumed run starts without biases", "moe.bias[:] = bias", "pass"),
    ),
    *mistakes(
        "minipar/train/trainer.py",
        "train/test_unseen_by_verify.py",
        (
            "trainer: --memory-limit of the world's size",
            "placements, mesh.dp_cp.size // config.mesh.zero_replicas, stage",
            "placements, mesh.world.size // config.mesh.zero_replicas, stage",
        ),
        (
            "trainer: tokens_per_second of one replica",
            "self.tokens_per_step / seconds",
            "self.tokens_per_step / self.mesh.dp.size / seconds",
        ),
        ("trainer: seconds are milliseconds", "time.perf_counter() - start", "1000 * (time.perf_counter() - start)"),
    ),
    *mistakes(
        "minipar/train/trainer.py",
        "train/test_train.py train/test_pipeline_training.py train/test_tensor_flags.py",
        ("trainer: gradients travel with the first microbatch", "sync = m == self.last_microbatch", "sync = m == 0"),
        (
            "trainer: the last stage keeps its old embedding",
            "self.pipeline.send_tied_weight(self.ddp.gather_parameter)",
            "pass",
        ),
        (
            "trainer: the loss of one replica",
            'self.mesh.dp_cp.all_reduce(np.array([loss]), algorithm="ordered")[0]',
            "loss",
        ),
        (
            "trainer: replicas take their microbatches in turns",
            "(replica * self.config.data.microbatches + microbatch)",
            "(microbatch * (self.config.mesh.dp or 1) + replica)",
        ),
    ),
    *mistakes(
        "minipar/train/verify.py",
        "train/test_unseen_by_verify.py train/test_train.py",
        ("verify: never exact", "exact = ordered and", "exact = False and"),
        ("verify: differences on the whole model's scale", "scales.get(name))", "max(scales.values()))"),
        ("verify: a bound four times as wide", "(5 * steps - 4)", "(5 * steps)"),
        (
            "verify: gradient norms are not compared",
            '"the gradient norms", "grad_norm"',
            '"the gradient norms", "loss"',
        ),
        ("verify: ranks may hold different parameters", "same &= len(set(holders", "same |= len(set(holders"),
        (
            "verify: infinite numbers that agree pass",
            "if not all(np.isfinite(a)",
            "if False and not all(np.isfinite(a)",
        ),
    ),
    *mistakes(
        "minipar/train/__main__.py",
        "train/test_unseen_by_verify.py train/test_outputs.py train/test_signals.py",
        (
            "program: ranks may read different texts",
            "if len(set(comm.all_gather_bytes(text.fingerprint()))) > 1:",
            "if False:",
        ),
        (
            "program: --network's values are exchanged",
            "Network(*config.run.network)",
            "Network(*reversed(config.run.network))",
        ),
        ("program: infinite parameters are written", "finite = all(", "finite = True or all("),
        ("program: the last step is not saved", "return done == last or (", "return ("),
        ("program: a signal ends with code 0", "raise SystemExit(128 + stop)", "raise SystemExit(0)"),
        (
            "program: a signal stops only the rank that has it",
            'b"".join(comm.all_gather_bytes(bytes(signals)))',
            "bytes(signals)",
        ),
    ),
    *mistakes(
        "minipar/train/__main__.py",
        "train/test_tensor_flags.py",
        ("program: a failed proof exits with 0", "return 0 if verdict.passed else 1", "return 0"),
    ),
    *mistakes(
        "minipar/train/verify.py",
        "train/test_checkpoint.py",
        (
            "verify: a resumed run is compared with the first steps",
            "single_steps[resumed:]",
            "single_steps[: len(parallel_steps)]",
        ),
    ),
    *mistakes(
        "minipar/train/data.py",
        "train/test_data.py",
        ("data: the last place is never drawn", "np.uint64(n - self.seq_len)", "np.uint64(n - self.seq_len - 1)"),
        ("data: a target is its own input", "self.tokens.read(chosen + 1)", "self.tokens.read(chosen)"),
        ("data: the text is read round its end", "% (n - 1)", "% n"),
        ("data: a text's content is no part of its fingerprint", "digest.update(self.ids.tobytes())", "pass"),
        ("data: a token equal to the vocabulary's size", "if piece.max() >= limit:", "if piece.max() > limit:"),
    ),
    *mistakes(
        "minipar/train/data.py",
        "train/test_evaluate.py",
        ("evaluation: the held-out text is trained on", "ids=tokens.ids[:-kept])", "ids=tokens.ids)"),
    ),
    *mistakes(
        "minipar/train/trainer.py",
        "train/test_evaluate.py",
        ("evaluation: a mean over padding too", "total / (count * length)", "total / (len(losses) * length)"),
    ),
    *mistakes(
        "minipar/train/trainer.py",
        "train/test_pipeline_training.py train/test_combinations.py",
        (
            "pipeline: gradients travel with the first microbatch",
            "if action.microbatch == self.last_microbatch else",
            "if action.microbatch == 0 else",
        ),
        ("pipeline: one microbatch's masks for all", "samples[action.microbatch]", "samples[0]"),
        ("pipeline: the loss of one stage", 'pipeline.comm.all_reduce(losses, algorithm="ordered")', "pass"),
    ),
    *mistakes(
        "minipar/train/progress.py",
        "train/test_outputs.py train/test_checkpoint.py",
        ("progress: the first step is number 0", "done, now = result.step + 1,", "done, now = result.step,"),
        (
            "progress: the time left is that of all steps",
            "self._steps_done * (self.steps - done)",
            "self._steps_done * self.steps",
        ),
        ("metrics: a resumed run repeats lines", "self.file.truncate(_length_before(path, first_step))", "pass"),
    ),
    *mistakes(
        "minipar/train/config.py",
        "train/test_config.py train/test_unseen_by_verify.py",
        ("flags: an open end of an interval is in it", 'interval[-1] == "]")', 'interval[-1] in "])")'),
        ("flags: --dp need not divide the batch", "if batch % (dp * m):", "if batch % m:"),
        ("flags: KB is 1024 bytes", '"KB": 10**3', '"KB": 2**10'),
    ),
    *mistakes(
        "minipar/train/trainer.py",
        "train/test_matrix.py train/test_combinations.py",
        ("layout: recompute is forgotten", 'config.run.recompute == "full"', "False"),
    ),
]
