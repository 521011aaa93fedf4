"""Mistakes in the records of a run and in their comparison."""

from mutants.mutant import mistakes

RECORDS = "compare/test_compare.py compare/test_compare_command.py"
CAUSES = "compare/test_compare_causes.py compare/test_compare_names.py"
MUTANTS = [
    *mistakes(
        "minipar/record.py",
        RECORDS,
        ("record: one direction for all parameters", "hashlib.sha256(name.encode())", "hashlib.sha256(b'')"),
        ("record: updates add up from the first step", "before[...] = parameters[name]", "pass"),
        ("record: norms are squares", "np.array([np.sqrt(squares), projections])", "np.array([squares, projections])"),
        ("record: the steps of two runs are mixed", "mkdir(parents=True)", "mkdir(parents=True, exist_ok=True)"),
        ("record: strips of other lengths", "values.shape[dim] * i // count", "values.shape[dim] // count * i"),
    ),
    *mistakes(
        "minipar/record.py",
        "compare/test_compare_not_finite.py",
        ("record: large values overflow", "max(initial=0) > 1e150", "max(initial=0) > 1e305"),
        ("record: complex values lose a part", "if np.iscomplexobj(values):", "if False:"),
    ),
    *mistakes(
        "minipar/compare/differences.py",
        f"{RECORDS} {CAUSES}",
        ("compare: the bound grows without end", "rounding = min(1000 * eps", "rounding = max(1000 * eps"),
        ("compare: every run is equal", "return 0 if finding.equal else 1", "return 0"),
        ("compare: the sizes of A alone", "{run_a.sizes[name], run_b.sizes[name]}", "{run_a.sizes[name]}"),
        ("compare: the sizes of B alone", "{run_a.sizes[name], run_b.sizes[name]}", "{run_b.sizes[name]}"),
        ("compare: the dtype of A alone", "max(run_a.eps, run_b.eps)", "run_a.eps"),
        ("compare: the dtype of B alone", "max(run_a.eps, run_b.eps)", "run_b.eps"),
        ("compare: a step before that was not recorded", "step - 1 in run_a.steps and step - 1 in run_b.steps", "True"),
    ),
    *mistakes(
        "minipar/compare/step_comparison.py",
        f"compare/test_compare.py compare/test_compare_not_finite.py {CAUSES}",
        ("compare: a sign is lost", "[abs(r) * measured[0], r * measured", "[abs(r) * measured[0], abs(r) * measured"),
        ("compare: noise is a difference", "64 * self.eps, 1e-3)", "0, 1e-3)"),
        ("compare: updates are never looked at", "found = self.of_updates()", "pass"),
        ("compare: the gradient's norm is not looked at", 'found = self.of_value("grad_norm")', "pass"),
        ("compare: an update of noise is compared", "a * certain, b * certain", "a, b"),
        ("compare: idle parameters may do what they like", " | (gradient == 0)", ""),
        ("compare: infinity in A is equal", '(("A", self.a), ("B", self.b))', '(("B", self.b),)'),
        ("compare: infinity in B is equal", '(("A", self.a), ("B", self.b))', '(("A", self.a),)'),
        ("compare: infinity in both is equal", 'self.skipped and runs == "A and B"', 'runs == "A and B"'),
        ("compare: an update hides an overflow", 'self._parameters_not_finite("update")', "[]"),
        ("compare: the smallest group comes first", "each.causes, -len(", "each.causes, len("),
        ("compare: groups without a cause come first", "not each.causes, -len(", "each.causes, -len("),
        ("compare: any sum is a forgotten zero_grad", "0.01 < c < 1.001 and all(", "0.01 < c < 1.001 or all("),
        ("compare: everything is nearly parallel", "NEARLY_PARALLEL = 0.8", "NEARLY_PARALLEL = 0.0"),
        ("compare: a part of the parameters is clipped", "            return (OTHER,)", "            pass"),
        ("compare: a wrong loss is no sign", "if r < 1 and loss_is_right:", "if r < 1:"),
    ),
    *mistakes(
        "minipar/compare/causes.py",
        f"{RECORDS} {CAUSES}",
        ("compare: the causes of more and less swapped", "(1 / size, f", "(size, f"),
        ("compare: parts of fused matrices are missed", "product(tps, (1, 3))", "product(tps, (1,))"),
    ),
]
