"""The command line of `python -m minipar.train`: one argument for each flag, and the rules that flags must keep."""

import argparse
from argparse import Namespace
from collections.abc import Sequence
from functools import partial

from minipar.cli import UsageParser
from minipar.comm.mesh import mesh_shape
from minipar.errors import UsageError, check_divides
from minipar.more.context.token_order import METHODS
from minipar.more.experts.mixtral import MixtralConfig
from minipar.more.llama import LlamaConfig
from minipar.nn.gpt import GPTConfig, TransformerConfig
from minipar.parallel.pipeline.schedules import SCHEDULES
from minipar.train.checkpoint import newest, read_run
from minipar.train.pretrained import load_config
from minipar.train.tree_trainer import check_tree

MODELS = ("gpt2", "llama", "mixtral")
SIZES = {"layers": "n_layer", "hidden": "n_embd", "heads": "n_head", "vocab_size": "vocab_size"}
DTYPES = ("float64", "float32", "bfloat16", "float16")
# A run that is resumed takes these from its checkpoint, unless they are given again. Its layout is free.
KEPT = (
    "model", *SIZES, "seq_len", "dropout", "data", "order", "global_batch", "eval_every", "steps", "lr", "lr_schedule",
    "warmup_steps", "betas", "weight_decay", "clip_grad", "seed", "dtype", "reduction",
)  # fmt: skip


def count(text: str) -> int:
    """Convert to a whole number of at least 1."""
    number = int(text)
    if number < 1:
        raise ValueError
    return number


# fmt: off


def make_parser(prints: bool) -> UsageParser:
    """Make the parser. Only the rank that `prints` shows `--help`."""
    parser = UsageParser(
        prog="mpirun -n N python -m minipar.train",
        usage="%(prog)s [flags]",
        prints=prints,
        description="Train a GPT, a Llama or a Mixtral on N ranks. The sizes of the mesh multiply to N.",
        formatter_class=partial(argparse.HelpFormatter, max_help_position=34, width=118),
    )
    add = parser.add_argument_group("mesh").add_argument
    add("--dp", type=count,
        help="data-parallel replicas [what the other axes leave]")
    add("--tp", type=count, default=1,
        help="tensor-parallel ranks, which divide the heads [1]")
    add("--pp", type=count, default=1,
        help="pipeline ranks [1]")
    add("--cp", type=count, default=1,
        help="context-parallel ranks, which share each sample's tokens [1]")
    add("--ep", type=count, default=1,
        help="ranks of dp x cp that share a Mixtral's experts [1]")
    add("--sequence-parallel", action="store_true",
        help="norms and residuals work on 1/tp of the tokens")
    add("--context-parallel", default="ring", choices=METHODS,
        help="how attention sees all tokens [ring]")
    add("--zero-stage", type=int, default=0, choices=range(4),
        help="dp shards optimizer, gradients, parameters [0]")
    add("--zero-replicas", type=count, default=1,
        help="shard within N groups of ranks (HSDP) [1]")
    add("--sync-every-microbatch", action="store_true",
        help="gradients stay sharded between microbatches")
    add("--schedule", default="1f1b", choices=SCHEDULES,
        help=", ".join(SCHEDULES))
    add("--virtual-stages", type=count,
        help="stages per rank of interleaved-1f1b [2]")
    add = parser.add_argument_group("model").add_argument
    add("--model", default="gpt2",
        help="gpt2, llama, mixtral, or a directory with a config.json [gpt2]")
    add("--layers", type=count,
        help="[2]")
    add("--hidden", type=count,
        help="[128]")
    add("--heads", type=count,
        help="[4]")
    add("--vocab-size", type=count,
        help="[256]")
    add("--seq-len", type=count, default=64,
        help="tokens of a sample [64]")
    add("--init-from",
        help="start from a model directory of Hugging Face or of --export")
    add("--recompute", default="none", choices=("none", "full"),
        help="run layers' forward again in backward [none]")
    add("--dropout", type=float, default=0.0,
        help="probability of gpt2, without tp and cp [0]")
    add = parser.add_argument_group("data").add_argument
    add("--data",
        help="a text, whose bytes are tokens, or nanoGPT's .bin [Python's library]")
    add("--order", default="random", choices=("random", "sequential"),
        help="where samples begin [random]")
    add("--global-batch", type=count, default=32,
        help="samples of a step, over all replicas [32]")
    add("--microbatches", type=count,
        help="per replica and step [1]")
    add("--eval-every", type=count,
        help="every N steps: the loss on the text's end, which is left out")
    add = parser.add_argument_group("optimizer (AdamW)").add_argument
    add("--steps", type=count, default=300,
        help="[300]")
    add("--lr", type=float, default=1e-3,
        help="learning rate after warm-up [0.001]")
    add("--lr-schedule", default="constant", choices=("constant", "cosine"),
        help="cosine: down to a tenth [constant]")
    add("--warmup-steps", type=int, default=0,
        help="steps of a linear rise [0]")
    add("--betas", type=float, nargs=2, default=[0.9, 0.999],
        help="decay of the two means [0.9 0.999]")
    add("--weight-decay", type=float, default=0.01,
        help="decay of matrices [0.01]")
    add("--clip-grad", type=float, default=0.0,
        help="largest norm of the gradient; 0: any [0]")
    add = parser.add_argument_group("run").add_argument
    add("--seed", type=int, default=0,
        help="draws weights, samples and dropout [0]")
    add("--dtype", default="float32", choices=DTYPES,
        help="dtype of parameters and activations [float32]")
    add("--device", default="cpu", choices=("cpu", "cuda"),
        help="NumPy or CuPy [cpu]")
    add("--reduction", default="ring", choices=("ring", "ordered", "tree"),
        help="order of sums over ranks [ring]")
    add("--metrics",
        help="a file: a line of JSON for each step")
    add("--trace",
        help="a file: what every rank did when, for Perfetto and minipar visualize")
    add("--clock", default="wall", choices=("wall", "cpu", "model"),
        help="time in the trace [wall]")
    add("--network", type=float, nargs=2,
        help="with --clock cpu or model: seconds per message and per byte")
    add("--memory",
        help="a file: every rank's bytes by kind, for minipar visualize")
    add("--record",
        help="a new directory: gradients and updates of each step, for minipar compare")
    add("--save",
        help="a directory for checkpoints: at the end, and at SIGTERM and Ctrl-C")
    add("--save-every", type=count,
        help="save every N steps, too")
    add("--resume",
        help="a directory of --save: go on from its newest checkpoint, in any layout")
    add("--export",
        help="a directory of Hugging Face for the model")
    add("--verify", action="store_true",
        help="train on one device too, compare, and exit with 1 if they differ")
    return parser


# fmt: on


def parse(argv: Sequence[str] | None, ranks: int = 1, prints: bool = True) -> Namespace:
    """Return the flags of a run on so many ranks, with dp, the sizes and `shape`, the model's config, filled in.

    UsageError for flags that contradict one another, the model or the number of ranks.
    """
    parser = make_parser(prints)
    args = parser.parse_args(argv)
    if args.resume is not None:
        saved = read_run(args.resume)["flags"]
        parser.set_defaults(**{name: saved[name] for name in KEPT})
        args = parser.parse_args(argv)
        # The run may save newer ones, and `--verify` too starts from this one.
        args.resume = str(newest(args.resume))
    args.shape = shape_of(args)
    for name, size in SIZES.items():
        setattr(args, name, getattr(args.shape, size))
    args.dp = mesh_shape(ranks, "mpirun", args.dp, args.tp, args.pp, args.cp)["dp"]
    if args.reduction == "tree":
        check_tree(args)
    args.microbatches = args.microbatches or 1
    check(args)
    return args


def shape_of(args: Namespace) -> TransformerConfig:
    """Return the model's shape. UsageError for sizes that do not fit each other, or a directory's config.json."""
    directory = args.init_from or args.model
    if directory not in MODELS:
        shape = load_config(directory)
        for name, size in SIZES.items():
            given = getattr(args, name)
            stored = getattr(shape, size)
            if given not in (None, stored):
                raise UsageError(f"{name} = {given}, but {directory} has {stored}")
        return shape
    hidden, heads = args.hidden or 128, args.heads or 4
    sizes = (args.layers or 2, heads)
    try:
        if args.model == "gpt2":
            return GPTConfig(args.vocab_size or 256, args.seq_len, hidden, *sizes)
        ffn = -(-8 * hidden // 192) * 64  # 8/3 of hidden, up to a multiple of 64
        kind = LlamaConfig if args.model == "llama" else MixtralConfig
        return kind(args.vocab_size or 256, hidden, ffn, *sizes, heads, args.seq_len)
    except ValueError as error:
        raise UsageError(str(error)) from None


def check(args: Namespace) -> None:
    """Raise UsageError for flags that contradict one another. The strategies refuse what they cannot share out."""
    parts = args.dp * args.microbatches
    check_divides(
        "global-batch/(dp*microbatches)", args.global_batch, parts, "a microbatch has whole samples"
    )
    if args.sequence_parallel:
        check_divides(
            "tokens/tp", args.seq_len // args.cp, args.tp, "--sequence-parallel splits seq-len/cp evenly"
        )
    if args.sync_every_microbatch and (args.zero_stage < 2 or args.pp > 1):
        raise UsageError(
            f"--sync-every-microbatch needs --zero-stage 2 or 3, not {args.zero_stage}, and no pipeline"
        )
    if args.save_every and not args.save:
        raise UsageError(f"--save-every {args.save_every} writes nothing without --save DIR")
    if args.verify and args.dtype != "float64" and not is_exact(args):
        raise UsageError(
            f"--verify proves nothing in {args.dtype}, where ranks round otherwise: give --dtype float64"
        )


def is_exact(args: Namespace) -> bool:
    """Return whether the ranks of this layout promise the bits of one device."""
    if args.reduction == "tree":
        return True
    adds_in_order = args.reduction == "ordered" and not args.sync_every_microbatch
    return adds_in_order and args.zero_replicas == args.tp == args.cp == args.ep == 1
