"""Mistakes in training with 2 bytes: a value is rounded too often or never, or a sum has the wrong dtype."""

from mutants.mutant import mistakes

TESTS = "train/test_precision.py train/test_overflow.py"
MUTANTS = [
    *mistakes(
        "minipar/autograd/precision.py",
        TESTS,
        (
            "2 bytes: products add up in 2 bytes",
            'cast_floats(array, "float32") for array',
            "cast_floats(array, node.narrow) for array",
        ),
        ("2 bytes: results stay float32", "return output.astype(node.narrow)", "return output"),
        (
            "2 bytes: what forward keeps stays float32",
            "    cast_saved(node, node.narrow, least=output.size)",
            "    pass",
        ),
        ("2 bytes: gradients of inputs stay float32", "gradient = cast_floats(gradient, node.narrow)", "pass"),
    ),
    *mistakes(
        "minipar/nn/optim.py",
        TESTS,
        ("2 bytes: no masters", "if p.dtype.itemsize == 2 else None", "if False else None"),
        (
            "2 bytes: masters are rounded, too",
            "            self.parameters[i].data[...] = self.copies[i]",
            "            self.parameters[i].data[...] = self.copies[i]\n"
            "            self.copies[i][...] = self.parameters[i].data",
        ),
    ),
    *mistakes(
        "minipar/parallel/hybrid.py",
        TESTS,
        ("2 bytes: sums in another dtype are not copied back", "self.target[...] = self.wire", "pass"),
        ("2 bytes: gradients travel in their own dtype", "return CastingComm(comm, dtype)", "return comm"),
        ("hybrid: sums over replicas are not waited for", "return self.second.wait()", "return None"),
    ),
    *mistakes(
        "minipar/parallel/hybrid.py",
        TESTS,
        (
            "2 bytes: microbatches add up in them",
            'xp.promote_types(model.parameters()[0].dtype, "float32")',
            "model.parameters()[0].dtype",
        ),
    ),
    *mistakes(
        "minipar/parallel/tensor/mappings.py",
        TESTS,
        ("2 bytes: sums over tp are in 2 bytes whatever is asked", 'dtype=self.sum_dtype(x), order="C"', 'order="C"'),
        (
            "2 bytes: sequence parallelism gathers 4 bytes",
            "xp.ascontiguousarray(x, dtype=self.dtype)",
            "xp.ascontiguousarray(x)",
        ),
    ),
    *mistakes(
        "minipar/parallel/context.py",
        TESTS,
        ("2 bytes: keys and values travel in 4 bytes", "xp.stack([k, v], dtype=dtype)", "xp.stack([k, v])"),
        (
            "2 bytes: the keys' gradients travel in 4 bytes",
            "dblock = dblock.astype(self.reduce_dtype, copy=False)",
            "pass",
        ),
    ),
    *mistakes(
        "minipar/train/trainer.py",
        TESTS,
        ("loss scale: not applied", "self.scaler.scale / self.targets))", "1 / self.targets))"),
    ),
    *mistakes(
        "minipar/train/balance.py",
        TESTS,
        ("loss scale: not of the auxiliary loss", "loss_scale * self.flags.aux_loss", "self.flags.aux_loss"),
    ),
    *mistakes(
        "minipar/train/precision.py",
        TESTS,
        ("loss scale: gradients keep it", "xp.multiply(p.grad, 1 / self.scale, out=p.grad)", "p.grad"),
        ("loss scale: an overflow does not halve it", "self.scale /= 2", "self.scale /= 1"),
        ("loss scale: it never doubles", "self.good_steps == GOOD_STEPS", "False"),
        ("loss scale: a resumed run starts again", '"loss_scale", (self.scale, 0)', '"none", (self.scale, 0)'),
        ("overflow: a resumed run counts from 0 again", 'saved.get("skipped", 0)', "0"),
        (
            "overflow: a finite loss is enough",
            "math.isfinite(loss) and math.isfinite(grad_norm)",
            "math.isfinite(loss)",
        ),
        ("overflow: fp16 does not skip", "self.is_fp16 or run.skip_nonfinite", "run.skip_nonfinite"),
    ),
    *mistakes(
        "minipar/train/checkpoint.py",
        TESTS,
        (
            "2 bytes: a checkpoint has rounded values",
            "state = optimizer.values(), ",
            "state = [p.data for p in optimizer.parameters], ",
        ),
    ),
]
