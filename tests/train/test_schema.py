"""Claims about kinds of JSON values: which values each one takes, at its bounds, and the line of a refusal."""

import sys

import pytest

from minipar.train.manifest import CUT, FILE, LARGEST_SIZE, MANIFEST, PIECE, SIZES, FlagValue, checksum, parse
from minipar.train.schema import ListOf, MapOf, Nullable, Number, OneOf, Record, Row, Text, Truth, Whole
from minipar.train.settings import TrainConfig, flags

LARGEST = sys.float_info.max
WHOLE = "a whole number from 0 to 9223372036854775807"
A_LIST = "a list of at least 2 values"
TAKEN = [
    (Whole(), [0, 1, 2**63 - 1]),
    (Whole(3, 4), [3, 4]),
    (Number(), [0, -LARGEST, LARGEST, 1.5, 10**300]),
    (Number(2), [2, 2.0, 3]),
    (Truth(), [True, False]),
    (Text(), ["", "a", "é", "\n"]),
    (Text("a+"), ["a", "aa"]),
    (OneOf(("a", "b")), ["a", "b"]),
    (Nullable(Whole(1)), [None, 1]),
    (ListOf(Whole()), [[], [1], [1, 2]]),
    (ListOf(Whole(), least=2), [[1, 2], [1, 2, 3]]),
    (Row([Whole(), Text()]), [[1, "a"]]),
    (Row([]), [[]]),
    (MapOf(Whole()), [{}, {"a": 1, "": 2}]),
    (Record({"a": Whole()}), [{"a": 1}, {"a": 1, "b": None}]),
    (Record({}, optional={"a": Whole()}, closed=True), [{}, {"a": 1}]),
]
REFUSED = [
    (Whole(), -1, f"p is -1, expected {WHOLE}"),
    (Whole(), 2**63, f"p is 9223372036854775808, expected {WHOLE}"),
    (Whole(), True, f"p is True, expected {WHOLE}"),
    (Whole(), 1.0, f"p is 1.0, expected {WHOLE}"),
    (Whole(3, 4), 2, "p is 2, expected a whole number from 3 to 4"),
    (Whole(3, 4), 5, "p is 5, expected a whole number from 3 to 4"),
    (Number(), True, "p is True, expected a finite number of at least -1.79769e+308"),
    (Number(), float("-inf"), "p is -inf, expected a finite number of at least -1.79769e+308"),
    (Number(2), 1.9, "p is 1.9, expected a finite number of at least 2"),
    (Number(2), float("inf"), "p is inf, expected a finite number of at least 2"),
    (Number(2), float("nan"), "p is nan, expected a finite number of at least 2"),
    (Number(2), "2", "p is '2', expected a finite number of at least 2"),
    (Truth(), 1, "p is 1, expected true or false"),
    (Text(), 1, "p is 1, expected a text"),
    (Text(), "a\0", "p is 'a\\x00', expected a text"),
    (Text(), "\ud800", "p is '\\ud800', expected a text"),
    (Text("a+"), "ab", "p is 'ab', expected a text of the form a+"),
    (Text("a+"), "a\n", "p is 'a\\n', expected a text of the form a+"),
    (OneOf(("a", "b")), "c", "p is 'c', expected one of a, b"),
    (OneOf(("a", "b")), ["a"], "p is ['a'], expected one of a, b"),
    (Nullable(Whole(1, 2)), 0, "p is 0, expected a whole number from 1 to 2"),
    (ListOf(Whole(), least=2), [1], f"p is [1], expected {A_LIST}"),
    (ListOf(Whole(), least=2), "ab", f"p is 'ab', expected {A_LIST}"),
    (ListOf(Whole()), [0, "a"], f"p[1] is 'a', expected {WHOLE}"),
    (Row([Whole(), Text()]), [1], "p is [1], expected a list of 2 values"),
    (Row([Whole(), Text()]), [1, "a", 2], "p is [1, 'a', 2], expected a list of 2 values"),
    (Row([Whole(), Text()]), "ab", "p is 'ab', expected a list of 2 values"),
    (Row([Whole(), Text()]), [1, 2], "p[1] is 2, expected a text"),
    (MapOf(Whole()), [1], "p is [1], expected an object"),
    (MapOf(Whole()), {"a": "b"}, f"p['a'] is 'b', expected {WHOLE}"),
    (Record({"a": Whole()}), [1], "p is [1], expected an object"),
    (Record({"a": Whole()}), {"b": 1}, "p lacks 'a'"),
    (Record({"a": Whole()}), {"a": "b"}, f"p.a is 'b', expected {WHOLE}"),
    (Record({}, optional={"a": Whole()}), {"a": "b"}, f"p.a is 'b', expected {WHOLE}"),
    (Record({"a": Whole()}, optional={"b": Whole()}, closed=True), {"a": 1, "c": 1}, "a key of p is 'c', expected one"),
]


@pytest.mark.parametrize(("kind", "values"), TAKEN)
def test_a_kind_takes_its_values_up_to_its_bounds(kind, values):
    for value in values:
        kind.check(value, "p")


@pytest.mark.parametrize(("kind", "value", "line"), REFUSED)
def test_any_other_value_is_refused_with_its_place(kind, value, line):
    with pytest.raises(ValueError) as caught:
        kind.check(value, "p")
    assert str(caught.value) == line or line.endswith("one") and str(caught.value) == f"{line} of a, b"


def test_the_whole_manifest_is_a_place_without_a_name():
    for value, line in (
        ([], "it is [], expected an object"),
        ({}, "the manifest lacks 'a'"),
        ({"a": "b"}, f"a is 'b', expected {WHOLE}"),
    ):
        with pytest.raises(ValueError) as caught:
            Record({"a": Whole()}).check(value, "")
        assert str(caught.value) == line


# ---- the table of a manifest -----------------------------------------------------------------------------------------

BOUNDS = [
    (CUT.keys["dim"], 0, -1),
    (CUT.keys["groups"], 1, 0),
    (CUT.keys["rank"], 0, -1),
    (CUT.keys["ranks"], 1, 0),
    (PIECE.keys["start"], 0, -1),
    (PIECE.keys["stop"], 1, 0),
    (PIECE.keys["cut"], None, 1),
    (FILE.keys["bytes"], 1, 0),
    (FILE.keys["pieces"], [], None),
    (MANIFEST.keys["step"], 0, -1),
    (MANIFEST.keys["optimizer_steps"], 0, -1),
    (MANIFEST.keys["parameters"], {"p": [1]}, {"p": [0]}),
    (MANIFEST.keys["parameters"], {"p": [2147483647]}, {"p": [2147483648]}),
    (MANIFEST.keys["parameters"], {"p": [1]}, {"p": []}),
    (MANIFEST.keys["history"], [{"step": 0, "flags": {}}], []),
    (MANIFEST.optional["loss_scale"], [1, 0], [0.5, 0]),
    (MANIFEST.optional["loss_scale"], [1, 0], [1, -1]),
    (MANIFEST.optional["skipped"], 0, -1),
    (SIZES[int], 1, 0),
    (SIZES[int], 2147483647, 2147483648),
    (SIZES[float], 0, -1),
    (SIZES[type(None)], 1, 0),
]


@pytest.mark.parametrize(("kind", "least", "beyond"), BOUNDS)
def test_a_manifests_values_have_these_bounds(kind, least, beyond):
    kind.check(least, "p")
    with pytest.raises(ValueError):
        kind.check(beyond, "p")
    assert LARGEST_SIZE == 2147483647


def test_a_files_list_is_not_empty():
    file = {"name": "a", "bytes": 1, "sha256": "0" * 64, "pieces": []}
    MANIFEST.keys["files"].check([file], "files")
    with pytest.raises(ValueError, match="^files is .., expected a list of at least 1 values$"):
        MANIFEST.keys["files"].check([], "files")


def flag_value(name):
    return next(FlagValue(flag, field) for _, field, flag, _ in flags(TrainConfig()) if flag == name)


@pytest.mark.parametrize(
    ("flag", "taken", "refused"),
    [
        ("--seed", [0, 17, 10**19], [-1, 2**64, 2**65, 1.0, None]),
        ("--zero-stage", [0, 3], [4, -1]),
        ("--steps", [1, 2**64], [0, 2**64 + 1, None]),
        ("--warmup-steps", [0], [-1]),
        ("--dp", [None, 1, 2**64], [0, "x", 1.0, 2**64 + 1]),
        ("--pack", [None, 0], [-1]),
        ("--memory-limit", [None, 1, 2**62], [0, "1"]),
        ("--capacity-factor", [None, 1, 0.5], [0]),
        ("--betas", [[0, 0.5]], [[0.5], [0.5, 1], [0.5, 0.5, 0.5], None, 0.5, (0.5, 0.5)]),
        ("--network", [[0, 0]], [[0, -1]]),
        ("--gradients", [None, "float32"], ["float64"]),
        ("--model", ["gpt2"], [None, "gpt3"]),
        ("--sequence-parallel", [True, False], [0, None]),
        ("--data", [None, "a"], [1]),
        ("--lr", [1e-3, 1], [0, None]),
    ],
)
def test_a_saved_flag_is_one_that_the_command_line_takes(flag, taken, refused):
    for value in taken:
        flag_value(flag).check(value, "p")
    for value in refused:
        with pytest.raises(ValueError, match="^p"):
            flag_value(flag).check(value, "p")


def test_a_checksum_does_not_depend_on_the_order_of_keys():
    one, other = {"a": 1, "b": {"c": 2, "d": 3}}, {"b": {"d": 3, "c": 2}, "checksum": "x", "a": 1}
    assert checksum(one) == checksum(other) != checksum({"a": 1, "b": {"c": 2, "d": 4}})
    assert checksum({}) == "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"  # SHA-256 of "{}"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (b"{", "not JSON: "),
        (b"[" * 100_000, "not JSON: "),
        (b"[]", 'not a checkpoint of minipar: "format" is not "minipar checkpoint"'),
        (b'{"format": "x"}', 'not a checkpoint of minipar: "format" is not "minipar checkpoint"'),
        (b'{"format": "minipar checkpoint"}', "version None of the format; this minipar reads 1"),
        (b'{"format": "minipar checkpoint", "version": 2}', "version 2 of the format; this minipar reads 1"),
        (
            b'{"format": "minipar checkpoint", "version": 1}',
            "its checksum does not fit: the manifest was changed after it was written",
        ),
    ],
)
def test_what_is_no_manifest_is_refused_by_its_first_words(text, line):
    with pytest.raises(ValueError) as caught:
        parse(text)
    assert str(caught.value) == line or line.endswith(": ") and str(caught.value).startswith(line)
