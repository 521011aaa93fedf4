"""Questions to the planner, and its answers as text.

`PYTHONPATH=tests/helpers python -m plan_cases` writes tests/plan/recorded/answers again: look at the difference before
it is committed.
"""

import contextlib
import io
import json
from pathlib import Path
from typing import Any

from minipar.plan.__main__ import main

RECORDED = Path(__file__).parents[1] / "plan" / "recorded" / "answers"
QUESTIONS = {
    "gpt2": "--model gpt2 --gpus 8 --gpu a100 --global-batch 16 --seq-len 1024 --top 3",
    "large": "--model llama-3-70b --gpus 64 --gpu h100 --global-batch 128 --seq-len 8192 --top 2 --tp 8",
    "zero": "--model llama-7b --gpus 16 --gpu a100 --global-batch 64 --seq-len 4096 --top 3 --pp 1 --zero-stage 2,3",
    "replicas": "--model llama-3-8b --gpus 32 --gpu h200 --global-batch 64 --seq-len 8192 --top 2 --zero-stage 1,3 "
    "--zero-replicas 1,4 --tp 1 --pp 1 --recompute full --gpus-per-node 4",
    "context": "--model llama-3-8b --gpus 16 --gpu h100 --global-batch 16 --seq-len 32768 --top 2 --cp 2,4 --tp 4",
    "gathered": "--model llama-3-8b --gpus 32 --gpu h100 --global-batch 32 --seq-len 32768 --top 2 --cp 2,4 "
    "--context-parallel all-gather --cp-order contiguous --sequence-parallel off --microbatch 1",
    "ulysses": "--model llama-3-8b --gpus 16 --gpu h100 --global-batch 16 --seq-len 16384 --top 2 --cp 2 "
    "--context-parallel ulysses --program minipar --tp 2 --microbatch 1",
    "experts": "--model mixtral-8x7b --gpus 32 --gpu h100 --global-batch 64 --seq-len 4096 --top 3 --ep 1,4,8 --tp 2",
    "experts_over_hosts": "--model mixtral-8x7b --gpus 32 --gpu h100 --global-batch 64 --seq-len 4096 --top 2 --ep 8 "
    "--gpus-per-node 4 --pp 2 --schedule 1f1b",
    "older": "--model gpt2-xl --gpus 8 --gpu v100 --global-batch 32 --seq-len 1024 --top 2 --gpus-per-node 4 --pp 4",
    "gpipe": "--model gpt2-xl --gpus 8 --gpu v100 --global-batch 32 --seq-len 1024 --top 1 --pp 2 --schedule gpipe "
    "--precision bf16 --attention flash --dp 4",
    "split": "--model llama-7b --gpus 16 --gpu h100 --global-batch 64 --seq-len 4096 --top 2 --pp 4 --schedule "
    "zb-h1 --program minipar --recompute none",
    "megatron_2021": "--model megatron-18b --gpus 256 --gpu a100 --global-batch 1024 --seq-len 2048 --top 2 "
    "--program megatron-2021 --tp 8 --pp 2",
    "nanotron": "--model llama-3-8b --gpus 64 --gpu h100 --global-batch 128 --seq-len 4096 --top 2 --program nanotron "
    "--tp 4 --pp 1 --microbatch 1",
    "llama_3": "--model llama-3-405b --gpus 512 --gpu h100 --global-batch 256 --seq-len 8192 --top 1 --program llama-3 "
    "--tp 8 --pp 16 --microbatch 1",
    "deepspeed": "--model megatron-18b --gpus 64 --gpu a100 --global-batch 128 --seq-len 2048 --top 2 --tp 1 --pp 1 "
    "--program deepspeed-2021 --zero-stage 3",
    "one": "--model gpt2-medium --gpus 1 --program minipar --gpu a100 --global-batch 8 --seq-len 512",
    "too_large": "--model llama-3-70b --gpus 8 --gpu a100 --global-batch 8 --seq-len 8192",
}
DIGITS = 7  # that are compared: the last bits of a sum do not count


def rounded(value: Any) -> Any:
    """Round the fractions in a value read from JSON."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def json_lines(value: dict[str, Any]) -> list[str]:
    """Write the JSON of a report: a line for each key, or for each part of its list."""
    lines = []
    for key, each in rounded(value).items():
        parts = each if isinstance(each, list) else [each]
        lines += [f"{key}: {json.dumps(part)}" for part in parts]
    return lines


def answer(question: str) -> str:
    """Return the exit code, what is printed, and the JSON, of which a plan and each part have a line."""
    printed, errors, output = io.StringIO(), io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
        code = main(question.split())
    lines = [f"exit code {code}", printed.getvalue().rstrip(), errors.getvalue().rstrip()]
    if code == 0:
        with contextlib.redirect_stdout(output):
            main([*question.split(), "--json", "-"])
        lines += json_lines(json.loads(output.getvalue()))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    RECORDED.mkdir(exist_ok=True)
    for name, question in QUESTIONS.items():
        (RECORDED / f"{name}.txt").write_text(answer(question), encoding="utf-8")
