"""Mistakes in the records of a run and in their comparison."""

from mutants.mutant import mistakes

MUTANTS = [
    *mistakes(
        "minipar/record.py",
        "test_compare.py",
        ("record: one direction for all parameters", "hashlib.sha256(name.encode())", "hashlib.sha256(b'')"),
        ("record: updates add up from the first step", "before[...] = parameters[name]", "pass"),
        ("record: norms are squares", "np.array([np.sqrt(squares), projections])", "np.array([squares, projections])"),
        ("record: the steps of two runs are mixed", "mkdir(parents=True)", "mkdir(parents=True, exist_ok=True)"),
        ("record: strips of other lengths", "values.shape[dim] * i // count", "values.shape[dim] // count * i"),
    ),
    *mistakes(
        "visualize/differences.py",
        "test_compare.py",
        ("compare: the bound grows without end", "min(1000 * facts", "max(1000 * facts"),
        ("compare: a sign is lost", "[abs(r) * a[0], r * a[1]]", "[abs(r) * a[0], abs(r) * a[1]]"),
        ("compare: noise is a difference", '64 * self.facts["eps"], 1e-3)', "0, 1e-3)"),
        ("compare: updates are never looked at", ' or self.of_parameters("update")', ""),
        ("compare: the gradient's norm is not looked at", 'self.of_value("grad_norm") or ', ""),
        ("compare: every run is equal", "return 0 if finding.equal else 1", "return 0"),
        ("compare: the causes of more and less swapped", "(1 / size, f", "(size, f"),
        ("compare: an update of noise is compared", "a * certain, b * certain", "a, b"),
        ("compare: idle parameters may do what they like", " | (gradient == 0)", ""),
        ("compare: parts of fused matrices are missed", "for groups in (1, 3)", "for groups in (1,)"),
    ),
]
