# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 12. Experts
#
# **How does a model have more parameters than a token needs, and where do they live?**
#
# In all models so far each token is multiplied with each parameter. A *mixture of experts* breaks this rule. It
# replaces the MLP of a layer by several MLPs, the *experts*, and a *router* sends each token to a few of them. The
# model has all of the parameters, and a token pays for a few.
#
# Two things follow. The parameters no longer fit where they are used, so they are divided over ranks, and now it is the
# *tokens* that travel: *expert parallelism*, with an all-to-all whose sizes nobody knows beforehand. And a choice
# enters the model, which has no derivative and may become lopsided. You build the router, the exchange and both
# backward passes on plain arrays, prove them, count their bytes, and plant the mistakes that frameworks have shipped.
# Few methods are got wrong so often, because the loss does not show it.
#
# **Letters:** $E$ experts of a layer, $k$ of them for each token; $f$ the inner size of an expert, $h$ elements of a
# token; $P$ ranks of the axis ep, $r$ and $j$ two of them; $N$ tokens of a rank; $n_{rj}$ rows that rank $r$ sends to
# the experts of rank $j$ (a *row* is one token on its way to one expert, so a rank has $Nk$); $z$ a router's logit, $p$
# its probability, $w$ the weight of an expert's result; $L$ layers; $h_{kv}$ elements of a token's keys.
#
# Run it as `mpirun -n 8 python chapters/12_experts.py`, with any number of ranks.

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
import numpy as np

from chapters.support import expert_mistakes as mistakes
from chapters.support.share_work import shared
from chapters.support.show import printer
from minipar.autograd import Tensor
from minipar.comm import DeviceMesh, world
from minipar.nn import Mixtral, MixtralConfig
from minipar.parallel.expert import ExpertParallel, expert_parallel
from minipar.train.config import parse, resolve
from minipar.train.data import load_tokens
from minipar.train.trainer import Trainer
from minipar.train.verify import relative_difference, verify

comm = world()
rank, P = comm.rank, comm.size
say = printer(rank)  # rank 0 prints and draws; every rank checks
if rank == 0:
    from chapters.support import figures_experts as figures
    from chapters.support.show import show, show_source
say(f"{P} rank{'s' if P > 1 else ''}")

# %% [markdown]
# ## 12.1 Parameters without operations
#
# A larger model is better, and costs more: a token takes two operations per parameter in forward, and four in backward
# (chapter 2). In a mixture of experts the two are no longer the same number. Mixtral 8x7B (Jiang et al. 2024, arXiv
# 2401.04088) is a Llama in which each layer has 8 MLPs, and each token goes to 2 of them. Count its parameters. A layer
# has $h(2h + 2h_{kv})$ in attention, $3hf$ in each expert (a gated MLP: gate, up and down), $hE$ in the router and $2h$
# in its norms. Around the layers are the embedding, the head, and one norm more:

# %%
V, h, f, L, E, k, h_kv = 32_000, 4096, 14_336, 32, 8, 2, 1024


def count(experts):
    """Return the parameters of a Mixtral with so many experts for each token to use."""
    layer = h * (2 * h + 2 * h_kv) + experts * 3 * h * f + h * E + 2 * h
    return L * layer + 2 * V * h + h


total, active = count(E), count(k)
assert (total, active) == (46_702_792_704, 12_879_925_248)
assert (total, active) == (MixtralConfig().parameters, MixtralConfig().active_parameters)
say(f"Mixtral 8x7B has {total / 1e9:.1f} billion parameters, and a token uses {active / 1e9:.1f} billion of them")
say(f"in experts: {L * E * 3 * h * f / total:.1%} of all; operations of a dense model as large: {total / active:.1f}x")
assert round(total / active, 1) == 3.6 and round(100 * L * E * 3 * h * f / total, 1) == 96.6
assert round(16 * total / 1e9) == 747 and round(16 * (total - L * E * 3 * h * f) / 1e9) == 26  # GB, below

# %% [markdown]
# (Not $8 \cdot 7 = 56$: attention exists once.) Whoever serves this model pays the operations of a model of 12.9
# billion, and Mixtral was as good as dense models of 70. But the memory is that of 46.7 billion. For training, with 16
# bytes per parameter (chapter 5), that is 747 GB, of which everything but the experts takes 26. **So experts are what
# must be divided.** And they are easy to divide: an expert is a whole MLP, which needs nothing from the others.
#
# ## 12.2 The router, and what has no gradient
#
# The router is one matrix. It gives each token $E$ logits $z$, and a softmax makes them probabilities $p$. The token
# goes to the $k$ most probable experts, and its result is the weighted sum of theirs. Mixtral's weights are the
# probabilities of the chosen ones, divided by their sum:
#
# $$y = \sum_{i \in \text{chosen}} w_i\, \text{expert}_i(x), \qquad w_i = \frac{p_i}{\sum_{j \in \text{chosen}} p_j}
# = \frac{e^{z_i}}{\sum_{j \in \text{chosen}} e^{z_j}} .$$
#
# The last step is worth a look: the denominator of the softmax cancels, so the weights are a *softmax over the chosen
# logits alone*. Its gradient is that of any softmax (11.3), and the logits that were not chosen get exactly none:
#
# $$\mathrm{d}z_i = w_i \Big(\mathrm{d}w_i - \sum_{j \in \text{chosen}} w_j\, \mathrm{d}w_j\Big)
# \quad\text{for the chosen},\qquad \mathrm{d}z_i = 0 \quad\text{for the others.}$$
#
# Of equal probabilities the first counts, so that every rank, every recomputation and every restart chooses alike.
# (`argsort` promises that only with `kind="stable"`.) That is not a rare case: in 16 bit two of 64 logits are often
# equal, and for a router of zeros all are.


# %%
def route(z, k):
    """Return each token's k most probable experts, the first of equals first, and their weights: (N, k) each."""
    p = np.exp(z - z.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)  # (N, E)
    chosen = np.argsort(-p, axis=1, kind="stable")[:, :k]
    weights = np.take_along_axis(p, chosen, axis=1)
    return chosen, weights / weights.sum(axis=1, keepdims=True)


def route_backward(z, chosen, weights, dweights):
    """Return the gradient of the logits, (N, E)."""
    dz = np.zeros_like(z)
    own = weights * (dweights - (weights * dweights).sum(axis=1, keepdims=True))  # (N, k)
    np.put_along_axis(dz, chosen, own, axis=1)
    return dz


E, k, h, f = P * -(-8 // P), 2, 8, 10  # from here on small; the least multiple of P that is 8 or more
random = np.random.default_rng(12)
N = [7 + r % 3 for r in range(P)]  # the ranks hold 7, 8, 9, 7, ... tokens
x, dy = random.normal(size=(2, sum(N), h))  # of all ranks: tokens, and the gradients of their results
router, dweights = random.normal(size=(E, h)), random.normal(size=(sum(N), k))
z = x @ router.T
chosen, weights = route(z, k)
dz = route_backward(z, chosen, weights, dweights)
assert route(np.zeros((1, E)), k)[0].tolist() == [[0, 1]]  # of equals the first

config = MixtralConfig(64, h, f, 1, 2, 1, 16, num_local_experts=E, num_experts_per_tok=k)
moe = Mixtral(config, dtype="float64").model.layers[0].block_sparse_moe
moe.gate.weight.data[...] = router
tokens = Tensor(x, requires_grad=True)
library_chosen, library_weights = moe.route(tokens)
library_weights.backward(dweights)
assert np.array_equal(chosen, library_chosen) and relative_difference(weights, library_weights.data) < 1e-12
assert relative_difference(dz.T @ x, moe.gate.weight.grad) < 1e-12
assert relative_difference(dz @ router, tokens.grad) < 1e-12
say("choice, weights, and the gradients of the router and of the tokens = those of the library's autograd")

# %% [markdown]
# The library takes the long way, through the softmax over all $E$, and autograd finds the same zeros, but for rounding.
#
# What is the gradient of the *choice*? Move one logit, that of expert 2, from far below the others to far above. Say
# the experts' results are the values $1, -1, 2$ and $0$:

# %%
moved = np.linspace(-3, 3, 601)
logits = np.stack([np.full(601, 1.0), np.full(601, 0.5), moved, np.full(601, -1.0)], axis=1)
results = np.array([1.0, -1.0, 2.0, 0.0])
who, by = route(logits, 2)
by_expert, slopes = np.zeros((601, 4)), route_backward(logits, who, by, results[who])[:, 2]
np.put_along_axis(by_expert, who, by, axis=1)
y = by_expert @ results
assert not slopes[moved < 0.5 - 1e-9].any() and slopes[moved > 0.5 + 1e-9].all()
(jump,) = np.flatnonzero(np.abs(np.diff(y)) > 0.1)  # one step of 0.01 changes the output by more than 1
assert abs(moved[jump] - 0.5) < 0.02 and abs(y[jump + 1] - y[jump]) > 1
measured = np.diff(y) / np.diff(moved)
assert np.allclose(np.delete(measured, jump), np.delete((slopes[1:] + slopes[:-1]) / 2, jump), atol=1e-4)
if rank == 0:
    show(figures.plot_choice(moved, by_expert, slopes, 2), "12_choice")

# %% [markdown]
# Up to 0.5 expert 2 is not chosen. Its weight is 0 and so is the slope: gradient descent does not learn that this
# expert would be better. At 0.5 it takes the place of expert 1, and the output jumps. Beyond, the weight has an
# ordinary slope. So the router learns *how much* to use the experts that it has chosen, never *whether to choose*
# another one. (And with $k = 1$ it learns nothing here: problem 2.) An expert that is chosen more learns more, and is
# chosen more still.
#
# ## 12.3 Dispatch
#
# Written as one thinks it, a layer is a loop over tokens: for each, run its $k$ experts on one row. But a matrix is
# used well only if it meets many rows (chapter 2), and each expert's weights should be read once. So sort the $Nk$ rows
# by expert, with one product per expert, and put the results back in their places. The sort is stable again: the rows
# of an expert stay in the order of their tokens, which fixes the order of every sum.
#
# An expert is Mixtral's: $\text{down}(\text{silu}(\text{gate}(x)) \cdot \text{up}(x))$, with $\text{silu}(g) = g\,
# \sigma(g)$. Forward stands beside backward; a class holds some experts and runs each on its stretch of the rows.


# %%
def forward(x, gate, up, down):
    """One expert's result, (M, h) -> (M, h). gate and up are (h, f), down is (f, h)."""
    g = x @ gate
    return (g / (1 + np.exp(-g)) * (x @ up)) @ down


def backward(x, gate, up, down, dy):
    """Return the gradients of x and of the three matrices."""
    g, u, da = x @ gate, x @ up, dy @ down.T  # (M, f); forward's products once more, instead of keeping them
    sigma = 1 / (1 + np.exp(-g))
    dg, du = da * u * sigma * (1 + g * (1 - sigma)), da * g * sigma
    return dg @ gate.T + du @ up.T, x.T @ dg, x.T @ du, (g * sigma * u).T @ dy


class Experts:
    """Some experts, each a (gate, up, down), and their gradients after a backward pass."""

    def __init__(self, weights):
        self.weights = weights

    def run(self, rows, counts):
        """Run expert e on the e-th stretch, of counts[e] rows, of rows that are sorted by expert: (M, h)."""
        self.rows = np.split(rows, np.cumsum(counts)[:-1])
        return np.concatenate([forward(x, *w) for x, w in zip(self.rows, self.weights, strict=True)])

    def run_backward(self, dresults):
        parts = np.split(dresults, np.cumsum([len(x) for x in self.rows])[:-1])
        every = [backward(x, *w, dy) for x, w, dy in zip(self.rows, self.weights, parts, strict=True)]
        self.gradients = [gradients for _, *gradients in every]
        return np.concatenate([dx for dx, *_ in every])


def layer(experts, x, chosen, weights, dy):
    """Return the layer's result, and the gradients of x and of the weights, for dy, the gradient of the result."""
    N, k = chosen.shape
    order = np.argsort(chosen.reshape(-1), kind="stable")  # row i of the sorted ones is (token, slot) number order[i]
    results, drows = np.empty((2, N * k, h))
    results[order] = experts.run(x[order // k], np.bincount(chosen.reshape(-1), minlength=E))
    results = results.reshape(N, k, h)  # in their places
    dresults = weights[:, :, None] * dy[:, None]  # (N, k, h)
    drows[order] = experts.run_backward(dresults.reshape(-1, h)[order])
    return (weights[:, :, None] * results).sum(1), drows.reshape(N, k, h).sum(1), (results * dy[:, None]).sum(2)


matrices = [tuple(random.normal(size=size) / h**0.5 for size in ((h, f), (h, f), (f, h))) for _ in range(E)]
one_device = Experts(matrices)
y, dx, dw = layer(one_device, x, chosen, weights, dy)  # the tokens of all ranks at once
looped, gradients = np.zeros_like(x), [[np.zeros_like(w) for w in expert] for expert in matrices]
for t in range(len(x)):
    for e, w in zip(chosen[t], weights[t], strict=True):
        looped[t] += w * forward(x[t : t + 1], *matrices[e])[0]
        for mine, new in zip(gradients[e], backward(x[t : t + 1], *matrices[e], w * dy[t : t + 1])[1:], strict=True):
            mine += new
assert relative_difference(y, looped) < 1e-12
for sorted_ones, loop in zip(one_device.gradients, gradients, strict=True):
    for a, b in zip(sorted_ones, loop, strict=True):
        assert relative_difference(a, b) < 1e-12 if b.any() else not a.any()
say(f"{len(x)} tokens: one product per expert = the loop over tokens, results and gradients of {E} experts")
say(f"rows of each expert: {np.bincount(chosen.reshape(-1), minlength=E).tolist()}")

# %% [markdown]
# Nothing is padded and nothing is dropped, whatever the experts' shares. GPU kernels for these products of unequal
# length are called *grouped GEMM*, or block-sparse in MegaBlocks (Gale et al. 2022, arXiv 2211.15841). An expert
# without rows has a gradient of zeros. Keep that in mind for 12.6.
#
# ## 12.4 Expert parallelism
#
# Now divide the experts: rank $j$ of $P$ holds the experts $jE/P$ to $(j+1)E/P - 1$. Everything else it holds whole,
# and it has tokens of its own: to attention, to the norms and to the loss, ep is data parallelism. The layer of experts
# alone is different. Its rows travel to their experts, in an *all-to-all* (*dispatch*), and the results travel back
# (*combine*):

# %%
if rank == 0:
    table = np.random.default_rng(1)
    show(figures.plot_dispatch([np.argsort(table.random((4, 6)), axis=1)[:, :2] for _ in range(3)], 6), "12_dispatch")

# %% [markdown]
# Tokens are letters, experts digits, and colours say on which rank an expert lives. In the third panel each rank has
# its rows by source; in the fourth it has sorted them by expert.
#
# In chapter 3 each chunk of an all-to-all had the same length. Here it depends on the router, so the ranks first tell
# each other how many rows come for each expert. Then `run` is three steps around the `run` that we have. **Backward is
# the same with dispatch and combine in exchanged roles**: the gradients of results go where the rows went, and the
# gradients of rows come back as the results did. So here is expert parallelism:


# %%
class ExpertsOverRanks(Experts):
    """This rank's E/P experts, which also run the rows of the other ranks of `comm`."""

    def __init__(self, weights, comm):
        each = len(weights) // comm.size
        super().__init__(weights[comm.rank * each : (comm.rank + 1) * each])
        self.comm = comm

    def exchange(self, rows, leaving, arriving):
        """Send leaving[j] rows to rank j, in order; return those that arrive, by source rank."""
        arrived = self.comm.all_to_all(np.ascontiguousarray(rows), counts=(leaving * h, arriving * h))
        return arrived.reshape(-1, h)

    def dispatch(self, rows):
        return self.exchange(rows, self.leaving, self.arriving)[self.order]

    def combine(self, rows):
        by_source = np.empty_like(rows)
        by_source[self.order] = rows
        return self.exchange(by_source, self.arriving, self.leaving)

    def run(self, rows, counts):
        here = self.comm.all_to_all(counts).reshape(self.comm.size, -1)  # (P, E/P): from each rank, for each expert
        self.leaving, self.arriving = counts.reshape(self.comm.size, -1).sum(axis=1), here.sum(axis=1)
        expert = np.repeat(np.tile(np.arange(here.shape[1]), self.comm.size), here.reshape(-1))  # of each arrived row
        self.order = np.argsort(expert, kind="stable")  # by expert, then by source rank, then by token
        return self.combine(super().run(self.dispatch(rows), here.sum(axis=0)))

    def run_backward(self, dresults):
        return self.combine(super().run_backward(self.dispatch(dresults)))


own = slice(sum(N[:rank]), sum(N[: rank + 1]))  # this rank's tokens
over_ranks = ExpertsOverRanks(matrices, comm)
comm.traffic.reset()
parts = layer(over_ranks, x[own], chosen[own], weights[own], dy[own])
sent = comm.traffic.bytes()
for part, whole in zip(parts, (y, dx, dw), strict=True):
    assert np.array_equal(part, whole[own])
for mine, alone in zip(over_ranks.gradients, one_device.gradients[rank * E // P : (rank + 1) * E // P], strict=True):
    assert all(np.array_equal(a, b) for a, b in zip(mine, alone, strict=True))
say(f"{P} ranks = one device that takes the tokens of all ranks in one pass, bit for bit, with all gradients")

# %% [markdown]
# Bit for bit, and why? An expert multiplies the rows of all $P$ ranks in one product, in the order (source rank,
# token). One device that takes the ranks' tokens one after another, *in one pass*, sorts them into the same order. Any
# other order, or a product per source rank, would differ in rounding.
#
# The last lines say something else, which most mistakes of 12.6 forget: **the gradient of an expert is complete.** It
# covers the tokens of all $P$ ranks, without any sum over ranks. A router's or a norm's gradient covers the tokens of
# its own rank, and is summed over all ranks of dp x cp. An expert's is summed only over the ranks that hold the *same*
# expert, of which there are $1/P$ as many, and both are divided by the same global count of tokens.
#
# ### Bytes
#
# Rank $r$ keeps the rows for its own experts and sends the others: $h \sum_{j \neq r} n_{rj}$ elements in dispatch, and
# $h \sum_{j \neq r} n_{jr}$ in combine, the results of others' rows. Backward does both once more. Before them go the
# counts, $E/P$ for each other rank. If the router spreads rows evenly, $n_{rj} = Nk/P$, and a rank sends
#
# $$4\,k\,N\,h\,\frac{P-1}{P} \text{ elements per layer and step.}$$


# %%
def rows_between(chosen):
    """Return n_rj, (P, P), of the experts (N, k) that each rank has chosen."""
    return np.stack([np.bincount(each.reshape(-1) * P // E, minlength=P) for each in chosen])


n = rows_between([chosen[sum(N[:r]) : sum(N[: r + 1])] for r in range(P)])
moved_rows = sum(n[rank, j] + n[j, rank] for j in range(P) if j != rank)
assert sent == 2 * h * moved_rows * 8 + E * (P - 1) // P * 8
say(f"rank 0 sent {sent:,} bytes: those of its rows, and {E * (P - 1) // P} counts")

tokens = 2 * E  # of each rank; token t goes to the experts t, t+1, ...: each expert gets 2k rows from each rank
even = (np.arange(tokens)[:, None] + np.arange(k)) % E
arrays = [random.normal(size=size) for size in ((tokens, h), (tokens, k), (tokens, h))]
comm.traffic.reset()
layer(ExpertsOverRanks(matrices, comm), arrays[0], even, *arrays[1:])
assert comm.traffic.bytes() == 4 * k * tokens * h * (P - 1) // P * 8 + E * (P - 1) // P * 8
say(f"with even routing {comm.traffic.bytes():,} bytes = 4 k N h (P-1)/P values of 8 bytes, and the counts")

# %% [markdown]
# ### The library's version
#
# `nn/moe.py` is a layer on one device: `route`, `compute` (our `layer`), `run_experts` (our `run`). It knows no rank.
# `parallel/expert.py` keeps a rank's experts and replaces `run_experts` by this:

# %%
if rank == 0:
    show_source(ExpertParallel.run)

model = Mixtral(config, dtype="float64")
moe = model.model.layers[0].block_sparse_moe
for expert, (gate, up, down) in zip(moe.experts, matrices, strict=True):
    for linear, matrix in ((expert.w1, gate), (expert.w3, up), (expert.w2, down)):
        linear.weight.data[...] = matrix.T  # Hugging Face's matrices are (out, in)
mesh = DeviceMesh(comm, dp=P, ep=P)
expert_parallel(model, mesh.ep, mesh.edp)
inputs, by = Tensor(x[own], requires_grad=True), Tensor(weights[own], requires_grad=True)
result = moe.compute(inputs, chosen[own], by)
result.backward(dy[own])
for ours, library in zip(parts, (result.data, inputs.grad, by.grad), strict=True):
    assert relative_difference(ours, library) < 1e-12
for expert, ours in zip(moe.experts, over_ranks.gradients, strict=True):
    for linear, gradient in zip((expert.w1, expert.w3, expert.w2), ours, strict=True):
        assert np.abs(linear.weight.grad - gradient.T).max() <= 1e-12 * np.abs(gradient).max()
say("the library's layer over the same ranks = ours: results, and gradients of tokens, weights and experts")

# %% [markdown]
# `mapping` makes a step of autograd of two functions that are each other's adjoint; that dispatch and combine are such
# a pair is all of its backward. What does the library add? Each parameter's `Placement` says which rank of ep holds it.
# From this follow the ranks over which a gradient is summed, the norm over all experts, checkpoints that move to
# another $P$, and every ZeRO stage. The axis ep is not a new dim of the mesh: its ranks are $P$ neighbours among those
# of dp x cp, and `edp` are the ranks that hold the same experts. Here a Mixtral trains with each $P$ that divides our
# ranks, with clipping, without ZeRO and with stage 3, against one device:

# %%
FLAGS = f"--model mixtral --layers 2 --hidden 16 --heads 4 --kv-heads 2 --ffn 24 --experts {E} --seq-len 8 --steps 3"
text = load_tokens(None, vocab_size=256, seq_len=8)
for ep in (p for p in range(2, P + 1) if P % p == 0):
    for stage in (0, 3):
        flags = f"{FLAGS} --dp {P} --ep {ep} --zero-stage {stage} --global-batch {2 * P} --clip-grad 0.5"
        training = resolve(parse(f"{flags} --dtype float64 --lr 3e-3 --eps 1e-5".split(), rank), P)
        trainer = Trainer(training, DeviceMesh(comm, dp=P, ep=ep), text)
        verdict = verify(trainer, list(trainer.train()), text)
        assert verdict.passed, verdict.line
        say(f"dp {P}, ep {ep}, ZeRO stage {stage}\n  {verdict.line}")

# %% [markdown]
# ## 12.5 What an all-to-all costs
#
# Let each of $P$ ranks have an array of $n$ elements. An all-to-all sends each element at most once; a ring all-reduce
# sends chunks that are added up on their way, twice around:

# %%
n = 840 * P
for name, call, elements, messages in (
    ("all-to-all", lambda array: comm.all_to_all(array, algorithm="pairwise"), n * (P - 1) // P, P - 1),
    ("all-reduce", lambda array: comm.all_reduce(array, algorithm="ring"), 2 * n * (P - 1) // P, 2 * (P - 1)),
):
    comm.traffic.reset()
    call(np.ones(n))
    assert (comm.traffic.bytes(), comm.traffic.messages()) == (8 * elements, messages)
    say(f"{name} of {n:,} elements: {elements:,} sent by each rank, in {messages} messages")

# %% [markdown]
# Half the bytes, half the messages. Why then is the all-to-all feared? Put the ranks on hosts of $g$ each. An
# all-reduce sums *inside* each host first, and then one summed copy goes between hosts, of which each rank carries
# $1/g$ (chapter 3). In an all-to-all nothing is summed: every element has one destination, and if that is another host
# it must travel there. Per rank, over the network:
#
# | | elements between hosts | messages between hosts |
# | --- | --- | --- |
# | all-reduce, hierarchical | $2\,\frac{n}{g}\,\frac{H-1}{H}$ | $2(H-1)$ |
# | all-to-all | $n\,\frac{H-1}{H}$ | $P - g$ |
#
# with $H = P/g$ hosts. With 8 GPUs per host the all-to-all sends $g/2 = 4$ times as much over the slow links, and as
# messages of $n/P$ elements they are small. Nor can it hide: dispatch stands between the router and the experts, and
# combine between the experts and the next layer, while an all-reduce of gradients has the rest of backward to hide
# behind. So ep wants to stay inside a host, or on a network that is as fast.


# %%
def between_hosts(P, g, n):
    """Return what a rank sends to other hosts, by counting pairs: (elements, messages) of an all-to-all."""
    there = [j for j in range(P) if j // g != 0]  # seen from rank 0
    return len(there) * n // P, len(there)


for hosts, g in ((2, 8), (4, 8), (8, 4)):
    elements, messages = between_hosts(hosts * g, g, n=hosts * g * 10)
    assert elements == hosts * g * 10 * (hosts - 1) // hosts and messages == hosts * g - g
    assert elements / (2 * 10 * (hosts - 1)) == g / 2  # hierarchical all-reduce: 2 n/g (H-1)/H = 2 * 10 (H-1)
if P % 2 == 0:  # our ranks, as two hosts
    inside, across = comm.levels(2, "inside")
    comm.traffic.reset()
    chunk = inside.reduce_scatter(np.ones(n), algorithm="ring")
    inside.all_gather(across.all_reduce(chunk, algorithm="ring"), algorithm="ring")
    assert comm.traffic.bytes(axis=across.axis) == 8 * (2 * n // (P // 2) * 1 // 2)
    say(f"as two hosts of {P // 2}: all-reduce {n // (P // 2):,} elements between hosts, all-to-all {n // 2:,}")

# %% [markdown]
# ### Against what?
#
# Without ep every rank must get at every expert, and there are two ways. It holds them all, and their gradients are
# summed over dp: $2 \cdot 3hfE\,(P-1)/P$ elements per layer and step. Or ZeRO stage 3 shards them, gathers a layer's
# experts in forward and in backward, and reduce-scatters their gradients: $3 \cdot 3hfE\,(P-1)/P$ per microbatch. Both
# move *parameters*, and do not depend on the tokens. ep moves *tokens*, and does not depend on the experts' size:
#
# $$4kNh < 6hfE \iff N < \frac{3fE}{2k} \qquad\text{and}\qquad 4kNh < 9hfE \iff N < \frac{9fE}{4k}.$$
#
# In the first $N$ counts all tokens of a rank in a step, in the second those of a microbatch. The hidden size has
# cancelled. For Mixtral 8x7B:

# %%
crossings = [factor * 14_336 * 8 / 2 for factor in (3 / 2, 9 / 4)]
assert crossings == [86_016, 129_024]
counts = np.geomspace(1e3, 1e6, 31)
lines = {
    "ep: tokens travel": 4 * 2 * counts * 4096 * 7 / 8,
    "dp of all experts: gradients are all-reduced": np.full(31, 6 * 4096 * 14_336 * 8 * 7 / 8),
    "ZeRO stage 3: experts are gathered": np.full(31, 9 * 4096 * 14_336 * 8 * 7 / 8),
}
if rank == 0:
    show(figures.plot_ep_or_dp(counts, lines, crossings), "12_ep_or_dp")

# %% [markdown]
# A microbatch rarely has more than 16,384 tokens per rank, where ep sends an eighth of what ZeRO stage 3 does. Against
# plain dp it also sends less in most steps, but plain dp fails for another reason: 747 GB on each rank.
#
# How long does a layer wait for its tokens? A rank's $Nk$ rows take $6hf$ operations each in forward, and dispatch and
# combine carry $2kNh$ elements of $b$ bytes. With $S$ operations and $1/\beta$ bytes per second their ratio is
#
# $$\frac{\text{messages}}{\text{products}} = \frac{2kNh\,b\,\beta}{6kNhf/S} = \frac{S\,b\,\beta}{3f}:$$
#
# neither the tokens nor $k$ nor $h$ matter, only the *inner size of an expert* (and $(P-1)/P$, left out here).

# %%
S, b = 4e14, 2  # as in chapters 6 and 11: an assumption, 40 % of an H100's 989 TFLOP/s; 16 bit
EXPECTED = {("NVLink 4", 450e9): (4, 29), ("InfiniBand NDR", 50e9): (37, 260)}
for (link, speed), expected in EXPECTED.items():
    ratios = [round(100 * S * b / speed / (3 * inner)) for inner in (14_336, 2048)]
    assert tuple(ratios) == expected
    say(f"{link:<14} at {speed / 1e9:>3.0f} GB/s: Mixtral's experts wait {ratios[0]} %, of 2048 columns {ratios[1]} %")

# %% [markdown]
# Mixtral's experts are large. DeepSeek-V3's (arXiv 2412.19437) have 2048 inner columns, and each token goes to 8 of
# 256: over InfiniBand the messages would take 2.6 times as long as the products. Its authors send each row to at most 4
# hosts, and overlap one microbatch's messages with another one's products (DualPipe).
#
# ## 12.6 Why everybody gets it wrong
#
# Expert parallelism has two kinds of parameters, with different ranks to sum over. Each loop over parameters must know
# that: the sum of gradients, the norm, weight decay, tensor parallelism. Four mistakes that frameworks have shipped:
#
# 1. **Experts times P.** Data parallelism takes the *mean* of the gradients over its ranks. For experts there are only
# $1/P$ as many, so the same code divides by a number that is $P$ times too small. An expert's gradient already covers
# the tokens of all $P$ ranks ([pytorch, issue 160285](https://github.com/pytorch/pytorch/issues/160285)).
#
# 2. **The norm without experts.** A norm of the parameters that all ranks share, or of some experts
# ([Megatron-LM, pull request 5916](https://github.com/NVIDIA/Megatron-LM/pull/5916)). Clipping acts too late.
#
# 3. **The router is not summed over tp.** Tensor parallelism splits each expert (chapter 6), so a rank has a part of
# every expert's result, and from it a part of the weights' gradients. The router itself is whole on every rank, and
# looks as if its gradient were ([torchtitan, issue 2387](https://github.com/pytorch/torchtitan/issues/2387)).
#
# 4. **Idle experts do not decay.** An expert without tokens has no gradient; the optimizer skips it, and its weights do
# not decay. On one device with more tokens it would not be idle.
#
# Each is a trainer of the library with one method changed (`chapters/support/expert_mistakes.py`):

# %%
if rank == 0:
    show_source(mistakes.TimesP, mistakes.NormWithoutExperts, mistakes.RouterNotSummed, mistakes.IdleExpertsDoNotDecay)

# %% [markdown]
# We train each for 20 steps on four ranks, dp 2 and tp 2, with ep 2 and 40 experts, and look with five instruments.
# **Loss** and **norm**: does the printed curve differ from the right one's by more than 1 % in some step?
# **Compare**: does `minipar.compare`, which reads the records of two runs, find a difference in the first step? (A
# right run is needed for these three.) **Ranks**: do the ranks hold different routers? **One device**: does `--verify`
# fail?

# %%
CATCHING = {
    "nothing broken": set(),
    "1. experts times P": {"norm", "compare", "one device"},
    "2. norm without experts": {"norm", "compare", "one device"},
    "3. router not summed": {"norm", "compare", "ranks", "one device"},
    "4. idle experts do not decay": {"norm", "compare", "one device"},
}
runs = dict(zip(CATCHING, shared(comm, mistakes.examine, [(name,) for name in CATCHING]), strict=True))
right = runs["nothing broken"]
for name, run in runs.items():
    noticed = mistakes.curves_that_differ(run, right) | set(run["noticed"])
    say(f"{name:<29} loss {run['losses'][-1]:.3f}, norm first {run['norms'][0]:.3f}, last {run['norms'][-1]:.3f}")
    say(f"{'':<29} caught by: {', '.join(sorted(noticed)) or 'nothing'}")
    if run["named"]:
        say(f"{'':<29} compare: {run['named']}")
    assert noticed == CATCHING[name]
if rank == 0:
    show(figures.plot_mistakes(runs), "12_mistakes")

# %% [markdown]
# **The loss shows none of them.** AdamW divides each gradient by its own size, so a factor $P$ cancels, as the factor
# $c$ did in chapter 11. The **norm** differs in each, but look at the picture, and at the first steps: 1.472 instead of
# 1.470, or 1.469. Who has no right run to compare with sees nothing. **Ranks** against each other show only the third,
# and only because the routers of two ranks then drift apart, from the first step on. **One device** finds all four, and
# **compare** says in the first step what is wrong: a gradient that is 2 times as large in the experts, a norm alone,
# the routers, updates of experts that are missing.
#
# Why does nobody see it in the printed values? Multiply a gradient's part by 2 and its squares count four times:

# %%
first, times_p = (runs[name]["norms"][0] for name in ("nothing broken", "1. experts times P"))
share = ((times_p / first) ** 2 - 1) / 3
elements = {name: p.size for name, p in Mixtral(mistakes.model(), deferred=True).named_parameters()}
of_experts = sum(size for name, size in elements.items() if "experts" in name) / sum(elements.values())
assert share < 0.002 and of_experts > 0.95
say(f"experts have {of_experts:.0%} of the parameters, and at first {share:.1%} of the squared norm")

# %% [markdown]
# Nearly all of a model's parameters may have a wrong gradient, and no printed value says so.
#
# ## 12.7 Names elsewhere
#
# | minipar | Megatron-LM | DeepSpeed-MoE | PyTorch, torchtitan |
# | --- | --- | --- | --- |
# | `--experts E --top-k k` | `--num-experts`, `--moe-router-topk` | `num_experts`, `k` | `num_experts`, `top_k` |
# | `--ep P` | `--expert-model-parallel-size` | `ep_size` | `expert_parallel_degree`, mesh dim `ep` |
# | `edp`, ranks with the same experts | expert data parallel group | expert data parallel group | mesh dim `efsdp` |
# | `MoE.route` | `TopKRouter` | `TopKGate` | `TokenChoiceTopKRouter` |
# | dispatch, combine | token dispatcher `alltoall` | `_AllToAll` | `all_to_all_single` with splits |
# | one product per expert | `--moe-grouped-gemm` | loop over `Experts` | `torch._grouped_mm` |
#
# DeepSpeed-MoE (Rajbhandari et al. 2022, arXiv 2201.05596) and GShard (Lepikhin et al. 2020, arXiv 2006.16668) send
# padded arrays of a fixed capacity.
#
# ## 12.8 Problems
#
# 1. Mixtral 8x22B has $h = 6144$, $f = 16\,384$, 56 layers, 8 experts of which 2 are used, $h_{kv} = 1024$ and $V =
# 32\,768$. How many parameters has it, and how many does a token use?
#
# 2. What does Mixtral's router learn from the loss if $k = 1$? Switch Transformers (arXiv 2101.03961) have $k = 1$ and
# learn: what must be different?
#
# 3. 64 ranks on 8 hosts, dp 64 and ep 8, $E = 8$. Over which ranks is a norm's gradient summed, over which ranks an
# expert's? Which of the two sums stays inside a host if the ranks of ep do? And if those of ep are on 8 hosts?
#
# 4. All $Nk$ rows of all $P$ ranks go to experts of rank 0. What does rank 0 send per layer, what does another rank
# send, and how long do the products take compared with even routing?
#
# 5. A framework takes the mean of every gradient over the ranks of its own group: $dc$ ranks for most parameters,
# $dc/P$ for experts. Each rank divides its loss by its own tokens, as many on each. What factor has each gradient? What
# is the remedy?
#
# 6. Two microbatches of $N$ tokens, or one of $2N$: which of ep, ZeRO stage 3 and plain dp sends as much in both cases?
#
# ## 12.9 Answers
#
# 1. A layer has $h(2h + 2h_{kv}) = 88.1$ million in attention and $3hf = 302$ million in each expert. In all 140.6
# billion, and 39.2 billion per token.
#
# 2. Nothing: the only weight is $p/p = 1$, whose derivative is 0. Switch multiplies with $p$ itself.
#
# 3. A norm's over all 64, an expert's over the 8 that hold the same one. If ep is inside a host, those 8 are one on
# each host: the sum crosses hosts, and the all-to-all does not. If ep is across hosts it is the other way round. The
# all-to-all is needed in each layer and cannot hide, so it gets the fast links.
#
# 4. In forward rank 0 sends nothing in dispatch and $(P-1)Nkh$ elements in combine, another rank $Nkh$ and nothing.
# With backward, $2(P-1)Nkh$ and $2Nkh$. Rank 0 has all products, which take $P$ times as long, and the others wait.
#
# 5. Each rank's loss is $dc$ times its share of the global mean. Most gradients are summed over $dc$ ranks and divided
# by $dc$: factor 1. An expert's covers the tokens of all $dc$ ranks after the sum over $dc/P$, and is divided by
# $dc/P$: factor $P$. Divide by $dc$, or divide the loss by the global count of tokens and sum, as minipar does.
#
# 6. ep: its bytes are proportional to the tokens. So does plain dp: it sums once per step. ZeRO stage 3 gathers for
# each microbatch.
#
# Exercises 17 and 18 in chapters/exercises are about this chapter.

# %%
config = MixtralConfig(32_768, 6144, 16_384, 56, 48, 8)
assert (round(config.parameters / 1e9, 1), round(config.active_parameters / 1e9, 1)) == (140.6, 39.2)
assert (round(6144 * 2 * (6144 + 1024) / 1e6, 1), round(3 * 6144 * 16_384 / 1e6)) == (88.1, 302)
assert not route_backward(z, *route(z, 1), dweights[:, :1]).any()
lopsided = np.zeros((P, P), int)
lopsided[:, 0] = N[0] * k  # all rows of every rank, to rank 0; the ranks have as many tokens
for r in range(P):
    rows = 2 * sum(lopsided[r, j] + lopsided[j, r] for j in range(P) if j != r)
    assert rows == (2 * (P - 1) * N[0] * k if r == 0 else 2 * N[0] * k)
say("the answers hold")

# %% tags=["active-ipynb"]
# %autopx

# %% tags=["active-ipynb"]
# # Back in one process: stop the eight.
# cluster.stop_cluster_sync()
