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
# one activation forward and one gradient back per microbatch at each cut. But a rank can only work on what the rank
# before it has finished, so ranks wait. The time they wait is the **bubble**.
#
# Four ranks that take turns wait for three quarters of the time. At the end of this chapter the same four ranks wait
# for 8.6 % of it with 32 microbatches, they keep only a few of these in memory, and the result is that of one device
# **bit for bit**. You can then say of such a schedule how long its ranks are idle and why, what it keeps in memory,
# what it sends, and how its messages can block one another. [Chapter 8](08_beyond_1f1b.ipynb) goes below the 8.6 %, and
# with eight microbatches only.

# %% tags=["active-ipynb", "setup"]
# from chapters.support.notebook import start
#
# cluster = start(8)

# %% tags=["setup"]
from fractions import Fraction
from itertools import chain, pairwise, product

import numpy as np

from chapters.support.pipeline_runs import PipelineRuns, gradients_on_one_device, refusal
from chapters.support.predict import predict, reveal
from chapters.support.show import printer
from minipar.comm import run_local, world
from minipar.parallel.pipeline.actions import Durations, Schedule, parse_action, simulate
from minipar.parallel.pipeline.schedules import make

comm = world()
rank, ranks = comm.rank, comm.size
say = printer(rank)  # rank 0 prints and draws; every rank checks
if rank == 0:
    from chapters.support.ch07 import figures
    from chapters.support.overview import draw_strategies
    from chapters.support.schedule_paths import MarkedPath, plot_paths
    from chapters.support.show import show, show_file, show_source
    from visualize import plot_schedule

# %%
if rank == 0:
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
    lists = []
    for r in range(p):
        actions = []
        for i in range(m):
            actions += [("F", i, r), ("B", i, r)]
        lists.append(actions)
    return lists


def as_text(actions):
    return " ".join(f"{s}{kind}{i}" for kind, i, s in actions)


def library_lists(name, p, m):
    lists = []
    for actions in make(name, p, m).ranks:
        lists.append([(action.kind, action.microbatch, action.stage) for action in actions])
    return lists


for r, actions in enumerate(naive_lists(3, 2)):
    say(f"rank {r}: {as_text(actions)}")
SIZES = list(product(range(1, 7), range(1, 19)))[rank::ranks]  # all p and m; each rank checks its share
assert all(naive_lists(p, m) == library_lists("naive", p, m) for p, m in SIZES)

# %% [markdown]
# The library's function makes an `Action` of each triple and gives the schedule a name. `save_csv` and `load_csv`
# exchange it with PyTorch, as a row for each rank.

# %% [markdown]
# ### What an action needs
#
# *Core, 6 minutes.*
#
# `2F0` needs `1F0`. `2B0` needs its own forward, `2F0`, and the gradient from the next stage, `3B0`. A rank does its
# list in order, and an action begins when the rank is free and what it needs is there. That is all that a simulator has
# to know.


# %%
def needs(kind, i, s, last):
    """The actions whose results this one uses; `last` is the last stage."""
    if kind == "F":
        return [("F", i, s - 1)] if s > 0 else []
    return [("F", i, s)] + ([("B", i, s + 1)] if s < last else [])


def timed(lists, times):
    """The (start, end) of each action; times[kind] is the time of an action, and messages take none."""
    last = max(s for _, _, s in chain(*lists))
    slots = {}
    free = [0] * len(lists)  # when each rank has done what it has begun
    todo = [list(actions) for actions in lists]
    while any(todo):
        done = len(slots)
        for r, actions in enumerate(todo):
            while actions and all(need in slots for need in needs(*actions[0], last)):
                action = actions.pop(0)
                start = free[r]
                for need in needs(*action, last):
                    _, arrival = slots[need]
                    start = max(start, arrival)
                free[r] = start + times[action[0]]
                slots[action] = (start, free[r])
        assert len(slots) > done, "the ranks wait in a circle"
    return slots


def idle(lists, times):
    """The time from the first action to the last, less the work of a rank, which is the same for each."""
    total = max(end for _, end in timed(lists, times).values())
    work = sum(times[kind] for kind, _, _ in lists[0])
    return total - work


# What F and B take, in eight cases: all claims about idle times below are checked with each.
CASES = ((1, 2), (4, 8), (2, 4), (3, 7), (1, 5), (1, 4), (2, 9), (4, 7))
TIMES = [{"F": f, "B": b} for f, b in CASES]
for (p, m), t in product(SIZES, TIMES):
    assert idle(naive_lists(p, m), t) == (p - 1) * m * (t["F"] + t["B"])

# %% [markdown]
# In the naive schedule each microbatch goes down all ranks and back before the next one enters. An `F` takes the time
# $T_F$ and a `B` the time $T_B$. So the time from the first action to the last is $m p
# (T_F+T_B)$, of which each rank works $m (T_F+T_B)$. In this chapter
#
# $$\text{bubble} = \frac{\text{idle}}{\text{total}} = \frac{(p-1)\,m(T_F+T_B)}{p\,m(T_F+T_B)} = \frac{p-1}{p}.$$
#
# With 4 ranks, three quarters of their time are idle, however many microbatches there are.

# %% [markdown]
# ### In the library
#
# *Deeper, 5 minutes.*

# %% [markdown]
# The library's simulator has the same two parts. It also knows the time of a message, and it names the actions that
# wait in a circle. (Its `I` and `W` are the two halves of a `B`, which chapter 8 takes apart.)

# %%
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
    lists = []
    for r in range(p):
        forwards = [("F", i, r) for i in range(m)]
        backwards = [("B", i, r) for i in range(m)]
        lists.append(forwards + backwards)
    return lists


assert all(gpipe_lists(p, m) == library_lists("gpipe", p, m) for p, m in SIZES)
for (p, m), t in product(SIZES, TIMES):
    assert idle(gpipe_lists(p, m), t) == (p - 1) * (t["F"] + t["B"])

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
# its *stage*, and backward runs the forward of the whole stage again. (The trainer's `--recompute full` does that per
# *block*: it keeps what enters each block. So it keeps more, and needs less while one block is recomputed. 7.4 counts
# it.)

# %% [markdown]
# ## 7.3 1F1B: the same bubble, less memory
#
# *Core, 10 minutes.*
#
# GPipe keeps all $m$ microbatches because every backward comes after all forwards. In **1F1B** a rank begins with a few
# forwards, and then does one forward, one backward, in turn. A backward frees what its forward took.
#
# **Predict**: with $p = 4$ and $m = 8$ rank 0 of GPipe holds 8 activations. How many does rank 0 of 1F1B hold, if the
# bubble shall stay that of GPipe? (If you know it from chapter 0: say why.)

# %%
predict("activations on rank 0 with 1F1B", ...)  # replace the dots by your answer

# %% [markdown]
# Rank $r$ cannot do a backward before its first microbatch has been down to the last rank and back. While microbatch 0
# goes down, rank $r$ does $p-1-r$ forwards, the *warm-up*. It does one more, the first of the *steady state*, and then
# waits for the first gradient. It could run more forwards meanwhile, but they would cost memory and the step would not
# end earlier; the picture shows why. In the steady state each forward is followed by a backward. At the end, in the
# *cool-down*, only backwards are left. This is the synchronous form of PipeDream's order (Narayanan et al. 2019). It is
# called PipeDream-Flush or 1F1B (Narayanan et al. 2021, arXiv 2104.04473, section 2.2).
#
# [Exercise 10](exercises/e10_one_f_one_b.py) asks for these lists: `make exercises PYTEST="-k e10"`. Write them before
# you open the next cell. And somebody claims 1F1B in 71 units of time, a bubble of 7/71 = 0.0986, with $p = 8$,
# $m = 32$ and $T_F = T_B = 1$. **[Exercise 27](exercises/e27_71_steps.py)** asks you to refute it: `make exercises
# PYTEST="-k e27"`.


# %% tags=["hide-input"]
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
def longest_path(lists, slots):
    """The chain that ends with the last action, and in which each action begins when the one before it ends."""
    last = max(s for _, _, s in slots)
    before = {}  # for each action the one before it on the same rank
    for actions in lists:
        before |= {after: action for action, after in pairwise(actions)}
    path = [max(slots, key=lambda action: slots[action][1])]
    start, _ = slots[path[0]]
    while start > 0:
        waited_for = [before.get(path[0]), *needs(*path[0], last)]
        path.insert(0, next(action for action in waited_for if action in slots and slots[action][1] == start))
        start, _ = slots[path[0]]
    return path


# %%
for p, m in SIZES:
    lists = one_f_one_b_lists(p, m)
    assert lists == library_lists("1f1b", p, m)
    assert all(idle(lists, t) == (p - 1) * (t["F"] + t["B"]) for t in TIMES)
    library = simulate(make("1f1b", p, m), Durations(4, 5, 3))  # 5 and 3 are the halves of a B
    assert library.makespan == max(end for _, end in timed(lists, {"F": 4, "B": 8}).values())
    assert library.peak_activations == [min(m, p - r) for r in range(p)]
reveal("activations on rank 0 with 1F1B", simulate(make("1f1b", 4, 8)).peak_activations[0], say)
long = simulate(make("1f1b", 4, 32))
assert (long.bubble_fraction, max(long.peak_activations)) == (Fraction(3, 35), 4)
if rank == 0:
    lists = one_f_one_b_lists(4, 6)
    slots = timed(lists, {"F": 1, "B": 2})
    pieces = [(r"$(p-1)\,T_F$", 3), (r"$m\,(T_F+T_B)$", 18), (r"$(p-1)\,T_B$", 6)]
    marked = MarkedPath(slots, longest_path(lists, slots), pieces, ahead=[3, 2, 1, 0])
    show(plot_paths({"1F1B, p = 4, m = 6": marked}, "$T_F = 1$, $T_B = 2$"), "07_1f1b_path")

# %% [markdown]
# The thick boxes are the **longest path**: the chain of actions, each of which begins when the one before it ends. No
# schedule is shorter than its longest chain of actions that wait for each other. The chain goes down $p-1$ ranks,
# through the whole list of the last rank, and up $p-1$ ranks. While the boxes of other ranks on this path run, the last
# rank is idle: $(p-1)(T_F+T_B)$. All ranks have equally much work, so each is idle for that long, as with GPipe. That
# holds for $m < p$ too; then at most $m$ microbatches are alive.
#
# The gain is memory: at most $\min(m, p-r)$ microbatches are alive on rank $r$, whatever $m$ is. So $m$ can grow until
# the bubble does not matter. With $p = 4$ and $m = 8$ rank 0 holds 4 activations instead of GPipe's 8. With $m = 32$
# it still holds 4, and the bubble is $3/35$: the 8.6 % of the first page.
#
# Is that less than without a pipeline? A pipeline cuts the layers, $L/p$ on each rank, but $p$ microbatches of $L/p$
# layers are as many activations as one microbatch of all $L$. So **on rank 0 a pipeline with 1F1B saves no
# activations**; the last rank has a $p$-th of them. What it divides is the model's state.

# %%
L = 24  # layers
for p in (1, 2, 4, 8):
    alive = simulate(make("1f1b", p, 32)).peak_activations
    layers = [each * L // p for each in alive]
    say(f"{p} ranks: layers times microbatches alive, by rank: {layers}")
    assert (layers[0], layers[-1]) == (L, L // p)

# %% [markdown]
# The library's lists are the same. One function writes those of the naive schedule, of GPipe and of 1F1B, which differ
# in `ahead` alone: 0, $m$, or one forward for each rank that follows. The picture compares 1F1B with GPipe: both end at
# the same time, but fewer activations are alive (lowest part). The animation below it has seven microbatches, with the
# same times: each box slides from its place in GPipe to its place in 1F1B.

# %%
from minipar.parallel.pipeline import schedules

if rank == 0:
    show_source(schedules._in_turn, schedules.one_f_one_b)
    names = {"a backward after each forward": "1f1b", "all forwards first": "gpipe"}
    both = {label: simulate(make(name, 4, 8)) for label, name in names.items()}
    assert [max(line.peak_activations) for line in both.values()] == [4, 8]
    show(plot_schedule(both), "07_gpipe_1f1b")

# %% [markdown]
# ![The boxes of GPipe slide into the places of 1F1B](../visualize/gallery/gpipe_1f1b.gif)

# %% [markdown]
# ## 7.4 Memory, and recompute
#
# *Deeper, 6 minutes.*

# %% [markdown]
# A GPT block keeps $20 + 2/h + aT/h$ times $BTh$ elements for its backward. $BTh$ is the size of its input: $B$ samples
# of $T$ tokens with $h$ elements (2.8, without dropout; $a$ heads). In the cell below that is 22.125. A
# rank with $L/p$ blocks, on which `alive` microbatches are alive, holds at most
#
# $$\underbrace{\text{alive}\,\Big(22.125\,\frac{L}{p} + 1\Big) + 5}_{\text{without recompute}} \qquad
# \underbrace{\text{alive}\,\frac{L}{p} + 22.125 + 6}_{\text{with it}}$$
#
# times $BTh$ elements. The $+1$ is the stage's result. 5 are the gradients on their way through one block: 1 of its
# result and 4 of the MLP's inside, which is four times as wide. With `--recompute full` only one array per block is
# multiplied by `alive`: its result, which is the next block's input. (What the stage has received is not in these
# counts.) Before the backward of a block its forward runs again, for one microbatch. It makes the 22.125 again, and the
# block's result: this one more array is why it says 6 and not 5. The price is one more forward for each backward. The
# ledger of chapter 5 counts both on a stage:

# %%
from chapters.support.ch07 import train as train_pipelines

peak = train_pipelines.peak_activations
for alive, blocks in ((1, 1), (2, 3), (4, 2)):
    assert peak(alive, blocks, recompute=False) == alive * (22.125 * blocks + 1) + 5
    assert peak(alive, blocks, recompute=True) == alive * blocks + 22.125 + 6
say(f"3 blocks, 4 microbatches alive: {peak(4, 3, False):g} BTh without recompute, {peak(4, 3, True):g} with it")

# %% [markdown]
# ### Unequal stages
#
# *Deeper, 2 minutes.*

# %% [markdown]
# Equally many blocks are not equal times: the last stage also has the head and the loss (problem 3). If rank $r$ takes
# $T_r$ for a forward and a backward, no step is shorter than $m \max_r T_r$: the slowest rank sets the pace, and a rank
# idles for at least $1 - T_r / \max_r T_r$ of the time. So the last stage gets fewer blocks. (Exercise 27 asks for a
# better bound.) Memory is unequal as well. The first rank has the most microbatches alive, and the embedding with its
# gradient and optimizer state. The last one has the logits, $N V$ elements, of one microbatch.

# %% [markdown]
# ## 7.5 The lists on the ranks
#
# *Core, 8 minutes.*
#
# A list is a program. `run_list` does one rank's list for a stage $y = \tanh(xA)$ on plain arrays, with sends and
# receives. It serves all lists of this chapter. The loss is $\frac12 \sum y^2$ of the last stage, whose gradient is $y$
# itself.


# %%
def run_list(pipe, lists, weights, batch, blocking=False):
    """Do this rank's list. Return the gradient of its weight, added over all microbatches in their order."""
    r = pipe.rank
    m = len(batch)
    x = {}  # by microbatch
    y = {}
    sent = []
    weight = weights[r]
    d_weight = np.zeros_like(weight)

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
        if kind == "B":
            is_last = r == pipe.size - 1
            gradient = y[i] if is_last else receive(r + 1, m + i)
            dy = gradient * (1 - y[i] ** 2)
            if r > 0:
                send(dy @ weight.T, r - 1, m + i)
            d_weight += x.pop(i).T @ dy
    for message in sent:
        message.wait()
    return d_weight


# %%
runs = PipelineRuns(comm)  # trains one device on rank 0, to compare all with
pipe, stages, microbatches = runs.pipe, runs.stages, runs.microbatches
weights = np.random.default_rng(5).normal(size=(stages, 16, 16)) / 4
batch = np.random.default_rng(6).normal(size=(microbatches, 8, 16))
expected = gradients_on_one_device(weights, batch)[pipe.rank]
for name in ("naive", "gpipe", "1f1b"):
    assert np.array_equal(run_list(pipe, library_lists(name, stages, microbatches), weights, batch), expected), name
say(f"three schedules on {stages} ranks, m = {microbatches}: the gradients of one device, bit for bit")

# %% [markdown]
# Why can the bits be equal? A stage does the same products on the same values as the whole model would. Sums over
# microbatches are taken in their order 0, 1, 2, ... in every schedule.

# %% [markdown]
# ### In the library
#
# *Deeper, 6 minutes.*

# %% [markdown]
# The library's executor does the same with a GPT. In its list a receive is an action of its own. When the executor
# comes to that action it starts the receive; when it needs what is received, it waits for it. It serves several stages
# on a rank (chapter 8): a result for a stage of the same rank is handed over without a message. It keeps the
# activations whose backward is to come.

# %%
from chapters.support.schedule_lists import count_sends
from minipar.parallel.pipeline.check import check
from minipar.parallel.pipeline.stage import PipelineExecutor

if rank == 0:
    show_source(PipelineExecutor.run, PipelineExecutor._message)
for name in ("naive", "gpipe", "1f1b"):
    schedule = make(name, stages, microbatches)
    check(schedule)
    peaks = simulate(schedule).peak_activations
    run = runs.train(name)
    assert run.verdict.passed, run.verdict.line
    listed = count_sends(schedule)[pipe.rank], peaks[pipe.rank]
    assert stages == 1 or (run.messages, run.peak_alive) == listed
    say(f"{name:<5} = 1 device, bit for bit; alive at most, by rank: {peaks}")
right = run.losses  # the same with every schedule

# %% [markdown]
# This is the real trainer (`--pp --schedule --microbatches`), in float64, with dropout and with clipping, on stages of
# unequal size, two steps with each schedule. Parameters, losses and gradient norms are those of one device, bit for
# bit: dropout masks are keyed by sample and layer, not by rank, and the norm is added up part by part, in one order.
# The most activations alive are those that the list says. The bytes over the cuts are $BTh$ elements per microbatch,
# cut and direction, besides those of the tied embedding (7.7).
#
# With $N = BT$ that is $2Nh$ for each cut and microbatch, forward and backward together. Tensor parallelism sends
# $8Nh\frac{t-1}{t}$ per rank in each *layer* (6.4): with $t = 8$ and four layers on a stage 14 times as much, and all
# ranks wait for it. So pipelines go over the slow links.
#
# **The scale of the loss.** Each microbatch divides its summed loss by the count of the whole step, over all
# microbatches and replicas (`scale` in the listing). Then gradients simply add up. If each divided by its own count,
# the sum would be $m$ times too large, and a mean of the $m$ would be wrong where counts are unequal (4.6).

# %% [markdown]
# ## 7.6 Messages, and the deadlock that blocking sends make
#
# *Core, 8 minutes.*
#
# `lower` adds the messages to a list: a SEND where a result is made, a RECV on the other rank. In which order? Take the
# middle of 1F1B on two ranks. A hand-written list says what seems natural: *send what you have made, then receive what
# you need*.

# %%
from chapters.support.ch08.in_order import simulate_in_order


def written(*lists):
    """A schedule from text, one string per rank."""
    parsed = []
    for actions in lists:
        parsed.append([parse_action(action) for action in actions.split()])
    return Schedule.of("by hand", parsed)


by_hand = ("0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1", "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1")
send_first = written(*by_hand)
blocked = refusal(simulate_in_order, send_first, Durations(), "rank")
assert "rank 0 has 0SEND_F1 before 0RECV_B0, rank 1 has 1SEND_B0 before 1RECV_F1" in blocked
say(blocked)
if rank == 0:
    show(figures.draw_crossing([actions.split() for actions in by_hand], stopped=(3, 3)), "07_crossing")

# %% [markdown]
# Arrows are messages; the two red ones cross. Rank 0 is in the middle of sending `F1` and will receive `B0` afterwards.
# Rank 1 is in the middle of sending `B0` and will receive `F1` afterwards. If a send returns only when its message has
# been received, both wait for ever: the faded boxes are never reached, and the grey message is never sent. Nothing is
# wrong with the computations.
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
from minipar.parallel.pipeline.check import lower

if rank == 0:
    two_ranks = one_f_one_b_lists(2, 4), np.ones((2, 16, 16)), np.ones((4, 8, 16))
    run_local(2, run_list, *two_ranks)
    message = refusal(run_local, 2, run_list, *two_ranks, True)
    say(f"not blocking: runs\nblocking: {message}")
    lowered = lower(make("1f1b", 2, 2)).ranks
    say("\n".join(f"in the order of `lower`, rank {r}: {' '.join(map(str, lowered[r]))}" for r in range(2)))

# %% [markdown]
# ## 7.7 The embedding that two ranks need, and replicas
#
# *Core, 5 minutes.*
#
# GPT-2's output head *is* the token embedding: one matrix of $V \times h$ for $V$ words, used first and last. In a
# pipeline two ranks need it. Its gradient is a sum of two contributions, one from each end. Both copies must get **the
# sum**, once, and take the same update.
#
# minipar gives the matrix to the first stage. The head borrows it. After the last backward the head's contribution
# travels up, is added, and after the optimizer's step the new values travel down: $Vh$ elements each way per step,
# which come on top of the messages that 7.5 counts. (Megatron all-reduces the two gradients and updates both copies.
# Then both ranks hold optimizer state, and the norm must not count the matrix twice.)
#
# The bits need care: $a + b$ is the same in any order, but contributions of *several microbatches* from *two ends* are
# not. One device would add head, embedding, head, embedding, ... So minipar keeps the two sums apart until the step, on
# one device too.

# %%
from minipar.parallel.pipeline.model import PipelineParallel

if rank == 0:
    show_source(PipelineParallel.fetch_tied_gradient)

# %% [markdown]
# ### Replicas
#
# *Deeper, 4 minutes.*

# %% [markdown]
# Pipelines go with data parallelism: $d$ replicas of the whole pipeline, each with its own samples. The
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
    run = runs.train("1f1b", stages=ranks // 2)
    assert run.verdict.passed, run.verdict.line
    say(f"--pp {ranks // 2} --dp 2: {run.verdict.line}")

# %% [markdown]
# Why once per step, and not after every microbatch? Each further sum would send all gradients again. ZeRO 2 and 3 could
# keep gradients sharded all the time only by doing that, $m$ times per step (chapter 5); in a pipeline minipar
# therefore lets them accumulate whole, and shards them once.

# %% [markdown]
# ## 7.8 Mistakes, and what notices them
#
# *Deeper, 8 minutes.*

# %% [markdown]
# We have two instruments: **check**, before anything runs, which sees lists only, and **verify**, afterwards: does one
# device get the same parameters, losses and norms? Before you read on: which catches which?
#
# 1. **A receive is missing.** And what if the *send* were missing too?
# 2. **A backward comes before its forward**, or each rank's order is possible, but together they wait in a circle.
# 3. **A microbatch is counted twice**: the schedule is right, but the program gives microbatch 1 the samples of
# microbatch 0.
# 4. **The tied gradient is dropped**: the head's contribution stays on the last rank.

# %%
predict("caught by check", ...)  # replace the dots by a list of the mistakes 1 to 4, such as [1, 2]

# %%
up, down = (" ".join(map(str, actions)) for actions in lower(make("1f1b", 2, 2)).ranks)
mistakes = {
    "1. a receive is missing": (up, down.replace("1RECV_F1 ", "")),
    "   its send too": (up.replace("0SEND_F1 ", ""), down.replace("1RECV_F1 ", "")),
    "2. a backward before its forward": ("0F0 0F1 0B0 0B1", "1B0 1F0 1F1 1B1"),
    "   a circle": ("0F0 0B0 0F1 0B1", "1F0 1F1 1B1 1B0"),
}
for what, lists in mistakes.items():
    say(f"{what}\n     check: {refusal(check, written(*lists))}")
for what, kind in (("3. counted twice", train_pipelines.CountsTwice), ("4. dropped", train_pipelines.DropsTied)):
    run = runs.train("1f1b", kind=kind)
    if stages > 1:
        assert not run.verdict.passed
        assert (run.losses[0] == right[0]) == (what == "4. dropped")
    say(f"{what}: losses {run.losses[0]:.4f}, {run.losses[1]:.4f}\n     {run.verdict.line}")
reveal("caught by check", [int(what[0]) for what in mistakes if what[0] != " "], say)

# %% [markdown]
# The checker refuses 1 and 2 before anything runs. (Without the send *and* the receive of an activation the forward
# has no input: it is refused as well.) It sees a list, not what an action means: only verify catches 3 and 4. With
# mistake 4 the first loss is right, for the weights are: only their update is wrong. The run learns and looks healthy.
# In a real code base this bug has another face: with two copies of the matrix that are updated separately, the copies
# drift apart.

# %% [markdown]
# ## 7.9 PyTorch's names
#
# *Deeper, 2 minutes.*

# %% [markdown]
# | minipar | PyTorch, `torch.distributed.pipelining` | Megatron-LM (M) and DeepSpeed (D) |
# | --- | --- | --- |
# | `PipelineStage` | `PipelineStage` | D: `PipelineModule`, `LayerSpec` |
# | `--microbatches` | `n_microbatches` of a schedule | D: `gradient_accumulation_steps` |
# | `--pp` | the size of the group | M: `--pipeline-model-parallel-size` |
# | `gpipe` | `ScheduleGPipe` | |
# | `1f1b` | `Schedule1F1B` | M: `forward_backward_pipelining_without_interleaving`; D: `TrainSchedule` |
# | `load_csv`, `lower` | `_load_csv`, `_add_send_recv` | D: the instructions of a `PipeSchedule` |
# | the tied embedding | left to the user | M: an embedding group; D: `TiedLayerSpec` |
#
# 1F1B in PyTorch, with its actions, its memory and its gradients:
# [chapters/pytorch/ch07.py](pytorch/ch07.py).

# %%
if rank == 0:
    show_file("chapters/pytorch/ch07.py")

# %% [markdown]
# ## 7.10 Problems
#
# *Deeper, 20 minutes.*

# %% [markdown]
# 1. **$p = 8$.** How many microbatches does 1F1B need for a bubble *below* 0.1?
# 2. **GPipe or 1F1B?** $p = 4$, $m = 32$, three blocks per rank, 22.125 as in 7.4. What is the peak of rank 0, in units
# of $BTh$ elements: GPipe, 1F1B, and both with recompute?
# 3. **The head.** With $V = 50{,}257$, $h = 768$, $T = 1024$, 12 blocks: how many blocks does the head cost in forward?
# (It cannot be split, and a stage may have no block. The embedding costs nothing.) How should the cuts lie with 4
# ranks? And which bubble, averaged over the ranks, remains at least with 8, whatever the schedule?

# %% [markdown]
# ## 7.11 Answers
#
# *Deeper, 5 minutes.*

# %% [markdown]
# <details><summary>Answers</summary>
#
# 1. $(p-1)/(m+p-1) < 1/10$ means $m > 9(p-1) = 63$: $m = 64$.
# 2. GPipe $32\,(22.125 \cdot 3 + 1) + 5 = 2161$, with recompute $32 \cdot 3 + 28.125 = 124.125$. In 1F1B 4 are alive:
# 274.5, and 40.125 with recompute. Recompute helps GPipe more than 1F1B's order does, and costs a forward; 1F1B costs
# nothing.
# 3. A block has $24h^2 + 4Th$ operations per token and the head $2hV$: 4.46 blocks. With 4 ranks the cuts 4, 4, 4 and
# 0 + head are nearly equal. With 8 ranks the head alone takes more than twice the mean of $16.46/8$ blocks. It sets the
# pace, and at least $1 - 2.06/4.46 = 0.54$ of the ranks' time is idle.
#
# </details>

# %% tags=["hide-input"]
assert [simulate(make("1f1b", 8, m)).bubble_fraction for m in (63, 64)] == [Fraction(1, 10), Fraction(7, 71)]
assert [peak(32, 3, recompute) for recompute in (False, True)] == [2161, 124.125]
assert [peak(4, 3, recompute) for recompute in (False, True)] == [274.5, 40.125]
head_in_blocks = 2 * 768 * 50257 / (24 * 768**2 + 4 * 1024 * 768)
assert round(head_in_blocks, 2) == 4.46 and round(1 - (12 + head_in_blocks) / 8 / head_in_blocks, 2) == 0.54
say("the answers hold")

# %% tags=["active-ipynb"]
# %autopx

# %% tags=["active-ipynb"]
# # Back in one process: stop the eight.
# cluster.stop_cluster_sync()
