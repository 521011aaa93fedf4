"""Claims about density: lines of code say little at once, classes are shallow, and attributes are written out.

The goals are for minipar without plan and bench. The tables below hold what misses a goal today, with a limit that
keeps it from getting worse. When code gets better, `python tests/helpers/measures.py` prints the new values: lower the
limit, and delete the row when the goal is reached. A new package or class has no row, so it meets the goals from the
start.
"""

import pytest
from measures import computed_names, core, densities, density, depths

MOST_TOKENS_PER_LINE = 10.0
MOST_PERCENT_LONG = 8.0  # of the lines that are not blank, beyond 100 columns
MOST_TOKENS = 76_000
DEEPEST = 3

# Package: the limits of tokens per line of code and of the percentage of long lines.
DENSE: dict[str, tuple[float, float]] = {}
# 5,745 of them are the comparison of two runs, 4,807 sums as trees, 2,662 documents, 1,241 a mesh for experts.
TOKENS_TODAY = 126_965

# The classes that are deeper than the goal.
DEEP = {"minipar/nn/moe.py:Mixtral": 4}

# How often a file of autograd, nn and parallel uses setattr, vars, __dict__, or getattr with a computed name.
COMPUTED_NAMES = {"minipar/nn/llama.py": 1, "minipar/nn/module.py": 2, "minipar/nn/optim.py": 1}


@pytest.fixture(scope="module")
def sizes():
    """The density of each folder of the core."""
    return densities(core())


def too_dense(sizes, limits):
    """The packages of these sizes that are denser than their limits, or than the goals."""
    goals = (MOST_TOKENS_PER_LINE, MOST_PERCENT_LONG)
    found = {}
    for folder, size in sizes.items():
        most_tokens, most_long = limits.get(folder, goals)
        if size.tokens_per_line > most_tokens or size.percent_long > most_long:
            found[folder] = (round(size.tokens_per_line, 2), round(size.percent_long, 1))
    return found


def too_many(counts, limits, goal):
    """The entries of `counts` beyond their limits, or beyond the goal."""
    return {name: count for name, count in counts.items() if count > limits.get(name, goal)}


# ---- the code --------------------------------------------------------------------------------------------------------


def test_no_package_is_denser_than_its_limit(sizes):
    assert too_dense(sizes, DENSE) == {}


def test_all_of_the_core_is_short(sizes):
    assert sum(size.tokens for size in sizes.values()) <= max(MOST_TOKENS, TOKENS_TODAY)


def test_classes_are_at_most_three_deep():
    assert too_many(depths(core()), DEEP, DEEPEST) == {}


def test_names_of_attributes_are_not_computed():
    assert too_many(computed_names(core("autograd", "nn", "parallel")), COMPUTED_NAMES, 0) == {}


def test_the_core_has_all_packages_but_plan_and_bench(sizes):
    folders = set(sizes)
    assert {"minipar", "minipar/autograd", "minipar/parallel/pipeline"} <= folders
    assert not [folder for folder in folders if "plan" in folder or "bench" in folder]


def test_a_limit_stands_only_where_a_goal_is_missed():
    for tokens, long in DENSE.values():
        assert tokens > MOST_TOKENS_PER_LINE or long > MOST_PERCENT_LONG
    assert [name for name, depth in DEEP.items() if depth <= DEEPEST] == []
    assert [name for name, times in COMPUTED_NAMES.items() if times < 1] == []


# ---- planted texts ---------------------------------------------------------------------------------------------------

PLAIN = '''"""A file."""

# A comment says why.
def area(width: int, height: int) -> int:
    """Return the area.

    It is a product.
    """
    return width * height
'''


def test_only_code_is_measured():
    size = density(PLAIN)
    assert (size.tokens, size.code_lines, size.lines, size.long_lines) == (18, 2, 7, 0)


def test_a_dense_line_is_seen():
    dense = "a, b, c, d = [f(x) for x in y if x], (lambda z: z + 1)(2), {**e}, g(h)[i]\n"
    assert too_dense(densities({"minipar/nn/a.py": PLAIN}), {}) == {}
    assert set(too_dense(densities({"minipar/nn/a.py": PLAIN + dense}), {})) == {"minipar/nn"}
    assert set(too_dense(densities({"minipar/nn/a.py": PLAIN, "minipar/comm/a.py": dense}), {})) == {"minipar/comm"}


def test_a_long_line_is_seen_in_code_and_in_prose():
    for line in (f"a = '{'a' * 95}'\n", f"# {'a' * 99}\n", f'"""{"a" * 95}"""\n'):
        assert len(line) == 102  # 101 columns and the end of the line
        assert set(too_dense(densities({"minipar/nn/a.py": line + PLAIN}), {})) == {"minipar/nn"}
    short = f"# {'a' * 98}\n"
    assert too_dense(densities({"minipar/nn/a.py": short + PLAIN}), {}) == {}


def test_a_limit_is_for_one_package_and_one_measure():
    dense = "x = a(b)[c](d)[e](f)\n"
    assert too_dense(densities({"minipar/nn/a.py": dense}), {"minipar/nn": (20.0, 8.0)}) == {}
    assert too_dense(densities({"minipar/nn/a.py": dense}), {"minipar/nn": (17.0, 100.0)}) != {}
    assert too_dense(densities({"minipar/nn/a.py": dense}), {"minipar/comm": (20.0, 8.0)}) != {}


def test_a_deep_class_is_seen_across_files():
    base = "class A:\n    pass\nclass B(A):\n    pass\n"
    deep = "class C(base.B):\n    pass\nclass D(Generic[T], C, metaclass=M):\n    pass\n"
    found = depths({"a.py": base, "b.py": deep})
    assert found == {"a.py:A": 1, "a.py:B": 2, "b.py:C": 3, "b.py:D": 4}
    assert too_many(found, {}, DEEPEST) == {"b.py:D": 4}
    assert too_many(found, {"b.py:D": 4}, DEEPEST) == {}


def test_a_base_is_looked_for_in_the_same_file_first():
    found = depths(
        {"a.py": "class X(A):\n    pass\nclass A:\n    pass\n", "b.py": "class A(B):\n    pass\nclass B: pass\n"}
    )
    assert found["a.py:X"] == 2 and found["b.py:A"] == 2


@pytest.mark.parametrize(
    "line",
    [
        "setattr(module, name, value)",
        'setattr(module, "weight", value)',
        "getattr(module, name)",
        'getattr(module, f"stage{i}", None)',
        "vars(module).update(other)",
        "module.__dict__[name] = value",
        "object.__setattr__(self, name, value)",
    ],
)
def test_a_computed_name_is_seen(line):
    assert computed_names({"a.py": f"def f():\n    {line}\n"}) == {"a.py": 1}


def test_a_written_name_is_no_computed_one():
    assert computed_names({"a.py": 'x = getattr(model, "parts", ())\nmodel.weight = x\nvars = 1\n'}) == {}
