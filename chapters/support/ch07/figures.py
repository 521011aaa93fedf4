"""Draw for chapter 7: the messages of two ranks whose sends cross."""

from collections.abc import Sequence
from typing import Any

from chapters.support.draw import box
from visualize.style import COLOURS, GREY, INK, PAPER, VERMILION, Picture, at_lightness, lightness, picture

FADED = 0.55  # of the way to white: an action that is never reached


def draw_crossing(lists: Sequence[Sequence[str]], stopped: Sequence[int]) -> Picture:
    """Draw two ranks' lists with their messages as arrows, and mark the send at which each rank is stopped.

    Actions behind that send are never reached: their boxes are faded, and their messages' arrows grey.

    lists    the actions of rank 0 and of rank 1, such as 0SEND_F1 and 1RECV_F1
    stopped  the place in each list of the action that never ends
    """
    figure = picture(7.5, 2.6)
    axes = figure.add_subplot()
    places: dict[tuple[int, str], float] = {}
    for rank, actions in enumerate(lists):
        for place, action in enumerate(actions):
            name = action[1:]  # without the stage
            is_message = "_" in name
            colour = PAPER if is_message else COLOURS[name[0]]
            look: dict[str, Any] = {"edgecolor": "white"}
            if place == stopped[rank]:
                look = {"edgecolor": VERMILION, "linewidth": 2.5}
            if place > stopped[rank]:
                colour = at_lightness(colour, lightness(colour) + FADED * (100 - lightness(colour)))
            box(axes, (place + 0.04, 2 * rank), (0.92, 0.7), colour, name.replace("_", "\n"), va="center", **look)
            places[rank, name] = place + 0.5
    for (rank, name), place in places.items():
        if name.startswith("SEND_"):
            other = places[1 - rank, name.replace("SEND", "RECV")]
            waits = place == stopped[rank] + 0.5
            ends = (0.72, 1.98) if rank == 0 else (1.98, 0.72)
            is_sent = place <= stopped[rank] + 0.5
            colour = INK if is_sent else GREY
            if waits:
                colour = VERMILION
            arrow = {"arrowstyle": "-|>", "color": colour, "linewidth": 2.0 if waits else 1.0}
            axes.annotate("", (other, ends[1]), (place, ends[0]), arrowprops=arrow)
    axes.set_yticks([0.35, 2.35], ["rank 0", "rank 1"], fontsize=9)
    axes.set(xlim=(0, max(len(actions) for actions in lists)), ylim=(2.75, -0.1), xticks=[])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return figure
