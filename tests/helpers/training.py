"""Shared by tests that train: parsed flags, a training on every rank, its bits; small models; mistakes."""

import hashlib
import json
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock

import numpy as np

import minipar.nn as nn
from minipar import backend
from minipar.autograd import Tensor, gelu, linear
from minipar.backend import to_host, xp
from minipar.comm import DeviceMesh, run_local, serial
from minipar.more.context.blockwise import BlockwiseAttention, attend, attend_backward
from minipar.more.hybrid import HybridComm
from minipar.nn import GPT, GPTConfig
from minipar.nn.gpt import SelfAttention, TransformerConfig
from minipar.parallel.ddp import DistributedDataParallel
from minipar.parallel.fsdp import FullyShardedDataParallel
from minipar.parallel.grad_norm import clip_grad_norm
from minipar.parallel.placement import Shard, placement_of
from minipar.parallel.state import gather_state
from minipar.parallel.wrapper import DataParallel
from minipar.train import checkpoint, verify
from minipar.train.data import Tokens
from minipar.train.flags import make_parser, parse, shape_of
from minipar.train.scaled_trainer import ScaledTrainer
from minipar.train.trainer import Trainer
from minipar.train.tree_trainer import TreeTrainer
from minipar.train.verify import Verdict


@contextmanager
def using(module) -> Iterator[None]:
    """Make `module` the array module inside a `with` block. Process-wide: two threads cannot use different modules."""
    previous = xp.module
    backend.use(module)
    try:
        yield
    finally:
        backend.use(previous)


# ---- the trainer -----------------------------------------------------------------------------------------------------

# Sizes that the program reads from a config.json. The command line of a test may have them too.
SIZES = {
    "--kv-heads": "num_key_value_heads",
    "--ffn": "intermediate_size",
    "--experts": "num_local_experts",
    "--top-k": "num_experts_per_tok",
    "--aux-loss": "router_aux_loss_coef",
}
FOLDER = TemporaryDirectory()  # of the config.json files
WRITING = Lock()


def config_for(flags: str, ranks: int | None = None) -> Namespace:
    """Return the parsed flags of a command line, on `ranks` ranks or as many as its mesh has.

    Besides the program's flags it may have those of SIZES, and AdamW's `--eps`, which `trainer_for` takes.
    """
    words, sizes, eps = [], {}, 1e-8
    given = iter(flags.split())
    for word in given:
        if word in SIZES:
            sizes[SIZES[word]] = json.loads(next(given))
        elif word == "--eps":
            eps = float(next(given))
        else:
            words.append(word)
    plain = make_parser(False).parse_args(words)
    if ranks is None:
        ranks = (plain.dp or 1) * plain.cp * plain.tp * plain.pp
    if sizes:
        words += ["--model", directory_of(shape_of(plain), **sizes)]
    args = parse(words, ranks)
    args.eps = eps
    return args


def directory_of(shape: TransformerConfig, **sizes) -> str:
    """Return a directory whose config.json has this shape, with other sizes."""
    content = vars(shape) | sizes | {"model_type": shape.model_type}
    content["output_router_logits"] = "router_aux_loss_coef" in sizes
    text = json.dumps(content, sort_keys=True)
    folder = Path(FOLDER.name) / hashlib.sha256(text.encode()).hexdigest()[:16]
    with WRITING:  # ranks are threads
        if not folder.exists():
            folder.mkdir()
            (folder / "config.json").write_text(text)
    return str(folder)


def ranks_of(args: Namespace) -> int:
    return args.dp * args.cp * args.tp * args.pp


def kind_of(args: Namespace) -> type[Trainer]:
    """Return the class of trainer that the program takes."""
    if args.reduction == "tree":
        return TreeTrainer
    return ScaledTrainer if args.dtype == "float16" else Trainer


def trainer_for(args: Namespace, tokens: Tokens, comm=None, kind: type[Trainer] | None = None) -> Trainer:
    """Make this rank's trainer, from the checkpoint of `--resume` if there is one."""
    mesh = DeviceMesh(serial() if comm is None else comm, dp=args.dp, tp=args.tp, pp=args.pp, cp=args.cp, ep=args.ep)
    trainer = (kind or kind_of(args))(args, mesh, tokens)
    trainer.optimizer.eps = getattr(args, "eps", trainer.optimizer.eps)
    if args.resume is not None:
        checkpoint.resume(trainer, args.resume)
    return trainer


def one_device(args: Namespace, tokens: Tokens) -> Trainer:
    """Make the trainer that computes on one device what the ranks of `args` compute."""
    trainer = verify.one_device(args, tokens)
    trainer.optimizer.eps = getattr(args, "eps", trainer.optimizer.eps)
    return trainer


def on_each_rank(args: Namespace, tokens: Tokens, inspect: Callable, kind: type[Trainer] | None = None) -> list:
    """Train on threads; return what `inspect(trainer, step results)` returns on each rank."""

    def rank(comm):
        trainer = trainer_for(args, tokens, comm, kind)
        return inspect(trainer, list(trainer.train()))

    return run_local(ranks_of(args), rank)


def verified(trainer: Trainer) -> tuple[list, Verdict]:
    """Train and verify; return the results of the steps, and the verdict."""
    trainer.optimizer.eps = 1e-8  # as that of the device which `verify` makes
    results = list(trainer.train())
    return results, verify.verify(trainer, results)


def verdicts(args: Namespace, tokens: Tokens, kind: type[Trainer] | None = None) -> list:
    """Train on threads and verify; return each rank's verdict."""
    return run_local(ranks_of(args), lambda comm: verified(trainer_for(args, tokens, comm, kind))[1])


def same_on_all_ranks(trainer: Trainer) -> bool:
    """Return on every rank whether ranks that hold the same parameters hold the same bits, and of AdamW's means too."""
    optimizer = trainer.optimizer
    state = {}
    for i, p in enumerate(optimizer.parameters):
        state[p] = [p.data, optimizer.values()[i], optimizer.exp_avg[i], optimizer.exp_avg_sq[i]]
    same = []
    for comm, parameters in replicas(trainer.ddp):
        same.append(same_over(comm, comm.size, [state.get(p, [p.data]) for p in parameters]))
    tp = trainer.mesh.tp
    if tp.size > 1:
        held = [arrays for p, arrays in state.items() if not isinstance(placement_of(p).tp, Shard)]
        same.append(same_over(tp, tp.size, held))
    return b"no" not in trainer.mesh.world.all_gather_bytes(b"yes" if all(same) else b"no")


def replicas(wrapper: DataParallel) -> list:
    """Return the ranks that hold the same parameters, for each bucket, and those that hold the same shards."""
    held = [] if isinstance(wrapper, FullyShardedDataParallel) else [(b.comm, b.parameters) for b in wrapper.buckets]
    if isinstance(wrapper.comm, HybridComm):
        held.append((wrapper.comm.across, wrapper.parameters()))
    return held


def clip(wrapper: DataParallel, max_norm: float | None) -> float:
    """Clip the whole gradient by its norm, which is returned."""
    return clip_grad_norm(wrapper.parameters(), max_norm, wrapper.comm)


def whole_state(wrapper: DataParallel) -> dict[str, np.ndarray]:
    """Return the whole model on rank 0."""
    return gather_state(wrapper.model, wrapper.parameters(), wrapper.comm)


def same_over(comm, neighbours: int, lists: list[list]) -> bool:
    """Return whether so many neighbouring ranks of `comm`, with this one, have the same bits in these arrays."""
    own = hashlib.sha256()
    for arrays in lists:
        for array in arrays:
            own.update(to_host(array).tobytes())
    digests = comm.all_gather_bytes(own.digest())
    first = comm.rank - comm.rank % neighbours
    return len(set(digests[first : first + neighbours])) == 1


def bits(state: dict) -> dict[str, bytes]:
    """Return the bits of each array, to be compared with ==."""
    return {name: array.tobytes() for name, array in state.items()}


def trained(args: Namespace, tokens: Tokens) -> tuple[dict[str, bytes], list[tuple[float, float]]]:
    """Return the bits of every parameter and every loss and gradient norm, which are the same on all ranks."""
    results = on_each_rank(args, tokens, lambda trainer, steps: (bits(trainer.state_dict()), reports(steps)))
    assert all(steps == results[0][1] for _, steps in results)
    return results[0]


def reports(results) -> list[tuple[float, float]]:
    """Return the loss and the gradient norm of each step."""
    return [(result.loss, result.grad_norm) for result in results]


def run_until(tokens: Tokens, args: Namespace, save_to=None, stop: int | None = None) -> tuple[dict, list]:
    """Train on threads. Return rank 0's state and reports; with `stop` the run ends, saved, after that step."""

    def rank(comm):
        trainer, results = trainer_for(args, tokens, comm), []
        for result in trainer.train():
            results.append(result)
            if stop == result.step + 1:
                checkpoint.save(trainer, save_to, stop)
                break
        return trainer.state_dict(), reports(results)

    return run_local(ranks_of(args), rank)[0]


# ---- models under a wrapper ------------------------------------------------------------------------------------------


class MLP(nn.Module):
    """A user's own model, on arrays: x (n, 3) -> (n, 1); its loss is the squared error."""

    def __init__(self, hidden: int = 5, dtype: str = "float64") -> None:
        self.first = nn.Linear(3, hidden, name="first", std=0.5, dtype=dtype)
        self.second = nn.Linear(hidden, 1, name="second", std=0.5, dtype=dtype)

    def forward(self, x) -> Tensor:
        return self.second(gelu(self.first(x)))

    def loss_sum(self, x, y) -> Tensor:
        return ((self(x) - y) ** 2.0).sum()


class TiedModel(nn.Module):
    """A model whose tied leaf is used before its parameter, so that backward completes its gradient last."""

    def __init__(self) -> None:
        self.weight = nn.Parameter(np.random.Generator(np.random.Philox(8)).standard_normal((4, 4)))
        self.leaf = self.weight.tie()

    def loss_sum(self, x, y) -> Tensor:
        self.leaf.data = self.weight.data
        return (linear(linear(Tensor(x), self.leaf).tanh(), self.weight) * y).sum()


def small_gpt(**options) -> GPT:
    """Three blocks of 2,197 = 13^3 elements and 351 at the ends, which few numbers of ranks divide; in float64."""
    config = GPTConfig(vocab_size=17, n_positions=8, n_embd=13, n_layer=options.pop("layers", 3), n_head=1)
    return GPT(config, dtype="float64", **options)


def in_blocks(qkv, heads, kv_heads=None, keep=None, probability=0.0):
    """Compute attention in blocks of any length, without dropout; called as `causal_attention` is."""
    assert keep is None
    return BlockwiseAttention.apply(qkv, heads, heads if kv_heads is None else kv_heads, attend, attend_backward)


def with_blocks(model):
    """Let a model's attention layers work in blocks, however short the sequences are; return the model."""
    for _, module in model.named_modules():
        if isinstance(module, SelfAttention):
            module.attention = in_blocks
    return model


def text(samples, vocab: int = 17, length: int = 8) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs and targets (n, length) of the samples with these numbers; any rank draws the same ones."""
    rows = [np.random.Generator(np.random.Philox(sample)).integers(0, vocab, length + 1) for sample in samples]
    return np.array(rows)[:, :-1], np.array(rows)[:, 1:]


def backward(model: GPT | DataParallel, x, y, scale: float = 1.0) -> float:
    """Run forward and backward of the summed loss times `scale`; return the sum. A wrapper's caller synchronizes."""
    wrapped = isinstance(model, DataParallel)
    loss = (model.model if wrapped else model).loss_sum(x, y)
    with model.scaled_backward() if wrapped else nullcontext():
        loss.backward(xp.full_like(loss.data, scale))
    return loss.item()


def gradient_of(wrapper: DataParallel) -> dict[str, np.ndarray]:
    """Return on every rank, after `synchronize`, the gradient by name, put together from all ranks' chunks."""
    names = {p: name for name, p in wrapper.model.named_parameters()}
    if isinstance(wrapper, DistributedDataParallel):
        return {names[p]: p.grad.copy() for p in names}
    gradient = {}
    for bucket in wrapper.buckets:
        full = np.empty(bucket.size, bucket.chunk.gradient.dtype)
        wrapper.comm.all_gather(bucket.chunk.gradient, out=full, algorithm="pairwise")
        gradient |= {names[p]: view for p, view in bucket.views(full)}
    return {name: gradient[name] for name in names.values()}


def gradient_on_one_device(model: GPT, passes: Iterable[Callable[[GPT], object]]) -> dict[str, np.ndarray]:
    """Return the gradient by name of a serial model: that of each pass, added from left to right."""
    total: dict[str, np.ndarray] = {}
    for run in passes:
        model.zero_grad()
        run(model)
        for name, p in model.named_parameters():
            p.fold_tied_gradients()
            total[name] = total[name] + p.grad if name in total else p.grad.copy()
    return total


def joined(comm, parameter, array) -> np.ndarray:
    """Return the serial model's array, of a parameter or of its gradient, from all tensor-parallel ranks' parts."""
    shard = parameter.placement.tp
    if not isinstance(shard, Shard):
        return array
    parts = comm.all_gather(np.ascontiguousarray(array), algorithm="pairwise")
    return shard.join(list(parts.reshape(comm.size, *array.shape)))


class Proxy:
    """A communicator that does what another one does; subclasses watch it, or make a mistake."""

    def __init__(self, comm) -> None:
        self.comm = comm

    def __getattr__(self, name):
        return getattr(self.comm, name)


class OneOf:
    """A communicator of so many ranks, seen from one of them; it sends nothing."""

    def __init__(self, rank, size):
        self.rank = rank
        self.size = size
        self.chunk_comm = self


class Done:
    """An operation that has nothing to wait for."""

    def __init__(self, result=None) -> None:
        self.result = result

    def wait(self):
        return self.result


# ---- mistakes ------------------------------------------------------------------------------------------------------


class NothingDecays(Trainer):
    """Shards are one-dimensional, and weight decay asks for two dims: of the whole parameter, not of the shard."""

    def __init__(self, *args):
        super().__init__(*args)
        for p in self.ddp.parameters():
            p.decays = False


class NeverGathersTheUpdate(Trainer):
    """Each rank updates its own chunks and never hears of the others'."""

    def __init__(self, *args):
        super().__init__(*args)
        self.ddp.contract.share_updates = lambda: None


class OwnChunksNorm(Trainer):
    """The norm is that of what this replica holds: ranks then clip differently."""

    def clip_grad_norm(self, max_norm):
        mesh = self.mesh
        return clip_grad_norm(self.ddp.parameters(), max_norm, serial(), mesh.tp, mesh.pp)
