"""Mistakes in the modules that all packages share: the memory ledger."""

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
]
