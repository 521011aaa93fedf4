# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 8. All axes at once: 3D parallelism
#
# **Three ways to cut a training step. How do they fit into one another, and which one gets the fast wires?**
#
# Data parallelism cuts the batch (chapters 4 and 5), tensor parallelism the layers (chapter 6), a pipeline the depth
# (chapter 7). Each runs out: of samples, of heads, of layers, or of bandwidth. Large models are trained with all three,
# their sizes multiplied: `--dp 2 --tp 2 --pp 2` takes eight ranks (Narayanan et al. 2021, arXiv 2104.04473).
#
# There is little new code in this chapter. The axes were built so as not to know each other. What is left are three
# questions: do they really compose (the same losses, whatever the layout), what does each of them send, and which ranks
# should be neighbours?
#
# Run it as `mpirun -n 8 python chapters/08_3d_parallel.py`, with any number of ranks. What takes eight ranks runs on
# those of mpirun if it started eight, and else on eight threads of rank 0: the same program with another transport.
# Besides, the ranks that mpirun did start train a layout of their own, chosen from what divides their number.

# %% tags=["active-ipynb"]
# # Eight MPI ranks for this notebook. From here on every cell runs on all of them; as a script, mpirun starts them
# # instead.
# import ipyparallel as ipp
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
from chapters.support.show import printer
from minipar.comm import world

comm = world()

# %%
import hashlib
import json

from minipar.comm import Communicator, DeviceMesh, ModelClock, Network, run_local, serial

rank, N = comm.rank, comm.size
say = printer(rank)  # rank 0 prints and draws; every rank checks
if rank == 0:
    from chapters.support.figures_mesh import plot_layouts, plot_placements
    from chapters.support.show import show, show_source
    from visualize import mesh_traffic, parse_trace, plot_mesh, plot_timeline

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


say(f"{N} rank{'s' if N > 1 else ''}: dp {DP} x tp {TP} x pp {PP}")
say(f"where eight are needed: {'these' if N == 8 else 'threads of rank 0'}")

# %% [markdown]
# ## 8.1 A grid of ranks
#
# The ranks form a grid, the *mesh*, with one axis for each kind of parallelism. A rank has a coordinate on each axis.
# The ranks that differ in one coordinate only are a *row*, and each row is a communicator: chapter 4's all-reduce runs
# in the rows along dp, chapter 6's sums in those along tp, chapter 7's messages in those along pp. None of them knows
# that others exist.

# %%
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
# along dp 2, along pp 4: tp is the *innermost* axis, pp the outermost. Section 8.4 asks why.
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
# The trainer does exactly this, in this order: `tensor_parallel`, then `PipelineParallel`, then `shard`. None of them
# asks what the others did. Each records its part in the parameter's *placement*, and what needs all axes (the norm,
# checkpoints, the bytes below) is a loop over placements. Here with the ranks of this run and ZeRO 1. The parts must
# add up to the model. LayerNorms, positions and some biases are not cut by tp: those count once for each tp rank.

# %%
from minipar.parallel.placement import Placement, Shard
from minipar.train.config import parse, resolve
from minipar.train.data import load_tokens
from minipar.train.trainer import Trainer

if rank == 0:
    show_source(Placement)

T, HIDDEN, V, LAYERS, BATCH, STEPS = 16, 32, 256, 4, 8, 5
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
kept_whole = [p for b in trainer.ddp.buckets for p in b.parameters if not isinstance(p.placement.tp, Shard)]
whole_on_tp = sum(p.size for p in kept_whole)
chunk = sum(p.size for p in trainer.ddp.parameters())  # of them, what this rank's optimizer updates
held = [json.loads(one) for one in comm.all_gather_bytes(json.dumps([part, whole_on_tp, chunk]).encode())]
assert sum(chunk for _, _, chunk in held) == sum(part for part, _, _ in held) // DP
again = sum(whole for _, whole, _ in held) * (TP - 1) // (TP * DP)  # the copies that tp has more than one of
assert sum(part for part, _, _ in held) // DP == trainer.size + again
say(f"the model: {trainer.size:,} parameters; {again:,} more as tp's copies")
for r, (part, _, chunk) in enumerate(held):
    say(f"rank {r}: {part:>7,} parameters after tp and pp; its optimizer updates {chunk:>7,} of them")

# %% [markdown]
# ## 8.2 Six layouts, one loss curve
#
# If the axes do not know each other, every combination must train the same model. Six layouts of eight ranks, with
# dropout and clipping, in float64. The last one has everything at once. (Why `--eps 1e-6`: 6.10.)

# %%
from minipar.train.verify import bound, compare, layer_scales, relative_difference, verify

AXES, PIPELINED = ("tp", "dp", "pp"), "dp 2 x pp 4, zb-h1"
GRID = "--dp 2 --tp 2 --pp 2 --microbatches"
LAYOUTS = {
    "dp 8": "--dp 8",
    "dp 8, ZeRO 3": "--dp 8 --zero-stage 3",
    "tp 8, sequence parallel": "--tp 8 --sequence-parallel",
    PIPELINED: "--dp 2 --pp 4 --microbatches 4 --schedule zb-h1",
    "dp 2 x tp 2 x pp 2": f"{GRID} 4",
    "the same, interleaved, ZeRO 3,\nsequence parallel, recompute": f"{GRID} 4 --schedule interleaved-1f1b "
    "--zero-stage 3 --sequence-parallel --recompute full",
}


def train(comm, flags):
    """What each step reported; all parameters after each step, on rank 0; bytes of step 0 by axis."""
    trainer = trainer_on(comm, f"{flags} --global-batch {BATCH}")
    steps, states = [], []
    for step in range(STEPS):
        comm.traffic.reset()
        steps.append(trainer.step(step))
        if step == 0:
            sent = {axis: comm.traffic.bytes(axis=axis) for axis in AXES}
        states.append(trainer.state_dict())
    return steps, states, sent


single, states, _ = train(serial(), "") if rank == 0 else [None] * 3  # one device takes the whole batch at once


def digest(state):
    """The bits of all parameters, in one number."""
    return hashlib.sha256(b"".join(array.tobytes() for array in state.values())).hexdigest()


def curve(comm, flags):
    """Train a layout on eight ranks; each returns the bytes that it sent, and rank 0 a comparison with one device."""
    steps, found, sent = train(comm, flags)
    if comm.rank != 0:
        return {"sent": sent}
    apart = []
    for mine, alone in zip(found, states, strict=True):
        scales = layer_scales(alone)
        apart.append(max(relative_difference(mine[name], alone[name], scales[name]) for name in alone))
    verdict = compare(found[-1], states[-1], steps, single, exact=False, ranks=8, dtype="float64")
    found = {"losses": [step.loss for step in steps], "apart": apart, "bits": digest(found[-1])}
    return found | {"sent": sent, "passed": verdict.passed, "verdict": verdict.line}


runs = {label: on_eight(curve, flags) for label, flags in LAYOUTS.items()}  # of each the eight ranks' answers
if rank == 0:
    for label, (first, *_) in runs.items():
        assert first["passed"], (label, first["verdict"])
        apart = f"within {first['apart'][-1]:.1e} of one device with the whole batch"
        say(f"{' '.join(label.split()):<60} {STEPS} steps: {apart}")
    say(f"the last one's verdict in full (one device, the whole batch at once):\n  {first['verdict']}")
    assert runs["dp 8"][0]["bits"] == runs["dp 8, ZeRO 3"][0]["bits"]
    say("dp 8 and dp 8 with ZeRO 3: the same bits")
    curves = {label: (first["losses"], first["apart"]) for label, (first, *_) in runs.items()}
    limit = [bound("float64", step) for step in range(1, STEPS + 1)]
    show(plot_layouts(curves, [step.loss for step in single], limit), "08_layouts")

# %% [markdown]
# Above, the symbols lie on one another. Below is what is left between them, in the parameters: rounding. It has two
# causes. The single device here takes the batch at once; the layouts cut it into parts and add those. And tp splits the
# sums inside the products (6.6). The first cause goes away if the single device adds the same parts in the same order:
# then every layout without tp has its **bits**. `--verify` compares with that device. Let it judge the layout of this
# run's own ranks, over MPI:

# %%
trainer = trainer_on(comm, f"{MINE} --zero-stage 3", steps=3)
verdict = verify(trainer, list(trainer.train()), tokens)
assert verdict.passed and ("bit for bit" in verdict.line) == (TP == 1), verdict.line
say(f"{MINE} --zero-stage 3\n{verdict.line}")

# %% [markdown]
# ## 8.3 Bytes per axis
#
# What a step sends is known before it runs. The closed forms of chapters 4 to 7 hold on each axis, with that axis's
# share of the rest: a rank all-reduces over tp for *its* layers, and over dp *its* part of the parameters.
# `predicted_traffic` is their sum, for any combination. The sizes of the buckets come from the parameters' placements,
# which `StepLayout.placements` computes for any rank before anything has run.

# %%
from minipar.parallel.traffic import buckets, dp_bytes, pp_bytes, predicted_traffic, tp_bytes
from minipar.train.layout import step_layout

if rank == 0:
    show_source(buckets, tp_bytes, dp_bytes, pp_bytes)

say(f"bytes of one step, all {N} ranks{'tp':>12}{'dp':>12}{'pp':>12}")
for stage in (0, 1, 3):
    trainer = trainer_on(comm, f"{MINE} --zero-stage {stage}")
    comm.traffic.reset()
    trainer.step(0)
    sent = {axis: comm.traffic.bytes(axis=axis) for axis in AXES}
    assert sent == predicted_traffic(step_layout(trainer.config), rank)
    ranks = [json.loads(one) for one in comm.all_gather_bytes(json.dumps(sent).encode())]
    total = "".join(f"{sum(each[axis] for each in ranks):>12,}" for axis in AXES)
    say(f"{MINE.split(' --micro')[0]} --zero-stage {stage}{total}   predicted on every rank, ==")

# %% [markdown]
# And the six layouts. In each, every rank sent in its first step what the formulas say:

# %%
if rank == 0:
    say(f"{'bytes of one step, all eight ranks':<62}{'tp':>12}{'dp':>12}{'pp':>12}")
    for label, flags in LAYOUTS.items():
        config = resolve(parse(f"{TRAINING} {flags} --global-batch {BATCH}".split()), 8)
        predicted = [predicted_traffic(step_layout(config), r) for r in range(8)]
        assert [answer["sent"] for answer in runs[label]] == predicted
        total = "".join(f"{sum(answer['sent'][axis] for answer in runs[label]):>12,}" for axis in AXES)
        say(f"{' '.join(label.split()):<62}{total}")

# %% [markdown]
# Who sends to whom? A trace holds every message. Here is one step of dp 2 x tp 2 x pp 2, as messages between its ranks
# (the same comes from `--trace FILE.json` and `python -m visualize mesh FILE.json --out FIG.png`):


# %%
def traced(comm):
    """What was recorded in one step."""
    comm = Communicator(comm.transport, clock="model")
    trainer = trainer_on(comm, f"{GRID} 4 --global-batch {BATCH}")
    comm.tracer.enabled = True
    trainer.step(0)
    return comm.tracer.chrome_events(comm.rank)


found = on_eight(traced)
if rank == 0:
    about = {"clock": "model", "mesh": {"pp": 2, "dp": 2, "tp": 2}}
    traffic = mesh_traffic(
        parse_trace({"traceEvents": [event for mine in found for event in mine], "otherData": about})
    )
    for r in range(8):
        assert {axis: traffic.sent(axis, r)[1] for axis in AXES} == runs["dp 2 x tp 2 x pp 2"][r]["sent"]
    show(plot_mesh(traffic), "08_mesh")

# %% [markdown]
# A pipeline rank sends each activation to *one* other rank, the one with its own dp and tp coordinates.
#
# ## 8.4 Why tp is innermost
#
# A cluster has two kinds of links: fast ones inside a host, slow ones between hosts. Ranks are numbered host by host.
# So with hosts of $g$ ranks, a row stays inside a host exactly if its axis is inner enough. Which axis should that be?
#
# Take the *real program* on the model clock, in the scale 1:64: every length stands for one 64 times as
# long, so a model of $h = 96$ and $T = 32$ stands for one of $h = 6144$ and $T = 2048$ in 16 bit, on devices that do
# $4\cdot10^{14}$ operations per second. Two hosts of four ranks. Two axes have NVLink; the third has the link between
# the hosts. Each axis is put there once. (The two ranks of a message are 1, 2 or 4 apart, which tells its axis.) To the
# program nothing changes but the rank order: the same values, the same bytes.
#
# (The links are those of 6.11: bandwidths from data sheets, latencies assumed. A few values per step, norm and loss,
# are priced as if they too were 64 x 64 times as many.)

# %%
from dataclasses import dataclass

SCALE, SPEED = 64, 400e12
LINKS = {  # seconds per message, bytes per second
    "NVLink": (3e-6, 450e9),
    "InfiniBand": (5e-6, 50e9),
    "Ethernet": (30e-6, 12.5e9),
}
DISTANCES = {1: "tp", 2: "dp", 4: "pp"}  # between the two ranks of a row


@dataclass(frozen=True)
class AxisNetwork(Network):
    """A link for each axis: `link` for axis `slow`, NVLink for the others."""

    slow: str | None = None
    link: str = "NVLink"

    def seconds(self, nbytes, source, dest):
        axis = DISTANCES[abs(source - dest)]
        alpha, speed = LINKS[self.link if axis == self.slow else "NVLink"]
        return alpha + nbytes * SCALE**2 * (2 / 4) / speed


BIG = "--layers 2 --hidden 96 --heads 8 --seq-len 32 --vocab-size 256"


def scaled(comm, slow, link, microbatches, trace=False):
    """One step of the scale model with axis `slow` on `link`, the others on NVLink: seconds, traffic, trace."""
    comm = Communicator(comm.transport, clock=ModelClock(SPEED / SCALE**3), network=AxisNetwork(slow=slow, link=link))
    mesh = DeviceMesh(comm, dp=2, tp=2, pp=2)
    flags = f"{BIG} {GRID} {microbatches} --global-batch {2 * microbatches}"
    trainer = Trainer(resolve(parse(flags.split(), 1), 8), mesh, load_tokens(None, vocab_size=256, seq_len=32))
    comm.traffic.reset()
    comm.tracer.enabled = trace
    trainer.step(0)
    traffic = {axis: (comm.traffic.bytes(axis=axis), comm.traffic.messages(axis=axis)) for axis in AXES}
    return comm.clock.now(), traffic, comm.tracer.chrome_events(comm.rank) if trace else []


def deal(jobs):
    """`scaled` for each job, on eight threads; the ranks share out the jobs. {job: what each returned} on rank 0."""
    mine = json.dumps([run_local(8, scaled, *job) for job in jobs[rank::N]]).encode()
    hands = [json.loads(hand) for hand in comm.gather_bytes(mine) or []]
    return {job: hands[i % N][i // N] for i, job in enumerate(jobs)} if rank == 0 else {}


jobs = [(None, "NVLink", 16), *((axis, link, 16) for link in ("InfiniBand", "Ethernet") for axis in AXES)]
traces = [("pp", "Ethernet", 4, True), ("tp", "Ethernet", 4, True)]  # for 7.5
simulated = deal([*traces, *jobs])
if rank == 0:
    times = {job[:2]: max(seconds for seconds, _, _ in simulated[job]) for job in jobs}
    traffic = simulated[jobs[0]][0][1]
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
    show(plot_placements(ideal, bars, notes), "08_placements")

# %% [markdown]
# *Its price* is $\alpha$ per message and $\beta$ per byte, as if nothing were hidden. The step becomes longer by less:
#
# - **tp** sends the most, in the most messages, and in forward everybody waits for it. What can be hidden is half of
# backward's, behind weight gradients (6.11).
#
# - **dp** sends its gradients once per step, whatever the number of microbatches. Some of it travels while the pipeline
# cools down (7.10).
#
# - **pp** sends the least: one activation per microbatch and cut, and once per step the embedding (7.9). Mostly the
# fill, the drain and the embedding wait.
#
# So rank numbers run tp, dp, pp from the inside out, and `--tp` should not exceed the ranks of a host. Megatron has the
# same order. It is no law: with more microbatches tp and pp send more and dp does not, with ZeRO 3 dp may send more
# than tp (the table in 8.3). Count first; the formulas are above.
#
# ## 8.5 The timeline
#
# Two steps of the scale model with 4 microbatches, on Ethernet between the hosts: first in the right order, then with
# tp between the hosts. Of the eight ranks we show four, the first replica. (The other four do the same at the same
# times.)

# %%
if rank == 0:
    events, begin = [], 0.0
    for job in traces:
        for _, _, mine in simulated[job]:
            events += [event | ({"ts": event["ts"] + begin} if "ts" in event else {}) for event in mine]
        begin += 1e6 * max(seconds for seconds, _, _ in simulated[job])
    shown = [event for event in events if event["pid"] in (0, 1, 4, 5) and event["ph"] in "MX"]
    figure = plot_timeline(parse_trace({"traceEvents": shown, "otherData": {"clock": "model"}}))
    title = "dp 2 x tp 2 x pp 2, 1F1B, 4 microbatches. Between the hosts: pp (left), tp (right)"
    figure.axes[0].set_title(title, loc="left", fontsize=10)
    show(figure, "08_timeline")

# %% [markdown]
# Below a rank's computation are its rows of communication, from above: dp, pp (sums), pp (messages), tp. Ranks 0 and 1
# are a tp pair of the first stage, 4 and 5 one of the second. A pair works in step: after each pair of products comes a
# sum that both wait for. On the left these sums are hairlines. On the right they fill the lowest row, and every F and B
# is longer by them: F more than B, which hides half of its own. On the right the messages of pp are short; on the left
# they are the grey pieces.
#
# The order of actions is the same in both halves: 1F1B. After its last backward each stage sums its gradients over dp.
# The second stage is done first, and then waits for the norm, which needs every stage. The last piece on the left is
# the new embedding on its way to the last stage: 7.9's, over the slow link.
#
# ## 8.6 A checkpoint moves
#
# A run is stopped and goes on: on more ranks, or fewer, or cut otherwise. So a checkpoint must not know its layout.
# Each rank writes the elements that *it* owns, and says which they are of the serial model's: that is in its
# parameters' placements. Nobody gathers anything. A rank that resumes puts each parameter together and takes its part.

# %%
import tempfile

from minipar.parallel.state import owned_pieces
from minipar.train.resume import open_checkpoint

if rank == 0:
    show_source(owned_pieces)
    holder = tempfile.TemporaryDirectory()
folder = comm.all_gather_bytes(holder.name.encode() if rank == 0 else b"")[0].decode()


def segment(comm, flags, place, stop=None):
    """Go on from the checkpoint in `place`, if there is one, until step `stop` and save there, or to the end."""
    resume = f"--resume {place}" if stop is None else ""
    config = resolve(parse(f"{TRAINING} --steps {STEPS} {flags} {resume}".split(), 1), comm.size)
    mesh = DeviceMesh(comm, dp=config.mesh.dp, tp=config.mesh.tp, pp=config.mesh.pp)
    trainer = Trainer(config, mesh, tokens, open_checkpoint(config, tokens, comm))
    results = [trainer.step(step) for step in range(trainer.first_step, STEPS if stop is None else stop)]
    if stop is not None:
        trainer.save(place, stop)
    return trainer, results


def move(comm, before, after, place):
    """Three steps in one layout, the rest in another; on rank 0 the comparison with one device that never stopped."""
    segment(comm, f"{before} --global-batch {BATCH}", place, stop=3)
    trainer, results = segment(comm, f"{after} --global-batch {BATCH}", place)
    state = trainer.state_dict()
    if comm.rank == 0:
        verdict = compare(state, states[-1], results, single, exact=False, ranks=8, dtype="float64")
        return verdict.passed, verdict.line, digest(state)


MOVES = (
    (f"{GRID} 4", "--dp 8 --zero-stage 3", None),
    ("--dp 2 --pp 4 --microbatches 4 --schedule gpipe --zero-stage 3", LAYOUTS[PIPELINED], PIPELINED),
)
for number, (before, after, never_stopped) in enumerate(MOVES):
    for passed, line, bits in on_eight(move, before, after, f"{folder}/{number}")[:1]:
        assert passed, line
        say(f"{before}  ->  {after}\n  {line} (one device, the whole batch at once)")
        if never_stopped:
            assert bits == runs[never_stopped][0]["bits"]
            say("  and the bits of the run in this layout that never stopped (7.2)")

# %% [markdown]
# Optimizer state, samples and dropout went along, else the losses of the last steps would differ. What is random is
# keyed by seed, step and sample, so the step's number is all that must be remembered. Where both layouts add in the
# same order, the resumed run has the **bits** of one that never stopped. And over MPI, on this run's own ranks:

# %%
files = f"{folder}/mine"
segment(comm, f"{MINE} --zero-stage 1", files, stop=3)
trainer, results = segment(comm, f"{MINE} --zero-stage 3", files)
verdict = verify(trainer, results, tokens)
assert verdict.passed and ("bit for bit" in verdict.line) == (TP == 1), verdict.line
say(f"{MINE}: ZeRO 1 -> ZeRO 3\n  {verdict.line}")
if rank == 0:
    holder.cleanup()

# %% [markdown]
# On the command line: `--save DIR --save-every K`, and `--resume DIR` with any other `--dp --tp --pp --zero-stage`.
#
# ## 8.7 On several hosts
#
# Nothing in the program changes. A launcher starts the ranks on the hosts. Ranks 0 to 3 on node1, 4 to 7 on node2,
# with MPICH's `mpirun` (a hostfile has a line `node1:4` for each host):
#
# ```
# mpirun --hosts node1,node2 --ppn 4 -n 8 python -m minipar.train --dp 2 --tp 4 ...
# mpirun -f hostfile -n 8 python -m minipar.train --dp 2 --tp 4 ...
# ```
#
# Open MPI's is told by `--host node1:4,node2:4`, or by `--hostfile FILE` with lines `node1 slots=4`. Slurm starts the
# ranks itself:
#
# ```
# srun --mpi=pmi2 --nodes 2 --ntasks-per-node 4 --distribution block python -m minipar.train --dp 2 --tp 4 ...
# ```
#
# `srun --mpi=list` says what it speaks, and the MPI library must speak it too. (MPICH's first line is tested, on two
# network namespaces with a cable between them: `tests/comm/test_multi_host.py`. The others are as their manuals say.)
#
# What to watch:
#
# - **Block order.** `--distribution cyclic` (Slurm), `--map-by node` (Open MPI) and `--ppn 1` (MPICH) deal the ranks
# out to the hosts like cards. Then tp lies between hosts. Nothing fails; it is only slow.
#
# - **tp divides the ranks of a host**: with 8 of them, `--tp` 1, 2, 4 or 8. Else some rows cross.
#
# - **One program and one text** on all hosts, under the same paths, and a shared file system for `--save`. Ranks that
# see different texts are told so before the first step.


# %%
def placed(hosts, per_host, tp, dp, cyclic=False):
    """For each axis how many of its rows lie inside one host, and of how many; pp takes what tp and dp leave."""
    size = hosts * per_host
    host = [r % hosts if cyclic else r // per_host for r in range(size)]
    strides = {"tp": (1, tp), "dp": (tp, dp), "pp": (tp * dp, size // (tp * dp))}
    inside = {}
    for axis, (stride, length) in strides.items():
        rows = {tuple(r - (r // stride % length - k) * stride for k in range(length)) for r in range(size)}
        inside[axis] = sum(len({host[r] for r in row}) == 1 for row in rows), len(rows)
    return inside


for cyclic in (False, True):
    inside = placed(hosts=2, per_host=4, tp=2, dp=2, cyclic=cyclic)
    rows = ", ".join(f"{axis} {here} of {all_of}" for axis, (here, all_of) in inside.items())
    say(f"2 hosts of 4 ranks, dp 2 x tp 2 x pp 2, {'cyclic' if cyclic else 'block'}: rows inside a host: {rows}")
assert placed(2, 4, 2, 2) == {"tp": (4, 4), "dp": (4, 4), "pp": (0, 4)}
assert placed(2, 4, 2, 2, cyclic=True) == {"tp": (0, 4), "dp": (4, 4), "pp": (4, 4)}

# %% [markdown]
# ## 8.8 Exercises: break it, and see what notices
#
# With several axes there is a new kind of mistake: the right operation on the wrong row. Instruments:
#
# - **loss**: is the last loss off by more than 5 %?
#
# - **ranks**: do the ranks that should hold the same values (over dp all, over tp what is not cut) still do so?
#
# - **bytes**: does each rank send on each axis what the formula says?
#
# - **one device**: parameters, losses and norms, by `compare`.
#
# Which catches which? (Two steps, dp 2 x tp 2 x pp 2, clipping at work.)
#
# 1. **A gradient averaged over tp**, as if tp ranks were replicas.
#
# 2. **The norm summed over dp** instead of tp: the squares of cut parameters go to the wrong row, of the same length.
#
# 3. **The norm of the own stage**: each stage clips by what it has.
#
# 4. **Samples dealt by world rank**: `rank % dp` instead of the dp coordinate.
#
# 5. **The axes in the wrong order**: pp innermost, tp outermost.


# %%
from contextlib import nullcontext
from unittest.mock import patch

from minipar.parallel.grad_norm import clip_grad_norm


class AveragesOverTP(Trainer):
    """Mistake 1: what is called with a bucket's parameters before dp sums their gradients."""

    def __init__(self, *args):
        super().__init__(*args)
        self.ddp.before_reduce = self.average

    def average(self, parameters):
        for p in parameters:
            self.mesh.tp.all_reduce(p.grad, algorithm="ordered")
            p.grad /= self.mesh.tp.size


def norm_over_dp(parameters, max_norm, units, dp, tp, pp):
    """Mistake 2: dp in the place of tp."""
    return clip_grad_norm(parameters, max_norm, units, dp, dp, pp)


def norm_of_own_stage(parameters, max_norm, units, dp, tp, pp):
    """Mistake 3: no sum over pp."""
    return clip_grad_norm(parameters, max_norm, units, dp, tp)


class DealsByWorldRank(Trainer):
    """Mistake 4."""

    def samples(self, replica, microbatch):
        return super().samples(self.mesh.world.rank % self.config.mesh.dp, microbatch)


class TensorOutermost(DeviceMesh):
    """Mistake 5, if it is one."""

    AXES = ("pp", "dp", "tp")

    def rank_at(self, **coordinates):
        place = self.coordinates | coordinates
        return (place["tp"] * self.shape["dp"] + place["dp"]) * self.shape["pp"] + place["pp"]


NORM = "minipar.train.trainer.clip_grad_norm"
MISTAKES = {  # how to break it, trainer, mesh
    "nothing broken": (nullcontext, Trainer, DeviceMesh),
    "1. gradient averaged over tp": (nullcontext, AveragesOverTP, DeviceMesh),
    "2. norm over dp, not tp": (lambda: patch(NORM, norm_over_dp), Trainer, DeviceMesh),
    "3. norm of the own stage": (lambda: patch(NORM, norm_of_own_stage), Trainer, DeviceMesh),
    "4. samples by world rank": (nullcontext, DealsByWorldRank, DeviceMesh),
    "5. tp outermost": (nullcontext, Trainer, TensorOutermost),
}
SMALL = f"{GRID} 2 --global-batch 4"


def same(comm, arrays):
    """Whether all ranks of the row hold these bits."""
    return len(set(comm.all_gather_bytes(hashlib.sha256(b"".join(a.tobytes() for a in arrays)).digest()))) == 1


def examine(comm, kind, mesh):
    """Two steps; {instrument: whether it noticed} on this rank, and on rank 0 the comparison with one device."""
    trainer = trainer_on(comm, SMALL, 2, kind, mesh)
    comm.traffic.reset()
    results = [trainer.step(0)]
    place, shape = trainer.mesh.coordinates, trainer.mesh.shape
    # The rank that has this place where tp is innermost.
    usual = (place["pp"] * shape["dp"] + place["dp"]) * shape["tp"] + place["tp"]
    sent = {axis: comm.traffic.bytes(axis=axis) for axis in AXES}
    results.append(trainer.step(1))
    parameters = trainer.ddp.parameters()  # of this rank's stage
    whole = [p.data for p in parameters if not isinstance(p.placement.tp, Shard)]
    alike = [same(trainer.mesh.dp, [p.data for p in parameters]), same(trainer.mesh.tp, whole)]
    seen = {"ranks": not all(alike), "bytes": sent != predicted_traffic(step_layout(trainer.config), usual)}
    state, line = trainer.state_dict(), ""
    if comm.rank == 0:
        verdict = compare(state, right[0], results, right[1], exact=False, ranks=8, dtype="float64")
        seen |= {"loss": abs(results[-1].loss / right[1][-1].loss - 1) > 0.05, "one device": not verdict.passed}
        line = verdict.line
    return seen, line


if rank == 0:
    trainer = trainer_on(serial(), "--global-batch 4", 2)
    results = list(trainer.train())
    right = trainer.state_dict(), results
caught = {}
for name, (mistake, kind, mesh) in MISTAKES.items():
    with mistake():
        found = on_eight(examine, kind, mesh)
    if rank == 0:
        caught[name] = {eye for seen, _ in found for eye, noticed in seen.items() if noticed}
        eyes = "  ".join(
            f"{eye} {'CAUGHT' if eye in caught[name] else '-':<6}" for eye in ("loss", "ranks", "bytes", "one device")
        )
        say(f"{name:<30} {eyes}")
        if "one device" in caught[name]:
            say(f"  {found[0][1].removeprefix('verify: FAILED: 8 ranks differ from 1 device by more than rounding: ')}")

catching = {
    "nothing broken": set(),
    "1. gradient averaged over tp": {"bytes", "one device"},
    "2. norm over dp, not tp": {"ranks", "bytes", "one device"},
    "3. norm of the own stage": {"bytes", "one device"},
    "4. samples by world rank": {"ranks", "one device"},
    "5. tp outermost": set(),
}
assert caught == (catching if rank == 0 else {}), caught
say("5 is right in every number, and slow: only a clock notices (7.4)")

# %% [markdown]
# No mistake shows in the loss.
#
# **1** is right for all parameters that tp does not cut: their gradients are equal, and so is the mean. It ruins the
# cut ones, where it mixes different parts of a matrix. All ranks agree on the ruin.
#
# **2** sends as many bytes as is right, on the wrong axis. Only an account by axis sees it. The two ranks of a tp row
# get different norms, clip differently, and their copies drift apart.
#
# **3**: the ranks that hold copies are in one stage, and have the same wrong norm, so comparing them sees nothing. The
# rule for a norm in 3D: squares of cut parameters are summed over tp, ZeRO's chunks over dp, stages over pp, and each
# element counts once.
#
# **4** is the classic one: a data loader that knows the world and not the mesh. The tp ranks of a row work on different
# samples, as if each had half of an activation. The bytes are perfect.
#
# **5** is no mistake in any number, and no proof will ever find it. Each axis does the same work on other wires. Only a
# clock notices: 8.4's bars say what it costs.
#
# ### For you
#
# 1. Average over tp the gradients of *uncut* parameters only. Which instrument notices? And with
# `--sequence-parallel`, where each tp rank saw other tokens: what is right there, and what does the mean do?
#
# 2. From `tp_bytes` and `dp_bytes`: from how many microbatches on does tp send more than dp, for the scale model of
# 8.4? And with ZeRO 3?
#
# 3. Narayanan et al. (2021, Table 1) trained 145.6 billion parameters on 1536 GPUs with tp 8 and pp 8, batch 2304,
# microbatches of 2 samples, $h = 12\,288$, 80 layers, sequence 2048. How large is dp, how many microbatches has a
# replica, what does a GPU send on each axis per step, and which axes leave a host of 8?
#
# 4. Write a mesh in which dp is outermost (tp, pp, dp). What do 8.4's bars say about it with 4 microbatches, what with
# 64?

# %% tags=["active-ipynb"]
# %autopx

# %% tags=["active-ipynb"]
# # Back in one process: stop the eight.
# cluster.stop_cluster_sync()
