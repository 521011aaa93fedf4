# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 8. Beyond 1F1B
#
# **In 1F1B every rank waits for the stages before it and after it. Which work could it do meanwhile?**
#
# With 1F1B ([chapter 7](07_pipeline.ipynb)) four ranks are idle for 27.3 % of the time if a step has eight
# microbatches, not chapter 7's 32. At the end of this chapter the same four ranks wait for 5.9 % of it with these
# eight, they keep no more than four microbatches in memory, and the result is that of one device **bit for bit**. No
# new kind of message is needed, and no change of the model: only another order of each rank's actions. You can then
# say what each order pays: messages, memory, or weights that are too old.

# %% tags=["active-ipynb", "setup"]
# from chapters.support.notebook import start
#
# cluster = start(8)

# %% tags=["setup"]
import numpy as np

from chapters.support.predict import predict, reveal
from chapters.support.show import printer
from minipar.comm import world

comm = world()
rank, ranks = comm.rank, comm.size
say = printer(rank)  # rank 0 prints and draws; every rank checks
if rank == 0:
    from chapters.support.ch08 import figures
    from chapters.support.show import show, show_file, show_source
    from visualize import gallery, plot_schedules

# %%
x, weight, dy = np.random.default_rng(3).normal(size=(3, 16, 16))  # a linear layer, y = x @ weight, and its gradient
dx = dy @ weight.T  # `I`: the rank before waits for this
d_weight = x.T @ dy  # `W`: nobody waits for this before the optimizer's step
if rank == 0:
    lines = gallery(4, 8)
    show(plot_schedules({name: lines[name] for name in ("1F1B", "ZB-V")}), "08_two_schedules")

# %% [markdown]
# Above is 1F1B, and below the schedule of 8.4. Two things have changed. Each rank has two short stages in the place of
# a long one (the lighter boxes with a bar are the second), so a microbatch comes to the next rank after half the time.
# And each backward has been split into its two products, which the cell has computed: purple is the gradient of the
# input, `I`, and green that of the weights, `W`. Nobody waits for `W`, so it is done where there was a bubble.
#
# The row of pipelines is that of chapter 7:

# %%
if rank == 0:
    from chapters.support.overview import draw_strategies

    show(draw_strategies(["pp"]), "08_here")

# %% [markdown]
# ## 8.1 Interleaved: smaller stages, shorter warm-up
#
# *Core, 10 minutes.*
#
# The idle time of 1F1B is $p-1$ times the `F` and `B` of a *stage*. So make stages shorter: give each rank $v$ of them,
# not one after another but $p$ apart, rank $r$ the stages $r, p+r, 2p+r, \dots$ (Narayanan et al. 2021, section 2.2). A
# microbatch goes $v$ times round the ranks. Filling the pipeline now takes $p-1$ stages of length $T_F/v$, with
# $T_F$ and $T_B$ still those of all of a rank's layers. So
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
#
# `timed` and `idle` are those of 7.1, and now know `I` and `W`.

# %%
from itertools import product

from chapters.support.schedule_lists import idle, library_lists, timed


def interleaved_lists(p, m, v=2):
    groups = [range(first, min(first + p, m)) for first in range(0, m, p)]
    lists = []
    for r in range(p):
        stages = range(r, v * p, p)  # of this rank, the first one first
        forwards = []
        backwards = []
        for group in groups:
            for s in stages:
                forwards += [("F", i, s) for i in group]
            for s in reversed(stages):
                backwards += [("B", i, s) for i in group]
        ahead = min((v - 1) * p + 2 * (p - 1 - r), m * v)
        actions = forwards[:ahead]
        for k in range(m * v):
            if ahead + k < m * v:  # afterwards only backwards are left: the cool-down
                actions.append(forwards[ahead + k])
            actions.append(backwards[k])
        lists.append(actions)
    return lists


# What F, I and W take. Each claim about idle times below is checked with all eight cases.
CASES = ((1, 1, 1), (4, 5, 3), (2, 3, 1), (3, 2, 5), (1, 3, 2), (1, 1, 3), (2, 3, 6), (4, 1, 6))
TIMES = [{"F": f, "I": i, "W": w, "B": i + w} for f, i, w in CASES]
EQUAL = TIMES[0]
REAL = TIMES[1]  # 4, 5, 3 is nearer to real layers: see 8.7
every_size = list(product(range(1, 7), range(1, 19)))  # p and m
SIZES = every_size[rank::ranks]  # those that this rank checks
for p, m in SIZES:
    if m % p == 0:
        lists = interleaved_lists(p, m)
        assert lists == library_lists("interleaved-1f1b", p, m)
        for times in TIMES:  # of a stage
            assert idle(lists, times) == (p - 1) * (times["F"] + times["B"])
if rank == 0:
    begin = timed(interleaved_lists(4, 8), {"F": 1, "B": 1})
    show(figures.plot_warm_up(begin, p=4, rank=1, stages=8, end=14), "08_warm_up")

# %% [markdown]
# The paler boxes are a rank's second stage. Rank 1 does $4 + 4$ forwards, then the pair's, then the first backward. No
# rank has waited since its first action.

# %% [markdown]
# ### Why must p divide m?
#
# *Core, 3 minutes.*

# %% [markdown]
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
# With six microbatches each rank is idle for 19 units. Rank 0 waits in five places: 10 units for microbatch 4 on its
# way to the rank's second stage, 3 for microbatch 5, 1 each for the gradients of 2 and 3, and 4 for that of 4. The 19
# are even more than 1F1B's 18, with stages twice as long, so the schedule loses what it was made for. The library's
# version has the same order and refuses an $m$ that $p$ does not divide.

# %% [markdown]
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

from chapters.support.schedule_lists import count_sends
from minipar.parallel.pipeline.actions import Durations, peak_live, simulate
from minipar.parallel.pipeline.check import check
from minipar.parallel.pipeline.schedules import make

if rank == 0:
    from visualize import plot_schedule

    halves = simulate(make("interleaved-1f1b", 4, 8), Durations(*[Fraction(1, 2)] * 3))
    assert (halves.bubble_fraction, halves.peak_activations[0]) == (Fraction(3, 19), 11)
    assert [sum(count_sends(make(name, 4, 8))) for name in ("1f1b", "interleaved-1f1b")] == [48, 112]
    show(plot_schedule(halves), "08_interleaved")

# %% [markdown]
# ## 8.2 Backward is two things
#
# *Core, 5 minutes.*
#
# The linear layer above the first picture is $y = xA$, and $dy$ is the gradient of $y$. Backward computes two products:
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

from chapters.support.schedule_lists import needs
from minipar.autograd import DeferredGradients, defer_weight_gradients
from minipar.parallel.pipeline.stage import PipelineStage

x, dy, first, second = np.random.default_rng(3).normal(size=(4, 16, 16))
between = x @ first  # y = between @ second
queue = []
gradient = dy
for kept, weight in ((between, second), (x, first)):  # I, from the last layer to the first
    queue.append(partial(np.matmul, kept.T, gradient))  # keeps this layer's x and dy alive
    gradient = gradient @ weight.T
d_second, d_first = [recipe() for recipe in queue]  # W, whenever there is time
assert np.array_equal(gradient, dy @ second.T @ first.T)
assert np.array_equal(d_second, between.T @ dy) and np.array_equal(d_first, x.T @ (dy @ second.T))
if rank == 0:
    show_source(DeferredGradients.run, defer_weight_gradients)
    show_source(PipelineStage.backward_input, PipelineStage.backward_weight, needs)

# %% [markdown]
# In the library every product hands over its weight gradient as a recipe. Backward runs it at once, or puts it into a
# queue inside `defer_weight_gradients`. A stage has one queue for each microbatch. The queue holds $x$ and $dy$ of
# every layer until `W`, so an activation is not quite freed when `I` is done. With recompute it is `I` that runs
# forward again, and `W` uses the inputs which that run has made. So these live from `I` until `W`.
#
# For the simulator that is one rule more: a `W` needs its `I`, and an `I` needs what a `B` has needed. So `needs` has
# two lines more than in 7.1.
#
# Where would you put the `W`? Exercise 11 asks for a schedule that beats 1F1B and needs no more memory:
# `make exercises PYTEST="-k e11"`. Write it before you read on.

# %% [markdown]
# ## 8.3 ZB-H1 and ZB-H2
#
# *Core, 8 minutes.*
#
# **[Exercise 26](exercises/e26_time_and_memory.py)** asks for a schedule with a new score of time and memory, and has
# no best answer: `make exercises PYTEST="-k e26"`.
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
# of this chapter count until `I`, exercise 11 until `W`; the table of 8.5 and problem 5 have both.
#
# With $p = 4$, $m = 7$ and the times 4, 5, 3 of `F`, `I` and `W`, 1F1B idles for 36 units. How long do the other two?

# %%
predict("idle units of 1F1B, ZB-H1 and ZB-H2", ...)  # replace the dots by a list such as [36, 36, 36]


# %% tags=["hide-input"]
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
three = [idle(library_lists(name, 4, 7), REAL) for name in ("1f1b", "zb-h1", "zb-h2")]
reveal("idle units of 1F1B, ZB-H1 and ZB-H2", three, say)
taken = {"F": 1, "I": 0, "W": -1}  # activations that an action takes, or gives back, counted until W
for (p, m), k in product(SIZES, (1, 2)):
    lists = zero_bubble_lists(p, m, k)
    assert lists == library_lists(f"zb-h{k}", p, m)
    if m > k * (p - 1):
        for actions in lists:
            held = np.cumsum([taken[kind] for kind, _, _ in actions])
            assert max(held) == k * (p - 1) + 1
        for t in TIMES:
            f = t["F"]
            i = t["I"]
            w = t["W"]
            assert idle(lists, t) == (p - 1) * max(f, f + i - k * w, i - (k - 1) * f)

# %% [markdown]
# The animation turns 1F1B into ZB-H1: first every `W` leaves its `I`, so that the rank before need not wait for it,
# then `W` is put off. The picture shows the same three states one below the other. The times are 4, 5, 3.
#
# ![1F1B turns into ZB-H1](../visualize/gallery/zero_bubble.gif)

# %%
if rank == 0:
    from chapters.support.animate_schedules import plot_states

    show(plot_states(), "08_three_states")

# %% [markdown]
# The last rank never waits, and ends at the same time in all three. In the second state only the way up has got
# shorter, because each rank waits for the `I` of the next one alone. In the third the last rank keeps three `W` more
# for the end. So its last `I` is done $3T_W$ earlier, and rank 0, which ends last, ends earlier by as much.

# %% [markdown]
# ### The longest path of ZB-H1 and ZB-H2
#
# *Deeper, 8 minutes.*

# %% [markdown]
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
from chapters.support.schedule_lists import longest_path

if rank == 0:
    from chapters.support.schedule_paths import MarkedPath, plot_paths

    panels = {}
    up = [(r"$(p-1)\,T_F$", 12), (r"$m\,(T_F+T_I) + (m-p)\,T_W$", 72), (r"$(p-1)\,T_I$", 15), (r"$T_W$", 3)]
    down = [(r"$(p-1)\,T_F$", 12), (r"$m\,(T_F+T_I+T_W)$", 84)]
    for k, pieces in ((1, up), (2, down)):
        lists = zero_bubble_lists(4, 7, k)
        slots = timed(lists, REAL)
        panels[f"ZB-H{k}, p = 4, m = 7"] = MarkedPath(slots, longest_path(lists, slots), pieces)
    assert [idle(library_lists(name, 4, 7), REAL) for name in ("1f1b", "zb-h1", "zb-h2")] == [36, 18, 12]
    show(plot_paths(panels, "$T_F = 4$, $T_I = 5$, $T_W = 3$"), "08_zero_bubble_paths")

# %% [markdown]
# ### What "zero bubble" means
#
# *Deeper, 8 minutes.*

# %% [markdown]
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
from visualize.schedule import bubble_rate

h1, h2 = (simulate(make(name, 4, 8)) for name in ("zb-h1", "zb-h2"))
assert h1.bubble_fraction == h2.bubble_fraction == bubble_rate(h1) == Fraction(1, 9) and bubble_rate(h2) == 0
assert [(row[0].start, row[-1].end) for row in h2.ranks] == [(r, r + 24) for r in range(4)]
for name, published in {"1f1b": 0.2431, "zb-h1": 0.1585, "zb-h2": 0.1083}.items():
    found = simulate(make(name, 8, 24), Durations(18.522, 18.086, 9.337, 0.601))
    assert round(bubble_rate(found), 4) == published
    say(f"{name:<6} bubble rate {bubble_rate(found):.4f} = published;   idle / total {found.bubble_fraction:.4f}")

# %% [markdown]
# ## 8.4 ZB-V and DualPipeV
#
# *Core, 5 minutes.*
#
# ZB-H2 pays with twice the activations. The V-shaped schedule (Qi et al. 2024, arXiv 2405.15362) needs no more than
# 1F1B: two stages per rank, the second half of the pipeline running *back up*. Rank $r$ has stages $r$ and $2p-1-r$.
# The last stage lies on rank 0, beside the first. So a microbatch's backward can begin where its forward ended, without
# a way down. And as both ends are on one rank, embedding and head are there together, and no tied gradient travels.
#
# A rank holds at most $2p$ activations of half size, counted until `W` too, and **every rank as many**. Those of an
# early stage live long, those of a late one only briefly: after stage $r$ a microbatch has $2p-1-r$ stages before it
# turns round, after stage $2p-1-r$ it has $r$. Together these are $2p-1$ on each rank. (In 1F1B a rank has one stage,
# so an early rank holds more than a late one.)
#
# For $T_F = T_I = T_W$ and $m \ge 2p - 1$ no rank ever pauses: the idle time is the start, $p-1$ half-sized forwards.
# That is the 1/17 = 5.9 % of the first page. Where the times differ, some gradients are waited for: with 4, 5, 3 the
# idle time is $(p-1)T_I$ and not $(p-1)T_F$, and the bubble 5/69 = 7.2 %. ZB-V still idles the least of those in 8.5.
#
# **DualPipe** (DeepSeek-V3, 2412.19437) overlaps a forward with a backward, in pairs such as `(0F5;7B1)OVERLAP_F_B`:
# one half computes while the other communicates. **DualPipeV** does so on the same V as ZB-V. Sea AI Lab derived it, by
# cutting DualPipe in half. It needs $m \ge 2p$, and idles $(p-1)(T_{F\&B} + T_B - 3T_W)$, with the times of one stage
# and $T_{F\&B}$ that of a pair. With equal times, and no gain from the overlap, the pair takes 3 units. So with $p = 4$
# and $m = 8$ a rank idles for $3 \cdot (3+2-3) = 6$ of 54 units: the 1/9 of 8.5. ZB-H1 has that too, with less memory.
# Why then use DualPipeV? Because a bubble counts waits between ranks, and not the all-to-alls inside an `F` or an `I`,
# which a mixture of experts has (12.5). The second picture varies the all-to-alls' share of a forward. ZB-V, with the
# smaller bubble, is slower from a share of about 6 % on; at a half it takes 1.73 times the computation, and DualPipeV
# 1.28 times.

# %%
from chapters.support.ch08.exchange import ExchangeDurations

for p, m in SIZES:
    if m >= 2 * p - 1:
        assert idle(library_lists("zbv", p, m), EQUAL) == p - 1  # times of a half
        assert idle(library_lists("zbv", p, m), REAL) == (p - 1) * REAL["I"]
        for actions in make("zbv", p, m).ranks:
            assert peak_live(actions, freed_by=("W",)) <= 2 * p
if rank == 0:
    show(plot_schedules({name: lines[name] for name in ("1F1B", "ZB-H1", "ZB-H2", "ZB-V", "DualPipeV")}), "08_gallery")
    show(figures.plot_overlap(4, 16), "08_overlap")
    times = {}
    for name in ("zbv", "dualpipev"):
        shares = [Fraction(1, 16), Fraction(1, 15), Fraction(1)]  # x / (1 + x) of an F: 5.9 %, 6.25 % and a half
        durations = [ExchangeDurations(1 + x, 1 + x, 1, exchange=x) for x in shares]
        times[name] = [float(simulate(make(name, 4, 16), each).makespan / 96) for each in durations]
    assert times["zbv"][0] < times["dualpipev"][0] and times["zbv"][1] > times["dualpipev"][1]
    assert round(times["zbv"][2], 2) == 1.73 and round(times["dualpipev"][2], 2) == 1.28

# %% [markdown]
# ### The lists of ZB-V
#
# *Deeper, 3 minutes.*

# %% [markdown]
# Rank $r$ does $2(p-r)-1$ forwards of its first stage. Meanwhile microbatch 0 goes down the V and comes back to it.
# Then $r$ forwards of each stage in turn, until that microbatch's gradient comes from rank 0; then $p-r$ times `F`, `I`
# and `W` of its second stage, until the gradient has been at the bottom and is back. The steady state alternates: `F`,
# `I`, `W` of the first stage, `F`, `I`, `W` of the second, and later the same without the first stage's `F`. When no
# forward is left, other ranks wait for `I` alone, so $r$ `I` of each stage are done without their `W`, which come after
# them.

# %% [markdown]
# ### Where DualPipeV's idle time comes from
#
# *Deeper, 8 minutes.*

# %% [markdown]
# Look at the last rank, which has the two stages at the bottom of the V. It idles in three places. In each it loses the
# same time $p-1$ times, once for each rank above it:
#
# - **Before its first action.** Microbatch 0 comes down through $p-1$ ranks, an `F` on each.
# - **When its own forwards are done.** It has only backwards left, two for each microbatch, which take $2T_B$. Their
#   gradients start at the top of the V, on rank 0, which has pairs left. It does a `B` and a pair for each microbatch,
#   and takes $T_B + T_{F\&B}$. So the last rank waits for the difference, $T_{F\&B} - T_B$, each time. It waits $p-1$
#   times: rank 0 is $p-1$ forwards behind.
# - **After its last action.** Its last gradient climbs through $p-1$ ranks, an `I` on each, and then rank 0 does one
#   `W`: $(p-1)T_I + T_W$. Meanwhile the last rank does the $p$ `W` that it has put off. So it ends $(p-1)(T_I - T_W)$
#   earlier.
#
# The paper writes $T_B - T_W$ for $T_I$, and supposes that $T_F$ is as long:
#
# | idle on the last rank | $p-1$ times | if $T_F = T_I = T_B - T_W$ |
# | --- | --- | --- |
# | before its first action | $T_F$ | $T_B - T_W$ |
# | between its backwards | $T_{F\&B} - T_B$ | $T_{F\&B} - T_B$ |
# | after its last action | $T_I - T_W$ | $T_B - 2T_W$ |
# | together | $T_{F\&B} + T_F - 2T_W$ | $T_{F\&B} + T_B - 3T_W$ |
#
# So one of the three $T_W$ is in the `F` at the start, and two are at the end. If $T_F$ is longer than $T_I$, the sum
# in the middle column is right and the published one is too small. Here are the idle times in the simulator, for
# $T_W \le T_I \le T_F$ (the last line has a longer $T_F$):

# %%
from itertools import pairwise


def waits(line):
    """Return how long the last rank is idle: at first, before each action that must wait, and in the end."""
    slots = line.ranks[-1]
    gaps = [after.start - before.end for before, after in pairwise(slots)]
    return slots[0].start, [gap for gap in gaps if gap > 0], line.makespan - slots[-1].end


for p, f, i, w, exchange in ((4, 4, 4, 3, 0), (2, 5, 5, 2, 1), (3, 6, 6, 6, 2), (5, 7, 7, 1, 0), (4, 5, 4, 3, 0)):
    schedule = make("dualpipev", p, 2 * p + 1)
    line = simulate(schedule, ExchangeDurations(f, i, w, exchange=exchange))  # a pair hides its all-to-alls
    assert line.peak_activations == [2 * p + 1] * p
    pair = max(slot.end - slot.start for slot in line.ranks[0])
    b = i + w
    first, between, last = waits(line)
    assert (first, between, last) == ((p - 1) * f, (p - 1) * [pair - b], (p - 1) * (i - w))
    idle_time = first + sum(between) + last
    assert idle_time == (p - 1) * (pair + f - 2 * w)
    assert (idle_time == (p - 1) * (pair + b - 3 * w)) == (f == i)
    say(f"p {p}; F {f}, B {b}, W {w}, F&B {pair}: idle {first} at first, {between} between, {last} in the end")

# %% [markdown]
# (DeepSeek counts stages: PP is our $2p$, so $PP/2 - 1 = p - 1$.)
#
# **Activations.** Before its first backward rank $r$ does $2(p-1-r)$ forwards of its first stage and $r+1$ of each of
# its two. These are $2p$ activations on every rank. From then on each forward has a backward beside it. But in a pair
# the forward begins before the backward has ended, so for a moment one more is alive: $2p + 1$, the paper's PP + 1.

# %% [markdown]
# ### DualPipe: two pipelines from both ends
#
# *Deeper, 6 minutes.*

# %% [markdown]
# The paper's formula is that of DualPipe, which has PP ranks for PP stages, and no V. A model has its stages on the
# ranks 0, 1, ..., and a copy of it has them on the last rank, the one before, ... So rank $r$ holds the model's stage
# $r$ and the copy's stage $PP-1-r$, twice the parameters of a pipeline of PP ranks. Half of the microbatches enter at
# each end, $m$ into the model and $m$ into the copy. Why is a rank as idle as one of $p = PP/2$ ranks with a V?
#
# Because the two ends do the same at the same time, with the model and its copy exchanged. Where a microbatch of the V
# turns on the last rank, one of the model goes on to rank $p$. There it finds what the copy's microbatch finds on rank
# $p-1$ at that moment: a rank that has done the same. So fold the line of ranks in its middle, and what the ranks
# $r$ and $PP-1-r$ do is what rank $r$ of the V does, at the same times. The three places of the table above are those
# of the two ranks in the middle. The lists are those of the V with other stages. Of the simulator only `needs` changes,
# which must not go from the model to its copy:

# %%
from chapters.support.ch08.dualpipe import TwoPipelines, dualpipe

if rank == 0:
    show_source(TwoPipelines.needs, dualpipe)
for p, f, i, w, exchange in ((1, 4, 4, 3, 0), (2, 5, 5, 2, 1), (3, 6, 6, 6, 2), (4, 7, 7, 1, 0)):
    durations = ExchangeDurations(f, i, w, exchange=exchange)
    both = simulate(dualpipe(2 * p, 2 * p + 1), durations)
    v = simulate(make("dualpipev", p, 2 * p + 1), durations)
    times = [[(slot.start, slot.end) for slot in row] for row in both.ranks]
    assert times[:p] == times[p:][::-1] == [[(slot.start, slot.end) for slot in row] for row in v.ranks]
    pair = max(slot.end - slot.start for slot in both.ranks[0])
    busy = sum(slot.end - slot.start for slot in both.ranks[p])  # one of the two in the middle
    assert both.makespan - busy == (p - 1) * ((f + i - w) + (pair - (i + w))) == (p - 1) * (pair + (i + w) - 3 * w)
    assert both.peak_activations == [2 * p + 1] * (2 * p)
say("DualPipe on 2p ranks: the times of DualPipeV on p, idle (PP/2 - 1)(F&B + B - 3W) in the middle, PP + 1 alive")

# %% [markdown]
# (Where messages take time, DualPipe is a little longer: in the middle it sends what the V keeps on a rank.)
#
# Two questions about the paper's table. *Why $-3T_W$, when ZB-H1 has only one $T_W$?* For each rank ZB-H1 idles $T_F +
# T_I - T_W$. DualPipe idles that and $T_{F\&B} - T_B$ for the pairs, but for half as many ranks. Now write $T_B - T_W$
# for $T_F$, and for $T_I$ too: the sum becomes $T_{F\&B} + T_B - 3T_W$. So one $T_W$ is work that fills a wait, and
# two are a way of writing. *ZB-H1 has $(PP-1)(T_F + T_B - 2T_W)$ there, and $(p-1)(T_F + T_B - T_W)$ in its own paper.
# Is that a misprint?* No: DeepSeek's $T_B$ is the whole backward, and Zero Bubble's is the `I` alone. Both are
# $(p-1)(T_F + T_I - T_W)$.

# %% [markdown]
# ## 8.5 Memory against bubble
#
# *Core, 4 minutes.*
#
# All schedules for 4 ranks and 8 microbatches, with equal times and with 4, 5, 3.

# %%
if rank == 0:
    say(figures.schedule_table(4, 8))
    spots = {name: (max(line.peak_activations) * 4 / line.schedule.stages) for name, line in lines.items()}
    points = {name: (spots[name], float(line.bubble_fraction)) for name, line in lines.items()}
    show(figures.plot_memory_and_bubble(points), "08_memory_and_bubble")
    bubbles = [line.bubble_fraction for line in lines.values()]
    assert bubbles == [Fraction(*each) for each in ((3, 4), (3, 11), (3, 11), (3, 19), (1, 9), (1, 9), (1, 17), (1, 9))]
    real = {name: line.bubble_fraction for name, line in gallery(4, 8, Durations(4, 5, 3)).items()}
    assert real["ZB-H1"] == real["Interleaved 1F1B"] == Fraction(3, 19)
    assert min(real.values()) == real["ZB-V"] == Fraction(5, 69)

# %% [markdown]
# There is no best row. The bubble falls from 3/11 = 0.273 (1F1B) to 3/19 (interleaved), 1/9 (ZB-H1) and 1/17 (ZB-V).
# With the times 4, 5, 3 ZB-H1 is no better than interleaving: 3/19 for both. Interleaving and ZB-V pay with messages
# (112 and 96 against 48), ZB-H2 with memory: 7 activations against 4. And zero-bubble schedules keep $x$ and $dy$ until
# `W`: so counted, each rank of ZB-H1 and of ZB-V holds 4 microbatches. Choose by what is short: memory, network, or
# time.

# %% [markdown]
# ## 8.6 The lists on the ranks
#
# *Core, 4 minutes.*
#
# `run_list` of 7.5 did a backward in one piece. In the file it does either: `I` keeps $dy$ and sends the gradient of
# the input on, and `W` multiplies later what `I` has kept. Lists with one stage per rank run on it as they are.

# %%
from chapters.support.pipeline_runs import PipelineRuns, gradients_on_one_device, refusal
from chapters.support.schedule_lists import as_text, run_list

runs = PipelineRuns(comm, per_stage=2)  # trains one device on rank 0, to compare all with
pipe, stages, microbatches = runs.pipe, runs.stages, runs.microbatches
weights = np.random.default_rng(5).normal(size=(stages, 16, 16)) / 4
batch = np.random.default_rng(6).normal(size=(microbatches + 2, 8, 16))
expected = gradients_on_one_device(weights, batch)[pipe.rank]
for name in ("1f1b", "zb-h1", "zb-h2"):
    assert np.array_equal(run_list(pipe, library_lists(name, stages, len(batch)), weights, batch), expected), name
if rank == 0:
    show_source(run_list)
say(f"three schedules on {stages} ranks, m = {len(batch)}: the gradients of one device, bit for bit")

# %% [markdown]
# The library's executor, its `run_list` (7.5), runs all lists, those with two stages per rank and with pairs too. The
# real trainer trains a GPT for two steps with each:

# %%
for name in ("interleaved-1f1b", "zb-h1", "zb-h2", "zbv", "dualpipev"):
    schedule = make(name, stages, microbatches)
    check(schedule)
    peaks = simulate(schedule).peak_activations
    run = runs.train(name)
    assert run.verdict.passed, run.verdict.line
    listed = count_sends(schedule)[pipe.rank], peaks[pipe.rank]
    assert stages == 1 or (run.messages, run.peak_alive) == listed
    say(f"{name:<17} = 1 device, bit for bit; alive at most, by rank: {peaks}")

# %% [markdown]
# Parameters, losses and gradient norms are those of one device, bit for bit, though `W` of a microbatch is done long
# after its `I`: what counts is that each stage adds its gradients in the order 0, 1, 2, ... of the microbatches. The
# most activations alive are those that the list says. ($m = 2p$ here, because DualPipeV needs that many.)

# %% [markdown]
# ### Channels that deliver in order
#
# *Deeper, 8 minutes.*

# %% [markdown]
# Over MPI a message is found by its tag, so it does not matter in which order a rank asks for messages. Over NCCL it
# does: sends and receives on one *channel* (a stream of one communicator) are done one at a time, in the order of the
# list, and at both ends. PyTorch's pipelines batch all messages of a rank on one channel. Two ranks may have a channel
# of their own, or one for each direction. The executor's list is then right or wrong by the place of its RECVs:
#
# - **too early**: the RECV's message is sent much later, and until then it holds up the SENDs behind it. PyTorch's
#   lowering does so: it goes through the ranks in turn, and does not ask how long anything takes;
# - **too late**: the RECV stands just before its message is used. Then both ranks of a pair begin with their SENDs, as
#   in 7.6;
# - **right**: `lower` simulates with $T_F = T_I = T_W$, and puts a SEND and its RECV at the same moment.
#
# A simulation with channels is one with more to wait for: a message waits until it is the first in its channels. Eight
# ranks with interleaved stages, 16 microbatches and messages that take no time:

# %%
from chapters.support.ch08.in_order import CHANNELS, simulate_in_order
from chapters.support.ch08.receives import early_receives, late_receives
from minipar.parallel.pipeline.check import lower
from minipar.parallel.pipeline.schedules import SCHEDULES

if rank == 0:
    wide = make("interleaved-1f1b", 8, 16)
    equal = Durations(1, 1, 1)
    assert simulate(wide).makespan == 117
    say(f"interleaved-1f1b, p = 8, m = 16: time of a step with one channel per {', '.join(CHANNELS)}")
    expected_times = {early_receives: [168, 117, 117], lower: [117, 117, 117]}
    for place, times in expected_times.items():
        lists = place(wide)
        assert [simulate_in_order(lists, equal, channel).makespan for channel in CHANNELS] == times
        say(f"{place.__name__:<14} {times}")
    say("late_receives:", refusal(simulate_in_order, late_receives(wide), equal, "pair"))
    narrow = make("interleaved-1f1b", 4, 8)
    panels = {
        "early receives": simulate_in_order(early_receives(narrow), equal, "rank"),
        "lower": simulate_in_order(lower(narrow), equal, "rank"),
    }
    assert [line.makespan for line in panels.values()] == [67, 57]
    show(plot_schedule(panels), "08_channels_in_order")

# %% [markdown]
# Both halves have one channel per rank. In the upper half rank 1 has nothing to do at 2, though `0F1` is done: its
# message waits behind a RECV from rank 3.
#
# No list of `lower` deadlocks on any of these channels. Even with blocking sends none does: a blocked SEND delays only
# the computation after it, and whatever that computation sends comes later in the list anyway. Where actions take equal
# times and messages none, channels cost nothing. Where messages take time, channels cost some, because `lower` does not
# know how long: a message can be there when its RECV stands behind a computation that has just begun. For $p = 4$,
# $m = 8$, times 4, 5, 3 and messages of 1:

# %%
if rank == 0:
    longer = {}  # by how much, with each kind of channel
    for name in SCHEDULES:
        times = [simulate_in_order(lower(make(name, 4, 8)), Durations(4, 5, 3, 1), each).makespan for each in CHANNELS]
        free = simulate(make(name, 4, 8), Durations(4, 5, 3, 1)).makespan
        assert (name == "naive") == (times == [free] * 3) and times == sorted(times, reverse=True)
        say(f"{name:<17} {free:>4} without channels; {times} with one per {', '.join(CHANNELS)}")
        longer[name] = [time - free for time in times]
    assert longer["interleaved-1f1b"] == [53, 13, 3]
    assert times == [266, 264, 253] and free == 243  # DualPipeV

# %% [markdown]
# Interleaved stages lose the most, because they send around the ring, so that each rank talks to two others in both
# directions. One channel per rank makes the step longer by 53 units of 242, one per pair by 13, one per direction by 3.
# Without tags there is a third danger. Two RECVs of equal size in the wrong order do not hang: each takes the other's
# message, and only the comparison with one device sees that. `simulate_in_order` of
# `chapters/support/ch08/in_order.py` takes a list of your own, and `plot_schedule` draws it.

# %% [markdown]
# ## 8.7 How long `F`, `I` and `W` take
#
# *Deeper, 8 minutes.*

# %% [markdown]
# For one block with $N = BT$ tokens forward has $24 N h^2$ operations in the four linear layers, and $4 N T h$ in
# attention's two products (scores, and probabilities times values). Backward does two products for each. Those of the
# *linear* layers are one for `I` and one for `W`. Attention's products have no weights, so both are `I`:
#
# $$T_F \propto 24Nh^2 + 4NTh, \qquad T_I \propto 24Nh^2 + 8NTh, \qquad T_W \propto 24Nh^2.$$
#
# So in operations of matrix products $T_W < T_F < T_I$, the more so the longer the sequence. For $h = 4096$:

# %%
if rank == 0:
    h = 4096
    lengths = [1024 * k for k in range(1, 17)]
    linear = 24 * h**2  # operations per token
    operations = {"F": [linear + 4 * T * h for T in lengths], "I": [linear + 8 * T * h for T in lengths]}
    show(figures.plot_operations(lengths, operations | {"W": [linear] * len(lengths)}), "08_operations")

# %% [markdown]
# Measured times can differ, because LayerNorm, softmax and residuals are in F and I. The head adds $2NhV$ to each on
# the last stage.
#
# Is the simulator right? The executor runs on the `model` clock (chapter 3), which every matrix product of the
# trainer advances by its number of operations. Four ranks as threads; a message takes 50,000 operations. Every start
# and end of every action is the simulator's.

# %%
if rank == 0:
    from chapters.support.ch08 import clock
    from chapters.support.pipeline_runs import CLOCK_SHAPE

    T, h, V = (CLOCK_SHAPE[key] for key in ("seq_len", "hidden", "vocabulary"))
    N = 1 * T  # a microbatch is one sample
    message = 50_000  # operations
    block = {"F": 24 * N * h**2 + 4 * N * T * h, "I": 24 * N * h**2 + 8 * N * T * h, "W": 24 * N * h**2}
    head = dict.fromkeys("FIW", 2 * N * h * V)
    for name in SCHEDULES:
        ran = clock.timeline_on_model_clock(name, message)
        schedule = make(name, 4, 8).unpaired()
        predicted = simulate(schedule, clock.stage_durations(block, head, schedule.stages, message))
        assert clock.same_times(ran, predicted)
        say(f"{name:<17} every start and end ==;   bubble {float(predicted.bubble_fraction):.4f}")

# %% [markdown]
# These bubbles are larger than in 8.5, because messages take time and the last stage has the head as well. (In the
# naive schedule only the messages matter.) The slowest stage sets the pace, and the others wait for it at every
# microbatch. A bubble counts every kind of waiting, and where the ranks' work is unequal it is the mean over the ranks.
#
# The model clock does not count LayerNorm, GELU, softmax, residuals, the loss and the optimizer. They are few
# operations but move much memory, so on a GPU they take time. `mpirun -n 8 python -m minipar.bench pipeline` measures
# bubbles on each rank's processor clock.

# %% [markdown]
# ## 8.8 Never draining: PipeDream and 2BW
#
# *Deeper, 6 minutes.*

# %% [markdown]
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
from chapters.support.ch08.pipedream import Staleness, differences_from_one_device

if rank == 0:
    slots = timed(library_lists("1f1b", 4, 16), EQUAL)
    rules = {"PipeDream": Staleness(4).version, "2BW, an update after 4 microbatches": Staleness(4, group=4).version}
    show(figures.draw_versions(slots, rules, end=30), "08_versions")

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

# %% [markdown]
# ## 8.9 Mistakes, and what notices them
#
# *Core, 5 minutes.*

# %% [markdown]
# The instruments are those of 7.8: **check** sees lists, before anything runs, and **verify** compares with one device.
# What can go wrong with a `W`?
#
# 1. **A `W` is forgotten.**
# 2. **A `W` comes before its `I`.**
# 3. **A rank does all its `W` at the end** of the list, in the order of the microbatches.
# 4. **A rank does its `W` in the reverse order**, the last microbatch first.
#
# Which of the four does check refuse? And which of the others change a result?

# %%
predict("refused by check", ...)  # replace the dots by a list of the mistakes 1 to 4, such as [1, 2]
predict("bits differ", ...)  # and which of the others give other bits

# %%
from chapters.support.schedule_lists import written

say("1. forgotten:", refusal(check, written("0F0 0I0 0W0", "1F0 1I0")))
say("2. too early:", refusal(check, written("0F0 0W0 0I0", "1F0 1I0 1W0")))
reveal("refused by check", [1, 2], say)
others = []
for number, order in ((3, 1), (4, -1)):
    lists = []
    for actions in library_lists("zb-h1", stages, len(batch)):
        late = [action for action in actions if action[0] == "W"]
        lists.append([action for action in actions if action[0] != "W"] + late[::order])
    mistaken = written(*(as_text(actions) for actions in lists))
    check(mistaken)  # not refused
    waiting = [peak_live(actions, made_by=("I",), freed_by=("W",)) for actions in mistaken.ranks]
    assert waiting == [len(batch)] * stages
    found = run_list(pipe, lists, weights, batch)
    assert np.allclose(found, expected, rtol=1e-12, atol=1e-12)
    if not np.array_equal(found, expected):
        others.append(number)
assert others == [4]
reveal("bits differ", others, say)

# %% [markdown]
# Check refuses 1 and 2. Both others compute the right gradients. **3** pays with memory: all $m$ microbatches wait for
# their `W`, as many as in GPipe, and only the column "until W" of 8.5 shows it. **4** adds the same values in another
# order, so it differs from one device by rounding. No list and no loss curve shows that: only a comparison of bits.

# %% [markdown]
# ## 8.10 PyTorch's names
#
# *Deeper, 2 minutes.*

# %% [markdown]
# | minipar | PyTorch, `torch.distributed.pipelining` | Megatron-LM |
# | --- | --- | --- |
# | `interleaved-1f1b` | `ScheduleInterleaved1F1B` | `forward_backward_pipelining_with_interleaving` |
# | `zb-h1` | `ScheduleInterleavedZeroBubble` is nearest | |
# | `zbv`, `dualpipev` | `ScheduleZBVZeroBubble`, `ScheduleDualPipeV` | |
# | `I`, `W` | `stage_backward_input`, `stage_backward_weight` | |
#
# The same in PyTorch: [chapters/pytorch/ch08.py](pytorch/ch08.py).

# %%
if rank == 0:
    show_file("chapters/pytorch/ch08.py")

# %% [markdown]
# ## 8.11 Problems
#
# *Deeper, 30 minutes.*

# %% [markdown]
# 1. **$p = 8$, $v = 2$.** How many microbatches does the interleaved schedule need for a bubble *below* 0.1? (1F1B
# needs 64.)
# 2. **$p = 8$, $m = 16$, times 4, 5, 3.** What are the idle times and bubbles of 1F1B and ZB-H1? By which factor does
# ZB-H1 divide the idle time, and by which the bubble?
# 3. **$p = 4$, $v = 3$, $m = 8$.** How many forwards does each rank of the interleaved schedule do in its warm-up? How
# many activations, each of a third of a rank's layers, does rank 0 hold at most, and how many messages travel in a
# step?
# 4. **`W` longer than `F` and `I` together.** With depth 1, $(p-1)(T_F+T_I-T_W)$ becomes negative if $T_W > T_F+T_I$.
# What is ZB-H1's idle time then, and why?
# 5. **Five activations.** With $p = 4$, $m = 8$ and times 4, 5, 3 ZB-H1 idles for 18 and holds 4 activations on rank 0,
# counted until `I`; ZB-H2 idles for 12 and holds 7. Between them lies `ahead` 4, 3, 2, 0, with which rank 0 holds 5.
# Let `delay` be 0, 1, 2 on the first three ranks. Try 3, 4, 5, 6 on the last, with `split_lists` and `idle`. Which is
# the first that idles for less than 14? How many microbatches does the last rank then hold, counted until `W`?

# %% [markdown]
# ## 8.12 Answers
#
# *Deeper, 8 minutes.*

# %% [markdown]
# <details><summary>Answers</summary>
#
# 1. $(p-1)/(vm+p-1) < 1/10$ means $vm > 9(p-1) = 63$, so $m > 31.5$, and $p$ divides $m = 32$.
# 2. Idle: $7 \cdot 12 = 84$ and $7 \cdot (4+5-3) = 42$, half. The work is $16 \cdot 12 = 192$, so the bubbles are
# $84/276 = 7/23$ and $42/234 = 7/39$. The bubble is divided by 39/23 and not by 2, because the total has become
# shorter too.
# 3. 14, 12, 10, 8 forwards: $2(p-1-r) + (v-1)p$. Rank 0 holds one more, 15 thirds: 5 wholes. There are $pv - 1 = 11$
# cuts, each crossed by 8 microbatches in both directions: 176 messages.
# 4. $(p-1)\max(T_F, T_I)$: the chain *up* is shorter than the other two. The last rank cannot begin before $(p-1)T_F$,
# and rank 0 waits $(p-1)T_I$ for its first gradient, because its own forwards cover only the way down.
# 5. The idle times are 18, 15, 13, 13: so 5. From 3 to 4 the chain *up* gets shorter by $T_W$; at 5 another chain is
# the longest. The last rank does its first `W` after 6 forwards, so it holds 6 until `W`.
#
# </details>

# %% tags=["hide-input"]
assert simulate(make("1f1b", 8, 64)).bubble_fraction == Fraction(7, 71)
assert idle(interleaved_lists(8, 32), EQUAL) == 7 * 3  # beside 64 stages of 3 each: 7/71
assert [idle(library_lists(name, 8, 16), REAL) for name in ("1f1b", "zb-h1")] == [84, 42]
assert Fraction(84, 192 + 84) / Fraction(42, 192 + 42) == Fraction(39, 23)
for actions, ahead in zip(interleaved_lists(4, 8, 3), (14, 12, 10, 8), strict=True):
    assert [kind for kind, _, _ in actions].index("B") == ahead + 1  # the steady state begins with a forward, too
assert sum(count_sends(make("interleaved-1f1b", 4, 8, 3))) == 176
assert all(idle(zero_bubble_lists(4, 8, 1), t) == 3 * max(t["F"], t["I"]) for t in TIMES[5:])  # T_W > T_F + T_I
assert [idle(split_lists([4, 3, 2, 0], [0, 1, 2, last], 8), REAL) for last in (3, 4, 5, 6)] == [18, 15, 13, 13]
say("the answers hold")

# %% [markdown]
# In the notebook, the last cell lets you change $p$, $m$, $v$, the schedule and the times, and the picture follows.
# Readers without a running notebook see one picture there: ZB-H1 with the times 4, 5, 3.

# %% tags=["active-ipynb"]
# %autopx

# %% tags=["active-ipynb"]
# # Back in one process: stop the eight, and explore.
# cluster.stop_cluster_sync()

# %% tags=["active-ipynb"]
# from chapters.support.ch08.figures import explore_schedules
#
# explore_schedules()
