"""A record that an optimizer stepped without any strategy.

Optimizers make it, and `launch` reads it at its end.

Ranks that train and send no message have probably forgotten the wrapper. Neither side can see that
alone: nn knows no ranks, and comm knows no optimizers.
"""

_steps: list[None] = []  # one entry per step; appending is safe from several threads


def count_step() -> None:
    """Count a step of an optimizer over parameters that no strategy looks after."""
    _steps.append(None)


def steps_so_far() -> int:
    """Return how many such steps this process has taken."""
    return len(_steps)
