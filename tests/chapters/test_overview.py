"""The picture of eight devices says what the strategies hold: the same as the library's formulas."""

import pytest
from launcher import ROOT

from chapters.support.overview import CUT, DEVICES, ROWS, WHOLE, draw_strategies
from minipar.parallel.memory import elements_held

ROW_OF = {row.key: row for row in ROWS}


@pytest.mark.parametrize(("key", "stage"), [("dp", 0), ("zero1", 1), ("zero2", 2), ("zero3", 3)])
def test_zero_divides_what_the_picture_shows(key, stage):
    whole, own = 8000, 8000 // DEVICES
    held = elements_held(whole, own, stage)
    assert [CUT if elements == own else WHOLE for elements in held] == list(ROW_OF[key].has[:3])


def test_copies_of_parameters_add_up_their_gradients():
    """Devices with all parameters and other tokens have terms of the same gradients: data and context parallelism."""
    copies = [row for row in ROWS if row.has[0] == WHOLE and row.has[-1] == CUT]
    assert {"dp", "cp"} < {row.key for row in copies}
    assert [row.key for row in copies if "gradients" not in row.sends] == []


def test_the_rows_of_a_chapter_are_marked():
    figure = draw_strategies(["zero1", "zero2"])
    bold = [text.get_text() for text in figure.axes[0].texts if text.get_fontweight() == "bold"]
    assert bold == ["ZeRO 1", "ZeRO 2"]


def test_an_unknown_row_is_refused():
    with pytest.raises(ValueError, match="no such rows"):
        draw_strategies(["zero4"])


def test_chapter_0_shows_every_row():
    figure = draw_strategies()
    names = {text.get_text() for text in figure.axes[0].texts}
    assert names >= {row.name for row in ROWS}
    script = (ROOT / "chapters" / "00_in_one_file.py").read_text(encoding="utf-8")
    assert (ROOT / "visualize" / "gallery" / "strategies.png").exists() and "gallery/strategies.png" in script
