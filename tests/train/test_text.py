"""Claims about the text that is trained on: the library's source, limits, documents, and what an evaluation keeps."""

import os
import sysconfig

import numpy as np
import pytest
from training import config_for

import minipar.train.data as data
from minipar.errors import UsageError
from minipar.train.data import Batches, Tokens, document_positions, hold_out, load_tokens

SHAPE = "--seq-len 8 --eval-every 1"


def text_of(count, dtype=np.uint8, vocab=256):
    return Tokens((np.arange(count) % 251).astype(dtype), "a text", vocab)


# ---- the standard library --------------------------------------------------------------------------------------------


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A standard library of these files: name -> bytes."""

    def make(files):
        for name, content in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_bytes(content)
        monkeypatch.setattr(sysconfig, "get_path", {"stdlib": str(tmp_path)}.__getitem__)
        return tmp_path

    return make


def loaded():
    return load_tokens(None, vocab_size=256, seq_len=1).ids.tobytes()


def test_the_text_is_each_source_file_in_order_of_its_path(library):
    """No tests, tables or installed packages, and no file that is no source."""
    excluded = ("test/a.py", "x/tests/a.py", "idle_test/a.py", "encodings/a.py", "site-packages/p/a.py")
    library(
        {"b.py": b"BB", "a.py": b"A", "x/c.py": b"CCC", "x/y/d.py": b"D", "a.txt": b"no", "e.pyc": b"no"}
        | dict.fromkeys(excluded, b"no")
    )
    assert loaded() == b"ABBCCCD"


def test_the_text_ends_at_its_limit_and_no_further_file_is_read(library, monkeypatch):
    monkeypatch.setattr(data, "STDLIB_BYTES", 5)
    folder = library({"a.py": b"123", "b.py": b"4567"})
    (folder / "c.py").symlink_to(folder / "missing")
    assert loaded() == b"12345"
    monkeypatch.setattr(data, "STDLIB_BYTES", 7)
    assert loaded() == b"1234567"


def test_a_source_file_that_cannot_be_read_is_named(library):
    folder = library({"a.py": b"123"})
    (folder / "b.py").symlink_to(folder / "missing")
    line = f"the standard library's {folder}/b.py cannot be read: No such file or directory; give --data PATH"
    with pytest.raises(UsageError) as caught:
        loaded()
    assert str(caught.value) == line


def test_a_library_without_source_asks_for_a_text(library):
    folder = library({"a.pyc": b"123"})
    with pytest.raises(UsageError) as caught:
        loaded()
    assert str(caught.value) == f"this Python's standard library has no source text in {folder}; give --data PATH"


def test_the_limits_are_those_that_are_documented():
    """8 MiB of source text; 67 million tokens checked before training; 64 samples, a tenth of the text at most."""
    assert (data.STDLIB_BYTES, data.SCAN_LIMIT, data.SAMPLES, data.HELD_OUT) == (8_388_608, 67_108_864, 64, 10)


# ---- files -----------------------------------------------------------------------------------------------------------


def test_a_file_of_one_byte_is_short_and_not_empty(tmp_path):
    (tmp_path / "one").write_bytes(b"x")
    (tmp_path / "none").write_bytes(b"")
    for name, line in (
        ("one", f"{tmp_path}/one holds 1 tokens, but a sample and its targets take seq-len + 1 = 1 + 1 = 2"),
        ("none", f"--data {tmp_path}/none is empty"),
    ):
        with pytest.raises(UsageError) as caught:
            load_tokens(str(tmp_path / name), vocab_size=256, seq_len=1)
        assert str(caught.value) == line


def test_what_is_neither_file_nor_directory_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match=f"^--eval-data {tmp_path}/pipe is not a file$"):
        load_tokens(str(tmp_path / "pipe"), vocab_size=256, seq_len=1, flag="--eval-data")


@pytest.mark.parametrize(("dtype", "size"), [(np.uint8, 4096), (np.uint16, 2048)])
def test_a_fingerprint_has_16_bytes_and_sees_all_of_a_short_text(dtype, size, monkeypatch):
    """A text of exactly the limit is read whole."""
    monkeypatch.setattr(data, "STDLIB_BYTES", 4096)
    text = text_of(size, dtype)
    prints = {text.fingerprint()}
    for place in range(0, size, 100):
        other = text.ids.copy()
        other[place] += 1
        prints.add(Tokens(other, "a text", 256).fingerprint())
    assert len(prints) == 1 + len(range(0, size, 100)) and {len(each) for each in prints} == {16}


def test_a_separator_must_be_among_the_tokens_that_are_checked(monkeypatch):
    text = text_of(100)
    text.check_separator(None)
    text.check_separator(99)
    monkeypatch.setattr(data, "SCAN_LIMIT", 99)
    with pytest.raises(UsageError, match="^--pack 99: a text has no such token, so no document ends$"):
        text.check_separator(99)
    text.check_separator(98)


# ---- samples ---------------------------------------------------------------------------------------------------------


def test_no_sample_is_a_batch_of_none():
    options = {"seq_len": 8, "global_batch": 4, "order": "random", "seed": 0}
    inputs, targets = Batches(text_of(100), **options).batch(0, [])
    assert inputs.shape == targets.shape == (0, 8)
    assert Batches(text_of(100), **options, separator=7).position_ids(0, []).shape == (0, 8)


def test_each_samples_documents_count_by_themselves():
    """A separator in one sample begins nothing in the next."""
    inputs = np.array([[9, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 9]])
    assert document_positions(inputs, 9).tolist() == [[0, 0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3]]


# ---- the text of an evaluation ---------------------------------------------------------------------------------------


def test_an_evaluation_on_a_file_leaves_the_training_text_whole(tmp_path):
    (tmp_path / "e").write_bytes(bytes(range(200)))
    text = text_of(500)
    tokens, evaluation = hold_out(config_for(f"{SHAPE} --eval-data {tmp_path}/e"), text)
    assert tokens is text and evaluation.tokens.name == f"{tmp_path}/e"
    assert evaluation.starts.tolist() == np.linspace(0, 191, 24).astype(int).tolist()


def test_the_end_of_the_text_has_its_name_and_its_tokens():
    tokens, evaluation = hold_out(config_for(SHAPE), text_of(170))
    assert (tokens.name, evaluation.tokens.name) == ("a text", "the end of a text")
    assert np.array_equal(tokens.ids, text_of(170).ids[:153])
    assert np.array_equal(evaluation.tokens.ids, text_of(170).ids[153:])


@pytest.mark.parametrize("place", [0, 7, 8, 9, 16])
def test_tokens_of_an_evaluation_are_checked_before_training(place, monkeypatch):
    """Every token of a sample and its last target, also where the check of the whole text has ended."""
    monkeypatch.setattr(data, "SCAN_LIMIT", 1)
    ids = np.zeros(170, np.uint8)
    ids[153 + place] = 200
    with pytest.raises(UsageError, match=f"^the end of a text: token 200 at position {place} is not below vocab-size"):
        hold_out(config_for(SHAPE), Tokens(ids, "a text", 200))


def test_tokens_that_no_sample_has_are_not_checked(monkeypatch):
    monkeypatch.setattr(data, "SCAN_LIMIT", 1)
    ids = np.zeros(160, np.uint8)  # 16 are kept, one short of two samples
    ids[144 + 9 :] = 200
    tokens, evaluation = hold_out(config_for(SHAPE), Tokens(ids, "a text", 200))
    assert evaluation.starts.tolist() == [0]
