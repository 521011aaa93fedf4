# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 9. All axes at once: 3D parallelism
#
# **Three ways to cut a training step. How do they fit into one another, and which one gets the fast wires?**
#
# You have two hosts with eight GPUs of 80 GB each, and a model of 39 billion parameters whose sequences have 4096
# tokens. No single axis places it well. Data parallelism needs 682 GB per GPU. ZeRO 3 alone, or a pipeline alone, fits
# only if every forward is computed a second time. Tensor parallelism over all sixteen leaves the host. The best of them
# takes 31.1 s a step. All three axes together, 2 x 4 x 2, take 26.4 s and repeat nothing but attention's scores. Large
# models are trained this way (Narayanan et al. 2021, arXiv 2104.04473). At the end of this chapter you can say which
# rank does what, which bytes it sends to whom, and what it costs if the axes lie on the wrong wires.

# %% tags=["active-ipynb"]
# from chapters.support.notebook import start
#
# cluster = start(8)

# %%
from chapters.support.show import printer
from minipar.comm import world

comm = world()
rank, size = comm.rank, comm.size
say = printer(rank)  # rank 0 prints and draws; every rank checks
if rank == 0:
    from chapters.support.ch09 import layout_figures, machine
    from chapters.support.show import show, show_source

    places = machine.places()
    found = {label: seconds and round(seconds, 1) for label, (_, seconds) in places.items()}
    assert list(found.values()) == [None, None, 31.1, None, 40.3, 33.6, 26.4], found
    show(layout_figures.plot_machine(places, machine.ROOM, machine.USED, most=130e9), "09_machine")

# %% [markdown]
# Each bar is the fullest GPU's memory in one layout, as the planner of [chapter 10](10_planning.ipynb) counts it. In
# all of them backward computes attention's scores again. Every axis fails in its own way:
#
# - **dp** cuts the batch ([chapter 4](04_data_parallel.ipynb)). Every GPU keeps the whole model: 682 GB.
# - **ZeRO 3** cuts the model's state too ([chapter 5](05_zero.ipynb)). Each GPU has the activations of all layers.
# - **pp** cuts the layers ([chapter 7](07_pipeline.ipynb)). The first stage keeps 16 microbatches of a sixteenth of
#   the layers: as many activations as one microbatch of all layers. Sixteen stages also have a long bubble.
# - **tp** cuts every matrix, and the activations ([chapter 6](06_tensor_parallel.ipynb)). It fits easily. But its sums
#   are in every layer, and over sixteen GPUs they go through the network.
#
# The last bar uses each axis where it is good: tp inside a host, a short pipeline between the hosts, and two replicas
# that share the optimizer state. These are its sixteen ranks:

# %%
if rank == 0:
    show(layout_figures.plot_grid({"dp": 2, "tp": 4, "pp": 2}, per_host=8), "09_grid")

# %% [markdown]
# ## 9.1 A grid of ranks
#
# *Core, 8 minutes.*
#
# The grid is called the *mesh*. It has one axis for each kind of parallelism, with $d$ ranks along dp, $t$ along tp,
# $p$ along pp and $c$ along cp. (cp cuts the tokens of a sample, [chapter 11](11_long_sequences.ipynb). Here $c$ = 1.)
# A rank has a coordinate on each axis:
#
# rank = ((pp $\cdot\, d$ + dp) $\cdot\, c$ + cp) $\cdot\, t$ + tp.
#
# So the coordinates are the digits of the rank, and the size of each axis is the base of its digit. pp is the slowest
# axis, tp the fastest. The coordinates come back by dividing. The ranks that differ in one coordinate only are a *row*
# of that axis. All this fits into ten lines on plain integers:

# %%
from math import prod

import numpy as np

AXES = ("tp", "dp", "pp")
SLOWEST_FIRST = ("pp", "dp", "cp", "tp")


def coordinates(r, sizes):
    """Take a rank's number apart, fastest axis first."""
    place = {}
    for axis in reversed(SLOWEST_FIRST):
        r, place[axis] = divmod(r, sizes.get(axis, 1))
    return place


def rows(axis, sizes):
    """The rows of an axis: lists of ranks whose other coordinates are equal."""
    grid = np.arange(prod(sizes.values())).reshape([sizes.get(each, 1) for each in SLOWEST_FIRST])
    return np.moveaxis(grid, SLOWEST_FIRST.index(axis), -1).reshape(-1, sizes[axis]).tolist()


sizes = {"dp": 2, "tp": 4, "pp": 2}
for axis in AXES:
    say(f"rows along {axis}: {rows(axis, sizes)}")
assert coordinates(5, sizes) == {"pp": 0, "dp": 1, "cp": 0, "tp": 1}
assert [row for axis in AXES for row in rows(axis, sizes) if 5 in row] == [[4, 5, 6, 7], [1, 5], [5, 13]]

# %% [markdown]
# Rank 5 of the picture has the coordinates pp 0, dp 1, tp 1.
# Its rows are 4, 5, 6, 7 along tp, 1, 5 along dp, and 5, 13 along pp. Neighbours along tp are 1 apart, along dp
# $t = 4$, along pp $t d = 8$. These distances are the *strides* of the axes.
#
# Two rows of different axes share at most one rank. So no pair of ranks ever talks on two axes. In the library each row
# is a communicator: chapter 4's all-reduce runs in the rows along dp, chapter 6's sums in those along tp, chapter 7's
# messages in those along pp. None of them knows that others exist. Among the strategies of this course:

# %%
if rank == 0:
    from chapters.support.overview import draw_strategies

    show(draw_strategies(["dp", "zero1", "tp", "pp"]), "09_here")

# %% [markdown]
# ### In the library
#
# *Deeper, 3 minutes.*
#
# The library adds three things. It refuses sizes whose product is not the number of ranks, and shows the equation. It
# makes a communicator of each row, whose messages cannot be mistaken for another row's. And it gives the communicator
# the axis's name, under which bytes are counted and traced.

# %%
from minipar.comm import DeviceMesh, run_local

if rank == 0:
    show_source(DeviceMesh.__init__, DeviceMesh._along)
    for shape in (sizes, {"dp": 2, "tp": 2, "pp": 2}, {"dp": 4, "tp": 1, "pp": 3}, {"dp": 1, "tp": 6, "pp": 1}):
        for r, mesh in enumerate(run_local(prod(shape.values()), DeviceMesh, **shape)):
            assert mesh.coordinates | {"cp": 0} == coordinates(r, shape)
            for axis in AXES:
                assert [list(getattr(mesh, axis).ranks)] == [row for row in rows(axis, shape) if r in row]
    say("the library's coordinates and rows are these, for each rank of four shapes")

# %% [markdown]
# ## 9.2 What the axes leave on a rank
#
# *Core, 8 minutes.*
#
# From here on the grid is dp 2 x tp 2 x pp 2, which has eight ranks. If mpirun started another number, they are threads
# of rank 0 that run the same program, and mpirun's ranks also train a layout of their own.
#
# Three axes cut the model, from the inside out:
#
# 1. **tp** cuts the large matrices of the serial model. A rank now has a narrower model with all layers.
#
# 2. **pp** takes a run of these narrow layers.
#
# 3. **dp** repeats what is left, with other samples. ZeRO cuts what is repeated: parameters, gradients or optimizer
# state, in chunks over the dp row.
#
# The trainer does exactly this, in this order: `tensor_parallel`, then `PipelineParallel`, then `shard`. None of them
# asks what the others did. Each records its part in the parameter's *placement*. So what a rank holds can be computed
# before anything has run. A model of 59,584 parameters on the eight ranks, with ZeRO 1:

# %%
from chapters.support.ch09 import eight
from chapters.support.ch09.eight import args_of, on_eight, trainer_on
from chapters.support.training import step_layout
from minipar.parallel.placement import BucketSlice, Partial, Shard
from minipar.parallel.placement_table import Placements

MINE = eight.layout_of(size)  # the layout of the ranks that mpirun started
GRID = "--dp 2 --tp 2 --pp 2 --microbatches 4 --global-batch 8"
layout = step_layout(args_of(f"{GRID} --zero-stage 1", 8))
ranks = [layout.placements(**layout.coordinates(r)) for r in range(8)]  # of each rank, those of its parameters
held = [sum(each.dp.size for each in placements) for placements in ranks]  # parameters on each rank,
cut = [sum(each.dp.size for each in placements if isinstance(each.tp, Shard)) for placements in ranks]  # cut by tp,
updated = [sum(len(each.dp.own) for each in placements) for placements in ranks]  # updated by its optimizer
model = sum(prod(each.shape) for each in [*ranks[0], *ranks[4]])  # of a rank of each stage
say(f"parameters of the model {model:,}, on rank 0 {held[0]:,}, on rank 4 {held[4]:,}; updated there {updated[0::4]}")
assert held == [17_504] * 4 + [12_960] * 4 and updated == [8_752] * 4 + [6_480] * 4
assert model == 59_584 and sum(updated) == 60_928
if rank == 0:
    names = [
        f"rank {r}: " + " ".join(f"{axis} {layout.coordinates(r)[axis]}" for axis in ("pp", "dp", "tp"))
        for r in range(8)
    ]
    whole = [held[r] - cut[r] for r in range(8)]
    show(layout_figures.plot_held(cut, whole, updated, names), "09_held")

# %% [markdown]
# A rank of the first stage holds 17,504 parameters, one of the second 12,960: the first has the embeddings too. (The
# second stage's copy of the tied one is not counted: the first updates it and sends it.) Each rank's optimizer updates
# half of them. All optimizers together update 60,928: 1,344 more than the model has. These are LayerNorms, positions
# and some biases. tp does not cut them, so both ranks of a tp row update the same values.
#
# ### Placements
#
# *Deeper, 5 minutes.*
#
# A placement has three parts. What tp does: `Shard` (cut), `Replicate` (the same on all ranks of tp) or `Partial` (the
# same, but with sequence parallelism each rank's gradient covers its own tokens only: the gradient is their sum over
# tp, chapter 6). The rank of pp. And the parameter's place in a bucket, whose chunks belong to the ranks of dp. What
# needs all axes is a loop over placements: the norm, checkpoints, the bytes of 9.4.

# %%
if rank == 0:
    print(Placements(ranks[0][:14]))  # the embeddings and the first block
    show_source(BucketSlice.elements)

# %% [markdown]
# A line of the table is one parameter's placement on rank 0: its name and shape in the serial model, what tp does to
# it, the rank of pp that owns it, the rank of ep (for experts, chapter 12), and which elements of the rank's part its
# optimizer updates. In a program of yours `print(mp.placements(model))` shows it, on any rank.
#
# `BucketSlice.elements` says which elements of a parameter lie in the chunk of a dp rank.
#
# ## 9.3 Six layouts, one loss curve
#
# *Core, 8 minutes.*
#
# If the axes do not know each other, every combination must train the same model. Six layouts of eight ranks, with
# clipping, in float64. The last one has everything at once.

# %%
from minipar.train.verify import BOUND, verify

PIPELINED = "dp 2 x pp 4, zb-h1"
LAYOUTS = {
    "dp 8": "--dp 8 --global-batch 8",
    "dp 8, ZeRO 3": "--dp 8 --zero-stage 3 --global-batch 8",
    "tp 8, sequence parallel": "--tp 8 --sequence-parallel --global-batch 8",
    PIPELINED: "--dp 2 --pp 4 --microbatches 4 --schedule zb-h1 --global-batch 8",
    "dp 2 x tp 2 x pp 2": GRID,
    "the same, interleaved, ZeRO 3,\nsequence parallel, recompute": f"{GRID} --schedule interleaved-1f1b "
    "--zero-stage 3 --sequence-parallel --recompute full",
}
single = eight.single_device("--global-batch 8") if rank == 0 else None  # one device takes the whole batch at once
runs = {label: on_eight(comm, eight.train, flags, single) for label, flags in LAYOUTS.items()}
if rank == 0:
    for label, (first, *_) in runs.items():
        assert first["passed"], (label, first["verdict"])
        say(f"{' '.join(label.split()):<60} {eight.STEPS} steps: within {first['differences'][-1]:.1e} of one device")
    assert runs["dp 8"][0]["bits"] == runs["dp 8, ZeRO 3"][0]["bits"]
    one_device = [result.loss for result in single.results]
    show(layout_figures.plot_layouts(eight.curves(runs), one_device, [BOUND] * eight.STEPS), "09_layouts")

# %% [markdown]
# Above, the symbols lie on one another. Below is what is left between them, in the parameters: rounding, some
# $10^{-13}$ of an array's largest value, where `--verify` allows $10^{-9}$ (6.10). It has two causes. The single device
# here takes the batch at once; the layouts cut it into parts and add those. And tp splits the sums inside the products
# (chapter 6). dp 8 without ZeRO and with stage 3 have the same bits.
#
# The first cause goes away if the single device adds the same parts in the same order: then every layout without tp has
# its **bits**. `--verify` compares with that device. It judges the layout of this run's own ranks, over MPI:

# %%
trainer = trainer_on(comm, f"{MINE} --zero-stage 3", steps=3)
verdict = verify(trainer, list(trainer.train()))
assert verdict.passed and ("bit for bit" in verdict.line) == ("--tp 1" in MINE), verdict.line
say(f"{MINE} --zero-stage 3\n{verdict.line}")

# %% [markdown]
# ### The same text
#
# *Core, 4 minutes.*
#
# Let the model write. It reads one sentence over and over, 100 steps, once on one device and once on the eight ranks.
# Each run saves a checkpoint, and each model continues the word "The", with the likeliest letter at each place. Before
# training it repeats one letter.

# %%
from minipar.comm import chunk_bounds, serial

folder, cleanup = eight.shared_directory(comm)
if rank == 0:
    eight.learn(serial(), "", 0, f"{folder}/untrained")
    alone = eight.learn(serial(), "", 100, f"{folder}/one")
losses = on_eight(comm, eight.learn, "--dp 2 --tp 2 --pp 2 --microbatches 4", 100, f"{folder}/eight")
if rank == 0:
    texts = {who: eight.text_of(f"{folder}/{who}") for who in ("untrained", "one", "eight")}
    for who, text in texts.items():
        say(f"{who:<10} {text}")
    say(f"the last loss: {alone:.12f} on one device, {losses[0]:.12f} on eight ranks")
    assert texts["one"] == texts["eight"] != texts["untrained"] and "big dwarf only jumps." in texts["eight"]
    assert abs(losses[0] - alone) < 1e-7

# %% [markdown]
# The texts are equal, letter by letter. The losses differ by rounding only. On the command line: `python -m
# minipar.train --export DIR` and `python -m minipar.generate --from DIR --prompt The`.
#
# ## 9.4 Bytes per axis
#
# *Core, 8 minutes.*
#
# What a step sends is known before it runs. The closed forms of chapters 4 to 7 hold on each axis, with that axis's
# share of the rest: a rank all-reduces over tp for *its* layers, and over dp *its* part of the parameters. A rank has
# $\Psi_r$ parameters and $L_r$ layers. There are $m$ microbatches of $B$ samples with $T$ tokens, the hidden size is
# $h$, the vocabulary $V$, and a value takes $w$ bytes. One rank sends per step
#
# - over **dp** all gradients once: $2 \Psi_r \frac{d-1}{d}\, w$ bytes,
#
# - over **tp** for each microbatch four all-reduces per layer of its stage, one more for the embedding or the head,
# each of $B T h$ values: $m\,(4 L_r + 1) \cdot 2 B T h\, \frac{t-1}{t}\, w$,
#
# - over **pp** for each microbatch one activation or its gradient per neighbouring stage: $m B T h\, w$, or twice that
# in the middle; the first and the last rank send $\frac{V}{t}\, h\, w$ bytes more: the new embedding downwards, its
# gradient upwards. (This is for one stage per rank, without sequence parallelism.)
#
# Here for rank 0 of dp 2 x tp 2 x pp 2. Which axis sends the most bytes?

# %%
from chapters.support.predict import predict, reveal
from chapters.support.training import step_traffic
from minipar.parallel.predicted_traffic import tp_bytes

predict("most bytes", ...)  # "tp", "dp" or "pp"
d, t, m, B = 2, 2, 4, 1  # ranks of dp and of tp, microbatches, samples in each
T, h, V, w = 16, 32, 256, 8  # tokens in a sample, hidden size, vocabulary, bytes per value
by_hand = {
    "tp": m * (4 * 2 + 1) * 2 * B * T * h * (t - 1) // t * w,
    "dp": 2 * held[0] * (d - 1) // d * w,
    "pp": m * B * T * h * w + V // t * h * w,
}
if rank == 0:
    counted = runs["dp 2 x tp 2 x pp 2"][0]["sent"]
    for axis in AXES:
        say(f"{axis}: {by_hand[axis]:>8,} bytes by hand, {counted[axis]:>8,} counted")
    assert {axis: counted[axis] - by_hand[axis] for axis in AXES} == {"tp": 16, "dp": 8, "pp": 200}
    assert by_hand == {"tp": 147_456, "dp": 140_032, "pp": 49_152}
    reveal("most bytes", max(counted, key=counted.get), say)

# %% [markdown]
# tp sends 147,456 bytes, dp 140,032, pp 49,152. What is missing are sums of single values: 8 bytes for the loss, over
# dp and over pp, and for the gradient's norm 16 bytes over tp and 192 over pp. **How does the loss leave the last
# stage?** Only that stage knows it. All other stages add a zero: an all-reduce of one value, 8 bytes, over pp. A second
# one over dp adds up the replicas. Then every rank has the loss of the global batch, and every rank can decide alike
# whether a step is skipped.
#
# ### For every layout
#
# *Deeper, 3 minutes.*
#
# The norm's 192 bytes are 24 sums of squares. There is one for each of dp's two chunks, for each of six units (four
# layers, embedding, head), and for what tp has cut and what it has not. They are added after the all-reduce, so the
# order is the same for every cut into stages. The library's forms have these sums too, and sequence parallelism,
# recompute, ZeRO and uneven stages; the sizes of the buckets come from the placements. So its account is exact. In each
# of the six layouts, every rank sent in its first step what `predicted_traffic` says, and so does each rank of this run
# over MPI:

# %%
if rank == 0:
    show_source(tp_bytes)
    say(f"{'bytes of one step, all eight ranks':<62}{'tp':>12}{'dp':>12}{'pp':>12}")
    for label, flags in LAYOUTS.items():
        args = args_of(flags, 8)
        assert [answer["sent"] for answer in runs[label]] == [step_traffic(args, r) for r in range(8)]
        total = "".join(f"{sum(answer['sent'][axis] for answer in runs[label]):>12,}" for axis in AXES)
        say(f"{' '.join(label.split()):<62}{total}")
trainer = trainer_on(comm, f"{MINE} --zero-stage 3")
assert eight.counted_step(comm, trainer)[1] == step_traffic(trainer.args, rank)

# %% [markdown]
# ### Who sends to whom
#
# *Core, 2 minutes.*
#
# A trace holds every message. Here is one step of dp 2 x tp 2 x pp 2, as messages between its ranks
# (the same comes from `--trace FILE.json` and `python -m visualize mesh FILE.json --out FIG.png`):

# %%
events = on_eight(comm, eight.traced_step, GRID)
if rank == 0:
    from visualize import mesh_traffic, parse_trace, plot_mesh

    traffic = mesh_traffic(parse_trace(eight.one_trace(events)))
    assert all(traffic.sent(axis, 0)[1] == counted[axis] for axis in AXES)
    show(plot_mesh(traffic), "09_mesh")

# %% [markdown]
# A pipeline rank sends each activation to *one* other rank, the one with its own dp and tp coordinates. (The picture
# counts in KiB, 1024 bytes: 147,472 bytes are 144 KiB.)
#
# ## 9.5 Why tp is innermost
#
# *Core, 12 minutes.*
#
# A cluster has two kinds of links: fast ones inside a host, slow ones between hosts. Ranks are numbered host by host,
# $g$ in each. All rows of an axis stay inside a host if their stride times their length divides $g$: along tp if $t$
# divides $g$, along dp if $t d$ does. Counted for dp 2 x tp 4 x pp 2:


# %%
def rows_inside(sizes, host):
    """For each axis, how many of its rows lie inside one host; host(r) is the host of rank r."""
    return {axis: sum(len({host(r) for r in row}) == 1 for row in rows(axis, sizes)) for axis in AXES}


sizes = {"dp": 2, "tp": 4, "pp": 2}
assert {axis: len(rows(axis, sizes)) for axis in AXES} == {"tp": 4, "dp": 8, "pp": 8}
assert rows_inside(sizes, host=lambda r: r // 8) == {"tp": 4, "dp": 8, "pp": 0}
assert rows_inside(sizes, host=lambda r: r // 4) == {"tp": 4, "dp": 0, "pp": 0}
assert rows_inside(sizes, host=lambda r: r % 2) == {"tp": 0, "dp": 8, "pp": 8}  # ranks dealt to the hosts in turn

# %% [markdown]
# On hosts of eight all rows of tp and dp stay inside and those of pp leave. On hosts of four only tp stays inside.
# Which axis should leave last?
#
# We time the *real program* on the model clock, with dp 2 x tp 2 x pp 2 on two hosts of four ranks. The model has two
# layers, $B = 1$ and $m = 16$. It is a scale model: $h = 96$ stands for 6144, $T = 32$ for 2048, $V = 256$ for 16,384,
# each 64 times as large. Bytes and times are those of the full size, in 16 bit, on devices that do $4\cdot10^{14}$
# operations per second. Two axes have NVLink (3 µs, 450 GB/s); the third has the link between the
# hosts, InfiniBand (5 µs, 50 GB/s) or Ethernet (30 µs, 12.5 GB/s). Each axis is put there once. To the program nothing
# changes but the rank order: the same values, the same bytes. (Bandwidths are from data sheets, latencies assumed.)
#
# With every axis on NVLink a step takes 156.8 ms. How many milliseconds does it take with tp on Ethernet? And pp?

# %%
predict("ms with tp on Ethernet", ...)
predict("ms with pp on Ethernet", ...)

# %%
from chapters.support.ch09.eight import Job

SLOW = ("InfiniBand", "Ethernet")
steps = [Job(axis, "Ethernet", 4, traced=True) for axis in ("pp", "tp")]  # for the timeline
jobs = {(axis, link): Job(axis, link, 16) for link in SLOW for axis in AXES}
simulated = eight.simulate(comm, [Job(None, "NVLink", 16), *jobs.values(), *steps])
if rank == 0:
    fast = simulated[Job(None, "NVLink", 16)]
    times = {key: simulated[job].seconds for key, job in jobs.items()}
    say(f"every axis on NVLink: {fast.seconds * 1e3:.1f} ms. One axis on another link (rank 0's bytes and messages):")
    for (axis, link), seconds in times.items():
        nbytes, messages = fast.traffic[axis]
        price = messages * eight.LINKS[link][0] + nbytes / eight.LINKS[link][1]
        text = f"{axis} on {link:<10}{nbytes / 1e6:>7,.0f} MB in {messages:>3} messages"
        say(f"{text}   price {price * 1e3:>5.1f} ms   step longer by {(seconds - fast.seconds) * 1e3:>5.1f} ms")
    assert all(times["tp", link] > times["dp", link] > times["pp", link] > fast.seconds for link in SLOW)
    found = [round(1e3 * seconds, 1) for seconds in (fast.seconds, *(times[axis, "Ethernet"] for axis in AXES))]
    assert found == [156.8, 330.5, 202.5, 186.4], found
    for axis in ("tp", "pp"):
        reveal(f"ms with {axis} on Ethernet", round(1e3 * times[axis, "Ethernet"], 1), say)
    show(layout_figures.plot_placements(fast.seconds, times), "09_placements")

# %% [markdown]
# *Price* means: all messages and bytes of the axis on the slow link, nothing hidden. With dp and pp the step grows by
# less than that, because it already contains NVLink's price and because some of the messages are hidden. With tp on
# Ethernet it grows by a little more than rank 0's price: the last stage sums over the vocabulary, too. On Ethernet
# between the hosts a step takes 330.5 ms with tp there, 202.5 ms with dp, 186.4 ms with pp:
#
# - **tp** sends the most, in the most messages, and everybody waits for each of them. (The sums of backward, half of
# all, could be hidden behind weight gradients. Megatron-LM does so; this library keeps the plain form.)
#
# - **dp** sends its gradients once per step, whatever the number of microbatches. On the last stage it travels while
# the first still works, which saves nothing here: the first stage ends last, and its sum is not hidden.
#
# - **pp** sends the least: one activation per microbatch and cut, and once per step the embedding. Ranks wait for these
# messages mostly while the pipeline fills and drains, and at the end for the embedding.
#
# So rank numbers run tp, dp, pp from the inside out, and $t$ should divide the ranks of a host. Megatron has the same
# order. It is no law: with more microbatches tp and pp send more and dp does not; with ZeRO 3 dp may send more than tp
# (9.4's table).
#
# ### Where the time goes
#
# *Deeper, 5 minutes.*
#
# The timeline shows it. Two steps with 4 microbatches, on Ethernet between the hosts: first in the
# right order, then with tp between the hosts. Of the eight ranks we show four, the first replica.

# %%
if rank == 0:
    trace = eight.one_after_another([simulated[job] for job in steps], ranks=(0, 1, 4, 5))
    show(layout_figures.plot_two_steps(trace, between_hosts=("pp", "tp")), "09_timeline")

# %% [markdown]
# Below a rank's computation is one row for each kind of communication: the sums over tp, dp and pp, and pp's messages
# ("pp p2p"). Ranks 0 and 1 are a tp pair of the first stage, 4 and 5 one of the second. A pair works in step: after
# each pair of products comes a sum that both wait for. On the left the sums over tp are hairlines. On the right they
# fill their row, and every F and B is longer by them. The messages of pp, solid grey, are long on the left and hardly
# more than ticks on the right; where the row is hatched, a rank waits for a message that is not sent yet.
#
# The order of actions is the same in both halves: 1F1B. After its last backward each stage sums its gradients over dp.
# The second stage is done first, and then waits for the norm, which needs every stage. The last piece on the left is
# the new embedding on its way to the last stage, over the slow link.
#
# **All messages of a step**, in the order in which minipar sends them (9.4 has their bytes):
#
# | what | over | how often | hidden behind |
# | --- | --- | --- | --- |
# | ZeRO 3: a block's parameters | dp | per microbatch, forward and backward | the block before, if fetched ahead |
# | sums inside blocks, forward | tp | two per layer and microbatch | nothing |
# | an activation, its gradient | pp | per microbatch and cut | other microbatches, but for filling and draining |
# | sums inside blocks, backward | tp | two per layer and microbatch | gradients of weights |
# | gradients | dp | once, bucket by bucket | the last microbatch's backward, but for the last bucket |
# | the tied embedding's gradient | pp | once, last stage to first | the first stage's last backward |
# | the loss | pp, dp | once | nothing: one value |
# | squares for the norm | pp, tp; dp with ZeRO | once | nothing: all ranks wait for all |
# | ZeRO 1, 2: new parameters | dp | once | nothing here; in Megatron the next forward (chapter 5) |
# | the new embedding | pp | once, first stage to last | nothing |
#
# **What is random, by axis.** Weights are drawn for the serial model, with one seed on all ranks, and each keeps its
# part. Samples differ along dp, and are the same along tp and pp. Dropout's masks differ with the sample, so along dp;
# along tp they would be one mask where the activation is whole, and parts of one mask where it is cut (6.8).
#
# **On several hosts** nothing in the program changes; a launcher starts the ranks: `mpirun --hosts node1,node2 --ppn 4
# -n 8 python -m minipar.train --dp 2 --tp 4` (MPICH), `--host node1:4,node2:4` (Open MPI), or `srun --nodes 2
# --ntasks-per-node 4 --distribution block` (Slurm). Let it number the ranks in blocks. `--distribution cyclic`,
# `--map-by node` and `--ppn 1` deal them to the hosts in turn, and then tp lies between hosts, as in the last `assert`
# above. Nothing fails; it is only slow. All hosts need the same program and text, and a shared file system for
# `--save`.
#
# ## 9.6 A checkpoint moves
#
# *Core, 10 minutes.*
#
# **[Exercise 28](exercises/e28_reshard.py)** asks for a parameter on tp 4 from the pieces that dp 2 x tp 2 wrote: `make
# exercises PYTEST="-k e28"`. Write it before you open the next cell.
#
# A run is stopped and goes on: on more ranks, or fewer, or cut otherwise. So a checkpoint must not know its layout.
# Each rank writes the elements that *it* owns, and names them by their place in the serial model's parameter. Here is
# a matrix that tp cuts by columns, whose optimizer state ZeRO cuts into chunks of the flattened part:


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def write(matrix, d, t):
    """{rank: what it writes}: elements start:stop of the row-major part number `part` of `parts`, cut along dim 1."""
    files = {}
    for r in range(d * t):
        place = coordinates(r, {"dp": d, "tp": t})
        part = np.split(matrix, t, axis=1)[place["tp"]].reshape(-1)  # what this rank computes with
        own = np.array_split(np.arange(part.size), d)[place["dp"]]  # what its optimizer updates
        start = int(own[0])
        stop = int(own[-1]) + 1
        files[r] = {"part": place["tp"], "parts": t, "start": start, "stop": stop, "elements": part[start:stop].copy()}
    return files


def read(files, shape):
    """Put the matrix together. What the layout was is in the names of the elements only."""
    parts = [np.full(prod(shape) // files[0]["parts"], np.nan) for _ in range(files[0]["parts"])]
    for file in files.values():
        parts[file["part"]][file["start"] : file["stop"]] = file["elements"]
    return np.concatenate([part.reshape(shape[0], -1) for part in parts], axis=1)


matrix = np.random.default_rng(8).standard_normal((5, 8))
for before, after in (((2, 2), (1, 8)), ((3, 4), (2, 2)), ((1, 1), (7, 2))):  # d and t of the writer, of the reader
    files = write(matrix, *before)
    assert sum(file["elements"].size for file in files.values()) == matrix.size  # each element once
    resumed = write(read(files, matrix.shape), *after)
    direct = write(matrix, *after)
    assert all(resumed[r]["elements"].tobytes() == direct[r]["elements"].tobytes() for r in direct)
say("written by one layout, read by another: the same bits on every rank")
files = write(matrix, d=2, t=2)
assert [files[3][key] for key in ("part", "parts", "start", "stop")] == [1, 2, 10, 20]
if rank == 0:
    show(layout_figures.plot_pieces(files, matrix.shape), "09_pieces")

# %% [markdown]
# Four ranks write a matrix of 5 x 8: dp 2 x tp 2. Each tp rank holds four columns, 20 elements, and each of its two
# replicas owns ten of them. Nobody gathers anything, nothing is written twice, and the reader needs neither the
# writer's mesh nor its number of ranks: `part`, `parts`, `start` and `stop` say which elements of the serial matrix
# these are.
#
# ### In the library
#
# *Deeper, 8 minutes.*
#
# The library asks the placements:

# %%
from pathlib import Path

from minipar.parallel.state import owned_pieces

LAYER = "h.0.mlp.c_fc.weight"
if rank == 0:
    show_source(owned_pieces)
MOVES = (
    (GRID, "--dp 8 --zero-stage 3 --global-batch 8", None),
    ("--dp 2 --pp 4 --microbatches 4 --schedule gpipe --zero-stage 3 --global-batch 8", LAYOUTS[PIPELINED], PIPELINED),
)
for number, (before, after, never_stopped) in enumerate(MOVES):
    answers = on_eight(comm, eight.move, before, after, f"{folder}/{number}", single)
    if rank == 0:
        assert answers[0]["passed"], answers[0]["verdict"]
        say(f"{before} -> {after}\n  {answers[0]['verdict']}")
        assert never_stopped is None or answers[0]["bits"] == runs[never_stopped][0]["bits"]
pieces = on_eight(comm, eight.pieces_of, GRID, LAYER)
if rank == 0:
    say("\n".join(f"rank {r}: {piece}" for r in range(8) for piece in pieces[r]))
    assert [(piece["start"], piece["stop"]) for own in pieces for piece in own] == [(0, 968)] * 2 + [(968, 2048)] * 2
    saved = Path(folder, "0", "step-00000003")
    assert np.load(saved / "parameter" / f"{LAYER}.npy").shape == (32, 128)
    say("the checkpoint:", ", ".join(sorted(path.name for path in saved.iterdir())))

# %% [markdown]
# `owned_pieces` adds to the cell above what real parameters need. A parameter that tp does not cut belongs to the rank
# with tp 0 alone. A matrix that holds queries, keys and values is cut within each third, `groups` = 3. And chunks are
# cut from whole buckets, not from single parameters. So of this layer's matrix, 32 x 128 of which a tp rank holds 2,048
# elements, the first replica owns 968 and the second 1,080.
#
# The **file format** is plainer than ours: the arrays of the serial model, each in a file. `parameter/NAME.npy` is a
# parameter, `exp_avg/NAME.npy` and `exp_avg_sq/NAME.npy` are AdamW's two means, and `run.json` has the step, the flags
# and a fingerprint of the text. The owners send the pieces of one array after the other to rank 0, which joins and
# writes it, so no rank ever holds the whole state. Each rank of the new layout opens each array and takes its part.
# (Frameworks for large models write pieces, as our cell does: one writer would be too slow.) All is written to
# `step-00000003.partial`, which is renamed at the end: a run that is killed leaves a whole checkpoint or none.
#
# Samples and dropout are keyed by seed, step and sample, so of what is random only the step's number must be
# remembered. The first move goes from dp 2 x tp 2 x pp 2 to dp 8 with ZeRO 3. The second one adds in the same order
# before and after, so the resumed run has the **bits** of the run of 9.3 that never stopped. And over MPI, on this
# run's own ranks:

# %%
eight.stop_and_save(comm, f"{MINE} --zero-stage 1", f"{folder}/mine")
trainer = eight.resumed(comm, f"{MINE} --zero-stage 3", f"{folder}/mine")
verdict = verify(trainer, list(trainer.train()))
assert verdict.passed and ("bit for bit" in verdict.line) == ("--tp 1" in MINE), verdict.line
say(f"{MINE}: ZeRO 1 -> ZeRO 3\n  {verdict.line}")
cleanup.close()

# %% [markdown]
# On the command line: `--save DIR --save-every K`, and `--resume DIR` with any other `--dp --tp --pp --zero-stage`. The
# run takes everything else, such as `--global-batch`, `--order` and `--seed`, from the checkpoint. So it goes on with
# the samples that come next, in every layout.
#
# ## 9.7 Mistakes, and what notices them
#
# *Core, 10 minutes.*
#
# Exercise 12 comes before this section: write the gradient's norm over three axes (`make exercises PYTEST="-k e12"`).
#
# With several axes there is a new kind of mistake: the right operation on the wrong row. Four instruments look at two
# steps of dp 2 x tp 2 x pp 2 with clipping at work:
#
# - **loss**: is the last loss off by more than 5 %?
#
# - **ranks**: do the ranks that should hold the same values still do so? (On dp all parameters, on tp those that are
# not cut.)
#
# - **bytes**: does each rank send on each axis what the formula says?
#
# - **one device**: are parameters, losses and norms those of one device?
#
# Here are four mistakes. Which instrument catches which?
#
# 1. **A gradient averaged over tp**, as if tp ranks were replicas.
#
# 2. **The norm summed over dp** instead of tp: the squares of cut parameters go to the wrong row, of the same length.
#
# 3. **Samples dealt by world rank**: `rank % dp` instead of the dp coordinate.
#
# 4. **The axes in the wrong order**: pp innermost, tp outermost.

# %%
predict("mistake 1", ...)  # those that notice it, in alphabetical order, such as "loss, ranks"; or "nobody"
predict("mistake 2", ...)
predict("mistake 3", ...)
predict("mistake 4", ...)

# %%
from contextlib import nullcontext
from unittest.mock import patch

from minipar.parallel.grad_norm import clip_grad_norm
from minipar.train.trainer import Trainer


class AveragesOverTP(Trainer):
    """Mistake 1: averages a bucket's gradients before dp sums them."""

    def __init__(self, *args):
        super().__init__(*args)
        self.ddp.before_reduce = self.average

    def average(self, parameters):
        for p in parameters:
            self.mesh.tp.all_reduce(p.grad, algorithm="ordered")
            p.grad /= self.mesh.tp.size


def norm_over_dp(parameters, max_norm, dp, tp, pp):
    """Mistake 2: dp in the place of tp."""
    return clip_grad_norm(parameters, max_norm, dp, dp, pp)


class DealsByWorldRank(Trainer):
    """Mistake 3: the samples of another replica."""

    def samples(self, replica, microbatch):
        return super().samples(self.mesh.world.rank % self.args.dp, microbatch)


class TensorOutermost(DeviceMesh):
    """Mistake 4, if it is one."""

    AXES = ("pp", "dp", "tp")

    def rank_at(self, **coordinates):
        place = self.coordinates | coordinates
        return (place["tp"] * self.shape["dp"] + place["dp"]) * self.shape["pp"] + place["pp"]


GUARD = "minipar.parallel.tensor.layers.check_same_batch"  # it would refuse mistake 3: patched, it does nothing
MISTAKES = {  # trainer, mesh, how to break it
    "nothing broken": (Trainer, DeviceMesh, nullcontext()),
    "1. gradient averaged over tp": (AveragesOverTP, DeviceMesh, nullcontext()),
    "2. norm over dp, not tp": (Trainer, DeviceMesh, patch.object(Trainer, "clip", staticmethod(norm_over_dp))),
    "3. samples by world rank": (DealsByWorldRank, DeviceMesh, patch(GUARD)),
    "4. tp outermost": (Trainer, TensorOutermost, nullcontext()),
}
right = eight.single_device("--global-batch 4", 2) if rank == 0 else None
noticed = {}
for name, (kind, mesh, mistake) in MISTAKES.items():
    with mistake:
        answers = on_eight(comm, eight.examine, kind, mesh, right)
    noticed[name] = {instrument for answer in answers for instrument in answer}
if rank == 0:
    for number in "1234":
        (found,) = (names for name, names in noticed.items() if name.startswith(number))
        reveal(f"mistake {number}", ", ".join(sorted(found)) or "nobody", say)
    show(layout_figures.plot_noticed(noticed, ("loss", "ranks", "bytes", "one device")), "09_noticed")
    assert list(noticed.values()) == [
        set(),
        {"bytes", "one device"},
        {"ranks", "bytes", "one device"},
        {"one device"},
        set(),
    ]

# %% [markdown]
# No mistake shows in the loss.
#
# The rule for a norm in 3D is that each element counts once. So squares of cut parameters are summed over tp, and those
# of uncut ones are not; ZeRO's chunks are summed over dp, and stages over pp. A tied embedding counts on one stage
# only.
#
# **1** is right for all parameters that tp does not cut: their gradients are equal, and so is the mean. It ruins the
# cut ones, where it mixes different parts of a matrix. All ranks agree on the wrong values.
#
# **2** sends as many bytes as is right, on the wrong axis: the sum of all bytes does not show it, an account by axis
# does. The two ranks of a tp row get different norms, clip differently, and their copies drift apart.
#
# **3** is the classic one: a data loader that knows the world and not the mesh. The tp ranks of a row work on different
# samples, and their sums add activations that do not belong together. The bytes are perfect, and so are the copies:
# both ranks go on with the same wrong sums. The library refuses it: its first step compares the tokens of a tp row. For
# this table the check was switched off.
#
# **4** is no mistake in any value, and no proof will ever find it. Each axis does the same work on other wires. Only a
# clock notices: 9.5's bars say what it costs.
#
# ### Where two runs part, and by which factor
#
# *Core, 6 minutes.*
#
# `--verify` says that a run is wrong, but not what to look for. And whoever writes a training loop in another framework
# has no `--verify`. What can be compared there is a *record*: for each step the loss, the norm of the gradient, and of
# each parameter's gradient and update a norm and a projection on a fixed random direction. If one run's gradient is
# $r$ times the other's, the norm is $|r|$ times and the projection $r$ times as large; if it is another gradient, no
# $r$ fits. Two more mistakes, for the comparison alone; the [museum](../docs/museum.md), a collection of published
# mistakes, has their like:
#
# 5. **A factor too many.** The gradients are already those of the global mean. Somebody believes that each rank divided
# by its own tokens only, and multiplies by $d$.
#
# 6. **A sum too many.** Under sequence parallelism the gradients of the norms, the positions and the biases of
# row-parallel layers are summed over tp. Every rank then has the whole gradient, and somebody sums again.
#
# By how much is the loss off after 50 steps, with gradients twice too large?

# %%
predict("largest relative error of the loss", ...)

# %%
from tempfile import TemporaryDirectory

from minipar.compare.differences import as_text, compare


class TimesDP(Trainer):
    """Mistake 5: all gradients d times too large."""

    def gradient(self, step):
        loss = super().gradient(step)
        for p in self.ddp.parameters():
            p.grad *= self.mesh.dp.size
        return loss


class SumsAgainOverTP(Trainer):
    """Mistake 6: what is Partial is summed over tp twice."""

    def gradient(self, step):
        loss = super().gradient(step)
        for p in self.ddp.parameters():
            if isinstance(p.placement.tp, Partial):
                self.mesh.tp.all_reduce(p.grad)
        return loss


with TemporaryDirectory() as records:
    curves = {}
    for kind in (Trainer, TimesDP, SumsAgainOverTP):
        curves[kind] = on_eight(comm, eight.record, kind, str(Path(records, kind.__name__)))
    for kind in (TimesDP, SumsAgainOverTP) if rank == 0 else ():
        apart = max(abs(wrong / right - 1) for right, wrong in zip(curves[Trainer][0], curves[kind][0], strict=True))
        finding = compare(Path(records, "Trainer"), Path(records, kind.__name__))
        say(f"{kind.__name__}: the loss is at most {apart:.1e} off in 50 steps\n{as_text(finding)}")
        factor, group = (2, "all parameters") if kind is TimesDP else (4, "what tensor parallelism does not split")
        found = finding.differences[0]
        if kind is TimesDP:
            reveal("largest relative error of the loss", apart, say)
        assert apart < 5e-4 and finding.step == 0 and len(finding.differences) == 1
        assert abs(found.ratio - factor) < 1e-9 and found.group.startswith(group)
        assert any(cause.startswith(f"{factor} = {'dp' if kind is TimesDP else 'tp'}") for cause in found.causes)
    if rank == 0:
        from visualize import plot_comparison

        show(plot_comparison(finding.ratios), "09_ratios")

# %% [markdown]
# Both loss curves agree with the right one to three digits for 50 steps, because AdamW divides a gradient by its own
# size: nobody sees the mistake until clipping, another optimizer or another number of ranks is tried. The comparison
# finds it in the first step, and names the parameters and the factor. On the command line:
#
#     python -m minipar.train --record A
#     mpirun -n 8 python -m minipar.train --dp 2 --tp 4 --record B
#     python -m minipar.compare A B
#
# where A is the record of a run that is right (one rank's, say), and B that of another layout, or of a loop in any
# framework that has copied the lines of `minipar/compare/record.py` ([docs/compare.md](../docs/compare.md)).
# [Chapter 14](14_my_run_is_wrong.ipynb) starts from the symptom.
#
# ## 9.8 PyTorch's names
#
# *Deeper, 5 minutes.*
#
# DCP is `torch.distributed.checkpoint`, and the schedules are in `torch.distributed.pipelining`.
#
# | here | PyTorch | Megatron-LM |
# | --- | --- | --- |
# | `DeviceMesh(comm, dp=2, tp=4, pp=2)` | `init_device_mesh(...)` | `initialize_model_parallel(...)` |
# | `--tp 4 --pp 2`, dp is what is left | sizes of the mesh's dims | `--tensor-model-parallel-size 4` and so on |
# | `mesh.tp`, a communicator | `mesh["tp"].get_group()` | `get_tensor_model_parallel_group()` |
# | `mesh.coordinates["tp"]` | `mesh.get_local_rank("tp")` | `get_tensor_model_parallel_rank()` |
# | tp fastest, pp slowest | the last dim of the mesh is fastest | `order="tp-cp-ep-dp-pp"` |
# | `Shard`, `Replicate`, `Partial` | `Shard(dim)`, `Replicate()`, `Partial()` (DTensor) | parameter's `partition_dim` |
# | `tensor_parallel` | `parallelize_module(model, mesh["tp"], plan)` | `ColumnParallelLinear` and so on |
# | `PipelineParallel` | `PipelineStage`, `Schedule1F1B` | `get_forward_backward_func()` |
# | `shard`, `--zero-stage` | `fully_shard(model, mesh=mesh["dp"])` | `--use-distributed-optimizer` |
# | `--save DIR` | DCP: `save(state_dict, checkpoint_id=DIR)` | `--save DIR --ckpt-format torch_dist` |
# | `--resume DIR` | DCP: `load(state_dict, checkpoint_id=DIR)` | `--load DIR` |
# | `run.json` | `.metadata` | `.metadata`, `common.pt` |
# | a piece: cut, start, stop | a chunk: offsets and sizes in each dim | `ShardedTensor`: `global_offset` |
#
# The mesh of 9.1 is `init_device_mesh("cuda", (2, 2, 4), mesh_dim_names=("pp", "dp", "tp"))` in PyTorch, and in
# Megatron-LM `--tensor-model-parallel-size 4 --pipeline-model-parallel-size 2` on 16 GPUs. DeepSpeed chooses a ZeRO
# stage with `"zero_optimization": {"stage": 3}`.
#
# DCP names a piece by a box in the whole tensor; here a piece is a range of a flattened part, because ZeRO's chunks are
# cut from flat buckets. FSDP2 cuts each parameter along dim 0, so boxes are enough for it.
#
# The same in PyTorch: `chapters/pytorch/ch09.py`.
#
# ## 9.9 Problems
#
# *Deeper, 30 minutes.*
#
# 1. dp 4 x tp 2 x pp 3 on hosts of eight. Which coordinates has rank 17, and which ranks are in its rows? Which axes
# leave a host?
#
# 2. Narayanan et al. (2021, Table 1) trained 145.6 billion parameters on 1536 GPUs with tp 8 and pp 8, a global batch
# of 2304 samples, $h = 12\,288$, 80 layers, 2048 tokens per sample. Take microbatches of 2 samples and $w = 2$. How
# large is $d$, and how many microbatches has a replica? What does a GPU in the middle of the pipeline send on each axis
# per step, by the formulas of 9.4 (ten layers, no embedding, $\Psi_r$ an even share)? Which axes leave a host of eight?
#
# 3. For rank 0 of 9.4, from how many microbatches on does tp send more than dp? And if ZeRO 3 gathers each block for
# each forward and each backward, about $(2m+1)\,\Psi_r \frac{d-1}{d}$ values over dp? For the model of 9.5 at full size
# ($B = 1$, $T = 2048$, $h = 6144$, $V = 16\,384$, $w = 2$), where rank 0 sends 586 MB over dp: from how many
# microbatches on does pp send more than dp, so that by bytes alone dp should be the outermost axis?
#
# 4. A matrix of 6 x 8 is cut by columns over tp 2 and by ZeRO over dp 3. Which rows and columns does rank 3 write?
# A LayerNorm's 8 weights are not cut by tp. Which ranks write which of them? (Each is a bucket of its own, and
# chunks are cut as `np.array_split` does.)
#
# 5. After dp has summed the gradients, each of the eight ranks of dp 2 x tp 2 x pp 2 sums the squares of all that it
# holds, and the sums are all-reduced over the world. How often does an element of a cut matrix count, and one of a
# LayerNorm? Without ZeRO, and with ZeRO 2, where a rank keeps its own chunk only?
#
# 6. Average over tp the gradients of *uncut* parameters only, where nothing should be sent. Which instrument of 9.7
# notices? And with `--sequence-parallel`, where these are `Partial` (9.2): what is right there, and what does a mean in
# its place do?
#
# ## 9.10 Answers
#
# *Deeper.*
#
# <details><summary>Answers</summary>
#
# 1. $17 = (2 \cdot 4 + 0) \cdot 2 + 1$: pp 2, dp 0, tp 1. Its rows are 16, 17 along tp, 17, 19, 21, 23 along dp, and 1,
# 9, 17 along pp. $t = 2$ and $t d = 8$ divide 8, so tp and dp stay inside a host and pp leaves it.
#
# 2. $d = 1536 / 64 = 24$, and $m = 2304 / (24 \cdot 2) = 48$. An activation has $B T h$ = 50.3 million values, 101 MB.
# tp: $48 \cdot 4 \cdot 10 \cdot 2 \cdot \frac78 \cdot 101$ MB = 338 GB. dp: $2 \cdot 2.275\cdot10^9 \cdot \frac{23}{24}
# \cdot 2$ bytes = 8.7 GB. pp: $2 \cdot 48 \cdot 101$ MB = 9.7 GB. tp fills a host exactly; dp (stride 8) and pp (stride
# 192) leave it. tp sends 35 times as much as pp. Here pp does not send the least: it sends for each of 48 microbatches,
# and dp once.
#
# 3. tp sends 36,864 bytes per microbatch, dp 140,032 per step: from 4 on. With ZeRO 3 dp sends 140,032 per microbatch
# and half of that besides, so never. In the model of 9.5 an activation has $2048 \cdot 6144 \cdot 2$ bytes = 25.2 MB
# and the embedding $\frac{16384}{2} \cdot 6144 \cdot 2$ bytes = 100.7 MB: pp sends more from
# $(586 - 100.7) / 25.2 = 19.3$, so 20 microbatches on.
#
# 4. Rank 3 is dp 1, tp 1. Its part has $6 \cdot 4 = 24$ elements, of which the second third, 8:16, is its own: rows 2
# and 3, columns 4 to 7. The LayerNorm is written by the ranks with tp 0, which are 0, 2 and 4: elements 0:3, 3:6 and
# 6:8.
#
# 5. Without ZeRO a cut matrix counts $d = 2$ times, a LayerNorm $d t = 4$ times. With ZeRO 2 a cut matrix counts once
# and a LayerNorm twice. Hence the rule of 9.7, with tp 0 alone counting what is not cut.
#
# 6. Bytes alone. The two gradients are the same bits, and $(x + x) / 2 = x$ exactly. With sequence parallelism each is
# the sum over other tokens, and right is their sum. The mean is half of it at $t = 2$. Ranks agree and the bytes are
# right; one device alone notices.
#
# </details>

# %% jupyter={"source_hidden": true} tags=["hide-input"]
from math import ceil

sizes = {"dp": 4, "tp": 2, "pp": 3}
assert coordinates(17, sizes) == {"pp": 2, "dp": 0, "cp": 0, "tp": 1}
assert [r for axis in AXES for r in rows(axis, sizes) if 17 in r] == [[16, 17], [17, 19, 21, 23], [1, 9, 17]]
assert rows_inside(sizes, host=lambda r: r // 8) == {"tp": 12, "dp": 6, "pp": 0}

d, t = 24, 8
m = 2304 // (d * 2)
activation = 2 * 2048 * 12_288 * 2
sent = {"tp": m * 40 * 2 * activation * 7 / 8, "dp": 2 * 145.6e9 / 64 * 23 / 24 * 2, "pp": 2 * m * activation}
assert m == 48 and [round(sent[axis] / 1e9, 1) for axis in AXES] == [338.2, 8.7, 9.7]

assert ceil(by_hand["dp"] / (by_hand["tp"] / 4)) == 4 and ceil((586 - 100.7) / 25.2) == 20
assert by_hand["dp"] > by_hand["tp"] / 4  # for each microbatch, with ZeRO 3

file = write(np.arange(48.0).reshape(6, 8), 3, 2)[3]
assert np.array_equal(file["elements"].reshape(2, 4), np.arange(48.0).reshape(6, 8)[2:4, 4:8])
assert [(each[0], each[-1] + 1) for each in np.array_split(np.arange(8), 3)] == [(0, 3), (3, 6), (6, 8)]

for name, whole, chunks in ((LAYER, 2, 1), ("h.0.ln_1.weight", 4, 2)):
    placed = [p for placements in ranks for p in placements if p.name == name]
    assert sum(p.dp.size for p in placed) == whole * prod(placed[0].shape)
    assert sum(len(p.dp.own) for p in placed) == chunks * prod(placed[0].shape)
say("the answers hold")

# %% tags=["active-ipynb"]
# %autopx

# %% tags=["active-ipynb"]
# # Back in one process: stop the eight.
# cluster.stop_cluster_sync()
