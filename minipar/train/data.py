"""The tokens, and which of them sample i of step s is, in every layout: nothing in this file knows about ranks."""

import hashlib
import mmap
import os
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from minipar.autograd import IGNORE_INDEX, packed
from minipar.errors import UsageError
from minipar.nn.layers import generator
from minipar.train.settings import TrainConfig

STDLIB_BYTES = 8 * 2**20  # each rank reads as much source text, and a short training sees no more
SCAN_LIMIT = 2**26  # tokens checked against the vocabulary before training; later ones are checked when drawn
SAMPLES = 64  # an evaluation has at most as many, evenly spaced in the text
HELD_OUT = 10  # at most one token in HELD_OUT of the training text is kept back for it

# Tests and tables are not what people mean by the library's source; the rest is not the library.
_EXCLUDED = {"__pycache__", "dist-packages", "encodings", "idle_test", "pydoc_data", "site-packages", "test", "tests"}


@dataclass(frozen=True)
class Tokens:
    """A text as token ids: `ids` is (n,), uint8 or uint16, perhaps in a mapped `file`; `name` is its name in errors."""

    ids: np.ndarray
    name: str
    vocab_size: int
    file: mmap.mmap | None = None

    def read(self, positions: np.ndarray | slice) -> np.ndarray:
        """Return the tokens at these positions, int64.

        UsageError if the file is shorter than when it was mapped.
        """
        if self.file is not None and self.file.size() < len(self.file):  # reading what it has lost would be a SIGBUS
            raise UsageError(f"{self.name} was cut from {len(self.file):,} to {self.file.size():,} bytes while in use")
        return self.ids[positions].astype(np.int64)

    def fingerprint(self) -> bytes:
        """Return 16 bytes that tell different texts of two ranks apart (another Python, a stale copy of a file).

        Of a text of more than STDLIB_BYTES only the length and 64 evenly spaced pieces of 1 KiB
        count, the first and the last among them: it takes milliseconds.
        """
        digest = hashlib.blake2b(f"{len(self.ids)} {self.ids.dtype}".encode(), digest_size=16)
        if self.ids.nbytes <= STDLIB_BYTES:
            digest.update(self.ids.tobytes())
        else:
            for start in np.linspace(0, len(self.ids) - 1024, 64, dtype=np.int64):
                digest.update(self.ids[start : start + 1024 // self.ids.itemsize].tobytes())
        return digest.digest()

    def check_separator(self, separator: int | None) -> None:
        """Raise UsageError unless the first SCAN_LIMIT tokens have the separator, if there is one."""
        if separator is not None and not (self.ids[:SCAN_LIMIT] == separator).any():
            raise UsageError(f"--pack {separator}: {self.name} has no such token, so no document ends")

    def check_vocabulary(self, positions: np.ndarray | None = None) -> None:
        """Raise UsageError if a token of these positions, or of the first SCAN_LIMIT, is outside the vocabulary."""
        piece = self.ids[:SCAN_LIMIT] if positions is None else self.ids[positions]
        limit = self.vocab_size
        if piece.max() >= limit:
            i = int(np.argmax(piece >= limit))
            position = i if positions is None else positions.flat[i]
            raise UsageError(
                f"{self.name}: token {piece.flat[i]} at position {position} is not below vocab-size {limit}"
            )


def load_tokens(path: str | None, *, vocab_size: int, seq_len: int, flag: str = "--data") -> Tokens:
    """Load the tokens of a text file (its bytes), a nanoGPT .bin (uint16) or, without a path, the standard library.

    Raises UsageError for a file that cannot be read, is too short for one sample of `seq_len`
    tokens and its targets, or holds a token id >= `vocab_size` among its first SCAN_LIMIT tokens.
    Errors call the path what `flag` says.
    """
    if path is None:
        file = None
        name = "the standard library's source"
        ids = _standard_library()
    else:
        file = _open(path, flag)
        name = path
        ids = np.frombuffer(file, "<u2" if path.endswith(".bin") else np.uint8)
    if len(ids) < seq_len + 1:
        needed = f"a sample and its targets take seq-len + 1 = {seq_len} + 1 = {seq_len + 1}"
        raise UsageError(f"{name} holds {len(ids)} tokens, but {needed}")
    tokens = Tokens(ids, name, vocab_size, file)
    tokens.check_vocabulary()
    return tokens


def _open(path: str, flag: str) -> mmap.mmap:
    """Map a file into memory, so that the ranks of one machine share its pages."""
    try:
        if not os.path.isfile(path):
            os.stat(path)  # raises the cause if the path does not exist
            raise UsageError(f"{flag} {path} is not a file" + (", but a directory" if os.path.isdir(path) else ""))
        size = os.path.getsize(path)
        if size == 0:
            raise UsageError(f"{flag} {path} is empty")
        if path.endswith(".bin") and size % 2:
            raise UsageError(f"{flag} {path} has {size} bytes: an odd number cannot be uint16 tokens of 2 bytes each")
        with open(path, "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise UsageError(f"{flag} {path} cannot be read: {error.strerror}") from None


def _standard_library() -> np.ndarray:
    """Return the .py files of the interpreter's library in sorted order, up to STDLIB_BYTES bytes: (n,) uint8."""
    root = sysconfig.get_path("stdlib")
    paths = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _EXCLUDED]
        paths += [os.path.join(folder, name) for name in files if name.endswith(".py")]
    text = bytearray()
    try:
        for path in sorted(paths):
            if len(text) < STDLIB_BYTES:
                text += Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"the standard library's {path} cannot be read: {error.strerror}; give --data PATH") from None
    if not text:
        raise UsageError(f"this Python's standard library has no source text in {root}; give --data PATH")
    return np.frombuffer(bytes(text[:STDLIB_BYTES]), np.uint8)


def document_positions(inputs: np.ndarray, separator: int | None) -> np.ndarray | None:
    """Return the position in its document of each token of samples (B, T); None without a separator.

    A document ends with a separator. The first one of a sample counts from the sample's begin on.
    """
    if separator is None:
        return None
    places = np.arange(inputs.shape[1])
    begins = np.zeros_like(inputs)
    begins[:, 1:] = np.where(inputs[:, :-1] == separator, places[1:], 0)
    return places - np.maximum.accumulate(begins, axis=1)


def targets_in_documents(inputs: np.ndarray, targets: np.ndarray, separator: int | None) -> np.ndarray:
    """Ignore the target of each separator: it is the first token of another document."""
    if separator is None:
        return targets
    return np.where(inputs == separator, IGNORE_INDEX, targets)


class Batches:
    """The samples of every step, as functions of step and index.

    sequential  position k of sample i of step s is token ((s*global_batch + i)*seq_len + k) mod (len(tokens) - 1), its
                target the token after it: the text front to back, again and again.
    random      sample i of step s starts at the i-th 64-bit number of a Philox stream (Salmon et al. 2011) keyed by
                (seed, "data") and positioned at step s, modulo the number of starts that leave room for a sample

    With a `separator` a sample holds several documents, each of which ends with that token. `part`
    gives the tokens of each sample that this rank computes; context parallelism has such a function.
    """

    def __init__(
        self,
        tokens: Tokens,
        *,
        seq_len: int,
        global_batch: int,
        order: str,
        seed: int,
        separator: int | None = None,
        part: Callable[[np.ndarray], np.ndarray] = np.asarray,
    ) -> None:
        self.tokens = tokens
        self.seq_len = seq_len
        self.global_batch = global_batch
        self.order = order
        self.seed = seed
        self.separator = separator
        self.part = part

    def positions(self, step: int) -> np.ndarray:
        """Return the text position of every input token of the step, (B, T) int64.

        Its target is the next one.
        """
        n = len(self.tokens.ids)
        offsets = np.arange(self.seq_len)  # offsets: (T,)
        if self.order == "sequential":
            first = (step * self.global_batch + np.arange(self.global_batch)) * self.seq_len  # (B,)
            return (first[:, None] + offsets) % (n - 1)
        stream = generator(self.seed, "data").bit_generator
        assert isinstance(stream, np.random.Philox)
        stream.advance(step << 64)  # 2**64 blocks for each step: steps never overlap
        starts = stream.random_raw(self.global_batch) % np.uint64(n - self.seq_len)  # (B,), at most n - T - 1
        return starts.astype(np.int64)[:, None] + offsets

    def batch(self, step: int, samples: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return inputs and targets of the given samples (0 <= i < B) of a step: (len(samples), T) int64, or a `part`.

        Raises UsageError for a token outside the vocabulary in any sample of the step, so that
        every rank raises it.
        """
        positions = self.positions(step)  # (B, T)
        chosen = positions[np.asarray(samples, dtype=np.int64)]  # (b, T)
        inputs = self.tokens.read(chosen)
        targets = targets_in_documents(inputs, self.tokens.read(chosen + 1), self.separator)
        if len(self.tokens.ids) > SCAN_LIMIT:
            self.tokens.check_vocabulary(np.append(positions, positions + 1))
        with packed(document_positions(inputs, self.separator)):
            return self.part(inputs), self.part(targets)

    def position_ids(self, step: int, samples: Sequence[int] | np.ndarray) -> np.ndarray | None:
        """Return what `packed` receives for these samples of a step: (len(samples), T), or None."""
        if self.separator is None:
            return None
        chosen = self.positions(step)[np.asarray(samples, dtype=np.int64)]
        return document_positions(self.tokens.read(chosen), self.separator)

    def target_count(self, step: int) -> int:
        """Return the number of targets in the global batch of a step, which every rank counts by itself."""
        count = self.global_batch * self.seq_len
        if self.separator is None:
            return count
        inputs = self.tokens.read(self.positions(step))
        return count - int((inputs == self.separator).sum())


@dataclass(frozen=True)
class Evaluation:
    """The text of the validation loss, and its samples: position k of sample i is token starts[i] + k."""

    tokens: Tokens
    starts: np.ndarray  # (samples,)


def hold_out(config: TrainConfig, tokens: Tokens) -> tuple[Tokens, Evaluation | None]:
    """Return the tokens to train on, and the evaluation, if any: on `--eval-data`, or on the end of the tokens."""
    length = config.model.seq_len
    if config.data.eval_every is None:
        return tokens, None
    if config.data.eval_data is not None:
        text = load_tokens(config.data.eval_data, vocab_size=tokens.vocab_size, seq_len=length, flag="--eval-data")
    else:
        kept = min(SAMPLES * length + 1, len(tokens.ids) // HELD_OUT)
        if kept < length + 1:
            less = f"is less than a sample, seq-len + 1 = {length + 1}; give --eval-data PATH"
            raise UsageError(f"--eval-every: a tenth of the {len(tokens.ids)} tokens of {tokens.name} {less}")
        text = replace(tokens, ids=tokens.ids[-kept:], name=f"the end of {tokens.name}")
        tokens = replace(tokens, ids=tokens.ids[:-kept])
    count = min(SAMPLES, (len(text.ids) - 1) // length)
    starts = np.linspace(0, len(text.ids) - 1 - length, count).astype(np.int64)
    text.check_vocabulary(starts[:, None] + np.arange(length + 1))
    return tokens, Evaluation(text, starts)
