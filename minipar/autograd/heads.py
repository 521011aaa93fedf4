"""Heads side by side in packed columns, and as dims of an array: views of the same memory.

The letters are those of attention.py: q is (B, n, g, T, d), k and v are (B, n, 1, T, d).
"""

from minipar.backend import Array, xp


def split_heads(qkv: Array, heads: int, kv_heads: int) -> list[Array]:
    """Return views of packed q, k and v: (B, n, g, T, d) and twice (B, n, 1, T, d).

    qkv is (B, T, (a + 2n) d).
    """
    batch, length, width = qkv.shape
    count = heads + 2 * kv_heads
    by_head = qkv.reshape(batch, length, count, width // count)
    by_head = by_head.swapaxes(1, 2)  # (B, a + 2n, T, d)
    parts = xp.split(by_head, [heads, heads + kv_heads], axis=1)
    return [group_heads(part, kv_heads) for part in parts]


def group_heads(x: Array, kv_heads: int) -> Array:
    """Give the heads that share keys a dim of their own: (B, a, ...) -> (B, n, g, ...), a view."""
    batch, heads, *rest = x.shape
    return x.reshape(batch, kv_heads, heads // kv_heads, *rest)


def empty_heads(q: Array) -> Array:
    """Make an array of q's shape (B, n, g, T, d), with the memory of an array (B, T, h)."""
    batch, kv_heads, group, length, size = q.shape
    memory = xp.empty((batch, length, kv_heads, group, size), dtype=q.dtype)
    return memory.transpose(0, 2, 3, 1, 4)


def join_heads(out: Array) -> Array:
    """Put heads next to each other: (B, n, g, T, d) -> (B, T, h). A view if `empty_heads` made it."""
    batch, kv_heads, group, length, size = out.shape
    by_token = out.transpose(0, 3, 1, 2, 4)  # (B, T, n, g, d)
    return by_token.reshape(batch, length, kv_heads * group * size)


def separate_heads(x: Array, like: Array) -> Array:
    """Return a view of an array (B, T, h) as heads (B, n, g, T, d): the inverse of `join_heads`."""
    batch, kv_heads, group, length, size = like.shape
    by_token = x.reshape(batch, length, kv_heads, group, size)
    return by_token.transpose(0, 2, 3, 1, 4)
