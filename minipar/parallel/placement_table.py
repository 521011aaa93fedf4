"""The printed table of placements: what each mesh axis does to each parameter of a model on this rank."""

from dataclasses import replace

from minipar.nn.module import Module
from minipar.parallel.placement import Placement


def row_of(placement: Placement) -> list[str]:
    """Return a placement's line of the table."""
    ep = "-" if placement.ep is None else str(placement.ep)
    chunk = "-"
    if placement.dp is not None:
        chunk = f"{placement.dp.own.start}:{placement.dp.own.stop} of {placement.dp.size}"
    return [placement.name, str(placement.shape), str(placement.tp), str(placement.pp), ep, chunk]


class Placements(list[Placement]):
    """The placements of a model's parameters on one rank; printed, a table."""

    HEAD = ("name", "shape", "tp", "pp", "ep", "dp chunk")

    def __str__(self) -> str:
        rows = [self.HEAD, *(row_of(placement) for placement in self)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(self.HEAD))]
        lines = []
        for row in rows:
            cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
            lines.append("  ".join(cells).rstrip())
        return "\n".join(lines)

    __repr__ = __str__


def placements(model: Module) -> Placements:
    """Return the placements of a model's parameters on this rank, in order; printed, a table.

    The columns tp, pp and ep are what these axes do to the parameter. `dp chunk` are the elements
    of this rank's part that its optimizer owns. Sends nothing.
    """
    found = Placements()
    for name, parameter in model.named_parameters():
        placement = parameter.placement
        if placement is None:
            placement = Placement(name, parameter.shape)
        elif not placement.name:  # a layer that was made parallel outside of a model
            placement = replace(placement, name=name)
        found.append(placement)
    return found
