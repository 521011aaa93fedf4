"""Claims about the chapters' cells on a device: what minipar is given there, NumPy's arrays too, it computes with.

A chapter compares with plain NumPy, and so some of its cells give NumPy's functions a device array and a NumPy array
together, or copy one into the other. Under CuPy such a line is an error; these are the errors that may come.
"""

import importlib
import re
import traceback

import pytest
import strict_array
from launcher import ROOT
from training import using

import minipar.comm
from minipar.comm import serial

# These cells say how many bytes are held; of the stand-in no view of memory can be recognized.
COUNTS_BYTES = re.compile(r"edger|peak\(|most ==|kept_by_a_layer")


def without_pictures(monkeypatch):
    """Let the chapters draw nothing."""
    monkeypatch.setattr("chapters.support.show.show", lambda *_: None)
    for path in (ROOT / "chapters" / "support").rglob("*.py"):
        if re.search("figures|draw|overview|animate", path.name):
            module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
            for name in [name for name in vars(module) if re.match("draw|plot|animate", name)]:
                monkeypatch.setattr(module, name, lambda *_, **__: None)


@pytest.mark.parametrize("chapter", ["01", "02", "04", "05", "06", "07"])
def test_a_cell_fails_only_where_it_mixes_arrays_itself(chapter, monkeypatch, tmp_path):
    without_pictures(monkeypatch)
    monkeypatch.setattr(minipar.comm, "world", serial)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT)
    (script,) = (ROOT / "chapters").glob(f"{chapter}_*.py")
    cells = re.split(r"^(?=# %%)", script.read_text(encoding="utf-8"), flags=re.MULTILINE)
    cells = [cell for cell in cells if re.search("^[^#\n]", cell, re.MULTILINE)]
    namespace, failed, unexpected = {"__name__": "__main__"}, 0, []
    with using(strict_array), strict_array.as_cupy():
        for cell in cells:
            try:
                exec(compile(cell, str(script), "exec"), namespace)
            except Exception as error:
                failed += 1
                files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
                (where, *_) = [file for file in reversed(files) if re.search("/(chapters|minipar)/", file)]
                allowed = isinstance(error, NameError | TypeError | AttributeError) or COUNTS_BYTES.search(cell)
                if "/minipar/" in where or not allowed:
                    unexpected.append(f"{error!r:.200} in {where}, in the cell that begins {cell[:200]!r}")
    assert unexpected == []
    assert failed < len(cells) / 2
