"""Mistakes in checkpoints and in resuming: what is saved is lost, or not what is loaded."""

from mutants.mutant import mistakes

MUTANTS = [
    *mistakes(
        "minipar/train/resume.py",
        "train/test_resume_flags.py train/test_checkpoint_files.py train/test_checkpoint.py",
        ("resume: the optimizer's flags are not taken over", "TAKEN = [*MUST_AGREE, *UPDATE,", "TAKEN = [*MUST_AGREE,"),
        ("resume: a capacity is of any batch", 'names += ["--dp", "--microbatches"]', "names += []"),
        ("resume: another seed is accepted", "--order --pack --seed --betas", "--order --pack --betas"),
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
        ("load: a manifest may be a link", "mode = os.lstat(path).st_mode", "mode = os.stat(path).st_mode"),
    ),
    *mistakes(
        "minipar/train/checkpoint.py",
        "train/test_unseen_by_verify.py train/test_checkpoint.py train/test_checkpoint_files.py train/test_outputs.py",
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
            'partial = root / f"step-{step:08d}.partial"',
            "partial = complete",
        ),
        ("save: what a full disk did not hold stays", "_remove_leftovers(Path(directory))", "pass"),
    ),
    *mistakes(
        "minipar/train/resume.py",
        "train/test_history.py",
        (
            "resume: files of more ranks are not checked",
            "checkpoint.files[comm.rank :: comm.size]",
            "checkpoint.files[comm.rank : comm.rank + 1]",
        ),
        (
            "resume: only the last period's sums count",
            "for then in periods for name in SUMS",
            "for then in periods[-1:] for name in SUMS",
        ),
        (
            "resume: only the first period's flags count",
            "for then in checkpoint.flags for name in names",
            "for then in checkpoint.flags[:1] for name in names",
        ),
    ),
    *mistakes(
        "minipar/train/trainer.py",
        "train/test_history.py",
        ("resume: two periods are remembered", '"history": [*history,', '"history": [*history[-1:],'),
    ),
    *mistakes(
        "minipar/train/checkpoint.py",
        "train/test_manifest.py train/test_checkpoint_files.py",
        ("load: a tensor of any shape and dtype", "if tensor.shape != (piece", "if False and tensor.shape != (piece"),
    ),
    *mistakes(
        "minipar/train/resume.py",
        "train/test_manifest.py",
        ("load: a manifest of any size is read", "if size > MOST_BYTES:", "if False:"),
    ),
    *mistakes(
        "minipar/train/manifest.py",
        "train/test_manifest.py",
        ("manifest: values are not checked", 'MANIFEST.check(manifest, "")', "pass"),
        ("manifest: elements may be in no file", "if (rank, element) != (ranks, 0):", "if False:"),
        (
            "manifest: elements may be in two files",
            "if piece.cut != expected or piece.start != element:",
            "if piece.cut != expected:",
        ),
        ("manifest: a part of the model is trained", ".check_shapes(shapes)", ""),
        ("manifest: a file says that it is larger", 'if file["bytes"] < len(KINDS)', "if False and len(KINDS)"),
        ("manifest: flags of another model", "if values[flag] != own:", "if False:"),
        ("manifest: more updates than steps", "if count > step:", "if False:"),
        ("manifest: a flag's interval is not read", "if within is not None and not inside(each, within):", "if False:"),
        ("manifest: the history begins anywhere", "starts[0] != 0 or ", ""),
    ),
    *mistakes(
        "minipar/train/schema.py",
        "train/test_manifest.py",
        ("schema: true is a whole number", "if type(value) is not int or not", "if not isinstance(value, int) or not"),
        ("schema: an infinite number is one", "<= sys.float_info.max:", '<= float("inf"):'),
        (
            "schema: a text's end is not looked at",
            "not re.fullmatch(self.pattern, value)",
            "not re.match(self.pattern, value)",
        ),
        ("schema: a list of any length", "len(value) != len(self.kinds)", "False"),
    ),
    *mistakes(
        "minipar/train/lock.py",
        "train/test_lock.py",
        ("lock: two jobs share it", "fcntl.LOCK_EX | fcntl.LOCK_NB", "fcntl.LOCK_SH | fcntl.LOCK_NB"),
        ("lock: a removed file is locked", "os.fstat(descriptor).st_nlink > 0", "True"),
        ("lock: a refused job leaves its directory", "folder.rmdir()", "pass"),
        ("lock: a link is followed", " | os.O_NOFOLLOW", ""),
    ),
    *mistakes(
        "minipar/train/__main__.py",
        "train/test_lock.py",
        (
            "lock: it is released before the training",
            "with saving_alone(comm, config.run.save):\n        return",
            "with saving_alone(comm, config.run.save):\n        pass\n    return",
        ),
    ),
]
