"""Mistakes in the modules that all packages share, and in the one that uses them all: the memory ledger, generation."""

from mutants.mutant import mistakes

MUTANTS = [
    *mistakes(
        "minipar/memory.py",
        "test_memory.py",
        (
            "ledger: a view counts as an array of its own",
            'while isinstance(getattr(array, "base", None), xp.ndarray):',
            "while False:",
        ),
        ("ledger: freed memory is not taken off", "self._change(kind, -nbytes)", "pass"),
        ("ledger: the peak is that of one kind", "if self.total() > self.peak:", "if self.held[kind] > self.peak:"),
    ),
    *mistakes(
        "minipar/hints.py",
        "test_hints.py",
        ("hints: another program's flag is unknown", "letters(flag) in theirs.split()", "flag in theirs.split()"),
        ("hints: a flag that the command does not have", 'ours.split()[0] in [*known, "mpirun"]', "ours"),
    ),
    *mistakes(
        "minipar/cli.py",
        "test_errors.py test_hints.py",
        ("parser: a missing flag hides the misspelt one", "if self.unknown:  # probably", "if False:  # probably"),
        ("parser: a choice has no suggestion", "{error.message}{did_you_mean(near)}", "{error.message}"),
        ("errors: Ctrl-C leaves half a file", "except BaseException as error:", "except Exception as error:"),
        ("errors: a pipe is removed", "if file.is_file():", "if True:"),
    ),
    *mistakes(
        "minipar/generate.py",
        "test_generate.py",
        ("generate: the right end is cut off", "text[-model.config.n_positions :]", "text[: model.config.n_positions]"),
        ("generate: --temperature is ignored", "noise = temperature * random", "noise = random"),
        ("generate: --top-k is ignored", "[:top_k]", "[:256]"),
        ("generate: --seed is ignored", 'generator(seed, "generate")', 'generator(0, "generate")'),
        ("generate: nonsense of a diverged model is printed", "if not np.isfinite(logits).all():", "if False:"),
        (
            "generate: a damaged checkpoint is read",
            "    check_checkpoint(checkpoint, config, None, serial())",
            "    pass",
        ),
    ),
]
