"""Claims about the records that are compared: what each file holds, against formulas written out here."""

import hashlib
import json

import numpy as np
import pytest

from minipar.compare.record import Record, measure, strips

RANDOM = np.random.Generator(np.random.Philox(5))
NAMES = {"w": (30, 7), "b": (5,), "s": ()}


def values(scale=1.0):
    return {name: scale * RANDOM.standard_normal(shape) for name, shape in NAMES.items()}


def direction(name, shape):
    """The random direction of a name, from NumPy's Philox with a hash as its key."""
    key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:16], "little")
    return np.random.Generator(np.random.Philox(key=key)).standard_normal(shape)


def expected(name, array):
    """The norm and the projection of each strip, by NumPy's own cuts."""
    array = np.atleast_1d(array).astype(float)
    projected = array * direction(name, array.shape)
    norms, projections = [], []
    for dim, size in enumerate(array.shape):
        count = min(24, size)
        edges = [size * i // max(count, 1) for i in range(count + 1)]
        for start, stop in zip(edges, edges[1:], strict=False):
            strip = range(start, stop)
            norms.append(np.linalg.norm(array.take(strip, axis=dim)))
            projections.append(projected.take(strip, axis=dim).sum())
    return np.array([norms, projections])


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((), "float64"), ((1,), "int64"), ((23,), "float64"), ((24,), "float16"), ((25,), "float32"), ((50, 3), "float64"),
     ((2, 30, 4), "float32"), ((0, 3), "float64")],
)  # fmt: skip
def test_each_strip_has_its_norm_and_projection(shape, dtype):
    array = (10 * RANDOM.standard_normal(shape)).astype(dtype)
    found = measure("h.0.weight", array)
    assert found.dtype == np.float64 and found.shape == (2, sum(strips(shape)))
    np.testing.assert_allclose(found, expected("h.0.weight", array), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("scale", [1e-200, 1e149, 1e151, 1e300])
def test_squares_of_large_values_do_not_overflow(scale):
    array = RANDOM.standard_normal((3, 4))
    with np.errstate(over="raise", invalid="raise"):
        found = measure("w", scale * array)
    floor = 1e-12 if scale > 1 else 1.0  # squares of tiny values vanish; their projections do not
    assert found[1] == pytest.approx(scale * expected("w", array)[1], rel=1e-12)
    assert found[0] == pytest.approx(scale * expected("w", array)[0], rel=floor)


def test_a_record_has_the_facts_and_a_file_for_each_step(tmp_path):
    """The directory is new, its parents may be missing, and each update is the difference to the step before."""
    folder = tmp_path / "runs" / "first"
    history = [values() for _ in range(4)]
    start = {name: array.copy() for name, array in history[0].items()}
    record = Record(folder, history[0], dp=2, dtype="float64")
    facts = json.loads((folder / "run.json").read_text())
    assert facts == {"dp": 2, "dtype": "float64", "shapes": {name: list(shape) for name, shape in NAMES.items()}}
    before = start
    for step, after in enumerate(history[1:]):
        gradients = values(1e-3)
        record.step(step, 2.5, np.float32(0.5), gradients, after)
        with np.load(folder / f"step-{step}.npz") as file:
            assert (file["loss"], file["grad_norm"]) == (2.5, 0.5) and file["loss"].dtype == float
            assert len(file.files) == 2 + 2 * len(NAMES)
            for name in NAMES:
                np.testing.assert_allclose(file[f"gradient/{name}"], expected(name, gradients[name]), rtol=1e-12)
                update = after[name] - before[name]
                np.testing.assert_allclose(file[f"update/{name}"], expected(name, update), rtol=1e-12, atol=1e-14)
        before = after
    assert all(np.array_equal(history[0][name], start[name]) for name in NAMES)  # the record has copies
    with pytest.raises(FileExistsError, match="first"):
        Record(folder, history[0])
