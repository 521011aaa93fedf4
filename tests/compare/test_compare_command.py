"""`minipar.compare` ends with code 0, 1 or 2, refuses what is no record, and a training writes one."""

import errno
import json
import os
import shutil

import numpy as np
import pytest
from launcher import run_each
from recorded import MODEL, TEXT, times, write
from training import config_for, trainer_for

from minipar.compare.differences import main
from minipar.errors import UsageError
from minipar.train.recording import Recorder


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
    (tmp_path / "x").touch()
    flags = f"{MODEL} --record {tmp_path} --verify".replace("--steps 3", "--steps 1").split()
    new = [str(tmp_path / "new") if word == str(tmp_path) else word for word in flags]
    text = tmp_path / "text.bin"
    text.write_bytes((np.arange(1000) % 64).astype("<u2").tobytes())
    given = [[*flags, "--data", str(tmp_path / "x")], [*new, "--data", str(text)], [*new, "--data", str(text)]]
    refused, first, second = run_each(2, [["minipar.train", *words] for words in given])
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1
    assert first.returncode == 0 and f"{tmp_path}/new (--record)" in first.stdout, first.stderr
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["run.json", "step-0.npz"]
    assert second.returncode == 2 and second.stderr.count("\n") == 1 and "--record" in second.stderr


def test_a_record_that_cannot_be_written_is_one_line(tmp_path, monkeypatch):
    config = config_for(f"{MODEL} --dp 1")
    trainer = trainer_for(config, TEXT)
    Recorder(trainer, str(tmp_path / "r"))
    trainer.step(0)

    def fill_the_disk(path, **arrays):
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(np, "savez", fill_the_disk)
    with pytest.raises(UsageError, match="--record"):
        trainer.step(1)
    assert sorted(path.name for path in (tmp_path / "r").iterdir()) == ["run.json", "step-0.npz"]
