"""Checks of communicators, meshes and programs: which sizes fit, and when a note says that ranks train alone."""

from itertools import product

import numpy as np
import pytest

from minipar.comm import DeviceMesh, run_local
from minipar.comm.guards import check_array, check_counts
from minipar.comm.launch import launch
from minipar.comm.mesh import check_expert_mesh
from minipar.errors import CommunicationError, UsageError
from minipar.nn import SGD, Linear


def refuses(check, *arguments, error=UsageError):
    """Return whether the check raises this error."""
    try:
        check(*arguments)
    except error:
        return True
    return False


def test_an_expert_mesh_is_refused_unless_its_axes_multiply():
    """It fits if edp * ep * etp = dp * cp * tp for some whole edp, and etp divides tp."""
    for dp, cp, tp in product((1, 2, 3), (1, 2), (1, 2, 4)):
        for ep, etp in product(range(-1, 7), range(-1, 5)):
            ranks = dp * cp * tp
            divides = etp in [size for size in range(1, tp + 1) if tp % size == 0]
            fits = ep > 0 and any(edp * ep * etp == ranks for edp in range(1, ranks + 1))
            assert refuses(check_expert_mesh, dp, cp, tp, ep, etp) == (not (divides and fits)), (dp, cp, tp, ep, etp)


@pytest.mark.parametrize("etp", [-1, 0, 3])
def test_what_etp_must_be_is_said(etp):
    with pytest.raises(UsageError) as refused:
        run_local(4, lambda comm: DeviceMesh(comm, tp=4, etp=etp))
    problem = f"tp/etp = 4/{etp} is not a whole number: the ranks of etp are neighbours of tp"
    assert str(refused.value) == problem


@pytest.mark.parametrize(
    ("rank", "sends", "receives", "elements", "fits"),
    [
        (0, [1, 2], [1, 4], 3, True),
        (1, [1, 2], [0, 2], 3, True),
        (0, [0, 0], [0, 0], 0, True),
        (0, [0, 3], [0, 0], 3, True),
        (0, [1, 2], [2, 4], 3, False),
        (1, [1, 2], [1, 4], 3, False),
        (0, [1, 2], [1, 4], 4, False),
        (0, [1, 2], [1, 4], 2, False),
        (0, [4, -1], [4, 0], 3, False),
        (0, [3, 0], [3, -1], 3, False),
        (0, [3], [3], 3, False),
        (0, [3, 0], [3], 3, False),
        (0, [3], [3, 0], 3, False),
        (0, [1, 1, 1], [1, 1, 1], 3, False),
    ],
)
def test_counts_are_one_for_each_rank_and_add_up(rank, sends, receives, elements, fits):
    found = refuses(check_counts, "rank 0", rank, 2, (sends, receives), elements, error=CommunicationError)
    assert found == (not fits)


class Device:
    """An array of another module."""

    strides = (8,)


class Leaf(Device):
    """A tensor: it has a gradient, and so is no array."""

    grad = None


@pytest.mark.parametrize(
    ("x", "problem"),
    [
        (np.zeros(3), None),
        (np.zeros(3, bool), None),
        (Device(), None),
        (Leaf(), "all_reduce of a Leaf: give its array, x.data"),
        (3.0, "all_reduce of a float: give an array of the same shape and dtype on every rank"),
        (np.float64(3), "all_reduce of a float64: give an array of the same shape and dtype on every rank"),
        ([1.0], "all_reduce of a list: give an array of the same shape and dtype on every rank"),
        (np.array(["a"]), "all_reduce of an array of <U1: expected values that can be added"),
        (np.array([b"a"]), "all_reduce of an array of |S1: expected values that can be added"),
        (np.array([None]), "all_reduce of an array of object: expected values that can be added"),
    ],
)
def test_only_arrays_of_values_are_sent(x, problem):
    if problem is None:
        check_array("rank 0", "all_reduce", x)
        return
    with pytest.raises(UsageError) as refused:
        check_array("rank 0", "all_reduce", x)
    assert str(refused.value).startswith(f"rank 0, {problem}")


def test_levels_have_the_axis_of_their_group_or_their_own():
    def program(comm):
        group = comm.row(list(range(4)), "dp")
        axes = []
        for axis in (None, "tp"):
            inside, across = group.levels(2, axis)
            axes.append((inside.axis, inside.ranks, across.axis, across.ranks))
        return axes

    found = run_local(4, program)
    assert found[1] == [("dp", [0, 1], "dp", [1, 3]), ("tp", [0, 1], "dp", [1, 3])]


# ---- a wrapper that was forgotten ------------------------------------------------------------------------------------


def train(sends, steps=1):
    """Return a program that trains 12 elements alone, for so many steps, and sends so many bytes from rank 0."""

    def program(comm):
        if steps:
            layer = Linear(3, 3, name="x", dtype="float64")
            optimizer = SGD(layer.parameters(), lr=0.1)
            for _ in range(steps):
                (layer(np.ones((2, 3))) ** 2.0).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        if sends and comm.size > 1:
            comm.broadcast(np.zeros(sends, np.uint8))

    return program


@pytest.mark.parametrize(
    ("ranks", "sends", "steps", "notes"),
    [(2, 0, 1, 1), (2, 11, 2, 1), (2, 12, 1, 0), (2, 13, 1, 0), (1, 0, 1, 0), (2, 0, 0, 0), (3, 0, 1, 1)],
)
def test_ranks_that_train_alone_and_send_no_gradient_are_noted(ranks, sends, steps, notes, capfd):
    """They are noted once. Ranks that send fewer bytes than they train elements have sent no gradient."""
    launch(train(sends, steps), threads=ranks)
    error = capfd.readouterr().err
    assert error.count(f"minipar: note: each of the {ranks} ranks trained a model of its own") == notes
    assert error.count("\n") == notes
    launch(train(0, steps=0), threads=ranks)  # what was trained before counts no more
    assert capfd.readouterr().err == ""
