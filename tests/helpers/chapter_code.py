"""Code of a chapter's script, to run single functions without the rest of the chapter."""

import ast
import threading

from launcher import ROOT

PARSING = threading.Lock()  # ranks are threads, and Python 3.11's parser may fail in two at once


def script_of(chapter):
    """Return the text of the chapter with this number, such as "09", or of a file, such as "more/muon"."""
    (path,) = (ROOT / "chapters").glob(f"{chapter}.py" if "/" in chapter else f"{chapter}_*.py")
    return path.read_text(encoding="utf-8")


def run_functions(chapter, names, namespace):
    """Define these functions of a chapter in a namespace, which must have what they use."""
    with PARSING:
        chosen = [node for node in ast.parse(script_of(chapter)).body if getattr(node, "name", None) in names]
        assert len(chosen) == len(names), "a function is missing, or defined twice"
        code = compile(ast.Module(chosen, []), f"chapter {chapter}", "exec")
    exec(code, namespace)
