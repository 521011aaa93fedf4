"""Claims about a mesh with little or much to draw: no messages, messages of no bytes, many lines, 3 ranks, 64 ranks."""

import math
import warnings

import pytest
from picture_cases import chrome
from picture_parts import mesh_heads, mesh_lines, texts

from minipar.errors import UsageError
from visualize import MeshTraffic, mesh_traffic, mesh_values, parse_trace, plot_mesh
from visualize.mesh import BOX, ROOM, layout

DP2 = {"pp": 1, "dp": 2, "tp": 1}


def trace(ranks, **mesh):
    """Make the JSON of a trace of one step on a mesh."""
    data = chrome(ranks, 1)
    data["otherData"]["mesh"] = mesh
    return data


def test_a_mesh_without_messages_has_no_lines():
    figure = plot_mesh(MeshTraffic(DP2, 1))
    assert mesh_lines(figure) == {} and texts(figure).count("dp 0 B") == 2
    assert not figure.axes[0].axison
    names = [text for text in figure.axes[0].texts if text.get_text() in ("rank 0", "rank 1")]
    assert [name.get_weight() for name in names] == ["bold", "bold"]


def test_messages_of_no_bytes_are_counted():
    """Messages travel also to an expert that gets no token."""
    traffic = MeshTraffic(DP2, 1, {("ep", 0, 1): [2, 0]})
    assert traffic.axes == ["ep", "dp"] and mesh_lines(plot_mesh(traffic)) == {}
    assert mesh_values(traffic)["axes"]["ep"] == {"messages": 2, "bytes": 0, "bytes_per_step": 0}


def test_a_trace_without_steps_counts_as_one():
    data = trace(2, **DP2)
    data["traceEvents"] = [event for event in data["traceEvents"] if event["name"] != "optimizer"]
    values = mesh_values(mesh_traffic(parse_trace(data)))
    assert values["steps"] == 1 and values["axes"]["dp"] == {"messages": 2, "bytes": 16, "bytes_per_step": 16}


def test_the_ranks_of_a_trace_are_numbered_from_0():
    data = trace(2, **DP2)
    for event in data["traceEvents"]:
        event["pid"] += 1
    with pytest.raises(UsageError, match=r"has 2 ranks, but its mesh pp\*dp\*tp = 1\*2\*1 = 2"):
        mesh_traffic(parse_trace(data))


def test_a_message_to_its_own_sender_lies_on_no_axis():
    data = trace(2, **DP2)
    for event in data["traceEvents"]:
        if event["ph"] in ("s", "f"):
            event["pid"] = 0
    with pytest.raises(UsageError, match="has a message on dp from rank 0 to rank 0, which do not lie along dp"):
        mesh_traffic(parse_trace(data))


@pytest.mark.parametrize(("there", "back", "style"), [(990, 10, "CurveFilledB"), (10, 990, "CurveFilledA")])
def test_a_direction_of_a_hundredth_has_no_head(there, back, style):
    """A line has 1000 bytes, 10 of them in one direction."""
    figure = plot_mesh(MeshTraffic(DP2, 1, {("dp", 0, 1): [1, there], ("dp", 1, 0): [1, back]}))
    assert [type(patch.get_arrowstyle()).__name__ for patch in mesh_heads(figure)] == [style]
    assert [type(patch.get_arrowstyle()).__name__ for patch in mesh_lines(figure).values()] == ["Curve"]


@pytest.mark.parametrize(("count", "labels"), [(20, 20), (21, 0)])
def test_twenty_lines_have_their_bytes_beside_them(count, labels):
    pairs = [(a, b) for a in range(8) for b in range(a)][:count]
    links = {("dp", *pair): [1, 70] for pair in pairs}
    figure = plot_mesh(MeshTraffic({"pp": 1, "dp": 8, "tp": 1}, 1, links))
    assert len(mesh_lines(figure)) == count and texts(figure).count("70 B") == labels


def test_sixty_four_ranks_can_be_drawn():
    figure = plot_mesh(MeshTraffic({"pp": 1, "dp": 64, "tp": 1}, 1, {("dp", 0, 1): [1, 8]}))
    assert "rank 63" in texts(figure)


def test_sixty_five_ranks_cannot_be_drawn():
    with pytest.raises(
        UsageError, match=r"pp\*dp\*tp = 65 ranks: more than 64 cannot be drawn; --json has their bytes"
    ):
        plot_mesh(MeshTraffic({"pp": 1, "dp": 65, "tp": 1}, 1))


def test_three_ranks_stand_around_a_ring_and_two_in_a_row():
    radius = (BOX + ROOM) / math.sqrt(3)
    places = layout({"pp": 1, "dp": 3, "tp": 1}, (BOX, 1.0))
    assert places[0] == pytest.approx((0, 0.8 * radius))
    assert places[1] == pytest.approx((1.1 * (BOX + ROOM) / 2, -0.4 * radius))
    assert places[2] == pytest.approx((-1.1 * (BOX + ROOM) / 2, -0.4 * radius))
    assert layout(DP2, (BOX, 1.0)) == {0: (0, 0), 1: (BOX + ROOM, 0)}


def test_a_mesh_is_laid_out_by_hand_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plot_mesh(MeshTraffic(DP2, 1)).draw_without_rendering()
