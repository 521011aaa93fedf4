"""Claims about the report's limits: what is tied, what is named, how a share is printed, and which columns it has."""

from dataclasses import replace

import pytest
from planning import a100s, layout, tables

from minipar.errors import UsageError
from minipar.plan.model import find_model
from minipar.plan.programs import PROGRAMS, find_gpu, find_program
from minipar.plan.report import PARTS, SHOWN_MESHES, as_json, as_text, complexity, tied, why
from minipar.plan.request import Request
from minipar.plan.search import Candidate, SearchResult, judge
from minipar.plan.space import SearchSpace
from minipar.plan.step_time import StepTime

GPT2 = find_model("gpt2")
MIXTRAL = find_model("mixtral-8x7b")
ONE = judge(GPT2, layout(dp=8), a100s(8), 8, 1024)
IDLE = StepTime(compute=1.0, tp=0.0, pp=0.0, dp=0.0, bubble=0.0, optimizer=0.0, exact=True)


def taking(**seconds):
    """Make a plan of one second of computation, unless other parts are given."""
    return replace(ONE, time=replace(IDLE, **seconds))


def request_for(model=GPT2, **given):
    """Ask for a model on eight GPUs; `given` are fields of the search."""
    return Request(
        model=model,
        cluster=a100s(8),
        global_batch=8,
        length=1024,
        space=SearchSpace(**given),
        name="m",
        gpu="a100",
        program="megatron",
        spread=0.15,
        evidence=PROGRAMS["megatron"].evidence,
    )


def time_cell(plan, column):
    """Return the word that the table of times has for a plan; its column is one of those after the total."""
    result = SearchResult(plans=[plan], examined=1, fitting=1, meshes=[])
    _, _, (title, names, rows) = tables(as_text(request_for(), result))
    assert title.startswith("Time of a step")
    return rows[0][names.index(column) + 2]  # after the plan's "1." and the total's "+-"


def test_what_takes_exactly_the_spread_longer_is_tied():
    first, second, third = taking(), taking(bubble=0.5), taking(bubble=0.5000001)
    assert tied([first, second, third], 0.5) == [first, second]


def test_a_pipeline_and_each_longer_axis_are_less_simple():
    assert complexity(layout()) == (False, 0)
    assert complexity(layout(dp=2)) == complexity(layout(cp=2)) == complexity(layout(ep=2)) == (False, 1)
    assert complexity(layout(pp=2)) == (True, 1) and complexity(layout(dp=2, tp=2, pp=2)) == (True, 3)


def test_a_tenth_of_the_gap_is_not_named_and_more_is():
    winner = taking()
    reason = why(winner, taking(compute=2.0, tp=0.125, dp=0.25, optimizer=0.1, bubble=0.025))
    assert reason == f"1.5 s slower (150.0%): 1 s more of {PARTS['compute']}, 0.25 s more of {PARTS['dp']}"
    one_part = why(winner, taking(bubble=1.875, ep=0.0, pp=0.125))
    assert one_part == f"2 s slower (200.0%): 1.88 s more of {PARTS['bubble']}"


def test_what_takes_less_is_named_after_what_takes_more():
    reason = why(taking(tp=1.0), taking(compute=4.0, cp=0.25))
    assert reason == (
        f"2.25 s slower (112.5%): 3 s more of {PARTS['compute']}, 0.25 s more of {PARTS['cp']}, "
        f"against 1 s less of {PARTS['tp']}"
    )


def test_a_reason_has_the_unit_of_the_winners_time():
    reason = why(taking(compute=0.5), taking(compute=0.5, dp=0.25))
    assert reason == f"250 ms slower (50.0%): 250 ms more of {PARTS['dp']}"


@pytest.mark.parametrize(
    ("share", "cell"), [(0.01, "1.0%"), (0.0149, "1.5%"), (0.0099, "0.99%"), (0.5, "50.0%"), (0.00004, "0.00%")]
)
def test_a_share_below_one_percent_has_two_decimals(share, cell):
    assert time_cell(replace(ONE, mfu=share), "MFU") == cell


@pytest.mark.parametrize(("tflops", "cell"), [(9.96, "10"), (9.94, "9.9"), (10.0, "10"), (12.4, "12"), (0.123, "0.12")])
def test_few_tflops_have_two_digits(tflops, cell):
    assert time_cell(replace(ONE, tflops=tflops), "TFLOP/s/GPU") == cell


@pytest.mark.parametrize(("count", "shown"), [(199, 199), (200, 200), (201, 200)])
def test_the_json_has_at_most_200_meshes(count, shown):
    mesh = Candidate(seconds=1.0, nbytes=2.0, layout=layout(dp=8))
    result = SearchResult(plans=[ONE], examined=count, fitting=count, meshes=[mesh] * count)
    found = as_json(request_for(), result)
    assert len(found["meshes"]) == shown and found["meshes"][0]["memory_bytes"] == 2.0
    assert SHOWN_MESHES == 200


@pytest.mark.parametrize(
    ("given", "cp", "ep", "etp"),
    [
        ({}, False, True, True),
        ({"cp": 2}, True, True, True),
        ({"cp": (1, 2)}, True, True, True),
        ({"cp": 1, "ep": 1}, False, False, True),
        ({"ep": 2, "tp": 1}, False, True, False),
        ({"tp": 2}, False, True, True),
        ({"tp": 2, "sequence_parallel": True}, False, True, True),
        ({"sequence_parallel": False}, False, True, False),
    ],
)
def test_the_axes_that_a_search_tries_have_columns(given, cp, ep, etp):
    """Experts that are not cut need tp and sequence parallelism."""
    asked = request_for(MIXTRAL, **given)
    assert (asked.tries_cp, asked.tries_ep, asked.tries_etp) == (cp, ep, etp)
    dense = {name: value for name, value in given.items() if name != "ep"}
    asked = request_for(GPT2, **dense)
    assert (asked.tries_cp, asked.tries_ep, asked.tries_etp) == (cp, False, False)


# ---- a user's own values ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "least", "most"),
    [("memory", "1.0", "1e24"), ("peak", "1", "1e24"), ("products", "1e-6", "1.0"), ("attention", "0.000001", "1")],
)
def test_a_gpus_value_may_be_the_least_and_the_most(key, least, most, tmp_path):
    path = tmp_path / "gpu.json"
    for value in (least, most):
        path.write_text(f'{{"like": "A100", "{key}": {value}}}')
        assert getattr(find_gpu(str(path)), key) == float(value)
    for value in (float(least) * 0.999, float(most) * 1.001):
        path.write_text(f'{{"like": "a100", "{key}": {value}}}')
        with pytest.raises(UsageError) as caught:
            find_gpu(str(path))
        expected = f"expected a value from {float(least):g} to {float(most):g}"
        assert str(caught.value) == f"{path}: {key} is {value}, {expected}"


@pytest.mark.parametrize(
    ("key", "least", "most"), [("host_layer", "0", "1e12"), ("half_work", "0.0", "1e12"), ("cards", "1e-6", "1")]
)
def test_a_programs_value_may_be_the_least_and_the_most(key, least, most, tmp_path):
    path = tmp_path / "program.json"
    for value in (least, most):
        path.write_text(f'{{"{key}": {value}}}')
        assert getattr(find_program(str(path)).assumptions, key) == float(value)
    path.write_text(f'{{"{key}": {float(most) * 1.001}}}')
    with pytest.raises(UsageError) as caught:
        find_program(str(path))
    assert f"expected a value from {float(least):g} to {float(most):g}" in str(caught.value)


def test_a_file_without_like_lacks_what_is_named(tmp_path):
    path = tmp_path / "gpu.json"
    path.write_text('{"memory": 1e11, "peak": 1e15, "products": 0.5}')
    with pytest.raises(UsageError) as caught:
        find_gpu(str(path))
    assert str(caught.value) == f'{path} lacks between, inside, memory_bandwidth, or "like": a known GPU'


def test_a_value_that_no_gpu_has_is_refused(tmp_path):
    path = tmp_path / "gpu.json"
    path.write_text('{"like": "a100", "colour": 1}')
    with pytest.raises(UsageError, match="no gpu has 'colour'; see cluster.py$"):
        find_gpu(str(path))


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_like_another_is_that_program(name, tmp_path):
    path = tmp_path / "program.json"
    path.write_text(f'{{"like": "{name.upper()}"}}')
    assert find_program(str(path)) == PROGRAMS[name] == find_program(name.upper())
