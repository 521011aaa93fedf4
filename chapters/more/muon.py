# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # Muon: an update that needs whole matrices
#
# **What if an optimizer needs whole matrices, and every strategy cuts them?**
#
# The axes cut matrices: tp by rows or columns ([chapter 6](../06_tensor_parallel.ipynb)), and ZeRO over dp into chunks
# that end anywhere ([chapter 5](../05_zero.ipynb)). AdamW does not mind, because an element's update reads that element
# alone. Muon reads the whole matrix. On this page you see what ZeRO's cut does to it, why nobody would notice, and the
# remedy: each matrix has an owner. The remedy sends as many bytes as stage 1 of ZeRO, and has the bits of one device.

# %% tags=["active-ipynb", "setup"]
# from chapters.support.notebook import start
#
# cluster = start(8)

# %% tags=["setup"]
import numpy as np

from chapters.support.muon import figures, stack
from chapters.support.muon.stack import SIZES, in_rank_order, loss_and_gradient, views
from chapters.support.predict import predict, reveal
from chapters.support.show import printer
from minipar.comm import chunk_bounds, world

comm = world()
rank, size = comm.rank, comm.size
say = printer(rank)  # rank 0 prints and draws; every rank checks
if rank == 0:
    from chapters.support.show import show

# %% [markdown]
# ## The update
#
# *Core, 5 minutes.*
#
# Muon (Jordan et al. 2024, [kellerjordan.github.io/posts/muon](https://kellerjordan.github.io/posts/muon/)) keeps one
# running mean of a matrix's gradient. From that mean, $U \Sigma V^\top$ as a singular value decomposition, it takes
# $U V^\top$, and moves the matrix along it: equally far in every direction, also where gradients are small. Five steps
# of a *Newton-Schulz* iteration, from the mean divided by its norm, come near to it. They are products of matrices:
#
# $$X \leftarrow 3.4445\, X - 4.7750\, (X X^\top) X + 2.0315\, (X X^\top)^2 X .$$
#
# They leave $U$ and $V$ as they are and bring each singular value of at least 0.003 to between 0.68 and 1.21.
# (Embeddings, the head, biases and norms stay with AdamW.) Here all ranks are of dp, so $d$ is their number. The model
# is a stack of six matrices on plain arrays, $\Psi = 2592$ parameters, which lie one after another in one flat array,
# as in ZeRO's buckets.

# %%
d = size
Psi = sum(SIZES)
MUON_STEPS = 10


def orthogonalize(matrix):
    """Nearly U V^T of the matrix U S V^T."""
    x = matrix / max(np.linalg.norm(matrix), 1e-7)  # now no singular value is larger than 1
    for _ in range(5):
        square = x @ x.T  # NB: real code transposes tall matrices first, which makes this one smaller
        x = 3.4445 * x + (2.0315 * square @ square - 4.7750 * square) @ x
    return x


def muon(matrix, gradient, mean, parts=1):
    """Update a matrix and the running mean in place. `parts`: so many blocks of rows are each taken for a matrix."""
    mean += 0.05 * (gradient - mean)
    ahead = 0.05 * gradient + 0.95 * mean  # Nesterov's form
    update = np.concatenate([orthogonalize(part) for part in np.array_split(ahead, parts)])
    matrix -= 0.02 * max(1, matrix.shape[0] / matrix.shape[1]) ** 0.5 * update


def one_device(parts=1):
    """Train on one device, which takes the ranks' samples one rank after another: the last loss, and all parameters."""
    flat = stack.initial()
    means = views(np.zeros(Psi))
    for step in range(MUON_STEPS):
        loss, total = stack.whole_batch(flat, step, d)
        for matrix, gradient, mean in zip(views(flat), views(total), means, strict=True):
            muon(matrix, gradient, mean, parts)
    return loss, flat


# %% [markdown]
# ## What ZeRO's cut breaks
#
# *Core, 4 minutes.*
#
# Its chunks are equal, so their borders lie inside matrices: see the last column of the table of placements in
# [9.2](../09_3d_parallel.ipynb). From a part of a matrix nobody can compute that part of $U V^\top$. Let four ranks
# try, in the best case, where each has a quarter of the *rows* and orthogonalizes it alone.
#
# **Predict**: the whole update's singular values are at most 1.21. How large is the largest one of four quarters?

# %%
predict("largest singular value of four quarters", ...)

# %%
right = one_device()[0]
wrong = one_device(parts=4)[0]
gradient = views(stack.whole_batch(stack.initial(), 0, d)[1])[1]  # of a matrix of 12 rows and 48 columns
quarters = np.concatenate([orthogonalize(rows) for rows in np.split(gradient, 4)])
spectra = [np.linalg.svd(matrix, compute_uv=False) for matrix in (gradient, orthogonalize(gradient), quarters)]
assert 0.68 < spectra[1].min() and spectra[1].max() < 1.21 and spectra[2].max() > 1.6 and wrong < right
reveal("largest singular value of four quarters", round(float(spectra[2].max()), 2), say)
say(f"the loss after {MUON_STEPS} steps: {right:.2f} with whole matrices, {wrong:.2f} with quarters")
if rank == 0:
    show(figures.plot_spectra(*spectra), "muon_spectra")

# %% [markdown]
# Rows of one quarter are orthogonal, rows of two quarters need not be. Four rows that point the same way add up to
# $\sqrt 4$ times the length, so a singular value can be twice as large, and others nearly vanish. Nothing shows this
# mistake: ranks agree, bytes are right, and the loss even falls faster, because the steps are longer than asked for.
# DeepSpeed had a mistake of this kind ([issue 7807](https://github.com/deepspeedai/DeepSpeed/issues/7807)): where a
# border cut a matrix, it orthogonalized a gradient of which only one part was summed over the ranks. Its tests had
# asked only whether the parameters change.

# %% [markdown]
# ## The remedy: each matrix has an owner
#
# *Core, 6 minutes.*
#
# The owner gets the sum of the matrix's gradient, keeps the mean, orthogonalizes, and sends the new matrix to all. That
# is ZeRO's stage 1 with its borders moved to ends of matrices. Rank $r$ then owns $\Psi_r$ elements, more or fewer than
# $\Psi/d$. It sends each gradient that it does not own to the owner, and what it owns to everybody else:
#
# $$(\Psi - \Psi_r) + (d-1)\,\Psi_r = \Psi + (d-2)\,\Psi_r \text{ elements}.$$
#
# **Predict**: of the six matrices four have 576 elements and two have 144. How many bytes do all ranks of this run send
# together, relative to ZeRO's stage 1? And the busiest rank?

# %%
predict("bytes of all ranks, relative to stage 1", ...)
predict("bytes of the busiest rank, relative to stage 1", ...)

# %% [markdown]
# **[Exercise 30](../exercises/e30_muon_owners.py)** asks for such a step: `make exercises PYTEST="-k e30"`. Write it
# before you open the next cell.

# %% tags=["hide-input"]
owner = ((np.cumsum(SIZES) - np.array(SIZES) / 2) * d / Psi).astype(int)  # who has its middle in the equal chunk
owned = [sum(elements for elements, who in zip(SIZES, owner, strict=True) if who == r) for r in range(d)]
mine = slice(sum(owned[:rank]), sum(owned[: rank + 1]))
flat = stack.initial()
total = np.empty(Psi)
means = {i: np.zeros(stack.SHAPES[i]) for i in np.flatnonzero(owner == rank)}  # of this rank's matrices
comm.traffic.reset()
for step in range(MUON_STEPS):
    _, gradient = loss_and_gradient(flat, rank, step, d)
    arrived = comm.all_to_all(gradient, out=np.empty(d * owned[rank]), counts=(owned, [owned[rank]] * d))
    total[mine] = in_rank_order(arrived.reshape(d, owned[rank]))
    for i, mean in means.items():
        muon(views(flat)[i], views(total)[i], mean)
    comm.all_to_all(np.tile(flat[mine], d), out=flat, counts=([owned[rank]] * d, owned))
sent = comm.traffic.bytes() // MUON_STEPS

assert flat.tobytes() == one_device()[1].tobytes() and sent == 8 * (Psi + (d - 2) * owned[rank])
say(f"{MUON_STEPS} steps with d = {d}: one device has the same bits in all {Psi:,} parameters")
counted = comm.all_gather(np.array([sent]))
even = [8 * (Psi + (d - 2) * (stop - start)) for start, stop in chunk_bounds(Psi, d)]
assert counted.sum() == sum(even) == 2 * Psi * (d - 1) * 8
matrices = np.bincount(owner, minlength=d)  # of each rank
assert d != 8 or (round(counted.max() / max(even), 2) == 1.33 and (matrices == 0).sum() == 2)
reveal("bytes of all ranks, relative to stage 1", float(counted.sum() / max(1, sum(even))), say)
reveal("bytes of the busiest rank, relative to stage 1", float(counted.max() / max(1, *even)), say)
if rank == 0:
    show(figures.plot_owners(counted, even, matrices), "muon_owners")

# %% [markdown]
# Together they send what stage 1 sends. But ownership is uneven: on 8 ranks the owner of a large matrix sends a third
# more than with equal chunks, and two ranks own nothing and wait while others orthogonalize. With many more matrices
# than ranks this evens out. Where tp cuts matrices too, the owner needs the parts of all ranks of tp. pp cuts none.

# %% [markdown]
# ## In other programs, and what it computes
#
# *Deeper, 2 minutes.*

# %% [markdown]
# Jordan's [Muon](https://github.com/KellerJordan/Muon) all-reduces gradients as data parallelism does. Then rank $r$ of
# $d$ updates matrices $r, r + d, \dots$, and an all-gather follows each $d$ matrices. Moonshot AI's distributed Muon
# (Liu et al. 2025, arXiv 2502.16982) keeps equal chunks as in ZeRO stage 1: all ranks that have a part of a matrix
# gather it, each orthogonalizes the whole, and each keeps its own part of the result. For 16-bit gathers the paper
# counts at most 1.25 times AdamW's bytes. `torch.optim.Muon` is one device's update, with which `make reference`
# compares these cells.
#
# **What does it compute?** For a matrix of $n \times m$ with $n \le m$ (a tall one is transposed) the five steps take
# $20 n^2 m + 10 n^3$ operations, beside the $6nmN$ of training with $N$ tokens per step: at most $5n/N$ of them, half a
# percent for $n = 4096$ and four million tokens. Owners share this. In Moonshot's way it is repeated: of $M$ equal
# matrices a rank has parts of about $M/d + 1$, and orthogonalizes each of them, where owners have $M/d$. With far more
# ranks than matrices most ranks repeat what others do.

# %% tags=["active-ipynb"]
# %autopx

# %% tags=["active-ipynb"]
# # Back in one process: stop the eight.
# cluster.stop_cluster_sync()
