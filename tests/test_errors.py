"""Claims about what all commands share: files of JSON, lines in one piece, the parser."""

import argparse
import json
import os
import socket
import subprocess
import sys

import pytest
from launcher import ROOT
from refusals import refused

from minipar.cli import UsageParser, write_json
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


def test_help_is_printed_on_one_rank(capsys):
    for prints in (True, False):
        with pytest.raises(SystemExit) as leaving:
            UsageParser(prog="p", prints=prints).parse_args(["--help"])
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
