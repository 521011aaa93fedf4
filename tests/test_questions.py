"""Claims about docs/questions.md: 25 questions, each with a thread, an answer, a section that exists and a command.

The commands are only read here; the long test runs them, and looks for what the document says that they print.
"""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from command_flags import COMMANDS, arguments_of
from launcher import OPEN_MPI

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "questions.md").read_text(encoding="utf-8")
MOST_LINES = 5  # of an answer, with its link
SECONDS = 120
TITLED = re.compile(r"\[([^\]]+)\]\(\.\./chapters/(\w+)\.ipynb\)")
PROGRAM = re.compile(r"<<'END'\n(.*?)\nEND\n", re.DOTALL)

QUESTIONS = dict(re.findall(r"^### ([^\n]*)\n(.*?)(?=^##|\Z)", TEXT, re.MULTILINE | re.DOTALL))
each = pytest.mark.parametrize("title", QUESTIONS)


def block(title, language):
    (found,) = re.findall(rf"```{language}\n(.*?)```", QUESTIONS[title], re.DOTALL)
    return found


def prose(title):
    """The paragraphs of a question: its thread, and the answer."""
    return QUESTIONS[title].split("```")[0].strip().split("\n\n")


def headings(chapter):
    """The headings of a chapter, without their numbers."""
    source = (ROOT / "chapters" / f"{chapter}.py").read_text(encoding="utf-8")
    return {re.sub(r"^[\d.]+ ", "", heading) for heading in re.findall(r"^# #+ (.*)$", source, re.MULTILINE)}


def pattern_of(line):
    """What a line that is shown must match: [...] is any text, and losses of the trainer's text are any numbers.

    The text is the standard library's source, so they differ between versions of Python.
    """
    pattern = ".*?".join(map(re.escape, re.split(r" *\[\.\.\.\] *", line)))
    return re.sub(r"(loss\\ |norm\\ )\d+\\\.\d+", r"\1([\\d.]+)", pattern) if "step " in line else pattern


def missing(output, shown):
    """The lines of `shown` that are not in `output`. Losses that are shown as equal must be equal."""
    absent, printed = [], {}
    for line in shown.splitlines():
        match = re.search(pattern_of(line), output, re.DOTALL)
        if match is None:
            absent.append(line)
        elif match.groups():
            numbers = re.findall(r"(?:loss|norm) (\d+\.\d+)", line)
            pairs = zip(numbers, match.groups(), strict=True)
            if not all(printed.setdefault(number, value) == value for number, value in pairs):
                absent.append(line)
    return absent


def test_there_are_25_questions():
    assert len(QUESTIONS) == 25


@each
def test_a_question_has_a_thread_and_a_short_answer(title):
    thread, answer = prose(title)
    assert re.search(r"https://github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+\)", thread)
    assert len(answer.splitlines()) <= MOST_LINES and re.search(r"\]\((?!https)", answer)


@each
def test_the_sections_of_chapters_exist(title):
    named = [(" ".join(text.split()), chapter) for text, chapter in TITLED.findall(QUESTIONS[title])]
    assert [(text, chapter) for text, chapter in named if text not in headings(chapter)] == []


@each
def test_commands_have_flags_that_exist_and_programs_compile(title):
    commands = block(title, "bash")
    for program in PROGRAM.findall(commands):
        if "import" in program:
            ast.parse(program)
    shell = PROGRAM.sub("\n", commands).replace("\\\n", " ")
    for module, arguments in re.findall(r"-m (?:minipar\.)?(\w+)(.*)", shell):
        known = {name for action in arguments_of(module) for name in action.option_strings}
        assert module in COMMANDS and set(re.findall(r"(?<= )--[\w-]+", arguments)) <= known


def test_a_line_that_is_not_printed_is_missed():
    assert missing("loss 1.5  norm 2\nend", "loss [...] norm 2\nend") == []
    assert missing("loss 1.5  norm 2", "loss 1.5\nnorm 3") == ["norm 3"]


def test_losses_that_are_shown_as_equal_must_be_equal():
    shown = "step 1 [...] loss 1.5\nstep 2 [...] loss 1.5"
    assert missing("step 1: a loss 2.5, step 2: a loss 2.5", shown) == []
    assert missing("step 1: a loss 2.5, step 2: a loss 2.6", shown) == ["step 2 [...] loss 1.5"]


@pytest.mark.long
@each
def test_a_command_prints_what_is_shown(title, tmp_path):
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**OPEN_MPI, **os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    shell = ["bash", "-c", block(title, "bash")]
    job = subprocess.run(shell, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert missing(job.stdout + job.stderr, block(title, "text")) == [], job.stdout + job.stderr
