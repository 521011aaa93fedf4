"""Claims about what all commands share: files of JSON, output that fails once, lines in one piece."""

import argparse
import json
import os
import socket
import subprocess
import sys

import pytest
from launcher import ROOT
from refusals import refused

from minipar.cli import UsageParser, report, write_json
from minipar.errors import UsageError

# ---- files -----------------------------------------------------------------------------------------------------------


def test_json_goes_to_the_file_or_alone_to_standard_output(tmp_path, capsys):
    value = [{"a": 1.5, "b": None}]
    write_json(str(tmp_path / "x.json"), value)
    assert json.loads((tmp_path / "x.json").read_text()) == value and capsys.readouterr().out == ""
    write_json("-", value)
    assert json.loads(capsys.readouterr().out) == value
    for path in (tmp_path, tmp_path / "no" / "x.json", "/dev/full"):
        refused(UsageError, "--json", str(path), by=lambda path=path: write_json(str(path), value))


# ---- output ----------------------------------------------------------------------------------------------------------

WRITES = """
import sys, time
from minipar.cli import write_out
from minipar.errors import UsageError
time.sleep(0.3)
try:
    write_out("x")
    write_out("x" * 100_000)
except UsageError as error:
    print(error, file=sys.stderr)
print("more")
"""


@pytest.mark.parametrize(("place", "cause"), [("> /dev/full", "No space left on device"), ("| true", "Broken pipe")])
def test_a_failed_output_is_one_error_and_no_second_one(place, cause, tmp_path):
    """The flush at the end of the program does not fail again."""
    (tmp_path / "program.py").write_text(WRITES)
    command = ["bash", "-c", f"{sys.executable} {tmp_path}/program.py {place}"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.stderr.count("\n") == 1 and cause in done.stderr


def test_a_reader_that_has_gone_gets_no_line(capsys):
    try:
        try:
            raise BrokenPipeError
        except BrokenPipeError:
            raise UsageError("standard output") from None
    except UsageError as error:
        assert report(error) == 2
    assert capsys.readouterr() == ("", "")


def test_a_line_is_written_in_one_piece():
    program = "from minipar.errors import print_line; print_line('first'); print_line('second')"
    reader, writer = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)  # keeps apart what is written apart
    with reader, writer:
        unbuffered = os.environ | {"PYTHONUNBUFFERED": "1"}
        command = [sys.executable, "-c", program]
        subprocess.run(command, cwd=ROOT, env=unbuffered, stderr=writer, check=True, timeout=60)
        reader.settimeout(10)
        assert [reader.recv(100), reader.recv(100)] == [b"first\n", b"second\n"]


# ---- parsers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_help_and_version_are_printed_on_one_rank(flag, capsys):
    for prints in (True, False):
        with pytest.raises(SystemExit) as leaving:
            UsageParser(prog="p", prints=prints).parse_args([flag])
        assert leaving.value.code == 0 and (capsys.readouterr().out != "") == prints


def test_flags_of_a_sub_command_are_not_those_of_its_program():
    made = UsageParser(prog="minipar.test")
    made.add_argument("--known")
    commands = made.add_subparsers(required=True, dest="command")
    commands.add_parser("run").add_argument("--steps", required=True)
    with pytest.raises(UsageError) as caught:
        made.parse_args(["--known", "3", "run"])
    assert "--steps" in str(caught.value) and "--known" not in str(caught.value)
    assert made.parse_args(["run", "--steps", "3"]) == argparse.Namespace(known=None, command="run", steps="3")
