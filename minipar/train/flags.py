"""The command line of `python -m minipar.train`: one argument for each field of the settings.

Rules about the values are in config.py, because a configuration can also be made without a command
line.
"""

import argparse
import math

from minipar.cli import UsageParser
from minipar.parallel.pipeline.schedules import SCHEDULES
from minipar.train.settings import CHOICES, DataConfig, MeshConfig, ModelConfig, OptimizerConfig, RunConfig

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def make_parser(prints: bool) -> UsageParser:
    """Make the parser. Its result has only what the user wrote: the settings have the defaults."""
    parser = UsageParser(
        prog="mpirun -n N python -m minipar.train",
        description="Train a GPT, a Llama or a Mixtral across N ranks.",
        allow_abbrev=False,  # an abbreviation that works today would be ambiguous with tomorrow's flag
        argument_default=argparse.SUPPRESS,
        prints=prints,
    )
    add_mesh_flags(parser)
    add_model_flags(parser)
    add_data_flags(parser)
    add_optimizer_flags(parser)
    add_run_flags(parser)
    return parser


def byte_count(text: str) -> int:
    """Convert "1500000", "1.5MB" or "512KiB" to a number of bytes, at least 1."""
    number = text.rstrip("KMGiB ")
    unit = text[len(number) :].strip()
    try:
        count = float(number) * UNITS[unit]
    except (KeyError, ValueError):
        count = 0.0
    if not 1 <= count < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes such as 1500000, 1.5MB or 512KiB")
    return int(count)


def dtype_name(text: str) -> str:
    """Return NumPy's name of a dtype that is called bf16, fp16, fp32 or fp64 (ml_dtypes adds bfloat16)."""
    names = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
    return names.get(text, text)


# Laid out by hand: the help of a flag has lines of its own where it is long.
# fmt: off


def add_mesh_flags(parser: UsageParser) -> None:
    """Add the flags of MeshConfig."""
    title = "mesh: how many ranks each kind of parallelism takes, and what they share"
    add = parser.add_argument_group(title).add_argument
    add("--dp", type=int, metavar="N",
        help="data-parallel replicas (default: as many as there are ranks)")
    add("--tp", type=int, metavar="T",
        help="tensor-parallel ranks that share each layer; they must divide the heads (default: "
             f"{MeshConfig.tp})")
    add("--cp", type=int, metavar="C",
        help="context-parallel ranks that share each sample's tokens; 2*C must divide them "
             f"(default: {MeshConfig.cp})")
    add("--context-parallel", choices=CHOICES["--context-parallel"],
        help="keys and values travel around a ring, or are gathered, or each rank takes all "
             f"tokens of some heads (default: {MeshConfig.context_parallel})")
    add("--cp-order", choices=CHOICES["--cp-order"],
        help="zigzag: an early and a late part of each sample, equal work on every rank; "
             "contiguous: the r-th part; documents: with --pack ID, zigzag in each document, the "
             f"default then (default: {MeshConfig.cp_order})")
    add("--ep", type=int, metavar="P",
        help="with --model mixtral: neighbours that each hold 1/P of the experts, among dp*cp or, "
             f"with --etp, dp*cp*T/Q (default: {MeshConfig.ep})")
    add("--etp", type=int, metavar="Q",
        help="with --model mixtral and --sequence-parallel: ranks of tp that share each expert; 1 "
             "leaves experts whole (default: all T)")
    add("--pp", type=int, metavar="P",
        help=f"pipeline ranks, each with its own layers (default: {MeshConfig.pp})")
    add("--schedule", metavar="NAME",
        help=f"with --pp 2 or more: order of the pipeline: {', '.join(SCHEDULES)}, or PyTorch's "
             "FILE.csv (default: 1f1b)")
    add("--virtual-stages", type=int, metavar="V",
        help="with --pp 2 or more: stages per rank of interleaved-1f1b (default: 2)")
    add("--sequence-parallel", action="store_true",
        help="with --tp 2 or more: LayerNorm, dropout and residuals work on 1/T of the sequence; "
             "the same bytes travel")
    add("--zero-stage", type=int, metavar="K",
        help="what data-parallel ranks shard: 0 nothing; 1 optimizer state; 2 gradients too; 3 "
             f"parameters too (default: {MeshConfig.zero_stage})")
    add("--zero-replicas", type=int, metavar="Q",
        help="with --zero-stage 1, 2 or 3: shard within Q groups of near ranks, such as hosts, "
             f"and sum gradients over groups (HSDP) (default: {MeshConfig.zero_replicas})")
    add("--sync-every-microbatch", action="store_true",
        help="with --zero-stage 2 or 3: keep gradients sharded between microbatches, and send "
             "them M times, not once")
    add("--memory-limit", type=byte_count, metavar="BYTES",
        help="refuse to start if parameters, gradients and optimizer state take more on a rank; "
             "such as 1500000 or 1.5GiB")


def add_model_flags(parser: UsageParser) -> None:
    """Add the flags of ModelConfig."""
    title = "model: GPT-2's architecture, Llama's, or Mixtral's"
    add = parser.add_argument_group(title).add_argument
    add("--layers", type=int, metavar="L",
        help=f"Transformer layers (default: {ModelConfig.layers})")
    add("--hidden", type=int, metavar="H",
        help=f"hidden size: elements per token between layers (default: {ModelConfig.hidden})")
    add("--heads", type=int, metavar="A",
        help=f"attention heads; they must divide hidden (default: {ModelConfig.heads})")
    add("--seq-len", type=int, metavar="T",
        help="tokens per sample; without --init-from also GPT-2's learned positions (default: "
             f"{ModelConfig.seq_len})")
    add("--vocab-size", type=int, metavar="V",
        help=f"vocabulary: token ids are 0 to V-1 (default: {ModelConfig.vocab_size})")
    add("--model", choices=CHOICES["--model"],
        help="the architecture: GPT-2's; Llama's, whose head is not tied to the embedding; or "
             f"Mixtral's, with experts (default: {ModelConfig.model})")
    add("--kv-heads", type=int, metavar="N",
        help="with --model llama or mixtral: heads of keys and values (default: as --heads)")
    add("--ffn", type=int, metavar="F",
        help="with --model llama or mixtral: columns of each MLP (default: 8/3 of hidden, up to "
             "a multiple of 64)")
    add("--experts", type=int, metavar="E",
        help="with --model mixtral: MLPs in each layer (default: 8)")
    add("--top-k", type=int, metavar="K",
        help="with --model mixtral: experts that each token is sent to (default: 2)")
    add("--aux-loss", type=float, metavar="COEF",
        help="with --model mixtral: coefficient of the routers' balance loss (default: "
             f"{ModelConfig.aux_loss})")
    add("--router-bias", type=float, metavar="RATE",
        help="with --model mixtral: change per step of the routers' biases (default: "
             f"{ModelConfig.router_bias})")
    add("--capacity-factor", type=float, metavar="F",
        help="with --model mixtral: experts take at most F times the mean load of a microbatch "
             "and drop the rest (default: take all)")
    add("--init-from", metavar="DIR",
        help="start from a GPT-2, Llama or Mixtral directory (config.json, model.safetensors), "
             "which also gives the shape")


def add_data_flags(parser: UsageParser) -> None:
    """Add the flags of DataConfig."""
    title = "data: the source of the tokens and their order"
    add = parser.add_argument_group(title).add_argument
    add("--data", dest="path", metavar="PATH",
        help="a text (bytes are tokens) or a nanoGPT .bin (uint16 tokens) (default: Python's "
             "library)")
    add("--order", choices=CHOICES["--order"],
        help="random: samples start anywhere; sequential: the text from front to back (default: "
             f"{DataConfig.order})")
    add("--pack", type=int, metavar="ID",
        help="token ID ends a document; samples hold several: positions restart in each, no token "
             "sees another one (default: a sample is one document)")
    add("--global-batch", type=int, metavar="B",
        help=f"samples per step, over all replicas (default: {DataConfig.global_batch})")
    add("--microbatches", type=int, metavar="M",
        help="microbatches per replica and step, whose gradients are accumulated (default: "
             f"{DataConfig.microbatches})")
    add("--eval-every", type=int, metavar="K",
        help="every K steps and at the end: the loss on text that training does not see, the "
             "same in every layout")
    add("--eval-data", metavar="PATH",
        help="with --eval-every K: the text to evaluate on (default: the end of the training "
             "text, which is then not trained on)")


def add_optimizer_flags(parser: UsageParser) -> None:
    """Add the flags of OptimizerConfig."""
    title = "optimizer: AdamW, as torch.optim.AdamW computes it"
    add = parser.add_argument_group(title).add_argument
    add("--steps", type=int, metavar="S",
        help=f"optimizer steps (default: {OptimizerConfig.steps})")
    add("--lr", type=float, metavar="LR",
        help=f"learning rate after warm-up (default: {OptimizerConfig.lr})")
    add("--lr-schedule", choices=CHOICES["--lr-schedule"],
        help="after warm-up the learning rate stays, or falls along half a cosine to a tenth in "
             f"the last step (default: {OptimizerConfig.lr_schedule})")
    add("--warmup-steps", type=int, metavar="W",
        help="the learning rate is LR*(step+1)/(W+1) in steps 0 to W-1 (default: "
             f"{OptimizerConfig.warmup_steps})")
    add("--betas", nargs=2, type=float, metavar=("B1", "B2"),
        help="decay per step of the running means of gradient and squared gradient (default: 0.9 "
             "0.999)")
    add("--eps", type=float, metavar="E",
        help=f"added to the root of the squared mean (default: {OptimizerConfig.eps})")
    add("--weight-decay", type=float, metavar="WD",
        help="decoupled, of parameters with two or more dimensions (default: "
             f"{OptimizerConfig.weight_decay})")
    add("--dropout", type=float, metavar="P",
        help="with --model gpt2: probability of dropout; the same in every layout (default: "
             f"{OptimizerConfig.dropout})")
    add("--clip-grad", type=float, metavar="NORM",
        help="scale gradients down to this L2 norm; 0: no clipping (default: "
             f"{OptimizerConfig.clip_grad})")


def add_run_flags(parser: UsageParser) -> None:
    """Add the flags of RunConfig."""
    title = "run: seed, precision, device, and the files that are written"
    add = parser.add_argument_group(title).add_argument
    add("--seed", type=int, metavar="N",
        help=f"keys every random draw (weights, samples) (default: {RunConfig.seed})")
    add("--dtype", type=dtype_name, choices=CHOICES["--dtype"],
        help="of parameters and activations; with bf16 and fp16 the optimizer has float32 copies "
             f"of the parameters (default: {RunConfig.dtype})")
    add("--gradients", type=dtype_name, choices=CHOICES["--gradients"],
        help="in which microbatches' gradients add up, if --dtype has 2 bytes (default: fp32)")
    add("--reduce-dtype", type=dtype_name, choices=CHOICES["--reduce-dtype"],
        help="in which gradients and tensor-parallel sums travel and add up, if --dtype has 2 "
             "bytes (default: fp32)")
    add("--skip-nonfinite", action="store_true",
        help="skip a step whose loss or gradient is not finite, and count it")
    add("--device", choices=CHOICES["--device"],
        help=f"cpu: NumPy; cuda: CuPy (default: {RunConfig.device})")
    add("--recompute", choices=CHOICES["--recompute"],
        help="full: keep only each layer's input and run its forward again in backward (default: "
             f"{RunConfig.recompute})")
    add("--attention", choices=CHOICES["--attention"],
        help="full: keep all scores; blockwise: compute them again in backward; auto: full if "
             f"short, or with dropout (default: {RunConfig.attention})")
    add("--reduction", choices=CHOICES["--reduction"],
        help="order of sums: ring; ordered (over ranks, rank 0 first: bit for bit as one device); "
             "tree (all sums: bit for bit the same in all layouts, docs/combinations.md) (default: "
             f"{RunConfig.reduction})")
    add("--metrics", metavar="FILE.jsonl",
        help="one JSON line per step; '-' is standard output, and progress then goes to standard "
             "error")
    add("--trace", metavar="FILE.json",
        help="Chrome trace of every rank, for Perfetto or `minipar visualize trace`")
    add("--clock", choices=CHOICES["--clock"],
        help="with --trace FILE.json: time in the trace: wall; cpu: each rank's own CPU time; "
             f"model: a cost model (default: {RunConfig.clock})")
    add("--memory", metavar="FILE.json",
        help="every rank's bytes by kind at each moment of the last step and at the peak, for "
             "`minipar visualize memory`")
    add("--record", metavar="DIR",
        help="record the loss, gradients and updates of each step for `python -m "
             "minipar.compare`; DIR is new")
    add("--network", nargs=2, type=float, metavar=("ALPHA", "BETA"),
        help="with --clock cpu or model: what a message costs: ALPHA seconds and BETA seconds "
             "per byte (default: 0.0 0.0)")
    add("--save", metavar="DIR",
        help="write checkpoints into DIR, at the end and with --save-every on the way; the last "
             "two are kept")
    add("--save-every", type=int, metavar="K",
        help="with --save DIR: write a checkpoint every K steps")
    add("--resume", metavar="DIR",
        help="continue from the newest checkpoint in DIR (or from DIR/step-NNNNNNNN) in the "
             "layout given here; model, data, optimizer, seed, dtype and steps are the "
             "checkpoint's unless given; auto: from --save DIR, if it has one")
    add("--export", metavar="DIR",
        help="write the trained model as a directory of Hugging Face; DIR is new, empty, or an "
             "earlier export")
    add("--export-dtype", type=dtype_name, choices=CHOICES["--export-dtype"],
        help="with --export DIR: of --export (default: that of --dtype)")
    add("--verify", action="store_true",
        help="compute each step on one device too and compare loss, norm, gradients and updates; "
             "exit 1 if they differ")
