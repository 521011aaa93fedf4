"""The tokens, and which of them sample i of step s is, in every layout: nothing here knows about ranks."""

import hashlib
import os
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from minipar.errors import UsageError
from minipar.nn.layers import generator

LIBRARY_BYTES = 8 * 2**20  # a short training sees no more source text
# Tests and tables are not what people mean by the library's source; the rest is not the library.
EXCLUDED = {
    "__pycache__",
    "dist-packages",
    "encodings",
    "idle_test",
    "pydoc_data",
    "site-packages",
    "test",
    "tests",
}
SAMPLES = 64  # an evaluation has at most as many


@dataclass(frozen=True)
class Tokens:
    """A text as token ids: `ids` is (n,), uint8 or uint16; `name` is its name in errors."""

    ids: np.ndarray
    name: str

    def fingerprint(self) -> str:
        """Return hexadecimal digits that tell texts apart: SHA-256 of all tokens."""
        return hashlib.sha256(self.ids.data).hexdigest()

    def hold_out(self, length: int) -> tuple["Tokens", np.ndarray]:
        """Return the text without its end, and samples of the end with their targets: (n, T + 1) int64.

        UsageError if the end is shorter than a sample.
        """
        kept = min(SAMPLES * length + 1, len(self.ids) // 10)
        if kept < length + 1:
            raise UsageError(
                f"--eval-every: a tenth of {self.name} is less than seq-len + 1 = {length + 1} tokens"
            )
        starts = np.arange(0, kept - length, length)
        samples = self.ids[-kept:][starts[:, None] + np.arange(length + 1)]
        return Tokens(self.ids[:-kept], self.name), samples.astype(np.int64)


def load_tokens(path: str | None, vocab_size: int, seq_len: int) -> Tokens:
    """Load a text's bytes, the uint16 tokens of a nanoGPT .bin, or without a path the standard library's source.

    UsageError for a file that cannot be read, that is shorter than a sample and its targets, or that has an id
    outside the vocabulary.
    """
    name = path or "the standard library's source"
    try:
        # The ranks of a machine share a file's pages.
        kind = "<u2" if name.endswith(".bin") else np.uint8
        ids = standard_library() if path is None else np.memmap(path, kind, mode="r")
    except (OSError, ValueError) as error:  # ValueError: it is empty, or has half a token
        raise UsageError(f"--data {path} cannot be read: {error}") from None
    if len(ids) < seq_len + 1:
        raise UsageError(
            f"{name} holds {len(ids)} tokens, but a sample takes seq-len + 1 = {seq_len + 1}"
        )
    if ids.max() >= vocab_size:
        raise UsageError(f"{name} has token {ids.max()}, but ids are below vocab-size {vocab_size}")
    return Tokens(ids, name)


def standard_library() -> np.ndarray:
    """Return the first LIBRARY_BYTES of the .py files of Python's library, in sorted order: (n,) uint8."""
    paths = []
    for folder, folders, files in os.walk(sysconfig.get_path("stdlib")):
        folders[:] = [name for name in folders if name not in EXCLUDED]
        paths += [os.path.join(folder, name) for name in files if name.endswith(".py")]
    text = b""
    for path in sorted(paths):
        if len(text) < LIBRARY_BYTES:
            text += Path(path).read_bytes()
    return np.frombuffer(text[:LIBRARY_BYTES], np.uint8)


@dataclass(frozen=True)
class Batches:
    """The samples of every step, as a function of step and index, each of `length` tokens.

    sequential  position k of sample i of step s is token ((s B + i) T + k) mod (n - 1), its target the token after it:
                the text from front to back, again and again
    random      sample i of step s starts at the i-th 64-bit number of a Philox stream (Salmon et al. 2011) keyed by
                (seed, "data") and positioned at step s, modulo the number of starts that leave room for a sample
    """

    tokens: Tokens
    length: int
    global_batch: int
    order: str
    seed: int

    def positions(self, step: int) -> np.ndarray:
        """Return the text position of every input token of the step, (B, T) int64. Its target is the next one."""
        n = len(self.tokens.ids)
        offsets = np.arange(self.length)  # (T,)
        if self.order == "sequential":
            first = (step * self.global_batch + np.arange(self.global_batch)) * self.length  # (B,)
            return (first[:, None] + offsets) % (n - 1)
        stream = generator(self.seed, "data").bit_generator
        # There are 2**64 blocks for each step, so steps never overlap.
        stream.advance(step << 64)  # type: ignore[attr-defined]
        # (B,), at most n - T - 1
        starts = stream.random_raw(self.global_batch) % np.uint64(n - self.length)
        return starts.astype(np.int64)[:, None] + offsets

    def batch(self, step: int, samples: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return inputs and targets of these samples (0 <= i < B) of a step: (len(samples), T) int64."""
        chosen = self.positions(step)[list(samples)]  # (b, T)
        return self.tokens.ids[chosen].astype(np.int64), self.tokens.ids[chosen + 1].astype(np.int64)
