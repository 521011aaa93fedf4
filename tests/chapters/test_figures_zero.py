"""The figures of the chapter on ZeRO: what is drawn is what was given, and stage 3 is laid out by its rules."""

import pytest
from matplotlib.colors import to_hex

from chapters.support.ch05.figures import draw_gather_and_free, draw_model_state, gather_and_free
from visualize.style import COLOURS


@pytest.mark.parametrize(("stage", "own"), [(0, (2, 2, 12)), (1, (2, 2, 3)), (2, (2, 0.5, 3)), (3, (0.5, 0.5, 3))])
def test_each_rank_holds_its_slice_of_what_is_sharded(stage, own):
    axes = draw_model_state((2, 2, 12), ranks=4).axes[stage]
    patches = axes.patches
    assert len(patches) == 4 * 3 * 2  # a frame and what is held
    assert [text.get_text() for text in axes.texts] == [f"{sum(own):g}"] * 4
    for kind, (bottom, whole) in enumerate(((0, 2), (2, 2), (4, 12))):
        held = [patches[6 * rank + 2 * kind + 1] for rank in range(4)]
        assert [patch.get_height() for patch in held] == [own[kind]] * 4
        sharded = own[kind] < whole
        assert [patch.get_y() for patch in held] == [bottom + sharded * rank * whole / 4 for rank in range(4)]


def when(slots, unit, action):
    return [(slot.start, slot.end) for slot in slots if (slot.unit, slot.action) == (unit, action)]


@pytest.mark.parametrize("prefetch", [False, True])
def test_a_unit_computes_while_it_is_gathered(prefetch):
    slots = gather_and_free(units=5, forward=2, backward=4, wire=3, prefetch=prefetch)
    order = [(slot.action, slot.unit) for slot in sorted(slots, key=lambda slot: slot.start) if slot.action in "FB"]
    assert order == [("F", unit) for unit in range(5)] + [("B", unit) for unit in range(4, -1, -1)]
    for unit in range(5):
        gathers, (forward,), (backward,) = (when(slots, unit, action) for action in ("AG", "F", "B"))
        assert len(gathers) == (1 if unit == 4 else 2)
        assert gathers[0][1] <= forward[0]
        assert unit == 4 or forward[1] <= gathers[1][0] and gathers[1][1] <= backward[0]
        assert when(slots, unit, "RS")[0][0] >= backward[1]
    wire = sorted((slot.start, slot.end) for slot in slots if slot.action in ("AG", "RS"))
    assert all(first[1] <= second[0] for first, second in zip(wire, wire[1:], strict=False))


def test_prefetch_hides_all_but_the_two_ends():
    assert gather_and_free(6, 2, 4, 1)[-1].end == 6 * 6 + 2
    assert gather_and_free(6, 2, 4, 1, prefetch=False)[-1].end == 6 * 6 + 6 + 2 * 5 + 1


def test_every_slot_is_drawn_and_grey_ends_at_a_free():
    slots = gather_and_free(3, 2, 4, 1)
    axes = draw_gather_and_free(slots).axes[0]
    boxes = [patch for patch in axes.patches if patch.get_height() == pytest.approx(0.5)]
    assert [(box.get_x(), box.get_x() + box.get_width()) for box in boxes] == [(s.start, s.end) for s in slots]
    assert [text.get_text() for text in axes.texts] == [slot.action for slot in slots]
    assert to_hex(boxes[0].get_facecolor()).upper() == COLOURS["all_gather"]
    assert [line.get_xdata()[0] for line in axes.lines] == [slot.end for slot in slots if slot.frees]
