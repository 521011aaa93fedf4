"""The messages and bytes that a rank sends, in closed form: the tests compare them with those counted, by ==."""

from minipar.comm.algorithms import chunk_bounds, virtual_bounds, virtual_ranks

# Closed forms for n elements over p ranks. `algorithms.virtual_ranks` says which ranks rest in those
# for a power of two.


def wire_bytes(op: str, algorithm: str, n: int, itemsize: int, p: int, rank: int, root: int = 0) -> int:
    """Return the bytes that `rank` sends: the elements of `sent`. ValueError for "auto"."""
    return sent(op, algorithm, n, p, rank, root)[1] * itemsize


def messages(op: str, algorithm: str, p: int, rank: int, root: int = 0) -> int:
    """Return the messages that `rank` sends.

    Empty ones count, so the array's size does not matter.
    """
    return sent(op, algorithm, 0, p, rank, root)[0]


def sent(op: str, algorithm: str, n: int, p: int, rank: int, root: int = 0) -> tuple[int, int]:
    """Return the messages and the elements that `rank` sends. ValueError for "auto".

    n is the number of elements of the whole array: of x for all_reduce, reduce_scatter and
    all_to_all, of out for all_gather. A resting rank sends one message. The rank that has its virtual rank
    returns the result in one message more.
    """
    chunks = [stop - start for start, stop in chunk_bounds(n, p)]
    own = chunks[rank]
    right = chunks[(rank + 1) % p]
    match op, algorithm:
        case "all_reduce", "ring":
            return 2 * (p - 1), 2 * n - own - right
        case "all_reduce", "ordered":
            return 2 * (p - 1), n - own + (p - 1) * own
        case ("reduce_scatter", "ring" | "ordered") | ("all_to_all", "pairwise"):
            return p - 1, n - own
        case "all_gather", "ring":
            return p - 1, n - right
        case "all_gather", "pairwise":
            return p - 1, (p - 1) * own
        case "broadcast", "binomial":
            virtual = (rank - root) % p
            lowest = virtual & -virtual if virtual else 1 << (p - 1).bit_length()  # set bit
            children = [distance for distance in _powers(lowest) if virtual + distance < p]
            return len(children), n * len(children)
        case "barrier", "dissemination":
            return (p - 1).bit_length(), 0

    q, extras, virtual = virtual_ranks(p, rank)
    sizes = [stop - start for start, stop in virtual_bounds(n, p)]
    gathered = 0  # elements: in each round a rank sends the aligned block around its own
    for distance in _powers(q):
        first = virtual & -distance
        gathered += sum(sizes[first : first + distance])
    rounds = len(_powers(q))
    returned = n  # elements that a resting rank gets back
    match op, algorithm:
        case "all_reduce", "recursive_doubling":
            elements = n * rounds
        case "all_reduce", "recursive_halving":
            rounds *= 2
            elements = n - sizes[virtual] + gathered
        case "reduce_scatter", "recursive_halving":
            elements = n - sizes[virtual]
            returned = chunks[rank - 1]
        case _:
            raise ValueError(f"no closed form for {op} {algorithm}")
    if virtual < 0:
        return 1, n
    if virtual < extras:
        return rounds + 1, elements + returned
    return rounds, elements


def _powers(limit: int) -> list[int]:
    """Return 1, 2, 4, ... up to half of a power of two."""
    return [1 << k for k in range(limit.bit_length() - 1)]
