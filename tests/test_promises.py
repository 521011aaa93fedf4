"""Claims about promises: each sentence of a docstring that promises something is listed with a test that exists."""

import pytest
from promise_list import (
    DESCRIPTION,
    LISTS,
    MISSING,
    OF_DOCUMENTS,
    ROOT,
    Promise,
    entries,
    entries_of,
    entry,
    line_of,
    list_of,
    names_of_tests,
    promises,
    promises_of,
    promises_of_document,
    sentences,
    unlisted,
)

MOST_MISSING = 0  # promises without a test

SOURCE = '''
"""A file. It never waits."""


class Door:
    """A door, which opens."""

    def open(self):
        """Open the door.

        Callbacks run in the order in which they
        were queued. It costs nothing.

        ValueError if it is open. Takes a second.
        """
'''


def test_every_promise_is_in_the_list():
    lines = [f"{list_of(promise).relative_to(ROOT)}: {line_of(promise)}" for promise in unlisted()]
    assert lines == [], "name the test that fails when the promise is broken:\n" + "\n".join(lines)


def test_every_listed_sentence_is_in_the_code():
    every = promises()
    gone = [each for each in entries() if not any(each.is_of(promise) for promise in every)]
    assert gone == []


def test_every_listed_test_exists():
    names = names_of_tests() | {MISSING, DESCRIPTION}
    gone = [(test, each.name) for each in entries() for test in each.tests if test not in names]
    assert gone == []


def test_few_promises_have_no_test():
    missing = [f"{each.name}: {each.beginning}" for each in entries() if MISSING in each.tests]
    assert len(missing) <= MOST_MISSING, "\n".join(missing)


def test_each_package_lists_its_own_promises():
    for path in set(LISTS.glob("*.txt")) - {OF_DOCUMENTS}:
        assert [each.name for each in entries_of(path) if list_of(Promise(each.name, "")) != path] == []


def test_every_listed_sentence_is_in_its_document():
    gone = []
    for each in entries_of(OF_DOCUMENTS):
        every = promises_of_document(each.name, (ROOT / each.name).read_text(encoding="utf-8"))
        if not any(each.is_of(promise) for promise in every):
            gone.append((each.name, each.beginning))
    assert gone == []


def test_every_test_of_a_documents_sentence_exists():
    names = names_of_tests()
    gone = []
    for each in entries_of(OF_DOCUMENTS):
        gone += [(test, each.beginning) for test in each.tests if test not in names]
    assert gone == []


def test_points_and_rows_of_a_document_begin_a_sentence():
    text = "One holds,\nalways. Two.\n\n- three\n1. Four, of\n   two lines\n\n| a `b` | c |\n"
    found = [promise.sentence for promise in promises_of_document("docs/x.md", text)]
    assert found == ["One holds, always.", "Two.", "three", "Four, of two lines", "a `b` | c |"]


def test_promises_are_found_and_descriptions_are_not():
    assert promises_of("minipar/a.py", SOURCE) == [
        Promise("minipar/a.py:", "It never waits."),
        Promise("minipar/a.py:Door.open", "Callbacks run in the order in which they were queued."),
        Promise("minipar/a.py:Door.open", "ValueError if it is open."),
    ]


@pytest.mark.parametrize(
    "sentence",
    [
        "UsageError on every rank.",
        "It holds at most two.",
        "It restores the limit.",
        "It ends even if a rank fails.",
        "Call `hook(self)` once in each pass.",
        "It sends nothing.",
        "Both have the same bits.",
    ],
)
def test_a_sentence_with_a_marker_is_a_promise(sentence):
    assert len(promises_of("a.py", f'"""A file. {sentence}"""')) == 1


@pytest.mark.parametrize("sentence", ["It runs at once.", "Even ranks send first.", "Nothing hides that."])
def test_a_mere_description_is_no_promise(sentence):
    assert promises_of("a.py", f'"""A file. {sentence}"""') == []


def test_a_line_of_the_list_is_read_as_it_is_written():
    long = Promise("minipar/comm/a.py:f", "It never " + "waits " * 30 + "long.")
    line = line_of(long, "tests/test_promises.py::test_a, tests/test_promises.py::test_b")
    assert entry(line).is_of(long)
    assert entry(line).tests == ("tests/test_promises.py::test_a", "tests/test_promises.py::test_b")
    assert not entry(line).is_of(Promise(long.name, "It always waits."))
    assert not entry(line).is_of(Promise("minipar/comm/a.py:g", long.sentence))
    assert list_of(long).name == "comm.txt" and list_of(Promise("minipar/memory.py:f", "")).name == "minipar.txt"
    with pytest.raises(ValueError, match="expected `path:name"):
        entry("minipar/a.py:f | It never waits.")


def test_a_paragraph_ends_a_sentence():
    text = "One\nof two. Two.\n\nthree\n\nFour (and `x.y`)."
    assert sentences(text) == ["One of two.", "Two.", "three", "Four (and `x.y`)."]
