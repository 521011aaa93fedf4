"""Mistakes in minipar/train/checkpoint.py: what is saved is lost, or not what is loaded."""

from mutants.mutant import mistakes

MUTANTS = [
    *mistakes(
        "minipar/train/checkpoint.py",
        "train/test_resume_flags.py train/test_checkpoint_files.py train/test_checkpoint.py",
        ("resume: the optimizer's flags are not taken over", "TAKEN = [*MUST_AGREE, *UPDATE,", "TAKEN = [*MUST_AGREE,"),
        ("resume: a capacity is of any batch", '["--dp", "--microbatches"] * (config', "[] * (config"),
        ("resume: another seed is accepted", "--order --seed --betas", "--order --betas"),
        (
            "resume: a finished run is refused",
            "if checkpoint.step > config.optimizer.steps:",
            "if checkpoint.step >= config.optimizer.steps:",
        ),
        ("resume: another text is accepted", 'checkpoint.manifest["data"] != tokens.fingerprint().hex()', "False"),
        ("resume: another dp adds in the same order", 'SUMS = "--dp --cp', 'SUMS = "--cp'),
    ),
    *mistakes(
        "minipar/train/checkpoint.py",
        "train/test_checkpoint_files.py train/test_checkpoint.py",
        (
            "load: a corrupted file is accepted",
            'if hashlib.file_digest(stream, "sha256").hexdigest() != file["sha256"]:',
            "if False:",
        ),
        (
            "load: the optimizer starts from step 0",
            'optimizer.steps = checkpoint.manifest["optimizer_steps"]',
            "optimizer.steps = 0",
        ),
        ("load: elements may be in no file", "held != parts * math.prod(part)", "held > parts * math.prod(part)"),
        ("load: a manifest may be a link", "mode = os.lstat(path).st_mode", "mode = os.stat(path).st_mode"),
    ),
    *mistakes(
        "minipar/train/checkpoint.py",
        "train/test_unseen_by_verify.py train/test_checkpoint.py train/test_checkpoint_files.py",
        ("save: os.fsync is removed", "os.fsync(descriptor)", "pass"),
        ("save: the new name is not flushed", "_sync(root)", "pass"),
        ("save: three checkpoints are kept", "checkpoints(root)[:-KEPT]", "checkpoints(root)[: -KEPT - 1]"),
        ("save: a run cannot go on in its own directory", "if newest > first_step:", "if newest >= first_step > 0:"),
        (
            "save: foreign files are removed",
            "if all(name == MANIFEST or FILE.fullmatch(name) for name in names):",
            "if True:",
        ),
        (
            "save: a half-written checkpoint has its final name",
            'complete, partial = root / f"step-{step:08d}", root / f"step-{step:08d}.partial"',
            'complete = partial = root / f"step-{step:08d}"',
        ),
    ),
]
