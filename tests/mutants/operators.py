"""Operators that make mutants of any code: each finds the places of a syntax tree where it can put a mistake.

A mistake replaces one span of the text. Not changed are strings, f-strings and with them messages, docstrings,
annotations, `__repr__`, the arguments of exceptions, code under `if TYPE_CHECKING`, functions that import torch (the
environment of `make test` lacks it; `make reference` tests them), the keywords of NOT_DROPPED, and the number in
`reshape(-1)`. Of drawings, sizes, places and colors are a matter of taste: neither the keywords of TASTE nor fractions
in visualize/.
"""

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

COMPARE = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}
COMPARE |= {"is": "is not", "is not": "is", "in": "not in", "not in": "in"}
ARITHMETIC = {"+": "-", "-": "+", "*": "/", "/": "*", "//": "*", "%": "//", "**": "*", "|": "&", "&": "|"}
ARITHMETIC |= {"<<": ">>", ">>": "<<"}
# Texts of help, and declarations that a right program never notices.
NOT_DROPPED = {"help", "metavar", "description", "epilog", "strict", "frozen", "name", "stacklevel"}
TASTE = set(
    "alpha arrowprops aspect bbox_to_anchor borderaxespad borderpad boxstyle clip_on color columnspacing dpi ecolor "
    "edgecolor edgecolors elinewidth facecolor facecolors figsize fontsize fontweight foreground frameon ha "
    "handlelength hatch labelsize linespacing linestyle linewidth linewidths loc marker markeredgewidth markersize "
    "ncols pad path_effects rotation shrink shrinkA shrinkB textcoords va width_ratios xytext zorder".split()
)
COMPARE_SIGN = re.compile(r"\bis\s+not\b|\bnot\s+in\b|\bis\b|\bin\b|[<>=!]=|[<>]")
ARITHMETIC_SIGN = re.compile(r"\*\*|//|<<|>>|[-+*/%|&]")


@dataclass(frozen=True)
class Change:
    """One mistake: in `file`, `new` replaces the text from `start` to `end`.

    `lines` are the numbers of the lines of which a test executes one if it can notice the mistake.
    """

    file: str
    operator: str
    start: int
    end: int
    new: str
    lines: tuple[int, ...]

    def apply(self, text: str) -> str:
        """Return the file's text with the mistake."""
        return text[: self.start] + self.new + text[self.end :]


@dataclass(frozen=True)
class Place:
    """A node of the syntax tree that an operator may change, and the node above it."""

    node: ast.AST
    parent: ast.AST
    lines: tuple[int, ...]


class Text:
    """A file's text, and where in it a node of its syntax tree stands."""

    def __init__(self, text: str):
        self.text = text
        self.rows = text.splitlines(keepends=True)
        self.offsets = [0]
        for row in self.rows:
            self.offsets.append(self.offsets[-1] + len(row))

    def at(self, line: int, column: int) -> int:
        """Return the offset of a line and a column; the syntax tree counts columns in bytes."""
        characters = self.rows[line - 1].encode()[:column].decode()
        return self.offsets[line - 1] + len(characters)

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Return where a node begins and ends."""
        return self.at(node.lineno, node.col_offset), self.at(node.end_lineno, node.end_col_offset)

    def of(self, node: ast.AST) -> str:
        """Return a node's text."""
        start, end = self.span(node)
        return self.text[start:end]

    def sign_between(self, left: ast.AST, right: ast.AST, sign: re.Pattern) -> tuple[int, int, str]:
        """Return the span of the sign between two nodes, and the sign with single spaces."""
        start, end = self.span(left)[1], self.span(right)[0]
        found = sign.search(self.text, start, end)
        if found is None:
            return start, start, ""
        return *found.span(), " ".join(found.group().split())


Spans = Iterator[tuple[int, int, str]]  # where the mistake begins and ends, and its text


def compare(place: Place, text: Text) -> Spans:
    """Replace a comparison by the one that differs for equal values, or by its opposite: `<` by `<=`, `==` by `!=`."""
    if isinstance(place.node, ast.Compare):
        operands = [place.node.left, *place.node.comparators]
        for left, right in zip(operands, operands[1:], strict=False):
            start, end, sign = text.sign_between(left, right, COMPARE_SIGN)
            if sign in COMPARE:
                yield start, end, COMPARE[sign]


def arithmetic(place: Place, text: Text) -> Spans:
    """Replace an operation by its opposite: `+` by `-`, `*` by `/`, `-x` by `x`."""
    node = place.node
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield *text.span(node), text.of(node.operand)
        return
    if isinstance(node, ast.BinOp):
        left, right = node.left, node.right
    elif isinstance(node, ast.AugAssign):
        left, right = node.target, node.value
    else:
        return
    if is_text(left) or is_text(right):
        return
    start, end, sign = text.sign_between(left, right, ARITHMETIC_SIGN)
    if sign in ARITHMETIC:
        yield start, end, ARITHMETIC[sign]


def constant(place: Place, text: Text) -> Spans:
    """Replace True by False, 3 by 4, and 0.5 by 1.0."""
    if not isinstance(place.parent, ast.arguments):
        yield from another_constant(place.node, text)


def default(place: Place, text: Text) -> Spans:
    """Replace the default value of an argument as `constant` replaces a value."""
    if isinstance(place.parent, ast.arguments):
        yield from another_constant(place.node, text)


def another_constant(node: ast.AST, text: Text) -> Spans:
    """Replace a truth value or a number."""
    if not isinstance(node, ast.Constant):
        return
    if isinstance(node.value, bool):
        yield *text.span(node), str(not node.value)
    elif isinstance(node.value, int):
        yield *text.span(node), str(node.value + 1)
    elif isinstance(node.value, float):
        yield *text.span(node), repr(2 * node.value) if node.value else "1.0"


def boolean(place: Place, text: Text) -> Spans:
    """Replace `and` by `or`, and `or` by `and`."""
    if isinstance(place.node, ast.BoolOp):
        sign, other = ("and", "or") if isinstance(place.node.op, ast.And) else ("or", "and")
        operands = place.node.values
        for left, right in zip(operands, operands[1:], strict=False):
            start, end, found = text.sign_between(left, right, re.compile(rf"\b{sign}\b"))
            if found:
                yield start, end, other


def negated(place: Place, text: Text) -> Spans:
    """Replace a condition by its opposite."""
    node = place.node
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield *text.span(node), text.of(node.operand)
    conditions = []
    if isinstance(node, ast.If | ast.While | ast.IfExp | ast.Assert):
        conditions = [node.test]
    elif isinstance(node, ast.comprehension):
        conditions = node.ifs
    for condition in conditions:
        if not (isinstance(condition, ast.UnaryOp) and isinstance(condition.op, ast.Not)):
            yield *text.span(condition), f"not ({text.of(condition)})"


def dropped_keyword(place: Place, text: Text) -> Spans:
    """Drop one of a call's keyword arguments, with its comma."""
    if isinstance(place.node, ast.Call) and not called(place.node).endswith("Error"):
        for keyword in place.node.keywords:
            if keyword.arg is None or keyword.arg in NOT_DROPPED | TASTE:
                continue
            start, end = text.span(keyword)
            after = re.compile(r"\s*,[ \t]*").match(text.text, end)
            before = text.text[:start].rstrip()
            if before.endswith(","):
                yield len(before) - 1, end, ""
            elif after:
                yield start, after.end(), ""
            else:
                yield start, end, ""


def deleted_statement(place: Place, text: Text) -> Spans:
    """Put `pass` in the place of a call, an assignment of what exists already, a `raise`, or a way out."""
    if is_deletable(place.node):
        yield *text.span(place.node), "pass"


def is_deletable(node: ast.AST) -> bool:
    """Say whether Python can go on without a statement, where a missing name would end every test."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call)
    if isinstance(node, ast.Return):
        return node.value is not None
    if isinstance(node, ast.Assign):
        return all(exists_already(target, node.value) for target in node.targets)
    return isinstance(node, ast.AugAssign | ast.Raise | ast.Continue | ast.Break | ast.Delete)


def exists_already(target: ast.AST, value: ast.AST) -> bool:
    """Say whether a target is part of an object, or a name from which its new value is computed."""
    if isinstance(target, ast.Name):
        return any(isinstance(node, ast.Name) and node.id == target.id for node in ast.walk(value))
    return isinstance(target, ast.Attribute | ast.Subscript)


def is_text(node: ast.AST) -> bool:
    """Say whether a node is a string."""
    return isinstance(node, ast.JoinedStr) or isinstance(node, ast.Constant) and isinstance(node.value, str)


OPERATORS = (compare, arithmetic, constant, default, boolean, negated, dropped_keyword, deleted_statement)


def changes(file: str, source: str) -> list[Change]:
    """Return every mistake that the operators can put into a file."""
    text = Text(source)
    found = []
    for place in places(ast.parse(source)):
        for operator in OPERATORS:
            for start, end, new in operator(place, text):
                if not (operator is constant and is_taste(file, source[start:end])):
                    found.append(Change(file, operator.__name__, start, end, new, place.lines))
    return found


def is_taste(file: str, text: str) -> bool:
    """Say whether a constant is a fraction of a drawing: a size or a place that only the eye judges."""
    return file.startswith("visualize/") and "." in text


def is_other_code(change: Change, source: str) -> bool:
    """Say whether the file with the mistake is Python, and other Python than before."""
    try:
        return structure(change.apply(source)) != structure_of_code(source)
    except SyntaxError:
        return False


def structure(source: str) -> str:
    """Return the syntax tree of a source as text, without places."""
    return ast.dump(ast.parse(source))


structure_of_code = cache(structure)  # of a whole file, into which many mistakes are put


# ---- where operators may change the code -----------------------------------------------------------------------------

FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


def places(tree: ast.Module) -> Iterator[Place]:
    """Walk through the nodes that an operator may change."""
    bodies = [node for node in ast.walk(tree) if isinstance(node, FUNCTIONS)]
    in_functions = {line for function in bodies for line in lines_of(function.body)}
    # An import executes these once for all tests: what runs with them is any function of the file.
    yield from places_below(tree, tuple(sorted(in_functions)), inside=False)


def places_below(node: ast.AST, lines: tuple[int, ...], inside: bool) -> Iterator[Place]:
    """Walk through the nodes below one; `lines` are those of the statement, `inside` says that it is in a function."""
    for name, child in children(node):
        if is_left_alone(node, name, child):
            continue
        if is_open_size(node, child):
            yield Place(child, node, lines)  # its sign counts
            continue
        child_lines = lines
        child_inside = inside
        if isinstance(child, FUNCTIONS):
            child_lines = lines_of(child.body)
        elif isinstance(child, ast.stmt) and inside:
            child_lines = lines_of_statement(child)
        if name == "body" and isinstance(node, FUNCTIONS):
            child_inside = True
            child_lines = lines_of_statement(child)
        yield Place(child, node, child_lines)
        yield from places_below(child, child_lines, child_inside)


def children(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Return each node directly below one, with the name of its field."""
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield name, child


def is_left_alone(node: ast.AST, name: str, child: ast.AST) -> bool:
    """Say whether a child is a string, an annotation, the argument of an exception, or code that never runs."""
    if name in ("annotation", "returns") or is_text(child) or isinstance(child, ast.Expr) and is_text(child.value):
        return True
    if isinstance(node, ast.Raise):
        return True
    if isinstance(node, ast.Call) and name in ("args", "keywords") and called(node).endswith("Error"):
        return True
    if isinstance(node, ast.keyword) and node.arg in NOT_DROPPED | TASTE:
        return True
    if isinstance(child, FUNCTIONS) and (child.name == "__repr__" or imports_torch(child)):
        return True
    return isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"


def imports_torch(function: ast.AST) -> bool:
    """Say whether a function imports torch."""
    imports = (node for node in ast.walk(function) if isinstance(node, ast.Import))
    return any(alias.name == "torch" for node in imports for alias in node.names)


def is_open_size(node: ast.AST, child: ast.AST) -> bool:
    """Say whether a child is a -1 that leaves a size of `reshape` open. NumPy reads every negative number as it."""
    is_negative = isinstance(child, ast.UnaryOp) and isinstance(child.op, ast.USub)
    return is_negative and isinstance(node, ast.Call) and called(node) == "reshape"


def called(call: ast.Call) -> str:
    """Return the last part of the name of what is called."""
    return ast.unparse(call.func).rpartition(".")[2]


def lines_of(statements: Sequence[ast.stmt]) -> tuple[int, ...]:
    """Return the numbers of the lines of some statements."""
    return tuple(range(statements[0].lineno, statements[-1].end_lineno + 1))


def lines_of_statement(statement: ast.stmt) -> tuple[int, ...]:
    """Return the numbers of a statement's lines; of one that has others below it, those of its head."""
    below = [child.lineno for _, child in children(statement) if isinstance(child, ast.stmt)]
    last = max(statement.lineno, min(below) - 1) if below else statement.end_lineno
    return tuple(range(statement.lineno, last + 1))
