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
# **Data parallelism keeps $N$ copies of everything. Which of them does it need?**
#
# Chapter 4 ended with $N$ ranks that hold the same parameters, the same gradients and the same optimizer state, and
# that all take the same optimizer step. ZeRO, the "zero redundancy optimizer" (Rajbhandari et al. 2020, arXiv
# 1910.02054), removes the copies in three stages, without changing a bit of the result:
#
# - stage 1 cuts the **optimizer state** into one chunk per rank,
#
# - stage 2 the **gradients** too,
#
# - stage 3 the **parameters** too. PyTorch calls this stage FSDP, fully sharded data parallelism.
#
# This chapter derives each stage, runs it, proves it equal to stage 0 (plain data parallelism) and to one device, and
# counts what it holds and what it sends. Then it asks what stage 3 costs, what no stage can divide, and why stages 2
# and 3 do not like pipelines.
#
# Run it as `mpirun -n 8 python chapters/05_zero.py`, with any number of ranks. With one rank there is nothing to share
# out: all stages hold the same, and the claims say little. Letters: $N$ ranks, of which this one is $r$; $\Psi$
# parameters; $m$ microbatches per rank and step; $T$ tokens per sample; $\alpha$ seconds per message, $\beta$ seconds
# per byte. In 4.10 $p$ counts the stages of a pipeline.

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
rank, N = comm.rank, comm.size
say = printer(rank)  # rank 0 prints and draws; every rank checks
if rank == 0:
    from chapters.support.show import show, show_source
    from visualize import parse_trace, plot_bytes, plot_ledger, plot_timeline
say(f"{N} rank{'s' if N > 1 else ''}")

# %% [markdown]
# ## 5.1 Sixteen bytes per parameter
#
# A model of 7.5 billion parameters in 16-bit values takes 15 GB. It fits into a GPU of 32 GB, but it cannot be trained
# there. Training keeps more than the parameters. For each of them, in mixed precision with Adam (section 3.1 of the
# paper):
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
# Why an fp32 copy of the parameters? An update is often smaller than $2^{-11}$ of its parameter, half the distance to
# the next fp16 value, and would be rounded away. The three fp32 rows are the *optimizer state*, 12 bytes. Without
# mixed precision there is no second copy: parameter, gradient and two means are $4 + 4 + 8 = 16$ bytes in fp32, and
# $8 + 8 + 16 = 32$ in float64, in which this chapter runs.
#
# Parameters, gradients and optimizer state together are the **model state**. With $\Psi$ parameters and $N$ ranks:
#
# | stage | parameters | gradients | optimizer | bytes per rank, mixed precision |
# | --- | --- | --- | --- | --- |
# | 0 | $\Psi$ | $\Psi$ | $\Psi$ | $16\Psi$ |
# | 1 | $\Psi$ | $\Psi$ | $\Psi/N$ | $4\Psi + 12\Psi/N$ |
# | 2 | $\Psi$ | $\Psi/N$ | $\Psi/N$ | $2\Psi + 14\Psi/N$ |
# | 3 | $\Psi/N$ | $\Psi/N$ | $\Psi/N$ | $16\Psi/N$ |
#
# The paper's Table 1 for 7.5 billion parameters, from this formula, in GB ($10^9$ bytes); the paper's own figures in
# brackets:

# %%
from fractions import Fraction


def bytes_per_rank(psi, ranks, stage):
    """Model state in mixed precision. A fraction, because `ranks` need not divide `psi`."""
    own = Fraction(psi, ranks)
    return 2 * (own if stage >= 3 else psi) + 2 * (own if stage >= 2 else psi) + 12 * (own if stage >= 1 else psi)


PAPER = {
    4: (52.5, 41.3, 30.0),
    16: (35.6, 21.6, 7.5),
    64: (31.4, 16.6, 1.88),
    256: (30.4, 15.4, 0.47),
    1024: (30.1, 15.1, 0.12),
}
psi = 7_500_000_000
say("ranks   stage 0          stage 1          stage 2          stage 3")
for ranks, printed in PAPER.items():
    ours = [float(bytes_per_rank(psi, ranks, stage)) / 1e9 for stage in (0, 1, 2, 3)]
    assert ours[0] == 120
    assert all(abs(a - b) < 1 for a, b in zip(ours[1:], printed, strict=True))
    pairs = "  ".join(f"{a:>7.2f} ({b:>5})" for a, b in zip(ours[1:], printed, strict=True))
    say(f"{ranks:>5}  {ours[0]:>8.2f}  {pairs}")
say("every figure within 1 GB of the paper's: they differ by rounding")

# %% [markdown]
# With many ranks stage 1 alone takes three quarters away, and stage 2 seven eighths: 120 GB become 31.4 GB and 16.6 GB
# on 64 ranks. Both stop at a floor, $4\Psi$ and $2\Psi$, which are 30 GB and 15 GB here. Only stage 3 falls as $1/N$,
# to 1.9 GB on 64 ranks, so only stage 3 lets a model grow with the number of ranks.
#
# The library's version takes the number of elements that a rank really owns, other precisions (this chapter's runs are
# in float64), and the case that gradients accumulate (5.10). It is the function that `--memory-limit` uses (5.9).

# %%
from minipar.parallel.memory import MIXED, elements_held, model_state

assert all(
    bytes_per_rank(psi, ranks, stage) == model_state(psi, Fraction(psi, ranks), stage, MIXED).total
    for ranks in PAPER
    for stage in (0, 1, 2, 3)
)
if rank == 0:
    show_source(elements_held, model_state)

# %% [markdown]
# ## 5.2 What is redundant?
#
# Two facts from chapter 4 make the stages possible.
#
# **An all-reduce is a reduce-scatter and an all-gather.** The first leaves rank $r$ with chunk $r$ of the sum, the
# second hands all chunks to all. Each sends $\Psi\frac{N-1}{N}$ elements per rank. Something can be done in between.
#
# **AdamW works element by element.** In step $k$ each element $\theta$ of the parameters, with gradient $g$, has two
# running means $\mu$ and $\nu$, the learning rate $\eta$ and the weight decay $\lambda$, and changes as
#
# $$\mu \leftarrow \beta_1 \mu + (1-\beta_1)\,g, \quad \nu \leftarrow \beta_2 \nu + (1-\beta_2)\,g^2, \quad
# \theta \leftarrow (1-\eta\lambda)\,\theta - \eta\,
# \frac{\mu / (1-\beta_1^k)}{\sqrt{\nu / (1-\beta_2^k)} + \epsilon} .$$
#
# No other element appears in this rule. So the rank that has chunk $r$ of the gradient sum can update chunk $r$ of the
# parameters, with chunk $r$ of the means, and nobody else needs them.
#
# So instead of *reduce-scatter, all-gather the gradients, then everybody updates everything*, do *reduce-scatter,
# update the own chunk, all-gather the parameters*. Here are both, on bare arrays:

# %%
import numpy as np

from minipar.comm import chunk_bounds
from minipar.nn import AdamW, Parameter


def same_bits(a, b):
    return a.tobytes() == b.tobytes()


n = 1003
start, stop = chunk_bounds(n, N)[rank]
theta = np.linspace(-1, 1, n)
replica, chunk = Parameter(theta.copy()), Parameter(theta[start:stop].copy())
adam_of_all, adam_of_chunk = AdamW([replica]), AdamW([chunk])
gathered = np.empty(n)
for step in range(3):
    g = np.random.default_rng([step, rank]).normal(size=n)  # this rank's own gradient
    comm.traffic.reset()

    replica.grad = comm.all_reduce(g.copy(), algorithm="ordered")
    adam_of_all.step()

    chunk.grad = comm.reduce_scatter(g, algorithm="ordered")
    adam_of_chunk.step()
    comm.all_gather(chunk.data, out=gathered, algorithm="pairwise")

    assert same_bits(gathered, replica.data)
    in_one, in_two = comm.traffic.bytes("all_reduce"), comm.traffic.bytes() - comm.traffic.bytes("all_reduce")
    assert in_one == in_two
state = [sum(a.nbytes for a in (*adam.exp_avg, *adam.exp_avg_sq)) for adam in (adam_of_all, adam_of_chunk)]
assert state == [16 * n, 16 * (stop - start)]
say(f"three steps, {n} parameters: the same bits")
say(f"optimizer state on rank 0: {state[0]:,} bytes whole, {state[1]:,} as a chunk")
say(f"sent by rank 0 per step: {in_one:,} bytes with an all-reduce, {in_two:,} with its two halves")

# %% [markdown]
# That is stage 1. The rest of this chapter is this idea in a real model, and its consequences.
#
# ### The instruments
#
# **A ledger of memory.** Every array that outlives the call that made it is announced: `hold("gradients", array)`. The
# ledger adds its bytes, and takes them off when the array is *really* freed, which a weak reference tells. A reference
# that somebody forgot shows as memory. There are five kinds: parameters, gradients and optimizer are the model state;
# *activations* are what forward keeps for backward; *buffers* are copies that live briefly, such as gathered parameters
# and room for messages. The idea takes a few lines:

# %%
import weakref

held_now = [0]


def announce(array):
    """Count the bytes of this array until it is freed."""
    held_now[0] += array.nbytes
    weakref.finalize(array, released, array.nbytes)


def released(nbytes):
    held_now[0] -= nbytes


first, second = np.zeros(100), np.zeros(10)
announce(first)
announce(second)
assert held_now[0] == 880
first = None  # the last reference: the array is freed here
assert held_now[0] == 80

# %% [markdown]
# The library's ledger keeps one sum for each kind, counts the memory of views once, and records every change as a
# moment, for the pictures below.

# %%
from minipar.memory import MemoryLedger, hold

if rank == 0:
    show_source(MemoryLedger.hold, MemoryLedger._freed)

# %% [markdown]
# **A counter of bytes sent**, by operation (chapter 3). **The bits** of all parameters, and of every step's loss and
# gradient norm.
#
# The model is a GPT-2 of toy size in float64, one sample per rank, with gradients clipped so that the norm matters. We
# use the real trainer, `minipar.train`, with `--reduction ordered`, so that one device can be asked for the same bits.

# %%
from dataclasses import dataclass
from unittest.mock import patch

from minipar.comm import DeviceMesh
from minipar.parallel.stages import STAGES
from minipar.train.config import parse, resolve
from minipar.train.data import load_tokens
from minipar.train.trainer import Trainer

T, STEPS, CLIP = 32, 3, 0.5
tokens = load_tokens(None, vocab_size=256, seq_len=T)
FLAGS = f"--layers 4 --hidden 64 --heads 4 --seq-len {T} --global-batch {N} --dtype float64 --reduction ordered"
FLAGS = f"{FLAGS} --lr 3e-3 --clip-grad {CLIP}".split()


@dataclass
class Run:
    stage: int
    trainer: Trainer
    steps: list  # what each step reported
    ledger: MemoryLedger  # its moments are those of the last step
    sent: dict  # bytes of the last step, by operation

    def bits(self):
        """All parameters, losses and gradient norms in one array. (Every rank calls it: stage 3 must gather.)"""
        values = [p.data for p in self.trainer.model.parameters()]
        if self.stage == 3:
            values = [self.trainer.ddp.gather_parameter(p) for p in self.trainer.model.parameters()]
        values = [array.reshape(-1) for array in values]
        return np.concatenate([*values, [s.loss for s in self.steps], [s.grad_norm for s in self.steps]])


def train(stage, *flags, steps=STEPS, wrapper=None, kind=Trainer):
    """Train at a ZeRO stage on all ranks. `wrapper`: a class for this stage instead of the library's (exercises)."""
    config = resolve(parse([*FLAGS, "--zero-stage", str(stage), "--steps", str(steps), *flags], rank), N)
    ledger = MemoryLedger()
    with ledger.recording(), patch.dict(STAGES, {stage: wrapper} if wrapper else {}):
        trainer = kind(config, DeviceMesh(comm, dp=N), tokens)
        results = [trainer.step(step) for step in range(steps - 1)]
        comm.traffic.reset()
        results.append(trainer.step(steps - 1))
    sent = {op: counted["bytes"] for op, counted in comm.traffic.as_dict().get("dp", {}).items()}
    return Run(stage, trainer, results, ledger, sent)


plain = train(0)
Psi = plain.trainer.size
BUCKETS = [bucket.size for bucket in plain.trainer.ddp.buckets]
say(f"{Psi:,} parameters in {len(BUCKETS)} buckets of {BUCKETS} elements")

# %% [markdown]
# In every stage a bucket is a *unit*: the parameters of one block, or those of the embedding and the head, which share
# a matrix. FSDP gathers in such units. Chunk $r$ of each bucket belongs to rank $r$. Equal buckets in all stages mean
# that the same values are added in the same order.
#
# What must hold after every run, whatever the stage:
#
# 1. The model state in the ledger **is** the formula's, to the byte. Where $N$ does not divide a bucket, the first
# ranks have one element more. `elements_placed` counts them in a loop over the parameters' *placements*, which record
# where in a bucket each one is. (Frameworks pad instead.)
#
# 2. The bytes sent **are** the closed form's. Next to the large arrays, each step sums a float64 for the loss, and
# stages 1 to 3 another one for the norm.
#
# 3. Parameters, losses and norms have stage 0's bits.

# %%
from minipar.comm import wire_bytes
from minipar.parallel.memory import FLOAT64, elements_placed
from minipar.parallel.placement import placement_of

PLACEMENTS = [placement_of(parameter) for parameter in plain.trainer.ddp.parameters()]
_, OWN = elements_placed(PLACEMENTS, rank)
ONE_VALUE = wire_bytes("all_reduce", "ordered", 1, 8, N, rank)


def over_buckets(op, algorithm):
    return sum(wire_bytes(op, algorithm, size, 8, N, rank) for size in BUCKETS)


def expected_bytes(stage, reductions=1, gathers=None):
    """Bytes that this rank sends in a step, by operation. `gathers`: how often all parameters are gathered."""
    if stage == 0:
        return {"all_reduce": over_buckets("all_reduce", "ordered") + ONE_VALUE}
    gathers = gathers or (2 if stage == 3 else 1)
    return {
        "reduce_scatter": reductions * over_buckets("reduce_scatter", "ordered"),
        "all_gather": gathers * over_buckets("all_gather", "pairwise"),
        "all_reduce": 2 * ONE_VALUE,
    }


def nonzero(sent):
    """With one rank an operation that sends nothing may be counted or not."""
    return {op: nbytes for op, nbytes in sent.items() if nbytes}


def state_held(run):
    return tuple(run.ledger.held[kind] for kind in ("parameters", "gradients", "optimizer"))


def formula(stage):
    state = model_state(Psi, OWN, stage, FLOAT64)
    return state.parameters, state.gradients, state.optimizer


def prove(run):
    held, sent = state_held(run), nonzero(run.sent)
    assert held == formula(run.stage)
    assert sent == nonzero(expected_bytes(run.stage))
    assert same_bits(run.bits(), plain.bits())
    travels, single_values = (3 if run.stage == 3 else 2), (1 if run.stage == 0 else 2)
    together = int(comm.all_reduce(np.array([sum(sent.values()) - single_values * ONE_VALUE]))[0]) // 8
    assert together == travels * Psi * (N - 1)  # over all ranks, exactly; per rank (N-1)/N of it, up to uneven chunks
    whose = "the bits of stage 0" if run.stage else "the bits to compare with"
    say(f"stage {run.stage}: {whose} after {STEPS} steps: parameters, losses, norms")
    terms = " + ".join(f"{nbytes:,}" for nbytes in held)
    say(f"         holds {terms} = {sum(held):,} bytes of model state: the formula's")
    terms = " + ".join(f"{op} {nbytes:,}" for op, nbytes in sent.items())
    say(f"         sends {terms or 'nothing'} bytes: the closed form's")
    say(f"         all ranks together send {travels} Psi (N-1) = {together:,} elements of 8 bytes")


prove(plain)

# %% [markdown]
# Is stage 0 right? That is chapter 4's claim, proved again here: one device that takes the ranks' shards in order gets
# the same bits. Then whatever has stage 0's bits has one device's.

# %%
from minipar.train.verify import train_on_one_device

state = plain.trainer.state_dict()  # by name, on rank 0
if rank == 0:
    single, single_steps = train_on_one_device(plain.trainer.config, tokens)
    assert all(same_bits(state[name], single[name]) for name in single)
    assert [s.loss for s in plain.steps] == [s.loss for s in single_steps]
    assert [s.grad_norm for s in plain.steps] == [s.grad_norm for s in single_steps]
    assert min(s.grad_norm for s in single_steps) > CLIP, "clipping is at work in every step"
    say(f"stage 0 on {N} ranks = 1 device, bit for bit, {STEPS} steps, every one of them clipped")

# %% [markdown]
# ## 5.3 Stage 1: shard the optimizer state
#
# A script chooses the stage with one argument and changes nothing else. Its optimizer gets `wrapper.parameters()`. From
# stage 1 on these are this rank's part of the model. Here is one step in each stage:

# %%
import minipar as mp
from minipar.train.data import Batches

x, y = Batches(tokens, seq_len=T, global_batch=N, order="random", seed=0).batch(0, [rank])


def one_step(stage):
    model = mp.GPT(mp.GPTConfig(vocab_size=256, n_positions=T, n_embd=32, n_layer=2, n_head=4), dtype="float64")
    wrapper = mp.shard(model, comm, stage)
    optimizer = mp.AdamW(wrapper.parameters())
    wrapper.loss(x, y).backward()  # the gradient of the mean over all ranks' tokens, summed where this rank needs it
    optimizer.step()
    return wrapper.state_dict()  # by name, on rank 0; {} on the others


states = [one_step(stage) for stage in range(4)]
assert all(same_bits(state[name], states[0][name]) for state in states for name in states[0])
say("one step in each of the stages 0, 1, 2 and 3: the same bits")

# %% [markdown]
# Inside are the three lines of 5.2, and the library adds three things. Buckets are reduce-scattered during backward, as
# their gradients become complete, and not after it. The optimizer sees *shards*, the pieces of parameters that lie in
# this rank's chunks, and a shard remembers whether its whole parameter was a matrix, because AdamW here decays matrices
# and leaves biases alone. And when the optimizer has updated them, it calls the wrapper's `after_step` by itself, which
# gathers what the others made of theirs.

# %%
from minipar.parallel.placement import ParameterShard
from minipar.parallel.sharding import Chunk
from minipar.parallel.zero import ZeroStage1, ZeroStage2, gather_parameters

if rank == 0:
    show_source(ZeroStage1.__init__, Chunk.__init__, ParameterShard.__init__)
    show_source(ZeroStage1._on_gradient, ZeroStage1._reduce_scatter, ZeroStage1.synchronize)
    show_source(ZeroStage1.after_step, gather_parameters)

# %% [markdown]
# **The norm.** Clipping needs the norm of the *whole* gradient, of which a rank has only its chunks. The chunks are
# disjoint and complete, so
#
# $$\lVert g \rVert^2 = \sum_{r=0}^{N-1} \; \sum_{i \,\in\, \text{chunks of } r} g_i^2 ,$$
#
# the inner sum on each rank, the outer one an all-reduce of a single value. Every element counts once. To get the same
# bits, stage 0 sums in this order too, although it could go through its flat array from front to back. One function,
# `grad_norm.clip_grad_norm`, does it for all stages.

# %%
one = train(1)
prove(one)

# %% [markdown]
# $2\Psi$ on the wire, as before. For mixed precision and large $N$ the model state falls from $16\Psi$ to $4\Psi$. It
# costs no more bytes and one tiny all-reduce; 5.7 shows the one disadvantage.
#
# ## 5.4 Stage 2: shard the gradients
#
# After the reduce-scatter a rank needs only its chunk of the gradient. Before it, the full gradient must exist, because
# backward computes it. So let it exist only then: compute the gradient of one layer, reduce-scatter it, free it, and go
# on to the layer before.
#
# Here it is on bare arrays. The model has four layers $y = \tanh(x W)$ without biases, and every rank has its own
# samples. The loss is half the sum of squares of the output, so the gradient of the output is the output. One training
# loop serves all stages. A stage says where the matrix of a layer comes from (`weights`) and what becomes of its
# gradient (`finished`).

# %%
LAYERS, WIDTH, BARE_STEPS = 4, 9, 3
ONE = WIDTH * WIDTH  # parameters of one layer
begin, end = chunk_bounds(ONE, N)[rank]  # this rank's chunk of each layer


def initial(layer):
    return np.random.default_rng([1, layer]).normal(0, 0.3, ONE)  # the same values on every rank


def train_layers(weights, finished, optimizer, after_step=lambda: None):
    for step in range(BARE_STEPS):
        kept = [np.random.default_rng([2, step, rank]).normal(size=(5, WIDTH))]  # 5 samples; other ones on each rank
        for i in range(LAYERS):
            w = weights(i)
            kept.append(np.tanh(kept[i] @ w))
            del w  # stage 3 frees the matrix here
        g = kept[LAYERS]
        for i in reversed(range(LAYERS)):
            g = g * (1 - kept[i + 1] ** 2)
            finished(i, kept[i].T @ g)
            w = weights(i)
            g = g @ w.T
            del w
        optimizer.step()
        optimizer.zero_grad()
        after_step()


def bare_stage_0():
    whole = [Parameter(initial(i)) for i in range(LAYERS)]
    hold("parameters", *(w.data for w in whole))

    def weights(i):
        return whole[i].data.reshape(WIDTH, WIDTH)

    def finished(i, gradient):
        hold("gradients", gradient)
        whole[i].grad = comm.all_reduce(gradient.reshape(-1), algorithm="ring")  # in place

    train_layers(weights, finished, AdamW(whole))
    return weights


def reduce_scatter_into(chunks):
    def finished(i, full):
        hold("gradients", full)
        chunks[i].grad = comm.reduce_scatter(full.reshape(-1), algorithm="ring").copy()
        hold("gradients", chunks[i].grad)  # the full gradient is freed when this function returns

    return finished


def bare_stage_2():
    whole = [initial(i) for i in range(LAYERS)]
    chunks = [Parameter(w[begin:end]) for w in whole]  # views: the optimizer writes into `whole`
    hold("parameters", *whole)

    def weights(i):
        return whole[i].reshape(WIDTH, WIDTH)

    def after_step():
        for w, chunk in zip(whole, chunks, strict=True):
            comm.all_gather(chunk.data, out=w, algorithm="pairwise")

    train_layers(weights, reduce_scatter_into(chunks), AdamW(chunks), after_step)
    return weights


def prove_bare(name, train_bare, elements, collectives):
    """Train; return the parameters' bits. `elements`: the most that a rank holds of each kind, by the formula."""
    ledger = MemoryLedger()
    comm.traffic.reset()
    with ledger.recording():
        weights = train_bare()
    sent = comm.traffic.bytes()
    assert sent == BARE_STEPS * LAYERS * sum(wire_bytes(op, how, ONE, 8, N, rank) for op, how in collectives)
    together = int(comm.all_reduce(np.array([sent]))[0])  # of all ranks
    travels = max(2, len(collectives))  # an all-reduce is two
    assert together == 8 * BARE_STEPS * travels * ALL * (N - 1)
    highest = [max(held[kind] for _, held in ledger.moments) for kind in (0, 1, 2)]
    assert highest == [8 * count for count in elements], (highest, elements)
    parameters, gradients, optimizer = highest
    say(f"{name}: at most {parameters:,} + {gradients:,} + {optimizer:,} bytes; all ranks sent {together:,} bytes")
    return np.concatenate([weights(i) for i in range(LAYERS)])


OWNED, ALL = LAYERS * (end - begin), LAYERS * ONE
SCATTER, GATHER = ("reduce_scatter", "ring"), ("all_gather", "pairwise")
say("most bytes of parameters, gradients and optimizer state on rank 0; bytes sent by all ranks in three steps:")
bare = prove_bare("stage 0", bare_stage_0, (ALL, ALL, 2 * ALL), [("all_reduce", "ring")])
bits = prove_bare("stage 2", bare_stage_2, (ALL, OWNED + ONE, 2 * OWNED), [SCATTER, GATHER])
assert same_bits(bits, bare)
say("stage 2 has the bits of stage 0")

# %% [markdown]
# The ledger proves the sentence above: next to its chunks, a rank never holds more than *one* full gradient of a layer.
#
# The library's stage adds three things. It is asynchronous: `_prepare` makes the array for a bucket's full gradient
# when backward arrives at the bucket's unit, and waits until at most one older bucket still travels, so there are never
# more than two. The message alone refers to the full gradient, so the gradient is freed when it has been sent. And
# nobody writes a training loop with `finished` in it: the unit must notice by itself that backward arrives.
#
# How does it notice? Backward goes through the operations in reverse. An identity operation that is applied to the
# unit's *output* runs its backward just before the unit's backward. An identity that is applied to the unit's *input*
# runs its backward just after the unit's backward:
#
# | | first | then | last |
# | --- | --- | --- | --- |
# | forward | identity on the input | the unit | identity on the output |
# | backward | identity on the output: `_before_backward` | the unit | identity on the input: `_after_backward` |

# %%
if rank == 0:
    show_source(ZeroStage2._around, ZeroStage2._before_backward, ZeroStage2._prepare, ZeroStage2._reduce_scatter)

# %%
two = train(2)
prove(two)

# %% [markdown]
# The same bytes on the wire again. Stage 2 is free, as long as every step has a single backward; 5.10 has another case.
#
# ## 5.5 Stage 3: shard the parameters
#
# A block's parameters are needed in the block's forward and in its backward. In between they can live elsewhere. So:
# gather a unit just before its forward, free it after; gather it again just before its backward, free it for good.
# After the optimizer's step nothing needs to be gathered at all: the next forward does that.
#
# $$\underbrace{\Psi}_{\text{gather for forward}} + \underbrace{\Psi}_{\text{gather for backward}} +
# \underbrace{\Psi}_{\text{reduce-scatter}} = 3\Psi, \text{ each times } \tfrac{N-1}{N} .$$
#
# On the bare arrays of 5.4, `weights` now gathers a layer, and the training loop frees it after use, once in forward
# and once in backward. After the step there is nothing to do:


# %%
def bare_stage_3():
    chunks = [Parameter(initial(i)[begin:end].copy()) for i in range(LAYERS)]
    hold("parameters", *(chunk.data for chunk in chunks))

    def weights(i):
        w = np.empty(ONE)
        hold("parameters", w)
        comm.all_gather(chunks[i].data, out=w, algorithm="pairwise")
        return w.reshape(WIDTH, WIDTH)

    train_layers(weights, reduce_scatter_into(chunks), AdamW(chunks))
    return weights


bits = prove_bare("stage 3", bare_stage_3, (OWNED + ONE, OWNED + ONE, 2 * OWNED), [GATHER, GATHER, SCATTER])
assert same_bits(bits, bare)
say("stage 3 has the bits of stage 0, and next to its chunks a rank never holds more than one whole layer")

# %% [markdown]
# The library adds **prefetch**: while a unit computes, the next one's parameters are on their way, so that two units
# exist at a time (5.7). It frees a unit although the graph of backward needs it: a matrix product's backward reads the
# weight, so a node of the graph keeps the *parameter*, not its values, and asks for them when backward comes. And it
# makes mistakes visible: while a unit is away, its parameters hold a `placeholder`, a single NaN that stands for every
# element, so that code that uses a parameter at the wrong time computes NaN.

# %%
from minipar.parallel.fsdp import FullyShardedDataParallel

FSDP = FullyShardedDataParallel
if rank == 0:
    show_source(FSDP._fetch, FSDP._gather, FSDP._release, FSDP._free)
    show_source(FSDP._before_forward, FSDP._after_forward, FSDP._before_backward, FSDP._after_backward)

# %%
three = train(3)
prove(three)
assert all(np.isnan(parameter.data).all() for parameter in three.trainer.model.parameters())
say("between the steps the model's own parameters are all NaN; the values are in the ranks' chunks")

# %% [markdown]
# ## 5.6 The four stages side by side
#
# One rank's memory through one step, from the ledger. The horizontal axis has the ledger's changes in order. The dashed
# line is the formula.

# %%
runs = [plain, one, two, three]
if rank == 0:
    moments = {f"stage {run.stage}": run.ledger.moments for run in runs}
    show(plot_ledger(moments, {f"stage {stage}": sum(formula(stage)) for stage in range(4)}), "05_stages")

# %% [markdown]
# Below the dashed line, the model state shrinks. Above it is what the formula leaves out. *Activations* grow through
# forward and shrink through backward, the same in every panel. *Buffers* grow from stage to stage: the room for
# messages in all of them, in stage 2 the full gradients of buckets, in stage 3 also the gathered parameters, of this
# unit and of the next. At toy size, where a unit is a fifth of the model, they weigh much. A model of 96 blocks has two
# of about a hundred units in the air.
#
# And what travels:

# %%
if rank == 0:
    ways = ("all-reduce", *2 * ("reduce-scatter + all-gather",), "reduce-scatter + 2 all-gathers")
    bars = [
        {"op": f"stage {run.stage}: {way}", "bytes": sum(run.sent.values()), "expected": expected}
        for run, way in zip(runs, ways, strict=True)
        for expected in [sum(expected_bytes(run.stage).values())]
    ]
    show(plot_bytes(bars), "05_bytes")

# %% [markdown]
# One more claim. With `--reduction ring` one device adds in another order, so ring runs differ from it in the last
# bits. But not from one another: same buckets, same chunks, same ring.

# %%
ring_runs = [train(stage, "--reduction", "ring", steps=1) for stage in range(4)]
assert all(same_bits(run.bits(), ring_runs[0].bits()) for run in ring_runs)
say("ring: stages 0, 1, 2 and 3 have the same bits as one another")

# %% [markdown]
# ## 5.7 What stage 3 pays
#
# Half as many bytes again, and *latency*: each unit costs three collectives of at least $(N-1)\alpha$, not two. And a
# late gather costs more than a late reduction. A late reduction delays the end of backward, but a late gather stops a
# computation that waits for its weights. The remedy is **prefetch**: while one unit computes, the next
# one's parameters are on their way.
#
# To see time, we use the model clock of chapters 3 and 4: real messages, priced with $\alpha + \beta n$; computation at
# $10^{12}$ operations per second, charged block by block. Four simulated devices, threads of rank 0.

# %%
from minipar.comm import Network, run_local
from minipar.nn import GPT, GPTConfig
from minipar.parallel.stages import shard

DEVICES, SPEED, BATCH, LENGTH = 4, 1e12, 8, 64
shape = GPTConfig(vocab_size=256, n_positions=LENGTH, n_embd=64, n_layer=4, n_head=4)
HEAD = 2 * BATCH * LENGTH * shape.n_embd * shape.vocab_size  # operations in forward; backward takes twice as many
BLOCK = (shape.forward_flops(BATCH, LENGTH) - HEAD) // shape.n_layer
COMPUTATION = 3 * (HEAD + shape.n_layer * BLOCK) / SPEED


def charge(tracer, part, flops, matrices):
    """`part` takes this many operations in forward, and in backward twice, as its matrices' gradients are completed."""

    def charged(x, run=part.run):
        with tracer.region("forward", flops):
            return run(x)

    def completed(leaf):
        with tracer.region("backward", 2 * flops * leaf.size / size):
            pass

    part.run, size = charged, sum(p.size for p in matrices)
    for matrix in matrices:
        matrix.register_post_accumulate_grad_hook(completed)


def simulate(comm, trace=False):
    """A step of each of KINDS: seconds, messages, bytes; and the trace."""
    comm.tracer.enabled = trace
    a_few = np.zeros((1, 4), int)  # what is really computed; the clock is charged for 8 samples of 64 tokens
    rows = []
    for stage, prefetch in KINDS:
        model = GPT(shape, deferred=True)
        for part in model.parts[1:-1]:
            charge(comm.tracer, part, BLOCK, [p for p in part.parameters if p.ndim == 2])
        charge(comm.tracer, model.parts[-1], HEAD, [model.ln_f.weight])
        ddp = shard(model, comm, stage)
        ddp.prefetch = prefetch  # stages 0 to 2 have nothing to prefetch
        comm.traffic.reset()
        start = comm.clock.now()
        with comm.tracer.region("forward"):
            pass  # marks where the step begins, before the first message
        loss = model.loss_sum(a_few, a_few)
        with ddp.scaled_backward():  # as the trainer does, so that no message sums the loss
            loss.backward(np.full_like(loss.data, 1.0))
        ddp.synchronize()
        with comm.tracer.region("optimizer"):
            ddp.after_step()
        rows.append((comm.clock.now() - start, comm.traffic.messages(), comm.traffic.bytes()))
    return rows, comm.tracer.chrome_events(comm.rank)


# %% [markdown]
# One step of stage 3 without prefetch, then one with it. Grey is a device that waits.

# %%
KINDS = ((3, False), (3, True), (0, False), (1, False))
NETWORK = Network(alpha=1e-6, beta=1 / 4e9)
if rank == 0:
    results = run_local(DEVICES, simulate, trace=True, clock="model", network=NETWORK)
    events = [event for _, rank_events in results for event in rank_events]
    trace = parse_trace({"traceEvents": events, "otherData": {"clock": "model"}})
    figure = plot_timeline(trace, slice(0, 2))
    figure.axes[0].set_title("stage 3: left without prefetch, right with it", loc="left", fontsize=10)
    show(figure, "05_prefetch")
    traced = results[0][0]
    say(f"without prefetch {traced[0][0] * 1e3:.4f} ms, with it {traced[1][0] * 1e3:.4f} ms")

# %% [markdown]
# Without prefetch a step takes 1.296 ms, with it 0.873 ms. Without it, computation stops for each block's gather. In
# backward the gather even queues behind the reduce-scatter of the block before: a communicator does one thing after the
# other. With prefetch, a step waits at its two ends only: for the first gathers, before which nothing can compute, and
# for the last reduce-scatters, after which nothing does.
#
# **When is a gather hidden?** Let a unit have $\Psi_u$ parameters of $b$ bytes, and let a rank compute $B$ samples of
# $T$ tokens at $S$ operations per second. A token costs two operations per parameter, so the forward of a unit takes $2
# B T \Psi_u / S$ seconds. Meanwhile the next unit, of the same size, is gathered in $\frac{N-1}{N}\, b \Psi_u \beta$
# seconds and some latency. The gather is hidden if its time is not longer, and $\Psi_u$ cancels:
#
# $$B T \;\ge\; \frac{N-1}{N} \cdot \frac{b\, S\, \beta}{2} .$$
#
# In backward computation takes twice as long, and a gather and a reduce-scatter are to be hidden: the same condition.
# Stage 0 hides a reduce-scatter and an all-gather behind backward: the same again. Here $\frac34 \cdot 4 \cdot
# 10^{12} \beta / 2$ is 375 tokens at 4 GB/s, 1,500 at 1 GB/s and 6,000 at 0.25 GB/s, and $B T$ is 512. So only the
# fastest of these networks should hide it. Stage 3 next to stages 0 and 1:

# %%
if rank == 0:
    say("network     stage 0    stage 1    stage 3, no prefetch    stage 3    stage 3 / stage 0")
    ratio, figures = {}, {}
    for bandwidth in (0.25, 1, 4):
        network = Network(alpha=1e-6, beta=1 / (bandwidth * 1e9))
        rows, _ = run_local(DEVICES, simulate, clock="model", network=network)[0]
        (off, *_), (on, messages, nbytes), (zero, zero_messages, zero_bytes), (first, *_) = rows
        assert COMPUTATION < zero <= first and on < off
        assert 2 * nbytes == 3 * zero_bytes and 2 * messages == 3 * zero_messages
        ratio[bandwidth] = on / zero
        figures[bandwidth] = [round(seconds * 1e3, 3) for seconds in (zero, first, off, on)]
        needed = Fraction(DEVICES - 1, DEVICES) * 4 * int(SPEED) / int(bandwidth * 1e9) / 2  # tokens
        assert needed == {0.25: 6000, 1: 1500, 4: 375}[bandwidth]
        assert (abs(ratio[bandwidth] - 1) < 1e-9) == (BATCH * LENGTH >= needed)
        a, b, c, d = (f"{seconds * 1e3:.3f} ms" for seconds in (zero, first, off, on))
        say(f"{bandwidth:>4} GB/s {a:>9} {b:>10} {c:>23} {d:>10} {ratio[bandwidth]:>20.2f}")
    say(
        f"computation alone: {COMPUTATION * 1e3:.3f} ms; stage 3 sends {nbytes / zero_bytes} times the bytes of stage 0"
    )
    assert rows == traced  # the model clock is exact: the same again, to its last bit
    assert figures[4] == [0.873, 0.994, 1.296, 0.873] and round(COMPUTATION * 1e3, 3) == 0.755
    assert figures[0.25] == [5.726, 5.726, 8.740, 7.985] and round(ratio[0.25], 2) == 1.39

# %% [markdown]
# On the fastest of these networks stage 3 costs *nothing*, although it sends half as much again: both take 0.873 ms, of
# which 0.755 ms are computation. The second gather hides under computation, and what cannot hide is the same in both:
# the embedding's unit and the first block's. Stage 0 all-reduces them after the last computation. Stage 3 gathers them
# before the first one and reduce-scatters them after the last. At 0.25 GB/s the wire is the bottleneck: 5.7 ms become
# 8.0 ms, 1.39 times as much, and the ratio goes towards $3\Psi / 2\Psi = 1.5$: nothing hides what takes longer than the
# computation.
#
# And on a fast network stage 1 is slower than stage 0, with the same bytes: 0.994 ms. Stage 0 does its whole all-reduce
# during backward. In stage 1 the second half, the gather, follows the optimizer's step, where nothing computes.
# (Megatron can overlap it with the next forward, `--overlap-param-gather`. Stage 3 does so by its nature.)
#
# ## 5.8 What no stage divides
#
# The model state is divided by $N$; activations are not, nor are buffers. Activations depend on the rank's own samples.
# More ranks with the same global batch mean fewer samples each, but one sample is the least. What helps is recompute
# (chapter 1), which every stage allows: keep each block's input, forget its inside, compute it again in backward.

# %%
ACTIVATIONS, BUFFERS = 3, 4  # of memory.KINDS


def most(run, kind):
    return max(held[kind] for _, held in run.ledger.moments)


recomputed = train(3, "--recompute", "full")
assert same_bits(recomputed.bits(), plain.bits())
assert most(plain, ACTIVATIONS) == most(one, ACTIVATIONS) == most(two, ACTIVATIONS) == most(three, ACTIVATIONS)
assert most(recomputed, ACTIVATIONS) < most(three, ACTIVATIONS) / 2
say("most bytes of     model state   activations       buffers")
for name, run in {**{f"stage {r.stage}": r for r in runs}, "3, recompute": recomputed}.items():
    say(f"{name:<14} {sum(state_held(run)):>14,} {most(run, ACTIVATIONS):>13,} {most(run, BUFFERS):>13,}")
say("the activations of all four stages are equal to the byte; with recompute the bits are still those of stage 0")

# %% [markdown]
# (With recompute the second forward of a block runs inside its backward, where the block is gathered anyway. It costs
# no third gather.) Dividing activations takes another kind of parallelism: tensor, sequence and pipeline parallelism.
#
# ## 5.9 A model larger than one rank's allowance
#
# Let every rank have room for $1/N$ of the model state, and no more. `--memory-limit` says so before training starts,
# not hours later, and with the arithmetic.

# %%
from minipar.errors import UsageError

limit = model_state(*elements_placed(PLACEMENTS, rank=0), 3, FLOAT64).total  # of the fullest rank
if N == 1:
    limit -= 1  # one rank: no stage helps
try:
    train(0, "--memory-limit", str(limit))
    raise AssertionError("stage 0 should have been refused")
except UsageError as refusal:
    say(f"refused: {refusal}")

# %% [markdown]
# Stage 3 trains. But how does such a model come to be? If each rank first made all of it and then kept its chunks, the
# limit would be broken before the first step. Initial weights here are a recipe (`Deferred`, PyTorch's "meta" device):
# a unit's values are computed, cut, and freed before the next unit's.

# %%
if N > 1:
    under = train(3, "--memory-limit", str(limit))
    assert sum(state_held(under)) <= limit
    assert same_bits(under.bits(), plain.bits())
    say(f"stage 3 trains with {sum(state_held(under)):,} bytes, where stage 0 holds {sum(formula(0)):,}: the same bits")

    building = MemoryLedger()
    with building.recording():
        Trainer(under.trainer.config, DeviceMesh(comm, dp=N), tokens)
    # At the end the state is complete. Before that there were parameters, gradients and one whole unit, no optimizer.
    assert building.peak <= max(sum(formula(3)), 2 * 8 * OWN + 8 * max(BUCKETS))
    say(f"while it was made rank 0 held at most {building.peak:,} bytes, buffers included")

# %% [markdown]
# ## 5.10 Gradient accumulation, and why pipelines object
#
# Let a rank run $m$ microbatches per step and add up their gradients. In stages 0 and 1, `no_sync` keeps them in the
# full gradient and sends once. In stages 2 and 3 there is no full gradient to add to. There are two ways out:
#
# - **Keep it whole while accumulating** (`no_sync`). Bytes: one reduce-scatter. Memory: $\Psi$ gradients on every rank
#   until the last backward. The saving of stage 2 is gone.
#
# - **Reduce-scatter after every microbatch** (`--sync-every-microbatch`) and add up the chunks. Memory: $\Psi/N$.
#   Bytes: $m$ reduce-scatters.
#
# Stage 3 also gathers parameters for every microbatch, twice:
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
MANY = ("--global-batch", str(m * N), "--microbatches", str(m))
EVERY = "--sync-every-microbatch"
GRADIENTS = 1  # of memory.KINDS
cases = {
    "stage 1, no_sync": (train(1, *MANY, steps=1), Psi, 1, 1),
    "stage 2, no_sync": (train(2, *MANY, steps=1), Psi + OWN, 1, 1),
    "stage 2, every microbatch": (train(2, *MANY, EVERY, steps=1), OWN, m, 1),
    "stage 3, no_sync": (train(3, *MANY, steps=1), Psi + OWN, 1, 2 * m),
    "stage 3, every microbatch": (train(3, *MANY, EVERY, steps=1), OWN, m, 2 * m),
}
for name, (run, elements, reductions, gathers) in cases.items():
    assert most(run, GRADIENTS) == 8 * elements
    expected = expected_bytes(run.stage, reductions, gathers)
    assert nonzero(run.sent) == nonzero(expected)
    say(
        f"{name:<26} gradients: at most {most(run, GRADIENTS):>9,} bytes; sent {sum(run.sent.values()):>10,} bytes "
        f"in {reductions} x reduce-scatter, {gathers} x all-gather"
    )
once = [run.bits() for name, (run, *_) in cases.items() if "no_sync" in name]
every = [run.bits() for name, (run, *_) in cases.items() if "every" in name]
assert same_bits(once[0], once[1]) and same_bits(once[0], once[2]) and same_bits(every[0], every[1])
say("no_sync: stages 1, 2, 3 have the same bits; every microbatch: stages 2 and 3 have the same bits")

# %% [markdown]
# (While accumulating, a rank of stage 2 holds the full gradients *and* room for its chunks: $\Psi + \Psi/N$. And the
# two ways add in another order, over ranks first or over microbatches first, so they agree only up to rounding.)

# %%
if rank == 0:
    names = ("stage 2, no_sync", "stage 2, every microbatch", "stage 3, every microbatch")
    show(plot_ledger({name: cases[name][0].ledger.moments for name in names}), "05_microbatches")

# %% [markdown]
# Left, the orange grows in the first backward to the whole of $\Psi$ and stays. In the middle it stays thin, and the
# price is in the table.
#
# **Why ZeRO-2/3 and pipelines quarrel.** A pipeline needs many microbatches: with $p$ stages its idle fraction is
# $(p-1)/(m+p-1)$ (chapter 7), so $m$ is several times $p$. For each of them, stage 2 pays a reduce-scatter or gives
# back its gradient memory, and stage 3 two gathers. What made ZeRO cheap, once per step, happens $m$ times per step,
# and each time with the work of one microbatch to hide behind. The figures above are this cost, without a pipeline.
# That is why Megatron and DeepSpeed combine pipelines with stage 1, whose communication is once per step whatever $m$
# is. Chapter 8 takes it up.
#
# ## 5.11 Exercises: break it, and see what notices
#
# Five mistakes. The instruments:
#
# - **loss**: is the last loss off by more than 5 %?
# - **ranks**: do all ranks hold the same parameters?
# - **bits**: parameters, losses and norms as in stage 0?
# - **bytes**: do the bytes sent equal the formula?
# - **ledger**: after the step, is the model state the formula's, and are the buffers those of the right run?
#
# Before you read on: which instrument catches which mistake?
#
# 1. **The norm of the own chunk.** The all-reduce of the squared norm is forgotten.
#
# 2. **A norm that counts too much.** Each rank sums the squares of *all* gradients that it sees, then over ranks. In
# the chunks of others it sees its own contribution, before the sum.
#
# 3. **Forgotten all-gather.** `after_step` does nothing.
#
# 4. **A shard off by one.** The optimizer's chunk of the parameters begins one element too early.
#
# 5. **A unit that is never released.** Stage 3 gathers, and after use does not let go.

# %%
from hashlib import sha256

from minipar.comm import serial
from minipar.nn import clip_grad_norm, squared_norm
from minipar.parallel import grad_norm


class OwnNorm(Trainer):
    """Mistake 1: the sum over chunks is taken on this rank alone."""

    def _clip_grad_norm(self, max_norm):
        return grad_norm.clip_grad_norm(self.ddp.parameters(), max_norm, self.units, serial())


class GreedyNorm(Trainer):
    """Mistake 2."""

    def _clip_grad_norm(self, max_norm):
        squares = np.array([squared_norm([self.ddp.buffers.gradients])])
        self.mesh.dp.all_reduce(squares, algorithm="ordered")
        return clip_grad_norm(self.ddp.parameters(), max_norm, norm=float(np.sqrt(squares[0])))


class NoGather(ZeroStage1):
    """Mistake 3."""

    def after_step(self):
        pass


class OffByOne(ZeroStage1):
    """Mistake 4."""

    def __init__(self, model, comm, algorithm, **options):
        super().__init__(model, comm, algorithm, **options)
        for bucket, chunk in self.chunks.items():
            start, _ = bucket.chunk(comm.rank, comm.size)
            first = max(bucket.start + start - 1, 0)
            data = self.buffers.parameters[first : first + chunk.data.size]
            self.chunks[bucket] = Chunk(bucket, data, chunk.gradient, self)


class NeverFrees(FullyShardedDataParallel):
    """Mistake 5: the gathered arrays stay referred to by the parameters."""

    def _free(self, bucket):
        pass


def everywhere(ok):
    """Whether `ok` holds on every rank."""
    return all(one == b"1" for one in comm.all_gather_bytes(b"1" if ok else b"0"))


def inspect(name, right, **broken):
    """Train with a broken class, then read the instruments; the same answer on every rank. `right`: the right run."""
    run = train(right.stage, **broken)
    bits = run.bits()
    seen = {
        "loss": abs(run.steps[-1].loss / plain.steps[-1].loss - 1) > 0.05,
        "ranks": len(set(comm.all_gather_bytes(sha256(bits[:Psi]).digest()))) > 1,
        "bits": not everywhere(same_bits(bits, plain.bits())),
        "bytes": not everywhere(nonzero(run.sent) == nonzero(expected_bytes(right.stage))),
        "ledger": not everywhere(run.ledger.held == right.ledger.held),
    }
    eyes = "  ".join(f"{eye} {'CAUGHT' if caught else '-':<6}" for eye, caught in seen.items())
    norm = run.steps[-1].grad_norm / plain.steps[-1].grad_norm
    say(f"{name:<24} loss {run.steps[-1].loss:.3f}  norm x {norm:.2f}   {eyes}")
    return {eye for eye, caught in seen.items() if caught}


assert inspect("nothing broken", one) == set()
lines = []
for name, broken, right, catching in (
    ("1. own chunk's norm", {"kind": OwnNorm}, one, {"bits", "bytes"}),
    ("2. greedy norm", {"kind": GreedyNorm}, one, {"bits"}),
    ("3. no all-gather", {"wrapper": NoGather}, one, {"ranks", "bits", "bytes"}),
    ("4. shard off by one", {"wrapper": OffByOne}, one, {"bits"}),
    ("5. never released", {"wrapper": NeverFrees}, three, {"ledger"}),
):
    seen = inspect(name, right, **broken)
    if N > 1 or name[0] in "45":  # the others need a second rank to be mistakes
        assert catching <= seen, (name, seen)
        lines.append(f"caught: {name}: by {', '.join(sorted(seen))}")
say("\n".join(lines))

# %% [markdown]
# Four lessons.
#
# **AdamW forgives a wrong norm.** Clipping with a wrong norm scales all gradients by a wrong factor, to which AdamW is
# nearly blind, as chapter 4 found. In mistake 1 each rank even has its own factor, and no loss curve shows it.
#
# **Gathering makes ranks agree, right or wrong.** Mistake 4 puts every update one element off. Since each chunk is
# gathered from its owner, all ranks agree on the wrong parameters, with the right number of bytes. A check that ranks
# are equal is necessary; it is not a proof.
#
# **Bytes see what is not sent** (mistakes 1 and 3), and nothing else.
#
# **Only the ledger sees memory.** Mistake 5 computes the right bits and sends the right bytes. It is only that the
# whole model stays on every rank, and stage 3 has no purpose any more. A leak of this kind is found when a larger model
# does not fit, unless somebody counts. (Asked for, it is an option: FSDP's `reshard_after_forward=False` keeps units
# gathered from forward to backward, which trades that memory for $\Psi$ less on the wire.)
#
# ## 5.12 PyTorch's names, problems and answers
#
# ### PyTorch's names
#
# | minipar | PyTorch | DeepSpeed, Megatron-LM |
# | --- | --- | --- |
# | `shard(model, comm, 1)` | `ZeroRedundancyOptimizer` | ZeRO stage 1, `--use-distributed-optimizer` |
# | `shard(model, comm, 2)` | near it: `reshard_after_forward=False` | ZeRO stage 2 |
# | `fully_shard(model, comm)` | `fully_shard` (FSDP2), `FULL_SHARD` (FSDP1) | ZeRO stage 3 |
# | unit | a module for which `fully_shard` was called | a submodule |
# | chunk of a unit's flat array | FSDP1: `FlatParameter`; FSDP2: a DTensor per parameter, `Shard(0)` | flat, padded |
# | `_gather`, `_release` | `unshard()`, `reshard()` | `GatheredParameters` |
# | `prefetch` | `set_modules_to_forward_prefetch` | `stage3_prefetch_bucket_size` |
# | `no_sync` | `set_requires_gradient_sync(False)` | |
# | `Deferred` | the device `meta` | `deepspeed.zero.Init` |
# | `wrapper.parameters()`: shards | `model.parameters()`: DTensors | the optimizer's fp32 partitions |
#
# ### Worked problems
#
# 1. A model of 13 billion parameters is trained in mixed precision on 8 GPUs of 80 GB. Activations and buffers take
# 20 GB of each. Which is the first stage that fits?
#
# 2. Parameters and gradients travel in fp16. How many GB does each of these GPUs send per step with $m = 8$
# microbatches: in stage 1; in stage 2 with a reduce-scatter after every microbatch; in stage 3 likewise?
#
# 3. A GPU has 60 GB for the model state. How large a model can be trained with stages 1, 2 and 3 on 8 GPUs, and how
# large on 1,024?
#
# 4. 64 GPUs reach $4 \cdot 10^{14}$ operations per second each and send 50 GB/s each, in fp16. How many tokens must a
# GPU compute per microbatch so that stage 3 hides its gathers? How much longer does a step take with 4,096 tokens?

# %%
psi = 13 * 10**9
say("1. GB per GPU, with 20 GB of activations and buffers:")
fits = {stage: float(bytes_per_rank(psi, 8, stage)) / 1e9 + 20 for stage in range(4)}
assert list(fits.values()) == [228, 91.5, 68.75, 46]
say("  ", {stage: f"{gigabytes:.2f}" for stage, gigabytes in fits.items()}, "so stage 2 is the first below 80 GB")

once_around = psi * 2 * Fraction(7, 8) / 10**9  # GB of one reduce-scatter or all-gather of everything, per GPU
sent_gb = [float(times * once_around) for times in (2, 8 + 1, 3 * 8)]
assert sent_gb == [45.5, 204.75, 546]
say(f"2. {sent_gb[0]}, {sent_gb[1]} and {sent_gb[2]} GB: 2, m + 1 and 3m times {float(once_around)} GB (table in 4.10)")

largest = {ranks: [60e9 / float(bytes_per_rank(1, ranks, stage)) / 1e9 for stage in (1, 2, 3)] for ranks in (8, 1024)}
assert [round(billions, 1) for billions in largest[8]] == [10.9, 16, 30]
assert [round(billions, 1) for billions in largest[1024]] == [15, 29.8, 3840]
for ranks, (first_stage, second_stage, third_stage) in largest.items():
    say(f"3. {ranks:>4} GPUs: {first_stage:.1f}, {second_stage:.1f} and {third_stage:.1f} billion parameters")
say("   stages 1 and 2 end at 60/4 and 60/2 billion, however many GPUs there are; stage 3 has no end")

needed = Fraction(63, 64) * 2 * Fraction(4 * 10**14, 50 * 10**9) / 2
assert needed == 7875 and round(float(needed / 4096), 2) == 1.92
longer = float(needed / 4096)
say(f"4. {needed} tokens; with 4,096 the wire is the bottleneck, and a step takes {longer:.2f} times as long")

# %% [markdown]
# ### For you
#
# 1. Hide stage 1's gather: let the next forward start while that of `after_step` is under way. What must a unit's
# forward wait for? Which two methods of this chapter do that already?
#
# 2. The last block is released after its forward and gathered again a moment later, when backward comes out of the
# head. Keep it. How many bytes does a step save, and what does the ledger say about the peak? Why is it the last block
# and not the first?
#
# 3. A run on 8 ranks is to be continued on 6. Which arrays must a checkpoint hold, in which form, and which of this
# chapter's bits can the continued run not reproduce?
#
# ### Answers
#
# 1. For the gather of its own buckets, and for nothing else. Start the gathers in the model's order, so that the first
# unit's comes first. `_fetch` starts a gather and `_gather` waits for it when the unit's forward comes.
#
# 2. One all-gather of a block, $\frac{N-1}{N}\Psi_u$ elements. The next cell keeps the block and counts. The peak of
# the step does not rise, because the library gathers the last block again already when the head's forward begins, so
# that it is there for backward: it is away for a moment only. The first block would stay through all of forward and
# backward.
#
# 3. Parameters, both means of AdamW, the number of the step, and the position in the data. Each array is stored under
# its parameter's name as elements of the *whole* parameter, because 6 ranks cut chunks in other places than 8. The sums
# over ranks have other terms and another order with 6 ranks, so gradients, losses and norms differ in their last bits
# from those of a run that stays on 8. What is restored (parameters and means) has the same bits.


# %%
class KeepsLastBlock(FSDP):
    def _after_forward(self, unit):
        if unit.part is not self.model.parts[-2]:  # the last part is the head
            super()._after_forward(unit)


def top(run):
    return max(sum(held) for _, held in run.ledger.moments)


kept = train(3, wrapper=KeepsLastBlock)
saved = sum(three.sent.values()) - sum(kept.sent.values())
assert same_bits(kept.bits(), plain.bits())
assert saved == wire_bytes("all_gather", "pairwise", BUCKETS[0], 8, N, rank)  # the last block's bucket
say(f"2. the same bits, {saved:,} bytes less per step; at the peak {top(kept):,} bytes, before {top(three):,}")

# %% tags=["active-ipynb"]
# %autopx

# %% tags=["active-ipynb"]
# # Back in one process: stop the eight.
# cluster.stop_cluster_sync()
