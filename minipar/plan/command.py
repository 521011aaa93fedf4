"""The command line with which `minipar.train` runs a plan, to copy."""

from __future__ import annotations

import shlex

from minipar.errors import check_divides
from minipar.plan.layout import PRECISIONS, Layout
from minipar.plan.model import ModelShape


def train_command(name: str, model: ModelShape, layout: Layout, length: int) -> str:
    """Return `mpirun -n N python -m minipar.train ...` with the flags of a layout. UsageError if it
    trains no such one.

    `name` is the model's, or the directory it was read from, which `--init-from` reads if flags
    cannot say its shape.
    """
    check_trains(model, layout)
    words = f"mpirun -n {layout.gpus} python -m minipar.train".split()
    words += ["--init-from", name] if needs_directory(model) else model_flags(model)
    words += ["--seq-len", str(length)]
    words += mesh_flags(layout)
    words += precision_flags(layout)
    return shlex.join(words)


def check_trains(model: ModelShape, layout: Layout) -> None:
    """Raise UsageError if minipar.train cannot cut this model so, though others can."""
    check_divides("ffn/tp", model.inner, layout.tp, "minipar.train has whole columns on each rank")


def needs_directory(model: ModelShape) -> bool:
    """Return whether no flags of minipar.train say the shape: a tied Llama, or a GPT-2 with an MLP
    of its own size.
    """
    return model.tied if model.gated else model.inner != 4 * model.hidden


def model_flags(model: ModelShape) -> list[str]:
    """Return the flags of the model's shape."""
    sizes = {
        "--layers": model.layers,
        "--hidden": model.hidden,
        "--heads": model.heads,
        "--vocab-size": model.vocab_size,
    }
    kind = "gpt2"
    if model.gated:
        kind = "llama"
        sizes |= {"--kv-heads": model.groups, "--ffn": model.inner}
    if model.experts is not None:
        kind = "mixtral"
        sizes |= {"--experts": model.experts, "--top-k": model.top_k}
    return ["--model", kind, *(word for flag, size in sizes.items() for word in (flag, str(size)))]


def mesh_flags(layout: Layout) -> list[str]:
    """Return the flags of the mesh, of what its axes share, and of the batch."""
    words = ["--dp", str(layout.dp)]
    if layout.cp > 1:
        words += [
            "--cp",
            str(layout.cp),
            "--context-parallel",
            layout.context_parallel,
            "--cp-order",
            layout.cp_order,
        ]
    if layout.ep > 1:
        words += ["--ep", str(layout.ep)]
    if layout.tp > 1:
        words += ["--tp", str(layout.tp)]
    if layout.sequence_parallel:
        words += ["--sequence-parallel"]
    if layout.pp > 1:
        words += ["--pp", str(layout.pp), "--schedule", layout.schedule]
    if layout.virtual_stages > 1:
        words += ["--virtual-stages", str(layout.virtual_stages)]
    words += ["--zero-stage", str(layout.zero)]
    if layout.zero_replicas > 1:
        words += ["--zero-replicas", str(layout.zero_replicas)]
    samples = layout.dp * layout.microbatch * layout.microbatches
    return [*words, "--global-batch", str(samples), "--microbatches", str(layout.microbatches)]


def precision_flags(layout: Layout) -> list[str]:
    """Return the flags of the dtypes, and of what is computed again in backward."""
    words = ["--dtype", "bf16"]
    if layout.precision == PRECISIONS["fp16"]:
        words = "--dtype fp16 --gradients fp16 --reduce-dtype fp16".split()
    # Both flash attention and selective recomputation compute the scores once more in backward.
    again = layout.attention == "flash" or layout.recompute == "selective"
    words += ["--attention", "blockwise" if again else "full"]
    return [*words, "--recompute", "full" if layout.recompute == "full" else "none"]
