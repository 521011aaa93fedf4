"""The command line with which `minipar.train` runs a plan, to copy."""

from shlex import quote

from minipar.errors import check_divides
from minipar.plan.layout import PRECISIONS, Layout
from minipar.plan.model import ModelShape


def train_command(name: str, model: ModelShape, layout: Layout, length: int) -> str:
    """Return `mpirun -n N python -m minipar.train ...` with the flags of a layout. UsageError if it
    trains no such one.

    `name` is the model's, or the directory it was read from, which `--init-from` reads if flags
    cannot say its shape.
    """
    columns = "ffn/tp" if layout.etp is None else "ffn/etp"
    why = "minipar.train has whole columns on each rank"
    check_divides(columns, model.inner, layout.expert_tp, why)
    if layout.sequence_parallel:
        why = "minipar.train has as many tokens on each rank of sequence parallelism"
        check_divides("tokens/tp", length // layout.cp, layout.tp, why)
    shape = f"--init-from {quote(name)}" if needs_directory(model) else model_flags(model)
    command = f"mpirun -n {layout.gpus} python -m minipar.train {shape} --seq-len {length}"
    return f"{command} {mesh_flags(layout)} {precision_flags(layout)}"


def needs_directory(model: ModelShape) -> bool:
    """Return whether no flags of minipar.train say the shape: a tied Llama, or a GPT-2 with an MLP
    of its own size.
    """
    return model.tied if model.gated else model.inner != 4 * model.hidden


def model_flags(model: ModelShape) -> str:
    """Return the flags of the model's shape."""
    kind = "gpt2"
    more = ""
    if model.gated:
        kind = "llama"
        more = f" --kv-heads {model.groups} --ffn {model.inner}"
    if model.experts is not None:
        kind = "mixtral"
        more = f"{more} --experts {model.experts} --top-k {model.top_k}"
    sizes = f"--layers {model.layers} --hidden {model.hidden} --heads {model.heads}"
    return f"--model {kind} {sizes} --vocab-size {model.vocab_size}{more}"


def mesh_flags(layout: Layout) -> str:
    """Return the flags of the mesh, of what its axes share, and of the batch."""
    flags = [f"--dp {layout.dp}"]
    if layout.cp > 1:
        flags.append(f"--cp {layout.cp} --context-parallel {layout.context_parallel}")
        flags.append(f"--cp-order {layout.cp_order}")
    if layout.ep > 1:
        flags.append(f"--ep {layout.ep}")
    if layout.tp > 1:
        flags.append(f"--tp {layout.tp}")
    if layout.expert_tp < layout.tp:
        flags.append(f"--etp {layout.etp}")
    if layout.sequence_parallel:
        flags.append("--sequence-parallel")
    if layout.pp > 1:
        flags.append(f"--pp {layout.pp} --schedule {layout.schedule}")
    if layout.virtual_stages > 1:
        flags.append(f"--virtual-stages {layout.virtual_stages}")
    flags.append(f"--zero-stage {layout.zero}")
    if layout.zero_replicas > 1:
        flags.append(f"--zero-replicas {layout.zero_replicas}")
    flags.append(f"--global-batch {layout.samples} --microbatches {layout.microbatches}")
    return " ".join(flags)


def precision_flags(layout: Layout) -> str:
    """Return the flags of the dtypes, and of what is computed again in backward."""
    dtype = "bf16"
    if layout.precision == PRECISIONS["fp16"]:
        dtype = "fp16 --gradients fp16 --reduce-dtype fp16"
    # Both flash attention and selective recomputation compute the scores once more in backward.
    again = layout.attention == "flash" or layout.recompute == "selective"
    attention = "blockwise" if again else "full"
    recompute = "full" if layout.recompute == "full" else "none"
    return f"--dtype {dtype} --attention {attention} --recompute {recompute}"
