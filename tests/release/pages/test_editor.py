"""Claims about the site's schedule editor: its JavaScript says what the checker, the simulator and the graders say.

Texts are library schedules with random mistakes, so most are no schedules: the words of each error are compared too.
MINIPAR_EXPLORER_SETTINGS=1000 compares so many instead of 100 (`make site` does).
"""

import json
import os
import random
import re
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
from exercises.solutions import e10_one_f_one_b as e10_solution
from exercises.solutions import e11_beat_1f1b as e11_solution
from exercises.solutions import e26_time_and_memory as e26_solution

from chapters.exercises.e26_time_and_memory import KNOWN
from chapters.exercises.graders import e10_one_f_one_b, e11_beat_1f1b, e26_time_and_memory
from chapters.exercises.grading import Hint
from chapters.support.ch08.in_order import simulate_in_order
from chapters.support.schedule_lists import count_sends, library_lists, longest_path, timed
from minipar.errors import UsageError
from minipar.parallel.pipeline.actions import COMPUTE, MESSAGES, Durations, peak_live, simulate
from minipar.parallel.pipeline.check import check, lower
from minipar.parallel.pipeline.schedules import SCHEDULES, make
from visualize.schedule import live_activations
from visualize.schedule_file import load_csv, save_csv

NODE = shutil.which("node")
SETTINGS = int(os.environ.get("MINIPAR_EXPLORER_SETTINGS", "100"))
pytestmark = pytest.mark.skipif(NODE is None, reason="the editor is JavaScript, and there is no node to run it")
GARBAGE = ["F0", "0X0", "0F", "-1F0", 'it\'s "0F0"', "0F0 0F1", "0f0", "x" * 31, "é\t\\", "(0F0;1F0)OVERLAP_F_B"]
# What a few random texts do not have: messages that wait in a circle, an action with a long name, a forward too many in
# exercise 10, and a W too late in exercise 11; a mirrored warm-up, a B before its F, and backwards out of order.
RARE = [
    "0F0,0SEND_F0,0F1,0RECV_B0,0SEND_F1,0B0,0RECV_B1,0B1\n1RECV_F0,1F0,1B0,1RECV_F1,1SEND_B0,1F1,1B1,1SEND_B1\n",
    "0F0,abcdefghijklmnopqrstuvwxyz'0123456789\n",
    "0F0,0F1,0F2,0B0,0F3,0B1,0B2,0B3\n1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3\n",
    "0F0,0F1,0I0,0F2,0W0,0I1,0W1,0F3,0I2,0W2,0I3,0W3\n1F0,1I0,1F1,1I1,1W0,1W1,1F2,1I2,1W2,1F3,1I3,1W3\n",
    "0F0,0B0,0F1,0B1,0F2,0B2,0F3,0B3\n1F0,1F1,1B0,1F2,1B1,1F3,1B2,1B3\n",
    "0F0,0B1,0F1,0B0,0F2,0B2,0F3,0B3\n1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3\n",
    "0F0,0F1,0B0,0F2,0B1,0F3,0B3,0B2\n1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3\n",
]


# ---- random texts ----------------------------------------------------------------------------------------------------


def start(rng):
    """Return a schedule's rows of cells, p and m."""
    name, p, m = rng.choice(list(SCHEDULES)), rng.randint(1, 5), rng.randint(1, 8)
    if rng.random() < 0.4:
        p, m = 4, 8
    try:
        schedule = make(name, p, m)
    except UsageError:  # a microbatch too many or too few
        schedule = make("1f1b", p, m)
    draw = rng.random()
    if draw < 0.3:
        schedule = lower(schedule)
    elif draw < 0.4:
        schedule = lower(schedule.unpaired())
    rows = [[str(action) for action in actions] for actions in schedule.ranks]
    if draw > 0.8:
        rows = [cut(row) for row in rows]
    return rows, p, m


def cut(row):
    """Cut each backward that is in no pair into I and W."""
    cells = []
    for cell in row:
        is_backward = "B" in cell and "_" not in cell
        cells += [cell.replace("B", "I"), cell.replace("B", "W")] if is_backward else [cell]
    return cells


def make_mistake(rng, rows):
    """Change something in the rows: an order, an action, or a row."""
    row = rng.choice(rows)
    if not row:
        return
    at, to = rng.randrange(len(row)), rng.randrange(len(row))
    frequent = ["swap", "swap", "swap", "move", "move", "kind", "message"]
    kind = rng.choice([*frequent, "delete", "twice", "elsewhere", "action", "garbage", "row", "idle"])
    if kind == "swap":
        other = min(at + 1, len(row) - 1)
        row[at], row[other] = row[other], row[at]
    elif kind == "move":
        row.insert(to, row.pop(at))
    elif kind == "kind":
        row[at] = re.sub("[A-Z]", rng.choice(COMPUTE), row[at], count=1)
    elif kind == "message":
        row.insert(to, f"{rng.randint(0, 4)}{rng.choice(MESSAGES)}{rng.randint(0, 3)}")
    elif kind == "delete":
        row.pop(at)
    elif kind == "twice":
        row.insert(to, row[at])
    elif kind == "elsewhere":
        rng.choice(rows).insert(0, row.pop(at))
    elif kind == "action":
        numbers = rng.choice([0, 1, 2, 9, 100]), rng.choice([0, 1, 7, 8, 999_999_999])
        row[at] = f"{numbers[0]}{rng.choice(COMPUTE + MESSAGES)}{numbers[1]}"
    elif kind == "garbage":
        row[at] = rng.choice(GARBAGE)
    elif kind == "row":
        rows.remove(row) if len(rows) > 1 else row.clear()
    else:
        row[at:at] = rng.choice([[""], [" ", ""], ["0UNSHARD0"], ["1RESHARD"]])


def random_setting(rng):
    rows, p, m = start(rng)
    for _ in range(rng.choice([0, 0, 1, 1, 2, 3])):
        make_mistake(rng, rows)
    end = rng.choice(["\n"] * 6 + ["\r\n"] * 3 + ["\n\n"])
    gap = rng.choice([",", ",", ", ", " ,"])
    text = end.join(gap.join(row) for row in rows) + rng.choice(["", "\n", "\n\n"])
    F, I, W = (rng.randint(0, 24) / 8 for _ in range(3))  # noqa: E741
    return {"text": text, "times": {"F": F, "I": I, "W": W, "comm": rng.randint(0, 16) / 8}, "p": p, "m": m}


# ---- Python's answers ------------------------------------------------------------------------------------------------


def judged(text, times):
    Path("yours.csv").write_text(text, encoding="utf-8", newline="")
    schedule = load_csv("yours.csv")
    check(schedule)
    ranks = lower(schedule).ranks
    if any(not action.computes for _, action in schedule):
        simulate_in_order(schedule, Durations(), "rank")
    timeline = simulate(schedule, Durations(times["F"], times["I"], times["W"], times["comm"]))
    save_csv(schedule, "written.csv")
    return {
        "report": {
            "activations": [peak_live(actions) for actions in ranks],
            "weightGradients": [peak_live(actions, made_by=("I",), freed_by=("W",)) for actions in ranks],
            "sends": count_sends(schedule),
        },
        "slots": [[[str(slot.action), slot.start, slot.end] for slot in row] for row in timeline.ranks],
        "total": timeline.makespan,
        "bubble": float(timeline.bubble_fraction),
        "live": [[list(step) for step in live_activations(row)] for row in timeline.ranks],
        "written": Path("written.csv").read_text(encoding="utf-8"),
        "compact": "".join(",".join(map(str, actions)) + "\n" for actions in schedule.ranks),
    }


def attempt(function, *arguments):
    """Return what the function returns, or the words of its error."""
    try:
        return function(*arguments)
    except (UsageError, Hint) as error:
        return {"error": str(error)}


def cells(text, with_stage):
    """Return the rows of a text as an exercise has them: without stages, rank r's own is not written."""
    rows = [[cell.strip() for cell in line.split(",") if cell.strip()] for line in text.rstrip("\r\n").splitlines()]
    if with_stage:
        return rows
    bare = []
    for rank, row in enumerate(rows):
        own = [cell.removeprefix(str(rank)) for cell in row]
        bare.append([short if short[:1] in tuple("FBIW") else cell for short, cell in zip(own, row, strict=True)])
    return bare


def graded(text, p, m):
    return {
        "10": attempt(e10_one_f_one_b.grade_lists, cells(text, False), p, m),
        "11": attempt(e11_beat_1f1b.grade_lists, cells(text, False), p, m),
        "26": attempt(e26_time_and_memory.grade_lists, cells(text, True)),
    }


# ---- the comparison --------------------------------------------------------------------------------------------------


def ask(settings):
    script = str(Path(__file__).with_name("editor.mjs"))
    result = subprocess.run([NODE, script], input=json.dumps(settings), capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def settings_of(count):
    rng = random.Random("editor")
    times = {"F": 1, "I": 1, "W": 1, "comm": 0}
    rare = [{"text": text, "times": times, "p": 2, "m": 4} for text in RARE]
    return rare + [random_setting(rng) for _ in range(count - len(RARE))]


def assert_is_a_chain(path, answer, comm):
    """Assert that each action begins when the one before it, or its result, is there: from 0 to the end."""
    ranks = {text: rank for rank, row in enumerate(answer["slots"]) for text, _, _ in row}
    _, first, _ = path[0]
    assert first == 0
    for (before, _, end), (after, start, _) in pairwise(path):
        assert start in (end, end + comm), (before, after)
        assert start == end or ranks[before] != ranks[after]
    assert path[-1][2] == answer["total"]


def test_the_editor_says_what_python_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = settings_of(SETTINGS)
    right, words = 0, set()
    for setting, answer in zip(settings, ask(settings)["answers"], strict=True):
        expected = attempt(judged, setting["text"], setting["times"])
        path = answer["judged"].pop("path", None)
        assert answer["judged"] == expected, setting
        if path is None:
            words.add(expected["error"])
        else:
            right += 1
            assert_is_a_chain(path, expected, setting["times"]["comm"])
        marks = answer["graded"]
        for name in ("10", "11"):  # where Python's graders return nothing, the page says what was reached
            marks[name] = None if isinstance(marks[name], str) else marks[name]
        assert marks == graded(setting["text"], setting["p"], setting["m"]), setting
    assert right > SETTINGS / 5
    assert len(words) > SETTINGS / 5


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_path_of_chapter_7_is_as_long_as_the_editors(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    times = {"F": 4, "I": 5, "W": 3, "comm": 0}
    text = "".join(",".join(map(str, actions)) + "\n" for actions in make(name, 3, 6).ranks)
    (answer,) = ask([{"text": text, "times": times, "p": 3, "m": 6}])["answers"]
    assert_is_a_chain(answer["judged"]["path"], judged(text, times), 0)
    if name == "dualpipev":  # whose pairs the chapter's lists cannot write
        return
    lists = library_lists(name, 3, 6)
    chain = longest_path(lists, timed(lists, times | {"B": 8}))
    assert [text for text, _, _ in answer["judged"]["path"]] == [f"{stage}{kind}{i}" for kind, i, stage in chain]


def test_the_editor_passes_the_solutions_of_the_exercises():
    four = [e10_solution.one_f_one_b(4, 8), e11_solution.schedule(4, 8), e26_solution.schedule()]
    with_stages = [[[f"{rank}{cell}" for cell in row] for rank, row in enumerate(rows)] for rows in four[:2]] + four[2:]
    settings = []
    for rows in with_stages:
        text = "".join(",".join(row) + "\n" for row in rows)
        settings.append({"text": text, "times": {"F": 1, "I": 1, "W": 1, "comm": 0}, "p": 4, "m": 8})
    first, second, third = [answer["graded"] for answer in ask(settings)["answers"]]
    assert first["10"] == "the time of 1F1B, 33, and no more alive than its min(m, p - r)"
    assert second["11"].startswith("time ") and second["11"].endswith("in the memory of 1F1B; ZB-H1 takes 27")
    assert third["26"] == e26_time_and_memory.grade_lists(with_stages[2])


def test_the_editor_has_the_scores_of_exercise_26():
    found = ask([])
    assert {name: tuple(row) for name, row in found["ROWS"].items()} == e26_time_and_memory.table()
    assert {int(memory): time for memory, time in found["KNOWN"].items()} == KNOWN


def test_edits_move_remove_and_cut():
    assert ask([])["edits"] == {
        "removed": "0F0,0B0\n1B0\n",
        "later": "0B0,0F0\n1F0,1B0\n",
        "earlier": "0F0,0B0\n1B0,1F0\n",
        "elsewhere": "0F0\n1F0,0B0,1B0\n",
        "middle": "0F1,0F0,0B0\n",
        "cut": "0F0,0I0,0W0\n1F0,1I0,1W0\n",
    }
