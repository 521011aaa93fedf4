"""Shared by tests that train: configurations from flags, a training on every rank, its bits; small models; mistakes."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext

import numpy as np

import minipar.nn as nn
from minipar import backend
from minipar.autograd import Tensor, gelu, linear
from minipar.backend import xp
from minipar.comm import DeviceMesh, run_local, serial
from minipar.nn import GPT, GPTConfig
from minipar.parallel.ddp import DistributedDataParallel
from minipar.parallel.fsdp import FullyShardedDataParallel
from minipar.parallel.grad_norm import clip_grad_norm
from minipar.parallel.parallelize import DataParallel
from minipar.parallel.placement import Shard
from minipar.train.checkpoint import Checkpoint
from minipar.train.config import parse, resolve
from minipar.train.data import Tokens
from minipar.train.resume import check_checkpoint, find_checkpoint
from minipar.train.settings import TrainConfig
from minipar.train.trainer import Trainer
from minipar.train.verify import Verdict, Verifier, verify


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


def config_for(flags: str, ranks: int | None = None) -> TrainConfig:
    """Return the resolved configuration of a command line, on `ranks` ranks or as many as its mesh has."""
    config = parse(flags.split())
    mesh = config.mesh
    return resolve(config, (mesh.dp or 1) * mesh.cp * mesh.tp * mesh.pp if ranks is None else ranks)


def ranks_of(config: TrainConfig) -> int:
    return config.mesh.dp * config.mesh.cp * config.mesh.tp * config.mesh.pp


def open_checkpoint(config: TrainConfig, tokens: Tokens, comm) -> Checkpoint | None:
    """Return the checkpoint that `--resume` names, with every file checked; None without the flag. Collective."""
    checkpoint = find_checkpoint(config, comm)
    if checkpoint is not None:
        check_checkpoint(checkpoint, config, tokens, comm)
    return checkpoint


def trainer_for(config: TrainConfig, tokens: Tokens, comm=None, kind=Trainer) -> Trainer:
    """Make this rank's trainer, from the checkpoint of `--resume` if there is one."""
    comm = serial() if comm is None else comm
    mesh = DeviceMesh(comm, **{axis: getattr(config.mesh, axis) for axis in ("dp", "tp", "pp", "cp", "ep", "etp")})
    return kind(config, mesh, tokens, open_checkpoint(config, tokens, comm))


def on_each_rank(config: TrainConfig, tokens: Tokens, inspect: Callable, kind=Trainer) -> list:
    """Train on threads; return what `inspect(trainer, step results)` returns on each rank."""

    def rank(comm):
        trainer = trainer_for(config, tokens, comm, kind)
        return inspect(trainer, list(trainer.train()))

    return run_local(ranks_of(config), rank)


def verified(trainer: Trainer) -> tuple[list, Verdict]:
    """Train and verify each step; return the results of the steps, and the verdict."""
    verifier, results = Verifier(trainer), []
    for result in trainer.train():
        verifier.check_step(result)
        results.append(result)
    return results, verifier.verdict()


def verdicts(config: TrainConfig, tokens: Tokens, kind=Trainer) -> list:
    """Train on threads and verify each step; return each rank's verdict."""
    return run_local(ranks_of(config), lambda comm: verify(trainer_for(config, tokens, comm, kind)))


def bits(state: dict) -> dict[str, bytes]:
    """Return the bits of each array, to be compared with ==."""
    return {name: array.tobytes() for name, array in state.items()}


def trained(config: TrainConfig, tokens: Tokens) -> tuple[dict[str, bytes], list[tuple[float, float]]]:
    """Return the bits of every parameter and every loss and gradient norm, which are the same on all ranks."""
    results = on_each_rank(config, tokens, lambda trainer, steps: (bits(trainer.state_dict()), reports(steps)))
    assert all(steps == results[0][1] for _, steps in results)
    return results[0]


def reports(results) -> list[tuple[float, float]]:
    """Return the loss and the gradient norm of each step."""
    return [(result.loss, result.grad_norm) for result in results]


def run_until(tokens: Tokens, config: TrainConfig, save_to=None, stop: int | None = None) -> tuple[dict, list]:
    """Train on threads. Return rank 0's state and reports; with `stop` the run ends, saved, after that step."""

    def rank(comm):
        trainer, results = trainer_for(config, tokens, comm), []
        for result in trainer.train():
            results.append(result)
            if stop == result.step + 1:
                trainer.save(save_to, stop)
                break
        return trainer.state_dict(), reports(results)

    return run_local(ranks_of(config), rank)[0]


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
        full = np.empty(bucket.size)
        wrapper.comm.all_gather(chunk_of(wrapper, bucket).gradient, out=full, algorithm="pairwise")
        gradient |= {names[p]: view for p, view in bucket.views(full)}
    return {name: gradient[name] for name in names.values()}


def chunk_of(wrapper: DataParallel, bucket):
    """Return this rank's chunk of a bucket of a wrapper that shards."""
    return bucket.chunk if isinstance(wrapper, FullyShardedDataParallel) else wrapper.chunks[bucket]


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
    return shard.join(list(parts.reshape(comm.size, *array.shape))[:: shard.copies])


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
        self.ddp.after_step = lambda: None


class OwnChunksNorm(Trainer):
    """The norm is that of what this replica holds: ranks then clip differently."""

    def _clip_grad_norm(self, max_norm):
        mesh = self.mesh
        return clip_grad_norm(self.ddp.parameters(), max_norm, serial(), mesh.tp, mesh.pp)
