# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 10. Is the planner right?
#
# **A planner prints a table, whether it is right or not. How do you find out?**
#
# In chapter 9 the planner agreed with formulas. A formula cannot say what it has forgotten. A run can. minipar is a
# training program whose time can be had on a clock of our choice (7.8), so the planner can be held against a run, in
# three steps: pencil against planner, planner against the program on a clock without noise, planner against the program
# on this machine. Whether the constants of a *GPU* are right, only runs on GPUs can say: the next step is published
# runs. At the end we ask which of its assumptions the planner depends on, and what it does not know at all.
#
# **Letters:** T tokens per sample, m microbatches; h hidden size, L layers, V vocabulary, Psi parameters; d, t, p ranks
# of dp, tp, pp; n bytes of a message; alpha and beta seconds per message and per byte; S operations per second of one
# device; T_F seconds of a layer's forward on one rank.
#
# Run it as `mpirun -n 8 python chapters/10_is_the_planner_right.py`, with any number of ranks. They train what was
# planned, and share out what is only computed.

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

comm = world()  # sets one BLAS thread for each rank; some times here are measured
rank = comm.rank

# %%
from dataclasses import asdict, fields, replace
from math import isclose

import numpy as np

from chapters.support import comparisons_planning as runs
from chapters.support import published_runs as published
from chapters.support import sensitivity
from chapters.support.mistakes_planning import MISTAKES, bytes_of_a_run, later_alarms, recommended
from chapters.support.share_work import shared
from chapters.support.three_models import LARGE, MIDDLE, SMALL
from minipar.bench import layouts as bench
from minipar.bench.costs import Costs, Machine, fit_costs
from minipar.bench.machine import pieces
from minipar.comm import Network
from minipar.plan.cluster import GPUS, Assumptions, Cluster
from minipar.plan.layout import MEGATRON, MINIPAR, Layout
from minipar.plan.model import find_model
from minipar.plan.rank_bytes import layer_activations
from minipar.plan.step_time import step_time

say = printer(rank)  # rank 0 prints and draws; every rank checks
if rank == 0:
    from chapters.support import figures_planning as figures
    from chapters.support.show import show, show_source

# %% [markdown]
# One thing first. Programs differ: whether a rank waits for a message between stages, whether collectives between hosts
# use all network cards, whether ZeRO-1's gather hides behind the next forward. The planner must know which program it
# speaks of. What two programs do differently is data too, a `Framework`. There are two: `MEGATRON`, chapter 9's, what
# the published figures were measured with, and `MINIPAR`, this repository's.

# %%
say("a program that                 Megatron   minipar")
for field in fields(MEGATRON):
    if field.name != "kept":  # what is kept for backward
        say(f"  {field.name:<27}{getattr(MEGATRON, field.name)!s:>10}{getattr(MINIPAR, field.name)!s:>10}")

# %% [markdown]
# ## 10.1 With pencil and paper
#
# Four devices of $S = 10^{10}$ operations per second, in one host; a message of $n$ bytes takes $\alpha + n\beta$ with
# $\alpha$ = 3 µs and $1/\beta$ = 2 GB/s. A GPT with $L$ = 8, $h$ = 48, $V$ = 96; 8 microbatches of one sequence of $T$
# = 24 tokens; float32; tp 2 x pp 2, 1F1B: four layers on each stage, the head on the second.
#
# On each rank a layer takes $T_F = (24Th^2 + 4T^2h)/(tS)$ forward and twice that backward, the head $T_V = 2ThV/(tS)$.
# The busiest rank is the one with the head. It computes
#
# $$m \cdot 3\,(4T_F + T_V).$$
#
# An all-reduce of $n = 4Th$ bytes over $t$ ranks takes $A = 2(t-1)(\alpha + \frac{n}{t}\beta)$. Forward waits for two
# of them in each layer; backward's hide. The sums take
#
# $$m \cdot 4 \cdot 2A.$$
#
# And the pipeline fills and drains: $p - 1$ times what a stage does with one microbatch,
#
# $$(p-1)\,(3 \cdot 4T_F + 4 \cdot 2A).$$
#
# Put in the values before you run the cell. (There is more: the embedding, the loss's own sums, messages between
# stages, the norm. The pencil leaves it out.)

# %%
h, T, V, t, p, m = 48, 24, 96, 2, 2, 8
S, alpha, beta = 1e10, 3e-6, 1 / 2e9
layer, head = (24 * T * h**2 + 4 * T**2 * h) / (t * S), 2 * T * h * V / (t * S)
all_reduce = 2 * (t - 1) * (alpha + 4 * T * h / t * beta)
pencil = {
    "compute": m * 3 * (4 * layer + head),
    "tp": m * 4 * 2 * all_reduce,
    "bubble": (p - 1) * (3 * 4 * layer + 4 * 2 * all_reduce),
}

config, size = runs.configured("--tp 2 --pp 2 --microbatches 8")
step = runs.planned(config, runs.modelled(size, per_host=4))
say(f"{'':<12}{'pencil':>12}{'planner':>12}")
for part, seconds in asdict(step).items():
    if part != "exact":
        say(f"{part:<12}{1e3 * pencil.get(part, 0):>9.3f} ms{1e3 * seconds:>9.3f} ms")
together = sum(pencil.values())
assert isclose(pencil["compute"], step.compute) and 0 < 1 - together / step.total < 0.03
machine = runs.modelled(size, per_host=4)
((seconds,),) = shared(comm, lambda: [bench.modelled_step(config, machine)], [()])
say(f"{'together':<12}{1e3 * together:>9.3f} ms{1e3 * step.total:>9.3f} ms; a run: {1e3 * seconds:.3f} ms")
assert isclose(seconds, step.total, rel_tol=1e-4)

# %% [markdown]
# The last value is the point. It is a *training step*: four ranks (threads) compute all products, send all messages,
# update all parameters. Only the time is modelled: the clock moves by operations / $S$ with each product and by $\alpha
# + n\beta$ with each message. The planner has never seen the program run, and says what it takes, to four digits. The
# pencil is less than 3 % short.
#
# ## 10.2 The program, on a clock without noise
#
# Now the ranks of this run, over MPI, four to a host. Between hosts a message takes 14 µs, and its bytes travel at 0.5
# GB/s. Data parallelism, ZeRO, tensor and sequence parallelism, schedules, recompute. Then 64 ranks, threads of one
# process on eight hosts of eight. And if only messages are wanted, hundreds of ranks fit into *one* thread, because a
# collective is a generator that can be resumed (chapter 3): 512 of them, 64 hosts, sum gradients between hosts and
# gather parameters. With eight ranks, which layouts will be off? (A hint: in `pp 8` one hop of seven leaves a host.)

# %%
modelled = {}
for flags in runs.layouts_of(comm.size, per_host=4):
    config, _ = runs.configured(flags)
    machine = runs.modelled(comm.size, per_host=min(4, comm.size))
    modelled[flags] = runs.planned(config, machine).total, runs.run_on_the_model_clock(comm, config, machine)

FAR = (
    "--dp 64 --zero-stage 3 --microbatches 2",
    "--dp 4 --tp 4 --pp 4 --zero-stage 1 --sequence-parallel --microbatches 4",
)
modelled |= dict(zip(FAR, shared(comm, runs.on_64_threads, [(flags,) for flags in FAR]), strict=True))
collectives = shared(comm, runs.collective_of_512, [("reduce-scatter",), ("gather",)])
names = ("512 ranks: a reduce-scatter in a ring", "512 ranks: a pairwise gather")
for flags, (prediction, run) in (modelled | dict(zip(names, collectives, strict=True))).items():
    say(f"{flags:<76}{1e3 * prediction:>9.3f}{1e3 * run:>9.3f} ms {prediction / run - 1:>+8.2%}")
assert all(abs(prediction / run - 1) < 0.05 for prediction, run in modelled.values())
assert all(isclose(prediction, run, rel_tol=1e-9) for prediction, run in collectives)

# %% [markdown]
# To rounding, but for pipelines some of whose hops leave a host while others do not: the planner takes the slower link
# for all of them, and is 2 or 3 % too high.
#
# ## 10.3 This machine
#
# On the `cpu` clock a rank's time is its own CPU time, and messages take what a network model says (7.8). Now
# computation is real. Its price must be *measured*: not by timing training steps and fitting the planner to them, which
# would prove nothing, but piece by piece. One block's forward, its two backward halves, the head, the embedding, the
# norm, the update, each for a dozen shapes. To these times few constants are fitted. The simplest fit has two: a
# block's forward takes so many seconds, and so many per operation.

# %%
def measured_pieces(number):
    """CPU seconds of each piece, for one shape."""
    return pieces(runs.SHAPES[number], 3)


comm.barrier()
times = shared(comm, measured_pieces, [(number,) for number in range(len(runs.SHAPES))])
shapes = [shape for shape in runs.SHAPES if shape.tp == 1]
work = [shape.samples * bench_shape.layer_flops(shape.seq_len) for shape in shapes]
