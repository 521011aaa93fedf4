"""Mistakes in minipar/bench: what is measured, and the constants that are fitted to it."""

from mutants.mutant import mistakes

MUTANTS = [
    *mistakes(
        "minipar/bench/__init__.py",
        "bench/test_values.py",
        ("bench: the slowest rank is the sum of all", 'op="max")[0]', 'op="sum")[0]'),
    ),
    *mistakes(
        "minipar/bench/costs.py",
        "bench/test_machine.py",
        ("costs: a fit with negative constants", "(constants >= 0).all() and error < least", "error < least"),
        ("costs: attention's backward takes as long as its forward", "(matrices + 2 * core)", "(matrices + core)"),
        ("costs: the embedding is copied on one rank too", "hidden if shape.tp > 1 else 0", "hidden"),
    ),
    *mistakes(
        "minipar/bench/machine.py",
        "bench/test_values.py",
        ("machine: both ways of a message are one", "/ (2 * ROUND_TRIPS)", "/ ROUND_TRIPS"),
        ("machine: four blocks are one", "medians[piece] /= BLOCKS", "pass"),
    ),
    *mistakes(
        "minipar/bench/layouts.py",
        "bench/test_values.py",
        ("layouts: rank 0's memory is the fullest's", "max(peaks[:ranks])", "peaks[0]"),
        ("layouts: a step takes all the time so far", "return _latest(world) - start", "return _latest(world)"),
        (
            "layouts: microbatches are whole batches",
            "data.global_batch // (mesh.dp * data.microbatches)",
            "data.global_batch // mesh.dp",
        ),
    ),
    *mistakes(
        "minipar/bench/pipeline.py",
        "bench/test_values.py",
        ("pipeline: the smallest bubble is the largest", "min(bubbles)", "max(bubbles)"),
        (
            "pipeline: times in microseconds",
            'e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6',
            'e["ts"], (e["ts"] + e["dur"])',
        ),
    ),
    *mistakes(
        "minipar/bench/step.py",
        "bench/test_values.py",
        ("overlap: a rank's own processor time for all", "comm.all_reduce(np.array([cpu[0]]))[0]", "cpu[0]"),
    ),
]
