"""Code of a chapter's script, to run a section's cells or single functions without the rest of the chapter."""

import ast
import re

from launcher import ROOT


def script_of(chapter):
    """Return the text of the chapter with this number, such as "09"."""
    (path,) = (ROOT / "chapters").glob(f"{chapter}_*.py")
    return path.read_text(encoding="utf-8")


def run_functions(chapter, names, namespace):
    """Define these functions of a chapter in a namespace, which must have what they use."""
    chosen = [node for node in ast.parse(script_of(chapter)).body if getattr(node, "name", None) in names]
    assert len(chosen) == len(names), "a function is missing, or defined twice"
    exec(compile(ast.Module(chosen, []), f"chapter {chapter}", "exec"), namespace)


def run_section(chapter, number, namespace):
    """Run the code cells of a section, such as "9.11", in a namespace, which must have what they use."""
    (text,) = re.findall(rf"^# ## {re.escape(number)} .*?(?=^# ## |\Z)", script_of(chapter), re.MULTILINE | re.DOTALL)
    exec(compile(text, f"section {number}", "exec"), namespace)  # markdown is comments there
