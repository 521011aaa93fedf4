"""Short trainings, and all that they print and measure as text.

`PYTHONPATH=tests/helpers python -m run_cases` writes tests/train/recorded/runs.txt again: look at the difference before
it is committed.
"""

import contextlib
import io
import json
import re
import tempfile
from pathlib import Path

from minipar.comm import run_local
from minipar.train.__main__ import run_job
from minipar.train.config import parse

RECORDED = Path(__file__).parents[1] / "train" / "recorded" / "runs.txt"
TEXT = b"It was a bright cold day in April, and the clocks were striking thirteen. " * 40
TINY = "--layers 2 --hidden 16 --heads 2 --seq-len 8 --global-batch 8 --dtype float64 --data text --metrics metrics"
RUNS = {
    "one device": (1, "--steps 12 --eval-every 5 --warmup-steps 3 --lr-schedule cosine --weight-decay 0.1 --verify"),
    "accumulation": (1, "--steps 3 --microbatches 4 --order sequential --seed 5 --clip-grad 0.5 --export model"),
    "data parallelism": (2, "--steps 3 --dp 2 --verify --record record"),
    "sharded": (4, "--steps 3 --dp 4 --zero-stage 3 --microbatches 2 --memory memory"),
    "layout": (4, "--steps 2 --tp 2 --pp 2 --microbatches 1 --schedule gpipe --trace trace --clock model"),
    "context": (2, "--steps 2 --cp 2 --model llama --kv-heads 1 --eval-every 1"),
    "experts": (2, "--steps 2 --dp 2 --ep 2 --model mixtral --experts 4 --top-k 2 --aux-loss 0.01"),
    "in two bytes": (2, "--steps 3 --dp 2 --dtype fp16 --skip-nonfinite"),
}
CHANGING = re.compile(r"[\d,]+ tokens/s(  \d+:\d+:\d+ left)?")  # from run to run, or machine to machine


def as_text(name: str) -> str:
    """Run a training on threads; write its lines, the steps of its metrics, and the files that it leaves."""
    ranks, flags = RUNS[name]
    printed = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), contextlib.redirect_stdout(printed):
        Path("text").write_bytes(TEXT)
        codes = run_local(ranks, lambda comm: run_job(parse([*TINY.split(), *flags.split()], comm.rank), comm))
        lines = [f"== {name}: {codes}"]
        for line in printed.getvalue().splitlines():
            if not ("fp16" in flags and line.startswith("step ")):
                lines.append(CHANGING.sub("...", line))
        for row in map(json.loads, Path("metrics").read_text().splitlines()):
            kept = {key: value for key, value in row.items() if key not in ("seconds", "tokens_per_second")}
            digits = 3 if "fp16" in flags else 8
            lines.append(" ".join(f"{key} {value:.{digits}g}" for key, value in kept.items()))
        lines.append(" ".join(sorted(str(path) for path in Path().rglob("*") if path.is_file())))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    RECORDED.write_text("".join(as_text(name) for name in RUNS), encoding="utf-8")
