"""Claims about `python -m minipar.bench`: its help and mistakes, and what bits and collectives run and print."""

import hashlib
import json
import re
import sys
from argparse import Namespace
from types import SimpleNamespace

import numpy as np
import pytest
from training import config_for

from minipar.bench import bits, collectives, step
from minipar.bench.__main__ import SUBCOMMANDS, bench
from minipar.comm import run_local, serial
from minipar.comm.algorithms import chunk_bounds
from minipar.errors import UsageError


def run_bench(monkeypatch, *words, rank=0):
    monkeypatch.setattr(sys, "argv", ["program", *words])
    bench(SimpleNamespace(rank=rank))


@pytest.mark.parametrize("words", [["--help"], ["step", "--help"]])
def test_rank_0_alone_prints_help(words, monkeypatch, capsys):
    for rank in (0, 1):
        with pytest.raises(SystemExit):
            run_bench(monkeypatch, *words, rank=rank)
        usage = " ".join(["usage: minipar.bench", *words[:-1], "[-h]"])
        assert capsys.readouterr().out[: len(usage)] == (usage if rank == 0 else "")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], "the following arguments are required: subcommand"),
        (["--vers"], "the following arguments are required: subcommand; there is no --vers"),
        (["step", "--repe", "3"], "unrecognized arguments: --repe 3"),
    ],
)
def test_names_are_given_in_full(words, line, monkeypatch):
    with pytest.raises(UsageError, match=f"^{line}"):
        run_bench(monkeypatch, *words)


def test_a_subcommand_gets_its_flags(monkeypatch):
    given = []
    monkeypatch.setitem(SUBCOMMANDS, "step", (step.add_step_flags, lambda comm, args: given.append((comm.rank, args))))
    run_bench(monkeypatch, "step", "--json", "x", "--hidden", "16", "32", rank=3)
    ((rank, args),) = given
    assert (rank, args.json, args.hidden, args.repeat) == (3, "x", ["16", "32"], 11)


# ---- bits ------------------------------------------------------------------------------------------------------------


def test_bits_needs_one_process_and_a_step():
    args = Namespace(steps=0, model="gpt2", dtype="float32", json=None)
    with pytest.raises(UsageError, match="^bench bits makes its own ranks; mpirun started 2: run it without mpirun"):
        run_local(2, bits.run, args)
    with pytest.raises(UsageError, match="^--steps 0: expected at least 1 of each$"):
        bits.run(serial(), args)


BITS = """\
    layout  ring_difference  ring_bits  tree_difference  tree_bits
one device                0   00000000                0   11111111
    --dp 2                0   00000000                0   11111111
    --tp 2             0.25   22222222                0   11111111
ring: 1 of 2 layouts have one device's bits after 7 steps
tree: 2 of 2 layouts have one device's bits after 7 steps
"""


def test_bits_counts_the_layouts_with_one_devices_bits(monkeypatch, capsys):
    def train(flags):
        assert "--model llama --dtype float64 --steps 7 " in flags
        if flags.endswith("--reduction tree"):
            return 3.0, "11111111"
        return (1.75, "22222222") if "--tp 2" in flags else (2.0, "00000000")

    monkeypatch.setattr(bits, "LAYOUTS", ("", "--dp 2", "--tp 2"))
    monkeypatch.setattr(bits, "train", train)
    bits.run(serial(), Namespace(steps=7, model="llama", dtype="float64", json=None))
    assert capsys.readouterr().out == BITS


def trained(monkeypatch, losses=(3.0, 2.0), norms=(1.0, 1.0), values=(1.0, 2.0)):
    """Return the last loss and the digest of a training with these results."""
    results = [SimpleNamespace(loss=loss, grad_norm=norm) for loss, norm in zip(losses, norms, strict=True)]
    state = {"b": np.array(values[1:]), "a": np.array(values[:1])}
    trainer = SimpleNamespace(train=lambda: results, state_dict=lambda: state)
    monkeypatch.setattr(bits, "Trainer", lambda config, mesh, tokens: trainer)
    return bits.train(bits.SIZES)


def test_one_other_bit_gives_another_digest(monkeypatch):
    """The digest covers every loss, every gradient norm and every parameter, in the order of the names."""
    near = {
        "losses": (np.nextafter(3, 4), 2.0),
        "norms": (1.0, np.nextafter(1, 2)),
        "values": (1.0, np.nextafter(2, 3)),
    }
    loss, digest = trained(monkeypatch)
    assert loss == 2.0 and (loss, digest) == trained(monkeypatch)
    steps = np.array([3.0, 1.0]).tobytes() + np.array([2.0, 1.0]).tobytes()  # each step's loss and norm
    parameters = b"a" + np.array([1.0]).tobytes() + b"b" + np.array([2.0]).tobytes()
    assert digest == hashlib.sha256(steps + parameters).hexdigest()[:8]
    for name, values in near.items():
        assert trained(monkeypatch, **{name: values})[1] != digest, name


def test_bits_trains_on_the_layouts_own_mesh(monkeypatch):
    meshes = []

    def trainer(config, mesh, tokens):
        meshes.append((mesh.dp.size, mesh.tp.size, mesh.pp.size))
        return SimpleNamespace(train=lambda: [SimpleNamespace(loss=0.0, grad_norm=0.0)], state_dict=dict)

    monkeypatch.setattr(bits, "Trainer", trainer)
    bits.train(f"{bits.SIZES} --dp 3 --global-batch 9 --tp 2 --pp 2")
    assert meshes == [(3, 2, 2)] * 12
    for layout in bits.LAYOUTS:
        config_for(f"{bits.SIZES} {bits.UPDATE} {layout}")


# ---- collectives -----------------------------------------------------------------------------------------------------


def test_an_unknown_collective_is_refused():
    args = Namespace(ops="barrier,gather", sizes="1K", algorithms="auto", dtype="float32", json=None)
    line = "--ops gather: expected some of all_reduce,reduce_scatter,all_gather,all_to_all,broadcast,barrier"
    with pytest.raises(UsageError, match=f"^{line}$"):
        collectives.run(serial(), args)


class Called:
    """A communicator of rank 1 of 3 that writes down what each collective is called with."""

    rank, size, transport = 1, 3, None

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return lambda *arrays, **options: self.calls.append((name, [(a.size, a.dtype) for a in arrays], options))


@pytest.mark.parametrize(
    ("op", "sizes"),
    [
        ("all_reduce", [8]),
        ("reduce_scatter", [8, 3]),
        ("all_gather", [3, 8]),
        ("all_to_all", [8, 9]),
        ("broadcast", [8]),
        ("barrier", []),
    ],
)
def test_a_collective_is_called_with_the_chosen_algorithm(op, sizes):
    assert list(chunk_bounds(8, 3)) == [(0, 3), (3, 6), (6, 8)]
    comm, dtype = Called(), np.dtype("int64")
    ours, theirs = collectives._calls(comm, op, "this one", 8, dtype)
    ours()
    assert theirs is None
    assert comm.calls == [(op, [(size, dtype) for size in sizes], {"algorithm": "this one"})]


@pytest.mark.parametrize("op", ["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast"])
def test_sums_of_sums_stay_finite(op):
    def rank(comm):
        ours, _ = collectives._calls(comm, op, "auto", 6, np.dtype("float32"))
        with np.errstate(all="raise"):
            for _ in range(200):
                ours()

    run_local(2, rank)


@pytest.mark.parametrize(("ours", "theirs", "calls"), [(1e-3, 4e-3, 10), (5e-3, 1e-3, 2)])
def test_a_collective_is_timed_in_turns_with_mpis(ours, theirs, calls, monkeypatch):
    """One call of each comes first, and one more of ours; they decide how many calls a batch has."""
    clock = SimpleNamespace(now=0.0)
    turns = []

    def taking(who, seconds):
        def call():
            turns.append(who)
            clock.now += seconds

        return call

    monkeypatch.setattr(collectives, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    monkeypatch.setattr(collectives, "_calls", lambda *_: (taking("ours", ours), taking("theirs", theirs)))
    row = collectives.measure(serial(), "all_reduce", "auto", 80, np.dtype("float64"))
    assert "".join(who[0] for who in turns) == "oto" + ("o" * calls + "t" * calls) * collectives.BATCHES
    assert row["seconds"] == pytest.approx(ours) and row["mpi_seconds"] == pytest.approx(theirs)
    assert row["ratio"] == pytest.approx(ours / theirs)
    assert re.fullmatch(r"\{.*\}", json.dumps(row))
