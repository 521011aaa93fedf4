"""The ladder of examples: each script beside the one before it. This program writes the differences into README.md."""

from difflib import unified_diff
from pathlib import Path

HERE = Path(__file__).parent
README = HERE / "README.md"
BEGIN, END = "<!-- written by ladder.py -->\n", "<!-- end -->\n"
# The script before, the script, its ranks, and what changes.
LADDER = (
    ("serial", "ddp", 4, "A wrapper gives the loss and the parameters, and each rank takes its samples."),
    ("ddp", "zero", 4, "The wrapper changes."),
    ("zero", "fsdp", 4, "The wrapper changes."),
    ("serial", "tensor", 4, "The model is split in place. Every rank has the whole batch."),
    ("tensor", "sequence", 4, "An argument is added."),
    ("serial", "pipeline", 2, "The model is cut into two stages, and one call runs forward and backward."),
    ("pipeline", "three_d", 8, "The mesh has three axes. Layers are split over tp, samples and state over dp."),
    ("ddp", "context", 4, "Each rank takes a part of every sample's tokens in place of some samples."),
)


def difference(before: str, after: str) -> str:
    """Return the lines that two scripts do not share, but for their docstrings, each with - or + in front."""
    old, new = ((HERE / f"{name}.py").read_text(encoding="utf-8").splitlines()[1:] for name in (before, after))
    lines = list(unified_diff(old, new, n=0, lineterm=""))[2:]
    return "\n".join(line for line in lines if line[1:].strip() and not line.startswith("@@"))


def with_differences(document: str) -> str:
    """Return README's text with the differences as they are."""
    head, tail = document.split(BEGIN)[0], document.split(END)[1]
    parts = []
    for before, after, ranks, change in LADDER:
        title = f"**[{before}.py]({before}.py) → [{after}.py]({after}.py)**, `mpirun -n {ranks}`.\n{change}"
        parts.append(f"{title}\n\n```diff\n{difference(before, after)}\n```\n\n")
    return f"{head}{BEGIN}\n{''.join(parts)}{END}{tail}"


if __name__ == "__main__":
    README.write_text(with_differences(README.read_text(encoding="utf-8")), encoding="utf-8")
