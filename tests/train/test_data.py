"""Claims about the data: sample i of step s is the same in any layout; a file that cannot be used is one clear line."""

import time

import numpy as np
import pytest
from launcher import run_mpi

import minipar.train.data as data
from minipar.errors import UsageError
from minipar.train.data import Batches, Tokens, load_tokens


def batches(tokens, *, seq_len=5, global_batch=4, order="random", seed=0) -> Batches:
    if not isinstance(tokens, Tokens):
        tokens = Tokens(np.asarray(tokens, np.uint16), "made up", 2**16)
    return Batches(tokens, seq_len=seq_len, global_batch=global_batch, order=order, seed=seed)


@pytest.fixture
def write(tmp_path):
    def write(content: bytes, name: str = "text.txt") -> str:
        (tmp_path / name).write_bytes(content)
        return str(tmp_path / name)

    return write


# ---- which tokens ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [6, 7, 41, 1000])
def test_sequential_is_the_published_formula(n):
    tokens = np.arange(n) * 3 % 1009
    B, T = 4, 5
    source = batches(tokens, order="sequential", seq_len=T, global_batch=B)
    for s in range(60):
        inputs, targets = source.batch(s, range(B))
        for i in range(B):
            for k in range(T):
                position = ((s * B + i) * T + k) % (n - 1)
                assert (inputs[i, k], targets[i, k]) == (tokens[position], tokens[position + 1])


@pytest.mark.parametrize("order", ["random", "sequential"])
def test_a_sample_does_not_depend_on_the_ranks(order):
    source = batches(np.arange(1000), order=order, global_batch=12)
    whole_inputs, whole_targets = source.batch(3, range(12))
    for ranks in (1, 2, 3, 4, 6, 12):
        share = 12 // ranks
        parts = [source.batch(3, range(r * share, (r + 1) * share)) for r in range(ranks)]
        np.testing.assert_array_equal(np.concatenate([inputs for inputs, _ in parts]), whole_inputs)
        np.testing.assert_array_equal(np.concatenate([targets for _, targets in parts]), whole_targets)
    inputs, _ = source.batch(3, np.array([7, 2]))
    np.testing.assert_array_equal(inputs, whole_inputs[[7, 2]])


def test_a_target_is_the_next_token_of_the_text():
    source = batches(np.arange(1000), seq_len=9, global_batch=64)
    inputs, targets = source.batch(0, range(64))
    assert inputs.dtype == targets.dtype == np.int64 and inputs.shape == targets.shape == (64, 9)
    np.testing.assert_array_equal(inputs, inputs[:, :1] + np.arange(9))
    np.testing.assert_array_equal(targets, inputs + 1)


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


def test_a_larger_batch_begins_with_the_smaller_one():
    small, large = batches(np.arange(10**4), global_batch=4), batches(np.arange(10**4), global_batch=64)
    np.testing.assert_array_equal(small.batch(9, range(4))[0], large.batch(9, range(4))[0])


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
    assert 10**6 < len(tokens.ids) <= data.STDLIB_BYTES
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


def test_the_fingerprint_sees_another_text(write):
    text = bytes(range(256)) * 10
    one = load_tokens(write(text, "a"), vocab_size=256, seq_len=4)
    for other in (text + b"x", text[:-1], text[:1000] + b"!" + text[1001:]):
        assert load_tokens(write(other, "b"), vocab_size=256, seq_len=4).fingerprint() != one.fingerprint()
    assert load_tokens(write(text, "b"), vocab_size=256, seq_len=4).fingerprint() == one.fingerprint()


@pytest.mark.parametrize("itemsize", [1, 2])
def test_the_fingerprint_of_a_long_text_sees_both_ends(itemsize, write, monkeypatch):
    """... and its length, wherever it is longer, and 62 pieces between them; not a change beside them."""
    monkeypatch.setattr(data, "STDLIB_BYTES", 1000)
    size = 2**20
    text = np.random.Generator(np.random.Philox(1)).integers(0, 256, size, np.uint8)
    name = {1: "a", 2: "a.bin"}[itemsize]

    def fingerprint(content):
        return load_tokens(write(content.tobytes(), name), vocab_size=2**16, seq_len=4).fingerprint()

    def changed(place):
        other = text.copy()
        other[place] ^= 1
        return fingerprint(other)

    pieces = [int(start) for start in np.linspace(0, size // itemsize - 1024, 64, dtype=np.int64)]
    same = fingerprint(text)
    for start in pieces:
        assert changed(start * itemsize) != same and changed(start * itemsize + 1023) != same
    for beside in (pieces[1] * itemsize - 1, pieces[1] * itemsize + 1024):
        assert changed(beside) == same  # the price of milliseconds
    assert fingerprint(text[:-itemsize]) != same and fingerprint(np.append(text, text[:itemsize])) != same


def refused(path, vocab_size=256, seq_len=4) -> str:
    with pytest.raises(UsageError) as caught:
        load_tokens(path, vocab_size=vocab_size, seq_len=seq_len)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_file_that_cannot_be_used_is_refused(write, tmp_path):
    missing = str(tmp_path / "missing")
    assert refused(missing) == f"--data {missing} cannot be read: No such file or directory"
    assert refused(str(tmp_path)) == f"--data {tmp_path} is not a file, but a directory"
    assert refused(write(b"")).endswith("is empty")
    assert refused(write(b"", "e.bin")).endswith("is empty")
    assert refused(write(b"abcde"), seq_len=5).endswith(
        "holds 5 tokens, but a sample and its targets take seq-len + 1 = 5 + 1 = 6"
    )
    assert load_tokens(write(b"abcdef"), vocab_size=256, seq_len=5)
    assert "has 7 bytes: an odd number cannot be uint16" in refused(write(b"1234567", "odd.bin"))


def test_a_file_cut_off_while_it_is_read_is_an_error(tmp_path):
    """Reading what is gone would end the process with SIGBUS, without a word."""
    script = f"""
import os, sys
from minipar.comm import main
from minipar.train import trainer
from minipar.train.__main__ import run

sys.argv[1:] = "--layers 1 --hidden 16 --heads 2 --seq-len 16 --global-batch 4 --data {tmp_path}/text.txt".split()
step = trainer.Trainer.step
def cutting(self, index):
    if index == 2:
        os.truncate("{tmp_path}/text.txt", 5000)
    return step(self, index)
trainer.Trainer.step = cutting
main(run)
"""
    (tmp_path / "text.txt").write_bytes(bytes(100_000))
    result = run_mpi(2, script, timeout=30)
    assert result.returncode == 2 and result.stderr.count("\n") == 1
    assert f"error: {tmp_path}/text.txt was cut from 100,000 to 5,000 bytes while in use" in result.stderr


@pytest.mark.parametrize("position", [0, 5, 40, 100_000])
def test_a_token_beyond_the_vocabulary_is_named_by_position(write, position):
    ids = np.zeros(100_001, "<u2")
    ids[position:] = 500  # the first one counts
    ids[position] = 300
    path = write(ids.tobytes(), "ids.bin")
    assert refused(path, vocab_size=300) == f"{path}: token 300 at position {position} is not below vocab-size 300"
    ids[position:] = 299
    assert load_tokens(write(ids.tobytes(), "ids.bin"), vocab_size=300, seq_len=4)


def test_bytes_beyond_a_small_vocabulary_are_refused(write):
    assert refused(write(b"hello"), vocab_size=111).endswith("token 111 at position 4 is not below vocab-size 111")
    assert refused(None, vocab_size=20).startswith("the standard library's source: token ")


@pytest.mark.parametrize("order", ["random", "sequential"])
def test_tokens_after_the_scan_are_checked_when_drawn(write, monkeypatch, order):
    monkeypatch.setattr(data, "SCAN_LIMIT", 30)
    ids = np.zeros(61, "<u2")
    ids[59] = 9
    tokens = load_tokens(write(ids.tobytes(), "ids.bin"), vocab_size=9, seq_len=5)
    source = batches(tokens, order=order)
    for s in range(30):
        hit = bool((source.positions(s) + 1 == 59).any() or (source.positions(s) == 59).any())
        for samples in ([0], [1], range(4)):  # whichever samples a rank asks for
            if hit:
                with pytest.raises(UsageError, match="token 9 at position 59 is not below vocab-size 9"):
                    source.batch(s, samples)
            else:
                source.batch(s, samples)


def test_checking_a_large_file_is_quick(tmp_path):
    path = tmp_path / "large.bin"
    with open(path, "wb") as file:
        file.truncate(2**30)  # 2**29 tokens, a file with nothing but a hole
    start = time.process_time()  # what other processes take does not count
    tokens = load_tokens(str(path), vocab_size=256, seq_len=64)
    tokens.fingerprint()
    assert time.process_time() - start < 2.0  # about 0.3 s; reading all of it takes several
