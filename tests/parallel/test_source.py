"""Claims about the code of the strategies: what they set on a model, and that all ranks issue the same collectives."""

import ast
import re
from pathlib import Path

import pytest

from minipar.parallel import SET_BY_STRATEGIES

FOLDER = Path(__file__).parents[2] / "minipar" / "parallel"
FILES = sorted(FOLDER.rglob("*.py"))
COLLECTIVES = {
    "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "barrier",
    "all_gather_bytes", "gather_bytes", "agree", "row", "levels",
}  # fmt: skip
OWN = ("self", "self.optimizer")


def targets(node):
    """Yield the attributes that a statement sets."""
    given = node.targets if isinstance(node, ast.Assign) else [node.target]
    while given:
        target = given.pop()
        if isinstance(target, ast.Tuple | ast.List):
            given += target.elts
        elif isinstance(target, ast.Attribute):
            yield target


def set_on_others(source):
    """Return the names of the attributes that code sets on objects that are not its own."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
            names |= {target.attr for target in targets(node) if ast.unparse(target.value) not in OWN}
    return names


def added_to_others(source):
    """Return the names of the lists, of objects that are not its own, to which code adds."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in ("append", "insert", "extend"):
            given = node.value
            if isinstance(given, ast.Attribute) and ast.unparse(given.value) not in OWN:
                names.add(given.attr)
    return names


def set_on_itself(source):
    """Return the names of the attributes that the classes of a file set on their objects."""
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Assign | ast.AnnAssign)]
    return {target.attr for node in found for target in targets(node) if ast.unparse(target.value) == "self"}


def collectives_under_a_rank(source):
    """Return the collectives that are called inside an `if` whose condition names a rank."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.If | ast.IfExp | ast.While):
            continue
        named = {each.attr for each in ast.walk(node.test) if isinstance(each, ast.Attribute)}
        named |= {each.id for each in ast.walk(node.test) if isinstance(each, ast.Name)}
        if named.isdisjoint({"rank", "is_own", "coordinates"}):
            continue
        body = [node.body, node.orelse] if isinstance(node, ast.IfExp) else [*node.body, *node.orelse]
        for call in (each for part in body for each in ast.walk(part) if isinstance(each, ast.Call)):
            if isinstance(call.func, ast.Attribute) and call.func.attr in COLLECTIVES:
                found.append(call.func.attr)
    return found


def test_what_strategies_set_on_a_model_is_what_the_list_says():
    found = set().union(*(set_on_others(path.read_text()) for path in FILES))
    of_models = set().union(*(set_on_itself(path.read_text()) for path in (FOLDER.parent / "nn").glob("*.py")))
    found |= of_models & set().union(*(added_to_others(path.read_text()) for path in FILES))
    assert found == {name for names in SET_BY_STRATEGIES.values() for name in names}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(FOLDER)))
def test_no_collective_is_called_on_some_ranks_only(path):
    assert collectives_under_a_rank(path.read_text()) == []


def test_an_attribute_that_a_strategy_sets_is_seen():
    assert set_on_others("p.owner = 1") == {"owner"}
    assert set_on_others("a, b.c = x\nself.d.e += 1\nself.f = 2") == {"c", "e"}


def test_a_list_that_a_strategy_adds_to_is_seen():
    assert added_to_others("p.owners.append(1)\nself.works.append(2)\nlist.append(3)") == {"owners"}
    assert set_on_itself("class A:\n    def f(self):\n        self.a = p.b = 1\n        self.c: int = 2") == {"a", "c"}


def test_a_collective_of_one_rank_is_seen():
    assert collectives_under_a_rank("if comm.rank == 0:\n    comm.all_reduce(x)") == ["all_reduce"]
    assert collectives_under_a_rank("y = comm.all_gather(x) if rank else x") == ["all_gather"]
    assert collectives_under_a_rank("if comm.size > 1:\n    comm.all_reduce(x)") == []


# ---- data parallelism ------------------------------------------------------------------------------------------------

FAMILY = {  # the files that README's reading path opens for a strategy, and the most lines of them together
    "ddp": (("ddp", "buckets", "loss"), 330),
    "zero": (("zero", "buckets", "shards"), 420),
    "fsdp": (("fsdp", "shards"), 440),  # a reader has opened buckets.py for stage 2
}


@pytest.mark.parametrize("name", FAMILY)
def test_a_data_parallel_strategy_is_read_in_one_sitting(name):
    files, most = FAMILY[name]
    assert sum(len((FOLDER / f"{file}.py").read_text().splitlines()) for file in files) <= most


@pytest.mark.parametrize("name", FAMILY)
def test_a_strategy_needs_no_other_file_that_knows_buckets(name):
    """So no line is saved by moving it: a strategy imports what handles buckets from the files of its reading path."""
    opened = {*FAMILY[name][0], *FAMILY["ddp"][0]}
    source = (FOLDER / f"{name}.py").read_text()
    used = re.findall(r"^from minipar\.parallel\.(\w+) import", source, flags=re.MULTILINE)
    knows_buckets = {path.stem for path in FILES if re.search(r"import .*\bBucket\b", path.read_text())}
    assert knows_buckets.intersection(used) <= opened


def test_data_parallel_strategies_have_no_base_class():
    """But ZeroStage2, which extends stage 1, and the unit of FSDP, which is a bucket; each calls super() once."""
    bases, supers = {}, 0
    for name in FAMILY:
        tree = ast.parse((FOLDER / f"{name}.py").read_text())
        bases |= {
            node.name: [base.id for base in node.bases] for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
        }
        supers += sum(isinstance(node, ast.Name) and node.id == "super" for node in ast.walk(tree))
    assert {name: base for name, base in bases.items() if base} == {"ZeroStage2": ["ZeroStage1"], "Unit": ["Bucket"]}
    assert supers == 2


@pytest.mark.parametrize("name", [*FAMILY, "zero_optimizer"])
def test_refusals_live_in_rooms_of_their_own(name):
    tree = ast.parse((FOLDER / f"{name}.py").read_text())
    assert not any(isinstance(node, ast.Raise) for node in ast.walk(tree))
