"""Draw what Muon's update does to singular values, and what owners of whole matrices send."""

from collections.abc import Sequence

import numpy as np

from chapters.support.draw import finish, note
from visualize.style import BLUE, INK, SKY, VERMILION, Picture, picture


def plot_spectra(gradient: Sequence[float], whole: Sequence[float], parts: Sequence[float]) -> Picture:
    """Draw the singular values of a gradient, of the update made from it, and of the one that four ranks make."""
    figure = picture(7.0, 3.0)
    axes = figure.add_subplot()
    places = range(1, len(gradient) + 1)
    axes.plot(places, parts, "^--", color=VERMILION, label="four quarters of its rows, each orthogonalized")
    axes.plot(places, whole, "s-", color=BLUE, label="orthogonalized as a whole")
    axes.plot(
        places,
        np.array(gradient) / np.linalg.norm(gradient),
        "o:",
        color=INK,
        label="the gradient, divided by its norm",
    )
    axes.set_xticks(places)
    finish(axes, legend="upper right", ylim=(0, None), xlabel="singular values, the largest first", ylabel="size")
    return figure


def plot_owners(sent: Sequence[int], even: Sequence[int], matrices: Sequence[int]) -> Picture:
    """Draw for each rank the KiB that it sends in a step, and how many matrices it owns.

    sent      bytes of each rank
    even      its bytes if all chunks were equal, as in ZeRO stage 1
    matrices  that it owns
    """
    figure = picture(7.0, 2.8)
    axes = figure.add_subplot()
    places = np.arange(len(sent))
    heights, levels = np.array(sent) / 1024, np.array(even) / 1024
    axes.bar(places, heights, 0.7, color=SKY, label="each matrix has an owner")
    axes.hlines(levels, places - 0.45, places + 0.45, color=INK, linewidth=2, label="equal chunks, as ZeRO stage 1")
    for place, count in enumerate(matrices):
        note(axes, f"owns {count}", (place, max(heights[place], levels[place])), (0, 4), ha="center", fontsize=8)
    axes.set_xticks(places)
    top = 1.5 * max(*heights, *levels, 0.1)
    finish(axes, legend="upper right", bars="x", ylim=(0, top), xlabel="rank", ylabel="KiB sent in a step")
    return figure
