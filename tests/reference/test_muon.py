"""The chapters' Muon and chapter 4's outer optimizer against PyTorch's, in float64."""

import numpy as np
import pytest
import torch
from chapter_code import run_functions

import minipar as mp

RANDOM = np.random.default_rng(30)
SHAPES = [(6, 6), (4, 9), (9, 4)]
STEPS = 5


@pytest.fixture
def float64(monkeypatch):
    """Let torch's Muon compute in float64: its iteration casts to bfloat16, which would hide a mistake."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda tensor: tensor.clone())


def chapter():
    namespace = {"np": np}
    run_functions("more/muon", ("orthogonalize", "muon"), namespace)
    return namespace


@pytest.mark.parametrize("shape", SHAPES)
def test_five_steps_of_muon_are_torchs(shape, float64):
    ours, mean = RANDOM.normal(size=shape), np.zeros(shape)
    theirs = torch.nn.Parameter(torch.tensor(ours))
    optimizer = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.0, momentum=0.95, nesterov=True)
    for _ in range(STEPS):
        gradient = RANDOM.normal(size=shape)
        theirs.grad = torch.tensor(gradient)
        optimizer.step()
        chapter()["muon"](ours, gradient, mean)
    assert abs(ours - theirs.detach().numpy()).max() < 1e-12


def test_the_outer_optimizer_of_diloco_is_torchs_nesterov():
    movements = RANDOM.normal(size=(STEPS, 7))
    ours = {"np": np, "mp": mp, "START": np.zeros(7), "Psi": 7, "STEPS": STEPS, "d": 1}
    run_functions("more/diloco", ("diloco",), ours)
    ours["local_steps"] = lambda theta, optimizer, r, steps: (movements[steps[0]], [0.0])
    theta, _ = ours["diloco"](1, lambda parameters: None, 0.7, 0.9, [0], lambda arrays: arrays[0])
    theirs = torch.nn.Parameter(torch.zeros(7, dtype=torch.float64))
    optimizer = torch.optim.SGD([theirs], lr=0.7, momentum=0.9, nesterov=True)
    for movement in movements:
        theirs.grad = torch.tensor(-movement)
        optimizer.step()
    assert abs(theta - theirs.detach().numpy()).max() < 1e-14
