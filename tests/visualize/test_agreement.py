"""Predicted against measured: what is drawn is what the bench wrote, and foreign files are refused."""

import json

import pytest

from minipar.errors import UsageError
from visualize import plot_agreement, read_layouts
from visualize.plan import layout_name

PLAIN = {"dp": 1, "tp": 1, "pp": 1, "zero_stage": 0, "schedule": None, "sequence_parallel": False, "recompute": "none"}
PLAIN |= {"microbatches": 1, "seconds": 0.5, "seconds_min": 0.4, "seconds_max": 0.7, "predicted_seconds": 0.55}
PLAIN |= {"peak_bytes": 4_000_000, "predicted_bytes": 3_000_000}
MUCH = PLAIN | {"dp": 2, "tp": 2, "pp": 2, "zero_stage": 1, "schedule": "1f1b", "sequence_parallel": True}
MUCH |= {"recompute": "full", "microbatches": 4, "seconds": 0.9, "seconds_max": 1.0}


def test_names():
    assert layout_name(PLAIN) == "one device"
    assert layout_name(MUCH) == "dp 2, tp 2, pp 2, ZeRO-1, 1f1b, SP, recompute, 4 microbatches"


def test_points_are_the_rows_slowest_first():
    time, memory = plot_agreement([PLAIN, MUCH]).axes
    drawn = {line.get_label(): [float(x) for x in line.get_xdata()] for line in (*time.lines, *memory.lines)}
    assert drawn["measured: median, range of the steps"] == [900.0, 500.0]
    assert drawn["measured: the ledger's peak"] == [4.0, 4.0] and drawn["predicted"] == [3.0, 3.0]
    assert [text.get_text() for text in time.texts] == ["-39 %", "+10 %"]
    assert [text.get_text() for text in memory.texts] == ["-25 %", "-25 %"]
    assert [label.get_text() for label in time.get_yticklabels()] == [layout_name(MUCH), "one device"]
    exact = plot_agreement([PLAIN | {"predicted_seconds": 0.4999}]).axes[0]
    assert [text.get_text() for text in exact.texts] == ["0 %"]


@pytest.mark.parametrize(
    "rows", [[], {}, [{"seconds": 1}], [PLAIN | {"predicted_seconds": None}], [PLAIN | {"seconds_min": 0.6}]]
)
def test_a_file_without_predictions_is_refused(tmp_path, rows):
    path = tmp_path / "layouts.json"
    path.write_text(json.dumps(rows))
    with pytest.raises(UsageError, match="bench layouts --machine FILE --json"):
        read_layouts(str(path))
