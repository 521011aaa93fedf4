# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 7. All axes at once: 3D parallelism
#
# **Three ways to cut a training step. How do they fit into one another, and which one gets the fast wires?**
#
# Data parallelism cuts the batch (chapters 3 and 4), tensor parallelism the layers (chapter 5), a pipeline the depth
# (chapter 6). Each runs out: of samples, of heads, of layers, or of bandwidth. Large models are trained with all three,
# their sizes multiplied: `--dp 2 --tp 2 --pp 2` takes eight ranks (Narayanan et al. 2021, arXiv 2104.04473).
#
# There is little new code in this chapter. The axes were built so as not to know each other. What is left are three
# questions: do they really compose (the same losses, whatever the layout), what does each of them send, and which ranks
# should be neighbours?
#
# Run it as `mpirun -n 8 python chapters/07_3d_parallel.py`, with any number of ranks. What takes eight ranks runs on
# those of mpirun if it started eight, and else on eight threads of rank 0: the same program with another transport.
# Besides, the ranks that mpirun did start train a layout of their own, chosen from what divides their number.

# %% tags=["active-ipynb"]
# # Eight MPI ranks for this notebook. From here on every cell runs on all of them; as a script, mpirun starts them
# # instead.
# import ipyparallel as ipp
#
# import minipar  # sets one BLAS thread for each engine, which inherits it
#
# cluster = ipp.Cluster(engines="mpi", n=8, log_level=40)
# cluster.start_cluster_sync()
# client = cluster.connect_client_sync()
# client.wait_for_engines(8, interactive=False)
# view = client[:]
# view.block = True
# view.activate()
# %pxconfig --progress-after 600
# %autopx

# %%
import hashlib
import json

from minipar.comm import run_local, world

comm = world()
rank, N = comm.rank, comm.size
say = print if rank == 0 else (lambda *words: None)  # rank 0 talks and draws; every rank checks
if rank == 0:
    from visualize import parse_trace, plot_layouts, plot_placements, plot_timeline, show, show_source

# The layout of the ranks that mpirun started.
TP = 2 if N % 2 == 0 else 1
PP = 2 if N % 4 == 0 else 3 if N % 3 == 0 else 1
DP = N // (TP * PP)


def on_eight(work, *arguments):
    """work(comm, *arguments) on eight ranks: what each returned, on rank 0; elsewhere nothing. Results are JSON's."""
    if N != 8:
        return run_local(8, work, *arguments) if rank == 0 else []
    gathered = comm.gather_bytes(json.dumps(work(comm, *arguments)).encode())
    return [json.loads(result) for result in gathered] if rank == 0 else []


say(f"{N} rank{'s' if N > 1 else ''}: dp {DP} x tp {TP} x pp {PP}; eight of them as {'ranks' if N == 8 else 'threads'}")

# %% [markdown]
# ## 7.1 A grid of ranks
#
# The ranks form a grid, the *mesh*, with one axis for each kind of parallelism. A rank has a coordinate on each axis.
# The ranks that differ in one coordinate only are a *row*, and each row is a communicator: chapter 3's all-reduce runs
# in the rows along dp, chapter 5's sums in those along tp, chapter 6's messages in those along pp. None of them knows
# that others exist.

# %%
from minipar.comm import DeviceMesh

if rank == 0:
    show_source(DeviceMesh)


def rows_of(comm):
    """The world ranks of this rank's row along each axis."""
    mesh = DeviceMesh(comm, dp=2, tp=2, pp=2)
    return {axis: getattr(mesh, axis).ranks for axis in DeviceMesh.AXES}


for r, rows in enumerate(on_eight(rows_of)):
    assert all(r in row for row in rows.values())
    assert set(rows["tp"]) & set(rows["dp"]) == set(rows["tp"]) & set(rows["pp"]) == {r}
    assert [row[1] - row[0] for row in rows.values()] == [1, 2, 4]
    say(f"rank {r}: " + "   ".join(f"{axis} with {row}" for axis, row in rows.items()))

# %% [markdown]
# Two rows meet in one rank, never in two. So no pair of ranks ever talks on two axes. Along tp neighbours are 1 apart,
# along dp 2, along pp 4: tp is the *innermost* axis, pp the outermost. Section 7.4 asks why.
#
# ### What the axes cut, from the inside out
#
# 1. **tp** cuts each matrix of the serial model. A rank now has a narrower model with all layers.
#
# 2. **pp** takes a run of these narrow layers.
#
# 3. **dp** repeats what is left, with other samples. ZeRO cuts what is repeated: parameters, gradients or optimizer
# state, in chunks over the dp row.
#
# The trainer does exactly this, in this order: `tensor_parallel`, then `PipelineParallel`, then `shard`. Here with the
# ranks of this run and ZeRO 1. The parts must add up to the model. LayerNorms, positions and some biases are not cut by
# tp: those count once for each tp rank.

# %%
from minipar.train.config import parse, resolve
from minipar.train.data import load_tokens
from minipar.train.trainer import Trainer

T, HIDDEN, V, LAYERS, BATCH, STEPS = 16, 32, 256, 8, 8, 6
tokens = load_tokens(None, vocab_size=V, seq_len=T)
SHAPE = f"--layers {LAYERS} --hidden {HIDDEN} --heads 8 --seq-len {T} --vocab-size {V} --dtype float64 --lr 3e-3"
TRAINING = f"{SHAPE} --reduction ordered --dropout 0.1 --clip-grad 0.5 --eps 1e-6"


def trainer_on(comm, flags, steps=STEPS, kind=Trainer, mesh=DeviceMesh):
    """The trainer of this rank for a layout given as flags."""
    config = resolve(parse(f"{TRAINING} --steps {steps} {flags}".split(), 1), comm.size)
    return kind(config, mesh(comm, dp=config.mesh.dp, tp=config.mesh.tp, pp=config.mesh.pp), tokens)


MINE = f"--dp {DP} --tp {TP} --pp {PP} --microbatches {2 * PP} --global-batch {2 * PP * DP}"
if TP > 1:
    MINE += " --sequence-parallel"
trainer = trainer_on(comm, f"{MINE} --zero-stage 1")
part = sum(bucket.size for bucket in trainer.ddp.buckets)  # of the parameters, on this rank
whole_on_tp = sum(p.size for b in trainer.ddp.buckets for p in b.parameters if TP == 1 or p not in trainer.tensor.cuts)
chunk = sum(p.size for p in trainer.ddp.optimized)  # of them, what this rank's optimizer updates
held = [json.loads(one) for one in comm.all_gather_bytes(json.dumps([part, whole_on_tp, chunk]).encode())]
assert sum(chunk for _, _, chunk in held) == sum(part for part, _, _ in held) // DP
again = sum(whole for _, whole, _ in held) * (TP - 1) // (TP * DP)  # the copies that tp has more than one of
assert sum(part for part, _, _ in held) // DP == trainer.size + again
say(f"the model: {trainer.size:,} parameters; {again:,} more as tp's copies")
for r, (part, _, chunk) in enumerate(held):
    say(f"rank {r}: {part:>7,} parameters after tp and pp; of the optimizer's state those of {chunk:>7,}")

# %% [markdown]
# ## 7.2 Six layouts, one loss curve
#
# If the axes do not know each other, every combination must train the same model. Six layouts of eight ranks, with
# dropout and clipping, in float64. The last one has everything at once. (Why `--eps 1e-6`: 5.10.)

# %%
from minipar.comm import serial
from minipar.train.verify import bound, compare, layer_scales, relative_difference, verify

GRID = "--dp 2 --tp 2 --pp 2 --microbatches"
LAYOUTS = {
    "dp 8": "--dp 8",
    "dp 8, ZeRO 3": "--dp 8 --zero-stage 3",
    "tp 8, sequence parallel": "--tp 8 --sequence-parallel",
    "pp 8, zb-h1": "--pp 8 --microbatches 8 --schedule zb-h1",
    "dp 2 x tp 2 x pp 2": f"{GRID} 4",
    "the same, interleaved, ZeRO 3,\nsequence parallel, recompute": f"{GRID} 4 --schedule interleaved-1f1b --zero-stage 3 "
    "--sequence-parallel --recompute full",
}


def train(comm, flags):
    """(what each step reported, all parameters after each step: on rank 0)"""
    trainer = trainer_on(comm, f"{flags} --global-batch {BATCH}")
    return zip(*((result, trainer.ddp.state_dict()) for result in trainer.train()), strict=True)


single, states = train(serial(), "") if rank == 0 else (None, None)  # one device takes the whole batch at once


def curve(comm, flags):
    """Train a layout on eight ranks: on rank 0 losses, differences to one device by step, verdict, digest."""
    steps, found = train(comm, flags)
    if comm.rank != 0:
        return None
    apart = []
    for mine, alone in zip(found, states, strict=True):
        scales = layer_scales(alone)
        apart.append(max(relative_difference(mine[name], alone[name], scales[name]) for name in alone))
    verdict = compare(found[-1], states[-1], steps, single, exact=False, ranks=8, dtype="float64")
    bits = hashlib.sha256(b"".join(array.tobytes() for array in found[-1].values())).hexdigest()
    return [step.loss for step in steps], apart, verdict.passed, verdict.line, bits


curves = {label: on_eight(curve, flags)[:1] for label, flags in LAYOUTS.items()}
if rank == 0:
    curves = {label: found for label, (found,) in curves.items()}
    for label, (_, apart, passed, line, _) in curves.items():
        assert passed, (label, line)
        say(f"{' '.join(label.split()):<62} parameters within {apart[-1]:.1e} after {STEPS} steps")
    say(f"one of the verdicts in full: {line}")
    assert curves["dp 8"][-1] == curves["dp 8, ZeRO 3"][-1]
    say("dp 8 and dp 8 with ZeRO 3: the same bits")
    alone, limit = [step.loss for step in single], [bound("float64", step) for step in range(1, STEPS + 1)]
    pairs = {label: found[:2] for label, found in curves.items()}
    show(plot_layouts(pairs, alone, limit), "07_layouts")

# %% [markdown]
# Above, the symbols lie on one another. Below is what is left between them, in the parameters: rounding. It has two
# causes. The single
# device here takes the batch at once; the layouts cut it into 8 or 4 parts and add those. And tp splits the sums inside
# the products (5.6). The first cause goes away if the single device adds the same parts in the same order: then every
# layout without tp has its **bits**. `--verify` compares with that device. Let it judge the layout of this run's own
# ranks, over MPI:

# %%
trainer = trainer_on(comm, f"{MINE} --zero-stage 3", steps=3)
verdict = verify(trainer, list(trainer.train()), tokens)
assert verdict.passed and ("bit for bit" in verdict.line) == (TP == 1), verdict.line
say(f"{MINE} --zero-stage 3\n{verdict.line}")

# %% [markdown]
# ## 7.3 Bytes per axis
#
# What a step sends is known before it runs. The closed forms of chapters 3 to 6 hold on each axis, with that axis's
# share of the rest: a rank all-reduces over tp for *its* layers, and over dp *its* part of the parameters.
# `predicted_traffic` is their sum, for any combination.

# %%
from minipar.nn import GPTConfig
from minipar.parallel.volume import StepLayout, dp_bytes, pp_bytes, predicted_traffic, tp_bytes
from minipar.train.pipelined import schedule_of

AXES = ("tp", "dp", "pp")
if rank == 0:
    show_source(tp_bytes, dp_bytes, pp_bytes)


def predicted(trainer):
    """Bytes that this rank should send on each axis in a step."""
    mesh, model, data = trainer.config.mesh, trainer.config.model, trainer.config.data
    layout = StepLayout(
        GPTConfig(model.vocab_size, model.seq_len, model.hidden, model.layers, model.heads),
        length=model.seq_len,
        samples=trainer.samples_per_microbatch,
        microbatches=data.microbatches,
        itemsize=8 if trainer.config.run.dtype == "float64" else 4,
        dp=mesh.dp,
        tp=mesh.tp,
        pp=mesh.pp,
        zero_stage=mesh.zero_stage,
        schedule=schedule_of(trainer.config) if mesh.pp > 1 else None,
        sequence_parallel=mesh.sequence_parallel,
        recompute=trainer.config.run.recompute == "full",
        reduction=trainer.config.run.reduction,
    )
    place = trainer.mesh.coordinates
    return predicted_traffic(layout, (place["pp"] * mesh.dp + place["dp"]) * mesh.tp + place["tp"])


def counted(trainer, step):
    """Bytes that this rank does send in one step."""
    traffic = trainer.mesh.world.traffic
    traffic.reset()
    trainer.step(step)
    return {axis: traffic.bytes(axis=axis) for axis in AXES}


for stage in range(4):
    trainer = trainer_on(comm, f"{MINE} --zero-stage {stage}")
    sent = counted(trainer, 0)
    assert sent == predicted(trainer)
    everyone = [json.loads(one) for one in comm.all_gather_bytes(json.dumps(sent).encode())]
    rows = "   ".join(f"{axis} {sum(each[axis] for each in everyone):>9,}" for axis in AXES)
    say(f"ZeRO {stage}: bytes of all {N} ranks: {rows}   predicted on every rank, ==")


def traffic_of(comm, flags):
    trainer = trainer_on(comm, f"{flags} --global-batch {BATCH}")
    sent = counted(trainer, 0)
    return sent, sent == predicted(trainer)


say(f"\n{'rank 0 of eight sends':<62}{'tp':>10}{'dp':>10}{'pp':>10}")
for label, flags in LAYOUTS.items():
    found = on_eight(traffic_of, flags)
    assert all(equal for _, equal in found)
    for sent, _ in found[:1]:
        say(f"{' '.join(label.split()):<62}" + "".join(f"{sent[axis]:>10,}" for axis in AXES))

# %% [markdown]
# ## 7.4 Why tp is innermost
#
# A cluster has two kinds of links: fast ones inside a host, slow ones between hosts. Ranks are numbered host by host.
# So with hosts of $g$ ranks, a row stays inside a host exactly if its axis is inner enough. Which axis should that be?
#
# Take the *real program* on the model clock, in the scale 1:64 of chapter 5: every length stands for one 64 times as
# long, so a model of $h = 96$ and $T = 32$ stands for one of $h = 6144$ and $T = 2048$ in 16 bit, on devices that do
# $4\cdot10^{14}$ operations per second. Two hosts of four ranks. Two axes have NVLink; the third has the link between
# the hosts. Each axis is put there once. To the program nothing changes but the rank order: the same numbers, the same
# bytes.
#
# (The links are those of 5.11: bandwidths from data sheets, latencies assumed. A few numbers per step, norm and loss,
# are priced as if they too were 64 x 64 times as many.)

# %%
from minipar.comm import Communicator, ModelClock, Network

SCALE, SPEED = 64, 400e12
LINKS = {  # seconds per message, bytes per second
    "NVLink": (3e-6, 450e9),
    "InfiniBand": (5e-6, 50e9),
    "Ethernet": (30e-6, 12.5e9),
}
NETWORKS = {link: Network(alpha, SCALE**2 * (2 / 4) / speed) for link, (alpha, speed) in LINKS.items()}
BIG = "--layers 4 --hidden 96 --heads 8 --seq-len 32 --vocab-size 480"


def scaled(comm, slow, link, microbatches, trace=False):
    """One step of the scale model with axis `slow` on `link`, the others on NVLink: seconds, traffic, trace."""
    comm = Communicator(comm.transport, clock=ModelClock(SPEED / SCALE**3))
    mesh = DeviceMesh(comm, dp=2, tp=2, pp=2)
    for axis in AXES:
        getattr(mesh, axis).network = NETWORKS[link if axis == slow else "NVLink"]
    flags = f"{BIG} {GRID} {microbatches} --global-batch {2 * microbatches}"
    trainer = Trainer(resolve(parse(flags.split(), 1), 8), mesh, load_tokens(None, vocab_size=480, seq_len=32))
    comm.traffic.reset()
    comm.tracer.enabled = trace
    trainer.step(0)
    traffic = {axis: (comm.traffic.bytes(axis=axis), comm.traffic.messages(axis=axis)) for axis in AXES}
    return comm.clock.now(), traffic, comm.tracer.chrome_events(comm.rank) if trace else []


MANY = 16
jobs = [(None, "NVLink"), *((axis, link) for link in ("InfiniBand", "Ethernet") for axis in AXES)]
times = {}
for job in jobs:
    found = on_eight(scaled, *job, MANY)
    if rank == 0:
        times[job] = max(seconds for seconds, _, _ in found)
        traffic = found[0][1]
if rank == 0:
    ideal = times[None, "NVLink"]
    say(f"every axis on NVLink: {ideal * 1e3:.1f} ms. One axis on another link (rank 0's bytes and messages):")
    say("                               InfiniBand               Ethernet")
    say("axis       MB   messages   its price  step longer   its price  step longer")
    for axis, (nbytes, messages) in traffic.items():
        row = f"{axis} {nbytes * SCALE**2 / 2 / 1e6:>10,.0f} {messages:>8}"
        for link in ("InfiniBand", "Ethernet"):
            alpha, speed = LINKS[link]
            price = messages * alpha + nbytes * SCALE**2 / 2 / speed
            row += f" {price * 1e3:>9.1f} ms {(times[axis, link] - ideal) * 1e3:>9.1f} ms"
        say(row)
    for link in ("InfiniBand", "Ethernet"):
        assert times["tp", link] > times["dp", link] > times["pp", link] > ideal
    bars = {link: {axis: times[axis, link] for axis in AXES} for link in ("InfiniBand", "Ethernet")}
    notes = {"tp": "added by tp between hosts", "dp": "added by dp between hosts", "pp": "added by pp between hosts"}
    show(plot_placements(ideal, bars, notes), "07_placements")

# %% [markdown]
# *Its price* is $\alpha$ per message and $\beta$ per byte, as if nothing were hidden. The step becomes longer by less:
#
# - **tp** sends the most, in the most messages, and in forward everybody waits for it. What is hidden is half of
# backward's, behind weight gradients (5.11).
#
# - **dp** sends its gradients once per step, whatever the number of microbatches. Much of it travels while the pipeline
# cools down (6.10).
#
# - **pp** sends the least: one activation per microbatch and cut. Only the fill and the drain wait for its messages.
#
# So the order of rank numbers is tp, dp, pp from the inside out, and `--tp` should not exceed the ranks of a host. It is
# Megatron's order too. With more microbatches, tp and pp send more and dp does not; with ZeRO 3 dp sends more than tp.
# Then count again: the formulas are above.
#
# ## 7.5 The timeline
#
# The same scale model with 4 microbatches in the right order: tp and dp on NVLink, pp on InfiniBand.

# %%
found = on_eight(scaled, "pp", "InfiniBand", 4, True)
if rank == 0:
    events = [event for _, _, mine in found for event in mine]
    figure = plot_timeline(parse_trace({"traceEvents": events, "otherData": {"clock": "model"}}))
    figure.axes[0].set_title("dp 2 x tp 2 x pp 2, 1F1B, 4 microbatches; ranks 4 to 7 have the second stage", loc="left", fontsize=10)
    show(figure, "07_timeline")
