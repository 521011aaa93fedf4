# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # Measured collectives
#
# **How long do this library's all-reduces take on this machine, beside MPI's own?**
#
# [Chapter 3](../03_collectives.ipynb) counts messages and bytes, and computes times from a model. Here are real times.
# Several ranks share a few cores and one memory, so a bandwidth is here the speed of copying and adding, not that of a
# network. Do not take these times for those of a cluster.

# %% tags=["active-ipynb", "setup"]
# from chapters.support.notebook import start
#
# cluster = start(8)

# %% tags=["setup"]
from chapters.support.ch03 import watch
from chapters.support.show import printer
from minipar.comm import world

comm = world()
p, rank = comm.size, comm.rank
say = printer(rank)  # rank 0 prints and draws

# %% [markdown]
# ## An all-reduce of four sizes
#
# *Core, 5 minutes.*
#
# Ours and `MPI_Allreduce` take turns in the same run. For each batch of calls we take the time of the slowest rank; the
# table has the median of these. **algbw** is the array's size divided by the time, and **busbw** is $2(p-1)/p$ times
# that, the rate at which each rank sends in the best algorithm. Times are printed and not asserted: they belong to the
# machine and the moment.

# %%
if p > 1:
    rows = watch.measure_all_reduce(comm, ("auto", "ring"), (1 << 10, 1 << 14, 1 << 18, 1 << 21), say)
    if rank == 0:
        from chapters.support.show import show
        from visualize import plot_bench

        show(plot_bench(rows), "measured_collectives")

# %% [markdown]
# In the left picture each curve has a dotted one of the same colour: MPI's own, measured in turns with it. A message
# costs some microseconds of interpreter. Where there are more ranks than cores, as in this notebook, it also costs a
# wait for a core, often of milliseconds, which hides the rest. So the number of rounds in which ranks wait for one
# another decides: with `auto` $\lg p$ for small arrays and 2 for large ones, with the ring $2(p-1)$, also for
# megabytes, where both send the same bytes. `python -m minipar.bench collectives` measures all operations at more
# sizes.

# %% tags=["active-ipynb"]
# %autopx

# %% tags=["active-ipynb"]
# # Back in one process: stop the eight.
# cluster.stop_cluster_sync()
