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

# %% tags=["active-ipynb", "setup"]
# from chapters.support.notebook import start
#
# cluster = start(8)

# %% tags=["setup"]
import numpy as np

import minipar as mp
from chapters.support.show import printer
from chapters.support.training import step_traffic
from chapters.support.whole_runs import verdict_of
from minipar.comm import chrome_events, world

comm = world()
rank, size = comm.rank, comm.size
say = printer(rank)  # rank 0 prints and draws; every rank checks
if rank == 0:
    from chapters.support.ch09 import layout_figures, machine
    from chapters.support.overview import draw_strategies
    from chapters.support.show import show, show_file, show_source

# %%
if rank == 0:
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
# *Core, 6 minutes.*
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
# messages in those along pp. Among the strategies of this course:

# %%
if rank == 0:
    show(draw_strategies(["dp", "zero1", "tp", "pp"]), "09_here")

# %% [markdown]
# ### In the library
#
# *Deeper, 3 minutes.*

# %% [markdown]
# The library adds three things. It refuses sizes whose product is not the number of ranks, and shows the equation. It
# makes a communicator of each row, whose messages cannot be mistaken for another row's. And it gives the communicator
# the axis's name, under which bytes are counted and traced.

# %%
from minipar.comm import run_local

if rank == 0:
    show_source(mp.DeviceMesh.__init__, mp.DeviceMesh._along)
    for shape in (sizes, {"dp": 2, "tp": 2, "pp": 2}, {"dp": 4, "tp": 1, "pp": 3}, {"dp": 1, "tp": 6, "pp": 1}):
        for r, mesh in enumerate(run_local(prod(shape.values()), mp.DeviceMesh, **shape)):
            assert mesh.coordinates | {"cp": 0} == coordinates(r, shape)
            for axis in AXES:
                assert [list(getattr(mesh, axis).ranks)] == [row for row in rows(axis, shape) if r in row]
    say("the library's coordinates and rows are these, for each rank of four shapes")

# %% [markdown]
# ## 9.2 What the axes leave on a rank
#
# *Core, 6 minutes.*
#
# From here on the grid is dp 2 x tp 2 x pp 2, which has eight ranks. (If you have started another number, rank 0 runs
# eight threads instead.) Three axes cut the model, from the inside out:
#
# 1. **tp** cuts the large matrices of the serial model. A rank now has a narrower model with all layers.
#
# 2. **pp** takes a run of these narrow layers.
#
# 3. **dp** repeats what is left, with other samples. ZeRO cuts what is repeated: parameters, gradients or optimizer
# state, in chunks over the dp row.
#
# `python -m minipar.train` does exactly this, in this order: `tensor_parallel`, then `PipelineParallel`, then `shard`.
# Each records its part in the parameter's *placement*. `trainer_of` makes on a
# rank what the command line makes. Here it is, for a model of 59,584 parameters, with ZeRO 1:


# %%
from chapters.support.ch09.eight import on_eight
from minipar.parallel.placement import Shard
from minipar.train.data import load_tokens
from minipar.train.flags import parse
from minipar.train.trainer import Trainer

TRAINING = (
    "--layers 4 --hidden 32 --heads 8 --seq-len 16 --vocab-size 256 --dtype float64 --global-batch 8 "
    "--lr 3e-3 --clip-grad 0.5 --steps 5 --reduction ordered "
)
GRID = "--dp 2 --tp 2 --pp 2 --microbatches 4 "
TEXT = load_tokens(None, vocab_size=256, seq_len=16)  # the text on which it trains without --data


def trainer_of(comm, flags, kind=Trainer, mesh=mp.DeviceMesh, text=TEXT):
    """What `python -m minipar.train FLAGS` makes on this rank. A later flag replaces an earlier one."""
    args = parse((TRAINING + flags).split(), comm.size)
    return kind(args, mesh(comm, dp=args.dp, tp=args.tp, pp=args.pp), text)


def placements_of(comm, flags):
    """The placements of the parameters that this rank holds: those of its stage."""
    trainer = trainer_of(comm, flags)
    return [placed for placed in mp.placements(trainer.model) if placed.pp == trainer.mesh.pp.rank]


# %%
ranks = on_eight(comm, placements_of, GRID + "--zero-stage 1")  # on rank 0: what each of the eight returns
if rank == 0:
    held = [sum(each.dp.size for each in placed) for placed in ranks]  # parameters on each rank,
    cut = [sum(each.dp.size for each in placed if isinstance(each.tp, Shard)) for placed in ranks]  # cut by tp,
    updated = [sum(len(each.dp.own) for each in placed) for placed in ranks]  # updated by its optimizer
    model = sum(prod(each.shape) for each in [*ranks[0], *ranks[4]])  # of the whole model: a rank of each stage
    say(f"of {model:,} parameters rank 0 holds {held[0]:,}, rank 4 {held[4]:,}; they update {updated[0::4]}")
    assert held == [17_504] * 4 + [12_960] * 4 and updated == [8_752] * 4 + [6_480] * 4
    assert model == 59_584 and sum(updated) == 60_928
    places = [coordinates(r, {"dp": 2, "tp": 2, "pp": 2}) for r in range(8)]
    names = [f"rank {r}: pp {at['pp']} dp {at['dp']} tp {at['tp']}" for r, at in enumerate(places)]
    whole = [held[r] - cut[r] for r in range(8)]
    show(layout_figures.plot_held(cut, whole, updated, names), "09_held")

# %% [markdown]
# A rank of the first stage holds 17,504 parameters, one of the second 12,960: the first has the embeddings too. (The
# second stage's copy of the tied one is not counted: the first updates it and sends it.) Each rank's optimizer updates
# half of them. All optimizers together update 60,928: 1,344 more than the model has. tp does not cut LayerNorms,
# positions and some biases, so both ranks of a tp row update the same values.

# %% [markdown]
# ### Placements
#
# *Deeper, 5 minutes.*

# %% [markdown]
# A placement has three parts. What tp does: `Shard` (cut), `Replicate` (the same on all ranks of tp) or `Partial` (the
# same, but with sequence parallelism each rank's gradient covers its own tokens only: the gradient is their sum over
# tp, chapter 6). The rank of pp. And the parameter's place in a bucket, whose chunks belong to the ranks of dp. What
# needs all axes is a loop over placements: the norm, checkpoints, the bytes of 9.4.

# %%
from minipar.parallel.placement import BucketSlice
from minipar.parallel.placement_table import Placements

if rank == 0:
    print(Placements(ranks[0][:14]))  # the embeddings and the first block
    show_source(BucketSlice.elements)

# %% [markdown]
# A line of the table is one parameter's placement on rank 0: its name and shape in the serial model, what tp does to
# it, the rank of pp that owns it, the rank of ep (for experts, chapter 12), and which elements of the rank's part its
# optimizer updates. In a program of yours `print(mp.placements(model))` shows it, on any rank.
#
# `BucketSlice.elements` says which elements of a parameter lie in the chunk of a dp rank.

# %% [markdown]
# ## 9.3 Six layouts, one loss curve
#
# *Core, 8 minutes.*
#
# If the axes do not know each other, every combination must train the same model. Here is a program with all three
# axes, as you could write it. Its model has four stages: an embedding, two blocks, a head. (There is no attention, so
# it learns from one token alone what the next one is.) A stage is given the mesh and uses `mesh.tp`.


# %%
from functools import partial

V, H = 16, 32  # vocabulary and hidden size
NEW = {"dtype": "float64"}


class First(mp.Module):
    def __init__(self, mesh):
        self.embedding = mp.VocabParallelEmbedding(V, H, mesh.tp, name="embedding", **NEW)

    def forward(self, tokens):
        return self.embedding(tokens)


class Block(mp.Module):
    def __init__(self, mesh, name):
        self.up = mp.ColumnParallelLinear(H, 4 * H, mesh.tp, name=f"{name}.up", **NEW)
        self.down = mp.RowParallelLinear(4 * H, H, mesh.tp, name=f"{name}.down", **NEW)

    def forward(self, x):
        return x + self.down(mp.gelu(self.up(x)))


class Last(mp.Module):
    def __init__(self, mesh):
        self.head = mp.ColumnParallelLinear(H, V, mesh.tp, name="head", bias=False, **NEW)

    def loss_sum(self, x, y):
        return mp.vocab_parallel_cross_entropy_sum(self.head(x), y, self.head.group)


STAGES = [First, partial(Block, name="0"), partial(Block, name="1"), Last]

# %% [markdown]
# The training loop has a line for each of the other axes. `PipelineModule` gives each rank of `mesh.pp` its stages;
# `model(x, y)` runs forward and backward of all microbatches. `ZeroOptimizer` (ZeRO 1) cuts AdamW's state over
# `mesh.dp`. The first that needs the sums of the gradients over `mesh.dp`, here the clipping, makes them.
# `self.head.group` above is the head's ranks of tp: the loss is summed over their parts of the vocabulary.

# %%
STEPS = 5


def train(world, dp=1, tp=1, pp=1, schedule="1f1b"):
    """Train in a layout. Return the loss of each step, and on rank 0 the whole model's parameters after each."""
    mesh = mp.DeviceMesh(world, dp=dp, tp=tp, pp=pp)
    model = mp.PipelineModule(STAGES, mesh, num_microbatches=4, schedule=schedule)
    optimizer = mp.ZeroOptimizer(model.parameters(), mp.AdamW, mesh.dp, lr=3e-2)
    losses = []
    states = []
    for step in range(STEPS):
        x = np.random.default_rng(step).integers(0, V, (32, 8))[mesh.dp.rank :: mesh.dp.size]
        loss = model(x, (x + 1) % V)  # the token after t is t + 1
        norm = mp.clip_grad_norm(model.parameters(), 0.02, mesh.dp, mesh.tp, mesh.pp)
        assert norm > 0.02  # it does clip
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        states.append(model.state_dict())
    return losses, states


# %% [markdown]
# Six layouts of eight ranks, and one device:

# %%
from minipar.comm import serial
from minipar.train.verify import BOUND

LAYOUTS = [
    {"dp": 8},
    {"tp": 8},
    {"dp": 2, "tp": 4},
    {"dp": 2, "pp": 4, "schedule": "zb-h1"},  # this schedule and the last are of chapter 8
    {"dp": 2, "tp": 2, "pp": 2},
    {"dp": 2, "tp": 2, "pp": 2, "schedule": "interleaved-1f1b"},
]
one_device, right = train(serial())
curves = {}
for layout in LAYOUTS:
    answers = on_eight(comm, partial(train, **layout))
    if rank == 0:
        losses, states = answers[0]
        apart = []  # after each step, the largest difference of a parameter, relative to the largest of its array
        for state, alone in zip(states, right, strict=True):
            differences = [abs(state[name] - alone[name]).max() / abs(alone[name]).max() for name in alone]
            apart.append(np.max(differences))  # Python's max would lose a NaN
        label = ", ".join(f"{axis} {value}" for axis, value in layout.items())
        say(f"{label:<45} loss {losses[-1]:.12f}, parameters within {np.max(apart):.1e}")
        # Rounding grows from step to step, as fast as the CPU's matrix products make it.
        assert apart[0] < 1e-12 and np.max(apart) < BOUND and np.allclose(losses, one_device, rtol=1e-13, atol=0)
        curves[label] = losses, apart
if rank == 0:
    assert one_device[-1] < 0.9 * one_device[0]
    show(layout_figures.plot_layouts(curves, one_device, [BOUND] * STEPS), "09_layouts")

# %% [markdown]
# Above, the symbols lie on one another. Below is what is left between them, in the parameters: rounding, about
# $10^{-12}$ of an array's largest value. It has two causes. The ranks of dp add up other parts of the batch than one
# device, and tp splits the sums inside the products (chapter 6b).

# %% [markdown]
# ### The same from the command line
#
# *Core, 2 minutes.*
#
# `--verify` does this with a GPT: one device trains the same steps, and every loss, norm and parameter is compared.
# With `--reduction ordered`, which is in our flags, all add the parts of the batch in the order of the ranks. Then only
# tp is left as a cause, and a layout without tp must have one device's **bits**. The third layout has everything at
# once. The fourth is that of your own ranks.

# %%
from chapters.support.ch09.eight import layout_of
from minipar.train.verify import verify

PIPELINED = "--dp 2 --pp 4 --microbatches 4 --schedule zb-h1 "
EVERYTHING = GRID + "--schedule interleaved-1f1b --zero-stage 3 --sequence-parallel --recompute full "
MINE = layout_of(size)  # the flags of a layout of the ranks that mpirun has started


def verified(comm, flags):
    trainer = trainer_of(comm, flags)
    return verify(trainer, list(trainer.train())).line


for flags in ("--dp 8 --zero-stage 3", PIPELINED, EVERYTHING, MINE):
    lines = [verified(comm, flags)] if flags == MINE else on_eight(comm, verified, flags)
    if rank == 0:
        say(f"{flags}\n  {lines[0]}")
        how = "within" if "--tp 2" in flags else "bit for bit"
        assert f"= 1 device {how}" in lines[0]

# %% [markdown]
# ### The same text
#
# *Deeper, 4 minutes.*

# %% [markdown]
# Let the model write. It reads one sentence over and over, 100 steps, once on one device and once on the eight ranks.
# Each run saves its model, and each model continues the word "The", with the likeliest letter at each place. Before
# training it repeats one letter.

# %%
from chapters.support.ch09.eight import shared_directory
from minipar.generate import generate
from minipar.train.data import Tokens

SENTENCE = Tokens(np.frombuffer(100 * b"The big dwarf only jumps. ", np.uint8), "a sentence")
WRITER = "--layers 2 --heads 4 --lr 1e-2 --clip-grad 0 "
folder, cleanup = shared_directory(comm)


def learn(comm, flags, steps, name):
    """Train, and write the model into a folder; return the last loss."""
    trainer = trainer_of(comm, f"{WRITER} {flags} --steps 100", text=SENTENCE)
    loss = [trainer.step(step).loss for step in range(steps)][-1:]
    state = trainer.state_dict()
    if comm.rank == 0:
        mp.save_pretrained(trainer.model, f"{folder}/{name}", state)
    return loss


if rank == 0:
    learn(serial(), "", 0, "untrained")
    (alone,) = learn(serial(), "", 100, "one")
answers = on_eight(comm, learn, GRID, 100, "eight")
if rank == 0:
    texts = {}
    for who in ("untrained", "one", "eight"):
        written = generate(mp.load_pretrained(f"{folder}/{who}"), list(b"The"), 60, temperature=0.0, seed=0)
        texts[who] = bytes(written).decode(errors="replace")
        say(f"{who:<10} {texts[who]}")
    (together,) = answers[0]
    say(f"the last loss: {alone:.12f} on one device, {together:.12f} on eight ranks")
    assert texts["one"] == texts["eight"] != texts["untrained"] and "big dwarf only jumps." in texts["eight"]
    assert abs(together - alone) < 1e-7
cleanup.close()

# %% [markdown]
# The texts are equal, letter by letter. The losses differ by rounding only. On the command line: `python -m
# minipar.train --export DIR` and `python -m minipar.generate --from DIR --prompt The`.

# %% [markdown]
# ## 9.4 Bytes per axis
#
# *Core, 6 minutes.*
#
# What a step sends is known before it runs. The closed forms of chapters 4 to 7 hold on each axis, with that axis's
# share of the rest: a rank all-reduces over tp for *its* layers, and over dp *its* part of the parameters. A rank has
# $\Psi_r$ parameters and $L_r$ layers. There are $m$ microbatches of $B$ samples with $T$ tokens, the hidden size is
# $h$, the vocabulary $V$, and a value takes $w$ bytes. One rank sends per step
#
# - over **dp** all gradients once: $2 \Psi_r \frac{d-1}{d}\, w$ bytes,
#
# - over **tp** for each microbatch four all-reduces per layer of its stage, one more for the embedding or the head,
# each of $B T h$ values: $m\,(4 L_r + 1) \cdot 2 B T h\, \frac{t-1}{t}\, w$ (the last stage also sums three values
# per token for the loss, and with $p = 1$ one rank has embedding and head: $4 L_r + 2$),
#
# - over **pp** for each microbatch one activation or its gradient per neighbouring stage: $m B T h\, w$, or twice that
# in the middle; the first and the last rank send $\frac{V}{t}\, h\, w$ bytes more: the new embedding downwards, its
# gradient upwards. (This is for one stage per rank, without sequence parallelism.)
#
# Here for rank 0 of the GPT of 9.2. Which axis sends the most bytes?

# %%
from chapters.support.predict import predict, reveal

predict("most bytes", ...)  # "tp", "dp" or "pp"


# %%
def counted_step(comm, flags):
    """The bytes that this rank sends on each axis in a step."""
    trainer = trainer_of(comm, flags)
    comm.traffic.reset()
    trainer.step(0)
    return {axis: comm.traffic.bytes(axis=axis) for axis in AXES}


d, t, m, B = 2, 2, 4, 1  # ranks of dp and of tp, microbatches, samples in each
T, h, V, w = 16, 32, 256, 8  # tokens in a sample, hidden size, vocabulary, bytes per value
by_hand = {
    "tp": m * (4 * 2 + 1) * 2 * B * T * h * (t - 1) // t * w,
    "dp": 2 * 17_504 * (d - 1) // d * w,
    "pp": m * B * T * h * w + V // t * h * w,
}
sent = on_eight(comm, counted_step, GRID)
if rank == 0:
    counted = sent[0]
    for axis in AXES:
        say(f"{axis}: {by_hand[axis]:>8,} bytes by hand, {counted[axis]:>8,} counted")
    assert {axis: counted[axis] - by_hand[axis] for axis in AXES} == {"tp": 16, "dp": 8, "pp": 200}
    assert by_hand == {"tp": 147_456, "dp": 140_032, "pp": 49_152}
    reveal("most bytes", max(counted, key=counted.get), say)

# %% [markdown]
# tp sends 147,456 bytes, dp 140,032, pp 49,152. What is missing are sums of single values: 8 bytes for the loss, over
# dp and over pp, and for the gradient's norm 16 bytes over tp and 192 over pp. **How
# does the loss leave the last stage?** Only that stage knows it. All other stages add a zero: an all-reduce of one
# value, 8 bytes, over pp. A second one over dp adds up the replicas. Then every rank has the loss of the global batch.

# %% [markdown]
# ### For every layout
#
# *Deeper, 3 minutes.*

# %% [markdown]
# The norm's 16 bytes over tp are one sum for each of dp's two chunks. Its 192 bytes over pp are 24 sums of squares.
# There is one for each of dp's two chunks, for each of six units (four layers, embedding, head), and for what tp has
# cut and what it has not. They are added after the all-reduce, so the order is the same for every cut into stages. The
# library's forms have these sums too, and sequence parallelism, recompute, ZeRO and uneven stages; the sizes of the
# buckets come from the placements. So its account is exact. In each of six layouts, every rank sends in its first step
# what `predicted_traffic` says, and so does each rank of this run over MPI:

# %%
from minipar.parallel.predicted_traffic import tp_bytes


def predicted(flags, ranks, r):
    sent = step_traffic(parse((TRAINING + flags).split(), ranks), r)
    return {axis: sent[axis] for axis in AXES}


COUNTED = {
    "dp 8": "--dp 8",
    "dp 8, ZeRO 3": "--dp 8 --zero-stage 3",
    "tp 8, sequence parallel": "--tp 8 --sequence-parallel",
    "dp 2 x pp 4, zb-h1": PIPELINED,
    "dp 2 x tp 2 x pp 2": GRID,
    "the same, interleaved, ZeRO 3, sequence parallel, recompute": EVERYTHING,
}
if rank == 0:
    show_source(tp_bytes)
    say(f"{'bytes of one step, all eight ranks':<62}{'tp':>12}{'dp':>12}{'pp':>12}")
for label, flags in COUNTED.items():
    answers = on_eight(comm, counted_step, flags)
    if rank == 0:
        assert answers == [predicted(flags, 8, r) for r in range(8)]
        total = "".join(f"{sum(answer[axis] for answer in answers):>12,}" for axis in AXES)
        say(f"{label:<62}{total}")
assert counted_step(comm, f"{MINE} --zero-stage 3") == predicted(f"{MINE} --zero-stage 3", size, rank)

# %% [markdown]
# ### Who sends to whom
#
# *Core, 2 minutes.*
#
# A trace holds every message. Here is one step of dp 2 x tp 2 x pp 2, as messages between its ranks
# (the same comes from `--trace FILE.json` and `python -m visualize mesh FILE.json --out FIG.png`):


# %%
def traced_step(comm):
    """The events of one step on this rank, in Chrome's trace format."""
    comm = mp.Communicator(comm.transport, clock="model")
    trainer = trainer_of(comm, GRID)
    comm.tracer.enabled = True
    trainer.step(0)
    return chrome_events(comm)


events = on_eight(comm, traced_step)
if rank == 0:
    from visualize import mesh_traffic, parse_trace, plot_mesh

    about = {"clock": "model", "mesh": {"pp": 2, "dp": 2, "tp": 2}}
    trace = {"traceEvents": [event for own in events for event in own], "otherData": about}
    traffic = mesh_traffic(parse_trace(trace))
    assert all(traffic.sent(axis, 0)[1] == counted[axis] for axis in AXES)
    show(plot_mesh(traffic), "09_mesh")

# %% [markdown]
# A pipeline rank sends each activation to *one* other rank, the one with its own dp and tp coordinates. (The picture
# counts in KiB, 1024 bytes: 147,472 bytes are 144 KiB.)

# %% [markdown]
# ## 9.5 Why tp is innermost
#
# *Core, 11 minutes.*
#
# A cluster has two kinds of links: fast ones inside a host, slow ones between hosts. Ranks are numbered host by host,
# $g$ in each. A row of an axis with $n$ ranks and stride $s$ lies in a block of $s n$ neighbouring ranks. If $s n$
# divides $g$, every block lies inside a host: for tp if $t$ divides $g$, for dp if $t d$ does. Counted for dp 2 x tp 4
# x pp 2:


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
# We time a step of dp 2 x tp 2 x pp 2 on the model clock, which gives products and messages the time that a cluster
# takes. Two axes have NVLink; the third has the link between the hosts, InfiniBand or Ethernet. The program sends the
# same bytes in each case. It is a scale model: $h = 96$ stands for 6144, $T = 32$ for 2048, $V = 256$ for 16,384, each
# 64 times as large. So a message stands for $64^2$ times its bytes (half of that, for 16 bit), and a product for $64^3$
# times its operations, of which a device does $4\cdot10^{14}$ per second. (Bandwidths are from data sheets, latencies
# assumed.)

# %%
from dataclasses import dataclass

from minipar.comm import ModelClock, Network, run_local

LINKS = {"NVLink": (3e-6, 450e9), "InfiniBand": (5e-6, 50e9), "Ethernet": (30e-6, 12.5e9)}  # s per message, bytes/s
AXIS_OF = {1: "tp", 2: "dp", 4: "pp"}  # the distance of two neighbours along each axis
SCALED = GRID + "--layers 2 --hidden 96 --seq-len 32 --dtype float32 --reduction ring --clip-grad 1 "
LONGER = load_tokens(None, vocab_size=256, seq_len=32)


@dataclass(frozen=True)
class AxisNetwork(Network):
    """NVLink for each axis but one."""

    slow: str = ""
    link: str = "NVLink"

    def seconds(self, nbytes, source, dest):
        axis = AXIS_OF[abs(source - dest)]
        latency, bandwidth = LINKS[self.link if axis == self.slow else "NVLink"]
        return latency + nbytes * 64**2 / 2 / bandwidth


def timed_step(comm, microbatches, traced=False):
    """The seconds of a step, and what this rank sends on each axis: bytes at full size, messages. Or its events."""
    trainer = trainer_of(comm, f"{SCALED} --microbatches {microbatches} --global-batch {2 * microbatches}", text=LONGER)
    comm.traffic.reset()
    comm.tracer.enabled = traced
    trainer.step(0)
    sent = {axis: (comm.traffic.bytes(axis=axis) * 64**2 / 2, comm.traffic.messages(axis=axis)) for axis in AXES}
    return comm.clock.now(), chrome_events(comm) if traced else sent


def simulated(slow, link, *arguments):
    """What eight ranks return that have `link` along the axis `slow`."""
    network = AxisNetwork(slow=slow, link=link)
    return run_local(8, timed_step, *arguments, clock=partial(ModelClock, 4e14 / 64**3), network=network)


# %%
if rank == 0:
    answers = simulated("", "NVLink", 16)
    fast = max(seconds for seconds, _ in answers)
    _, full = answers[0]
    say(f"every axis on NVLink: {1e3 * fast:.1f} ms. Rank 0 sends")
    for axis, (nbytes, messages) in full.items():
        say(f"  over {axis} {nbytes / 1e6:>6,.0f} MB in {messages:>3} messages")
    found = {axis: (round(nbytes / 1e6), messages) for axis, (nbytes, messages) in full.items()}
    assert found == {"tp": (2013, 162), "dp": (586, 6), "pp": (504, 21)} and round(1e3 * fast, 1) == 156.8

# %% [markdown]
# With every axis on NVLink a step takes 156.8 ms. The *price* of an axis on a link is that of all its messages, one
# after the other, nothing hidden: messages times latency plus bytes divided by bandwidth. NVLink's price is in the
# 156.8 ms already. **Predict** from the lines above: how many milliseconds does a step take with tp on Ethernet
# (30 µs, 12.5 GB/s)? And with pp there?

# %%
predict("ms with tp on Ethernet", ...)
predict("ms with pp on Ethernet", ...)

# %%
from chapters.support.share_work import shared


def seconds_with(slow, link):
    return max(seconds for seconds, _ in simulated(slow, link, 16))


jobs = [(axis, link) for link in ("InfiniBand", "Ethernet") for axis in AXES]
times = dict(zip(jobs, shared(comm, seconds_with, jobs), strict=True))  # each rank simulates some of them
if rank == 0:
    for (axis, link), seconds in times.items():
        nbytes, messages = full[axis]
        latency, bandwidth = LINKS[link]
        price = messages * latency + nbytes / bandwidth
        longer = seconds - fast
        say(f"{axis} on {link:<10}  price {1e3 * price:>5.1f} ms   step longer by {1e3 * longer:>5.1f} ms")
    for link in ("InfiniBand", "Ethernet"):
        assert times["tp", link] > times["dp", link] > times["pp", link] > fast
    assert [round(1e3 * times[axis, "Ethernet"], 1) for axis in AXES] == [330.5, 202.5, 186.4]
    for axis in ("tp", "pp"):
        reveal(f"ms with {axis} on Ethernet", round(1e3 * times[axis, "Ethernet"], 1), say)
    show(layout_figures.plot_placements(fast, times), "09_placements")

# %% [markdown]
# With dp and pp the step grows by less than the price: NVLink's price is gone, and with pp some messages are hidden.
# With tp on Ethernet it grows by a little more than rank 0's price, because the last stage sums over the vocabulary,
# too. On Ethernet a step takes 330.5 ms with tp there, 202.5 ms with dp, 186.4 ms with pp:
#
# - **tp** sends the most, in the most messages, and everybody waits for each of them.
#
# - **dp** sends its gradients once per step, whatever the number of microbatches. The sum of the last stage travels
# while the first still works. That saves nothing here: the first stage ends last, and its sum is not hidden.
#
# - **pp** sends the least: one activation per microbatch and cut, and once per step the embedding. Ranks wait for these
# messages mostly while the pipeline fills and drains.
#
# So rank numbers run tp, dp, pp from the inside out, and $t$ should divide the ranks of a host. Megatron has the same
# order. It is no law: with more microbatches tp and pp send more and dp does not; with ZeRO 3 dp may send more than tp.

# %% [markdown]
# ### What is random, by axis
#
# *Core, 2 minutes.*
#
# All ranks draw with one seed; what is drawn depends on the name of the parameter, on the sample and on the layer.
# (Dropout under tp is Megatron-LM's; minipar refuses it.)
#
# | what | along dp | along tp | along pp |
# | --- | --- | --- | --- |
# | first weights, drawn for the serial model | the same | each keeps its part | each keeps its layers |
# | samples | differ | the same | the same |
# | dropout where the activation is whole (6b.4) | a mask for each sample | one mask | a mask for each layer |
# | dropout where tp cuts the activation (6b.4) | a mask for each sample | parts of one mask | a mask for each layer |

# %% [markdown]
# ### Where the time goes
#
# *Deeper, 5 minutes.*

# %% [markdown]
# The timeline shows it. Two steps with 4 microbatches, on Ethernet between the hosts: first in the
# right order, then with tp between the hosts. Of the eight ranks we show four, the first replica.

# %%
from chapters.support.ch09.eight import one_after_another

if rank == 0:
    steps = [simulated(axis, "Ethernet", 4, True) for axis in ("pp", "tp")]
    trace = one_after_another(steps, ranks=(0, 1, 4, 5))
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
# | sums inside blocks, backward | tp | two per layer and microbatch | nothing; in Megatron-LM gradients of weights |
# | gradients | dp | once, bucket by bucket | the last microbatch's backward, but for the last bucket |
# | the tied embedding's gradient | pp | once, last stage to first | the first stage's last backward |
# | the loss | pp, dp | once | nothing: one value |
# | squares for the norm | pp, tp; dp with ZeRO | once | nothing: all ranks wait for all |
# | ZeRO 1, 2: new parameters | dp | once | nothing here; in Megatron the next forward (chapter 5) |
# | the new embedding | pp | once, first stage to last | nothing |

# %% [markdown]
# ### On several hosts
#
# *Deeper, 2 minutes.*

# %% [markdown]
# Nothing in the program changes; a launcher starts the ranks: `mpirun --hosts node1,node2 --ppn 4
# -n 8 python -m minipar.train --dp 2 --tp 4` (MPICH), `--host node1:4,node2:4` (Open MPI), or `srun --nodes 2
# --ntasks-per-node 4 --distribution block` (Slurm). Let it number the ranks in blocks. `--distribution cyclic`,
# `--map-by node` and `--ppn 1` deal them to the hosts in turn, and then tp lies between hosts, as in the last `assert`
# of `rows_inside`. Nothing fails; it is only slow. All hosts need the same program and text, and a shared file system
# for `--save`.

# %% [markdown]
# ## 9.6 A checkpoint moves
#
# *Core, 6 minutes.*
#
# **[Exercise 28](exercises/e28_reshard.py)** asks for a parameter on tp 4 from the pieces that dp 2 x tp 2 wrote: `make
# exercises PYTEST="-k e28"`. Write it before you open the next cell, which for simplicity reads every piece.
#
# A run is stopped and goes on: on more ranks, or fewer, or cut otherwise. So a checkpoint must not know its layout.
# Each rank writes the elements that *it* owns, and names them by their place in the serial model's parameter. Here is
# a matrix that tp cuts by columns, whose optimizer state ZeRO cuts into chunks of the flattened part:


# %% tags=["hide-input"]
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
# writer's mesh nor its number of ranks: `part` and `parts` (of tp's cut), `start` and `stop` say which elements of the
# serial matrix these are.

# %% [markdown]
# ### In the library
#
# *Deeper, 8 minutes.*

# %% [markdown]
# The library asks the placements. Without ZeRO, too, the replicas share the writing, so these pieces are halves:

# %%
from pathlib import Path

from minipar.parallel.state import owned_pieces
from minipar.train import checkpoint

LAYER = "h.0.mlp.c_fc.weight"


def pieces_of(comm, flags):
    """The pieces of LAYER that this rank owns."""
    owned = owned_pieces(trainer_of(comm, flags).optimizer.parameters)
    return [piece for _, piece, _ in owned if piece.name == LAYER]


pieces = on_eight(comm, pieces_of, GRID)
if rank == 0:
    show_source(owned_pieces)
    say("\n".join(f"rank {r}: {piece}" for r in range(8) for piece in pieces[r]))
    assert [(piece.start, piece.stop) for own in pieces for piece in own] == [(0, 968)] * 2 + [(968, 2048)] * 2

# %% [markdown]
# `owned_pieces` adds to the cell above what real parameters need. A parameter that tp does not cut belongs to the rank
# with tp 0 alone. A matrix that holds queries, keys and values is cut within each third, `groups` = 3. And chunks are
# cut from whole buckets, not from single parameters. So of this layer's matrix, 32 x 128 of which a tp rank holds 2,048
# elements, the first replica owns 968 and the second 1,080.
#
# Three steps in one layout, a checkpoint, two in another:


# %%
def finished(comm, flags):
    """Train to the end; return on rank 0 the parameters and the steps' results."""
    trainer = trainer_of(comm, flags)
    results = list(trainer.train())
    return trainer.state_dict(), results


def stop_and_save(comm, flags, folder):
    trainer = trainer_of(comm, flags)
    for step in range(3):
        trainer.step(step)
    checkpoint.save(trainer, folder, 3)
    comm.barrier()  # nobody reads before all is written


def resumed(comm, flags, folder):
    """This rank's trainer, which goes on in a layout of its own."""
    trainer = trainer_of(comm, f"{flags} --resume {folder}")
    checkpoint.resume(trainer, folder)
    return trainer


def move(comm, before, after, folder):
    stop_and_save(comm, before, folder)
    trainer = resumed(comm, after, folder)
    results = list(trainer.train())
    return trainer.state_dict(), results


folder, cleanup = shared_directory(comm)
OTHER = "--dp 2 --pp 4 --microbatches 4 --schedule gpipe --zero-stage 3 "
MOVES = (
    (GRID, "--dp 8 --microbatches 1 --zero-stage 3 ", finished(serial(), "")),  # one device takes the batch at once
    (OTHER, PIPELINED, (on_eight(comm, finished, PIPELINED) or [None])[0]),
)
for number, (before, after, never_stopped) in enumerate(MOVES):
    answers = on_eight(comm, move, before, after, f"{folder}/{number}")
    if rank == 0:
        verdict = verdict_of(answers[0], never_stopped, 8, exact=after == PIPELINED)
        assert verdict.passed, verdict.line
        say(f"{before}-> {after}\n  {verdict.line.replace('1 device', 'a run that never stopped')}")
if rank == 0:
    saved = Path(folder, "0", "step-00000003")
    assert np.load(saved / "parameter" / f"{LAYER}.npy").shape == (32, 128)
    say("the checkpoint:", ", ".join(sorted(path.name for path in saved.iterdir())))

# %% [markdown]
# The **file format** is plainer than ours: the arrays of the serial model, each in a file. `parameter/NAME.npy` is a
# parameter, `exp_avg/NAME.npy` and `exp_avg_sq/NAME.npy` are AdamW's two means, and `run.json` has the step, the flags
# and a fingerprint of the text. The owners send the pieces of one array after the other to rank 0, which joins and
# writes it, so no rank ever holds the whole state. Each rank of the new layout opens each array and takes its part.
# (Frameworks for large models write pieces, as our cell does: one writer would be too slow.) All is written to
# `step-00000003.partial`, which is renamed at the end: a run that is killed leaves a whole checkpoint or none.
#
# Samples and dropout are keyed by seed, step and sample, so of what is random only the step's number must be
# remembered. The first move goes from dp 2 x tp 2 x pp 2 to dp 8 with ZeRO 3. The second one adds in the same order
# before and after, so the resumed run has the **bits** of a run that never stopped. And over MPI, on this run's own
# ranks:

# %%
stop_and_save(comm, f"{MINE} --zero-stage 1", f"{folder}/mine")
trainer = resumed(comm, f"{MINE} --zero-stage 3", f"{folder}/mine")
verdict = verify(trainer, list(trainer.train()))
assert verdict.passed and ("bit for bit" in verdict.line) == ("--tp 1" in MINE), verdict.line
say(f"{MINE}: ZeRO 1 -> ZeRO 3\n  {verdict.line}")
cleanup.close()

# %% [markdown]
# On the command line: `--save DIR --save-every K`, and `--resume DIR` with any other `--dp --tp --pp --zero-stage`. The
# run takes everything else, such as `--global-batch`, `--order` and `--seed`, from the checkpoint. So it goes on with
# the samples that come next, in every layout.

# %% [markdown]
# ## 9.7 Mistakes, and what notices them
#
# *Core, 11 minutes.*
#
# [Exercise 12](exercises/e12_gradient_norm.py) asks for the gradient's norm over three axes: `make exercises
# PYTEST="-k e12"`. Write it before you read on.
#
# With several axes there is a new kind of mistake: the right operation on the wrong row. Four instruments look at two
# steps of dp 2 x tp 2 x pp 2 with clipping at work. **loss**: is the last loss off by more than 5 %? **ranks**: do the
# ranks that should hold the same values (on dp all parameters, on tp those that are not cut) still do so? **bytes**:
# does each rank send on each axis what the formula says? **one device**: are parameters, losses and norms those of one
# device?
#
# Which of them catches which of these mistakes?
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
from minipar.parallel.grad_norm import clip_grad_norm


class AveragesOverTP(Trainer):
    """Mistake 1: averages a bucket's gradients before dp sums them."""

    def __init__(self, *args):
        super().__init__(*args)
        self.ddp.before_reduce = self.average

    def average(self, parameters):
        for p in parameters:
            self.mesh.tp.all_reduce(p.grad, algorithm="ordered")
            p.grad /= self.mesh.tp.size


class NormOverDP(Trainer):
    """Mistake 2: dp in the place of tp."""

    @staticmethod
    def clip(parameters, max_norm, dp, tp, pp):
        return clip_grad_norm(parameters, max_norm, dp, dp, pp)


class DealsByWorldRank(Trainer):
    """Mistake 3: the samples of another replica."""

    def samples(self, replica, microbatch):
        return super().samples(self.mesh.world.rank % self.args.dp, microbatch)


class TensorOutermost(mp.DeviceMesh):
    """Mistake 4, if it is one."""

    AXES = ("pp", "dp", "cp", "tp")  # fastest first


# %% [markdown]
# The four instruments, after two steps:

# %%
from chapters.support.instruments import same_on_all_ranks

SMALL = GRID + "--microbatches 2 --global-batch 4 --steps 2 "


def examine(comm, kind, mesh, right):
    """Return the names of the instruments that notice something on this rank; `right` is one device's run."""
    trainer = trainer_of(comm, SMALL, kind, mesh)
    comm.traffic.reset()
    results = [trainer.step(0)]
    sent = {axis: comm.traffic.bytes(axis=axis) for axis in (*AXES, "cp")}
    results.append(trainer.step(1))
    at = trainer.mesh.coordinates
    expected = step_traffic(trainer.args, (at["pp"] * 2 + at["dp"]) * 2 + at["tp"])
    parameters = trainer.ddp.parameters()
    uncut = [p.data for p in parameters if not isinstance(p.placement.tp, Shard)]
    alike = [same_on_all_ranks(trainer.mesh.dp, *(p.data for p in parameters))]
    alike.append(same_on_all_ranks(trainer.mesh.tp, *uncut))
    noticed = {"ranks": not all(alike), "bytes": sent != expected}
    state = trainer.state_dict()
    if comm.rank == 0:
        _, right_results = right
        noticed["loss"] = abs(results[-1].loss / right_results[-1].loss - 1) > 0.05
        noticed["one device"] = not verdict_of((state, results), right, 8).passed
    return [instrument for instrument, did in noticed.items() if did]


# %%
from contextlib import nullcontext
from unittest.mock import patch

MISTAKES = {
    "nothing broken": (Trainer, mp.DeviceMesh),
    "1. gradient averaged over tp": (AveragesOverTP, mp.DeviceMesh),
    "2. norm over dp, not tp": (NormOverDP, mp.DeviceMesh),
    "3. samples by world rank": (DealsByWorldRank, mp.DeviceMesh),
    "4. tp outermost": (Trainer, TensorOutermost),
}
GUARD = "minipar.parallel.tensor.layers.check_same_batch"  # it would refuse mistake 3
one = trainer_of(serial(), "--global-batch 4 --steps 2")
results = list(one.train())
right = one.state_dict(), results
noticed = {}
for name, (kind, mesh) in MISTAKES.items():
    with patch(GUARD) if kind is DealsByWorldRank else nullcontext():
        answers = on_eight(comm, examine, kind, mesh, right)
    noticed[name] = {instrument for answer in answers for instrument in answer}
if rank == 0:
    for name, found in noticed.items():
        if name[0] in "1234":
            reveal(f"mistake {name[0]}", ", ".join(sorted(found)) or "nobody", say)
    show(layout_figures.plot_noticed(noticed, ("loss", "ranks", "bytes", "one device")), "09_noticed")
    caught = [sorted(found) for found in noticed.values()]
    assert caught == [[], ["bytes", "one device"], ["bytes", "one device", "ranks"], ["one device"], []]

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
# **2** sends the right number of bytes on the wrong axis, so only an account by axis shows it. The two ranks of a tp
# row get different norms, clip differently, and their copies drift apart.
#
# **3** is the classic one: a data loader that knows the world and not the mesh. The ranks of a tp row work on different
# samples, and their sums add activations that do not belong together. The bytes are right, and the copies agree: both
# ranks go on with the same wrong sums. The library compares the tokens of a tp row in its first step and refuses this.
# For this table the check was switched off.
#
# **4** is no mistake in any value, and no proof will ever find it. Each axis does the same work on other wires. Only a
# clock notices: 9.5's bars say what it costs.
#
# `--verify` says that a run is wrong, but not what to look for, and a loop in another framework has no `--verify`.
# There one compares *records* of two runs: `python -m minipar.compare A B` names the first step in which they part,
# the parameters and the factor ([docs/compare.md](../docs/compare.md)). [Chapter 14](14_my_run_is_wrong.ipynb) starts
# from the symptom, and uses it.

# %% [markdown]
# ## 9.8 PyTorch's names
#
# *Deeper, 5 minutes.*

# %% [markdown]
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
# The mesh and three layouts in PyTorch: [chapters/pytorch/ch09.py](pytorch/ch09.py).

# %%
if rank == 0:
    show_file("chapters/pytorch/ch09.py")

# %% [markdown]
# ## 9.9 Problems
#
# *Deeper, 30 minutes.*

# %% [markdown]
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

# %% [markdown]
# ## 9.10 Answers
#
# *Deeper, 5 minutes.*

# %% [markdown]
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

# %% tags=["hide-input"]
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

for name, whole, chunks in ((LAYER, 2, 1), ("h.0.ln_1.weight", 4, 2)) if rank == 0 else ():
    placed = [p for placements in ranks for p in placements if p.name == name]
    assert sum(p.dp.size for p in placed) == whole * prod(placed[0].shape)
    assert sum(len(p.dp.own) for p in placed) == chunks * prod(placed[0].shape)
say("the answers hold")

# %% tags=["active-ipynb"]
# %autopx

# %% tags=["active-ipynb"]
# # Back in one process: stop the eight.
# cluster.stop_cluster_sync()
