"""Refusals that strategies share: what a program gives to one, and ranks that should hold the same and do not."""

import json
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import numpy as np

from minipar.backend import Array, to_host
from minipar.comm.communicator import Communicator
from minipar.comm.trace import unseen
from minipar.errors import UsageError, check_divides, print_line
from minipar.nn.module import Module
from minipar.nn.parameter import Owner, Parameter, owners_of
from minipar.parallel.placement import Partial, Placement, placement_of


def is_wrapper(model: Any) -> bool:
    """Return whether `model` is a data-parallel strategy, which has a guard (step_guard.py)."""
    return isinstance(getattr(model, "guard", None), Owner)


def check_wrapping(model: Any, comm: Any, algorithm: Any, replicas: int = 1) -> None:
    """Raise UsageError unless `model` is a Module that no data-parallel strategy has wrapped, and `comm` fits.

    UsageError for replicas that do not divide the ranks, ValueError for sums whose bits are not
    promised.
    """
    if is_wrapper(model):
        raise UsageError(
            f"the model is a wrapper already, {type(model).__name__}: wrap the model itself, once"
        )
    if not isinstance(model, Module):
        remedy = (
            "write the model with mp.Module, mp.Linear, mp.Embedding, ... (a wrapper of torch is for torch's)"
        )
        raise UsageError(f"{type(model).__name__} is no mp.Module: {remedy}")
    for owner in owners_of(model.parameters()):
        if owner.wrapper:
            raise UsageError(
                f"the model has a wrapper already, {owner.wrapper}: use that one, or make a new model"
            )
    check_trainable(model)
    check_communicator(comm)
    check_algorithm(algorithm)
    if replicas < 1:
        raise UsageError(f"replicas = {replicas}: expected at least 1")
    check_divides("ranks/replicas", comm.size, replicas, "each replica of the shards has as many ranks")


def refuse_replicas(replicas: int) -> None:
    """Raise UsageError for replicas of shards where there are no shards."""
    if replicas != 1:
        raise UsageError(f"replicas = {replicas}: ZeRO stage 0 shards nothing; give stage 1, 2 or 3")


def check_groups(
    comm: Communicator,
    groups: Sequence[tuple[Sequence[Parameter], Communicator]],
    before_reduce: object,
    replicas: int,
) -> None:
    """Raise unless the gradients of each group can be summed over its ranks, next to those of the other groups.

    ValueError for parameters of several dtypes, or of none. UsageError for what other strategies
    have left to be summed elsewhere: gradients that cover a part of the tokens, and experts that
    other ranks do not hold.
    """
    every: list[Parameter] = []
    for parameters, _ in groups:
        every += parameters
    check_one_dtype(every)
    for parameters, ranks in groups:
        if ranks is not comm and replicas > 1:
            raise UsageError(
                f"{replicas} replicas of shards: those of experts have none; give 1 replica or ep = 1"
            )
        for p in parameters:
            if p.placement is not None:
                check_summed(p.placement, ranks is comm, before_reduce)


def check_one_dtype(parameters: Sequence[Parameter]) -> None:
    """Raise ValueError for parameters of several dtypes, or for none."""
    dtypes = sorted({str(p.dtype) for p in parameters})
    if len(dtypes) != 1:
        raise ValueError(f"flat storage needs parameters of one dtype, but there are {dtypes or 'none'}")


def check_summed(placement: Placement, over_all: bool, before_reduce: object) -> None:
    """Raise UsageError if data parallelism would sum a gradient over the wrong ranks, or too early."""
    if placement.ep is not None and over_all:
        why = f"{placement.name} is an expert's, and the ranks of ep hold different experts and different tokens"
        remedy = "experts = mp.expert_parallel(...), then mp.shard(..., groups=experts.groups(mesh.dp_cp))"
        raise UsageError(f"{why}: write {remedy}")
    if isinstance(placement.tp, Partial) and before_reduce is None:
        why = f"the gradient of {placement.name} covers a part of the tokens or columns on each rank of tp"
        remedy = "tensor = mp.tensor_parallel(...), then mp.shard(..., before_reduce=tensor.sum_partial)"
        raise UsageError(f"{why}: write {remedy}")


def check_context(model: Module, comm: Communicator) -> None:
    """Raise UsageError if a wrapper over `comm` would leave out ranks that share the samples' tokens."""
    for _, module in model.named_modules():
        for strategy, ranks in module.split_over:
            if strategy == "context_parallel" and not set(ranks) <= set(comm.ranks):
                why = f"context_parallel has shared each sample's tokens among ranks {list(ranks)}"
                raise UsageError(
                    f"a wrapper over ranks {comm.ranks}: {why}; wrap it over mesh.dp_cp, which has all"
                )


def check_trainable(model: Module) -> None:
    """Raise UsageError for a frozen parameter: a wrapper would count its gradient as zero, and AdamW decay it."""
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            remedy = "train a part of a model without a wrapper, or keep its values outside of the model's parameters"
            raise UsageError(f"{name}.requires_grad is False, but a wrapper trains all parameters: {remedy}")


def check_communicator(comm: Any) -> None:
    """Raise UsageError for what is no Communicator, such as a mesh in the place of one of its axes."""
    kind = type(comm).__name__
    if hasattr(comm, "dp_cp"):
        raise UsageError(f"a {kind} is no Communicator: give one of its axes, such as mesh.dp")
    if not hasattr(comm, "ranks"):
        raise UsageError(
            f"{kind} is no Communicator: give world, as main(world) gets it, or an axis such as mesh.dp"
        )


def check_row_input(shape: tuple[int, ...], rows: int, tp: int) -> None:
    """Raise UsageError unless a RowParallelLinear's input has this rank's columns, one for each of its `rows`."""
    if not shape or shape[-1] != rows:
        columns = f"x has {shape[-1] if shape else 0} columns, but n_in/tp = {rows * tp}/{tp} = {rows} are this rank's"
        raise UsageError(f"RowParallelLinear: {columns}: give it the result of a ColumnParallelLinear")


def refuse_late_state(wrapper: object, state: object) -> NoReturn:
    """Raise UsageError: a wrapper's model has its state already.

    This is the `load_state_dict` of every wrapper.
    """
    raise UsageError(
        "load the state before wrapping: model.load_state_dict(state), then mp.shard(model, ...)"
    )


def checksum(*arrays: Array) -> int:
    """Return the CRC-32 of these arrays' values, one array after another."""
    total = 0
    for array in arrays:
        total = zlib.crc32(np.ascontiguousarray(to_host(array)).reshape(-1).view(np.uint8).data, total)
    return total


def check_start(comm: Communicator, checksums: Sequence[int]) -> None:
    """Raise ValueError, on every rank, if the ranks' models differ. Sends these checksums as control data."""
    if len(set(comm.all_gather_bytes(str(checksums).encode()))) > 1:
        why = "the ranks hold different parameters, and no wrapper copies one rank's to the others"
        remedy = "draw initial values by name (mp.Linear(..., name=...)) or from one seed, and load the same"
        raise ValueError(f"{why}: {remedy} state on all ranks")


def check_is_replica(comm: Communicator, parameters: Sequence[Parameter]) -> None:
    """Raise UsageError, on every rank, if the ranks of a ZeroOptimizer hold different values. Sends checksums."""
    what = f"ZeroOptimizer over {comm.axis}, whose ranks are no replicas"
    remedy = "give the axis of the data-parallel replicas, such as mesh.dp, "
    remedy += "and draw or load the same values on all of them"
    check_alike(comm, [(placement_of(p).name, p.data) for p in parameters], what, remedy)


def check_alike(comm: Communicator, arrays: Iterable[tuple[str, Array]], what: str, remedy: str) -> None:
    """Raise UsageError, on every rank, if the ranks of `comm` hold different values in one of these named arrays.

    It names the first such array and a rank that has other values than the first rank. Sends a
    checksum of each array as control data.
    """
    if comm.size == 1:
        return
    own = [[name, checksum(array)] for name, array in arrays]
    everyone = [json.loads(text) for text in comm.all_gather_bytes(json.dumps(own).encode())]
    for rank, theirs in enumerate(everyone):
        if theirs == everyone[0]:
            continue
        pairs = zip(theirs, everyone[0], strict=False)
        name = next((one[0] for one, other in pairs if one != other), "their number")
        raise UsageError(
            f"{what}: {name} of rank {comm.ranks[rank]} is not that of rank {comm.ranks[0]}; {remedy}"
        )


def check_same_start(comm: Communicator, model: Module) -> None:
    """Raise UsageError, on every rank, if the ranks' models differ before `comm` splits them.

    Of deferred values, the seeds and names are compared by which they will be drawn.
    """
    held = []
    for name, p in model.named_parameters():
        source = np.frombuffer(repr(p.drawn_by).encode(), np.uint8)
        held.append((name, p.data if p.make is None else source))
    what = "tensor_parallel: the ranks' models start from different values"
    check_alike(comm, held, what, "give all ranks the same seed, and load the same state")


def check_same_tokens(comm: Communicator, tokens: Array) -> None:
    """Raise UsageError, on every rank, if ranks that share an embedding have different tokens.

    Sends a checksum that is not counted.
    """
    what = f"the ranks of {comm.axis} compute one model together, but were given different batches"
    remedy = "give all of them the same one: cut the global batch by mesh.dp.rank alone"
    with unseen(comm):  # a first step sends what the others send
        check_alike(comm, [("x", tokens)], what, remedy)


def check_freed(parameters: Sequence[Parameter]) -> None:
    """Raise UsageError if a freed parameter has values, which a script has set: they would be lost."""
    for p in parameters:
        if any(p.data.strides):  # a placeholder repeats one element
            what = f"{placement_of(p).name}.data was replaced after the model was wrapped"
            raise UsageError(f"{what}: call model.load_state_dict(state) before mp.shard")


def note_same_batch(comm: Communicator, x: Array, y: Array) -> None:
    """Print a note if two ranks of `comm` were given the same batch: a script may mean it.

    Sends a checksum as control data. Batches that are no arrays are not compared.
    """
    own = ""
    if all(hasattr(array, "strides") and array.size for array in (x, y)):
        own = str(checksum(x, y))
    first: dict[str, int] = {}
    for rank, batch in enumerate(comm.all_gather_bytes(own.encode())):
        other = first.setdefault(batch.decode(), rank)
        if batch and other != rank and comm.rank == 0:
            same = f"ranks {comm.ranks[other]} and {comm.ranks[rank]} were given the same batch"
            remedy = f"give each rank of {comm.axis} samples of its own, such as x[rank::ranks]"
            note = f"minipar: note: {same}, which is then trained on twice; {remedy}"
            print_line(note)
            return


def check_parted(comm: Communicator, arrays: Iterable[tuple[str, Array]]) -> None:
    """Raise ValueError, on every rank, if training has made the parameters of the ranks of `comm` different."""
    remedy = "every rank must do the same in every step: a clip_grad_norm() or a step() on one rank alone parts them"
    check_alike(comm, arrays, "the ranks' parameters have parted", remedy)


def check_names_over(comm: Communicator, parameters: Sequence[Parameter]) -> None:
    """Raise UsageError, on every rank, if parameters on two ranks of a pipeline are drawn by one name.

    Sends the names as control data.
    """
    if comm.size == 1:
        return
    own = [p.drawn_by for p in parameters if p.drawn_by is not None]
    first: dict[tuple[int, str], int] = {}
    for rank, text in enumerate(comm.all_gather_bytes(json.dumps(own).encode())):
        for seed, name in json.loads(text):
            other = first.setdefault((seed, name), rank)
            if other != rank:
                where = f"on the pipeline's ranks {other} and {rank}"
                remedy = "give each layer a name of its own"
                raise UsageError(
                    f'two parameters {where} are drawn by the name "{name}" and seed {seed}, '
                    f"and so start from the same values: {remedy}"
                )


def check_algorithm(algorithm: Any) -> None:
    """Raise ValueError unless the bits of this algorithm's sums depend on the rank count and the chunks alone."""
    if algorithm not in ("ring", "ordered", "tree"):
        raise ValueError(f'algorithm "{algorithm}": expected ring, ordered or tree')


def is_power_of_two(count: int) -> bool:
    """Return whether `count` is 1, 2, 4, 8, ..."""
    return count.bit_count() == 1 and count > 0


def check_tree(reduction: str, leaves: int, ranks: int) -> None:
    """Raise UsageError unless sums as trees have leaves, a power of two of them, with as many on each rank."""
    if (reduction == "tree") != (leaves > 0):
        remedy = 'give reduction="tree" and tree_leaves=leaf_count(model.config, length), or neither'
        raise UsageError(f'reduction "{reduction}" with tree_leaves = {leaves}: {remedy}')
    if leaves > 0 and not is_power_of_two(leaves):
        raise UsageError(f"tree_leaves = {leaves} is no power of two: a balanced tree needs one")
    check_divides("tree_leaves/tp", leaves, ranks, "each rank has as many leaves")
