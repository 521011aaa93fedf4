# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 7. Pipelines and their bubbles
#
# **Give each rank some of the layers. How do you keep all of them busy?**
#
# A pipeline cuts the model by depth. Rank 0 has the first layers, rank 1 the next, and so on. Hardly anything travels:
# one activation forward and one gradient back at each cut. But a rank can only work on what the rank before it has
# finished, so ranks wait. The time they wait is the **bubble**.
#
# Four ranks that take turns wait for three quarters of the time. At the end of this chapter the same four ranks wait
# for 5.9 % of it, they keep no more than four microbatches in memory, and the result is that of one device **bit for
# bit**. You can then say for each schedule how long its ranks are idle and why, what it keeps in memory, and what it
# sends.

# %% tags=["active-ipynb"]
# from chapters.support.notebook import start
#
# cluster = start(8)

# %%
from chapters.support.show import printer
from minipar.comm import world
from minipar.parallel.pipeline.actions import simulate
from minipar.parallel.pipeline.schedules import make

comm = world()
rank, ranks = comm.rank, comm.size
say = printer(rank)  # rank 0 prints and draws; every rank checks
if rank == 0:
    from chapters.support.ch07 import figures
    from chapters.support.show import show, show_source
    from visualize import plot_schedule

    show(plot_schedule(simulate(make("naive", 4, 3))), "07_naive")

# %% [markdown]
# The picture is the naive pipeline: four ranks, three *microbatches*. A number in a box is a microbatch, a part of the
# step's samples. Blue is its forward on a rank, orange its backward, which takes twice as long, because it computes two
# products for each one of forward. The rest is bubble: at each moment one rank works. Under the boxes: how many
# **activations are alive**. A forward keeps its intermediate results until its backward has used them. This pipeline
# keeps those of one microbatch.
#
# Among the strategies of this course pipelines stand here:

# %%
if rank == 0:
    from chapters.support.overview import draw_strategies

    show(draw_strategies(["pp"]), "07_here")

# %% [markdown]
# ## 7.1 A schedule is data
#
# *Core, 8 minutes.*
#
# A *stage* is a run of layers. Stage 0 begins with the embedding, the last one ends with the output head and the loss.
# The samples of a step are cut into $m$ **microbatches**. They follow one another through the $p$ ranks, and their
# gradients add up until the step's one update. Two things are done for each stage and microbatch:
#
# - `F`, the forward of the stage: takes an activation, gives an activation;
# - `B`, its backward: takes the gradient of what the stage gave, gives the gradient of what it took.
#
# Only the last rank knows the loss. It adds up the losses of its microbatches. Once per step a sum over the ranks, to
# which the others add 0, brings the result to all: 8 bytes that no schedule has to contain.
#
# We write an action as PyTorch does: `2F0` is the forward of stage 2 for microbatch 0. A **schedule** is a list of
# actions for each rank, and nothing else. The naive one finishes a microbatch before it begins the next.


# %%
def naive_lists(p, m):
    """The actions of each rank in order, as (kind, microbatch, stage). Rank r has stage r."""
    return [[(kind, i, r) for i in range(m) for kind in "FB"] for r in range(p)]


def as_text(actions):
    return " ".join(f"{s}{kind}{i}" for kind, i, s in actions)


def library_lists(name, p, m):
    return [[(a.kind, a.microbatch, a.stage) for a in actions] for actions in make(name, p, m).ranks]


for r, actions in enumerate(naive_lists(3, 2)):
    say(f"rank {r}: {as_text(actions)}")
SIZES = [(p, m) for p in range(1, 7) for m in range(1, 19)][rank::ranks]  # all sizes; each rank checks its share
assert all(naive_lists(p, m) == library_lists("naive", p, m) for p, m in SIZES)

# %% [markdown]
# The library's function makes an `Action` of each triple and gives the schedule a name. `save_csv` and `load_csv`
# exchange it with PyTorch, as a row for each rank.
#
# ### What an action needs
#
# *Core, 6 minutes.*
#
# `2F0` needs `1F0`. `2B0` needs its own forward, `2F0`, and the gradient from the next stage, `3B0`. A rank does its
# list in order, and an action begins when the rank is free and what it needs is there. That is all that a simulator has
# to know. (`I` and `W`, the two halves of a backward, come in 7.5; `W` needs its `I`.)


# %%
def needs(kind, i, s, last):
    """The actions whose results this one uses; `last` is the last stage."""
    if kind == "F":
        return [("F", i, s - 1)] if s > 0 else []
    if kind == "W":
        return [("I", i, s)]
    return [("F", i, s)] + ([(kind, i, s + 1)] if s < last else [])


def timed(lists, times):
    """The (start, end) of each action; times[kind] is the time of an action, and messages take none."""
    last = max(s for actions in lists for _, _, s in actions)
    slots, free, todo = {}, [0] * len(lists), [list(actions) for actions in lists]
    while any(todo):
        done = len(slots)
        for r, actions in enumerate(todo):
            while actions and all(need in slots for need in needs(*actions[0], last)):
                action = actions.pop(0)
                start = max([free[r], *(slots[need][1] for need in needs(*action, last))])
                free[r] = start + times[action[0]]
                slots[action] = start, free[r]
        assert len(slots) > done, "the ranks wait in a circle"
    return slots


def idle(lists, times):
    """The time from the first action to the last, less the work of a rank, which is the same for each."""
    return max(end for _, end in timed(lists, times).values()) - sum(times[kind] for kind, _, _ in lists[0])


# What F, I and W take, in eight cases: all claims about idle times below are checked with each.
CASES = ((1, 1, 1), (4, 5, 3), (2, 3, 1), (3, 2, 5), (1, 3, 2), (1, 1, 3), (2, 3, 6), (4, 1, 6))
TIMES = [{"F": f, "I": i, "W": w, "B": i + w} for f, i, w in CASES]
EQUAL, REAL = TIMES[:2]  # 4, 5, 3 is nearer to real layers: see 7.9
assert all(idle(naive_lists(p, m), t) == (p - 1) * m * (t["F"] + t["B"]) for p, m in SIZES for t in TIMES)

# %% [markdown]
# In the naive schedule each microbatch goes down all ranks and back before the next one enters. An `F` takes the time
# $T_F$ and a `B` the time $T_B$ (later $T_I$ and $T_W$). So the time from the first action to the last is $m p
# (T_F+T_B)$, of which each rank works $m (T_F+T_B)$. In this chapter
#
# $$\text{bubble} = \frac{\text{idle}}{\text{total}} = \frac{(p-1)\,m(T_F+T_B)}{p\,m(T_F+T_B)} = \frac{p-1}{p}.$$
#
# With 4 ranks, three quarters of their time are idle, however many microbatches there are.
#
# ### In the library
#
# *Deeper, 5 minutes.*
#
# The library's simulator has the same two parts. It also knows the time of a message, and it names the actions that
# wait in a circle.

# %%
from minipar.parallel.pipeline.actions import Schedule

if rank == 0:
    show_source(Schedule.needs, simulate)

# %% [markdown]
# ## 7.2 GPipe: many microbatches at once
#
# *Core, 4 minutes.*
#
# Nothing forbids microbatch 1 to enter while microbatch 0 is further down. GPipe (Huang et al. 2019, arXiv 1811.06965)
# does all forwards, then all backwards.


# %%
def gpipe_lists(p, m):
    return [[("F", i, r) for i in range(m)] + [("B", i, r) for i in range(m)] for r in range(p)]


assert all(gpipe_lists(p, m) == library_lists("gpipe", p, m) for p, m in SIZES)
assert all(idle(gpipe_lists(p, m), t) == (p - 1) * (t["F"] + t["B"]) for p, m in SIZES for t in TIMES)

# %% [markdown]
# Why $(p-1)(T_F+T_B)$? The last rank starts when the first forward has come through $p-1$ ranks, after $(p-1)T_F$, and
# then never waits: its first backward follows its last forward at once. When it is done, the last gradient still has
# $p-1$ ranks to go up: $(p-1)T_B$. So every rank idles for
#
# $$T_{\text{idle}} = (p-1)(T_F+T_B), \qquad \text{bubble} = \frac{T_{\text{idle}}}{m(T_F+T_B) + T_{\text{idle}}}
# = \frac{p-1}{m+p-1}.$$
#
# More microbatches, smaller bubble: 3/11 with $p = 4$ and $m = 8$. The price is memory. All $m$ microbatches are alive
# when the first backward begins. GPipe therefore *recomputes*: of each microbatch a rank keeps only what has entered
# its *stage*, and backward runs the forward of the whole stage again. (`--recompute full` does that per *block*: it
# keeps what enters each block. So it keeps more, and needs less while one block is recomputed. 7.6 counts it.)
#
# ## 7.3 1F1B: the same bubble, less memory
#
# *Core, 10 minutes.*
#
# Rank $r$ cannot do a backward before its first microbatch has been down to the last rank and back. It runs ahead by
# $p-1-r$ forwards: those that fit while microbatch 0 goes down. Then it waits for the first gradient. It could run more
# forwards meanwhile, but they would cost memory and the step would not end earlier; the picture shows why. After these
# $p-1-r$ *warm-up* forwards comes the *steady state*: each further forward is followed by a backward, which frees what
# a forward took. At the end, in the *cool-down*, only backwards are left. This is the synchronous form of PipeDream's
# order (Narayanan et al. 2019), called PipeDream-Flush or **1F1B** (Narayanan et al. 2021, arXiv 2104.04473, section
# 2.2).
#
# Exercise 10 asks for these lists: `make exercises PYTEST="-k e10"`. Write them before you open the next cell. And
# guess: with $p = 4$ and $m = 8$ rank 0 of GPipe holds 8 activations. How many does rank 0 of 1F1B hold?

# %%
from chapters.support.predict import predict, reveal

predict("activations on rank 0 with 1F1B", ...)  # replace the dots by your answer


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def one_f_one_b_lists(p, m):
    lists = []
    for r in range(p):
        ahead = p - 1 - r
        actions = [("F", i, r) for i in range(min(ahead, m))]  # warm-up
        for i in range(m):
            if ahead + i < m:  # steady state; afterwards only backwards are left: the cool-down
                actions.append(("F", ahead + i, r))
            actions.append(("B", i, r))
        lists.append(actions)
    return lists


# %%
from itertools import pairwise

from minipar.parallel.pipeline.actions import Durations


def longest_path(lists, slots):
    """The chain that ends with the last action, and in which each action begins when the one before it ends."""
    last = max(s for _, _, s in slots)
    before = {b: a for actions in lists for a, b in pairwise(actions)}  # on the same rank
    path = [max(slots, key=lambda action: slots[action][1])]
    while slots[path[0]][0] > 0:
        waited_for = [before.get(path[0]), *needs(*path[0], last)]
        path.insert(0, next(a for a in waited_for if a in slots and slots[a][1] == slots[path[0]][0]))
    return path


for p, m in SIZES:
    lists = one_f_one_b_lists(p, m)
    assert lists == library_lists("1f1b", p, m)
    assert m < p or all(idle(lists, t) == (p - 1) * (t["F"] + t["B"]) for t in TIMES)
    library = simulate(make("1f1b", p, m), Durations(4, 5, 3))
    assert library.makespan == max(end for _, end in timed(lists, REAL).values())
    assert library.peak_activations == [min(m, p - r) for r in range(p)]
reveal("activations on rank 0 with 1F1B", simulate(make("1f1b", 4, 8)).peak_activations[0], say)
if rank == 0:
    lists = one_f_one_b_lists(4, 6)
    slots = timed(lists, EQUAL)
    pieces = [(r"$(p-1)\,T_F$", 3), (r"$m\,(T_F+T_B)$", 18), (r"$(p-1)\,T_B$", 6)]
    marked = figures.MarkedPath(slots, longest_path(lists, slots), pieces, ahead=[3, 2, 1, 0])
    show(figures.plot_paths({"1F1B, p = 4, m = 6": marked}, r"$T_F = T_I = T_W = 1$, $T_B = 2$"), "07_1f1b_path")

# %% [markdown]
# The thick boxes are the **longest path**: the chain of actions, each of which begins when the one before it ends. No
# schedule is shorter than its longest chain of actions that wait for each other. The chain goes down $p-1$ ranks,
# through the whole list of the last rank, and up $p-1$ ranks. While the boxes of other ranks on this path run, the last
# rank is idle: $(p-1)(T_F+T_B)$. All ranks have equally much work, so each is idle for that long, as with GPipe. (The
# first pair of rank 0's steady state is `F` of microbatch 3 and `B` of microbatch 0; between the two the rank waits.)
#
# The gain is memory: at most $\min(m, p-r)$ microbatches are alive on rank $r$, whatever $m$ is. So $m$ can grow until
# the bubble does not matter. With $p = 4$ and $m = 8$ rank 0 holds 4 activations instead of GPipe's 8.
#
# The library's lists are the same. One function writes those of the naive schedule, of GPipe and of 1F1B, which differ
# in `ahead` alone: 0, $m$, or one forward for each rank that follows. The picture compares 1F1B with GPipe: both end at
# the same time, but fewer activations are alive (lowest part).

# %%
from minipar.parallel.pipeline import schedules

if rank == 0:
    show_source(schedules._in_turn, schedules.one_f_one_b)
    names = {"a backward after each forward": "1f1b", "all forwards first": "gpipe"}
    both = {label: simulate(make(name, 4, 8)) for label, name in names.items()}
    assert [max(line.peak_activations) for line in both.values()] == [4, 8]
    show(plot_schedule(both), "07_gpipe_1f1b")

# %% [markdown]
# ## 7.4 Interleaved: smaller stages, shorter warm-up
#
# *Core, 10 minutes.*
#
# The idle time is $p-1$ times the `F` and `B` of a *stage*. So make stages shorter: give each rank $v$ of them, not one
# after another but $p$ apart, rank $r$ the stages $r, p+r, 2p+r, \dots$ (Narayanan et al. 2021, section 2.2). A
# microbatch goes $v$ times round the ranks. Filling the pipeline now takes $p-1$ stages of length $T_F/v$, so
#
# $$T_{\text{idle}} = \frac{(p-1)(T_F+T_B)}{v}, \qquad \text{bubble} = \frac{p-1}{vm+p-1}.$$
#
# Microbatches go in groups of $p$: a group passes stage $r$ of a rank, then stage $p+r$, and so on. $p$ of them are
# just enough: when the last of the group has left rank 0, the first comes back from the last rank.
#
# How many forwards does rank $r$ do before its first backward? That backward is of microbatch 0 through the rank's
# *last* stage. Count along the thick boxes of the next picture, in which `F` and `B` take one unit each:
#
# - first the group of $p$ microbatches passes the other $v-1$ stages of the rank: $(v-1)p$ forwards;
# - then microbatch 0 goes down to the last rank in $p-1-r$ hops, and its gradient comes back in as many. For each hop
# the rank does one forward, unlike in 1F1B also while the gradient comes back: $2(p-1-r)$ forwards;
# - then the steady state begins, with a forward and a backward.


# %%
def interleaved_lists(p, m, v=2):
    groups = [range(first, min(first + p, m)) for first in range(0, m, p)]
    lists = []
    for r in range(p):
        forwards = [("F", i, turn * p + r) for group in groups for turn in range(v) for i in group]
        backwards = [("B", i, turn * p + r) for group in groups for turn in reversed(range(v)) for i in group]
        ahead = min((v - 1) * p + 2 * (p - 1 - r), m * v)
        actions = forwards[:ahead]
        for k in range(m * v):
            actions += forwards[ahead + k : ahead + k + 1]  # none is left in the cool-down
            actions.append(backwards[k])
        lists.append(actions)
    return lists


for p, m in SIZES:
    if m % p == 0:
        assert interleaved_lists(p, m) == library_lists("interleaved-1f1b", p, m)
        assert all(idle(interleaved_lists(p, m), t) == (p - 1) * (t["F"] + t["B"]) for t in TIMES)  # times of a stage
if rank == 0:
    begin = timed(interleaved_lists(4, 8), {"F": 1, "B": 1})
    show(figures.plot_warm_up(begin, p=4, rank=1, stages=8, end=14), "07_warm_up")

# %% [markdown]
# The paler boxes are a rank's second stage. Rank 1 does $4 + 4$ forwards, then the pair's, then the first backward. No
# rank has waited since its first action.
#
# ### Why must p divide m?
#
# *Deeper, 3 minutes.*
#
# Let $p = 4$ and $m = 6$, so that the last group has two microbatches. The lists are still possible, and the gradients
# would be right. But rank 0 has passed both through its first stage after two forwards, and the first of them comes
# back from rank 3 only after four. How much does that cost? With $m = 4$ or 8, an `F` of 1 and a `B` of 2 each rank
# idles for 9 units:

# %%
predict("idle units with m = 6", ...)  # replace the dots by your answer

# %%
idle_units = {m: idle(interleaved_lists(4, m), {"F": 1, "B": 2}) for m in range(4, 13)}
say(f"idle with p = 4, by m: {idle_units}")
assert [m for m in idle_units if idle_units[m] == 9] == [4, 8, 12]
reveal("idle units with m = 6", idle_units[6], say)
assert idle_units[6] == 19

# %% [markdown]
# With six microbatches each rank is idle for longer than with eight, so the schedule loses what it was made for. The
# library's version has the same order and refuses an $m$ that $p$ does not divide.
#
# ### Two prices
#
# *Core, 3 minutes.*
#
# Interleaving has two prices. Rank 0 holds up to $2(p-1)+(v-1)p+1$ activations, each of $1/v$ of its layers: for $p =
# 4$, $v = 2$ and $m = 8$ these are 11 halves, against 4 wholes in 1F1B. And there are more messages: each of the $pv-1$
# cuts between stages is crossed by $m$ microbatches in both directions, so a step has $2m(pv-1)$, 112 instead of 48.
# The bubble is 3/19 instead of 3/11. In the picture the lighter boxes are a rank's second stage.

# %%
from fractions import Fraction

from minipar.parallel.pipeline.check import check

if rank == 0:
    halves = simulate(make("interleaved-1f1b", 4, 8), Durations(*[Fraction(1, 2)] * 3))
    assert (halves.bubble_fraction, halves.peak_activations[0]) == (Fraction(3, 19), 11)
    assert [sum(check(make(name, 4, 8)).sends) for name in ("1f1b", "interleaved-1f1b")] == [48, 112]
    show(plot_schedule(halves), "07_interleaved")

# %% [markdown]
# ## 7.5 Backward is two things
#
# *Core, 5 minutes.*
#
# Take one linear layer, $y = xA$, and the gradient $dy$. Backward computes two products:
#
# $$\underbrace{dx = dy\, A^{\mathsf T}}_{\texttt{I}} \qquad \underbrace{dA = x^{\mathsf T} dy}_{\texttt{W}}$$
#
# The rank before waits for $dx$. **Nobody waits for $dA$** until the optimizer's step. So split `B` into `I`, the
# gradient of the input, and `W`, the gradient of the weights, and do `W` whenever there is time: in the bubble. This is
# the whole idea of Zero Bubble (Qi et al. 2023).
#
# Two layers by hand: `I` puts a recipe for each weight gradient into a queue, and `W` runs them.

# %%
from functools import partial

import numpy as np

from minipar.autograd import DeferredGradients, defer_weight_gradients
from minipar.parallel.pipeline.stage import PipelineStage

x, dy, first, second = np.random.default_rng(3).normal(size=(4, 16, 16))
between = x @ first  # y = between @ second
queue, gradient = [], dy
for kept, weight in ((between, second), (x, first)):  # I, from the last layer to the first
    queue.append(partial(np.matmul, kept.T, gradient))  # keeps this layer's x and dy alive
    gradient = gradient @ weight.T
d_second, d_first = [recipe() for recipe in queue]  # W, whenever there is time
assert np.array_equal(gradient, dy @ second.T @ first.T)
assert np.array_equal(d_second, between.T @ dy) and np.array_equal(d_first, x.T @ (dy @ second.T))
if rank == 0:
    show_source(DeferredGradients.run, defer_weight_gradients)
    show_source(PipelineStage.backward_input, PipelineStage.backward_weight)

# %% [markdown]
# In the library every product hands over its weight gradient as a recipe. Backward runs it at once, or puts it into a
# queue inside `defer_weight_gradients`. A stage has one queue for each microbatch. The queue holds $x$ and $dy$ of
# every layer until `W`, so an activation is not quite freed when `I` is done.
#
# ### ZB-H1 and ZB-H2
#
# *Core, 8 minutes.*
#
# Take 1F1B and split each `B`. If `W` followed `I` at once, only the gradients' way up would get shorter. Put `W` off
# further: rank $r$ does `W` of microbatch $i$ after `I` of microbatch $i + r$. The last rank keeps $p-1$ of its `W` for
# the end, so its last `I` is done $(p-1)T_W$ earlier. This is **ZB-H1**. It runs no more forwards ahead than 1F1B.
#
# **ZB-H2** is the same with depth 2: rank $r$ runs $2(p-1-r)$ forwards ahead, which fills rank 0's wait for its first
# gradient, and does `W` $2r$ microbatches after `I`. The library has one function for both, with the same argument
# `depth`.
#
# **Memory has two counts.** Counted until `I`, rank $r$ of ZB-H1 holds $p-r$ microbatches, as in 1F1B, and rank 0 of
# ZB-H2 $2p-1$. But a `W` that is put off keeps its inputs alive. In ZB-H1 $r$ of them wait when rank $r$ does a
# forward, so counted until `W`, each rank holds $(p-r) + r = p$ microbatches; in ZB-H2 each holds $2p-1$. The pictures
# and tables of this chapter count until `I`; problem 6 and exercise 11 count until `W`.
#
# Exercise 11 asks for a schedule that beats 1F1B: `make exercises PYTEST="-k e11"`. Try it before you open the next
# cell. And guess: with $p = 4$, $m = 7$ and the times 4, 5, 3 of `F`, `I` and `W`, 1F1B idles for 36 units.

# %%
predict("idle units of 1F1B, ZB-H1 and ZB-H2", ...)  # replace the dots by a list such as [36, 36, 36]


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def split_lists(ahead, delay, m):
    """Rank r runs ahead[r] forwards ahead, and does W delay[r] microbatches after I."""
    lists = []
    for r in range(len(ahead)):
        actions = [("F", i, r) for i in range(min(ahead[r], m))]
        for i in range(m):
            if ahead[r] + i < m:
                actions.append(("F", ahead[r] + i, r))
            actions.append(("I", i, r))
            if i >= delay[r]:
                actions.append(("W", i - delay[r], r))
        lists.append(actions + [("W", i, r) for i in range(max(0, m - delay[r]), m)])
    return lists


def zero_bubble_lists(p, m, depth):
    return split_lists([depth * (p - 1 - r) for r in range(p)], [depth * r for r in range(p)], m)


# %%
reveal(
    "idle units of 1F1B, ZB-H1 and ZB-H2", [idle(library_lists(n, 4, 7), REAL) for n in ("1f1b", "zb-h1", "zb-h2")], say
)
for p, m in SIZES:
    for k in (1, 2):
        lists = zero_bubble_lists(p, m, k)
        assert lists == library_lists(f"zb-h{k}", p, m)
        held = [max(np.cumsum([{"F": 1, "I": 0, "W": -1}[kind] for kind, _, _ in actions])) for actions in lists]
        assert m <= k * (p - 1) or held == [k * (p - 1) + 1] * p  # counted until W
        for t in TIMES if m > k * (p - 1) else []:
            f, i, w = (t[kind] for kind in "FIW")
            assert idle(lists, t) == (p - 1) * max(f, f + i - k * w, i - (k - 1) * f)

# %% [markdown]
# ### The longest path of ZB-H1 and ZB-H2
#
# *Deeper, 8 minutes.*
#
# With depth $k$ (1: ZB-H1, 2: ZB-H2) and $m \ge k(p-1) + 1$ one of three chains is the longest. The cell above has
# asserted this for $p$ to 6, $m$ to 18, and eight sets of times:
#
# | chain | its length beyond the work $m(T_F+T_I+T_W)$ |
# | --- | --- |
# | down: microbatch 0 goes down to the last rank, which then does its whole list | $(p-1)T_F$ |
# | up: the same until the last rank's last `I`, then up to rank 0, and its last `W` | $(p-1)(T_F+T_I-kT_W)$ |
# | back: microbatch 0 goes down, its gradient comes back, then the rest of rank 0's list | $(p-1)(T_I-(k-1)T_F)$ |
#
# In the chain *up* the last rank does $m$ `F`, $m$ `I` and $m - 1 - k(p-1)$ `W`. Each of the other ranks adds one `F`
# on the way down and one `I` on the way up. The chain *back* also passes one `F` and one `I` of each other rank.
# Meanwhile rank 0 does $k(p-1)$ further forwards, which are not on this chain, so they are subtracted. So
#
# $$T_{\text{idle}} = (p-1)\,\max\big(T_F,\;\; T_F+T_I-kT_W,\;\; T_I-(k-1)T_F\big).$$
#
# With $T_F = T_I = T_W$ that is a third of 1F1B's. In the picture the times are 4, 5, 3. ZB-H1's path goes up at the
# end: 18 idle, against 36 in 1F1B. ZB-H2's path ends on the last rank: 12 idle, the way down, which nothing can avoid
# as long as rank 3 has one stage, behind three others.

# %%
if rank == 0:
    panels = {}
    up = [(r"$(p-1)\,T_F$", 12), (r"$m\,(T_F+T_I) + (m-p)\,T_W$", 72), (r"$(p-1)\,T_I$", 15), (r"$T_W$", 3)]
    down = [(r"$(p-1)\,T_F$", 12), (r"$m\,(T_F+T_I+T_W)$", 84)]
    for k, pieces in ((1, up), (2, down)):
        lists = zero_bubble_lists(4, 7, k)
        slots = timed(lists, REAL)
        panels[f"ZB-H{k}, p = 4, m = 7"] = figures.MarkedPath(slots, longest_path(lists, slots), pieces)
    assert [idle(library_lists(name, 4, 7), REAL) for name in ("1f1b", "zb-h1", "zb-h2")] == [36, 18, 12]
    show(figures.plot_paths(panels, "$T_F = 4$, $T_I = 5$, $T_W = 3$"), "07_zero_bubble_paths")

# %% [markdown]
# ### What "zero bubble" means
#
# *Deeper, 8 minutes.*
#
# With $T_F = T_I = T_W = 1$, $p = 4$ and $m = 8$ ZB-H1 and ZB-H2 both idle for 3 of 27 units: 1/9. Where then is the
# zero? In ZB-H2 a rank that has begun never pauses until it is done: rank $r$ works without a gap from time $r$ to time
# $r + 24$. Its three idle units lie *before its first action* and *after its last*. If the next step may begin as soon
# as a *rank* is done, they are filled with that step's work. So Zero Bubble's authors measure each rank from its own
# first action to its own last, and for ZB-H2 this **bubble rate** is 0. For ZB-H1 it is 1/9: rank 0
# begins first, no rank ends later, and it pauses in between. Three conventions are in use:
#
# | | what | GPipe, 1F1B |
# | --- | --- | --- |
# | bubble fraction, here | idle / total | $\frac{p-1}{m+p-1}$ |
# | Megatron's (Narayanan et al. 2021) | idle / ideal | $\frac{p-1}{m}$ |
# | rate (Qi et al. 2023, section 5.3) | pauses / (last end $-$ first start), longest rank | $\frac{p-1}{m+p-1}$ |
#
# But can a rank start its next step alone? It must step its optimizer first. If gradients are clipped by their *global*
# norm, that norm needs every rank's last gradient, so all wait for all, and the idle units before and after are idle
# again. Section 4 of the paper therefore steps at once, with the norm known so far, and corrects or rolls back when the
# true one arrives ("post-validation"). minipar's trainer waits, so it reports idle / total.
#
# The paper's Tables 5 and 6, first row: $p = 8$, $m = 24$, times in ms as measured on its machine, and 0.601 ms for
# each message. With these the simulator gives the published rates. ZB-H2's is 0.1083 and not 0, because there `W` takes
# only half as long as `I`. Rank 0 then begins first and ends last, so all its idle time lies in pauses, and the rate
# equals idle / total.

# %%
h1, h2 = (simulate(make(name, 4, 8)) for name in ("zb-h1", "zb-h2"))
assert h1.bubble_fraction == h2.bubble_fraction == h1.bubble_rate == Fraction(1, 9) and h2.bubble_rate == 0
assert [(row[0].start, row[-1].end) for row in h2.ranks] == [(r, r + 24) for r in range(4)]
for name, published in {"1f1b": 0.2431, "zb-h1": 0.1585, "zb-h2": 0.1083}.items():
    found = simulate(make(name, 8, 24), Durations(18.522, 18.086, 9.337, 0.601))
    assert round(found.bubble_rate, 4) == published
    say(f"{name:<6} bubble rate {found.bubble_rate:.4f} = published;   idle / total {found.bubble_fraction:.4f}")

# %% [markdown]
# ### ZB-V
#
# *Deeper, 5 minutes.*
#
# ZB-H2 pays with twice the activations. The V-shaped schedule (Qi et al. 2024, arXiv 2405.15362) needs no more than
# 1F1B: two stages per rank, the second half of the pipeline running *back up*. Rank $r$ has stages $r$ and $2p-1-r$.
# The last stage lies on rank 0, beside the first. So a microbatch's backward can begin where its forward ended, without
# a way down. A rank holds at most $2p$ activations of half size. And as both ends are on one rank, embedding and head
# are there together. For $T_F = T_I = T_W$ and $m \ge 2p - 1$ no rank ever pauses: the idle time is the start, $p-1$
# half-sized forwards. That is the 1/17 = 5.9 % of the first page.
#
# **DualPipeV** (DeepSeek-V3, 2412.19437) overlaps a forward with a backward on the same V, in
# pairs such as `(0F5;7B1)OVERLAP_F_B`: one half computes while the other communicates, which hides the all-to-alls of
# experts. It needs $m \ge 2p$, and idles $(p-1)(T_{F\&B} + T_B - 3T_W)$, with the times of one stage. In the second
# picture `F` and `I` have a growing share of all-to-alls.

# %%
assert all(idle(library_lists("zbv", p, m), EQUAL) == p - 1 for p, m in SIZES if m >= 2 * p - 1)  # times of a half
if rank == 0:
    from visualize import gallery, plot_schedules

    lines = gallery(4, 8)
    show(plot_schedules({name: lines[name] for name in ("1F1B", "ZB-H1", "ZB-H2", "ZB-V", "DualPipeV")}), "07_gallery")
    show(figures.plot_overlap(4, 16), "07_overlap")

# %% [markdown]
# ## 7.6 Memory against bubble
#
# *Core, 4 minutes.*
#
# All schedules for 4 ranks and 8 microbatches, with equal times and with 4, 5, 3.

# %%
if rank == 0:
    say(figures.schedule_table(4, 8))
    spots = {
        name: (max(check(line.schedule).peak_activations) * 4 / line.schedule.stages) for name, line in lines.items()
    }
    points = {name: (spots[name], float(line.bubble_fraction)) for name, line in lines.items()}
    show(figures.plot_memory_and_bubble(points), "07_memory_and_bubble")
    bubbles = [line.bubble_fraction for line in lines.values()]
    assert bubbles == [Fraction(*each) for each in ((3, 4), (3, 11), (3, 11), (3, 19), (1, 9), (1, 9), (1, 17), (1, 9))]
    real = {name: line.bubble_fraction for name, line in gallery(4, 8, Durations(4, 5, 3)).items()}
    assert real["ZB-H1"] == real["Interleaved 1F1B"] == Fraction(3, 19)

# %% [markdown]
# There is no best row. The bubble falls from 3/11 = 0.273 (1F1B) to 3/19 (interleaved), 1/9 (ZB-H1) and 1/17 (ZB-V).
# With the times 4, 5, 3 ZB-H1 is no better than interleaving: 3/19 for both. Interleaving and ZB-V pay with messages
# (112 and 96 against 48), ZB-H2 with memory: 7 activations against 4. And all zero-bubble schedules keep $x$ and $dy$
# for each `W` that waits. The column "W waiting" counts these; the column of activations, counted until `I`, does not
# contain them. Choose by what is short:
# memory, network, or time.
#
# ### With recompute
#
# *Deeper, 6 minutes.*
#
# A GPT block keeps $20 + 2/h + aT/h$ times $BTh$ elements for its backward. $BTh$ is the size of its input: $B$ samples
# of $T$ tokens with $h$ elements (chapter 6's table without dropout; $a$ heads). In the cell below that is 22.125. A
# rank with $L/p$ blocks, on which `alive` microbatches are alive, holds at most
#
# $$\underbrace{\text{alive}\,\Big(22.125\,\frac{L}{p} + 1\Big) + 5}_{\text{without recompute}} \qquad
# \underbrace{\text{alive}\,\frac{L}{p} + 22.125 + 6}_{\text{with it}}$$
#
# times $BTh$ elements. The $+1$ is the stage's result. 5 are the gradients on their way through one block: 1 of its
# result and 4 of the MLP's inside, which is four times as wide. With `--recompute full` only one array per block is
# multiplied by `alive`: its result, which is the next block's input. (What the stage has received is not in these
# counts.) The block whose backward runs makes its 22.125 and its result again, for one microbatch at a time: so 6 and
# not 5. The price is one more forward for each backward. The ledger of chapter 5 counts both on a stage:

# %%
from chapters.support.ch07 import train as train_pipelines

peak = train_pipelines.peak_activations
for alive, blocks in ((1, 1), (2, 3), (4, 2)):
    assert peak(alive, blocks, recompute=False) == alive * (22.125 * blocks + 1) + 5
    assert peak(alive, blocks, recompute=True) == alive * blocks + 22.125 + 6

# %% [markdown]
# ## 7.7 The lists on the ranks
#
# *Core, 8 minutes.*
#
# A list is a program. `run_list` does one rank's list for a stage $y = \tanh(xA)$ on plain arrays, with sends and
# receives. It serves all lists with one stage per rank. The loss is $\frac12 \sum y^2$ of the last stage, whose
# gradient is $y$ itself.


# %%
def run_list(pipe, lists, weights, batch, blocking=False):
    """Do this rank's list. Return the gradient of its weight, added over all microbatches in their order."""
    x, y, dy, sent, r, m = {}, {}, {}, [], pipe.rank, len(batch)
    weight, d_weight = weights[r], np.zeros_like(weights[r])

    def send(array, peer, tag):
        sent.append(pipe.isend(array, peer, tag))  # starts to send
        if blocking:
            sent[-1].wait()

    def receive(peer, tag):
        return pipe.irecv(np.empty_like(batch[0]), peer, tag).wait()

    for kind, i, _ in lists[r]:
        if kind == "F":
            x[i] = batch[i] if r == 0 else receive(r - 1, i)
            y[i] = np.tanh(x[i] @ weight)
            if r < pipe.size - 1:
                send(y[i], r + 1, i)
        if kind in "BI":
            dy[i] = (y[i] if r == pipe.size - 1 else receive(r + 1, m + i)) * (1 - y[i] ** 2)
            if r > 0:
                send(dy[i] @ weight.T, r - 1, m + i)
        if kind in "BW":
            d_weight += x.pop(i).T @ dy.pop(i)
    for message in sent:
        message.wait()
    return d_weight


runs = train_pipelines.PipelineRuns(comm)  # trains one device on rank 0, to compare all with
pipe, stages, microbatches = runs.pipe, runs.stages, runs.microbatches
weights = np.random.default_rng(5).normal(size=(stages, 16, 16)) / 4
batch = np.random.default_rng(6).normal(size=(microbatches, 8, 16))
expected = train_pipelines.gradients_on_one_device(weights, batch)[pipe.rank]
for name in ("naive", "gpipe", "1f1b", "zb-h1", "zb-h2"):
    assert np.array_equal(run_list(pipe, library_lists(name, stages, microbatches), weights, batch), expected), name
say(f"five schedules on {stages} ranks, m = {microbatches}: the gradients of one device, bit for bit")

# %% [markdown]
# Why can the bits be equal? A stage does the same products on the same values as the whole model would. Sums over
# microbatches are taken in their order 0, 1, 2, ... in every schedule.
#
# ### In the library
#
# *Deeper, 6 minutes.*
#
# The library's executor does the same with a GPT, and a receive is a step of its list. It starts a receive when the
# list comes to it and waits for it when its result is used. It serves several stages on a rank: a result for a stage of
# the same rank is handed over without a message. And it counts the activations that are alive.

# %%
from minipar.parallel.pipeline.stage import PipelineExecutor

if rank == 0:
    show_source(PipelineExecutor.run, PipelineExecutor._message)
for name in [each for each in schedules.SCHEDULES if each != "dualpipev" or microbatches >= 2 * stages]:
    schedule = make(name, stages, microbatches)
    report, run = check(schedule), runs.train(name)
    assert run.verdict.passed, run.verdict.line
    listed = report.sends[pipe.rank], report.peak_activations[pipe.rank]
    assert stages == 1 or (run.messages, run.peak_alive) == listed
    say(f"{name:<17} = 1 device, bit for bit; alive at most, by rank: {report.peak_activations}")
right = run.losses  # the same with every schedule

# %% [markdown]
# This is the real trainer (`--pp --schedule --microbatches`), in float64, with dropout and with clipping, on stages of
# unequal size, two steps with each schedule. Parameters, losses and gradient norms are those of one device, bit for
# bit: dropout masks are keyed by sample and layer, not by rank, and the norm is added up part by part, in one order.
# The most activations alive are those that the list says. The bytes over the cuts are $BTh$ elements per microbatch,
# cut and direction, besides those of the tied embedding (7.10).
#
# ## 7.8 Messages, and the deadlock that blocking sends make
#
# *Deeper, 8 minutes.*
#
# `lower` adds the messages to a list: a SEND where a result is made, a RECV on the other rank. In which order? Take the
# middle of 1F1B on two ranks. A hand-written list says what seems natural: *send what you have made, then receive what
# you need*.


# %%
from minipar.parallel.pipeline.actions import parse_action


def written(*lists):
    """A schedule from text, one string per rank."""
    return Schedule.of("by hand", [[parse_action(action) for action in actions.split()] for actions in lists])


by_hand = ("0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1", "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1")
send_first = written(*by_hand)
assert "rank 0 at 0SEND_F1, rank 1 at 1SEND_B0" in train_pipelines.refusal(check, send_first)
say(train_pipelines.refusal(check, send_first))
if rank == 0:
    show(figures.draw_crossing([actions.split() for actions in by_hand], stopped=(3, 3)), "07_crossing")

# %% [markdown]
# Arrows are messages; the two red ones cross. Rank 0 is in the middle of sending `F1` and will receive `B0` afterwards.
# Rank 1 is in the middle of sending `B0` and will receive `F1` afterwards. If a send returns only when its message has
# been received, both wait for ever. Nothing is wrong with the computations.
#
# Whether it hangs depends on how messages are sent. MPI's blocking `Send` may copy a *small* message aside and return
# (*eager*), but must wait for the receiver with a large one (*rendezvous*; [chapter 3](03_collectives.ipynb)). So such
# a program passes all tests on a toy model, and hangs when the hidden size grows. Two remedies:
#
# - **an order** that works even if every send blocks, which is what the checker demands, and what `lower` produces: it
#   goes through a simulation in time and puts each SEND and its RECV at the same moment;
# - **messages that do not block**: start the send, go on, and wait for it at the end of the step. `run_list` and the
#   executor do so. (Megatron pairs the two: one call starts `send_forward` and `recv_backward` together.)
#
# `run_list` sends first. Here it runs with sends that do not block, and then with sends that are waited for at once, on
# two threads: `run_local` is a transport without eager copies that sees when every rank waits.

# %%
from minipar.comm import run_local
from minipar.parallel.pipeline.check import lower

if rank == 0:
    two_ranks = one_f_one_b_lists(2, 4), np.ones((2, 16, 16)), np.ones((4, 8, 16))
    run_local(2, run_list, *two_ranks)
    message = train_pipelines.refusal(run_local, 2, run_list, *two_ranks, True)
    say(f"not blocking: runs\nblocking: {message}")
    lowered = lower(make("1f1b", 2, 2)).ranks
    say("\n".join(f"in the order of `lower`, rank {r}: {' '.join(map(str, lowered[r]))}" for r in range(2)))

# %% [markdown]
# ## 7.9 How long `F`, `I` and `W` take
#
# *Deeper, 8 minutes.*
#
# For one block with $N = BT$ tokens forward has $24 N h^2$ operations in the four linear layers, and $4 N T h$ in
# attention's two products (scores, and probabilities times values). Backward does two products for each. Those of the
# *linear* layers are one for `I` and one for `W`. Attention's products have no weights, so both are `I`:
#
# $$T_F \propto 24Nh^2 + 4NTh, \qquad T_I \propto 24Nh^2 + 8NTh, \qquad T_W \propto 24Nh^2.$$
#
# So in operations of matrix products $T_W < T_F < T_I$, the more so the longer the sequence. For $h = 4096$:

# %%
if rank == 0:
    h, lengths = 4096, [1024 * k for k in range(1, 17)]
    linear = 24 * h**2  # operations per token
    operations = {"F": [linear + 4 * T * h for T in lengths], "I": [linear + 8 * T * h for T in lengths]}
    show(figures.plot_operations(lengths, operations | {"W": [linear] * len(lengths)}), "07_operations")

# %% [markdown]
# Measured times can differ,
# because LayerNorm, softmax and residuals are in F and I. The head adds $2NhV$ to each on the
# last stage.
#
# Is the simulator right? The executor runs on the `model` clock (chapter 3), which every matrix product of the
# trainer advances by its number of operations. Four ranks as threads; a message takes 50,000 operations. Every start
# and end of every action is the simulator's.

# %%
if rank == 0:
    T, h, V = (train_pipelines.CLOCK_SHAPE[key] for key in ("seq_len", "hidden", "vocabulary"))
    N, message = 1 * T, 50_000  # a microbatch is one sample
    block = {"F": 24 * N * h**2 + 4 * N * T * h, "I": 24 * N * h**2 + 8 * N * T * h, "W": 24 * N * h**2}
    head = dict.fromkeys("FIW", 2 * N * h * V)
    for name in schedules.SCHEDULES:
        ran = train_pipelines.timeline_on_model_clock(name, message)
        schedule = make(name, 4, 8).unpaired()
        predicted = simulate(schedule, train_pipelines.stage_durations(block, head, schedule.stages, message))
        assert train_pipelines.same_times(ran, predicted)
        say(f"{name:<17} every start and end ==;   bubble {float(predicted.bubble_fraction):.4f}")

# %% [markdown]
# These bubbles are larger than in 7.6, because messages take time and the last stage has the head as well. (In the
# naive schedule only the messages matter.) The slowest stage sets the pace, and the others wait for it at every
# microbatch. A bubble counts every kind of waiting, and where the ranks' work is unequal it is the mean over the ranks.
#
# The model clock does not count LayerNorm, GELU, softmax, residuals, the loss and the optimizer. They are few
# operations but move much memory, so on a GPU they take time. `mpirun -n 8 python -m minipar.bench pipeline` measures
# bubbles on each rank's processor clock.
#
# ## 7.10 The embedding that two ranks need, and replicas
#
# *Deeper, 8 minutes.*
#
# GPT-2's output head *is* the token embedding: one matrix of $V \times h$ for $V$ words, used first and last. In a
# pipeline two ranks need it. Its gradient is a sum of two contributions, one from each end. Both copies must get **the
# sum**, once, and take the same update.
#
# minipar gives the matrix to the first stage. The head borrows it. After the last backward the head's contribution
# travels up, is added, and after the optimizer's step the new values travel down: $Vh$ elements each way per step,
# which come on top of the messages that 7.7 counts. (Megatron all-reduces the two gradients and updates both copies.
# Then both ranks hold optimizer state, and the norm must not count the matrix twice.) ZB-V has both ends on rank 0 and
# sends none.
#
# The bits need care: $a + b$ is the same in any order, but contributions of *several microbatches* from *two ends* are
# not. One device would add head, embedding, head, embedding, ... So minipar keeps the two sums apart until the step, on
# one device too.

# %%
from minipar.parallel.pipeline.stage import PipelineParallel

if rank == 0:
    show_source(PipelineParallel.fetch_tied_gradient)

# %% [markdown]
# **Replicas.** Pipelines go with data parallelism: $d$ replicas of the whole pipeline, each with its own samples. The
# gradients of a stage are summed over the replicas once per step (chapter 4). When may they travel? A stage's gradients
# are complete in its **last microbatch's** backward. The last rank is there first, while the ranks before it still
# work. Its all-reduce travels in the cool-down of the others, in what would be bubble. Two pipelines of two ranks on
# the model clock with a slow network take 53.7 ms for a step if gradients travel as soon as they are complete, and
# 54.9 ms if all wait for the end. On the ranks, two replicas of a pipeline of half as many stages equal one device
# that takes the replicas one after the other.

# %%
if rank == 0:
    milliseconds = [1e3 * train_pipelines.step_with_replicas(overlap) for overlap in (True, False)]
    say("with overlap {:.1f} ms, without {:.1f} ms".format(*milliseconds))
    assert [round(each, 1) for each in milliseconds] == [53.7, 54.9]
if ranks % 2 == 0 and ranks > 2:
    run = runs.train("zb-h1", stages=ranks // 2)
    assert run.verdict.passed, run.verdict.line
    say(f"--pp {ranks // 2} --dp 2: {run.verdict.line}")

# %% [markdown]
# Why once per step, and not after every microbatch? Each further sum would send all gradients again. ZeRO 2 and 3 could
# keep gradients sharded all the time only by doing that, $m$ times per step (chapter 5); in a pipeline minipar
# therefore lets them accumulate whole, and shards them once.
#
# ## 7.11 Never draining: PipeDream and 2BW
#
# *Deeper, 6 minutes.*
#
# All schedules so far are *synchronous*: the pipeline drains, then the optimizer steps. **PipeDream** (Narayanan et al.
# 2019) does not drain. Microbatches enter in 1F1B's order, and a stage updates its weights after every backward. Only
# the first and the last microbatches of the whole training see a bubble.
#
# But then a microbatch meets weights of different age. Between its forward and its backward stage $s$ makes $p-1-s$
# updates, for the microbatches that entered before it. Its backward must use the weights of its forward; otherwise the
# result is not the gradient of any function. So stage $s$ keeps up to $p-s$ versions: *weight stashing*. **2BW**
# (Narayanan et al. 2020, arXiv 2006.09503) updates only after $m$ microbatches, so that two versions are enough, and
# every stage sees the same delay. With $\theta_u$ for the parameters after $u$ updates and learning rate $\eta$:
#
# $$\theta_{u+1} = \theta_u - \eta\, \nabla f(\theta_{u-1}).$$
#
# In the picture the digit in a box is the version of the weights, and the hatched boxes are backwards:

# %%
from chapters.support.ch07.pipedream import Staleness, differences_from_one_device

if rank == 0:
    slots = timed(one_f_one_b_lists(4, 16), EQUAL)
    rules = {"PipeDream": Staleness(4).version, "2BW, an update after 4 microbatches": Staleness(4, group=4).version}
    show(figures.draw_versions(slots, rules, end=30), "07_versions")

# %% [markdown]
# Follow a row of PipeDream: a backward has the version of its forward, which on stage 0 is up to three updates old. On
# the last stage it is the newest. In 2BW every stage uses the same version, the one before the newest.
#
# Neither equals synchronous training, because the gradients are of other weights. What *can* be proved: each equals one
# device that computes each microbatch with the same old weights, bit for bit.

# %%
assert [Staleness(4).version(s, 9) for s in range(4)] == [6, 7, 8, 9]  # the stages before the last see older weights
assert {Staleness(4, group=4).version(s, 9) for s in range(4)} == {1}  # 9 is in the third group; 2 is not complete
for group, name in ((1, "PipeDream"), (max(2, stages), "2BW")):
    same, apart = differences_from_one_device(pipe, group)
    assert same
    say(f"{name} on {stages} ranks: the bits of 1 device with the same old weights; {apart:.1e} from synchronous ones")

# %% [markdown]
# Does staleness harm? It acts like a delay in a control loop. Small learning rates bear it, large ones oscillate; and
# $p-1$ updates of delay grow with the machine. Large models are trained synchronously today.
#
# ## 7.12 Mistakes, and what notices them
#
# *Deeper, 8 minutes.*
#
# We have two instruments: **check**, before anything runs, which sees lists only, and **verify**, afterwards: does one
# device get the same parameters, losses and norms? Before you read on: which catches which?
#
# 1. **A receive is missing.** And what if the *send* were missing too?
# 2. **A backward comes before its forward**, or each rank's order is possible, but together they wait in a circle.
# 3. **A W is forgotten.**
# 4. **A microbatch is counted twice**: the schedule is right, but the program gives microbatch 1 the samples of
# microbatch 0.
# 5. **The tied gradient is dropped**: the head's contribution stays on the last rank.

# %%
predict("caught by check", ...)  # replace the dots by a list of the mistakes 1 to 5, such as [1, 2]

# %%
up, down = (" ".join(map(str, actions)) for actions in lower(make("1f1b", 2, 2)).ranks)
mistakes = {
    "1. a receive is missing": (up, down.replace("1RECV_F1 ", "")),
    "   its send too": (up.replace("0SEND_F1 ", ""), down.replace("1RECV_F1 ", "")),
    "2. a backward before its forward": ("0F0 0F1 0B0 0B1", "1B0 1F0 1F1 1B1"),
    "   a circle": ("0F0 0B0 0F1 0B1", "1F0 1F1 1B1 1B0"),
    "3. a W is forgotten": ("0F0 0I0 0W0", "1F0 1I0"),
}
for what, lists in mistakes.items():
    say(f"{what}\n     check: {train_pipelines.refusal(check, written(*lists))}")
for what, kind in (("4. counted twice", train_pipelines.CountsTwice), ("5. dropped", train_pipelines.DropsTied)):
    run = runs.train("1f1b", kind=kind)
    assert stages == 1 or (run.verdict.passed, run.losses[0] == right[0]) == (False, what == "5. dropped")
    say(f"{what}: losses {run.losses[0]:.4f}, {run.losses[1]:.4f}\n     {run.verdict.line}")
reveal("caught by check", [int(what[0]) for what in mistakes if what[0] != " "], say)

# %% [markdown]
# The checker refuses 1, 2 and 3 before anything runs. (Without the send *and* the receive of an activation the forward
# has no input: it is refused as well.) It sees a list, not what an action means: only verify catches 4 and 5. With
# mistake 5 the first loss is right, for the weights are: only their update is wrong. The run learns and looks healthy.
# In a real code base this bug has another face: with two copies of the matrix that are updated separately, the copies
# drift apart.
#
# ## 7.13 PyTorch's names
#
# *Deeper, 2 minutes.*
#
# | minipar | PyTorch, `torch.distributed.pipelining` | Megatron-LM (M) and DeepSpeed (D) |
# | --- | --- | --- |
# | `PipelineStage` | `PipelineStage` | D: `PipelineModule`, `LayerSpec` |
# | `--microbatches` | `n_microbatches` of a schedule | D: `gradient_accumulation_steps` |
# | `--pp` | the size of the group | M: `--pipeline-model-parallel-size` |
# | `gpipe` | `ScheduleGPipe` | |
# | `1f1b` | `Schedule1F1B` | M: `forward_backward_pipelining_without_interleaving`; D: `TrainSchedule` |
# | `interleaved-1f1b` | `ScheduleInterleaved1F1B` | M: `forward_backward_pipelining_with_interleaving` |
# | `zb-h1` | `ScheduleInterleavedZeroBubble` is nearest | |
# | `zbv`, `dualpipev` | `ScheduleZBVZeroBubble`, `ScheduleDualPipeV` | |
# | `I`, `W` | `stage_backward_input`, `stage_backward_weight` | |
# | `load_csv`, `lower` | `_load_csv`, `_add_send_recv` | D: the instructions of a `PipeSchedule` |
# | the tied embedding | left to the user | M: an embedding group; D: `TiedLayerSpec` |
#
# The same in PyTorch: `chapters/pytorch/ch07.py`.
#
# ## 7.14 Problems
#
# *Deeper, 40 minutes.*
#
# 1. **$p = 8$.** How many microbatches does 1F1B need for a bubble *below* 0.1? And interleaving with $v = 2$?
# 2. **$p = 8$, $m = 16$, times 4, 5, 3.** What are the idle times and bubbles of 1F1B and ZB-H1? By which factor does
# ZB-H1 divide the idle time, and by which the bubble?
# 3. **$p = 4$, $v = 3$, $m = 8$.** How many forwards does each rank of the interleaved schedule do in its warm-up? How
# many activations, each of a third of a rank's layers, does rank 0 hold at most, and how many messages travel in a
# step?
# 4. **GPipe or 1F1B?** $p = 4$, $m = 32$, three blocks per rank, 22.125 as in 7.6. What is the peak of rank 0, in units
# of $BTh$ elements: GPipe, 1F1B, and both with recompute?
# 5. **`W` longer than `F` and `I` together.** With depth 1, $(p-1)(T_F+T_I-T_W)$ becomes negative if $T_W > T_F+T_I$.
# What is ZB-H1's idle time then, and why?
# 6. **Five activations.** With $p = 4$, $m = 8$ and times 4, 5, 3 ZB-H1 idles for 18 and holds 4 activations on rank 0,
# counted until `I`; ZB-H2 idles for 12 and holds 7. Between them lies `ahead` 4, 3, 2, 0, with which rank 0 holds 5.
# Let `delay` be 0, 1, 2 on the first three ranks. Try 3, 4, 5, 6 on the last, with `split_lists` and `idle`. Which is
# the first that idles for less than 14? How many microbatches does the last rank then hold, counted until `W`?
# 7. **The head.** With $V = 50{,}257$, $h = 768$, $T = 1024$, 12 blocks: how many blocks does the head cost in forward?
# (It cannot be split, and a stage may have no block. The embedding costs nothing.) How should the cuts lie with 4
# ranks? And which bubble, averaged over the ranks, remains at least with 8, whatever the schedule?
#
# ## 7.15 Answers
#
# *Deeper, 10 minutes.*
#
# <details><summary>Answers</summary>
#
# 1. $(p-1)/(vm+p-1) < 1/10$ means $vm > 9(p-1) = 63$: $m = 64$ for 1F1B. With $v = 2$, $m > 31.5$, and $p$ divides
# $m = 32$.
# 2. Idle: $7 \cdot 12 = 84$ and $7 \cdot (4+5-3) = 42$, half. The work is $16 \cdot 12 = 192$, so the bubbles are
# $84/276 = 7/23$ and $42/234 = 7/39$. The bubble is divided by 39/23 and not by 2, because the total has become
# shorter too.
# 3. 14, 12, 10, 8 forwards: $2(p-1-r) + (v-1)p$. Rank 0 holds one more, 15 thirds: 5 wholes. There are $pv - 1 = 11$
# cuts, each crossed by 8 microbatches in both directions: 176 messages.
# 4. GPipe $32\,(22.125 \cdot 3 + 1) + 5 = 2161$, with recompute $32 \cdot 3 + 28.125 = 124.125$. In 1F1B 4 are alive:
# 274.5, and 40.125 with recompute. Recompute helps GPipe more than 1F1B's order does, and costs a forward; 1F1B costs
# nothing.
# 5. $(p-1)\max(T_F, T_I)$: the chain *up* is shorter than the other two. The last rank cannot begin before $(p-1)T_F$,
# and rank 0 waits $(p-1)T_I$ for its first gradient, because its own forwards cover only the way down.
# 6. The idle times are 18, 15, 13, 13: so 5. From 3 to 4 the chain *up* gets shorter by $T_W$; at 5 another chain is
# the longest. The last rank does its first `W` after 6 forwards, so it holds 6 until `W`.
# 7. A block has $24h^2 + 4Th$ operations per token and the head $2hV$: 4.46 blocks. With 4 ranks the cuts 4, 4, 4 and
# 0 + head are nearly equal. With 8 ranks the head alone takes more than twice the mean of $16.46/8$ blocks. It sets the
# pace, and at least $1 - 2.06/4.46 = 0.54$ of the ranks' time is idle.
#
# </details>

# %% jupyter={"source_hidden": true} tags=["hide-input"]
assert [simulate(make("1f1b", 8, m)).bubble_fraction for m in (63, 64)] == [Fraction(1, 10), Fraction(7, 71)]
assert idle(interleaved_lists(8, 32), EQUAL) == 7 * 3  # beside 64 stages of 3 each: 7/71
assert [idle(library_lists(name, 8, 16), REAL) for name in ("1f1b", "zb-h1")] == [84, 42]
assert Fraction(84, 192 + 84) / Fraction(42, 192 + 42) == Fraction(39, 23)
assert [[kind for kind, _, _ in actions].index("B") for actions in interleaved_lists(4, 8, 3)] == [15, 13, 11, 9]
assert sum(check(make("interleaved-1f1b", 4, 8, 3)).sends) == 176
assert [peak(k, 3, recompute) for k in (32, 4) for recompute in (False, True)] == [2161, 124.125, 274.5, 40.125]
assert all(idle(zero_bubble_lists(4, 8, 1), t) == 3 * max(t["F"], t["I"]) for t in TIMES[5:])  # T_W > T_F + T_I
assert [idle(split_lists([4, 3, 2, 0], [0, 1, 2, last], 8), REAL) for last in (3, 4, 5, 6)] == [18, 15, 13, 13]
head_in_blocks = 2 * 768 * 50257 / (24 * 768**2 + 4 * 1024 * 768)
assert round(head_in_blocks, 2) == 4.46 and round(1 - (12 + head_in_blocks) / 8 / head_in_blocks, 2) == 0.54

# %% [markdown]
# In the notebook, the last cell lets you change $p$, $m$, $v$, the schedule and the times, and the picture follows.
# Readers without a running notebook see one picture there: ZB-H1 with the times 4, 5, 3.

# %% tags=["active-ipynb"]
# %autopx

# %% tags=["active-ipynb"]
# # Back in one process: stop the eight, and explore.
# cluster.stop_cluster_sync()

# %% tags=["active-ipynb"]
# from chapters.support.ch07.figures import explore_schedules
#
# explore_schedules()
