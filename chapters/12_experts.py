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
# Mixtral 8x7B has 46.7 billion parameters, and multiplies each token with 12.9 billion of them. It is a *mixture of
# experts*: each layer has eight MLPs, the *experts*, and a *router* sends each token to two of them. To train it takes
# 747 GB, so the experts are divided over devices, and now it is the *tokens* that travel. Well-known frameworks had
# this wrong for a time (12.6 links three). In a run of 12.6 the experts, which have 98 % of the parameters, get twice
# their gradient. The first gradient norm printed is 1.472; the right one is 1.470. The norm hides the mistake, because
# at first the experts contribute less than 0.2 % of its square. At the end of this chapter you can write the router,
# the exchange and both backward passes, count their bytes, and say which instrument finds such a mistake.

# %% tags=["active-ipynb", "setup"]
# from chapters.support.notebook import start
#
# cluster = start(8)

# %% tags=["setup"]
import numpy as np

from chapters.support.show import printer
from minipar.comm import world

comm = world()
rank, P = comm.rank, comm.size  # this rank, and the number of ranks
say = printer(rank)  # rank 0 prints and draws; every rank checks
say(f"{P} rank{'s' if P > 1 else ''}")
if rank == 0:
    from chapters.support.ch12 import figures
    from chapters.support.overview import draw_strategies
    from chapters.support.show import show, show_file, show_source

# %%
if rank == 0:
    table = np.random.default_rng(33)
    choices = [np.argsort(table.random((4, 6)), axis=1)[:, :2] for _ in range(3)]  # of 3 ranks: 2 experts for a token
    show(figures.plot_dispatch(choices, 6), "12_dispatch")

# %% [markdown]
# Three ranks have four tokens each (the letters), and two of the six experts each (the digits). A box is a *row*: one
# token on its way to one expert. Its colour says on which rank that expert lives: blue is rank 0, orange rank 1, green
# rank 2. From panel 2 to panel 3 the rows travel: a row goes to the rank of its colour. In panel 4 all rows of an
# expert lie together, for one product of matrices. Afterwards the results go the same way back.
#
# Among the strategies of this course expert parallelism stands here:

# %%
if rank == 0:
    show(draw_strategies(["ep"]), "12_here")

# %% [markdown]
# ## 12.1 Parameters without operations
#
# *Core, 5 minutes.*
#
# A larger model is better, and costs more: a token takes two operations per parameter in forward, and four in backward
# (chapter 2). In a mixture of experts the two are no longer the same number. Mixtral 8x7B (Jiang et al. 2024, arXiv
# 2401.04088) is a Llama in which each layer has $E = 8$ MLPs, and each token goes to $k = 2$ of them.
#
# Count its parameters. A token has $h$ elements, its keys $h_{kv}$, and an expert $f$ inner ones. A layer has
#
# - $h(2h + 2h_{kv})$ parameters in attention: queries and output, keys and values,
# - $3hf$ in each expert, a gated MLP with three matrices: gate, up and down,
# - $hE$ in the router, and $2h$ in its two norms.
#
# Around the $L$ layers are the embedding and the head, for a vocabulary of $V$ tokens, and one norm more. We count
# twice. With all $E$ experts of a layer these are the parameters that the model *has*, and must keep. With $k$ experts
# they are those that one token *uses*. The router is whole in both: it must look at all experts to choose.

# %%
from minipar.more.experts.mixtral import Mixtral, MixtralConfig

L, V = 32, 32_000  # layers; tokens in the vocabulary
h, h_kv, f = 4096, 1024, 14_336  # elements of a token, of its keys, and inside an expert
E, k = 8, 2  # experts of a layer, and those that a token goes to


def count(experts):
    """Return the parameters of a Mixtral, counting so many of the experts in each layer."""
    attention = h * (2 * h + 2 * h_kv)
    each_expert = 3 * h * f
    router = h * E
    norms = 2 * h
    layer = attention + experts * each_expert + router + norms
    return L * layer + 2 * V * h + h  # with the embedding, the head and the last norm


has = count(E)
uses = count(k)
in_experts = L * E * 3 * h * f
assert (has, uses) == (46_702_792_704, 12_879_925_248)
assert has == sum(p.size for p in Mixtral(MixtralConfig(), seed=None).parameters())
say(f"Mixtral 8x7B has {has / 1e9:.1f} billion parameters, and a token uses {uses / 1e9:.1f} billion of them")
say(f"{in_experts / has:.1%} of all parameters are in experts")
say(f"a model without experts that has as many parameters needs {has / uses:.1f} times the operations")
assert round(has / uses, 1) == 3.6 and round(100 * in_experts / has, 1) == 96.6
assert round(16 * has / 1e9) == 747 and round(16 * (has - in_experts) / 1e9) == 26  # GB, below

# %% [markdown]
# (Not $8 \cdot 7 = 56$: attention exists once.) Whoever serves this model pays the operations of a model of 12.9
# billion; its authors found it as good as Llama 2 70B. But the memory is that of 46.7 billion. For training, with 16
# bytes per parameter (chapter 5), that is 747 GB, of which everything but the experts takes 26. **So experts are what
# must be divided.** And they are easy to divide: an expert is a whole MLP, which needs nothing from the others.

# %% [markdown]
# ## 12.2 The router, and what has no gradient
#
# *Core, 10 minutes.*
#
# The router is one matrix. It gives each token $E$ logits $z$, and a softmax makes them probabilities $p$. The token
# goes to the $k$ most probable experts, and its result is the weighted sum of theirs. Mixtral's weights are the
# probabilities of the chosen ones, divided by their sum:
#
# $$y = \sum_{i \in \text{chosen}} w_i\, \text{expert}_i(x), \qquad w_i = \frac{p_i}{\sum_{j \in \text{chosen}} p_j}
# = \frac{e^{z_i}}{\sum_{j \in \text{chosen}} e^{z_j}} .$$
#
# The last step is worth a look: the denominator of the softmax cancels, so the weights are a *softmax over the chosen
# logits alone*. Its gradient is that of any softmax (1.5), and the logits that were not chosen get exactly none:
#
# $$\mathrm{d}z_i = w_i \Big(\mathrm{d}w_i - \sum_{j \in \text{chosen}} w_j\, \mathrm{d}w_j\Big)
# \quad\text{for the chosen},\qquad \mathrm{d}z_i = 0 \quad\text{for the others.}$$
#
# Of equal probabilities the first counts, so that every rank, every recomputation and every restart chooses alike.
# (`argsort` promises that only with `kind="stable"`.) That is not a rare case: in 16 bit two of 64 logits are often
# equal, and for a router of zeros all are.

# %%
from chapters.support.whole_runs import relative_difference
from minipar.autograd import Tensor


def route(z, k, bias=0):
    """Return each token's k most probable experts, the first of equals first, and their weights: (N, k) each."""
    p = np.exp(z - z.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)  # (N, E)
    chosen = np.argsort(-(p + bias), axis=1, kind="stable")[:, :k]  # a bias has its use in 12.7
    weights = np.take_along_axis(p, chosen, axis=1)
    return chosen, weights / weights.sum(axis=1, keepdims=True)


def route_backward(z, chosen, weights, dweights):
    """Return the gradient of the logits, (N, E)."""
    dz = np.zeros_like(z)
    own = weights * (dweights - (weights * dweights).sum(axis=1, keepdims=True))  # (N, k)
    np.put_along_axis(dz, chosen, own, axis=1)
    return dz


E = P * -(-8 // P)  # from here on all is small: the least multiple of P that is 8 or more
k, h, f = 2, 8, 10
random = np.random.default_rng(12)
N = [7 + r % 3 for r in range(P)]  # the ranks hold 7, 8, 9, 7, ... tokens
x, dy = random.normal(size=(2, sum(N), h))  # of all ranks: tokens, and the gradients of their results
router = random.normal(size=(E, h))
dweights = random.normal(size=(sum(N), k))
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
slopes = route_backward(logits, who, by, results[who])[:, 2]
by_expert = np.zeros((601, 4))
np.put_along_axis(by_expert, who, by, axis=1)
y = by_expert @ results
assert not slopes[moved < 0.5 - 1e-9].any() and slopes[moved > 0.5 + 1e-9].all()
(jump,) = np.flatnonzero(np.abs(np.diff(y)) > 1)  # one step of 0.01 changes the output by more than 1
assert abs(moved[jump] - 0.5) < 0.02
if rank == 0:
    show(figures.plot_choice(moved, by_expert, slopes, 2), "12_choice")

# %% [markdown]
# Up to 0.5 expert 2 is not chosen. Its weight is 0 and so is the slope: gradient descent does not learn that this
# expert would be better. At 0.5 it takes the place of expert 1, and the output jumps. Beyond, the weight has an
# ordinary slope. So the router learns *how much* to use the experts that it has chosen, never *whether to choose*
# another one. (And with $k = 1$ it learns nothing here: problem 2.) An expert that is chosen more learns more, and is
# chosen more still. 12.7 is about that.

# %% [markdown]
# ## 12.3 Dispatch
#
# *Core, 10 minutes.*
#
# An expert is Mixtral's: $\text{down}(\text{silu}(\text{gate}(x)) \cdot \text{up}(x))$, with $\text{silu}(g) = g\,
# \sigma(g)$. The simplest layer is a loop over the tokens: it runs the $k$ experts of each, on one row.


# %%
def forward(x, gate, up, down):
    """One expert's result, (M, h) -> (M, h). gate and up are (h, f), down is (f, h)."""
    g = x @ gate
    return (g / (1 + np.exp(-g)) * (x @ up)) @ down


def backward(x, gate, up, down, dy):
    """Return the gradients of x and of the three matrices."""
    g = x @ gate  # (M, f); forward's products once more, instead of keeping them
    u = x @ up
    da = dy @ down.T
    sigma = 1 / (1 + np.exp(-g))
    dg = da * u * sigma * (1 + g * (1 - sigma))
    du = da * g * sigma
    return dg @ gate.T + du @ up.T, x.T @ dg, x.T @ du, (g * sigma * u).T @ dy


def layer_by_token(matrices, x, chosen, weights, dy):
    """Return the layer's result, and the gradients of all experts, for dy, the gradient of the result."""
    y = np.zeros_like(x)
    gradients = []
    for expert in matrices:
        gradients.append([np.zeros_like(matrix) for matrix in expert])
    for t in range(len(x)):
        row = x[t : t + 1]  # (1, h)
        for e, w in zip(chosen[t], weights[t], strict=True):
            y[t] += w * forward(row, *matrices[e])[0]
            _, *new = backward(row, *matrices[e], w * dy[t : t + 1])
            for total, part in zip(gradients[e], new, strict=True):
                total += part
    return y, gradients


matrices = []
for _ in range(E):
    matrices.append(tuple(random.normal(size=size) / h**0.5 for size in ((h, f), (h, f), (f, h))))
looped, looped_gradients = layer_by_token(matrices, x, chosen, weights, dy)

# %% [markdown]
# But a matrix is used well only if it meets many rows (chapter 2), and each expert's weights should be read once. So
# sort the $Nk$ rows of $N$ tokens by expert, compute one product per expert, and put the results back in their places.
# The sort is stable again: the rows of an expert stay in the order of their tokens, which fixes the order of every sum.
#
# A class holds some experts, and runs each on its stretch of the rows. `layer` sorts:


# %%
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


def layer(experts, number, x, chosen, weights, dy):
    """Return the layer's result, and the gradients of x and of the weights, for dy, the gradient of the result.

    number: of experts in the layer, which chosen counts from 0.
    """
    N, k = chosen.shape
    h = x.shape[1]
    expert_of_row = chosen.reshape(-1)  # row t k + i is token t on its way to its i-th expert
    order = np.argsort(expert_of_row, kind="stable")  # row i of the sorted ones is row order[i]
    counts = np.bincount(expert_of_row, minlength=number)

    results = np.empty((N * k, h))
    results[order] = experts.run(x[order // k], counts)  # sorted, run, and back in their places
    results = results.reshape(N, k, h)
    y = (weights[:, :, None] * results).sum(axis=1)

    dweights = (results * dy[:, None]).sum(axis=2)
    dresults = (weights[:, :, None] * dy[:, None]).reshape(-1, h)
    drows = np.empty((N * k, h))
    drows[order] = experts.run_backward(dresults[order])
    return y, drows.reshape(N, k, h).sum(axis=1), dweights


one_device = Experts(matrices)
y, dx, dw = layer(one_device, E, x, chosen, weights, dy)  # the tokens of all ranks at once
assert relative_difference(y, looped) < 1e-12
for by_expert, by_token in zip(one_device.gradients, looped_gradients, strict=True):
    for a, b in zip(by_expert, by_token, strict=True):
        assert relative_difference(a, b) < 1e-12 if b.any() else not a.any()
say(f"{len(x)} tokens: one product per expert = the loop over tokens, results and gradients of {E} experts")
say(f"rows of each expert: {np.bincount(chosen.reshape(-1), minlength=E).tolist()}")

# %% [markdown]
# Nothing is padded and nothing is dropped, whatever the experts' shares. GPU kernels for these products of unequal
# length are called *grouped GEMM*, or block-sparse in MegaBlocks (Gale et al. 2022, arXiv 2211.15841). An expert
# without rows has a gradient of zeros. Keep that in mind for 12.6.

# %% [markdown]
# ## 12.4 Expert parallelism
#
# *Core, 9 minutes.*
#
# Now divide the experts: rank $j$ of the $P$ ranks of the axis *ep* holds the experts $jE/P$ to $(j+1)E/P - 1$.
# Everything else it holds whole, and it has tokens of its own: to attention, to the norms and to the loss, ep is data
# parallelism. The layer of experts alone is different. Its rows travel to their experts, in an *all-to-all*
# (*dispatch*), and the results travel back (*combine*). Look at the picture on the first page again. In its third panel
# each rank has its rows by source; in the fourth it has sorted them by expert.
#
# In chapter 3 each chunk of an all-to-all had the same length. Here it depends on the router, so the ranks first tell
# each other how many rows come for each expert. Then the new `run` is dispatch, the `run` that we have, and combine.
# **Backward is the same with dispatch and combine in exchanged roles**: the gradients of results go where the rows
# went, and the gradients of rows come back as the results did.
#
# **[Exercise 17](exercises/e17_expert_dispatch.py)** asks you for `run`. Write it before you open the next cell:
# `make exercises PYTEST="-k e17"`.


# %% tags=["hide-input"]
class ExpertsOverRanks(Experts):
    """This rank's E/P experts, which also run the rows of the other ranks of `comm`."""

    def __init__(self, weights, comm):
        each = len(weights) // comm.size  # E/P
        super().__init__(weights[comm.rank * each : (comm.rank + 1) * each])
        self.comm = comm

    def run(self, rows, counts):
        """Run all E experts on this rank's rows, of which counts[e] are for expert e: panels 2 to 4, and back."""
        P = self.comm.size
        # Row j of `leaving_rows`: how many rows of this rank go to each expert of rank j.
        # Row j of `arriving_rows`: how many rows of rank j come to each expert of this rank.
        leaving_rows = counts.reshape(P, -1)  # (P, E/P)
        arriving_rows = self.comm.all_to_all(counts).reshape(P, -1)  # (P, E/P)
        # A message needs only the sums: how many rows go to rank j, and how many come from it.
        self.leaving = leaving_rows.sum(axis=1)  # (P,)
        self.arriving = arriving_rows.sum(axis=1)  # (P,)
        # The rows arrive by source rank, and from each source by expert (panel 3). With two experts here and three
        # sources the counts in arriving_rows belong to the experts 0 1 0 1 0 1, in this order.
        experts = np.tile(np.arange(arriving_rows.shape[1]), P)
        expert_of_row = np.repeat(experts, arriving_rows.reshape(-1))
        # A stable sort leads to panel 4: by expert, then by source rank, then by token.
        self.order = np.argsort(expert_of_row, kind="stable")
        return self.combine(super().run(self.dispatch(rows), arriving_rows.sum(axis=0)))

    def run_backward(self, dresults):
        return self.combine(super().run_backward(self.dispatch(dresults)))

    def dispatch(self, rows):
        """Send each row to the rank of its expert, and sort what arrives by expert."""
        return self.exchange(rows, self.leaving, self.arriving)[self.order]

    def combine(self, results):
        """Undo the sort, and send each result to the rank of its token: the counts change places."""
        by_source = np.empty_like(results)
        by_source[self.order] = results
        return self.exchange(by_source, self.arriving, self.leaving)

    def exchange(self, rows, leaving, arriving):
        """Send leaving[j] rows to rank j, in order; return those that arrive, by source rank."""
        h = rows.shape[1]
        arrived = self.comm.all_to_all(np.ascontiguousarray(rows), counts=(leaving * h, arriving * h))
        return arrived.reshape(-1, h)


# %%
own = slice(sum(N[:rank]), sum(N[: rank + 1]))  # this rank's tokens
over_ranks = ExpertsOverRanks(matrices, comm)
comm.traffic.reset()
parts = layer(over_ranks, E, x[own], chosen[own], weights[own], dy[own])
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
# its own rank. Here are 8 ranks of data parallelism with ep 4, so that the ranks 0 and 4 hold the same experts:

# %%
if rank == 0:
    show(figures.draw_sums(8, 4), "12_sums")

# %% [markdown]
# Each row of the picture is a rank, each column the tokens of one rank. A filled box says that the gradient on this
# rank covers these tokens after backward, before any message of data parallelism. Ranks of one colour hold the same
# parameters, and sum their gradients. Every sum must cover each token once:
#
# - On the left all 8 ranks hold the router. Each gradient covers one rank's tokens, and the sum has 8 terms.
# - On the right four kinds of ranks hold different experts. Each gradient covers the tokens of 4 ranks, and a sum has 2
#   terms: ranks 0 and 4 for their experts, 1 and 5 for theirs.
#
# In general an expert's gradient is summed only over the ranks that hold the *same* expert, of which there are $1/P$ as
# many as ranks of data and context parallelism (dp x cp). Both kinds are divided by the same global count of tokens.
# **[Exercise 18](exercises/e18_expert_gradients.py)** asks for both sums and for the norm of all:
# `make exercises PYTEST="-k e18"`.

# %% [markdown]
# ### Bytes
#
# *Core, 5 minutes.*
#
# Let $n_{rj}$ be the rows that rank $r$ sends to the experts of rank $j$. Rank $r$ keeps the rows for its own experts
# and sends the others: $h \sum_{j \neq r} n_{rj}$ elements in dispatch, and $h \sum_{j \neq r} n_{jr}$ in combine, the
# results of others' rows. Backward does both once more. Before them go the counts, $E/P$ for each other rank. If the
# router spreads rows evenly, $n_{rj} = Nk/P$, and a rank sends
#
# $$4\,k\,N\,h\,\frac{P-1}{P} \text{ elements per layer and step.}$$


# %%
def rows_between(chosen):
    """Return n_rj, (P, P), of the experts (N, k) that each rank has chosen."""
    return np.stack([np.bincount(each.reshape(-1) * P // E, minlength=P) for each in chosen])


n = rows_between([chosen[sum(N[:r]) : sum(N[: r + 1])] for r in range(P)])
moved_rows = n.sum(axis=0) + n.sum(axis=1) - 2 * n.diagonal()  # of each rank, to others and from others
assert sent == 2 * h * moved_rows[rank] * 8 + E * (P - 1) // P * 8
say(f"rank 0 sent {sent:,} bytes: those of its rows, and {E * (P - 1) // P} counts")
if rank == 0:
    show(figures.plot_exchange({"our router": 16 * h * moved_rows}, 32 * k * np.mean(N) * h * (P - 1) / P), "12_bytes")

tokens = 2 * E  # of each rank; token t goes to the experts t, t+1, ...: each expert gets 2k rows from each rank
even = (np.arange(tokens)[:, None] + np.arange(k)) % E
arrays = [random.normal(size=size) for size in ((tokens, h), (tokens, k), (tokens, h))]
comm.traffic.reset()
layer(ExpertsOverRanks(matrices, comm), E, arrays[0], even, *arrays[1:])
assert comm.traffic.bytes() == 4 * k * tokens * h * (P - 1) // P * 8 + E * (P - 1) // P * 8
say(f"with even routing {comm.traffic.bytes():,} bytes = 4 k N h (P-1)/P values of 8 bytes, and the counts")

# %% [markdown]
# In the picture (of rows alone) the ranks differ: each sends what its router and those of the others ask for.

# %% [markdown]
# ### The library's version
#
# *Deeper, 8 minutes.*

# %% [markdown]
# `more/experts/mixtral.py` has a layer on one device: `route`, `compute` (our `layer`), `run_experts` (our `run`). It
# knows no rank. `expert_parallel.py` keeps a rank's experts and replaces `run_experts` by this:

# %%
from minipar.comm import DeviceMesh
from minipar.more.experts.expert_parallel import ExpertParallel, expert_parallel

if rank == 0:
    show_source(ExpertParallel.run)


def fill(moe, matrices):
    """Give the library's experts our matrices; Hugging Face's are (out, in)."""
    for expert, (gate, up, down) in zip(moe.experts, matrices, strict=True):
        for linear, matrix in ((expert.w1, gate), (expert.w3, up), (expert.w2, down)):
            linear.weight.data[...] = matrix.T


model = Mixtral(config, dtype="float64")
moe = model.model.layers[0].block_sparse_moe
fill(moe, matrices)
mesh = DeviceMesh(comm, dp=P, ep=P)
expert_parallel(model, mesh.ep, mesh.edp)
inputs = Tensor(x[own], requires_grad=True)
by = Tensor(weights[own], requires_grad=True)
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
# another $P$, and every ZeRO stage. The axis ep is not a new dim of the mesh: it is folded from dp and cp, dp x cp =
# edp x ep, and `edp` are the ranks that hold the same experts. tp cuts each expert like any MLP. (In Megatron-LM
# experts may also stay whole, or be cut over fewer ranks than all of tp, each of which routes its own tokens:
# *parallel folding*, Liu et al. 2025, arXiv 2504.14960.) Here a Mixtral trains with each $P$ that divides our ranks,
# with clipping, without ZeRO and with stage 3, against one device:

# %%
from dataclasses import replace

from minipar.train.data import load_tokens
from minipar.train.flags import parse
from minipar.train.trainer import Trainer
from minipar.train.verify import verify

FLAGS = "--model mixtral --layers 2 --hidden 16 --heads 4 --seq-len 8 --steps 3 --dtype float64 --lr 3e-3"
text = load_tokens(None, vocab_size=256, seq_len=8)
for ep in (p for p in range(2, P + 1) if P % p == 0):
    for stage in (0, 3):
        flags = f"{FLAGS} --dp {P} --ep {ep} --zero-stage {stage} --global-batch {2 * P} --clip-grad 0.5"
        args = parse(flags.split(), P)
        args.shape = replace(args.shape, num_local_experts=E)  # on the command line a config.json says it
        trainer = Trainer(args, DeviceMesh(comm, dp=P, ep=ep), text)
        verdict = verify(trainer, list(trainer.train()))
        assert verdict.passed, verdict.line
        say(f"dp {P}, ep {ep}, ZeRO stage {stage}\n  {verdict.line}")

# %% [markdown]
# ## 12.5 What an all-to-all costs
#
# *Deeper, 6 minutes.*

# %% [markdown]
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
if P % 2 == 0:  # our ranks, as two hosts
    inside, across = comm.split_into(2, "inside")
    comm.traffic.reset()
    chunk = inside.reduce_scatter(np.ones(n), algorithm="ring")
    inside.all_gather(across.all_reduce(chunk, algorithm="ring"), algorithm="ring")
    assert comm.traffic.bytes(axis=across.axis) == 8 * n // (P // 2)  # 2 n/g (H-1)/H with g = P/2 and H = 2
    say(f"as two hosts of {P // 2}: all-reduce {n // (P // 2):,} elements between hosts, all-to-all {n // 2:,}")

# %% [markdown]
# ### Against what?
#
# *Deeper, 10 minutes.*

# %% [markdown]
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
# A microbatch rarely has more than 16,384 tokens per rank, where ep sends an eighth of what ZeRO stage 3 does. Plain dp
# sums once per step, however many microbatches there are, so with many of them it sends less than ep. It fails for
# another reason: 747 GB on each rank.
#
# How long does a layer wait for its tokens? A rank's $Nk$ rows take $6hf$ operations each in forward, and dispatch and
# combine carry $2kNh$ elements of 2 bytes. A device does $S$ operations per second, and a link carries
# $1/\beta$ bytes per second. The ratio of the two times is
#
# $$\frac{\text{messages}}{\text{products}} = \frac{2kNh \cdot 2\,\beta}{6kNhf/S} = \frac{2\,S\,\beta}{3f}:$$
#
# neither the tokens nor $k$ nor $h$ matter, only the *inner size of an expert* (and $(P-1)/P$, left out here).

# %%
S = 4e14  # as in chapters 6 and 11: an assumption, 40 % of an H100's 989 TFLOP/s
EXPECTED = {("NVLink 4", 450e9): (4, 29), ("InfiniBand NDR", 50e9): (37, 260)}
for (link, speed), expected in EXPECTED.items():
    ratios = [round(100 * 2 * S / speed / (3 * inner)) for inner in (14_336, 2048)]
    assert tuple(ratios) == expected
    say(f"{link:<14} at {speed / 1e9:>3.0f} GB/s: Mixtral's experts wait {ratios[0]} %, of 2048 columns {ratios[1]} %")

# %% [markdown]
# Mixtral's experts are large. DeepSeek-V3's (arXiv 2412.19437) have 2048 inner columns, and each token goes to 8 of
# 256: over InfiniBand the messages would take 2.6 times as long as the products. Its authors send each row to at most 4
# hosts, and overlap one microbatch's messages with another one's products (DualPipe).

# %% [markdown]
# ## 12.6 Why everybody gets it wrong
#
# *Core, 8 minutes.*
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
# Each is a trainer of the library with one method changed (`chapters/support/ch12/mistakes.py`):

# %%
from chapters.support.ch12 import mistakes

if rank == 0:
    show_source(mistakes.TimesP, mistakes.NormWithoutExperts, mistakes.RouterNotSummed, mistakes.IdleExpertsDoNotDecay)

# %% [markdown]
# We train each for 20 steps on four ranks, dp 2 and tp 2, with ep 2 and 40 experts, and look with five instruments.
# **Loss** and **norm**: does the printed curve differ from the right one's by more than 1 % in some step?
# **Compare**: does `minipar.compare`, which reads the records of two runs, find a difference in the first step? (A
# right run is needed for these three.) **Ranks**: do the ranks hold different routers? **One device**: does `--verify`
# fail?
#
# **Predict**: mark in this table what you expect. And how many of the four do the ranks show?
#
# | | loss | norm | compare | ranks | one device |
# | --- | --- | --- | --- | --- | --- |
# | 1. experts times P | ? | ? | ? | ? | ? |
# | 2. norm without experts | ? | ? | ? | ? | ? |
# | 3. router not summed | ? | ? | ? | ? | ? |
# | 4. idle experts do not decay | ? | ? | ? | ? | ? |

# %%
from chapters.support.predict import predict, reveal

predict("mistakes that the ranks show", ...)  # replace the dots by your answer

# %%
from chapters.support.share_work import shared

names = list(mistakes.MISTAKES)
runs = dict(zip(names, shared(comm, mistakes.examine, [(name,) for name in names]), strict=True))
right = runs["nothing broken"]
for name, run in runs.items():
    noticed = mistakes.curves_that_differ(run, right) | set(run["noticed"])
    say(f"{name:<29} loss {run['losses'][-1]:.3f}, norm first {run['norms'][0]:.3f}, last {run['norms'][-1]:.3f}")
    say(f"{'':<29} caught by: {', '.join(sorted(noticed)) or 'nothing'}")
    if run["named"]:
        say(f"{'':<29} compare: {run['named']}")
    assert noticed - {"ranks"} == (set() if run is right else {"norm", "compare", "one device"})
    assert ("ranks" in noticed) == ("router" in name)
reveal("mistakes that the ranks show", sum("ranks" in run["noticed"] for run in runs.values()), say)
if rank == 0:
    show(figures.plot_mistakes(runs), "12_mistakes")

# %% [markdown]
# **The loss shows none of them.** AdamW divides each gradient by its own size, so a factor $P$ cancels, as the factor
# $c$ did in chapter 11. The **norm** differs in each, but look at the picture, and at the first steps: 1.472 instead of
# 1.470, or 1.469. Without a correct run beside it you would see nothing. **Ranks** against each other show only the
# third, and only because the routers of two ranks then drift apart, from the first step on. **One device** finds all
# four, and **compare** says in the first step what is wrong: a gradient that is 2 times as large in the experts, a norm
# alone, the routers, updates of experts that are missing.
#
# Why does nobody see it in the printed values? Multiply a gradient's part by 2 and its squares count four times:

# %%
first, times_p = (runs[name]["norms"][0] for name in ("nothing broken", "1. experts times P"))
share = ((times_p / first) ** 2 - 1) / 3
of_parameters = mistakes.share_of_parameters()
assert share < 0.002 and of_parameters > 0.95
say(f"experts have {of_parameters:.0%} of the parameters, and at first {share:.1%} of the squared norm")

# %% [markdown]
# Nearly all of a model's parameters may have a wrong gradient, and no printed value says so.
# [The museum](../docs/museum.md) plants three of the four in the library itself, each by one line (exhibits 26 to 28).

# %% [markdown]
# ## 12.7 Balance
#
# *Core, 10 minutes.*
#
# A router that is left alone becomes lopsided: an expert that is chosen more learns more, and the choice has no
# gradient that would stop it (12.2). On one device that costs nothing. With ep the layer is as slow as the rank with
# most rows, and its memory is that rank's. Two remedies are in use.
#
# **An auxiliary loss** (Switch Transformers). Let $f_i$ be the share of all rows that expert $i$ gets, and $\bar p_i$
# its mean probability. Add to the loss, with a small coefficient,
#
# $$E \sum_i f_i\, \bar p_i ,$$
#
# which is 1 if both are uniform. $f$ counts choices and has no derivative; it is taken as a constant. $\bar p$ has one,
# for *all* experts: it lowers the probability of those that get many rows, and so raises that of the others, also of
# experts that no token has chosen.
#
# **A bias** (Wang et al. 2024, arXiv 2408.15664; DeepSeek-V3 uses it). Each expert has a bias $b_i$, which is added to
# its probability *where the $k$ are chosen, and only there*. After each step, not by gradient descent,
#
# $$b_i \leftarrow b_i + \rho\, \operatorname{sign}(\text{mean load} - \text{load}_i).$$
#
# The results' weights have no $b$, so no second term pulls at the loss.


# %%
def balance_loss(z, chosen):
    """Return the auxiliary loss and its gradient by the logits, (N, E)."""
    N, E = z.shape
    p = np.exp(z - z.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    f = np.bincount(chosen.reshape(-1), minlength=E) / chosen.size  # (E,), a constant
    dp = E * f / N  # of each token's probabilities
    return E * (f * p.mean(axis=0)).sum(), p * (dp - (p * dp).sum(axis=1, keepdims=True))


value, dz = balance_loss(z, chosen)
step = random.normal(size=z.shape)
slope = (balance_loss(z + 1e-6 * step, chosen)[0] - balance_loss(z - 1e-6 * step, chosen)[0]) / 2e-6
assert abs(slope - (dz * step).sum()) < 1e-6 * np.abs(dz * step).sum() and dz.all()  # every expert gets some
assert abs(balance_loss(np.zeros((E, E)), (np.arange(E)[:, None] + np.arange(k)) % E)[0] - 1) < 1e-12

lopsided = random.normal(size=(512, 8)) + np.linspace(0, 2, 8)  # logits of a router that prefers the last experts
biases = np.zeros(8)
skew = np.zeros(8)


def load_of(logits, bias=0):
    return np.bincount(route(logits, 2, bias)[0].reshape(-1), minlength=8)


for _ in range(400):
    biases += 1e-3 * np.sign(512 * 2 / 8 - load_of(lopsided, biases))
    skew -= balance_loss(lopsided + skew, route(lopsided + skew, 2)[0])[1].sum(axis=0)
after = load_of(lopsided), load_of(lopsided, biases), load_of(lopsided + skew)
for name, load in zip(("left alone", "bias", "loss"), after, strict=True):
    say(f"{name:<11} rows of the experts: {load.tolist()}, most / mean {load.max() / load.mean():.2f}")
    assert (load.max() > 2 * load.mean()) if name == "left alone" else (load.max() < 1.2 * load.mean())

# %% [markdown]
# The library adds the auxiliary loss if a model's `config.json` says `output_router_logits`; `router_aux_loss_coef` is
# its coefficient. We must say over which tokens $f$ is taken. The library takes each *sample* alone, so that the loss
# does not depend on how samples are laid over ranks. (Megatron-LM takes a microbatch of a rank by default: there the
# auxiliary loss, and with it the model, changes with the layout.) A bias counts the load of the global batch, a sum of
# $E$ integers per layer over all ranks. The library has none, but on one device it is a router with one term more:

# %%
from chapters.support.ch12.balance import Router, train_balance

if rank == 0:
    show_source(Router.route_with_bias, Router.finish_step)

# %% [markdown]
# Here a Mixtral of 2 layers with 8 experts learns Python's text for 200 steps, on one device (a character is a token,
# and some, as the space, are frequent). We look at its last layer; *idle* are experts with less than 1 % of the rows.
#
# **Predict**: a router is left alone. How many times the mean load has its busiest expert at the end? And which of the
# three runs has the lowest loss: "left alone", "auxiliary loss" or "bias"?

# %%
predict("most / mean of the router that is left alone", ...)
predict("the lowest loss", ...)

# %%
REMEDIES = {"left alone": (0.0, 0.0), "auxiliary loss": (0.02, 0.0), "bias": (0.0, 0.003)}  # coefficient, rate
trained = dict(zip(REMEDIES, shared(comm, train_balance, list(REMEDIES.values())), strict=True))
loads = {name: np.array(counts) for name, (_, counts) in trained.items()}  # (steps, E)
most = {name: (load.max(axis=1) / load.mean(axis=1))[-20:].mean() for name, load in loads.items()}
idle = {name: int((load[-20:].sum(axis=0) < 0.01 * load[-20:].sum()).sum()) for name, load in loads.items()}
for name, (losses, _) in trained.items():
    say(f"{name:<18} last 20 steps: loss {np.mean(losses[-20:]):.3f}, most / mean {most[name]:.2f}, idle {idle[name]}")
reveal("most / mean of the router that is left alone", float(most["left alone"]), say)
reveal("the lowest loss", min(trained, key=lambda name: np.mean(trained[name][0][-20:])), say)
assert most["left alone"] > 3.5 and max(most["auxiliary loss"], most["bias"]) < 2.2
if rank == 0:
    show(figures.plot_balance(loads), "12_balance")

# %% [markdown]
# Left alone, one expert of the last layer gets every token. A token has $k = 2$ rows, so this expert has half of the
# rows: $E/k = 4$ times the mean, the most that is possible. A second and a third expert share most of the other half,
# and three of eight are idle. They learn nothing. On 8 ranks with one expert each the layer would take four times as
# long as it should. Both remedies hold most / mean below 2.
#
# The loss is *lowest* for the lopsided one. After 200 steps of a tiny model a few experts are
# enough, and each of them has seen more tokens than eight balanced ones have. The auxiliary loss costs more than the
# bias, because it moves the router against the loss. A large model, trained for long, needs the experts that
# this one leaves idle.

# %% [markdown]
# ## 12.8 Capacity, or dropping tokens
#
# *Deeper, 12 minutes.*

# %% [markdown]
# The first systems (GShard, Switch, DeepSpeed-MoE) wanted arrays of fixed sizes. Each expert takes at most
#
# $$C = \Big\lceil F\, \frac{Nk}{E} \Big\rceil$$
#
# rows of a rank's $N$ tokens, with a *capacity factor* $F$. First choices come first, then second ones, each in the
# order of the tokens. A row beyond $C$ is *dropped*: its result counts as zero, and if all of a token's rows are
# dropped, only the residual connection carries it on. What is missing to $C$ is *padded*.


# %%
def kept(chosen, C):
    """Return which of the rows, (N, k), get one of the C places at their expert."""
    expert = chosen.T.reshape(-1)  # choice by choice, and then token by token
    order = np.argsort(expert, kind="stable")
    by_expert = expert[order]
    result = np.empty(expert.size, bool)
    result[order] = np.arange(expert.size) - np.searchsorted(by_expert, by_expert) < C  # its number at its expert
    return result.reshape(chosen.shape[::-1]).T


def dropped(load, F):
    """Return which share of the rows is beyond the capacity, of all steps of a run."""
    return np.maximum(load - F * load.mean(axis=1, keepdims=True), 0).sum() / load.sum()


for F in (1.0, 1.25, 2.0, 4.0):
    C = int(np.ceil(F * len(x) * k / E))
    stays = kept(chosen, C)
    rows = np.bincount(chosen.reshape(-1), minlength=E)
    assert (np.bincount(chosen[stays], minlength=E) == np.minimum(rows, C)).all()
    places = np.full(E, C)
    for choice in range(k):
        for token, expert in enumerate(chosen[:, choice]):
            assert stays[token, choice] == (places[expert] > 0)
            places[expert] -= 1
    of_runs = ", ".join(f"{name} {dropped(load[-20:], F):.0%}" for name, load in loads.items())
    say(f"F = {F:<4} drops {1 - stays.mean():.0%} of our rows; of 12.7's: {of_runs}")
assert dropped(loads["left alone"][-20:], 1.25) > 0.5 > 0.2 > dropped(loads["bias"][-20:], 1.25)
if rank == 0:
    factors = np.linspace(1, 4, 25)
    shares = {name: [100 * dropped(load[-20:], F) for F in factors] for name, load in loads.items()}
    C = int(np.ceil(1.25 * len(x) * k / E))
    show(figures.plot_capacity(np.bincount(chosen.reshape(-1), minlength=E), C, factors, shares), "12_capacity")

# %% [markdown]
# On the left are our router's rows with $F = 1.25$: what is above the line is dropped, what is missing is padded.
#
# With a capacity every rank sends $C$ rows for each expert, used or not: $4 E C h (P-1)/P$ elements per layer and step,
# which is $F$ times the even $4kNh(P-1)/P$, and no counts. Time and memory are known beforehand and never worse. The
# price is computed rows that nobody needs, and results that are missing. $F = 1.25$ is common, and drops half of
# the rows of the router that was left alone. So capacity needs balance even more than ep does.
#
# And it costs what this course is built on. Which row is dropped depends on which tokens stand *together* on a rank:

# %%
whole = kept(chosen, int(np.ceil(len(x) * k / E)))
halves = [kept(part, int(np.ceil(len(part) * k / E))) for part in np.array_split(chosen, 2)]
changed = int((whole != np.concatenate(halves)).sum())
say(f"all tokens on one rank, or half on each of two: {changed} of {whole.size} rows are dropped in one case only")
assert changed

# %% [markdown]
# So the number of ranks, and of microbatches, becomes part of the model, as batch statistics once were: that many ranks
# equal one device cannot be proved, because it is not so. Dropless layers (MegaBlocks, Mixtral, and ours so far) have
# none of this: they compute what was asked, and pay with sizes that only the router knows.

# %% [markdown]
# ## 12.9 The planner's answer
#
# *Deeper, 5 minutes.*

# %% [markdown]
# The planner of chapter 10 knows the axis: a rank's memory with $E/P$ experts, the bytes of 12.4 (with even routing all
# of them waited for), and the products in pieces of $1/E$ of the rows. Mixtral 8x7B on 64 H100, 8 to a host, with 1024
# samples of 4096 tokens in a step. We ask for the best layout, and for the best without ep, and without anything but
# ZeRO:

# %%
from chapters.support.ch12.plan import plan_mixtral

if rank == 0:
    show_source(plan_mixtral)
    asked = {"anything": {}, "no ep": {"ep": 1}, "no ep, tp, pp": {"ep": 1, "tp": 1, "pp": 1}}
    best = {name: plan_mixtral(**fixed) for name, fixed in asked.items()}
    for name, p in best.items():
        say(f"{name:<14} {p.layout}: {p.memory.total / 1e9:.0f} GB, {p.time.total:.1f} s, ep {p.time.ep:.2f} s of it")
    assert [(p.layout.ep, p.layout.tp, p.layout.pp) for p in best.values()] == [(8, 1, 2), (1, 2, 4), (1, 1, 1)]
    totals = [p.time.total for p in best.values()]
    assert [round(total / totals[0], 2) for total in totals] == [1, 1.05, 1.27]
    assert round(best["anything"].time.ep / totals[0], 2) == 0.03
    rows = 4 * 2 * 1024 * 4096 // 32 * 4096 * 7 // 8 * 2  # bytes per layer
    counts = 7 * 8 * 32  # bytes per layer, in 32 microbatches
    assert best["anything"].volume.ep == 16 * (rows + counts)
comm.barrier()

# %% [markdown]
# The best layout has ep 8, which fills a host exactly, and needs two stages of a pipeline. Its all-to-alls take 3 % of
# the step, nearly the share that 12.5 found for NVLink. In a step each rank sends 120 GB in these all-to-alls:
# $4kNh(P-1)/P$ values of 2 bytes, for the 16 layers of its stage and its 131,072 tokens. Without ep the experts must be
# divided by tp 2 and pp 4: 5 % slower. With ZeRO alone, 64 ranks gather all experts for each microbatch and recompute
# every forward: 27 % slower. The same from the command line, with all assumptions:
#
#     python -m minipar.plan --model mixtral-8x7b --gpus 64 --gpu h100 --global-batch 1024 --seq-len 4096 \
#         --precision bf16 --attention flash

# %% [markdown]
# ## 12.10 Names elsewhere
#
# *Deeper, 2 minutes.*

# %% [markdown]
# | minipar | Megatron-LM | DeepSpeed-MoE | PyTorch, torchtitan |
# | --- | --- | --- | --- |
# | `num_local_experts` | `--num-experts` | `num_experts` | `num_experts` |
# | `num_experts_per_tok` | `--moe-router-topk` | `k` | `top_k` |
# | `--ep P` | `--expert-model-parallel-size` | `ep_size` | `expert_parallel_degree`, mesh dim `ep` |
# | `--tp T`, of experts | `--expert-tensor-parallel-size` | `enable_expert_tensor_parallelism` | a degree of its own |
# | `edp`, ranks with the same experts | expert data parallel group | expert data parallel group | mesh dim `efsdp` |
# | `MoE.route` | `TopKRouter` | `TopKGate` | `TokenChoiceTopKRouter` |
# | dispatch, combine | token dispatcher `alltoall` | `_AllToAll` | `all_to_all_single` with splits |
# | one product per expert | `--moe-grouped-gemm` | loop over `Experts` | `torch._grouped_mm` |
#
# DeepSpeed-MoE (Rajbhandari et al. 2022, arXiv 2201.05596) and GShard (Lepikhin et al. 2020, arXiv 2006.16668) send
# padded arrays of a fixed capacity.
#
# The same in PyTorch: [chapters/pytorch/ch12.py](pytorch/ch12.py).

# %%
if rank == 0:
    show_file("chapters/pytorch/ch12.py")

# %% [markdown]
# ## 12.11 Problems
#
# *Deeper, 30 minutes.*

# %% [markdown]
# 1. Mixtral 8x22B has $h = 6144$, $f = 16\,384$, 56 layers, 8 experts of which 2 are used, $h_{kv} = 1024$ and $V =
# 32\,768$. How many parameters has it, and how many does a token use?
#
# 2. What does Mixtral's router learn from the loss if $k = 1$? Switch Transformers (arXiv 2101.03961) have $k = 1$ and
# learn: what must be different?
#
# 3. 64 ranks on 8 hosts, dp 64, ep 8 and $E = 8$. Over which ranks is a norm's gradient summed, over which ranks an
# expert's? Which of these sums, and of the all-to-alls, cross hosts if the ranks of ep are one host? And if they are
# spread over 8 hosts, one on each?
#
# 4. All $Nk$ rows of all $P$ ranks go to experts of rank 0. What does rank 0 send per layer, what does another rank
# send, and how long do the products take compared with even routing?
#
# 5. A framework takes the mean of every gradient over the ranks of its own group: $dc$ ranks for most parameters,
# $dc/P$ for experts. Each rank divides its loss by its own tokens, as many on each. What factor has each gradient? What
# is the remedy?
#
# 6. Two microbatches of $N$ tokens, or one of $2N$: which of ep, ZeRO stage 3 and plain dp sends as much in both cases?

# %% [markdown]
# ## 12.12 Answers
#
# *Deeper, 10 minutes.*

# %% [markdown]
# <details><summary>Answers</summary>
#
# 1. A layer has $h(2h + 2h_{kv}) = 88.1$ million in attention and $3hf = 302$ million in each expert. In all 140.6
# billion, and 39.2 billion per token.
#
# 2. Nothing: the only weight is $p/p = 1$, whose derivative is 0. Switch multiplies with $p$ itself.
#
# 3. A norm's over all 64, which always crosses hosts; an expert's over the 8 that hold the same one. If ep is one host,
# those 8 are one on each host: their sum crosses hosts, and the all-to-alls do not. If ep is spread it is the other way
# round. The all-to-alls are needed in each layer and cannot hide, so they get the fast links.
#
# 4. In forward rank 0 sends nothing in dispatch and $(P-1)Nkh$ elements in combine, another rank $Nkh$ and nothing.
# With backward, $2(P-1)Nkh$ and $2Nkh$. Rank 0 has all products, which take $P$ times as long, and the others wait.
#
# 5. Each rank's loss is $dc$ times its share of the global mean. Most gradients are summed over $dc$ ranks and divided
# by $dc$: factor 1. An expert's covers the tokens of all $dc$ ranks after the sum over $dc/P$, and is divided by
# $dc/P$: factor $P$. Divide by $dc$, or divide the loss by the global count of tokens and sum, as minipar does.
#
# 6. ep and plain dp: ep's bytes are proportional to the tokens, and plain dp sums once per step. ZeRO stage 3 gathers
# for each microbatch.
#
# </details>

# %% tags=["hide-input"]
large = [
    56 * (6144 * 2 * (6144 + 1024) + experts * 3 * 6144 * 16_384 + 6144 * 8 + 2 * 6144) + (2 * 32_768 + 1) * 6144
    for experts in (8, 2)
]
assert [round(parameters / 1e9, 1) for parameters in large] == [140.6, 39.2]
assert (round(6144 * 2 * (6144 + 1024) / 1e6, 1), round(3 * 6144 * 16_384 / 1e6)) == (88.1, 302)
assert not route_backward(z, *route(z, 1), dweights[:, :1]).any()
say("the answers hold")

# %% tags=["active-ipynb"]
# %autopx

# %% tags=["active-ipynb"]
# # Back in one process: stop the eight.
# cluster.stop_cluster_sync()
