"""Claims about the errors that all commands share: each is one line, and nothing half written is left."""

import argparse
import json
import os
import socket
import subprocess
import sys
from decimal import Decimal

import pytest
from launcher import ROOT

from minipar.cli import UsageParser, report, write_json, writing
from minipar.errors import UsageError, check_divides, check_memory, error_line, printable

MEMORY = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize(("size", "parts"), [(3, 2), (1, 2), (100, 7), (7, 100)])
def test_parts_that_do_not_divide_show_the_equation(size, parts):
    with pytest.raises(UsageError, match=f"^a/b = {size}/{parts} is not a whole number: each has a whole one$"):
        check_divides("a/b", size, parts, "each has a whole one")


@pytest.mark.parametrize(("size", "parts"), [(4, 2), (0, 3), (7, 7), (7, 1)])
def test_parts_that_divide_pass(size, parts):
    check_divides("a/b", size, parts, "each has a whole one")


@pytest.mark.parametrize("kind", [float, Decimal])
def test_what_needs_more_than_the_memory_says_how_much(kind):
    check_memory(kind(MEMORY), "all of it")
    with pytest.raises(UsageError, match=r"^twice = [\d.e+]+ bytes, but this machine has [\d.e+]+$"):
        check_memory(2 * kind(MEMORY), "twice")


# ---- files -----------------------------------------------------------------------------------------------------------

FAILURES = {
    "a full disk": (OSError(28, "No space left on device"), UsageError, "--x F cannot be written: No space left on"),
    "an error without a number": (OSError("gone"), UsageError, "--x F cannot be written: gone"),
    "a mistake": (UsageError("a value is too large"), UsageError, "a value is too large"),
    "a bug": (KeyError("k"), KeyError, "'k'"),
    "Ctrl-C": (KeyboardInterrupt(), KeyboardInterrupt, ""),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_block_that_fails_leaves_none_of_its_files(name, tmp_path):
    error, kind, words = FAILURES[name]
    half, never, other = (tmp_path / each for each in ("half", "never", "other"))
    half.write_text("half")
    other.write_text("mine")
    with pytest.raises(kind) as raised, writing("--x F", half, never):
        raise error
    assert words in str(raised.value)
    assert not half.exists() and not never.exists() and other.read_text() == "mine"


def test_what_is_no_plain_file_stays(tmp_path):
    folder, pipe = tmp_path / "folder", tmp_path / "pipe"
    folder.mkdir()
    os.mkfifo(pipe)
    with pytest.raises(UsageError), writing("--x F", folder, pipe):
        raise OSError(28, "No space left on device")
    assert folder.is_dir() and pipe.is_fifo()


def test_a_block_that_ends_keeps_its_files(tmp_path):
    with writing("--x F", tmp_path / "whole"):
        (tmp_path / "whole").write_text("whole")
    assert (tmp_path / "whole").read_text() == "whole"


def test_json_goes_to_the_file_or_alone_to_standard_output(tmp_path, capsys):
    value = [{"a": 1.5, "b": None}]
    write_json(str(tmp_path / "x.json"), value)
    assert json.loads((tmp_path / "x.json").read_text()) == value and capsys.readouterr().out == ""
    write_json("-", value)
    assert json.loads(capsys.readouterr().out) == value
    for path in (tmp_path, tmp_path / "no" / "x.json", "/dev/full"):
        with pytest.raises(UsageError, match=f"^--json {path} cannot be written: "):
            write_json(str(path), value)


@pytest.mark.parametrize(("place", "line"), [("> /dev/full", "No space left on device"), ("| true", "Broken pipe")])
def test_a_failed_output_is_one_error_and_no_second_one(place, line):
    """The flush at the end of the program does not fail again."""
    code = (
        "import sys, time\n"
        "from minipar.cli import write_out\n"
        "from minipar.errors import UsageError\n"
        "time.sleep(0.5)\n"
        "try:\n"
        "    write_out('x')\n"
        "    write_out('x' * 100_000)\n"
        "except UsageError as error:\n"
        "    print(error, file=sys.stderr)\n"
        "print('more')\n"
    )
    command = f"{sys.executable} -c {json.dumps(code)} {place}".replace("\\n", "\n")
    done = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL
    )
    assert done.stderr == f"standard output cannot be written: {line}\n"


# ---- lines -----------------------------------------------------------------------------------------------------------


def test_an_error_is_one_line_whatever_it_holds(capsys):
    assert report(UsageError("a\n  b\x1b[2J\r\n")) == 2
    assert report(MemoryError()) == 2
    assert capsys.readouterr() == ("", "minipar: error: a b\\x1b[2J\nminipar: error: out of memory\n")
    assert printable("a\x7f\u2028b") == "a\\x7f\\u2028b" and error_line(UsageError("é日")) == "minipar: error: é日"


def test_a_reader_that_has_gone_gets_no_line(capsys):
    try:
        try:
            raise BrokenPipeError
        except BrokenPipeError:
            raise UsageError("standard output cannot be written") from None
    except UsageError as error:
        assert report(error) == 2
    assert capsys.readouterr() == ("", "")


def parser(**options):
    made = UsageParser(prog="p", **options)
    made.add_argument("--size", type=int, required=True)
    made.add_argument("--kind", choices=("plain", "fancy"))
    return made


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        ("", "the following arguments are required: --size"),
        ("--size x", "argument --size: invalid int value: 'x'"),
        ("--size 1 --kind plane", "; did you mean plain?"),
        ("--size 1 --kind xyz", "'xyz' (choose from"),
        ("--size=--", "argument --size: expected one argument"),
        ("--sise 3", "the following arguments are required: --size; there is no --sise; did you mean --size?"),
        ("--size 3 --sizes 4", "unrecognized arguments: --sizes 4; did you mean --size?"),
        ("--size 3 stray", "unrecognized arguments: stray"),
        ("--size 3 -- --kind", "unrecognized arguments: --"),
    ],
)
def test_every_mistake_of_a_command_line_is_a_usage_error(argv, line):
    with pytest.raises(UsageError) as raised:
        parser(allow_abbrev=False).parse_args(argv.split())
    assert line in str(raised.value)


@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_help_and_version_are_printed_on_one_rank(flag, capsys):
    for prints in (True, False):
        with pytest.raises(SystemExit) as leaving:
            parser(prints=prints).parse_args([flag])
        assert leaving.value.code == 0 and (capsys.readouterr().out != "") == prints


def test_the_version_is_no_value_of_the_command_line():
    assert parser().parse_args(["--size", "3"]) == argparse.Namespace(size=3, kind=None)


def test_flags_of_a_sub_command_are_not_those_of_its_program():
    """Nor is what follows `--` a flag: a message about something else names none of them."""
    parser = UsageParser(prog="minipar.test")
    parser.add_argument("--known")
    commands = parser.add_subparsers(required=True, dest="command")
    commands.add_parser("run").add_argument("--steps", required=True)
    with pytest.raises(UsageError, match="^the following arguments are required: --steps$"):
        parser.parse_args(["--known", "3", "run"])
    assert list(parser._unknown_flags(["--knwon=3", "run", "--other"])) == ["--knwon"]
    assert list(parser._unknown_flags(["--", "--other"])) == []
    assert parser.parse_args(["run", "--steps", "3"]).steps == "3"


# ---- lines on standard error -----------------------------------------------------------------------------------------


def test_a_line_is_written_in_one_piece():
    program = "from minipar.errors import print_line; print_line('first'); print_line('second')"
    reader, writer = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)  # keeps apart what is written apart
    with reader, writer:
        unbuffered = os.environ | {"PYTHONUNBUFFERED": "1"}
        command = [sys.executable, "-c", program]
        subprocess.run(command, cwd=ROOT, env=unbuffered, stderr=writer, check=True, timeout=60)
        reader.settimeout(10)
        assert [reader.recv(100), reader.recv(100)] == [b"first\n", b"second\n"]


def test_no_line_is_printed_on_standard_error_in_two_pieces():
    files = [path for folder in ("minipar", "visualize") for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 100
    assert [path.name for path in files if "file=sys.stderr" in path.read_text(encoding="utf-8")] == []
