"""Claims about what all commands print and open: at once, to the right place, and as a user may read it."""

import io
import os
import runpy
import sys

import pytest

import minipar
from minipar import __main__ as program
from minipar import pictures
from minipar.cli import UsageParser, discard, open_to_append, say, write_json, write_out
from minipar.errors import UsageError, check_memory
from minipar.lone_steps import count_step, smallest_step, steps_so_far


class Noting(io.StringIO):
    """A stream that counts its flushes."""

    flushes = 0

    def flush(self):
        self.flushes += 1


def test_a_text_is_written_at_once_and_as_it_is(monkeypatch):
    out = Noting()
    monkeypatch.setattr(sys, "stdout", out)
    write_out("a\nb")
    assert (out.getvalue(), out.flushes) == ("a\nb", 1)


def test_a_line_of_progress_is_written_at_once():
    out = Noting()
    say("a line", out)
    say("nobody's", None)
    assert (out.getvalue(), out.flushes) == ("a line\n", 1)


@pytest.mark.parametrize(
    ("error", "note"), [(BrokenPipeError(32, "Broken pipe"), ""), (OSError(28, "No space"), "No space")]
)
def test_progress_that_nobody_reads_ends_without_a_word(error, note, tmp_path, capsys):
    """A full disk has a note. Further lines go nowhere."""

    class Failing(io.StringIO):
        def write(self, text):
            raise error

        def fileno(self):
            return file.fileno()

    with open(tmp_path / "file", "w") as file:
        say("a line", Failing())
        file.write("what comes later")
    assert (tmp_path / "file").read_text() == ""
    line = f"minipar: note: progress cannot be written: {note}\n"
    assert capsys.readouterr() == ("", line if note else "")


def test_what_is_discarded_goes_nowhere(tmp_path):
    with open(tmp_path / "file", "w") as file:
        discard(file)
        print("text", file=file, flush=True)
    assert (tmp_path / "file").read_text() == ""


def test_a_json_file_is_indented_and_ends_with_a_line(tmp_path):
    write_json(str(tmp_path / "x"), {"a": [1]})
    assert (tmp_path / "x").read_text() == '{\n "a": [\n  1\n ]\n}\n'


def test_a_file_to_append_to_is_kept_and_everybodys(tmp_path):
    mask = os.umask(0)
    try:
        (tmp_path / "old").write_text("earlier\n")
        for name, before in (("old", "earlier\n"), ("new", "")):
            with open_to_append(str(tmp_path / name)) as file:
                assert os.get_blocking(file.fileno()) and file.encoding == "utf-8"
                file.write("é\n")
            assert (tmp_path / name).read_text(encoding="utf-8") == f"{before}é\n"
        assert os.stat(tmp_path / "new").st_mode & 0o777 == 0o666
    finally:
        os.umask(mask)


def test_a_parser_reads_the_command_line_without_the_program(monkeypatch):
    parser = UsageParser(prog="p")
    parser.add_argument("--size", type=int)
    monkeypatch.setattr(sys, "argv", ["p", "--size", "3"])
    assert parser.parse_args().size == 3
    assert parser.parse_args([]).size is None


def test_memory_is_named_in_bytes_with_what_needs_it(monkeypatch):
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1000}.__getitem__)
    check_memory(4_096_000, "all of it")
    with pytest.raises(UsageError) as caught:
        check_memory(4_096_001, "a byte more")
    assert str(caught.value) == "a byte more = 4.096e+06 bytes, but this machine has 4.096e+06"


def test_steps_without_a_strategy_are_counted():
    before = steps_so_far()
    assert smallest_step(before) == 0
    for elements in (5, 3, 4):
        count_step(elements)
    assert steps_so_far() == before + 3
    assert [smallest_step(before + skipped) for skipped in range(4)] == [3, 3, 4, 0]


# ---- the command -----------------------------------------------------------------------------------------------------

HELP = """usage: minipar COMMAND ...

  train      train a GPT or a Llama; on N ranks: mpirun -n N minipar train ... (python -m minipar.train)
  plan       find the fastest layouts of a model on a cluster; needs no MPI (python -m minipar.plan)
  generate   continue a text with a trained model (python -m minipar.generate)
  compare    name the step, parameters and factor by which two runs differ (python -m minipar.compare)
  bench      measure this machine and minipar; most with mpirun -n N (python -m minipar.bench)
  visualize  draw traces, schedules, memory, losses and plans (python -m visualize)
"""
RANKS = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")


@pytest.fixture
def command(monkeypatch, capsys):
    """Run `minipar` with these words on a rank; return its exit code and what it prints."""

    def run(*words, **rank):
        for variable in RANKS:
            monkeypatch.delenv(variable, raising=False)
        for variable, value in rank.items():
            monkeypatch.setenv(variable, value)
        monkeypatch.setattr(sys, "argv", ["minipar", *words])
        code = 0
        try:
            program.main()
        except SystemExit as leaving:
            code = leaving.code
        return (code, *capsys.readouterr())

    return run


@pytest.mark.parametrize("words", [(), ("-h",), ("--help",)])
def test_the_help_lists_each_command_with_its_module(words, command):
    assert command(*words) == (0, HELP, "")


def test_one_rank_alone_prints(command):
    version = f"minipar {minipar.__version__}\n"
    assert command("--version") == command("--version", PMI_RANK="0") == (0, version, "")
    line = "minipar: error: minipar x: no such command; expected train, plan, generate, compare, bench, visualize\n"
    assert command("x") == command("x", PMIX_RANK="0") == (2, "", line)
    assert command("trian")[2] == "minipar: error: minipar trian: no such command; did you mean train?\n"
    for variable in RANKS:
        assert command("--version", **{variable: "1"}) == (0, "", "")
        assert command("x", **{variable: "1"}) == (2, "", "")


@pytest.mark.parametrize(
    ("name", "module"), [("train", "minipar.train"), ("plan", "minipar.plan"), ("visualize", "visualize")]
)
def test_a_command_runs_its_module_as_the_main_program(name, module, command, monkeypatch):
    """The module sees its own words and its own name."""
    ran = []
    monkeypatch.setattr(runpy, "run_module", lambda *words, **options: ran.append((words, options, list(sys.argv))))
    assert command(name, "--steps", "3") == (0, "", "")
    assert ran == [((module,), {"run_name": "__main__", "alter_sys": True}, [f"minipar {name}", "--steps", "3"])]


def test_pictures_are_beside_minipar_or_inside_of_it(monkeypatch):
    for found, name in ((None, "visualize.loss"), ("a spec", "minipar.visualize.loss")):
        monkeypatch.setattr(pictures, "find_spec", {"minipar.visualize": found}.__getitem__)
        assert pictures.full_name("visualize.loss") == name
