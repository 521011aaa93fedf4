"""`minipar.compare` ends with code 0, 1 or 2, refuses what is no record, and a training writes one."""

import json
import os
import shutil

import numpy as np
import pytest
from launcher import run_mpi
from recorded import MODEL, times, write

from minipar.compare.differences import main


def test_exit_codes_and_json(tmp_path, capsys):
    write(tmp_path / "a")
    write(tmp_path / "b", times(0, "wpe"))
    a, b, out = str(tmp_path / "a"), str(tmp_path / "b"), str(tmp_path / "x.json")
    write(tmp_path / "same")
    same = str(tmp_path / "same")
    assert main([a, same]) == 0 and "52 parameters" in capsys.readouterr().out
    (tmp_path / "same" / "step-1.npz").unlink()
    assert main([a, same]) == 0, "the steps of both are compared"
    assert main([a, f"{b}/../a"]) == 2, "a record and itself prove nothing"
    assert main([a, b]) == 1 and "wpe.weight" in capsys.readouterr().out
    write(tmp_path / "near", loss=5.0 + 1e-8)
    near = str(tmp_path / "near")
    assert main([a, near]) == 1 and main([a, near, "--bound", "1e-6"]) == 0
    capsys.readouterr()
    assert main([b, a, "--json", "-"]) == 1
    values = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert values["differences"][0]["ratio"] == values["ratios"]["0"]["wpe.weight"] == "Infinity"
    assert values["ratios"]["0"]["wte.weight"] is None and not values["equal"]
    assert main([a, b, "--bound", "0.5", "--json", out]) == 1 and (tmp_path / "x.json").is_file()
    for bound in ("1", "-0.1", "nan"):
        assert main([a, b, "--bound", bound]) == 2 and bound in capsys.readouterr().err


def spoil_shape(folder):
    content = json.loads((folder / "run.json").read_text())
    content["shapes"]["wpe.weight"] = [9, 32]
    (folder / "run.json").write_text(json.dumps(content))


def remove_steps(folder):
    for path in folder.glob("*.npz"):
        path.unlink()


def put_a_pipe(folder):
    (folder / "step-0.npz").unlink()
    os.mkfifo(folder / "step-0.npz")


BAD = {
    "no directory": (shutil.rmtree, "/b"),
    "no JSON": (lambda folder: (folder / "run.json").write_text("{"), "/b"),
    "another model": (spoil_shape, "wpe.weight is (8, 32) in A, (9, 32) in B"),
    "no step": (remove_steps, "/b"),
    "a pipe": (put_a_pipe, "step-0.npz"),
    "half a file": (lambda folder: (folder / "step-0.npz").write_bytes(b"PK\3\4abc"), "step-0.npz"),
    "another file": (lambda folder: np.savez(folder / "step-0.npz", loss=1), "step-0.npz"),
    "a pickle": (lambda folder: np.savez(folder / "step-0.npz", loss=np.array({})), "step-0.npz"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_record_is_one_line_and_exit_code_2(name, tmp_path, capsys):
    spoil, line = BAD[name]
    write(tmp_path / "a")
    write(tmp_path / "b")
    spoil(tmp_path / "b")
    assert main([str(tmp_path / "a"), str(tmp_path / "b")]) == 2
    printed = capsys.readouterr()
    assert line in printed.err and printed.err.count("\n") == 1 and printed.out == ""


def test_a_record_needs_a_new_directory(tmp_path):
    text, new = tmp_path / "text.bin", tmp_path / "new"
    text.write_bytes((np.arange(1000) % 64).astype("<u2").tobytes())
    flags = f"{MODEL} --record {new} --data {text} --verify --dtype float64".replace("--steps 3", "--steps 1")
    first, second = (run_mpi(2, ["-m", "minipar.train", *flags.split()]) for _ in range(2))
    assert first.returncode == 0, first.stderr
    assert second.returncode == 2 and second.stdout == "" and second.stderr.count("minipar: error: ") == 1
    assert "--record" in second.stderr and str(new) in second.stderr
    assert sorted(path.name for path in new.iterdir()) == ["run.json", "step-0.npz"]
