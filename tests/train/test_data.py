"""Claims about the data: which tokens a step's samples have, and what a file must be.

test_trainer.py and plain_loop.py have the formulas of both orders.
"""

import numpy as np
import pytest

from minipar.errors import UsageError
from minipar.train.data import Batches, Tokens, load_tokens


def batches(tokens, *, seq_len=5, global_batch=4, order="random", seed=0) -> Batches:
    if not isinstance(tokens, Tokens):
        tokens = Tokens(np.asarray(tokens, np.uint16), "made up")
    return Batches(tokens, seq_len, global_batch, order, seed)


@pytest.fixture
def write(tmp_path):
    def write(content: bytes, name: str = "text.txt") -> str:
        (tmp_path / name).write_bytes(content)
        return str(tmp_path / name)

    return write


# ---- which tokens ----------------------------------------------------------------------------------------------------


def test_random_starts_reach_both_ends_and_are_spread_evenly():
    source = batches(np.arange(12), seq_len=5, global_batch=700)
    starts = np.concatenate([source.batch(s, range(700))[0][:, 0] for s in range(10)])
    counts = np.bincount(starts, minlength=7)
    assert len(counts) == 7, "starts are 0 to n - seq_len - 1"
    assert np.all(abs(counts - 1000) < 6 * np.sqrt(1000))


def test_steps_and_seeds_differ_and_repeat():
    first = batches(np.arange(10**4), seed=1)
    again, other = batches(np.arange(10**4), seed=1), batches(np.arange(10**4), seed=2)
    assert np.array_equal(first.batch(5, range(4))[0], again.batch(5, range(4))[0])
    drawn = {first.batch(s, range(4))[0].tobytes() for s in range(50)}
    assert len(drawn) == 50
    assert not np.array_equal(first.batch(5, range(4))[0], other.batch(5, range(4))[0])


def test_the_random_stream_never_changes():
    """Positions drawn by an earlier version: a change would make old runs impossible to repeat."""
    first = batches(np.arange(60000), seed=0).positions(0)[:, 0]
    later = batches(np.arange(60000), seed=1234).positions(10**6)[:, 0]
    assert first.tolist() == [31518, 51271, 56240, 37655]
    assert later.tolist() == [35649, 12491, 27966, 11670]


# ---- where tokens come from ------------------------------------------------------------------------------------------


def test_the_standard_library_is_the_same_text_each_time():
    tokens = load_tokens(None, vocab_size=256, seq_len=64)
    again = load_tokens(None, vocab_size=256, seq_len=64)
    assert tokens.fingerprint() == again.fingerprint() and np.array_equal(tokens.ids, again.ids)
    assert len(tokens.ids) > 10**6
    text = tokens.ids.tobytes()
    assert b"\ndef " in text and b"\nimport " in text


def test_a_text_file_is_its_bytes_and_a_bin_file_its_uint16(write):
    text = "naïve text".encode()
    assert load_tokens(write(text), vocab_size=256, seq_len=4).ids.tobytes() == text
    ids = np.array([1, 50256, 3, 70, 7], "<u2")
    tokens = load_tokens(write(ids.tobytes(), "train.bin"), vocab_size=50257, seq_len=4)
    np.testing.assert_array_equal(tokens.ids, ids)
    inputs, targets = batches(tokens, seq_len=4, global_batch=1).batch(0, [0])
    assert inputs.tolist() == [[1, 50256, 3, 70]] and targets.tolist() == [[50256, 3, 70, 7]]


@pytest.mark.parametrize("size", [2_000, 200_000])
@pytest.mark.parametrize("name", ["a", "a.bin"])
def test_the_fingerprint_sees_another_text(name, size, write):
    text = np.random.Generator(np.random.Philox(1)).integers(0, 256, size, np.uint8)

    def fingerprint(content):
        return load_tokens(write(content.tobytes(), name), vocab_size=2**16, seq_len=4).fingerprint()

    same = fingerprint(text)
    assert fingerprint(text) == same
    for place in (0, size - 2):
        other = text.copy()
        other[place] ^= 1
        assert fingerprint(other) != same
    assert fingerprint(text[:-2]) != same and fingerprint(np.append(text, text[:2])) != same


def refused(path, vocab_size=256, seq_len=4) -> str:
    with pytest.raises(UsageError) as caught:
        load_tokens(path, vocab_size=vocab_size, seq_len=seq_len)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_file_that_cannot_be_used_is_refused(write, tmp_path):
    assert "missing" in refused(str(tmp_path / "missing"))
    assert str(tmp_path) in refused(str(tmp_path))
    assert "text.txt" in refused(write(b""))
    assert "seq-len + 1 = 6" in refused(write(b"abcde"), seq_len=5)
    assert load_tokens(write(b"abcdef"), vocab_size=256, seq_len=5)
    assert "odd.bin" in refused(write(b"1234567", "odd.bin"))


@pytest.mark.parametrize("position", [0, 40, 100_000])
def test_a_token_beyond_the_vocabulary_is_refused(write, position):
    ids = np.zeros(100_001, "<u2")
    ids[position] = 300
    path = write(ids.tobytes(), "ids.bin")
    message = refused(path, vocab_size=300)
    assert path in message and "token 300" in message and "vocab-size 300" in message
    assert load_tokens(path, vocab_size=301, seq_len=4)
