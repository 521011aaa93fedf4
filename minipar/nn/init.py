"""Initial weights from counter-based generators, keyed by the parameter's name and never by a rank.

Any layout therefore starts from the same numbers: a rank that holds a slice takes that slice of the whole. Two
parameters never share a key, so layers of the same shape start different.
"""

from __future__ import annotations

import hashlib

import numpy as np


def generator(seed: int, name: str) -> np.random.Generator:
    """A Philox generator (Salmon et al. 2011) whose 128-bit key is a hash of (seed, name)."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))


def normal(seed: int, name: str, shape: tuple[int, ...], std: float) -> np.ndarray:
    """float64 normal numbers of mean 0 and the given standard deviation, the same for the same (seed, name, shape)
    everywhere.
    """
    return generator(seed, name).standard_normal(shape) * std
