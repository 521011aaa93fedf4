"""torch's distributed training, on as many processes as each case has: python torch_ranks.py FOLDER, which tests start.

FOLDER/job.json lists the cases and the settings that they share. A case names one of STRATEGIES. FOLDER/LAYERS.npz has
its weights, and FOLDER/batches.npz the tokens of each step. After each case the process writes FOLDER/CASE.RANK.npz: of
every step the loss, the gradient norm, and of the parameters that it can make whole, the gradients before clipping and
the values after the step, under minipar's names.
"""

import json
import sys
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.multiprocessing import start_processes
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch_gpt import GPT, layers_of, mean_loss, minipar_name, to_minipar

LIMIT = timedelta(seconds=60)  # of one collective


@dataclass
class Program:
    """A strategy applied to this process's share of the model.

    modules    what this process holds: one GPT, or the stages of a pipeline
    backward   computes the gradient of the global batch's mean loss from its inputs and targets, and returns that loss
    pipeline   whether the processes hold different parameters
    optimizer  makes the optimizer of parameter groups
    """

    modules: list[GPT]
    backward: Callable[[torch.Tensor, torch.Tensor], float]
    pipeline: bool = False
    optimizer: Any = torch.optim.AdamW


# ---- data parallelism ------------------------------------------------------------------------------------------------


def accumulate(model, no_sync: Callable[[], Any], microbatches: int, mesh: DeviceMesh, x, y) -> float:
    """Run forward and backward of this process's microbatches and return the mean loss of all processes.

    All microbatches but the last run inside `no_sync()`.
    """
    shares = [array.chunk(mesh.size())[mesh.get_local_rank()].chunk(microbatches) for array in (x, y)]
    total = torch.zeros((), dtype=torch.float64)
    for i, (inputs, targets) in enumerate(zip(*shares, strict=True)):
        with no_sync() if i < microbatches - 1 else nullcontext():
            loss = mean_loss(model(inputs), targets) / microbatches
            loss.backward()
        total += whole(loss).detach()
    dist.all_reduce(total, group=mesh.get_group())
    return total.item() / mesh.size()


def data_parallel(case, weights, optimizer=torch.optim.AdamW) -> Program:
    """Apply DistributedDataParallel."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    model = GPT(weights, case["heads"])
    ddp = DistributedDataParallel(model, device_mesh=mesh)
    return Program([model], partial(accumulate, ddp, ddp.no_sync, case["microbatches"], mesh), optimizer=optimizer)


def zero_redundancy(case, weights) -> Program:
    """Apply DistributedDataParallel with ZeroRedundancyOptimizer, which is ZeRO stage 1."""
    return data_parallel(case, weights, partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.AdamW))


def shard_blocks(model: GPT, mesh: DeviceMesh, reshard: bool = True) -> GPT:
    """Apply `fully_shard` to each block, and to the rest, which has the embedding that the head is tied to."""
    for block in model.h.values():
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    return fully_shard(model, mesh=mesh, reshard_after_forward=reshard)


@contextmanager
def reductions_off(model):
    """Keep gradients without a reduction inside the block; `fully_shard` has no `no_sync`."""
    model.set_requires_gradient_sync(False)
    yield
    model.set_requires_gradient_sync(True)


def fully_sharded(case, weights, reshard: bool = True) -> Program:
    """Apply `fully_shard`: ZeRO stage 3, or with `reshard=False`, which keeps gathered parameters, stage 2."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    model = shard_blocks(GPT(weights, case["heads"]), mesh, reshard)
    return Program([model], partial(accumulate, model, partial(reductions_off, model), case["microbatches"], mesh))


def hybrid_sharded(case, weights) -> Program:
    """Apply `fully_shard` on a 2-D mesh: two replicas, sharded over half of the processes each."""
    grid = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    every = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    model = shard_blocks(GPT(weights, case["heads"]), grid)
    return Program([model], partial(accumulate, model, partial(reductions_off, model), case["microbatches"], every))


# ---- tensor parallelism ----------------------------------------------------------------------------------------------


def split(model: GPT, mesh: DeviceMesh, sequence: bool) -> GPT:
    """Apply ColwiseParallel and RowwiseParallel to every pair of products, the embeddings and the head.

    The token embedding and the head are split by vocabulary. With `sequence`, activations between the pairs are split
    by tokens, and the LayerNorms are SequenceParallel. The positions' embedding is split by positions, since torch has
    no plain embedding of a slice of the tokens.
    """
    activations = Shard(1) if sequence else Replicate()  # (B, T/t, h) or (B, T, h)
    columns = partial(ColwiseParallel, input_layouts=activations)
    rows = partial(RowwiseParallel, output_layouts=activations)
    norms = {"ln_1": SequenceParallel(), "ln_2": SequenceParallel()} if sequence else {}
    pairs = {"attn.c_attn": columns(), "attn.c_proj": rows(), "mlp.c_fc": columns(), "mlp.c_proj": rows()}
    for block in model.h.values():
        parallelize_module(block, mesh, norms | pairs)
    plan = {
        "wte": rows(input_layouts=Replicate()),
        "wpe": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0) if sequence else Replicate()),
        "head": columns(output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, plan | ({"ln_f": SequenceParallel()} if sequence else {}))
    model.tie()  # parallelize_module has made two parameters of the tied one; both hold the same rows
    return model


def tensor_parallel(case, weights, sequence: bool = False) -> Program:
    """Apply tensor parallelism; the loss is that of the parts of the vocabulary (`loss_parallel`)."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = split(GPT(weights, case["heads"]), mesh, sequence)

    def backward(x, y):
        with loss_parallel():
            loss = mean_loss(model(x), y)
            loss.backward()
        return whole(loss).item()

    return Program([model], backward)


def fully_sharded_and_split(case, weights) -> Program:
    """Apply `fully_shard` over pairs of processes; each pair splits the layers, with SequenceParallel."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    model = shard_blocks(split(GPT(weights, case["heads"]), mesh["tp"], True), mesh["dp"])
    step = partial(accumulate, model, partial(reductions_off, model), case["microbatches"], mesh["dp"])

    def backward(x, y):
        with loss_parallel():
            return step(x, y)

    return Program([model], backward)


# ---- pipelines -------------------------------------------------------------------------------------------------------


def pipeline(case, weights, kind, per_rank: int = 1) -> Program:
    """Run a schedule of torch.distributed.pipelining, with as many blocks on each stage.

    torch.distributed.pipelining has no tied weights: the first stage has the token embedding and the last a copy for
    the head. Their gradients are added here before the step, as Megatron-LM does.
    """
    rank, processes = dist.get_rank(), dist.get_world_size()
    stages = processes * per_rank
    if kind in (ScheduleZBVZeroBubble, ScheduleDualPipeV):
        own = [rank, stages - 1 - rank]
    else:
        own = list(range(rank, stages, processes))
    blocks = layers_of(weights) // stages
    modules = [
        GPT(weights, case["heads"], range(s * blocks, (s + 1) * blocks), first=s == 0, last=s == stages - 1)
        for s in own
    ]
    parts = [PipelineStage(module, s, stages, torch.device("cpu")) for module, s in zip(modules, own, strict=True)]
    single = issubclass(kind, PipelineScheduleSingle)
    schedule = kind(parts[0] if single else parts, case["microbatches"], loss_fn=mean_loss, scale_grads=True)

    def backward(x, y):
        losses: list[torch.Tensor] = []
        inputs = (x,) if 0 in own else ()
        schedule.step(*inputs, **({"target": y, "losses": losses} if stages - 1 in own else {}))
        copies = [m.wte.weight for m in modules if m.wte is not None]
        copies += [m.head.weight for m in modules if m.head is not None]
        total = torch.zeros(weights["wte.weight"].shape, dtype=torch.float64)
        for weight in copies:
            total += weight.grad
        dist.all_reduce(total)
        for weight in copies:
            weight.grad = total.clone()
        loss = torch.stack(losses).mean().detach() if losses else torch.zeros((), dtype=torch.float64)
        dist.all_reduce(loss)
        return loss.item()

    return Program(modules, backward, pipeline=True)


STRATEGIES = {
    "ddp": data_parallel,
    "zero-1": zero_redundancy,
    "fully-shard": fully_sharded,
    "hybrid-shard": hybrid_sharded,
    "fully-shard-keeps": partial(fully_sharded, reshard=False),
    "tensor": tensor_parallel,
    "tensor-sequence": partial(tensor_parallel, sequence=True),
    "fully-shard-tensor-sequence": fully_sharded_and_split,
    "gpipe": partial(pipeline, kind=ScheduleGPipe),
    "1f1b": partial(pipeline, kind=Schedule1F1B),
    "interleaved-1f1b": partial(pipeline, kind=ScheduleInterleaved1F1B, per_rank=2),
    "zb-h1": partial(pipeline, kind=ScheduleInterleavedZeroBubble),
    "zbv": partial(pipeline, kind=ScheduleZBVZeroBubble, per_rank=2),
    "dualpipev": partial(pipeline, kind=ScheduleDualPipeV, per_rank=2),
}


# ---- a training ------------------------------------------------------------------------------------------------------


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return all values of a tensor, of which a DTensor's process may hold a part; collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def clip_gradients(program: Program, limit: float) -> float:
    """Scale the gradients down to the norm `limit`; return the norm of the whole gradient.

    torch.nn.utils.clip_grad_norm_ refuses a mixture of plain tensors and DTensors, which tensor parallelism leaves, and
    knows no pipeline. Its two halves are therefore called for each kind of tensor, and squares are added in between. An
    untied copy of the head does not count.
    """
    kinds: dict[Any, list[torch.Tensor]] = {}
    square = torch.zeros((), dtype=torch.float64)
    named = [item for module in program.modules for item in module.named_parameters()]
    for _, parameter in named:
        kinds.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    copies = {parameter for name, parameter in named if name == "head.weight"}
    for parameters in kinds.values():
        square += whole(get_total_norm([p.grad for p in parameters if p not in copies])) ** 2
    if program.pipeline:
        dist.all_reduce(square)
    norm = square.sqrt()
    for parameters in kinds.values():
        clip_grads_with_norm_(parameters, limit, norm)
    return norm.item()


def arrays_of(program: Program, of: str) -> dict[str, np.ndarray]:
    """Return minipar's arrays of this process's parameters ("data") or gradients ("grad"), whole; collective."""
    arrays = {}
    for module in program.modules:
        for name, parameter in module.named_parameters():
            array = whole(getattr(parameter, of)).detach().numpy().copy()
            arrays[minipar_name(name)] = to_minipar(name, array, module.heads)
    return arrays


def train(program: Program, batches, settings) -> dict[str, Any]:
    """Take a step on each batch, and return loss, norm, gradients and parameters of each."""
    parameters = [p for module in program.modules for p in module.parameters()]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings["weight_decay"]},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = program.optimizer(groups, lr=settings["lr"], eps=settings["eps"], foreach=False)
    result: dict[str, Any] = {}
    for step, (x, y) in enumerate(batches):
        result[f"{step}/loss"] = program.backward(x, y)
        result |= {f"{step}/gradient/{name}": array for name, array in arrays_of(program, "grad").items()}
        result[f"{step}/norm"] = clip_gradients(program, settings["clip"])
        optimizer.step()
        optimizer.zero_grad()
        result |= {f"{step}/parameter/{name}": array for name, array in arrays_of(program, "data").items()}
    return result


def run_cases(rank: int, processes: int, folder: Path, cases, settings) -> None:
    """Train, as one process of a group, the cases one after another."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / f"store-{processes}"), processes)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=processes, timeout=LIMIT)
    tokens = np.load(folder / "batches.npz")
    batches = [(torch.tensor(x), torch.tensor(y)) for x, y in zip(tokens["inputs"], tokens["targets"], strict=True)]
    for case in cases:
        print(f"process {rank}: {case['name']}", file=sys.stderr, flush=True)
        weights = dict(np.load(folder / f"{case['layers']}.npz"))
        result = train(STRATEGIES[case["strategy"]](case, weights), batches, settings)
        np.savez(folder / f"{case['name']}.{rank}.npz", **result)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Run the cases of each number of processes; the first error of a process ends all of them and is printed."""
    folder = Path(sys.argv[1])
    job = json.loads((folder / "job.json").read_text())
    for processes in sorted({case["processes"] for case in job["cases"]}):
        cases = [case for case in job["cases"] if case["processes"] == processes]
        arguments = (processes, folder, cases, job["settings"])
        start_processes(run_cases, arguments, processes, start_method="fork")  # torch is imported once


if __name__ == "__main__":
    main()
