# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 5. ZeRO
#
# **Data parallelism keeps $d$ copies of everything. Which of them does it need?**
#
# A model of 7.5 billion parameters takes 15 GB in 16-bit values. It fits into a GPU of 32 GB, and it cannot be trained
# there: training needs 120 GB. [Chapter 4](04_data_parallel.ipynb) does not help, since each of its $d$ ranks holds the
# same 120 GB. ZeRO, the "zero redundancy optimizer" (Rajbhandari et al. 2020, arXiv 1910.02054), removes the copies
# without changing a bit of the result: on 64 GPUs 1.88 GB are left on each. The last stage sends 1.5 times as many
# bytes. At the end of this chapter you can say when that costs time, and when none.

# %% tags=["active-ipynb", "setup"]
# from chapters.support.notebook import start
#
# cluster = start(8)

# %% tags=["setup"]
from fractions import Fraction
from functools import partial

import numpy as np

import minipar as mp
from chapters.support.ch05 import watch
from chapters.support.instruments import same_bits
from chapters.support.predict import predict, reveal
from chapters.support.show import printer
from minipar.comm import chunk_bounds, serial, wire_bytes, world

comm = world()
rank, d = comm.rank, comm.size  # this rank, and the number of ranks
say = printer(rank)  # rank 0 prints and draws; every rank checks
if rank == 0:
    from chapters.support.ch05 import animate_units, figures
    from chapters.support.overview import draw_strategies
    from chapters.support.show import show, show_file
    from visualize import plot_ledger

# %%
say(f"{d} rank{'s' if d > 1 else ''}")
if rank == 0:
    show(figures.draw_model_state((2, 2, 12), ranks=4), "05_model_state")

# %% [markdown]
# Each bar is one of four ranks. A frame that is not filled is what the rank does *not* hold. Above each bar is the sum,
# in bytes per parameter of the model. The stages remove the copies one kind after the other:
#
# - stage 0 is data parallelism: every rank holds everything;
# - stage 1 cuts the **optimizer state** into one chunk per rank;
# - stage 2 cuts the **gradients** too;
# - stage 3 cuts the **parameters** too. PyTorch calls it FSDP, fully sharded data parallelism.
#
# Among the strategies of this course they stand here:

# %%
if rank == 0:
    show(draw_strategies(["zero1", "zero2", "zero3"]), "05_here")

# %% [markdown]
# ## 5.1 Sixteen bytes per parameter
#
# *Core, 7 minutes.*
#
# Training keeps more than the parameters. For each of them, in mixed precision with Adam (section 3.1 of the paper):
#
# | what | type | bytes |
# | --- | --- | --- |
# | parameter, as forward and backward use it | fp16 | 2 |
# | gradient | fp16 | 2 |
# | parameter, as the optimizer updates it | fp32 | 4 |
# | mean of the gradient (momentum) | fp32 | 4 |
# | mean of the squared gradient (variance) | fp32 | 4 |
# | | | **16** |
#
# The fp32 copy of the parameters is there because an update is often too small to change an fp16 value
# ([chapter 13](13_precision.ipynb)). The three fp32 rows are the *optimizer state*, 12 bytes. Without mixed precision
# there is no second copy: parameter, gradient and two means are $4 + 4 + 8 = 16$ bytes in fp32, and $8 + 8 + 16 = 32$
# in float64, in which this chapter runs.
#
# Parameters, gradients and optimizer state together are the **model state**. With $\Psi$ parameters and $d$ ranks:
#
# | stage | parameters | gradients | optimizer | bytes per rank, mixed precision |
# | --- | --- | --- | --- | --- |
# | 0 | $\Psi$ | $\Psi$ | $\Psi$ | $16\Psi$ |
# | 1 | $\Psi$ | $\Psi$ | $\Psi/d$ | $4\Psi + 12\Psi/d$ |
# | 2 | $\Psi$ | $\Psi/d$ | $\Psi/d$ | $2\Psi + 14\Psi/d$ |
# | 3 | $\Psi/d$ | $\Psi/d$ | $\Psi/d$ | $16\Psi/d$ |
#
# The paper's Table 1 for 7.5 billion parameters, from this formula, in GB ($10^9$ bytes):


# %%
from minipar.parallel.predicted_memory import FLOAT64, MIXED, model_state


def bytes_per_rank(psi, ranks, stage):
    """Model state in mixed precision. A fraction, because `ranks` need not divide `psi`."""
    own = Fraction(psi, ranks)
    parameters = own if stage >= 3 else psi
    gradients = own if stage >= 2 else psi
    optimizer = own if stage >= 1 else psi
    return 2 * parameters + 2 * gradients + 12 * optimizer


PAPER = {4: (120, 52.5, 41.3, 30), 64: (120, 31.4, 16.6, 1.88), 1024: (120, 30.1, 15.1, 0.12)}
for ranks, printed in PAPER.items():
    exact = [bytes_per_rank(7_500_000_000, ranks, stage) for stage in range(4)]
    assert np.allclose([float(nbytes) / 1e9 for nbytes in exact], printed, rtol=0, atol=0.06)
    assert exact == [model_state(7_500_000_000, Fraction(7_500_000_000, ranks), s, MIXED).total for s in range(4)]
    say(f"{ranks:>5} ranks, stages 0 to 3: {', '.join(f'{float(nbytes) / 1e9:.2f}' for nbytes in exact)} GB")

# %% [markdown]
# (`model_state` is the library's. The planner of chapter 10 uses it.) With many ranks stage 1 alone takes three
# quarters away, and stage 2 seven eighths: 120 GB become 31.4 GB and 16.6 GB on 64 ranks. Both stop at a floor, $4\Psi$
# and $2\Psi$, which are 30 GB and 15 GB here. Only stage 3 falls as $1/d$, to 1.88 GB on 64 ranks, so only stage 3 lets
# a model grow with the number of ranks.

# %% [markdown]
# ## 5.2 Stage 1: shard the optimizer state
#
# *Core, 8 minutes.*
#
# Two facts make the stages possible.
#
# **An all-reduce is a reduce-scatter and an all-gather.** The first leaves rank $r$ with chunk $r$ of the sum, the
# second hands all chunks to all. Each sends $\Psi\frac{d-1}{d}$ elements per rank. Something can be done in between.
#
# **AdamW works element by element.** In step $k$ each element $\theta$ of the parameters, with gradient $G$, has two
# running means $\mu_1$ and $\mu_2$ (chapter 2), the learning rate $\eta$ and the weight decay $\lambda$, and changes as
#
# $$\mu_1 \leftarrow \beta_1 \mu_1 + (1-\beta_1)\,G, \quad \mu_2 \leftarrow \beta_2 \mu_2 + (1-\beta_2)\,G^2, \quad
# \theta \leftarrow (1-\eta\lambda)\,\theta - \eta\,
# \frac{\mu_1 / (1-\beta_1^k)}{\sqrt{\mu_2 / (1-\beta_2^k)} + \epsilon} .$$
#
# No other element appears in this rule. So the rank that has chunk $r$ of the gradient sum can update chunk $r$ of the
# parameters, with chunk $r$ of the means, and nobody else needs them. Weight decay ($\lambda$) needs no message either:
# it reads the same element. (Muon, another optimizer, reads whole matrices: [Muon](more/muon.ipynb).)

# %%
if rank == 0:
    show(figures.draw_two_orders(ranks=4), "05_two_orders")

# %% [markdown]
# Stage 0 ends each step with an all-gather of *gradients*, and then everybody updates everything. Stage 1 updates
# between the two halves, and gathers *parameters*.
#
# **[Exercise 6](exercises/e06_zero1_step.py)** asks you for this step. Write it before you open the next cell:
# `make exercises PYTEST="-k e06"`. The cell has both stages on plain arrays.

# %% tags=["hide-input"]
from minipar.nn import AdamW, Parameter

size = 1003
start, stop = chunk_bounds(size, d)[rank]
theta = np.linspace(-1, 1, size)
replica = Parameter(theta.copy())
chunk = Parameter(theta[start:stop].copy())
adam_of_all = AdamW([replica])
adam_of_chunk = AdamW([chunk])
gathered = np.empty(size)
for step in range(3):
    gradient = np.random.default_rng([step, rank]).normal(size=size)  # this rank's own gradient
    comm.traffic.reset()

    replica.grad = comm.all_reduce(gradient.copy(), algorithm="ordered")
    adam_of_all.step()

    chunk.grad = comm.reduce_scatter(gradient, algorithm="ordered")
    adam_of_chunk.step()
    comm.all_gather(chunk.data, out=gathered, algorithm="pairwise")

    assert same_bits(gathered, replica.data)
    in_one = comm.traffic.bytes("all_reduce")
    assert comm.traffic.bytes() - in_one == in_one  # the reduce-scatter and the all-gather
state = [sum(a.nbytes for a in (*adam.exp_avg, *adam.exp_avg_sq)) for adam in (adam_of_all, adam_of_chunk)]
assert state == [16 * size, 16 * (stop - start)]
say(f"three steps, {size} parameters: the same bits, and {in_one:,} bytes sent by rank 0 per step either way")
say(f"optimizer state on rank 0: {state[0]:,} bytes whole, {state[1]:,} as a chunk")

# %% [markdown]
# That is stage 1. It sends $2\Psi\frac{d-1}{d}$ elements, as before. For mixed precision and large $d$ the model state
# falls from $16\Psi$ to $4\Psi$.

# %% [markdown]
# ### The norm
#
# *Core, 2 minutes.*
#
# Clipping needs the norm of the *whole* gradient, of which a rank has only its chunks. The chunks are disjoint and
# complete, so
#
# $$\lVert G \rVert^2 = \sum_{r=0}^{d-1} \; \sum_{i \,\in\, \text{chunks of } r} G_i^2 ,$$
#
# the inner sum on each rank, the outer one an all-reduce of a single value. Every element counts once. To get the same
# bits, stage 0 sums in this order too.

# %% [markdown]
# ## 5.3 Stage 2: shard the gradients
#
# *Core, 10 minutes.*
#
# Two tools come before stage 2: a *ledger*, which counts the memory that a rank holds, and a training loop for all
# stages. They pay off in 5.4: with them stage 3 is a dozen lines, and is proved to save what it says.
#
# After the reduce-scatter a rank needs only its chunk of the gradient. Before it, the full gradient must exist, because
# backward computes it. So let it exist only then: compute the gradient of one layer, reduce-scatter it, free it, and go
# on to the layer before.
#
# **The ledger.** Every array that outlives the call that made it is announced: `hold("gradients", array)`. The ledger
# adds its bytes, and takes them off when the array is *really* freed. A reference that somebody forgot shows as memory.
# There are five kinds: parameters, gradients and optimizer are the model state; *activations* are what forward keeps
# for backward; *buffers* are copies that live briefly.

# %%
from minipar.memory import MemoryLedger, hold

ledger = MemoryLedger()
with ledger.recording():
    first = np.zeros(100)
    second = np.zeros(10)
    hold("gradients", first, second)
assert ledger.held["gradients"] == 880
first = None  # the last reference: the array is freed here
assert ledger.held["gradients"] == 80

# %% [markdown]
# These functions train under a ledger:

# %%
LAYERS, WIDTH, BARE_STEPS = 4, 9, 3
ONE = WIDTH**2  # parameters of one layer
ALL = LAYERS * ONE
begin, end = chunk_bounds(ONE, d)[rank]  # this rank's chunk of each layer


def held(kind, array):
    """Announce an array to the ledger, and return it."""
    hold(kind, array)
    return array


def watch_layers(train):
    """Train under a ledger: all parameters, the most bytes held of each part of the model state, the bytes sent."""
    ledger = MemoryLedger()
    comm.traffic.reset()
    with ledger.recording():
        weight = train()
    sent = comm.traffic.bytes()
    levels = np.array([of_kinds for _, of_kinds in ledger.moments])  # a row for each change, a column for each kind
    parameters, gradients, optimizer = levels.max(axis=0).tolist()[:3]
    bits = np.concatenate([weight(i).reshape(-1) for i in range(LAYERS)])
    return bits, [parameters, gradients, optimizer], sent


def bytes_sent(*collectives):
    return BARE_STEPS * LAYERS * sum(wire_bytes(op, algorithm, ONE, 8, d, rank) for op, algorithm in collectives)


# %% [markdown]
# **The loop, and stage 0.** The model has four layers $y = \tanh(x A)$ without biases, and every rank has its own
# samples. The loss is half the sum of squares of the output, so the gradient of the output is the output. A stage says
# where the matrix of a layer comes from (`weight`) and what becomes of its gradient (`finished`).


# %%
def initial(layer):
    return np.random.default_rng([1, layer]).normal(0, 0.3, ONE)  # the same values on every rank


def train_layers(weight, finished, optimizer, after_step=lambda: None):
    for step in range(BARE_STEPS):
        kept = [np.random.default_rng([2, step, rank]).normal(size=(5, WIDTH))]  # 5 samples; other ones on each rank
        for i in range(LAYERS):
            kept.append(np.tanh(kept[i] @ weight(i)))  # stage 3 frees the matrix at the end of this line
        gradient = kept[LAYERS]
        for i in reversed(range(LAYERS)):
            gradient = gradient * (1 - kept[i + 1] ** 2)
            finished(i, held("gradients", (kept[i].T @ gradient).reshape(-1)))
            gradient = gradient @ weight(i).T
        optimizer.step()
        optimizer.zero_grad()
        after_step()
    return weight


def stage_0():
    whole = [Parameter(held("parameters", initial(i))) for i in range(LAYERS)]

    def finished(i, full):
        whole[i].grad = comm.all_reduce(full, algorithm="ring")  # in place

    return train_layers(lambda i: whole[i].data.reshape(WIDTH, WIDTH), finished, AdamW(whole))


plain_bits, most, sent = watch_layers(stage_0)
assert most == [8 * ALL, 8 * ALL, 16 * ALL] and sent == bytes_sent(("all_reduce", "ring"))

# %% [markdown]
# Stage 2 reduce-scatters a layer's gradient as soon as it is there, and keeps its chunk of the sum. Its optimizer
# updates the chunks, and the whole matrices are gathered after the step:

# %%
OWNED = LAYERS * (end - begin)
SCATTER = ("reduce_scatter", "ring")
GATHER = ("all_gather", "pairwise")


def reduce_scatter_into(chunks, i, full):
    chunks[i].grad = held("gradients", comm.reduce_scatter(full, algorithm="ring").copy())
    # `full` is freed when this function returns


def stage_2():
    whole = [held("parameters", initial(i)) for i in range(LAYERS)]
    chunks = [Parameter(layer[begin:end]) for layer in whole]  # views: the optimizer writes into `whole`

    def after_step():
        for layer, chunk in zip(whole, chunks, strict=True):
            comm.all_gather(chunk.data, out=layer, algorithm="pairwise")

    finished = partial(reduce_scatter_into, chunks)
    return train_layers(lambda i: whole[i].reshape(WIDTH, WIDTH), finished, AdamW(chunks), after_step)


bits, most, sent = watch_layers(stage_2)
assert most == [8 * ALL, 8 * (OWNED + ONE), 16 * OWNED] and sent == bytes_sent(SCATTER, GATHER)
assert same_bits(bits, plain_bits)
say(f"stage 2 has the bits of stage 0; gradients on rank 0: at most {most[1]:,} bytes instead of {8 * ALL:,}")

# %% [markdown]
# The ledger proves the sentence above: next to its chunks, a rank never holds more than *one* full gradient of a layer.
#
# Stage 2 sends what stage 1 sends, as long as every step has a single backward. With several, as in a pipeline, it
# sends more (5.9).

# %% [markdown]
# ## 5.4 Stage 3: shard the parameters
#
# *Core, 8 minutes.*
#
# A block's parameters are needed in the block's forward and in its backward. In between they can live elsewhere. So:
# gather a unit just before its forward, free it after; gather it again just before its backward, free it for good.
# After the optimizer's step nothing needs to be gathered at all: the next forward does that.
#
# $$\underbrace{\Psi}_{\text{gather for forward}} + \underbrace{\Psi}_{\text{gather for backward}} +
# \underbrace{\Psi}_{\text{reduce-scatter}} = 3\Psi, \text{ each times } \tfrac{d-1}{d} .$$
#
# On the plain arrays of 5.3, `weight` now gathers a layer, and the training loop frees it after use, once in forward
# and once in backward. After the step there is nothing to do. **[Exercise 7](exercises/e07_zero3_gather_and_free.py)**
# asks for such a step: `make exercises PYTEST="-k e07"`. Write it before you open the next cell.


# %% tags=["hide-input"]
def stage_3():
    chunks = [Parameter(held("parameters", initial(i)[begin:end].copy())) for i in range(LAYERS)]

    def weight(i):
        whole = held("parameters", np.empty(ONE))
        comm.all_gather(chunks[i].data, out=whole, algorithm="pairwise")
        return whole.reshape(WIDTH, WIDTH)

    return train_layers(weight, partial(reduce_scatter_into, chunks), AdamW(chunks))


bits, most, sent = watch_layers(stage_3)
assert most == [8 * (OWNED + ONE), 8 * (OWNED + ONE), 16 * OWNED] and sent == bytes_sent(GATHER, GATHER, SCATTER)
assert same_bits(bits, plain_bits)
say(f"stage 3 has the bits of stage 0; parameters on rank 0: at most {most[0]:,} bytes instead of {8 * ALL:,}")

# %% [markdown]
# Next to its chunks a rank never holds more than one whole layer. Here is a step of the library's stage 3 with three
# units on four threads, recorded without the prefetch of 5.6. The last unit stays between its forward and its
# backward, which follows at once:
#
# ![Stage 3 on four ranks: units are gathered, used and freed](../visualize/gallery/zero3_units.gif)
#
# The same for print, of unit 1:

# %%
if rank == 0:
    show(animate_units.still(animate_units.record()), "05_units")

# %% [markdown]
# **A model larger than one rank.** Stage 3 trains a model that fits on no single rank, but how does such a model come
# to be? Each rank would run out of memory if it first made all of it and then kept its chunks, as the library does.
# Values that are drawn by *name* (chapter 2) need no whole model: a rank draws one matrix, keeps its chunk, and frees
# the rest.

# %% tags=["hide-input"]
from minipar.nn.layers import normal

config = mp.GPTConfig(vocab_size=256, n_positions=32, n_embd=64, n_layer=4, n_head=4)  # that of 5.5
whole = normal(0, "h.3.mlp.c_fc.weight", (64, 256), config.initializer_range)  # the 21st matrix; no other was drawn
kept = np.array_split(whole.reshape(-1), d)[rank].copy()
del whole
joined = np.frombuffer(b"".join(comm.all_gather_bytes(kept.tobytes())))
assert np.array_equal(joined, mp.GPT(config, dtype="float64").h[3].mlp.c_fc.weight.data.reshape(-1))
say(f"rank 0 keeps {kept.size} of {joined.size} elements of a matrix, and all ranks together have the library's")

# %% [markdown]
# ### FSDP in thirty lines
#
# *Deeper, 10 minutes.*

# %% [markdown]
# With an engine for gradients ([chapter 1](01_autograd.ipynb)) stage 3 needs no training loop of its own. It is one
# operation: **a gather whose backward is a reduce-scatter**. `mapping` makes an operation from two functions on arrays,
# its forward and its backward. `checkpoint` keeps a layer's input only and runs the layer's forward again in backward
# ([chapter 2](02_gpt.ipynb)). With it the gathered matrix is not kept between the two.


# %%
from minipar.autograd import Tensor, checkpoint, gelu, mapping


def gather(chunk, shape):
    """Return the whole matrix of which each rank has a chunk. Backward leaves each rank its chunk of the sum."""

    def forward(own_values):
        whole = np.empty(shape)
        comm.all_gather(own_values, out=whole.reshape(-1), algorithm="pairwise")
        return whole

    def backward(gradient):
        return comm.reduce_scatter(gradient.reshape(-1), algorithm="ordered")

    return mapping(chunk, forward, backward)


def fsdp_loss(chunks, x):
    """Half the sum of squares of layers y = gelu(x A), of whose matrices each rank holds chunks."""

    def layer(x, chunk):
        return gelu(x @ gather(chunk, (WIDTH, WIDTH)))

    for chunk in chunks:
        x = checkpoint(partial(layer, chunk=chunk), x, parameters=[chunk])
    return (x * x).sum() * 0.5


# %% [markdown]
# These are the thirty lines. Now the same layers as an ordinary module, which the library shards:


# %%
class Layers(mp.Module):
    """The same layers on one device."""

    def __init__(self):
        self.matrices = [Parameter(initial(i).reshape(WIDTH, WIDTH)) for i in range(LAYERS)]

    def loss_sum(self, x, targets):
        for matrix in self.matrices:
            x = gelu(x @ matrix)
        return (x * x).sum() * 0.5


samples = np.random.default_rng([3, rank]).normal(size=(5, WIDTH))
targets = np.zeros((5, WIDTH))  # the loss does not read them; their number is the count of its mean
chunks = [Parameter(initial(i)[begin:end].copy()) for i in range(LAYERS)]
library = mp.fully_shard(Layers(), comm, algorithm="ordered")
ours = AdamW(chunks, weight_decay=0)
theirs = AdamW(library.parameters(), weight_decay=0)
for _ in range(BARE_STEPS):
    loss = fsdp_loss(chunks, Tensor(samples))
    loss.backward(np.full_like(loss.data, 1 / (d * targets.size)))  # the mean over the targets of all ranks
    ours.step()
    ours.zero_grad()
    library.loss(samples, targets).backward()
    theirs.step()
    theirs.zero_grad()
for chunk, matrix in zip(chunks, library.model.matrices, strict=True):
    assert same_bits(gather(chunk, (WIDTH, WIDTH)).data, library.gather_parameter(matrix))
say(f"thirty lines = mp.fully_shard, bit for bit, after {BARE_STEPS} steps")

# %% [markdown]
# ## 5.5 The four stages side by side
#
# *Core, 8 minutes.*
#
# With the library a script chooses the stage with one argument. Its optimizer gets `wrapper.parameters()`: from stage 1
# on these are this rank's part of the model. The model is a GPT-2 of toy size in float64, with one sample per rank, and
# gradients are clipped so that the norm matters.
#
# In every stage a bucket is a *unit*: the parameters of one block, or those of the embedding and the head, which share
# a matrix. Chunk $r$ of each bucket belongs to rank $r$. Equal buckets mean that all stages add the same values in the
# same order.
#
# Stage 3 gathers each unit twice in a step. A block is gathered for its forward and for its backward. The unit of
# embedding and head is gathered for the embedding's forward and for the head's. The head's backward follows at once, so
# the unit stays for it; the embedding's backward does not read the matrix.

# %%
from minipar.memory import enter
from minipar.train.data import Batches, load_tokens

T, STEPS, CLIP = 32, 3, 0.5
config = mp.GPTConfig(vocab_size=256, n_positions=T, n_embd=64, n_layer=4, n_head=4)
text = load_tokens(None, vocab_size=256, seq_len=T)


def train(wrap, m=1, every=False, steps=STEPS, ranks=comm, norm=comm):
    """Train over `ranks` with m microbatches of one sample, and clip by the norm over the ranks `norm`.

    `every`: send the gradients of each microbatch, without `no_sync`.
    """
    batches = Batches(text, length=T, global_batch=m * d, order="random", seed=0)
    wrapper = wrap(mp.GPT(config, dtype="float64"), ranks, algorithm="ordered")
    optimizer = mp.AdamW(wrapper.parameters(), lr=3e-3)
    losses = []
    norms = []
    for step in range(steps):
        comm.traffic.reset()
        enter("forward", restart=True)  # names the phase in the ledger's picture
        for j in range(m):
            wrapper.hooks.enabled = every or j == m - 1  # what `with wrapper.no_sync()` changes
            loss = wrapper.loss(*batches.batch(step, [rank * m + j]))
            enter("backward")
            (loss / m).backward()
        norms.append(mp.clip_grad_norm(wrapper.parameters(), CLIP, norm))
        enter("optimizer")
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.data))
    return wrapper, optimizer, losses, norms


# %% [markdown]
# Each stage trains under the ledger. Its bits, its memory and its bytes are compared:


# %%
def run(stage, **options):
    return watch.watch(partial(train, partial(mp.shard, stage=stage), **options))


plain, one, two, three = runs = [run(stage) for stage in range(4)]
sizes = [bucket.size for bucket in plain.wrapper.buckets]
Psi = sum(sizes)
own = sum(stop - start for start, stop in (chunk_bounds(size, d)[rank] for size in sizes))
for stage, watched in enumerate(runs):
    state = model_state(Psi, own, stage, FLOAT64)
    assert same_bits(watched.bits, plain.bits)
    assert watched.state == (state.parameters, state.gradients, state.optimizer)
    assert watched.sent == watch.expected_bytes(watched.wrapper)
    holds = " + ".join(f"{nbytes / 2**20:.3f}" for nbytes in watched.state)
    sends = ", ".join(f"{op} {nbytes / 2**20:.3f}" for op, nbytes in watched.sent.items())
    say(f"stage {stage}: holds {holds} = {state.total / 2**20:.3f} MiB")
    say(f"         sends {sends or 'nothing'} MiB")
assert min(plain.norms) > CLIP
sums = [sum(watched.sent.values()) for watched in runs]
if d > 1:
    relative = [round(nbytes / sums[0], 2) for nbytes in sums]
    assert relative == [1, 1, 1, 1.5]
    say(f"bytes sent at stages 0 to 3, relative to stage 0: {relative}")
say(f"the same bits: all {Psi:,} parameters, {STEPS} losses, {STEPS} norms, of which every one was clipped")

# %% [markdown]
# Three claims hold for each stage. Parameters, losses and norms have stage 0's bits, and stage 0 has those of one
# device (chapter 4). The model state in the ledger **is** the formula's, to the byte. And the bytes sent **are** the
# closed form's: $2\Psi\frac{d-1}{d}$ elements in stages 0 to 2, $3\Psi\frac{d-1}{d}$ in stage 3, two values for the
# loss, and one for the norm.
#
# One rank's memory through one step, change by change, from the ledger. The dashed line is the formula.

# %%
if rank == 0:
    moments = {f"stage {stage}": watched.moments for stage, watched in enumerate(runs)}
    levels = {f"stage {stage}": watched.model_state for stage, watched in enumerate(runs)}
    show(plot_ledger(moments, levels), "05_stages")

# %% [markdown]
# Below the dashed line, the model state shrinks. Above it is what the formula leaves out. *Activations* grow through
# forward and shrink through backward, the same in every panel. *Buffers* are room for what arrives in a sum; in stage 2
# also the full gradients of buckets, and in stage 3 also the gathered parameters, of this unit and of the next. They
# take much of the memory at toy size, where a unit is a fifth of the model, and little of it with 96 blocks.

# %% [markdown]
# ## 5.6 What stage 3 pays
#
# *Core, 9 minutes.*
#
# Stage 3 sends half as many bytes again, and it pays more *latency*: each unit needs three collectives, not two. With a
# ring or pairwise messages each of them takes at least $(d-1)\alpha$ (chapter 3). And a late gather costs more than a
# late reduction. A late reduction delays the end of backward, but a late gather stops a computation that waits for its
# weights. So the library **prefetches**: while a unit computes, the next one's parameters are on their way, and two
# units exist at a time. One step of four units, on one rank, which sends one thing after the other:

# %%
if rank == 0:
    slots = figures.gather_and_free(units=4, forward=2, backward=4, wire=1.5)
    show(figures.draw_gather_and_free(slots), "05_gather_and_free")
    without = figures.gather_and_free(units=4, forward=2, backward=4, wire=1.5, prefetch=False)
    assert (slots[-1].end, without[-1].end) == (27, 40.5)

# %% [markdown]
# With these durations the step takes 27 units of time, of which 24 are computation; without prefetch it takes 40.5.
#
# **When is a gather hidden?** A unit has $\Psi_u$ parameters of $w$ bytes. A rank computes $B$ samples of $T$ tokens at
# $S$ operations per second. A token costs two operations per parameter, so a unit's forward takes $2 B T \Psi_u / S$
# seconds. Meanwhile the next unit, of the same size, is gathered. At $\beta$ seconds per byte that takes
# $\frac{d-1}{d}\, w \Psi_u \beta$ seconds, without latency. The gather is hidden if it does not take longer than the
# forward, and $\Psi_u$ cancels:
#
# $$B T \;\ge\; \frac{d-1}{d} \cdot \frac{w\, S\, \beta}{2} .$$
#
# In backward a unit computes for twice as long, and two messages are to be hidden behind it, a gather and a
# reduce-scatter. So the condition is the same. It is also stage 0's: a unit's all-reduce is two such messages, a
# reduce-scatter and an all-gather, and is hidden behind the backward of one unit.
#
# Four simulated devices test this on the model clock of chapters 3 and 4, at $10^{12}$ operations per second, with
# $\alpha = 1\,\mu s$ and $B T = 512$ tokens in fp32, so $w = 4$. Then the right side is 375 tokens at 4 GB/s and 6,000
# at 0.25 GB/s.
#
# **Predict**: on the faster network a step of stage 0 takes 0.873 ms. How long does a step of stage 3 take, which sends
# 1.5 times as many bytes?

# %%
predict("a step of stage 3 at 4 GB/s", ...)  # replace the dots by milliseconds

# %%
KINDS = {"stage 0": (0, True), "stage 1": (1, True), "stage 3 without prefetch": (3, False), "stage 3": (3, True)}
EXPECTED = {4e9: [0.873, 0.994, 1.296, 0.873], 0.25e9: [5.726, 5.726, 8.740, 7.985]}  # milliseconds
if rank == 0:
    times = {}
    for bandwidth, expected in EXPECTED.items():
        steps = {name: watch.simulate(*kind, bandwidth) for name, kind in KINDS.items()}
        replicated, _, _, sharded = steps.values()
        assert [round(step.seconds * 1e3, 3) for step in steps.values()] == expected
        assert 2 * sharded.bytes == 3 * replicated.bytes and 2 * sharded.messages == 3 * replicated.messages
        tokens = 3 / 4 * 4 * watch.SPEED / bandwidth / 2  # the right side of the condition
        is_hidden = tokens <= watch.BATCH * watch.LENGTH
        assert (abs(sharded.seconds / replicated.seconds - 1) < 1e-9) == is_hidden
        times[f"{bandwidth / 1e9} GB/s"] = {name: step.seconds for name, step in steps.items()}
    assert round(watch.COMPUTATION * 1e3, 3) == 0.755
    reveal("a step of stage 3 at 4 GB/s", round(times["4.0 GB/s"]["stage 3"] * 1e3, 3), say, "ms")
    show(figures.plot_step_times(times, watch.COMPUTATION), "05_step_times")

# %% [markdown]
# **On the fast network stage 3 costs nothing**, although it sends half as much again: both take 0.873 ms, of which
# 0.755 ms are computation. What cannot hide is the same in both: the embedding's unit and the first block's. Stage 0
# all-reduces them after the last computation. Stage 3 gathers them before the first one and reduce-scatters them after
# the last. Without prefetch it takes 1.296 ms: computation stops for each block's gather.
#
# **At 0.25 GB/s the wire is the bottleneck.** 5.726 ms become 7.985 ms, 1.39 times as much. As computation becomes
# negligible, the ratio goes towards $3\Psi / 2\Psi = 1.5$. Between hosts the network is often that slow; 5.11 has a
# remedy.

# %% [markdown]
# ### How large should a unit be?
#
# *Deeper, 2 minutes.*

# %% [markdown]
# With $k$ equal units prefetch keeps up to two whole ones, $2\Psi/k$ parameters, besides the chunks. A step has about
# $3k$ collectives, and each takes at least $(d-1)\alpha$. The first gather and the last reduce-scatter hide behind
# nothing, and they are shorter if units are smaller. So units should be as small as possible, but large enough that a
# unit's computation hides the latency of the next one's gather: usually they are blocks. With $k = 1$, the whole model,
# nothing is left to be prefetched, and all parameters are on every rank at once.

# %% [markdown]
# ### Stage 1's gather is not hidden
#
# *Deeper, 2 minutes.*

# %% [markdown]
# On the fast network stage 1 is slower than stage 0, with the same bytes: 0.994 ms. Stage 0 does its whole
# all-reduce during backward. In stage 1 the second half, the gather, follows the optimizer's step, where nothing
# computes. (Megatron can overlap it with the next forward, `--overlap-param-gather`. Stage 3 does so by its nature.)

# %% [markdown]
# ## 5.7 What no stage divides
#
# *Core, 3 minutes.*
#
# The model state is divided by $d$; activations are not, nor logits and gathered units. Activations depend on the
# rank's own samples. More ranks with the same global batch mean fewer samples each, but one sample is the least.

# %%
assert len({watched.most("activations") for watched in runs}) == 1
assert round(2048 * (34 * 4096 + 5 * 32 * 2048) / 1e6) == 956 and round(192 * 4096**2 / 64 / 1e6) == 50  # see below
for stage, watched in enumerate(runs):
    most = ", ".join(f"{kind} {watched.most(kind) / 2**20:.3f} MiB" for kind in ("activations", "buffers"))
    say(f"stage {stage}: model state {watched.model_state / 2**20:.3f} MiB; at most {most}")

# %% [markdown]
# The activations of all four stages are equal to the byte. When are they larger than the model state? In 16 bits, with
# $a$ heads and stored attention, they take about $BT(34h + 5aT)$ bytes per layer of hidden size $h$ (Korthikanti et al.
# 2022), and the layer's $12h^2$ parameters at stage 3 take $192h^2/d$. With $h = 4096$, $a = 32$, $d = 64$ and one
# sample of 2,048 tokens that is 956 MB of activations against 50 MB of state per layer.
#
# What helps is recompute (chapter 2), which every stage allows. The second forward of a block runs inside its backward,
# where the block is gathered anyway; it costs no third gather. Tensor and sequence parallelism divide activations.

# %% [markdown]
# ## 5.8 How the library does it
#
# *Deeper, 2 minutes.*

# %% [markdown]
# Nobody writes a training loop with `weight` and `finished` in it. The library's model is an ordinary one, and hooks in
# its forward and backward gather, free and reduce-scatter at the right time, while the model computes.
# [ZeRO in the library](more/fsdp_listings.ipynb) shows these functions, stage by stage.

# %% [markdown]
# ## 5.9 Gradient accumulation, and why pipelines object
#
# *Core, 5 minutes.*
#
# Let a rank run $m$ microbatches per step and add up their gradients. In stages 0 and 1, `no_sync` keeps them in the
# full gradient and sends once. In stages 2 and 3 there is no full gradient to add to. There are two ways out:
#
# - **Keep it whole while accumulating** (`no_sync`). Bytes: one reduce-scatter. Memory: $\Psi$ gradients on every rank
#   until the last backward, next to the chunks. The saving of stage 2 is gone.
# - **Reduce-scatter after every microbatch** and add up the chunks. Memory: $\Psi/d$. Bytes: $m$ reduce-scatters.
#
# Stage 3 also gathers parameters for every microbatch, twice. Elements sent per rank and step, each times
# $\frac{d-1}{d}$:
#
# | | reduce-scatter | all-gather | together |
# | --- | --- | --- | --- |
# | stage 0, 1 | $\Psi$ | $\Psi$ | $2\Psi$ |
# | stage 2, `no_sync` | $\Psi$ | $\Psi$ | $2\Psi$ |
# | stage 2, every microbatch | $m\Psi$ | $\Psi$ | $(m+1)\Psi$ |
# | stage 3, `no_sync` | $\Psi$ | $2m\Psi$ | $(2m+1)\Psi$ |
# | stage 3, every microbatch | $m\Psi$ | $2m\Psi$ | $3m\Psi$ |
#
# One step of each, with $m = 3$:

# %%
m = 3
counted = {}
for every, elements in ((False, Psi + own), (True, own)):
    bits = []
    for stage in (2, 3):
        watched = run(stage, m=m, every=every, steps=1)
        assert watched.most("gradients") == 8 * elements
        assert watched.sent == watch.expected_bytes(watched.wrapper, m, reductions=m if every else 1)
        bits.append(watched.bits)
        way = "every microbatch" if every else "no_sync"
        sent = sum(watched.sent.values())
        say(f"stage {stage}, {way}: gradients {8 * elements / 2**20:.3f} MiB, sends {sent / 2**20:.3f} MiB")
        losses_and_norm = watched.sent.get("all_reduce", 0)
        two_psi = max(1, plain.sent.get("all_reduce", 0))  # bytes of stage 0: 2 Psi (d - 1)/d elements
        counted[f"stage {stage}, {way}"] = (m, 2 * (sent - losses_and_norm) / two_psi)  # in units of Psi (d - 1)/d
    assert same_bits(*bits)
if rank == 0 and d > 1:
    formulas = {
        "stage 3, every microbatch": (0, 3),
        "stage 3, no_sync": (1, 2),
        "stage 2, every microbatch": (1, 1),
        "stage 2, no_sync": (2, 0),
    }
    for way, (constant, slope) in formulas.items():
        assert abs(counted[way][1] - constant - slope * m) < 0.02
    show(figures.plot_microbatches(formulas, counted), "05_microbatches")

# %% [markdown]
# (The two ways add in another order, so they agree only up to rounding.)
#
# **Why ZeRO 2 and 3 and pipelines do not fit together.** A pipeline needs many microbatches: with $p$ ranks its idle
# fraction is $(p-1)/(m+p-1)$ (chapter 7), so $m$ is several times $p$. For each of them stage 2 pays a reduce-scatter
# or gives back its gradient memory, and stage 3 gathers the parameters twice. What is sent once per step without
# microbatches is now sent $m$ times, and each time only the work of one microbatch can hide it. That is why Megatron
# and DeepSpeed combine pipelines with stage 1, whose communication is once per step whatever $m$ is. Chapter 10 counts
# it.

# %% [markdown]
# ## 5.10 Mistakes, and what notices them
#
# *Deeper, 8 minutes.*

# %% [markdown]
# Four mistakes (`chapters/support/ch05/watch.py` has them). The instruments:
#
# - **loss**: is the last loss off by more than 5 %?
# - **ranks**: do all ranks hold the same parameters?
# - **bits**: parameters, losses and norms as in stage 0?
# - **bytes**: are the bytes sent those of the right run?
# - **ledger**: after the step, is the memory that of the right run, kind by kind?
#
# 1. **The norm of the own chunk.** The all-reduce of the squared norm is forgotten.
#
# 2. **Forgotten all-gather.** `after_step` does nothing.
#
# 3. **A shard off by one.** The optimizer's chunk of the parameters begins one element too early.
#
# 4. **A unit that is never released.** Stage 3 gathers, and after use does not let go.
#
# **Predict** which instruments notice which mistake:

# %%
predict("1. own chunk's norm", ...)  # replace the dots by a set of instruments, such as {"loss", "ranks"}
predict("2. no all-gather", ...)
predict("3. shard off by one", ...)
predict("4. never released", ...)

# %%
broken = {
    "1. own chunk's norm": (partial(train, partial(mp.shard, stage=1), norm=serial()), one),
    "2. no all-gather": (partial(train, watch.NoGather), one),
    "3. shard off by one": (partial(train, watch.OffByOne), one),
    "4. never released": (partial(train, watch.NeverFrees), three),
}
assert watch.examine(run(1), plain, one) == set()  # nothing broken, nothing seen
caught = {}
for name, (run_broken, right) in broken.items():
    caught[name] = watch.examine(watch.watch(run_broken), plain, right)
    reveal(name, caught[name] or "nothing", say)

# %% tags=["hide-input"]
if d > 1:  # the first three need a second rank to be mistakes
    answers = [{"bits", "bytes"}, {"ranks", "bits", "bytes"}, {"bits"}, {"ledger"}]
    assert [instruments - {"loss"} for instruments in caught.values()] == answers

# %% [markdown]
# Four lessons.
#
# **AdamW hides a wrong norm.** Clipping with a wrong norm scales all gradients by a wrong factor, to which AdamW is
# nearly blind, as chapter 4 found. In mistake 1 each rank even has its own factor, and no loss curve shows it.
#
# **Gathering makes ranks agree, right or wrong.** Mistake 3 puts every update one element off. Since each chunk is
# gathered from its owner, all ranks agree on the wrong parameters, with the right number of bytes. A check that ranks
# are equal is necessary; it is not a proof.
#
# **A count of bytes shows whether the right amount is sent** (mistakes 1 and 2). It does not show what is sent.
#
# **Only the ledger shows memory.** Mistake 4 computes the right bits and sends the right bytes. But the whole model
# stays on every rank, so stage 3 saves no more than stage 2. A leak of this kind is found when a larger model does not
# fit, unless somebody counts. (Asked for, it is an option: FSDP's `reshard_after_forward=False` keeps units gathered
# from forward to backward, which trades that memory for $\Psi$ less on the wire.)

# %% [markdown]
# ## 5.11 Hybrid sharding
#
# *Deeper, 12 minutes.*

# %% [markdown]
# Stage 3 over 1,024 GPUs gathers each block over 1,024 GPUs, and most of these messages leave their hosts. Inside a
# host of 8 GPUs the network is ten or twenty times as fast. **Hybrid sharding** uses both: let $d$ ranks be $q$
# *replicas* of $s = d/q$ ranks each. The $s$ ranks of a replica, those of one host, hold all shards together. Ranks at
# the same place of all replicas hold the same shard. **[Exercise 24](exercises/e24_hybrid_shard.py)** asks for a step
# with clipping: `make exercises PYTEST="-k e24"`. Write it before you read on.

# %%
if rank == 0:
    show(figures.draw_shards_and_replicas(hosts=3, per_host=4), "05_shards_and_replicas")

# %% [markdown]
# Gathers and reduce-scatters stay inside a row. Only the *summed chunk* of a gradient, $\Psi/s$ elements per rank, is
# summed once more, down its column. That is ZeRO in the row and data parallelism in the column. For one backward per
# step:
#
# | stage 3 | model state per rank | elements that a rank sends inside | and between replicas |
# | --- | --- | --- | --- |
# | over all $d$ ranks | $16\Psi/d$ | $3\Psi\frac{d-1}{d}$, inside and between together | |
# | $q$ replicas of $s$ ranks | $16\Psi/s$ | $3\Psi\frac{s-1}{s}$ | $2\frac{\Psi}{s}\cdot\frac{q-1}{q}$ |
#
# A rank sends $\Psi/s$ twice between hosts, and a host with its $s$ ranks $2\Psi\frac{q-1}{q}$: as many bytes as one
# all-reduce of the gradient between hosts, and each GPU's network card carries its own part. For this, memory is
# $16\Psi/s$ and not $16\Psi/d$: it stops falling when a host is full. In the library it is a communicator in two
# levels, which the stages take as any other: `mp.shard(model, mp.HybridComm(comm, q), 3)`. In the trainer it is
# `--zero-replicas`.
#
# **Predict** for two replicas of four ranks: how many elements does a rank send between the replicas, as a multiple of
# $\Psi$?

# %%
predict("sent between two replicas of 4 ranks, times Psi", ...)

# %%
q = 2 if d % 2 == 0 else d  # two replicas, or for an odd number of ranks as many as ranks
s = d // q
ranks = mp.HybridComm(comm, q)
hybrid = watch.watch(partial(train, partial(mp.shard, stage=3), ranks=ranks, norm=ranks))
place = rank % s
chunks = [stop - start for size in sizes for start, stop in [chunk_bounds(size, s)[place]]]
assert hybrid.model_state == model_state(Psi, sum(chunks), 3, FLOAT64).total


def total(op, algorithm, lengths, ranks, r):
    return sum(wire_bytes(op, algorithm, length, 8, ranks, r) for length in lengths)


inside = 2 * total("all_gather", "pairwise", sizes, s, place) + total("reduce_scatter", "ordered", sizes, s, place)
between = total("all_reduce", "ordered", chunks, q, rank // s)
values = total("all_reduce", "ordered", [2], d, rank) + total("all_reduce", "ordered", [1], s, place)  # loss, norm
assert sum(hybrid.sent.values()) == inside + between + values
difference = np.abs(hybrid.bits - plain.bits).max() / np.abs(plain.bits).max()
assert difference < 1e-12
assert abs(between / (8 * Psi) - 2 / s * (q - 1) / q) < 0.01
sent = total("all_reduce", "ordered", [Psi // 4], ranks=2, r=0)  # whatever the number of ranks of this run
reveal("sent between two replicas of 4 ranks, times Psi", round(sent / (8 * Psi), 2), say)
say(f"{q} replicas of {s}: model state {hybrid.model_state / 2**20:.3f} MiB on rank 0")
say(f"stage 3 over all {d}: {three.model_state / 2**20:.3f} MiB")
say(f"rank 0 sends {inside / 2**20:.3f} MiB inside its replica and {between / 2**20:.3f} MiB between them")
say(f"parameters, losses and norms agree with stage 0 to {difference:.0e}: the sums are nested, (0+1)+(2+3)")

# %% [markdown]
# Stage 3 over all 8 ranks sends $3 \cdot \frac78\Psi$ elements per rank. Of these its two gathers alone send
# $2 \cdot \frac48\Psi = \Psi$ to the four ranks of the other host, where hybrid sharding sends $\Psi/4$. What is that
# worth in time? On the model clock, 8 devices on two hosts of 4, with 4 GB/s inside a host, and with 1 GB/s or 4 GB/s
# between them:

# %%
HYBRID = {"stage 0": (0, 1), "stage 1": (1, 1), "stage 3 over 8": (3, 1), "stage 3, 2 replicas": (3, 2)}
if rank == 0:
    times = {}
    for bandwidth in (4e9, 1e9):
        steps = {name: watch.simulate_hosts(*kind, inside=4e9, between=bandwidth) for name, kind in HYBRID.items()}
        times[f"{bandwidth / 1e9} GB/s between hosts"] = {name: step.seconds for name, step in steps.items()}
    slow = times["1.0 GB/s between hosts"]
    assert [round(seconds * 1e3, 2) for seconds in slow.values()] == [2.30, 1.99, 2.22, 0.94]
    equal = times["4.0 GB/s between hosts"]
    assert [round(seconds * 1e3, 2) for seconds in equal.values()] == [1.14, 1.19, 1.09, 0.89]
    say(f"hybrid sharding is faster by the factor {slow['stage 3 over 8'] / slow['stage 3, 2 replicas']:.2f}")
    show(figures.plot_step_times(times, watch.COMPUTATION), "05_hosts")

# %% [markdown]
# On the slow network hybrid sharding takes 0.94 ms instead of 2.22 ms. Even stage 0 takes longer, 2.30 ms. All its
# $2(d-1)$ steps are those of rings over both hosts, and in each of them somebody waits for the slow link. The gathers
# of stages 1 and 3 go pairwise: of a rank's 7 messages only 4 leave its host. So stage 1 is faster with the same bytes.
# With equal bandwidths (left) hybrid sharding takes 0.89 ms instead of 1.09 ms, mostly because a message between hosts
# still has five times the latency of one inside. For the same reason stage 0 is slower than stage 3 there. With equal
# latencies, too, both would take 0.91 ms, equal as in 5.6.
#
# **Does it win in practice?** InternEvo's authors trained a model of 7 billion parameters on A100s, 8 per host, with
# four network cards of 100 Gb/s per host. They sharded stage 1's state over all GPUs, or over the 8 of a host
# ([their table](https://github.com/InternLM/InternEvo/blob/develop/doc/en/train_performance.md)). On 1,024 GPUs
# sharding within the host trains 3,625 tokens per second and GPU instead of 2,271: 1.6 times as many. The state is
# larger, 12/8 instead of 12/1024 bytes per parameter, which is 10.5 GB for this model.
#
# So hybrid sharding wins where $16\Psi/s$ fits into a GPU and the network between hosts is the bottleneck. It loses
# where the model needs every GPU's memory: 70 billion parameters at stage 3 within 8 GPUs are 140 GB on each. Then a
# replica must span several hosts, $s = 16$ or more.

# %% [markdown]
# ## 5.12 PyTorch's names
#
# *Deeper, 2 minutes.*

# %% [markdown]
# | minipar | PyTorch | DeepSpeed, Megatron-LM |
# | --- | --- | --- |
# | `shard(model, comm, 1)` | `ZeroRedundancyOptimizer` | ZeRO stage 1, `--use-distributed-optimizer` |
# | `shard(model, comm, 2)` | `SHARD_GRAD_OP` (FSDP1), `reshard_after_forward=False` (FSDP2) | ZeRO stage 2 |
# | `fully_shard(model, comm)` | `fully_shard` (FSDP2), `FULL_SHARD` (FSDP1) | ZeRO stage 3 |
# | `fully_shard(model, HybridComm(comm, 2))` | the same on a 2-D mesh, `HYBRID_SHARD` (FSDP1) | `mics_shard_size` |
# | unit | a module for which `fully_shard` was called | a submodule |
# | chunk of a unit's flat array | FSDP1: `FlatParameter`; FSDP2: a DTensor per parameter, `Shard(0)` | flat, padded |
# | `unshard`, `wait_for_unshard`, `reshard` | the same names | `GatheredParameters` |
# | values drawn by name (5.4) | parameters on the device `meta` | `deepspeed.zero.Init` |
# | `prefetch` | `set_modules_to_forward_prefetch` | `stage3_prefetch_bucket_size` |
# | `no_sync` | `set_requires_gradient_sync(False)` | |
# | `wrapper.parameters()`: shards | `model.parameters()`: DTensors | the optimizer's fp32 partitions |
#
# PyTorch's two of ZeRO 2's row are near it: they gather a unit's parameters before its forward, and free them after its
# backward, so that all parameters are on every rank between the two. With $m$ microbatches FSDP2 can also keep them
# until the last backward (`set_reshard_after_backward(False)`). That is one gather instead of $2m$, so $2\Psi$ in all
# with `no_sync`. But then all parameters and gradients are on every rank, and only the saving of stage 1 is left.
# minipar has no such mode.
#
# The same in PyTorch: [chapters/pytorch/ch05.py](pytorch/ch05.py).

# %%
if rank == 0:
    show_file("chapters/pytorch/ch05.py")

# %% [markdown]
# ## 5.13 Problems
#
# *Deeper, 30 minutes.*

# %% [markdown]
# The answers are in 5.14, and the cell at its end computes them.
#
# 1. A model of 13 billion parameters is trained in mixed precision on 8 GPUs of 80 GB. Activations and buffers take 20
# GB of each. Which is the first stage that fits, with one backward per step?
#
# 2. Parameters and gradients travel in fp16. How many GB does each of the 8 GPUs of problem 1 send per step for its 13
# billion parameters, with $m = 8$ microbatches: in stage 1; in stage 2 with a reduce-scatter after every microbatch; in
# stage 3 likewise?
#
# 3. A GPU has 60 GB for the model state. How large a model can be trained with stages 1, 2 and 3 on 8 GPUs, and how
# large on 1,024?
#
# 4. 64 GPUs reach $4 \cdot 10^{14}$ operations per second each and send 50 GB/s each, in fp16. How many tokens must a
# GPU compute per microbatch so that stage 3 hides its gathers? How much longer does a step of one microbatch of 4,096
# tokens take than if nothing had to be sent? (Leave out latencies and the first and last unit: forward and backward
# take as long as their gathers if these are longer.)
#
# 5. A model of 30 billion parameters is trained at stage 3 on 64 GPUs, 8 per host. How many GB of model state does each
# hold over all GPUs, and with 8 replicas? How many GB in 16 bits does each GPU send between hosts per step with 8
# replicas?

# %% [markdown]
# ### For you
#
# 1. Hide stage 1's gather: let the next forward start while that of `after_step` is under way. What must a unit's
# forward wait for? Which method of this chapter starts such a gather, and which waits for it?
#
# 2. The last block (not the head) is released after its forward and gathered again a moment later, when backward comes
# out of the head. Keep it. How many bytes does a step save, and what happens to the peak? Why is it the last block and
# not the first?
#
# 3. A run on 8 ranks is to be continued on 6. A *checkpoint* is what the run writes to files so that another run can
# take its next step; the batch of a step depends on the seed and the step's number only. Which arrays must it hold, in
# which form, and which results of the continued run will differ in their last bits from those of 8 ranks? (The global
# batch divides by both.)

# %% [markdown]
# ## 5.14 Answers
#
# *Deeper, 5 minutes.*

# %% [markdown]
# <details><summary>Answers</summary>
#
# Of the problems:
#
# 1. Stage 2: it takes 68.75 GB, stage 1 takes 91.5 GB.
#
# 2. 45.5, 204.75 and 546 GB: 2, $m + 1$ and $3m$ times 22.75 GB (table in 5.9).
#
# 3. 10.9, 16 and 30 billion parameters on 8 GPUs, 15, 29.8 and 3,840 billion on 1,024. Stages 1 and 2 end at 60/4 and
# 60/2, however many GPUs there are.
#
# 4. 7,875 tokens. With 4,096 the wire is the bottleneck, and a step takes 1.92 times as long.
#
# 5. 7.5 GB and 60 GB. $2 \cdot \frac{30}{8} \cdot \frac78 = 6.56$ billion elements, which are 13.1 GB.
#
# Of "For you":
#
# 1. For the gather of its own buckets, and for nothing else. Start the gathers in the model's order, so that the first
# unit's comes first. `unshard` starts a gather and `wait_for_unshard` waits for it when the unit's forward comes.
#
# 2. One all-gather of a block, $\frac{d-1}{d}\Psi_u$ elements per rank. The peak of the step does not rise, because the
# library gathers the last block again already when the head's forward begins, so that it is there for backward: it is
# away for a moment only (unit 2 in the picture of 5.6). The first block would stay through all of forward and
# backward.
#
# 3. Parameters, both means of AdamW, and the number of the step. Each array is stored under its parameter's name as
# elements of the *whole* parameter, because 6 ranks cut chunks in other places than 8. The sums over ranks have other
# terms and another order with 6 ranks, so gradients, losses and norms differ in their last bits from those of a run
# that stays on 8. What is restored (parameters and means) has the same bits.
#
# </details>

# %% tags=["hide-input"]
fits = [float(bytes_per_rank(13 * 10**9, 8, stage)) / 1e9 + 20 for stage in range(4)]
assert fits == [228, 91.5, 68.75, 46]

assert round(3625 / 2271, 1) == 1.6 and round(12 * 7 / 8, 1) == 10.5  # 5.11: InternEvo's table, GB of its state

once_around = float(13 * 2 * Fraction(7, 8))  # GB of one reduce-scatter or all-gather of everything, per GPU
assert [times * once_around for times in (2, 8 + 1, 3 * 8)] == [45.5, 204.75, 546]

largest = {ranks: [round(60 / float(bytes_per_rank(1, ranks, stage)), 1) for stage in (1, 2, 3)] for ranks in (8, 1024)}
assert largest == {8: [10.9, 16, 30], 1024: [15, 29.8, 3840]}

needed = Fraction(63, 64) * 2 * Fraction(4 * 10**14, 50 * 10**9) / 2
assert needed == 7875 and round(float(needed / 4096), 2) == 1.92

assert [float(bytes_per_rank(30, ranks, 3)) for ranks in (64, 8)] == [7.5, 60]
assert float(2 * 2 * Fraction(30, 8) * Fraction(7, 8)) == 13.125
say("problems 1 to 5: the answers are right")

# %% tags=["active-ipynb"]
# %autopx

# %% tags=["active-ipynb"]
# # Back in one process: stop the eight.
# cluster.stop_cluster_sync()
