# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # ZeRO in the library: function by function
#
# **How do the stages fit into a backward that knows nothing of them?**
#
# In [chapter 5](../05_zero.ipynb) a stage is a function that a training loop calls, and it waits for each message. In
# the library the model is an ordinary one. Hooks in its forward and backward gather, free and reduce-scatter, and
# messages travel while the model computes. This page shows the functions of the three stages.

# %% tags=["active-ipynb", "setup"]
# from chapters.support.notebook import start
#
# cluster = start(8)

# %% tags=["setup"]
import numpy as np

import minipar as mp
from chapters.support.show import printer
from minipar.comm import world

comm = world()
rank, d = comm.rank, comm.size
say = printer(rank)  # rank 0 prints and draws; every rank checks
if rank == 0:
    from chapters.support.ch05 import figures
    from chapters.support.show import show, show_source

# %% [markdown]
# ## Bytes
#
# *Deeper, 2 minutes.*

# %% [markdown]
# The bytes of the model state at each stage. Chapter 5 compares them with its own formula and with the memory ledger,
# and the planner of [chapter 10](../10_planning.ipynb) uses them to leave out the layouts that do not fit.

# %%
from minipar.parallel.predicted_memory import elements_held, model_state

if rank == 0:
    show_source(elements_held, model_state)

# %% [markdown]
# ## Stage 1
#
# *Deeper, 4 minutes.*

# %% [markdown]
# To the step of 5.2 the library adds three things. Buckets are reduce-scattered during backward, as their gradients
# become complete. The optimizer sees *shards*, the pieces of parameters that lie in this rank's chunks. And when the
# optimizer has updated them, it calls the wrapper's `after_step`, which gathers the chunks of the other ranks.
#
# The buckets lie in one flat array, as in chapter 4. `Chunk` cuts this rank's part of a bucket into one shard for each
# parameter that has elements in it. A shard is a view, so the optimizer writes into the flat array. (Where a framework
# pads the flat array so that $d$ divides it, the padding's gradient must be 0: then it adds nothing to the norm, and
# AdamW leaves the padding as it is.)

# %%
from minipar.parallel.chunks import Chunk

if rank == 0:
    show_source(Chunk.__init__)

# %% [markdown]
# The hook that sends a complete bucket is chapter 4's. Only what it sends differs: a reduce-scatter whose output is
# this rank's chunk. After the step all chunks are gathered, all at the same time. The chunk starts both operations:

# %%
from minipar.parallel.zero import ZeroStage1

if rank == 0:
    show_source(ZeroStage1.reduce, ZeroStage1.after_step, Chunk.start_sum, Chunk.start_gather)

# %% [markdown]
# ## Stage 2
#
# *Deeper, 5 minutes.*

# %% [markdown]
# Backward completes the buckets in their order. When one has been sent, `prepare` makes the array for the whole
# gradient of the next. Before that it waits until at most one older bucket still travels. The message alone refers to
# its whole gradient, so that gradient is freed when it has been sent. Two whole gradients exist at a time: backward
# fills one while the other travels. The gradient of the tied embedding is a third, because it is complete only when
# backward ends.

# %%
from minipar.parallel.zero import ZeroStage2

if rank == 0:
    show_source(ZeroStage2.prepare, ZeroStage2.reduce)

# %% [markdown]
# ## Stage 3: gather and free
#
# *Deeper, 5 minutes.*

# %% [markdown]
# The words are those of PyTorch's FSDP2: `unshard` starts a gather, and `wait_for_unshard` lets the parameters refer to
# the array when it has arrived. `reshard` frees it:

# %%
from minipar.parallel.fsdp import FullyShardedDataParallel as FSDP
from minipar.parallel.fsdp import Unit

if rank == 0:
    show_source(Unit.unshard, Unit.wait_for_unshard, Unit.reshard)

# %% [markdown]
# Backward of a matrix product reads the weight. How can `reshard` free it? The node of the product keeps the
# *parameter* object, not its values. It reads the values in backward, when they have been gathered again. `reshard`
# also makes mistakes visible: while a unit is freed, its parameters hold a `placeholder`, a single NaN that stands for
# every element. Code that uses a parameter at the wrong time computes NaN:

# %%
config = mp.GPTConfig(vocab_size=64, n_positions=8, n_embd=16, n_layer=2, n_head=2)
model = mp.GPT(config, dtype="float64")
initial = model.h[0].mlp.c_fc.weight.data.copy()
wrapper = mp.fully_shard(model, comm)
weight = model.h[0].mlp.c_fc.weight
unit = next(unit for unit in wrapper.buckets if weight in unit.parameters)
assert np.isnan(weight.data).all() and weight.data.strides == (0, 0)  # one NaN for all elements
unit.unshard()
unit.wait_for_unshard()
assert np.array_equal(weight.data, initial)
unit.reshard()
assert np.isnan(weight.data).all() and weight.data.shape == initial.shape
say(f"a matrix of {initial.shape}: one NaN while it is freed, and all of its values while it is gathered")

# %% [markdown]
# ## Stage 3: in forward and backward
#
# *Deeper, 5 minutes.*

# %% [markdown]
# The model's parts must notice by themselves that backward arrives. So `run` puts an identity operation on the input of
# a segment, here a block, and one on its output. Backward goes through the operations in reverse:

# %%
if rank == 0:
    show(figures.draw_identities(), "05_identities")
    show_source(FSDP.run, FSDP.pre_backward)

# %% [markdown]
# `gather` starts the gathers of the units that are needed now, then with prefetch those of the next segment, and waits
# for the first ones only:

# %%
if rank == 0:
    show_source(FSDP.gather, FSDP.free)

# %% tags=["active-ipynb"]
# %autopx

# %% tags=["active-ipynb"]
# # Back in one process: stop the eight.
# cluster.stop_cluster_sync()
