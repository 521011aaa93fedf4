# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # DiLoCo: one sum in H steps
#
# **Must the ranks talk in every step?**
#
# Two data centres are joined by a line of 1 Gb/s. The gradients of a billion parameters, 4 GB in fp32, take 32 s on it,
# and a step computes for one. With data parallelism ([chapter 4](../04_data_parallel.ipynb)) they would compute for one
# second in 33. DiLoCo sums once in $H$ steps.

# %% tags=["active-ipynb", "setup"]
# from chapters.support.notebook import start
#
# cluster = start(8)

# %% tags=["setup"]
from functools import partial

import numpy as np

import minipar as mp
from chapters.support.instruments import same_bits, same_on_all_ranks
from chapters.support.predict import predict, reveal
from chapters.support.show import printer
from minipar.comm import wire_bytes, world
from minipar.nn import SGD
from minipar.train.data import Batches, load_tokens

comm = world()
rank, d = comm.rank, comm.size
say = printer(rank)  # rank 0 prints and draws; every rank checks
if rank == 0:
    from chapters.support.ch04 import figures
    from chapters.support.show import show

# Model, samples and functions are those of chapter 4.
B, T = 2, 16
N = B * T
STEPS = 20
RATE = 3e-3
config = mp.GPTConfig(vocab_size=256, n_positions=T, n_embd=32, n_layer=2, n_head=4)
text = load_tokens(None, vocab_size=256, seq_len=T)
batches = Batches(text, length=T, global_batch=d * B, order="random", seed=0)


def fresh():
    """The same model on every rank: initial weights are keyed by name, never by rank."""
    return mp.GPT(config, dtype="float64")


def shard(r, step=0):
    """Inputs and targets of rank r, (B, T) each."""
    return batches.batch(step, range(r * B, (r + 1) * B))


def flatten(parameters):
    """The gradients of these parameters, one after another, as one flat array."""
    for parameter in parameters:
        parameter.fold_tied_gradients()  # GPT-2's head is its token embedding: two gradients of one matrix
    return np.concatenate([parameter.grad.reshape(-1) for parameter in parameters])


def left_to_right(arrays):
    """((a_0 + a_1) + a_2) + ...: one device that accumulates."""
    total = arrays[0].copy()
    for array in arrays[1:]:
        total += array
    return total


# %% [markdown]
# ## Local steps
#
# *Core, 5 minutes.*
#
# DiLoCo (Douillard et al. 2023, arXiv 2311.08105) lets each rank take $H$ *local steps* on its own samples, with an
# AdamW of its own. From the common parameters $\theta$ rank $r$ moves by $\Delta_r$. Then the ranks sum, and an *outer*
# optimizer moves $\theta$. It is SGD with Nesterov's momentum, for which $-\Delta$ is the gradient:
#
# $$\Delta = \frac1d \sum_r \Delta_r, \qquad v \leftarrow 0.9\, v + \Delta, \qquad
# \theta \leftarrow \theta + 0.7\, (\Delta + 0.9\, v) .$$
#
# All ranks go on from there. AdamW's means stay as they are, each on its rank.

# %%
replica = fresh()
Psi = sum(parameter.size for parameter in replica.parameters())
START = np.concatenate([parameter.data.reshape(-1) for parameter in replica.parameters()])
STOPS = np.cumsum([parameter.size for parameter in replica.parameters()])


def loss_and_gradient(theta, r, step):
    """Rank r's mean loss in a step with the flat parameters theta, and its gradient."""
    for parameter, part in zip(replica.parameters(), np.split(theta, STOPS[:-1]), strict=True):
        parameter.data[...] = part.reshape(parameter.shape)
    loss = replica.loss_sum(*shard(r, step))
    loss.backward(np.full_like(loss.data, 1 / N))
    found = flatten(replica.parameters())
    replica.zero_grad()
    return float(loss.data) / N, found


def data_parallelism(make):
    """Train on one device with the mean of all ranks' gradients: all parameters, and the losses."""
    parameter = mp.Parameter(START.copy())
    losses = []
    optimizer = make([parameter])
    for step in range(STEPS):
        all_losses, gradients = zip(*(loss_and_gradient(parameter.data, r, step) for r in range(d)), strict=True)
        parameter.grad = left_to_right(gradients) / d
        optimizer.step()
        losses.append(np.mean(all_losses))
    return parameter.data, losses


# %% [markdown]
# ## One sum in H steps
#
# *Core, 7 minutes.*
#
# Let $H = 1$, the outer rate be 1, and no momentum. Then DiLoCo averages the ranks' weights after each step, which is
# mistake 5 of [4.8](../04_data_parallel.ipynb).
#
# **Predict**: does it have data parallelism's bits, with SGD and with AdamW on the ranks? How many bytes per step does
# it send with $H = 10$, relative to $H = 1$?

# %%
predict("bits of data parallelism with SGD", ...)  # replace the dots by True or False
predict("bits of data parallelism with AdamW", ...)
predict("bytes with H = 10, relative to H = 1", ...)

# %% [markdown]
# There is one all-reduce of $\Psi$ elements in $H$ steps, so a rank sends $\frac{2\Psi}{H} \cdot \frac{d-1}{d}$
# elements per step.
#
# With SGD, $H = 1$, an outer rate of 1 and no momentum DiLoCo should be data parallelism. It has the same *bits* if two
# roundings are avoided. $\theta - (\theta - x)$ is seldom $x$ exactly, so a rank keeps $\Delta_r$, which begins at 0,
# and nobody subtracts parameters. And the sum of $\eta\, G_r$ over the ranks is $\eta$ times the sum of $G_r$ only if
# multiplying by $\eta$ rounds nothing, so the rate is a power of two. ($G_r$ is the gradient of rank $r$'s own mean
# here.)
#
# **[Exercise 31](../exercises/e31_local_steps.py)** asks for such a round: `make exercises PYTEST="-k e31"`. Write it
# before you open the next cell. In the cell `ranks` are those whose local steps a process takes: its own rank's, or as
# one device those of all ranks, one after another.


# %% tags=["hide-input"]
def local_steps(theta, optimizer, r, steps):
    """Rank r's steps from theta: how far it moves, and its losses. Its optimizer updates the movement alone."""
    (moved,) = optimizer.parameters
    moved.data[...] = 0
    losses = []
    for step in steps:
        loss, moved.grad = loss_and_gradient(theta + moved.data, r, step)
        optimizer.step()
        losses.append(loss)
    return moved.data, losses


def diloco(H, make, rate, momentum, ranks, add_up):
    """Train: all parameters, and the mean losses of `ranks`. add_up(movements of `ranks`): the sum over all ranks."""
    theta = START
    velocity = np.zeros(Psi)
    losses = []
    optimizers = {r: make([mp.Parameter(np.zeros(Psi))]) for r in ranks}
    for first in range(0, STEPS, H):
        taken = [local_steps(theta, optimizer, r, range(first, first + H)) for r, optimizer in optimizers.items()]
        mean = add_up([moved for moved, _ in taken]) / d
        velocity = momentum * velocity + mean
        theta = theta + rate * (mean + momentum * velocity)
        losses += np.mean([each for _, each in taken], axis=0).tolist()
    return theta, losses


# %% [markdown]
# The runs: SGD with $H = 1$, then AdamW with $H = 1$, 5 and 10.


# %%
def over_ranks(movements):
    return comm.all_reduce(movements[0], algorithm="ordered")


sgd = partial(SGD, lr=1 / 8)
adamw = partial(mp.AdamW, lr=RATE)
by_sgd, _ = diloco(1, sgd, 1, 0, [rank], over_ranks)
found = {}
curves = {}
per_step = {}
for H, outer in ((1, (1, 0)), (5, (0.7, 0.9)), (10, (0.7, 0.9))):
    comm.traffic.reset()
    found[H], losses = diloco(H, adamw, *outer, [rank], over_ranks)
    assert comm.traffic.bytes() == STEPS // H * wire_bytes("all_reduce", "ordered", Psi, 8, d, rank)
    per_step[f"H = {H}"] = comm.traffic.bytes() / STEPS
    curves[f"DiLoCo, H = {H}"] = comm.all_reduce(np.array(losses)) / d
    assert same_on_all_ranks(comm, by_sgd, found[H])
if rank == 0:
    assert same_bits(found[5], diloco(5, adamw, 0.7, 0.9, range(d), left_to_right)[0])
    say(f"H = 5, d = {d}, {STEPS} steps: one device that plays all ranks has the same bits in all {Psi:,} parameters")
    sgd_alone, _ = data_parallelism(sgd)
    adamw_alone, losses = data_parallelism(adamw)
    equal = same_bits(by_sgd, sgd_alone), same_bits(found[1], adamw_alone)
    assert equal == (True, d == 1)
    reveal("bits of data parallelism with SGD", equal[0], say)
    reveal("bits of data parallelism with AdamW", equal[1], say)
    reveal("bytes with H = 10, relative to H = 1", per_step["H = 10"] / max(1, per_step["H = 1"]), say)
    show(figures.plot_local_steps({"data parallelism": losses, **curves}, per_step), "diloco")

# %% [markdown]
# With SGD and $H = 1$ DiLoCo *is* data parallelism, to the last bit. With AdamW it is not, because each rank divides by
# the root of its own squares. With $H > 1$ it is another algorithm: what it computes depends on $d$ and $H$, and its
# only reference is one device that plays all $d$ ranks. That it learns is a matter of experience (left; twenty steps of
# a toy prove nothing about which is best). What it sends is a matter of counting (right): $1/H$ of the bytes. For that,
# each rank keeps one more array of $\Psi$ elements, $v$.
#
# DeepMind's 8 workers with $H = 500$ did as well as synchronous training and sent 500 times fewer bytes. OpenDiLoCo
# (Jaghouar et al. 2024, arXiv 2407.07852) ran it over two continents, and the GPUs computed for 90 to 95 % of the time.
# INTELLECT-1 (Jaghouar et al. 2024, arXiv 2412.01152) trained 10 billion parameters on three continents with the
# framework prime: $H = 100$ and sums in 8 bits, 400 times fewer bytes in all. Each of its workers is a host of GPUs
# with FSDP ([chapter 5](../05_zero.ipynb)) inside.

# %% tags=["active-ipynb"]
# %autopx

# %% tags=["active-ipynb"]
# # Back in one process: stop the eight.
# cluster.stop_cluster_sync()
