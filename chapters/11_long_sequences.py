# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 11. Long sequences
#
# **How does a model attend to more tokens than one device can hold?**
#
# Attention compares each token with each token before it. For 131,072 tokens and 32 heads the table of these scores has
# 1.1 TB per layer in 16 bit, while the layer's keys and values have 2 GB ($h = 4096$). The first half of this chapter
# computes exact attention without ever storing the table, on one device. The second half cuts the sequence over $c$
# devices (*context parallelism*), so that keys and values travel around a ring. Cut in the natural order, 8 devices are
# at work for 53 % of the time; another order of the same tokens makes it 100 %. At the end you can write both halves
# with their backward passes, and say from how many tokens per device on the messages cost no time.

# %% tags=["active-ipynb", "setup"]
# from chapters.support.notebook import start
#
# cluster = start(8)

# %% tags=["setup"]
import numpy as np

from chapters.support.show import printer
from minipar.comm import world

comm = world()
rank, c = comm.rank, comm.size  # this rank, and the number of ranks
say = printer(rank)  # rank 0 prints and draws; every rank checks
say(f"{c} rank{'s' if c > 1 else ''}")
if rank == 0:
    from chapters.support.ch11 import animate_ring, figures
    from chapters.support.overview import draw_strategies
    from chapters.support.show import show, show_file, show_source

# %%
if rank == 0:
    show(figures.plot_mask(8), "11_mask")

# %% [markdown]
# This is the table of scores of one head, cut into blocks. A row is a query, a column a key, and a query sees the keys
# of its own token and of those before it. So there are three kinds of blocks. *Skipped* blocks lie right of the
# diagonal: all of their keys come after all of their queries, and nobody computes them. *Full* blocks need no mask.
# Only the blocks on the *diagonal* do. Of the 64 blocks here, 36 are computed.
#
# Both halves of the chapter go through such blocks: one device takes them one after another, and context parallelism
# gives each device some rows of blocks. Among the strategies of this course it stands here:

# %%
if rank == 0:
    show(draw_strategies(["cp"]), "11_here")

# %% [markdown]
# ## 11.1 The online softmax
#
# *Core, 9 minutes.*
#
# A token has $h$ elements in $a$ heads. In one head a query $q_i$ has the scores $s_{ij} = q_i \cdot k_j / \sqrt{h/a}$
# with the keys $j \le i$. Its output is the mean of the values, weighted by the softmax of the scores:
#
# $$o_i = \frac{\sum_j e^{s_{ij}}\, v_j}{\sum_j e^{s_{ij}}}.$$
#
# For $B$ samples of $T$ tokens the scores of a layer are $B a T^2$ values. Must this table exist? The formula needs all
# scores of a row, and for stability their maximum, which is known only at the end.
#
# **[Exercise 14](exercises/e14_online_softmax.py)** asks for attention over keys that come in blocks, one after the
# other: `make exercises PYTEST="-k e14"`. Try it first, or after this section: its blocks have masks of every kind.
#
# Split the keys of a row into two parts. Each part alone has an output, and the logarithm of its denominator, its
# *log-sum-exp*:
#
# $$\lambda_1 = \log \sum_{j \in 1} e^{s_j}, \qquad o_1 = \frac{\sum_{j \in 1} e^{s_j} v_j}{e^{\lambda_1}}.$$
#
# The denominators add, and so do the numerators $e^{\lambda_1} o_1$ and $e^{\lambda_2} o_2$. So both parts together
# have
#
# $$\lambda = \log\big(e^{\lambda_1} + e^{\lambda_2}\big), \qquad
# o = e^{\lambda_1 - \lambda}\, o_1 + e^{\lambda_2 - \lambda}\, o_2 .$$
#
# Nothing else is needed of a part: whatever its length, it is summed up in one output and one value per row. Both
# exponents are at most 0, so nothing overflows. Going through the keys part by part while keeping only $(o, \lambda)$
# is the *online softmax* (Milakov and Gimelshein 2018). An empty part has $\lambda = -\infty$ and $o = 0$. (Two
# empty parts need care: $-\infty - (-\infty)$ is no number. Here every row sees a key in its first part.) In code:


# %%
from chapters.support.whole_runs import relative_difference


def scores_of(q, k, diagonal):
    """Return the scores of a block. On the diagonal, where queries and keys are the same tokens, the mask applies."""
    scores = q @ k.swapaxes(-1, -2) * q.shape[-1] ** -0.5  # (..., rows, columns)
    return np.where(np.tri(scores.shape[-1], dtype=bool), scores, -np.inf) if diagonal else scores


def attend(q, k, v, diagonal=False):
    """Return the output and the log-sum-exp of a block of queries over a block of keys."""
    scores = scores_of(q, k, diagonal)
    top = scores.max(axis=-1, keepdims=True)
    p = np.exp(scores - top)
    total = p.sum(axis=-1, keepdims=True)
    return p @ v / total, top + np.log(total)  # (..., rows, h/a), (..., rows, 1)


def nothing_seen(q):
    """Return the output and the log-sum-exp over no keys."""
    return np.zeros_like(q), np.full((*q.shape[:-1], 1), -np.inf, q.dtype)


def merge(out, lse, out_new, lse_new):
    """Return the output and the log-sum-exp over the keys of both."""
    both = np.logaddexp(lse, lse_new)
    return np.exp(lse - both) * out + np.exp(lse_new - both) * out_new, both


assert round(32 * 131_072**2 * 2 / 1e12, 1) == 1.1 and round(2 * 4096 * 131_072 * 2 / 1e9) == 2  # TB and GB, above
random = np.random.default_rng(0)
q, k, v = random.normal(size=(3, 96, 16))
for strength in (1, 300):  # at 300 the largest score is over 710, where e^s overflows
    scores = scores_of(strength * q, k, False)
    assert (scores.max() > 710) == (strength > 1)
    p = np.exp(scores - scores.max(axis=1, keepdims=True))
    softmax = p / p.sum(axis=1, keepdims=True)
    for cuts in ([48], [1, 2, 90], range(1, 96)):  # two halves; unequal parts; one key at a time
        out, lse = nothing_seen(q)
        for columns in np.split(random.permutation(96), cuts):  # in any order
            out, lse = merge(out, lse, *attend(strength * q, k[columns], v[columns]))
        assert relative_difference(out, softmax @ v) < 1e-12
        assert relative_difference(np.exp(scores - lse), softmax) < 1e-12
say("merged from 2, 4 and 96 parts, in any order: the softmax over all keys, to 1e-12")

# %% [markdown]
# The last assertion is worth a second look. With the *final* $\lambda$ each probability is one exponential,
# $p_{ij} = e^{s_{ij} - \lambda_i}$. Backward will use that.

# %% [markdown]
# ### The kernels' form
#
# *Deeper, 4 minutes.*

# %% [markdown]
# Papers and kernels keep three quantities in the place of $(o, \lambda)$: the running maximum $\mu$, the running sum
# $\ell = \sum_j e^{s_j - \mu}$, and the *unnormalized* output $\tilde o = \sum_j e^{s_j - \mu} v_j$. A new block may
# have a larger maximum $\mu'$. Then the old sum and the old output were taken with the wrong maximum, and both are
# corrected by the same factor $e^{\mu - \mu'}$, before the block's terms are added:
#
# $$\ell' = e^{\mu - \mu'} \ell + \sum_{j \in \text{block}} e^{s_j - \mu'}, \qquad
# \tilde o' = e^{\mu - \mu'} \tilde o + \sum_{j \in \text{block}} e^{s_j - \mu'} v_j .$$
#
# At the end, once, $o = \tilde o / \ell$ and $\lambda = \mu + \log \ell$. That saves the divisions of every block.


# %%
def attend_running(q, k, v, blocks):
    """Return output and log-sum-exp of one head, and (maximum, sum, unnormalized output) after each block."""
    top = np.full((len(q), 1), -np.inf)
    total = np.zeros((len(q), 1))
    unnormalized = np.zeros_like(q)
    states = []
    for columns in blocks:
        scores = scores_of(q, k[columns], False)
        new_top = np.maximum(top, scores.max(axis=1, keepdims=True))
        correction = np.exp(top - new_top)  # at most 1; 0 for the first block
        p = np.exp(scores - new_top)
        total = correction * total + p.sum(axis=1, keepdims=True)
        unnormalized = correction * unnormalized + p @ v[columns]
        top = new_top
        states.append((top, total, unnormalized))
    return unnormalized / total, top + np.log(total), states


blocks = np.split(np.arange(96), 8)
running, running_lse, states = attend_running(3 * q, k, v, blocks)
out, lse = attend(3 * q, k, v)
assert relative_difference(running, out) < 1e-12 and relative_difference(running_lse, lse) < 1e-12
say("maximum, sum and unnormalized output, over 8 blocks = output and log-sum-exp of all keys")
if rank == 0:
    row = int((states[4][0] - states[3][0]).argmax())  # the query whose maximum the fifth block raises most
    history = [[float(array[row, 0]) for array in state] for state in states]
    show(figures.plot_running(history, float(out[row, 0]), float(lse[row, 0])), "11_running")

# %% [markdown]
# The picture follows one query, and one element of its output. The fifth block raises the maximum (left), so the sum
# and the unnormalized output of the first four are scaled down (middle). What both forms agree on, $\lambda$ and
# $\tilde o / \ell$ (left and right), ends at the value of all keys. This chapter keeps $(o, \lambda)$: it is easier to
# send.

# %% [markdown]
# ## 11.2 Forward in blocks
#
# *Core, 5 minutes.*
#
# Now take the blocks of the first picture. Heads are leading dims: $q$ is $(a_{kv}, a/a_{kv}, T, h/a)$, and $k$ and $v$
# are $(a_{kv}, 1, T, h/a)$. In *grouped-query attention* there are $a_{kv}$ heads of keys and values: $a/a_{kv}$ heads
# of queries share one head of keys and values, and NumPy's broadcasting shares it. `full` and `full_backward` are the
# version with the whole table (`chapters/support/ch11/whole_table.py`), to compare with.


# %%
from chapters.support.ch11.whole_table import full, full_backward, measure_memory_and_time


def blockwise(q, k, v, b):
    """Return output and log-sum-exp of causal attention, in blocks of b tokens."""
    out, lse = nothing_seen(q)
    for i in range(0, q.shape[-2], b):
        rows = np.s_[..., i : i + b, :]
        for j in range(0, i + 1, b):  # the blocks right of the diagonal are skipped
            columns = np.s_[..., j : j + b, :]
            part = attend(q[rows], k[columns], v[columns], i == j)
            out[rows], lse[rows] = merge(out[rows], lse[rows], *part)
    return out, lse


a_kv = c * -(-2 // c)  # the smallest multiple of c from 2 on
a = 2 * a_kv  # heads of queries
chunk, width = 6, 4  # tokens of a chunk (11.5); h/a, the elements of a head
T = 2 * c * chunk
h = a * width
h_kv = a_kv * width
q, dout = random.normal(size=(2, a_kv, a // a_kv, T, width))
k, v = random.normal(size=(2, a_kv, 1, T, width))
whole, p = full(q, k, v)
for b in (1, chunk, 5, T):  # also where b does not divide T
    out, lse = blockwise(q, k, v, b)
    assert relative_difference(out, whole) < 1e-12
say(f"T = {T}, {a} heads of queries, {a_kv} of keys: in blocks of 1, 5, {chunk} and {T} tokens = the whole table")

# %% [markdown]
# ## 11.3 Backward from the log-sum-exp
#
# *Core, 7 minutes.*
#
# Let $\mathrm{d}x$ be the gradient of the loss with respect to $x$. From $o_i = \sum_j p_{ij} v_j$ follow
#
# $$\mathrm{d}v_j = \sum_i p_{ij}\, \mathrm{d}o_i, \qquad \mathrm{d}p_{ij} = \mathrm{d}o_i \cdot v_j, \qquad
# \mathrm{d}s_{ij} = p_{ij} \Big(\mathrm{d}p_{ij} - \sum_l p_{il}\, \mathrm{d}p_{il}\Big).$$
#
# The last is the derivative of the softmax. Two things in it seem to need the whole table, and neither does:
#
# - $p_{ij} = e^{s_{ij} - \lambda_i}$: a block computes its scores again, and $\lambda$ was kept.
#
# - The sum over $l$ runs over the whole row. But it is $\sum_l p_{il}\, \mathrm{d}o_i \cdot v_l = \mathrm{d}o_i \cdot
# o_i$: one dot product with the output, which was kept.
#
# So backward needs $q, k, v, o$ and $\lambda$, and goes through the blocks in any order (Dao et al. 2022,
# arXiv 2205.14135: FlashAttention). It has five products per block where forward has two: the scores once more,
# $\mathrm{d}p$, $\mathrm{d}v$, $\mathrm{d}q$ and $\mathrm{d}k$.


# %%
def attend_backward(q, k, v, lse, delta, dout, diagonal=False):
    """Return a block's terms of the gradients of q, k and v. delta: (..., rows, 1) is the sum of dout * out."""
    p = np.exp(scores_of(q, k, diagonal) - lse)  # (..., rows, columns), of the softmax over all keys
    ds = p * (dout @ v.swapaxes(-1, -2) - delta) * q.shape[-1] ** -0.5
    dk = ds.swapaxes(-1, -2) @ q  # (a_kv, a/a_kv, columns, h/a)
    dv = p.swapaxes(-1, -2) @ dout
    return ds @ k, dk.sum(axis=-3, keepdims=True), dv.sum(axis=-3, keepdims=True)  # k and v serve a/a_kv heads


def blockwise_backward(q, k, v, out, lse, dout, b):
    """Return the gradients of q, k and v."""
    gradients = [np.zeros_like(x) for x in (q, k, v)]
    delta = (dout * out).sum(axis=-1, keepdims=True)
    for i in range(0, q.shape[-2], b):
        rows = np.s_[..., i : i + b, :]
        for j in range(0, i + 1, b):
            columns = np.s_[..., j : j + b, :]
            parts = attend_backward(q[rows], k[columns], v[columns], lse[rows], delta[rows], dout[rows], i == j)
            for gradient, place, part in zip(gradients, (rows, columns, columns), parts, strict=True):
                gradient[place] += part
    return gradients


one_device = full_backward(q, k, v, p, dout)
for b in (1, chunk, 5, T):
    out, lse = blockwise(q, k, v, b)
    for part, alone in zip(blockwise_backward(q, k, v, out, lse, dout, b), one_device, strict=True):
        assert relative_difference(part, alone) < 1e-12
say("gradients of q, k and v from blocks = those from the whole table")

# %% [markdown]
# ## 11.4 On the scales
#
# *Deeper, 4 minutes.*

# %% [markdown]
# Both versions, forward and backward, in float32 with four heads of 64 elements and blocks of 128 tokens: the peak of
# the memory (`tracemalloc` sees NumPy's arrays), and the processor's time.

# %%
LENGTHS = (256, 512, 1024, 2048)
if rank == 0:
    costs = {"whole table": [], "blocks of 128": []}
    for length in LENGTHS:
        costs["whole table"].append(measure_memory_and_time(length, full, full_backward))
        measured = measure_memory_and_time(length, blockwise, blockwise_backward, b=128, keeps_output=True)
        costs["blocks of 128"].append(measured)
    for name, rows in costs.items():
        for length, (peak, seconds) in zip(LENGTHS, rows, strict=True):
            say(f"{name:<14} T = {length:>4}: peak {peak / 2**20:>6.1f} MiB, {seconds * 1e3:>6.0f} ms")
    (whole_before, _), (whole_after, _) = costs["whole table"][-2:]
    (blocks_before, _), (blocks_after, _) = costs["blocks of 128"][-2:]
    assert whole_after / whole_before > 3.8 and blocks_after / blocks_before < 2.0  # T doubles
    show(figures.plot_costs(LENGTHS, costs), "11_costs")
comm.barrier()

# %% [markdown]
# When $T$ doubles, the whole table takes four times the memory. The blocks take less than twice as much: arrays of $T$
# rows, plus a few blocks that do not depend on $T$. The time of both grows as $T^2$ in the end, because the products
# do: blockwise attention saves memory, and half of the products (the skipped blocks), but it is no cheaper kind of
# attention. On a GPU it is also faster, for another reason: a block stays in the fast memory next to the arithmetic
# units, and the table never travels through main memory.

# %% [markdown]
# ## 11.5 Tokens over ranks: the ring
#
# *Core, 14 minutes.*
#
# Now cut the sequence itself. Each of $c$ ranks holds all parameters, and $T/c$ tokens of *every* sample. Embedding,
# norms, MLP, residual stream and loss work on each token alone: a rank does them for its own tokens, and all of their
# memory is divided by $c$. Attention alone needs other tokens, and of those only keys and values.
#
# So queries stay, and keys and values travel. They go around a ring (Liu et al. 2023, arXiv 2310.01889: Ring
# Attention). In each of $c$ steps a rank attends with its own queries to the keys and values that it has at the moment,
# merges the result by 11.1, and meanwhile passes them to its right and receives the next ones from its left. After
# $c - 1$ passes every query has met every key.
#
# In **backward** the keys and values go around once more. Their gradients are sums over all queries, hence over all
# ranks: $\mathrm{d}k$ and $\mathrm{d}v$ travel with them, and each rank adds its terms. After $c-1$ hops the gradients
# of a rank's keys are complete, but they lie on its left neighbour. One more hop, the $c$-th, brings them home. (In the
# picture K and V are all keys and values of a rank, and colours are their owners.)

# %%
if rank == 0:
    show(figures.plot_ring(4), "11_ring")

# %% [markdown]
# First the simplest ring: one head, and rank $r$ holds the tokens $rT/c$ to $(r+1)T/c - 1$. All keys of a later rank
# come after this rank's queries, so they are skipped; those of an earlier rank are a full block:


# %%
def start_pass(comm, array):
    """Start to send an array to the right, and to receive the left neighbour's."""
    right = (comm.rank + 1) % comm.size
    left = (comm.rank - 1) % comm.size
    return comm.isend(array, right), comm.irecv(np.empty_like(array), left)


def finish_pass(messages):
    sending, receiving = messages
    sending.wait()  # before that, the array must not change
    return receiving.wait()


def simple_ring(comm, q, kv):
    """Return output and log-sum-exp of one head: q (T/c, h/a), keys and values kv (2, T/c, h/a)."""
    out, lse = nothing_seen(q)
    for step in range(comm.size):
        messages = start_pass(comm, kv) if step < comm.size - 1 else None  # under way while we compute
        owner = (comm.rank - step) % comm.size  # whose keys and values are here
        if owner <= comm.rank:
            out, lse = merge(out, lse, *attend(q, *kv, diagonal=owner == comm.rank))
        kv = finish_pass(messages) if messages else kv
    return out, lse


own = slice(rank * T // c, (rank + 1) * T // c)
out, lse = simple_ring(comm, q[0, 0, own], np.stack([k[0, 0, own], v[0, 0, own]]))
assert relative_difference(out, whole[0, 0, own]) < 1e-12
say(f"a ring of one head over {c} ranks = one device")

# %% [markdown]
# Here it runs on four threads, whose messages are recorded. A row of the table has the scores of one rank's queries:
#
# ![Ring attention on four ranks](../visualize/gallery/ring_attention.gif)
#
# The same for print. `record_both` checks that the library's ring does the same:

# %%
if rank == 0:
    show(animate_ring.still(animate_ring.record_both(simple_ring)), "11_ring_steps")

# %% [markdown]
# That is ring attention. Two things make the general version longer: it has all heads, and it can give the tokens to
# the ranks in two orders. For a reason that 11.6 shows, we cut the sequence into $2c$ chunks and give each rank two of
# them. *Contiguous* order gives rank $r$ the chunks $2r$ and $2r+1$; *zig-zag* order gives it $r$ and $2c-1-r$. A pair
# of a query's chunk $i$ and a key's chunk $j$ is skipped if $j > i$, full if $j < i$, and on the diagonal if
# $j = i$. Arrays of chunks have one dim more in front: $q$ is $(2, a_{kv}, a/a_{kv}, T/2c, h/a)$, and $k$ and $v$
# together are one array `kv` of $(2, 2, a_{kv}, 1, T/2c, h/a)$, so that one message carries both.


# %%
def held(r, c, order):
    """Return the two chunks that rank r holds."""
    return (r, 2 * c - 1 - r) if order == "zigzag" else (2 * r, 2 * r + 1)


def cut(x, r, c, order):
    """Return rank r's chunks of x: (..., T, h/a) -> (2, ..., T/2c, h/a)."""
    return np.stack([np.split(x, 2 * c, axis=-2)[i] for i in held(r, c, order)])


def pairs(r, owner, c, order):
    """Yield (place of r's queries, place of owner's keys, are they on the diagonal) for each pair not skipped."""
    for x, i in enumerate(held(r, c, order)):
        for y, j in enumerate(held(owner, c, order)):
            if j <= i:
                yield x, y, i == j


def ring_forward(comm, q, kv, order):
    """Return this rank's output and log-sum-exp."""
    r, c = comm.rank, comm.size
    out, lse = nothing_seen(q)
    for step in range(c):
        messages = start_pass(comm, kv) if step < c - 1 else None  # under way while we compute
        for x, y, diagonal in pairs(r, (r - step) % c, c, order):
            out[x], lse[x] = merge(out[x], lse[x], *attend(q[x], *kv[:, y], diagonal))  # kv[:, y]: k and v of chunk y
        kv = finish_pass(messages) if messages else kv
    return out, lse


# %% [markdown]
# Backward has the same loop, and the gradients of keys and values travel with them. **[Exercise
# 15](exercises/e15_ring_backward.py)** asks for it. Write it before you open the next cell:
# `make exercises PYTEST="-k e15"`.


# %% tags=["hide-input"]
def ring_backward(comm, q, kv, out, lse, dout, order, short=False):
    """Return this rank's gradients of q and of kv. (`short` is a mistake, for 11.9.)"""
    r, c = comm.rank, comm.size
    delta = (dout * out).sum(axis=-1, keepdims=True)
    dq = np.zeros_like(q)
    dkv = np.zeros_like(kv)
    for step in range(c):
        messages = start_pass(comm, kv) if step < c - 1 else None
        for x, y, diagonal in pairs(r, (r - step) % c, c, order):
            terms = attend_backward(q[x], *kv[:, y], lse[x], delta[x], dout[x], diagonal)
            dq[x] += terms[0]
            dkv[:, y] += terms[1:]
        kv = finish_pass(messages) if messages else kv
        if c > 1 and not (short and step == c - 1):
            dkv = finish_pass(start_pass(comm, dkv))  # to the rank where its keys are next; the last hop goes home
    return dq, dkv


for order in ("contiguous", "zigzag"):
    own_q, own_dout = (cut(x, rank, c, order) for x in (q, dout))
    own_kv = np.stack([cut(x, rank, c, order) for x in (k, v)])
    comm.traffic.reset()
    out, lse = ring_forward(comm, own_q, own_kv, order)
    dq, dkv = ring_backward(comm, own_q, own_kv, out, lse, own_dout, order)
    sent = comm.traffic.bytes()
    for part, alone in zip((out, dq, *dkv), (whole, *one_device), strict=True):
        assert relative_difference(part, cut(alone, rank, c, order)) < 1e-12
    say(f"{order} ring over {c} ranks = one device, with the gradients of q, k and v, to 1e-12")

# %% [markdown]
# A token's keys have $h_{kv} = h\,a_{kv}/a$ elements. Of all $N = BT$ tokens a rank has $u = N/c$. Per layer it sends
# keys and values $c-1$ times in forward and $c-1$ times in backward, and their gradients $c$ times: $2(c-1) + 2(c-1) +
# 2c$, so
#
# $$(6c - 4)\,u\,h_{kv} \text{ elements.}$$

# %%
ring_elements = (6 * c - 4) * (T // c) * h_kv if c > 1 else 0  # one rank sends nothing, not even the hop home
assert sent == ring_elements * 8
say(f"each rank sent {sent:,} bytes = (6c - 4) u h_kv values of 8 bytes")

# %% [markdown]
# ## 11.6 Half of the ranks idle, and zig-zag
#
# *Core, 7 minutes.*
#
# Both orders are right. Which is fast? Count the scores that a rank computes in each step. The ring moves in lock-step:
# who has finished waits for the keys of a neighbour who has not. So each step takes as long as its busiest rank, and
# the
#
# $$\text{efficiency} = \frac{\text{all scores}}{c \cdot \sum_{\text{steps}} \max_r (\text{scores of rank } r)} .$$
#
# For 8 ranks the first page has given it: 53 % in contiguous order. **Predict**: what is it on 2 ranks, for long
# sequences? More, or less?

# %%
from chapters.support.predict import predict, reveal

predict("efficiency of the contiguous ring on 2 ranks", ...)  # replace the dots by your answer


# %%
from fractions import Fraction


def scores_per_step(c, chunk, order):
    """Return the scores that each rank computes in each step, (steps, ranks), with chunks of so many tokens."""
    work = np.zeros((c, c), int)
    for step in range(c):
        for r in range(c):
            for _, _, diagonal in pairs(r, (r - step) % c, c, order):
                work[step, r] += chunk * (chunk + 1) // 2 if diagonal else chunk**2
    return work


def efficiency(work):
    return Fraction(int(work.sum()), work.shape[1] * int(work.max(axis=1).sum()))


for ranks in (1, 2, 3, 4, 8):
    for tokens in (1, 2, 64):
        u = 2 * tokens  # of a rank
        contiguous, zig_zag = (scores_per_step(ranks, tokens, order) for order in ("contiguous", "zigzag"))
        assert contiguous.sum() == zig_zag.sum() == np.tri(ranks * u).sum()  # the whole lower triangle
        assert efficiency(contiguous) == Fraction(ranks * u + 1, (2 * ranks - 1) * u + 1)
        assert efficiency(zig_zag) == 1 and len(set(zig_zag.sum(axis=0))) == 1
    say(f"c = {ranks}: contiguous {float(efficiency(contiguous)):.3f}, zig-zag {efficiency(zig_zag)}")
on_two = float(efficiency(scores_per_step(2, 64, "contiguous")))
reveal("efficiency of the contiguous ring on 2 ranks", round(on_two, 3), say)
if rank == 0:
    work = {order: scores_per_step(4, 64, order) for order in ("contiguous", "zigzag")}
    show(figures.plot_balance({order: [held(r, 4, order) for r in range(4)] for order in work}, work), "11_balance")

# %% [markdown]
# On the left is the table of scores, in the colours of the ranks that compute it. In **contiguous** order rank 0 holds
# the first tokens. All keys that come to it later are after its queries: it works in step 0 and never again. The last
# rank works in every step. In all steps but the first the busiest rank has $u^2$ scores, with $u = T/c$ tokens per
# rank, and the efficiency is
#
# $$\frac{cu + 1}{(2c-1)\,u + 1} \;\to\; \frac{c}{2c - 1} \text{ for large } u, \text{ a little more than one half.}$$
#
# (Without lock-step nothing improves: the last rank alone needs as long as all steps together.)
#
# In **zig-zag** order each rank holds one early and one late chunk. Say keys of rank $j \ne r$ arrive. If $j < r$,
# their early chunk is before both chunks of rank $r$, and their late one after both: two full pairs. If $j > r$, both
# of their chunks are before the late chunk of $r$ and after its early one: two full pairs again. So each rank has two
# full pairs in each step, and in step 0 two diagonals and one full pair: the efficiency is exactly 1. It costs nothing
# but another order of the tokens. (*Striped* attention, arXiv 2311.09431, deals tokens out one by one and is nearly as
# even.)
#
# Another authors' measurement, the README of `ring-flash-attention` (8 H800 GPUs, forward and backward): 61.5 % of one
# device's rate in contiguous order, 85.9 % in zig-zag. The fraction for $c = 8$ is 53 %. It counts products alone; a
# measured rate has everything else in it as well.

# %% [markdown]
# ## 11.7 Two rivals: all-gather and Ulysses
#
# *Core, 8 minutes.*
#
# **All-gather** (Llama 3, arXiv 2407.21783). Before attention every rank gathers all keys and values, and then attends
# without further messages. In backward it gathers them again, computes terms of the gradients of *all* keys and values,
# and a reduce-scatter sums them and leaves each rank its own. That is simple, works with any mask, and needs memory for
# all keys and values of one layer, $2 N h_{kv}$ values; and nothing hides the gathering.
#
# One such mask is that of *packed documents*: several short ones fill a sample, and a token sees its own document only.
# The scores are then a triangle for each document, and zig-zag is no longer even. Megatron-LM therefore cuts *each
# document* into $2c$ chunks. minipar has no packed documents: its samples are stretches of one text.


# %%
def gathered_forward(comm, q, kv, order):
    everyone = comm.all_gather(kv, algorithm="ring").reshape(comm.size, *kv.shape)
    out, lse = nothing_seen(q)
    for owner in range(comm.size):
        for x, y, diagonal in pairs(comm.rank, owner, comm.size, order):
            out[x], lse[x] = merge(out[x], lse[x], *attend(q[x], *everyone[owner][:, y], diagonal))
    return out, lse


comm.traffic.reset()
gathered = gathered_forward(comm, own_q, own_kv, order)
assert relative_difference(gathered[0], out) < 1e-12 and relative_difference(gathered[1], lse) < 1e-12
assert comm.traffic.bytes() == 2 * (c - 1) * (T // c) * h_kv * 8
say(f"all-gather = ring; in forward each rank sent {comm.traffic.bytes():,} bytes = 2 (c - 1) u h_kv values")

# %% [markdown]
# **Ulysses** (Jacobs et al. 2023, arXiv 2309.14509). Heads do not interact. So change what is divided: from tokens to
# heads, compute attention over all tokens with $a/c$ heads, and change back. Each change is an *all-to-all*: rank $r$
# sends to rank $j$ the $j$-th part of the heads of its tokens.

# %%
if rank == 0:
    show(figures.plot_ulysses(4), "11_ulysses")


# %%
def to_heads(comm, x, order):
    """Own tokens of all heads -> all tokens of own heads: (2, heads, ..., T/2c, h/a) -> (heads/c, ..., T, h/a)."""
    c = comm.size
    leaving = np.stack(np.split(x, c, axis=1))  # (c, 2, heads/c, ..., T/2c, h/a): part j is for rank j
    chunks = comm.all_to_all(leaving, algorithm="pairwise").reshape(2 * c, *leaving.shape[2:])
    arrived = [i for r in range(c) for i in held(r, c, order)]  # which chunk of the sequence each one is
    return np.concatenate(chunks[np.argsort(arrived)], axis=-2)


def to_tokens(comm, x, order):
    """Undo to_heads."""
    c = comm.size
    chunks = np.split(x, 2 * c, axis=-2)
    leaving = np.stack([np.stack([chunks[i] for i in held(r, c, order)]) for r in range(c)])
    arrived = comm.all_to_all(leaving, algorithm="pairwise").reshape(leaving.shape)  # part r has rank r's heads
    return np.concatenate(arrived, axis=1)


comm.traffic.reset()
q_h, k_h, v_h = (to_heads(comm, x, order) for x in (own_q, *own_kv))
out_h, lse_h = blockwise(q_h, k_h, v_h, chunk)
out_u = to_tokens(comm, out_h, order)
gradients = blockwise_backward(q_h, k_h, v_h, out_h, lse_h, to_heads(comm, own_dout, order), chunk)
dq_u, dk_u, dv_u = (to_tokens(comm, gradient, order) for gradient in gradients)
sent = comm.traffic.bytes()
out_1, lse_1 = blockwise(q, k, v, chunk)  # one device, with the same blocks
expected = (out_1, *blockwise_backward(q, k, v, out_1, lse_1, dout, chunk))
for part, alone in zip((out_u, dq_u, dk_u, dv_u), expected, strict=True):
    assert np.array_equal(part, cut(alone, rank, c, order))
assert sent == 4 * (h + h_kv) * (T // c) * (c - 1) // c * 8
say(f"Ulysses = one device, bit for bit; each rank sent {sent:,} bytes = 4 (h + h_kv) u (c-1)/c values")

# %% [markdown]
# Forward sends $q, k, v$ and then $o$, backward their gradients: $4(h + h_{kv})$ elements per token, of which each rank
# keeps $1/c$. Inside, attention is that of one device, with its bits and its blocks, and the mask is always balanced.
# The price: $c$ must divide the heads, of keys and values too (or these are replicated).

# %% [markdown]
# ### The crossover
#
# *Deeper, 4 minutes.*

# %% [markdown]
# | | elements sent per layer and own token | messages, one after the other |
# | --- | --- | --- |
# | ring | $(6c-4)\,h_{kv}$ | $3c - 2$, behind computation |
# | all-gather | $6(c-1)\,h_{kv}$ | $3(c-1)$ |
# | Ulysses | $4(h + h_{kv})\frac{c-1}{c}$ | $8(c-1)$, small |
#
# Ring and all-gather grow with $c$, Ulysses does not. But the ring sends keys and values only, and grouped-query
# attention makes them few. With $a/a_{kv} = h/h_{kv}$ heads of queries per head of keys, the ring sends less while
#
# $$(6c - 4)\,c < 4\,(1 + a/a_{kv})\,(c - 1).$$


# %%
def per_token(c, group):
    """Return the elements that a rank sends per layer and own token, in units of h."""
    ring = Fraction(6 * c - 4, group)
    gathered = Fraction(6 * (c - 1), group)
    return {"ring": ring, "all-gather": gathered, "ulysses": 4 * (1 + Fraction(1, group)) * Fraction(c - 1, c)}


CROSSOVER = {1: 2, 4: 3, 8: 6, 16: 11}
for group, first in CROSSOVER.items():
    less = [ranks for ranks in range(2, 65) if per_token(ranks, group)["ulysses"] < per_token(ranks, group)["ring"]]
    assert less == list(range(first, 65))
    say(f"{group:>2} heads of queries per head of keys: Ulysses sends less than the ring from c = {first} on")
if rank == 0:
    show(figures.plot_crossover([1, 8], range(2, 17), per_token), "11_crossover")

# %% [markdown]
# With as many heads of keys as of queries, Ulysses sends less at every $c$. With 8 queries per key it does from $c = 6$
# on. For Llama 3 405B (128 heads, 8 of keys) it would from $c = 11$ on, and with 8 heads of keys $c$ can be at
# most 8: there the ring always sends less. The all-gather always sends a little less than the ring: it saves the hop
# home.

# %% [markdown]
# ### What is hidden
#
# *Deeper, 5 minutes.*

# %% [markdown]
# Bytes are not time. The ring's messages travel while the rank computes. In zig-zag order a forward step has $u^2/2$
# scores per head (one sample), and its two products take four operations per score and element of a head, $2 u^2 h$
# in all heads. Its message has $2 u h_{kv}$ values of $w$ bytes, and a byte takes $\beta$ seconds. A
# device does $S$ operations per second. Without latency the message is hidden if
#
# $$\frac{2 u^2 h}{S} \ge 2 u\, h_{kv}\, w\, \beta, \quad\text{that is, if}\quad u \ge S\,w\,\beta\,\frac{a_{kv}}{a} .$$

# %%
S = 4e14  # as in chapter 6: an assumption, 40 % of an H100's 989 TFLOP/s
w = 2  # 16 bit
HIDDEN = {"NVLink 4, 450 GB/s": (1 / 450e9, 1778), "InfiniBand NDR, 50 GB/s": (1 / 50e9, 16_000)}
for name, (beta, tokens) in HIDDEN.items():
    assert round(S * w * beta) == tokens
    say(f"{name:<24} hides the ring from {tokens:>6,} tokens per rank on; with 8 queries per key {tokens // 8:,}")

# %% [markdown]
# The hidden size has cancelled, as the batch did for tensor parallelism (chapter 6), and so has $c$. So the ring is
# made for *very* long sequences, over slow links: with 2,000 tokens per rank InfiniBand is enough at $a/a_{kv} = 8$.
# Ulysses has nothing to hide behind: its all-to-alls stand before and after attention. It wants fast links, as tp does.

# %% [markdown]
# ## 11.8 Positions, targets and the mean
#
# *Core, 5 minutes.*
#
# Three things are easy to get wrong once the chunks of a sequence are scattered.
#
# - **Positions.** A token's position is its place in the *sample*. On rank $r$ in zig-zag order these are the tokens of
# chunk $r$ and of chunk $2c-1-r$, and not $0, 1, 2, \dots$. Learned positions and rotary ones both need it, and so does
# the mask (here through the chunks' numbers).
#
# - **Targets.** A token's target is the next token, which for the last token of a chunk is on another rank. So shift
# first, and cut inputs, targets and positions alike.
#
# - **The mean.** The loss is the mean over the $N$ tokens of all ranks. Each rank divides its sum by the *global* count
# once. Every rank has all parameters, and its own tokens' terms of each gradient: gradients are summed over cp exactly
# as over dp. To the optimizer, to ZeRO and to the buckets, cp is more data parallelism: they work over dp x cp
# together.
#
# Here is a whole attention layer around our ring: queries, keys and values of a sample, rotary positions, a loss, and
# the gradients of the three weights. (Rotary positions turn pairs of a head's elements by angles proportional to the
# position; backward turns back. The layer is in `chapters/support/ch11/ring_layer.py`.) The `mistakes` are for 11.9.
#
# **[Exercise 16](exercises/e16_context_parallel_batch.py)** asks for what a rank of cp must know about its tokens:
# `make exercises PYTEST="-k e16"`.

# %%
from chapters.support.ch11.ring_layer import Layer, Ring, notice
from minipar.comm import serial

if rank == 0:
    show_source(Layer.loss_and_gradients)

toy = Layer(Ring(held, ring_forward, ring_backward), *random.normal(size=(2, T, h)), a_kv, width)
weights = [random.normal(size=(h, columns)) / h**0.5 for columns in (h, h_kv, h_kv)]
right_loss, right = toy.loss_and_gradients(serial(), weights)
for order in ("contiguous", "zigzag"):
    loss, gradients = toy.loss_and_gradients(comm, weights, order)
    assert abs(loss / right_loss - 1) < 1e-12
    assert np.max([relative_difference(g, one) for g, one in zip(gradients, right, strict=True)]) < 1e-12
say(f"a layer with rotary positions over {c} ranks = one device: the loss, and the gradients of its weights")

# %% [markdown]
# ## 11.9 Mistakes, and what notices them
#
# *Deeper, 8 minutes.*

# %% [markdown]
# Four mistakes that frameworks have shipped, planted in the layer above:
#
# 1. **The loss times cp.** Each rank divides by its own tokens instead of all, and gradients are summed: they are $c$
# times too large.
#
# 2. **One hop short.** $\mathrm{d}k$ and $\mathrm{d}v$ stay where they have their last terms, on the left neighbour of
# their owner.
#
# 3. **Stale keys and values.** Backward begins with the buffer in which forward ended. It holds the right neighbour's
# keys, which backward takes for its own.
#
# 4. **Positions from 0.** Each rank counts its own tokens.
#
# We train each for 30 steps with Adam (chapter 2), and look with three instruments. **Loss**: is the last one off by
# more than 10 %? **Bytes**: are they those of 11.5? **One device**: are the first step's loss and gradients its own?
# (The three ratios say how long the first gradients are in the direction of the right ones.)
#
# **Predict**: mark what you expect in this table. How many of the four does the loss show?
#
# | | loss | bytes | one device |
# | --- | --- | --- | --- |
# | 1. loss times cp | ? | ? | ? |
# | 2. one hop short | ? | ? | ? |
# | 3. stale keys and values | ? | ? | ? |
# | 4. positions from 0 | ? | ? | ? |

# %%
predict("mistakes that the loss shows", ...)

# %%
MISTAKES = {
    "nothing broken": (),
    "1. loss times cp": ("loss",),
    "2. one hop short": ("hop",),
    "3. stale keys and values": ("stale",),
    "4. positions from 0": ("positions",),
}
right_losses, right, _ = toy.train(serial(), weights)
caught = {}
curves = {}
for name, mistakes in MISTAKES.items():
    losses, gradients, sent = toy.train(comm, weights, mistakes)
    curves[name] = losses
    ratios, noticed = notice(losses, gradients, right_losses, right)
    noticed |= {"bytes"} if sent != ring_elements * 8 else set()
    shares = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    say(f"{name:<25} loss {losses[0]:.3f} -> {losses[-1]:.3f}; gradient / right one (q, k, v): {shares}")
    say(f"{'':<25} caught by: {', '.join(sorted(noticed)) or 'nothing'}")
    caught[name] = noticed
reveal("mistakes that the loss shows", sum("loss" in noticed for noticed in caught.values()), say)
if rank == 0:
    show(figures.plot_losses(curves), "11_mistakes")

# %%
ANSWERS = ({"one device"}, {"one device", "bytes", "loss"}, {"one device", "loss"}, {"one device"})
assert list(caught.values()) == [set(), *(ANSWERS if c > 1 else [set()] * 4)]

# %% [markdown]
# **Mistake 1** is invisible in the loss, to the last digit: Adam divides the gradient by its own size, so $c$ cancels.
# It shows in the printed norm, in clipping, which then acts too often, and with any optimizer that is not Adam.
# **Mistake 2** is the only one that changes the bytes. The gradient of the queries' weights is right; those of keys and
# values are made of other tokens. **Mistake 3** sends what is right, and all gradients are wrong. **Mistake 4** is the
# quietest: a model that trains, reaches a loss of the same size, and is another model. To its attention the tokens of
# all ranks lie at the same few places. On one device its parameters give another loss.
#
# In a deep model all of them are quieter than here: the residual stream and the MLPs learn around a broken attention.
# One device finds each in the first step. [The museum](../docs/museum.md) plants the four in the library itself, with
# the threads that reported them (exhibits 21 to 24): there no loss of 20 steps is off by more than 0.3 %.

# %% [markdown]
# ## 11.10 The library's version
#
# *Deeper, 15 minutes.*

# %% [markdown]
# Blockwise attention is `more/context/blockwise.py`. Its three functions are those of 11.1 to 11.3:

# %%
from minipar.more.context import blockwise

if rank == 0:
    show_source(blockwise.merge, blockwise.attend_backward)


arrays = (q[None], k[None], v[None])  # one sample: (B, n, g, T, h/a) and (B, n, 1, T, h/a)
scale = width**-0.5
library = blockwise.attend(*arrays, scale)
gradients = blockwise.attend_backward(dout[None], *arrays, *library, scale)
for part, alone in zip((library[0], *gradients), (whole, *one_device), strict=True):
    assert relative_difference(part, alone[None]) < 1e-12
say("the library's attend and attend_backward = ours")

# %% [markdown]
# What does the library add? Its blocks have 128 queries and up to 1024 keys, sizes that a benchmark chose. Queries of
# heads that share keys have a dim of their own. It runs on a GPU. `mp.use_blockwise(model)` gives it to a model, and
# `minipar.train` does so. A sequence of at most one block of 128 tokens gets the whole table, and so does a model with
# dropout on the probabilities: its mask is a whole table, too.
#
# Context parallelism is `more/context/context_parallel.py`. Backward of the ring is one loop, in which one can read in
# which order the messages leave:

# %%
from functools import partial

from minipar.autograd import Tensor, causal_attention
from minipar.more.context.context_parallel import AllGatherAttention, RingAttention, block_attention
from minipar.more.context.token_order import METHODS, ContextParallel, visible
from minipar.more.context.ulysses import UlyssesAttention

if rank == 0:
    show_source(visible, RingAttention.backward)


def as_columns(x):
    return x.reshape(1, -1, T, width).swapaxes(1, 2).reshape(1, T, -1)  # (B, T, heads * h/a)


qkv, dqkv = (np.concatenate([as_columns(x) for x in arrays], axis=2) for arrays in ((q, k, v), one_device))
for method in METHODS if c > 1 else ():
    context = ContextParallel(comm)
    compute = {
        "ring": partial(block_attention, RingAttention(context)),
        "all-gather": partial(block_attention, AllGatherAttention(context)),
        "ulysses": UlyssesAttention(causal_attention, context),
    }[method]
    own = Tensor(context.part(qkv), requires_grad=True)  # (1, T/c, h + 2 h_kv)
    comm.traffic.reset()
    result = compute(own, a, a_kv)
    result.backward(context.part(as_columns(dout)))
    assert comm.traffic.bytes() == per_token(c, a // a_kv)[method] * (T // c) * h * 8
    assert relative_difference(result.data, context.part(as_columns(whole))) < 1e-12
    assert relative_difference(own.grad, context.part(dqkv)) < 1e-12
    say(f"{method:<10} = one device, with gradients; {comm.traffic.bytes():>7,} bytes, the formula's")

# %% [markdown]
# `visible` skips as `pairs` does, with slices of a rank's tokens in the place of chunks. A block's sum travels while
# the next block's terms are computed; ours waited for each hop.
#
# A model is not changed for it. `context_parallel` replaces its attention and its positions by those of the rank's
# tokens. On a mesh cp lies between dp and tp; what data parallelism and ZeRO do, they do over `mesh.dp_cp`. Here GPT-2
# trains in every layout cp x dp of the ranks that we have, three steps with clipping and ZeRO stage 3, against one
# device:

# %%
from chapters.support.training import step_traffic
from minipar.comm import DeviceMesh
from minipar.train.data import load_tokens
from minipar.train.flags import parse
from minipar.train.trainer import Trainer
from minipar.train.verify import verify

heads = c * -(-24 // c)  # a multiple of c
length = 2 * heads  # a multiple of 2c
FLAGS = f"--layers 2 --hidden {4 * heads} --heads {heads} --seq-len {length} --dtype float64 --lr 3e-3"
text = load_tokens(None, vocab_size=256, seq_len=length)
for cp in (k for k in range(2, c + 1) if c % k == 0):
    for method in METHODS if cp == c else ("ring",):
        flags = f"{FLAGS} --cp {cp} --context-parallel {method} --zero-stage 3 --clip-grad 0.5 --steps 3"
        args = parse(f"{flags} --global-batch {2 * c // cp}".split(), c)
        trainer = Trainer(args, DeviceMesh(comm, dp=c // cp, cp=cp), text)
        comm.traffic.reset()
        results = list(trainer.train())
        assert comm.traffic.bytes(axis="cp") == 3 * step_traffic(args, rank)["cp"]
        verdict = verify(trainer, results)
        assert verdict.passed, verdict.line
        say(f"cp {cp} x dp {c // cp}, {method}\n  {verdict.line}")

# %% [markdown]
# On the command line: `--cp 4 --context-parallel ring`, `all-gather` or `ulysses`.

# %% [markdown]
# ## 11.11 PyTorch's names
#
# *Deeper, 2 minutes.*

# %% [markdown]
# | minipar | PyTorch | Megatron-LM and others |
# | --- | --- | --- |
# | `attend` | `scaled_dot_product_attention` | FlashAttention, with its `softmax_lse` |
# | skipped, full and diagonal blocks | FlexAttention's `BlockMask` | |
# | `--cp C` | `context_parallel(mesh, buffers=...)` | `--context-parallel-size C` |
# | `--context-parallel ring` | `set_rotate_method("alltoall")` | `--cp-comm-type p2p` |
# | `--context-parallel all-gather` | `set_rotate_method("allgather")` | `--cp-comm-type all_gather` |
# | `--context-parallel ulysses` | | `--cp-comm-type a2a`; DeepSpeed's `DistributedAttention` |
# | zig-zag | its load balancer, "head-tail" | always on |
#
# The same in PyTorch: [chapters/pytorch/ch11.py](pytorch/ch11.py).

# %%
if rank == 0:
    show_file("chapters/pytorch/ch11.py")

# %% [markdown]
# ## 11.12 What to choose when
#
# *Core, 5 minutes.*
#
# Blockwise attention costs one more product in backward and saves the table: use it. The rest is a question of what is
# too large. Per token a layer keeps about $34h$ bytes in 16 bit without the table of scores (Korthikanti et al. 2022;
# chapter 6b), or $2h$ if whole layers are recomputed, and then works on one layer's $34h$ at a time. In forward it
# takes $24h^2$ operations per token in its matrices and $2Th$ in attention (half of the table): attention's share is
# $T/(T + 12h)$. For a model like Llama 3 8B ($h = 4096$, 32 layers; an estimate, as its MLP and heads differ):

# %%
ESTIMATES = {2**13: (14, 37, 2, 1), 2**15: (40, 146, 9, 5), 2**17: (73, 584, 34, 18), 2**20: (96, 4673, 275, 146)}
say("        T   attention's share   activations   recomputed   one layer   recomputed, c = 8")
for tokens, expected in ESTIMATES.items():
    share = tokens / (tokens + 12 * 4096)
    everything, layers, one = (tokens * 4096 * factor / 1e9 for factor in (34 * 32, 2 * 32, 34))
    assert (round(100 * share), round(everything), round(layers), round(one)) == expected
    shares = f"{100 * share:>18.0f} %{everything:>11,.0f} GB{layers:>10,.0f} GB{one:>9,.0f} GB"
    say(f"{tokens:>9,}{shares}{(layers + one) / 8:>17,.1f} GB")
if rank == 0:
    show(figures.plot_attention_share(2 ** np.arange(10, 21), (4096, 8192, 16_384), layers=32), "11_share")

# %% [markdown]
# On the left is attention's share of the operations, for three hidden sizes. It is one half at $T = 12h$: with $h =
# 4096$ from 49,152 tokens on attention costs more than all matrices. The right side has the table's bytes, and an 80 GB
# device as a line.
#
# | what is too large | choose | because |
# | --- | --- | --- |
# | activations, and tp is there | sequence parallelism (chapter 6) | it divides what tp leaves whole, same bytes |
# | activations, a few times | recompute | no message; up to a third more computation |
# | one sample, after both | context parallelism | it divides everything per token by $c$, and attention's work too |
# | cp, fast links, $c$ divides the heads of keys (per tp rank) | Ulysses | bytes per token do not grow with $c$ |
# | cp over slow links, many tokens per rank | ring, zig-zag | hidden from $u \ge S w \beta\, a_{kv}/a$ tokens on |
# | cp, other masks, few heads of keys, memory to spare | all-gather | simple; nearly the ring's bytes |
# | cp over many hosts | Ulysses in a host, ring between hosts | each on the links that it needs |
#
# At 8,192 tokens nobody needs cp: recompute suffices. At 131,072 a layer's own work fills a quarter of an 80 GB device,
# and at a million only cp is left: one layer alone has 146 GB. A second reason for cp comes before memory: a global
# batch of 4 million tokens has only 4 samples of a million, so dp ends at 4. Cutting samples along their tokens is then
# the way to use more devices.
#
# The planner of chapter 10 knows the axis. Ask it:
#
#     python -m minipar.plan --model llama-3-8b --gpus 64 --gpu h100 --global-batch 32 --seq-len 131072 \
#         --attention flash --precision bf16
#
# Its first choices for Llama 3 8B on 64 H100, always with 4 million tokens per step:
#
# | tokens per sample | dp | cp | tp | recompute | memory | a step |
# | --- | --- | --- | --- | --- | --- | --- |
# | 8,192 | 64 | 1 | 1 | none | 72 GB | 9.0 s |
# | 32,768 | 16 | 4 (ring) | 1 | none | 72 GB | 17.3 s |
# | 131,072 | 4 | 16 (all-gather) | 1 | none | 73 GB | 51.7 s |
# | 1,048,576 | 2 | 8 (ring) | 4 | full | 54 GB | 466 s |
#
# Replicas become ranks of cp: up to 131,072 tokens each rank keeps 8,192 of them, and nothing is recomputed. A
# million tokens need tp, cp and recomputation.

# %% [markdown]
# ## 11.13 Problems
#
# *Deeper, 30 minutes.*

# %% [markdown]
# 1. Two parts of a row have the log-sum-exps 2 and $2 + \ln 3$, and the outputs 1 and 5. What are log-sum-exp and
# output of both together?
#
# 2. Llama 3 8B: 32 heads of queries, 8 of keys, $h = 4096$, 16 bit. One sample of 131,072 tokens is cut over $c = 8$.
# How many bytes does a rank send per layer, forward and backward, with each of the three methods?
#
# 3. From how many tokens per rank on does a link of 25 GB/s hide the ring's forward for that model ($S = 4 \cdot
# 10^{14}$)? And its backward, which has five products where forward has two, and sends $4u h_{kv}$ elements per step?
#
# 4. *Striped* order gives rank $r$ the tokens $r, r + c, r + 2c, \dots$ How many scores has a rank in a step, if the
# keys' owner has a lower number, the same, or a higher one? Derive the efficiency $\frac{cu + 1}{c\,(u + 1)}$.
#
# 5. With a *sliding window* a query sees only the last $u = T/c$ tokens, itself among them. Which order of chunks is
# better, and how many passes does the ring need?
#
# 6. Could forward send $q$ and the running $(o, \lambda)$ around, while keys and values stay? What would a rank send
# per step, and when is that less?

# %% [markdown]
# ## 11.14 Answers
#
# *Deeper, 10 minutes.*

# %% [markdown]
# <details><summary>Answers</summary>
#
# 1. $\lambda = \ln(e^2 + 3e^2) = 2 + \ln 4$; $o = \frac14 \cdot 1 + \frac34 \cdot 5 = 4$.
#
# 2. $u = 16\,384$ and $h_{kv} = 1024$. Ring: 44 times $16\,384 \cdot 1024$ values, 1.48 GB. All-gather: 42 times,
# 1.41 GB. Ulysses: $4 \cdot 5120 \cdot 16\,384 \cdot \frac78$ values, 0.59 GB.
#
# 3. $a/a_{kv} = 4$: forward from $S w \beta/4 = 8000$ tokens on. Backward has $5u^2h$ operations for $4u h_{kv}$
# elements: from $0.8\,S w\beta/4 = 6400$ on. Forward is the harder one to hide.
#
# 4. Query $x$ of rank $r$ has the position $r + xc$, key $y$ of rank $j$ has $j + yc$. If $j \le r$ the query sees the
# key for $y \le x$: $u(u+1)/2$ scores. If $j > r$, for $y < x$: $u(u-1)/2$. In each step some rank has $j \le r$ (the
# last one, always), so the steps take $c \cdot u(u+1)/2$ together. There are $cu(cu+1)/2$ scores in all, and $c$ ranks.
#
# 5. In contiguous order a rank's queries see keys of its own and of its left neighbour's chunk only: one pass, after
# which nobody waits (but for rank 0, which has no neighbour before it). In zig-zag order the chunks before a rank's
# late one are on the ranks to its right, whose keys arrive last. Contiguous is better: the order belongs to the mask.
#
# 6. Yes: partial results merge in any order. Per step a rank sends $q$, $o$ and $\lambda$, $u(2h + a)$ values, instead
# of $2u h_{kv}$ ones, and a hop home. That is never less, as $h_{kv} \le h$.
#
# </details>

# %% tags=["hide-input"]
merged, both = merge(np.array([1.0]), np.array([2.0]), np.array([5.0]), 2 + np.log([3.0]))
assert abs(merged[0] - 4) < 1e-12 and abs(both[0] - 2 - np.log(4)) < 1e-12
elements = {name: share * 16_384 * 4096 for name, share in per_token(8, 4).items()}
assert [round(2 * float(n) / 1e9, 2) for n in elements.values()] == [1.48, 1.41, 0.59]
assert round(S * w / 25e9 / 4) == 8000 and round(4 / 5 * S * w / 25e9 / 4) == 6400
for ranks, u in ((2, 3), (4, 8), (8, 5)):
    seen = np.tri(ranks * u, dtype=int).reshape(u, ranks, u, ranks).sum(axis=(0, 2))  # (queries' rank, keys' rank)
    steps = np.array([[seen[r, (r - step) % ranks] for r in range(ranks)] for step in range(ranks)])
    assert efficiency(steps) == Fraction(ranks * u + 1, ranks * (u + 1))
say("the answers hold")

# %% tags=["active-ipynb"]
# %autopx

# %% tags=["active-ipynb"]
# # Back in one process: stop the eight.
# cluster.stop_cluster_sync()
