"""Utilization as others count it: 202 runs of MPT, whose MFU and HFU are printed to a hundredth of a point."""

import json
from pathlib import Path

import pytest
from plan.mpt_runs import mpt_runs

from minipar.plan.__main__ import main
from minipar.plan.model import find_model, utilization

PLANNING = Path(__file__).parents[3] / "docs" / "planning.md"


def counted(run):
    """Return a run's utilization in per cent, by convention."""
    flops = run.model.counted_flops(run.length, run.layout.recompute)
    samples = run.gpus * run.layout.microbatch * run.layout.microbatches
    return {name: 100 * utilization(samples * each, run.seconds, run.gpus, run.peak) for name, each in flops.items()}


def misses(convention, printed):
    """Return the runs whose printed value is not the convention's, and their number."""
    runs = mpt_runs()
    return sum(abs(counted(run)[convention] - printed(run)) > 0.01 for run in runs), len(runs)


def test_mpts_mfu_is_6n_and_attention_to_a_hundredth():
    assert misses("6N + attention", lambda run: run.mfu) == (0, 202)


def test_mpts_hfu_counts_what_is_recomputed():
    """A third more where every layer is recomputed."""
    wrong, _ = misses("with recompute", lambda run: run.hfu)
    assert wrong == 0


@pytest.mark.parametrize("other", ["6N", "causal attention"])
def test_no_other_convention_gives_mpts_mfu(other):
    wrong, of = misses(other, lambda run: run.mfu)
    assert wrong > 0.99 * of


def test_planning_md_shows_two_runs_by_each_convention():
    rows = []
    for run in mpt_runs():
        if (run.name, run.gpu, run.gpus) == ("7b", "h100_80gb", 8) and run.length in (2048, 65536):
            shares = [f"{share:.2f}" for share in (*counted(run).values(), run.mfu, run.hfu)]
            rows.append(f"| {run.length:,} | {run.tokens_per_second:,.0f} | {' | '.join(shares)} |")
    assert len(rows) == 2 and "\n".join(sorted(rows)) in PLANNING.read_text(encoding="utf-8")


def test_the_planner_prints_the_fastest_plans_by_each_convention(capsys):
    question = "--model llama-7b --gpus 8 --gpu a100 --global-batch 32 --seq-len 4096 --top 2".split()
    assert main(question) == 0
    text = capsys.readouterr().out
    assert main([*question, "--json", "-"]) == 0
    first = json.loads(capsys.readouterr().out)["plans"][0]
    shares = first["mfu_counted"]
    title, names, values = next(block for block in text.split("\n\n") if block.startswith("MFU of 1.")).splitlines()
    assert " ".join(names.split()) == " ".join(shares)
    assert values.split() == [f"{share:.1%}" for share in shares.values()]
    seconds, model = first["seconds"]["total"], find_model("llama-7b")
    assert shares["6N"] == pytest.approx(32 * 4096 * 6 * model.parameters / (seconds * 8 * 312e12), rel=1e-12)
    assert shares["causal attention"] - shares["6N"] == pytest.approx(
        (shares["6N + attention"] - shares["6N"]) / 2, rel=1e-12
    )
    # The planner's own is the second without lookups and norms.
    lookups = 32000 * 4096 + 65 * 4096
    assert shares["6N + attention"] / first["mfu"] == pytest.approx(
        1 + 6 * lookups * 4096 / model.model_flops(4096), rel=1e-12
    )
