"""A record that an optimizer stepped without any strategy.

Optimizers make it, and `launch` reads it at its end.

Ranks that train and send less than one gradient have probably forgotten the wrapper. Neither side
can see that alone: nn knows no ranks, and comm knows no optimizers.
"""

_steps: list[int] = []  # one entry per step; appending is safe from several threads


def count_step(elements: int) -> None:
    """Count a step that has updated so many elements, which no strategy looks after."""
    _steps.append(elements)


def steps_so_far() -> int:
    """Return how many such steps this process has taken."""
    return len(_steps)


def smallest_step(before: int) -> int:
    """Return the elements of the smallest step after the first `before` ones; 0 without any."""
    return min(_steps[before:], default=0)
