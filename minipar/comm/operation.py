"""A call of a collective as a value, and the tag with which its messages tell other ranks about it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

USER_TAGS = 1 << 16  # the user's tags are 0..USER_TAGS-1

# The names that a tag has as their indices.
OPERATIONS = "control all_reduce reduce_scatter all_gather all_to_all broadcast barrier".split()
ALGORITHM_NAMES = (
    "ring recursive_doubling recursive_halving ordered pairwise binomial dissemination tree".split()
)  # fmt: skip
COMBINE = {"sum": np.add, "max": np.maximum}

DTYPES: dict[int, str] = {np.dtype(letter).num: np.dtype(letter).name for letter in "?bBhHiIlLqQefdgFDG"}

Bounds = Sequence[tuple[int, int]]


@dataclass  # To make a frozen one takes a microsecond more.
class Operation:
    """A call of a collective, with flat host arrays. `input` and `output` may be the same array."""

    name: str
    algorithm: str
    input: np.ndarray
    output: np.ndarray
    combine: np.ufunc | None = None  # None if the operation does not reduce
    root: int = 0  # a broadcast's source
    sends: Bounds | None = None  # the chunks of an all-to-all's input, if they are not equal
    receives: Bounds | None = None  # and those of its output


class TagFields(NamedTuple):
    """The call that a tag describes."""

    name: str
    algorithm: str
    maximum: bool
    dtype: str
    elements: int  # modulo 128
    number: int  # counts the operations of its communicator, modulo 128


def to_tag(operation: Operation, number: int) -> int:
    """Pack what a rank is doing into a tag above USER_TAGS. The first part that is packed takes the highest bits."""
    # With counts, each rank has its own number.
    elements = operation.input.size if operation.sends is None else 0
    tag = 128 + number % 128  # the leading 1 makes every tag larger than USER_TAGS
    tag = tag * 128 + elements % 128
    tag = tag * 32 + min(operation.input.dtype.num, 31)
    tag = tag * 2 + (1 if operation.combine is np.maximum else 0)
    tag = tag * 8 + ALGORITHM_NAMES.index(operation.algorithm)
    return tag * 8 + OPERATIONS.index(operation.name)


def from_tag(tag: int) -> TagFields:
    """Unpack a tag of `to_tag`, from its lowest bits on."""
    tag, name = divmod(tag, 8)
    tag, algorithm = divmod(tag, 8)
    tag, maximum = divmod(tag, 2)
    tag, dtype = divmod(tag, 32)
    tag, elements = divmod(tag, 128)
    return TagFields(
        OPERATIONS[name],
        ALGORITHM_NAMES[algorithm],
        maximum == 1,
        DTYPES.get(dtype, "another dtype"),
        elements,
        number=tag % 128,
    )


def meaning(tag: int) -> str:
    """Say what a rank is doing that sends messages with this tag."""
    if tag < USER_TAGS:
        return f"tag {tag}"
    call = from_tag(tag)
    reduction = ""
    if "reduce" in call.name:
        reduction = "max " if call.maximum else "sum "
    return f"{call.name} {reduction}of {call.dtype} ({call.algorithm}, operation {call.number})"
