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
# finished, so ranks wait. The time they wait is the **bubble**, and this chapter is about making it small.
#
# We go from the naive pipeline, in which one rank works at a time, to schedules without a bubble (Qi et al. 2023, arXiv
# 2401.10241). Each is derived, drawn, checked, simulated, run on the ranks, proved equal to one device **bit for bit**,
# and measured.
#
# Run it as `mpirun -n 8 python chapters/07_pipeline.py`, with any number of ranks. One rank is a pipeline without a
# cut: it has no bubble and sends nothing, and what is run on the ranks is trivially right. Everything simulated stays
# the same.
#
# Letters: $p$ ranks of a pipeline, of which this one is $r$; $m$ microbatches; $v$ stages on one rank; $d$ replicas;
# $B$ samples of $T$ tokens, $h$ elements per token, $V$ words. `F`, `B`, `I`, `W` are actions; $F$, $I$, $W$ and $F+B$
# are times, and $X$ is a rank's idle time. In the code `P`, `D` and `M` are p, d and m of the runs, and `N` counts all
# ranks.

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

comm = world()
rank, N = comm.rank, comm.size
P = max(size for size in range(1, 9) if N % size == 0)  # ranks of the pipeline
D = N // P  # replicas of it, for data parallelism
say = printer(rank)  # rank 0 prints and draws; every rank checks
if rank == 0:
    from chapters.support.figures_pipeline import measured_timeline
    from chapters.support.show import show, show_source
    from visualize import gallery, parse_trace, plot_schedule, plot_schedules, plot_timeline
say(f"{N} rank{'s' if N > 1 else ''}: {D} pipeline{'s' if D > 1 else ''} of {P}")

# %% [markdown]
# ## 7.1 A schedule is data
#
# A *stage* is a run of layers. Stage 0 begins with the embedding, the last one ends with the output head and the loss.
# The samples of a step are cut into $m$ **microbatches**, which follow one another through the $p$ ranks, and whose
# gradients add up until the step's one update. So three things are done, for each stage and microbatch:
#
# - **F**, the forward of the stage: takes an activation, gives an activation;
#
# - **B**, its backward: takes the gradient of what the stage gave, gives the gradient of what it took;
#
# - and messages between them.
#
# We write an action as PyTorch does: `2F0` is the forward of stage 2 for microbatch 0. A **schedule** is a list of
# actions for each rank, and nothing else. One list is checked, simulated, drawn and executed. Here is the naive one, in
# plain Python.

# %%
from minipar.parallel.pipeline import Schedule, check, load_csv, make, parse_action, save_csv, simulate


def naive_lists(p, m):
    """The actions of each rank in order, as (kind, microbatch). Rank r has stage r."""
    return [[(kind, i) for i in range(m) for kind in "FB"] for r in range(p)]


def same_lists(name, build, whole_groups=False):
    """Assert that `build(p, m)` equals the library's lists, for p to 8 and m to 24."""
    cases = [(p, m) for p in range(1, 9) for m in range(1, 25) if m % p == 0 or not whole_groups]
    for p, m in cases[rank::N]:  # each rank checks its share
        library = [[(a.kind, a.microbatch, a.stage) for a in actions] for actions in make(name, p, m).ranks]
        built = [[(*action, r)[:3] for action in actions] for r, actions in enumerate(build(p, m))]  # without stage: r
        assert built == library, (name, p, m)
    say(f"{name}: these lists are the library's, in {len(cases)} cases of p and m")


def as_text(actions, r):
    """A list as text; `r` is the stage of actions that name none."""
    return " ".join("{2}{0}{1}".format(*action, r) for action in actions)


for r, actions in enumerate(naive_lists(3, 2)):
    say(f"rank {r}: {as_text(actions, r)}")
same_lists("naive", naive_lists)

# %% [markdown]
# The library's function makes an `Action` with its stage of each pair. It gives the schedule a name. And a schedule can
# be written to a file that PyTorch reads, and read back.

# %%
import tempfile
from pathlib import Path

from minipar.parallel.pipeline.schedules import naive

if rank == 0:
    show_source(naive)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "naive.csv"
        save_csv(naive(2, 2), path)
        say("\nthe same as PyTorch's CSV: a row for each rank, a cell for each time step, empty where it is idle\n")
        say(path.read_text())
        assert load_csv(path).ranks == naive(2, 2).ranks

# %% [markdown]
# (B takes as long as two cells here: it computes two products for each one of forward.)
#
# ### What an action needs
#
# `2F0` needs `1F0`. `2B0` needs its own forward, `2F0`, and the gradient from behind, `3B0`. That is all the simulator
# has to know: a rank does its list in order, and an action begins when the rank is free and what it needs is there. I
# and W, the two halves of a backward, come in 7.5; W needs its I. A simulator of plain lists has two short functions.

# %%
from fractions import Fraction

from minipar.parallel.pipeline import Durations


def needs(kind, i, r, p):
    """The actions, as (kind, microbatch, rank), whose results this one uses."""
    if kind == "F":
        return [("F", i, r - 1)] if r > 0 else []
    if kind == "W":
        return [("I", i, r)]
    return [("F", i, r), (kind, i, r + 1)][: 1 + (r < p - 1)]


def ends(lists, times):
    """When each (kind, microbatch, rank) ends; times[kind] is the time of an action, and messages take none."""
    end, free, position, before = {}, [0] * len(lists), [0] * len(lists), -1
    while len(end) > before:  # until a round over the ranks adds nothing
        before = len(end)
        for r, actions in enumerate(lists):
            while position[r] < len(actions):
                kind, i = actions[position[r]]
                needed = needs(kind, i, r, len(lists))
                if not all(need in end for need in needed):
                    break  # the rank waits
                free[r] = max([free[r], *(end[need] for need in needed)]) + times[kind]
                end[kind, i, r] = free[r]
                position[r] += 1
    assert len(end) == sum(map(len, lists)), "the ranks wait in a circle"
    return end


TIMES = [{"F": f, "I": i, "W": w, "B": i + w} for f, i, w in ((1, 1, 1), (4, 5, 3), (2, 3, 1), (3, 2, 5), (1, 3, 2))]


def library_makespan(name, p, m, times):
    return simulate(make(name, p, m), Durations(times["F"], times["I"], times["W"])).makespan


for times in TIMES:
    for p, m in ((1, 1), (2, 3), (4, 8), (5, 2)):
        assert max(ends(naive_lists(p, m), times).values()) == library_makespan("naive", p, m, times)
if rank == 0:
    show_source(Schedule.needs, simulate)

# %% [markdown]
# The library's simulator also knows several stages on a rank and the time of a message. It keeps the start of each
# action for the pictures. And it names the actions that wait in a circle.
#
# Let $F$ and $B$ also be the times of these actions, on one rank. In the naive schedule each microbatch goes down all
# ranks and back before the next one enters. So the *makespan*, the time from the first action to the last, is
# $m p (F+B)$, of which each rank works $m (F+B)$. In this chapter
#
# $$\text{bubble} = \frac{\text{idle}}{\text{total}} = \frac{mp(F+B) - m(F+B)}{mp(F+B)} = \frac{p-1}{p}.$$
#
# With 4 ranks, three quarters of the machine are wasted. It is the same with 8 microbatches as with 1.

# %%
ONE, HALF = Fraction(1), Fraction(1, 2)
timeline = simulate(naive(4, 3), Durations(forward=ONE, backward_input=ONE, backward_weight=ONE))  # B = I + W = 2
assert timeline.bubble_fraction == Fraction(3, 4)
if rank == 0:
    show(plot_schedule(timeline), "07_naive")

# %% [markdown]
# Times are Python Fractions, so bubbles are exact fractions, compared with `==`. Under the boxes: how many
# **activations are alive**. A forward keeps its intermediate results until its backward has used them. The naive
# pipeline keeps one.
#
# ### The instruments
#
# Every schedule of this chapter goes through the same hands.
#
# **On paper.** For each we derive the idle time $X$ of a rank within the makespan. The rank works $m(F+I+W)$, so the
# bubble is $X / (m(F+I+W) + X)$. `on_paper` demands that the simulator gives exactly this, for all $p$ to 6, several
# $m$, and two sets of times: equal, and $F, I, W = 4, 5, 3$.
#
# **On the ranks.** `on_ranks` trains two steps with the real trainer (`--pp --schedule --microbatches`), in float64,
# with dropout and with clipping, on stages of unequal size. It demands:
#
# 1. parameters, losses and gradient norms are those of one device, **bit for bit**;
#
# 2. the most activations that a rank ever held are those that the schedule says;
#
# 3. the bytes sent over the cuts are $B\,T\,h$ elements per microbatch, cut and direction ($B$ samples of $T$ tokens,
# hidden size $h$).
#
# Why can the bits be equal? A stage does the same products on the same values as the whole model would. Sums over
# microbatches are taken in their order 0, 1, 2, ... in every schedule. The dropout masks are keyed by sample and layer,
# not by rank. The norm is added up part by part, in one order.

# %%
import numpy as np

from minipar.comm import DeviceMesh
from minipar.train.config import parse, resolve
from minipar.train.data import load_tokens
from minipar.train.trainer import Trainer
from minipar.train.verify import compare, train_on_one_device, verify

T, HIDDEN, VOCABULARY, STEPS = 16, 16, 256, 2
M = 2 * P  # microbatches
ELEMENT = 8  # bytes of a float64
tokens = load_tokens(None, vocab_size=VOCABULARY, seq_len=T)
FLAGS = (
    f"--layers {2 * P + 1} --hidden {HIDDEN} --heads 2 --seq-len {T} --global-batch {M * D} --microbatches {M} "
    f"--dtype float64 --reduction ordered --dropout 0.1 --clip-grad 0.5 --lr 3e-3 --steps {STEPS}"
).split()


def configure(schedule, *flags, pp=P):
    """The trainer's configuration, from its own flags. Without a pipeline there is nothing to schedule."""
    pipeline = ["--pp", str(pp), "--schedule", str(schedule)] if pp > 1 else []
    return resolve(parse([*FLAGS, *pipeline, *flags], rank), N)


def train(schedule, *flags, pp=P, kind=Trainer):
    """Train on all ranks: (trainer, what each step reported)."""
    trainer = kind(configure(schedule, *flags, pp=pp), DeviceMesh(comm, dp=N // pp, pp=pp), tokens)
    return trainer, list(trainer.train())


single = train_on_one_device(configure("gpipe"), tokens) if rank == 0 else None  # one device, to compare all with
say(f"one device: {sum(a.size for a in single[0].values()):,} parameters" if single else "")


def on_paper(name, idle, smallest=lambda p: 1, times=((1, 1, 1), (4, 5, 3))):
    """The simulator's bubble == idle / (work + idle), exactly. idle(p, m, f, i, w): the times are those of a rank."""
    cases = [(p, m, *each) for p in range(1, 7) for m in (p, 2 * p, 3 * p, 8 * p) for each in times if m >= smallest(p)]
    for p, m, f, i, w in cases[rank::N]:  # each rank checks its share
        schedule = make(name, p, m)
        v = Fraction(schedule.stages, p)  # stages per rank: each takes 1/v of the rank's time
        found = simulate(schedule, Durations(f / v, i / v, w / v)).bubble_fraction
        X = Fraction(idle(p, m, f, i, w))
        assert found == X / (m * (f + i + w) + X), (name, p, m, found)
    say(f"{name}: the simulator's bubble is the formula's, exactly, in {len(cases)} cases")


def judge(trainer, steps):
    """The comparison of `--verify` with the one device above; every rank gets the verdict, as passed and line."""
    state = trainer.state_dict()  # collected on rank 0
    said = b""
    if rank == 0:
        verdict = compare(state, single[0], steps, single[1], exact=True, ranks=N, dtype="float64")
        said = f"{int(verdict.passed)}{verdict.line}".encode()
    said = comm.all_gather_bytes(said)[0].decode()
    return said[0] == "1", said[1:]


def on_ranks(name):
    """Train with this schedule on the ranks; prove bits, activations, bytes."""
    schedule = make(name, P, M)
    report = check(schedule)
    comm.traffic.reset()
    trainer, steps = train(name)
    sent = comm.traffic.bytes("send", "pp")
    passed, line = judge(trainer, steps)
    assert passed, line
    if P == 1:
        say(f"{name} on 1 rank = 1 device, bit for bit: nothing else could come out")
        return
    r, last = trainer.mesh.pp.rank, schedule.home[schedule.stages - 1]
    cuts = report.sends[r] * 1 * T * HIDDEN * ELEMENT  # B = 1 sample
    embedding = VOCABULARY * HIDDEN * ELEMENT if last != 0 and r in (0, last) else 0  # see 6.9
    assert sent == STEPS * (cuts + embedding)
    assert trainer.pipelined.executor.peak_alive == report.peak_activations[r]
    say(f"{name} on {P} ranks{f' x {D}' if D > 1 else ''}, m = {M}: = 1 device, bit for bit")
    say(f"  activations alive at most, by rank: {report.peak_activations}: counted in the run, ==")
    say(f"  messages per step, by rank: {report.sends}, each B T h = {T * HIDDEN} elements: counted, ==")


on_paper("naive", lambda p, m, f, i, w: (p - 1) * m * (f + i + w))
on_ranks("naive")

# %% [markdown]
# ## 7.2 GPipe: many microbatches at once
#
# Nothing forbids microbatch 1 to enter while microbatch 0 is further down. GPipe (Huang et al. 2019, arXiv 1811.06965)
# does all forwards, then all backwards.


# %%
def gpipe_lists(p, m):
    return [[("F", i) for i in range(m)] + [("B", i) for i in range(m)] for r in range(p)]


same_lists("gpipe", gpipe_lists)

from minipar.parallel.pipeline.schedules import gpipe

if rank == 0:
    show_source(gpipe)
    show(plot_schedule(simulate(make("gpipe", 4, 8))), "07_gpipe")

# %% [markdown]
# Look at the last rank: it starts when the first forward has come through $p-1$ ranks, after $(p-1)F$, and then never
# waits: its first backward follows its last forward at once. When it is done, the last gradient still has $p-1$ ranks
# to go up: $(p-1)B$. So every rank idles for
#
# $$X = (p-1)(F+B), \qquad \text{bubble} = \frac{(p-1)(F+B)}{m(F+B) + (p-1)(F+B)} = \frac{p-1}{m+p-1}.$$
#
# More microbatches, smaller bubble. The price is in the lower half of the picture: all $m$ microbatches are alive when
# the first backward begins. (GPipe therefore *recomputes*: it keeps only each stage's input and runs the forward again.
# `--recompute full` does that here.)

# %%
on_paper("gpipe", lambda p, m, f, i, w: (p - 1) * (f + i + w))
on_ranks("gpipe")

# %% [markdown]
# ## 7.3 1F1B: the same bubble, less memory
#
# Rank $r$ cannot do a backward before its first microbatch has been down to the last rank and back. In that time it may
# run ahead by $p-1-r$ forwards. After these *warm-up* forwards, each further forward is followed by a backward, which
# frees what a forward took. At the end, the *cool-down*, only backwards are left. This is the synchronous form of
# PipeDream's order (Narayanan et al. 2019), called PipeDream-Flush or **1F1B** (Narayanan et al. 2021, arXiv
# 2104.04473, section 2.2). The forward of microbatch $i + (p-1-r)$ comes just before the backward of microbatch $i$:


# %%
def one_f_one_b_lists(p, m):
    lists = []
    for r in range(p):
        ahead = p - 1 - r
        actions = [("F", i) for i in range(min(ahead, m))]  # warm-up
        for i in range(m):
            if ahead + i < m:  # later only backwards are left: the cool-down
                actions.append(("F", ahead + i))
            actions.append(("B", i))
        lists.append(actions)
    return lists


for r, actions in enumerate(one_f_one_b_lists(3, 4)):
    say(f"rank {r}: {as_text(actions, r)}")
same_lists("1f1b", one_f_one_b_lists)
for times in TIMES:
    for p, m in ((1, 1), (2, 3), (4, 8), (5, 2)):
        found = max(ends(one_f_one_b_lists(p, m), times).values())
        assert found == library_makespan("1f1b", p, m, times)
        assert m < p or found == (m + p - 1) * (times["F"] + times["B"])

# %% [markdown]
# The library writes the three phases as three loops, and is otherwise the same.

# %%
from minipar.parallel.pipeline import peak_live
from minipar.parallel.pipeline.schedules import one_f_one_b

if rank == 0:
    show_source(one_f_one_b)
    show(plot_schedule(simulate(make("1f1b", 4, 8))), "07_1f1b")

# %% [markdown]
# The bubble only moved: still $(p-1)F$ before the last rank's first action and $(p-1)B$ after its last. But at most
# $\min(m, p-r)$ microbatches are alive on rank $r$, whatever $m$ is. So $m$ can grow until the bubble does not matter.
# Rank 0 holds the most, the last rank one.

# %%
on_paper("1f1b", lambda p, m, f, i, w: (p - 1) * (f + i + w))
for name, peak in (("gpipe", lambda p, m, r: m), ("1f1b", lambda p, m, r: min(m, p - r))):
    for p in range(1, 9):
        for m in range(1, 17):
            assert [peak_live(actions) for actions in make(name, p, m).ranks] == [peak(p, m, r) for r in range(p)]
say("peaks for all p to 8 and m to 16: gpipe m, 1f1b min(m, p - r)")
on_ranks("1f1b")

# %% [markdown]
# ## 7.4 Interleaved: smaller stages, shorter warm-up
#
# The bubble is $p-1$ times the time of a *stage*. So make stages shorter: give each rank $v$ of them, not one after
# another but $p$ apart, rank $r$ the stages $r, p+r, 2p+r, \dots$ (Narayanan et al. 2021, section 2.2). A microbatch
# goes $v$ times round the ranks. Filling the pipeline now takes $p-1$ stages of length $F/v$, so
#
# $$X = \frac{(p-1)(F+B)}{v}, \qquad \text{bubble} = \frac{p-1}{vm+p-1}.$$
#
# Microbatches go in groups of $p$: a group passes stage $r$ of a rank, then stage $p+r$, and so on. So $p$ must divide
# $m$. In the picture the lighter boxes are a rank's later stages.
#
# Rank $r$ warms up with $2(p-1-r) + (v-1)p$ forwards. Its first backward is that of microbatch 0 through its *last*
# stage. Before the forward of microbatch 0 through that stage, the first group of $p$ microbatches has passed the other
# $v-1$ stages of the rank: $(v-1)p$ forwards. From there microbatch 0 goes down to the last rank in $p-1-r$ hops, and
# its gradient comes back in as many. The rank does one forward for each of these $2(p-1-r)$ hops. In the steady state a
# forward comes before each backward, so one more forward precedes the first backward.


# %%
def interleaved_lists(p, m, v=2, per_rank=2):
    """As (kind, microbatch, stage). `per_rank`: warm-up forwards for each rank behind this one."""

    def action(kind, r, k):
        """The k-th forward or backward of rank r; backwards take its stages from the last to the first."""
        turn = k // p % v
        return kind, k // (p * v) * p + k % p, (turn if kind == "F" else v - 1 - turn) * p + r

    lists = []
    for r in range(p):
        ahead = min(per_rank * (p - 1 - r) + (v - 1) * p, m * v)
        actions = [action("F", r, k) for k in range(ahead)]
        for k in range(m * v):
            if ahead + k < m * v:
                actions.append(action("F", r, ahead + k))
            actions.append(action("B", r, k))
        lists.append(actions)
    return lists


same_lists("interleaved-1f1b", interleaved_lists, whole_groups=True)
say("p = 3, v = 2: the actions up to the first backward")
for r, actions in enumerate(interleaved_lists(3, 6)):
    count = [kind for kind, *_ in actions].index("B")  # forwards before it
    assert count == 2 * (3 - 1 - r) + (2 - 1) * 3 + 1
    say(f"rank {r}: {as_text(actions[: count + 1], r)}")


def idle_interleaved(per_rank, message):
    """The idle time of p = 4, m = 8, v = 2, F = I = W = 1 on a rank; a message takes this time."""
    lists = interleaved_lists(4, 8, 2, per_rank)
    schedule = Schedule.of("interleaved", [[parse_action(as_text([one], 0)) for one in actions] for actions in lists])
    return simulate(schedule, Durations(HALF, HALF, HALF, message)).makespan - 8 * 3


assert idle_interleaved(2, 0) == idle_interleaved(1, 0) == Fraction(9, 2)
tenth = Fraction(1, 10)
assert [idle_interleaved(2, tenth), idle_interleaved(1, tenth)] == [Fraction(59, 10), Fraction(15, 2)]

# %% [markdown]
# Is a forward for *each* hop needed, two for each rank behind? With messages that take no time, one for each rank
# behind is enough: with $p = 4$, $m = 8$, $v = 2$ and $F = I = W = 1$ the idle time is 4.5 either way. But if a message
# takes 0.1, it is 5.9 with two and 7.5 with one. The longer warm-up hides the messages of the steady state, and costs
# memory.
#
# The library's version has the same order. It refuses an $m$ that $p$ does not divide.

# %%
from minipar.parallel.pipeline.schedules import interleaved

if rank == 0:
    show_source(interleaved)
    show(
        plot_schedule(simulate(make("interleaved-1f1b", 4, 8), Durations(HALF, HALF, HALF))),
        "07_interleaved",
    )

# %% [markdown]
# Two prices. Rank 0 holds up to $2(p-1)+(v-1)p+1$ activations, each of $1/v$ of its layers: for $v=2$ about
# $\frac{3p-1}{2p}$ of what 1F1B holds. And there are $v$ times as many messages, also from the last rank back to rank
# 0.

# %%
on_paper("interleaved-1f1b", lambda p, m, f, i, w: Fraction((p - 1) * (f + i + w), 2))
on_ranks("interleaved-1f1b")

# %% [markdown]
# ## 7.5 Backward is two things
#
# Take one linear layer, $y = xA$, and the gradient $g$ of $y$. Backward computes two products:
#
# $$\underbrace{dx = g A^{\mathsf T}}_{\textbf{I}} \qquad \underbrace{dA = x^{\mathsf T} g}_{\textbf{W}}$$
#
# The rank before waits for $dx$. **Nobody waits for $dA$** until the optimizer's step. So split B into I, the gradient
# of the input, and W, the gradient of the weights, and do W whenever there is time: in the bubble. This is the whole
# idea of Zero Bubble (Qi et al. 2023).
#
# Two layers by hand: I puts a recipe for each weight gradient into a queue, and W runs them.

# %%
from functools import partial

x, g, first, second = np.random.default_rng(3).normal(size=(4, HIDDEN, HIDDEN))
queue = []
between = x @ first  # y = between @ second
gradient = g
for kept, matrix in ((between, second), (x, first)):  # I, from the last layer to the first
    queue.append(partial(np.matmul, kept.T, gradient))  # keeps x and g of this layer alive
    gradient = gradient @ matrix.T
d_second, d_first = [recipe() for recipe in queue]  # W, whenever there is time
assert np.array_equal(gradient, g @ second.T @ first.T)
assert np.array_equal(d_second, between.T @ g) and np.array_equal(d_first, x.T @ (g @ second.T))
say(f"after I: the gradient of the input, and {len(queue)} recipes; after W: the weight gradients, the same bits")

# %% [markdown]
# How does one split a backward pass of arbitrary layers? In minipar a product gives its weight gradient as a *recipe*,
# not as an array. Backward runs it at once, or inside `defer_weight_gradients` puts it into a queue. The queue holds
# what W needs: $x$ and $g$ of every layer. So an activation is not quite freed when I is done.

# %%
from minipar.autograd import DeferredGradients, defer_weight_gradients
from minipar.parallel.pipeline import PipelineStage

if rank == 0:
    show_source(DeferredGradients.run, defer_weight_gradients)
    show_source(PipelineStage.backward_input, PipelineStage.backward_weight)

# %% [markdown]
# On one stage, by hand: after I every weight gradient is missing, after W all are there, with the bits of a whole
# backward.

# %%
from minipar.autograd import Tensor
from minipar.nn import GPT, GPTConfig

shape = GPTConfig(vocab_size=VOCABULARY, n_positions=T, n_embd=HIDDEN, n_layer=1, n_head=2)


def halves(split):
    model = GPT(shape, dtype="float64")
    stage = PipelineStage(model.parts[1:2])  # the one block
    x, g = np.random.default_rng(0).normal(size=(2, 1, T, HIDDEN))
    stage.forward(0, Tensor(x, requires_grad=True))  # `backward` returns the gradient of this Tensor
    dx = stage.backward_input(0, g) if split else stage.backward(0, g)
    weight = model.h[0].mlp.c_fc.weight
    after_i = weight.grad
    if split:
        stage.backward_weight(0)
    return dx, after_i, weight.grad


(dx, whole, _), (dx_i, none, later) = halves(split=False), halves(split=True)
assert none is None and dx.tobytes() == dx_i.tobytes() and whole.tobytes() == later.tobytes()
say(
    "after I: no weight gradient, but the gradient of the input, bit for bit; after W: the weight gradient, bit for bit"
)

# %% [markdown]
# ### ZB-H1
#
# Take 1F1B and split each B. If W followed I at once, only the gradients' way up would get shorter, by $(p-1)W$. Put W
# off further: rank $r$ does W of microbatch $i$ after I of microbatch $i + r$. The last rank starts after $(p-1)F$ and
# never waits. It keeps $p-1$ of its W for the end, so its last I is done $(p-1)W$ earlier. The gradient then passes the
# $p-1$ other ranks, and each adds the time of one I. Rank 0 has put nothing off; it adds the last W. Together, beyond
# the work $m(F+I+W)$,
#
# $$X = \underbrace{(p-1)F}_{\text{down}} + \underbrace{(p-1)I}_{\text{up}} - \underbrace{(p-1)W}_{\text{put off}}.$$
#
# (for $W \le I$ and $W \le F$; all other cases follow below). With $F = I = W$ that is a third of 1F1B's. No more
# forwards wait for their backward than with 1F1B. But a W that is put off keeps its inputs alive, $x$ and $g$ of every
# product: on rank $r$ those of up to $r + 1$ microbatches.


# %%
def zero_bubble_lists(p, m, depth=1):
    """ZB-H1 is depth 1: 1F1B with I in place of B, and W of microbatch i after I of microbatch i + r."""
    lists = []
    for r in range(p):
        ahead, delay = depth * (p - 1 - r), depth * r
        actions = [("F", i) for i in range(min(ahead, m))]
        for i in range(m):
            if ahead + i < m:
                actions.append(("F", ahead + i))
            actions.append(("I", i))
            if i >= delay:
                actions.append(("W", i - delay))
        lists.append(actions + [("W", i) for i in range(max(0, m - delay), m)])
    return lists


for r, actions in enumerate(zero_bubble_lists(3, 4)):
    say(f"rank {r}: {as_text(actions, r)}")
same_lists("zb-h1", zero_bubble_lists)

# %% [markdown]
# The library has one function for ZB-H1 and the next schedule, ZB-H2, with the same argument `depth`.

# %%
from minipar.parallel.pipeline import schedules

if rank == 0:
    show_source(schedules._handcrafted_zero_bubble)
    show(plot_schedule(simulate(make("zb-h1", 4, 8))), "07_zb_h1")
on_paper("zb-h1", lambda p, m, f, i, w: (p - 1) * (f + i - w))
on_ranks("zb-h1")

# %% [markdown]
# ### ZB-H2
#
# The same function with depth 2. What is left is rank 0's wait for its first gradient. Fill it with more forwards: rank
# $r$ runs $2(p-1-r)$ ahead, and its W come $2r$ microbatches after their I. The last rank now puts off $2(p-1)$ of
# them, so rank 0 idles for $(p-1)(F+I-2W)$, or not at all where that is negative. But the last rank cannot begin before
# $(p-1)F$. So, if $W \le F$,
#
# $$X = (p-1)\max(F,\; F+I-2W), \qquad m \ge 2p-1,$$
#
# and rank 0 holds $2p-1$ activations.

# %%
same_lists("zb-h2", partial(zero_bubble_lists, depth=2))
if rank == 0:
    show(plot_schedule(simulate(make("zb-h2", 4, 8))), "07_zb_h2")
on_paper("zb-h2", lambda p, m, f, i, w: (p - 1) * max(f, f + i - 2 * w), smallest=lambda p: 2 * p - 1)
on_ranks("zb-h2")

h1, h2 = (simulate(make(name, 4, 8)) for name in ("zb-h1", "zb-h2"))
say(f"bubble, idle / total: ZB-H1 {h1.bubble_fraction}, ZB-H2 {h2.bubble_fraction}")
say(f"the rank that takes longest, from its own first action to its last: {h1.bubble_rate}, {h2.bubble_rate}")
assert h1.bubble_fraction == h2.bubble_fraction and h2.bubble_rate == 0 < h1.bubble_rate

# %% [markdown]
# ### The critical path
#
# A chain of actions, each of which waits for the one before, takes the sum of their times. No schedule is shorter than
# its longest chain, and a simulated one is exactly as long. With depth $k$ (1: ZB-H1, 2: ZB-H2) and
# $m \ge k(p-1) + 1$ one of three chains is the longest:
#
# | chain | its length beyond $m(F+I+W)$ |
# | --- | --- |
# | down: microbatch 0 goes down to the last rank, which then does its whole list | $(p-1)F$ |
# | up: the same until the last rank's last I, which goes up to rank 0, and rank 0's last W | $(p-1)(F+I-kW)$ |
# | back: microbatch 0 goes down, its gradient comes back, and rank 0 does the rest of its list | $(p-1)(I-(k-1)F)$ |
#
# In the chain *up* the last rank does $m$ F, $m$ I and $m - 1 - k(p-1)$ W, and each of the other ranks adds one F on
# the way down and one I on the way up. In the chain *back* the other ranks add an F and an I each as well, and rank 0's
# $k(p-1)$ forwards between its first F and its first I are not part of it. So
#
# $$X = (p-1)\,\max\big(F,\;\; F+I-kW,\;\; I-(k-1)F\big).$$
#
# With $W \le F$ the third is never longer than the second.

# %%
from itertools import pairwise


def chains(p, m, depth):
    """The three chains of a zero-bubble schedule, as lists of (kind, microbatch, rank)."""
    lists = [[(*action, r) for action in actions] for r, actions in enumerate(zero_bubble_lists(p, m, depth))]
    head, tail = lists[0], lists[-1]
    down = [("F", 0, r) for r in range(p - 1)]
    up = [("I", m - 1, r) for r in range(p - 2, -1, -1)] + [("W", m - 1, 0)]
    back = [("I", 0, r) for r in range(p - 1, 0, -1)]
    found = {
        "down": down + tail,
        "up": down + tail[: tail.index(("I", m - 1, p - 1)) + 1] + up,
        "back": [*down, ("F", 0, p - 1), *back, *head[head.index(("I", 0, 0)) :]],
    }
    for chain in found.values():
        for a, b in pairwise(chain):  # b waits for a: it needs a's result, or it comes next on a's rank
            assert a in needs(*b, p) or (a, b) in pairwise(lists[b[2]])
    return found


cases = [(k, p, m, times) for k in (1, 2) for p in range(1, 7) for m in (k * (p - 1) + 1, 3 * p) for times in TIMES]
for k, p, m, times in cases[rank::N]:
    longest = max(sum(times[kind] for kind, *_ in chain) for chain in chains(p, m, k).values())
    f, i, w = (times[kind] for kind in "FIW")
    X = (p - 1) * max(f, f + i - k * w, i - (k - 1) * f)
    assert longest == m * (f + i + w) + X == library_makespan(f"zb-h{k}", p, m, times)
    assert longest == max(ends(zero_bubble_lists(p, m, k), times).values())
times = TIMES[1]
for what, chain in chains(3, 4, 1).items():
    say(f"{what:<5} {as_text(chain, 0)}: {sum(times[kind] for kind, *_ in chain)}")
say(f"zb-h1, p = 3, m = 4, F, I, W = 4, 5, 3: makespan {library_makespan('zb-h1', 3, 4, times)}, the longest of these")
assert library_makespan("zb-h1", 3, 4, times) == 60
say(f"makespan == the longest of the three chains == work + X, in {len(cases)} cases")

# %% [markdown]
# Is ZB-H2 no better than ZB-H1? For one step alone, with $F = I = W$, it is not! The picture says why. Rank 3 starts
# $3F$ late, and nothing can change that. In ZB-H2 every rank works without a pause, but rank $r$ ends $rF$ after rank
# 0: the parallelogram leans. Its idle time lies before and after the rank's own work. If the next step may begin as
# soon as a *rank* is done, parallelograms fit together and no bubble is left. Zero Bubble measures this: a rank's time
# from *its own* first action to its last. The two conventions differ, as do others in use:
#
# | | what | GPipe, 1F1B |
# | --- | --- | --- |
# | bubble fraction, here | idle / total | $\frac{p-1}{m+p-1}$ |
# | Megatron's (Narayanan et al. 2021) | idle / ideal | $\frac{p-1}{m}$ |
# | bubble rate (Qi et al. 2023, section 5.3) | (cost $-$ work) / cost, cost of the longest rank | $\frac{p-1}{m+p-1}$ |
#
# But can a rank start its next step alone? It must step its optimizer first. If gradients are clipped by their *global*
# norm, that norm needs every rank's last gradient: all wait for all, and the leaning ends are idle again. Section 4 of
# the paper therefore steps at once, with the norm known so far, and corrects or rolls back when the true one arrives
# ("post-validation"). minipar's trainer waits. So for it idle / total is the honest number.
#
# The paper's Tables 5 and 6, first row: $p = 8$, $m = 24$, times in ms as measured on its machine. With these times,
# and 0.601 ms for each message, the simulator gives the published rates.

# %%
PAPER = Durations(18.522, 18.086, 9.337, 0.601)
for name, published in {"1f1b": 0.2431, "zb-h1": 0.1585, "zb-h2": 0.1083}.items():
    found = simulate(make(name, 8, 24), PAPER)
    assert round(found.bubble_rate, 4) == published
    say(f"{name:<6} bubble rate {found.bubble_rate:.4f} = published;   idle / total {found.bubble_fraction:.4f}")

# %% [markdown]
# ZB-H2's rate is not zero there: W takes only half as long as I, so $F + I - 2W$ is far from 0. And both conventions
# agree in this row, because rank 0 begins first and ends last.
#
# ### ZB-V
#
# ZB-H2 pays with twice the activations. The V-shaped schedule (Qi et al. 2024, arXiv 2405.15362) has both: two stages
# per rank, the second half of the pipeline running *back up*. Rank $r$ has stages $r$ and $2p-1-r$. The last stage lies
# on rank 0, beside the first. So a microbatch's backward can begin where its forward ended, without a way down. Every
# rank holds $2p$ activations of half size, which is 1F1B's $p$. And as both ends are on one rank, embedding and head
# are there together.

# %%
if rank == 0:
    show(plot_schedule(simulate(make("zbv", 4, 8), Durations(HALF, HALF, HALF))), "07_zbv")
on_paper("zbv", lambda p, m, f, i, w: Fraction((p - 1) * f, 2), smallest=lambda p: 2 * p - 1, times=[(1, 1, 1)])
on_ranks("zbv")

# %% [markdown]
# For $F = I = W$ no rank ever pauses: the idle time is the start, $p-1$ half-sized forwards.
#
# ## 7.6 Memory against bubble
#
# All of them for 4 ranks, 8 microbatches and $F = I = W = 1$, on one time axis. In the table, the last column but one
# has $F, I, W = 4, 5, 3$ instead, nearer to real layers (7.8 says why).

# %%
if rank == 0:
    timelines, others = gallery(4, 8), gallery(4, 8, Durations(4, 5, 3))
    show(plot_schedules(timelines), "07_gallery")
    say("                   idle / total    idle /   activations  W waiting   4, 5, 3:       messages")
    say("                                   ideal    at most      at most     idle / total   per step")
    for name, timeline in timelines.items():
        report, v = check(timeline.schedule), timeline.schedule.stages // 4
        bubble, other = timeline.bubble_fraction, others[name].bubble_fraction
        row = f"{name:<18} {bubble!s:>5} = {float(bubble):.3f}   {float(bubble / (1 - bubble)):.3f}"
        peak, waiting = max(report.peak_activations) / v, max(report.peak_weight_gradients) / v
        say(f"{row} {peak:>9g} {waiting:>12g} {other!s:>11} = {float(other):.3f} {sum(report.sends):>8}")
    say("(activations and waiting W in units of one rank's layers for one microbatch)")
    exact = [timeline.bubble_fraction for timeline in timelines.values()]
    assert exact == [Fraction(*each) for each in ((3, 4), (3, 11), (3, 11), (3, 19), (1, 9), (1, 9), (1, 17))]
    assert others["ZB-H1"].bubble_fraction == others["Interleaved 1F1B"].bubble_fraction == Fraction(3, 19)

# %% [markdown]
# There is no best row. The bubble falls from 3/11 = 0.273 (1F1B) to 3/19 (interleaved), 1/9 (ZB-H1) and 1/17 (ZB-V).
# With the times 4, 5, 3 ZB-H1 is no better than interleaving: 3/19 for both. Interleaving and ZB-V pay with messages
# (112 and 96 against 48), ZB-H2 with memory. And all zero-bubble schedules keep $x$ and $g$ for each W that waits; that
# memory is not in the column of activations, which count as freed with I. The table says for how many microbatches.
# Choose by what is short: memory, wire, or time.
#
# ### The peak under recompute
#
# Let $k$ be the most microbatches alive on a rank ($m$ in GPipe, $\min(m, p-r)$ in 1F1B), $l$ its blocks, $x$ the bytes
# of a block's input, and $A$ the bytes that a block keeps for its backward. The activations of a rank take at most
#
# $$\underbrace{k\,(l\,A + x) + g}_{\text{without recompute}} \qquad \underbrace{k\,l\,x + A + g'}_{\text{with it}}$$
#
# With `--recompute full` only the inputs are multiplied by $k$. The block whose backward runs makes its $A$ again, for
# one microbatch at a time. $g$ and $g'$ are the gradients on their way through this one block; they depend neither on
# $k$ nor on $l$. The price is one more forward for each backward: $B$ becomes $F + B$. The ledger of chapter 5 counts
# on one stage:

# %%
from minipar.memory import KINDS, MemoryLedger


def peak_bytes(k, blocks, recompute):
    """The most bytes of activations while a stage does k forwards and then k backwards, counted."""
    config = GPTConfig(vocab_size=VOCABULARY, n_positions=T, n_embd=HIDDEN, n_layer=blocks, n_head=2)
    stage = PipelineStage(GPT(config, dtype="float64", recompute=recompute).parts[1 : 1 + blocks])
    ledger = MemoryLedger()
    with ledger.recording():
        for i in range(k):
            stage.forward(i, Tensor(np.ones((1, T, HIDDEN)), requires_grad=True))
        for i in range(k):
            stage.backward(i, np.ones((1, T, HIDDEN)))
    return max(held[KINDS.index("activations")] for _, held in ledger.moments)


input_bytes = T * HIDDEN * ELEMENT
A = peak_bytes(1, 2, False) - peak_bytes(1, 1, False)
for k in (1, 2, 4):
    for blocks in (1, 2, 3):
        assert peak_bytes(k, blocks, False) == k * (blocks * A + input_bytes) + 5 * input_bytes
        assert peak_bytes(k, blocks, True) == k * blocks * input_bytes + A + 6 * input_bytes
say(f"A = {A / input_bytes} x, g = 5 x, g' = 6 x: both formulas ==, for k = 1, 2, 4 and 1, 2, 3 blocks")
say(f"GPipe, m = 32, 3 blocks: {peak_bytes(32, 3, False):,} bytes, with recompute {peak_bytes(32, 3, True):,}")

# %% [markdown]
# ## 7.7 Messages, and the deadlock that blocking sends make
#
# So far a schedule held computations only. `lower` adds the messages: a SEND where a result is made, a RECV on the
# other rank. In which order? Take the middle of 1F1B on two ranks. A hand-written list says what seems natural: *send
# what you have made, then receive what you need*.

# %%
from minipar.comm import run_local
from minipar.errors import CommunicationError, UsageError
from minipar.parallel.pipeline import PipelineExecutor, lower


def written(name, *lists):
    """A schedule from text, one string per rank."""
    return Schedule.of(name, [[parse_action(action) for action in actions.split()] for actions in lists])


def refused(what, attempt, *arguments, error=UsageError):
    """The attempt must fail with this error; its message."""
    try:
        attempt(*arguments)
    except error as problem:
        say(f"{what}\n  caught: {problem}")
        return str(problem)
    raise AssertionError(f"{what}: not refused")


send_first = written(
    "send-first",
    "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
    "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
)
message = refused("both neighbours send before they receive:", check, send_first)
assert "rank 0 at 0SEND_F1, rank 1 at 1SEND_B0" in message

# %% [markdown]
# Rank 0 is in the middle of sending `F1` and will receive `B0` afterwards. Rank 1 is in the middle of sending `B0` and
# will receive `F1` afterwards. If a send returns only when its message has been received, both wait for ever. Nothing
# is wrong with the computations: `simulate` accepts the list without its messages.
#
# Whether it hangs depends on how messages are sent. MPI's blocking `Send` may copy a *small* message aside and return
# (*eager*), but must wait for the receiver with a large one (*rendezvous*). So such a program passes all tests on a toy
# model, and hangs when the hidden size grows. Two remedies:
#
# - **an order** that works even if every send blocks, which is what the checker demands, and what `lower` produces: it
#   goes through a simulation in time and puts each SEND and its RECV at the same moment;
#
# - **messages that do not block**: start the send, go on, and wait for it at the end of the step. The executor does so.
#   (Megatron pairs the two: one call starts `send_forward` and `recv_backward` together.)
#
# Here is the refused list run with non-blocking messages, and then with sends that are waited for at once, on two
# threads: `run_local` is a transport without eager copies that sees when every rank waits.


# %%
class BlockingSends:
    """A communicator whose sends are waited for at once; the rest is the communicator's."""

    def __init__(self, comm):
        self._comm = comm

    def __getattr__(self, name):
        return getattr(self._comm, name)

    def isend(self, *arguments):
        message = self._comm.isend(*arguments)
        message.wait()
        return message


def run_by_hand(comm, schedule, wrap=lambda comm: comm):
    """One step of a small model with the bare executor: {parameter: its gradient} on this rank."""
    from contextlib import nullcontext

    from minipar.parallel.pipeline import balanced_cuts, cut, part_costs

    model = GPT(GPTConfig(vocab_size=VOCABULARY, n_positions=T, n_embd=HIDDEN, n_layer=2, n_head=2), dtype="float64")
    runs = cut(model, balanced_cuts(part_costs(model, T), schedule.stages))
    stages = {s: PipelineStage(runs[s]) for s, home in schedule.home.items() if home == comm.rank}
    batch = np.random.default_rng(1).integers(0, VOCABULARY, (schedule.microbatches, 1, T + 1))
    PipelineExecutor(schedule, wrap(comm), stages, (1, T, HIDDEN), np.dtype("float64")).run(
        tokens=lambda m: batch[m][:, :T],
        loss=lambda m, logits: model.criterion(logits, batch[m][:, 1:]),
        scale=1.0,
        around=lambda action: nullcontext(),
    )
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


if rank == 0:
    by_hand, by_lower = (run_local(2, run_by_hand, schedule) for schedule in (send_first, make("1f1b", 2, 2)))
    assert all(
        a.keys() == b.keys() and all(a[n].tobytes() == b[n].tobytes() for n in a)
        for a, b in zip(by_hand, by_lower, strict=True)
    )
    say("non-blocking: the refused list runs, and gives 1f1b's gradients bit for bit")
    run_local(2, run_by_hand, make("1f1b", 2, 2), BlockingSends)
    say("blocking, in the order of `lower`: runs")
    refused(
        "blocking, both send first:", run_local, 2, run_by_hand, send_first, BlockingSends, error=CommunicationError
    )

# %% [markdown]
# ## 7.8 Is the simulator right? Two clocks
#
# The simulator is given durations. The executor runs real products and real messages. Do they agree?
#
# **The `model` clock** (chapter 3) is moved by a cost model. Every matrix product of the trainer advances its rank's
# clock by its number of operations. So we can say beforehand what each action takes. For one block with $n = BT$
# tokens: 24 $n h^2$ operations in the four linear layers, and $4 n T h$ in attention's two products (scores, and
# probabilities times values). Backward does two products for each. Those of the *linear* layers are one for I and one
# for W. Attention has no weights, so both are I:
#
# $$F = 24nh^2 + 4nTh, \qquad I = 24nh^2 + 8nTh, \qquad W = 24nh^2.$$
#
# So $W < F < I$ by their nature, the more so the longer the sequence. The head adds $2nhV$ to each on the last stage.
# With one operation per unit of time, all times are whole numbers, and no rounding can hide a difference. Four ranks as
# threads of rank 0, so the values do not depend on `mpirun -n`; each message costs 50,000 units.

# %%
from minipar.comm import Communicator, ModelClock, Network
from minipar.parallel.pipeline import SCHEDULES, balanced_cuts
from minipar.parallel.pipeline.simulate import StageDurations

LAYERS, H, COMM = 8, 32, 50_000
n = 1 * T  # tokens of a microbatch


def clocked(comm, name):
    """One step on the model clock; what was recorded."""
    comm = Communicator(comm.transport, clock=ModelClock(1.0), network=Network(alpha=COMM))
    flags = f"--layers {LAYERS} --hidden {H} --heads 4 --seq-len {T} --global-batch 8 --microbatches 8".split()
    config = resolve(parse([*flags, "--steps", "1", "--pp", "4", "--schedule", name], 1), 4)
    trainer = Trainer(config, DeviceMesh(comm, pp=4), tokens)
    comm.tracer.enabled = True
    trainer.step(0)
    return comm.tracer.chrome_events(comm.rank)


def durations(stages):
    """Operations of each action of each stage."""
    block = 24 * H * H + 4 * T * H
    table = {}
    for s, parts in enumerate(balanced_cuts([0, *[block] * LAYERS, 2 * H * VOCABULARY], stages)):
        blocks, last = parts - (s == 0) - (s == stages - 1), s == stages - 1
        linear, attention = n * (blocks * 24 * H * H + last * 2 * H * VOCABULARY), n * blocks * 4 * T * H
        table |= {(s, "F"): linear + attention, (s, "I"): linear + 2 * attention, (s, "W"): linear}
        table[s, "B"] = table[s, "I"] + table[s, "W"]
    return StageDurations(comm=COMM, table=table)


if rank == 0:
    for name in SCHEDULES:
        events = [event for mine in run_local(4, clocked, name) for event in mine]
        ran = measured_timeline(parse_trace({"traceEvents": events, "otherData": {"clock": "model"}}))
        schedule = make(name, 4, 8)
        predicted = simulate(schedule, durations(schedule.stages))
        for mine, theirs in zip(ran.ranks, predicted.ranks, strict=True):
            for a, b in zip(mine, theirs, strict=True):
                assert (a.action, round(a.start), round(a.end)) == (b.action, b.start, b.end)
        actions = sum(len(row) for row in ran.ranks)
        say(
            f"{name:<17} {actions:>3} actions, every start and end ==;  makespan {predicted.makespan:>10,}"
            f"   bubble {float(predicted.bubble_fraction):.4f}"
        )

# %% [markdown]
# Not counted by this clock: LayerNorm, GELU, softmax, residuals, the embedding's look-up, the loss, the optimizer. They
# are few operations beside the products of a real model, but they move much memory, so on a GPU they take time.
# Measured times contain them.
#
# (The bubbles are larger than in 7.6. The stages are not equal: the last has the head as well. The slowest stage sets
# the pace, and the others wait for it at every microbatch. A bubble counts every kind of waiting.)
#
# **The `cpu` clock** measures. A rank's clock advances by its own processor time and messages carry clocks, so 8 ranks
# that share 2 cores show the timeline that 8 processors would. Waiting for a message is idle time, part of the bubble.
# We train some steps, drop the first, and compare each step's bubble with two predictions. The vocabulary is small, 32
# tokens drawn at random, so that the head adds next to nothing to the last stage: the stages are as good as equal.
#
# - *replayed*: the simulator with **each action's own** measured time. The measured bubble is larger by the time
#   between actions: fetching tokens, handing over messages, Python.
#
# - *from means*: the simulator with the mean F, B or F, I, W **of each stage**. It differs from *replayed* by noise:
#   an action that takes longer than usual makes all that depend on it wait, and faster ones seldom make up for it. So
#   uneven times widen a bubble even if the means are equal.
#
# Noise has causes, and one was ours to remove. The C library gives large freed arrays back to the system at once, and
# the next action's activations are new pages, each of which the kernel must first fill with zeros. Equal forwards then
# took up to twice as long on one rank as on another. `keep_freed_memory` asks it not to. (NB: on a GPU that is what
# PyTorch's caching allocator is for.)

# %%
from minipar.backend import keep_freed_memory
from minipar.comm import save_chrome_trace, start_trace

if rank == 0:
    show_source(keep_freed_memory)
    from minipar.parallel.pipeline.simulate import measured_durations, predicted_timeline
    from visualize import read_trace

from minipar.train.data import Tokens

MEASURED, REPEAT, LONG, FEW = ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zbv"), 2, 64, 32
dice = np.random.Generator(np.random.Philox(0)).integers(0, FEW, 4096, dtype=np.uint16)


class OwnTimes(Durations):
    """Each action takes what it took in `timeline`."""

    def __init__(self, timeline):
        super().__init__()
        self.took = {slot.action: slot.end - slot.start for row in timeline.ranks for slot in row}

    def of(self, action):
        return self.took[action]


def measure(name):
    """The timeline of each of some steps on the cpu clock; rank 0 has them."""
    timed = Communicator(comm.transport, clock="cpu")
    flags = f"--layers {2 * P} --hidden 128 --heads 4 --seq-len {LONG} --vocab-size {FEW}"
    flags += f" --global-batch {4 * P * D} --microbatches {P} --pp {P} --schedule {name}"
    trainer = Trainer(resolve(parse(flags.split(), rank), N), DeviceMesh(timed, dp=D, pp=P), Tokens(dice, "dice", FEW))
    trainer.step(0)  # the first step allocates
    start_trace(timed)
    for step in range(1, REPEAT + 1):
        trainer.step(step)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "trace.json")
        save_chrome_trace(path, timed)
        if rank == 0:
            return [measured_timeline(read_trace(path), name, step=step) for step in range(REPEAT)]
    return []


runs = {name: measure(name) for name in MEASURED} if P > 1 else {}
if runs and rank == 0:
    say(f"p = m = {P}, medians of {REPEAT} steps")
    say("                    measured   replayed   from means   equal stages, F = I = W")
    for name, steps in runs.items():
        measured = [step.bubble_fraction for step in steps]
        replayed = [simulate(step.schedule, OwnTimes(step)).bubble_fraction for step in steps]
        assert all(a >= b - 1e-9 for a, b in zip(measured, replayed, strict=True))  # a run is never faster
        means = [predicted_timeline(step).bubble_fraction for step in steps]
        row = "   ".join(f"{np.median(column):>9.3f}" for column in (measured, replayed, means))
        say(f"{name:<17} {row} {float(simulate(make(name, P, P)).bubble_fraction):>14.3f}")
    means = measured_durations(runs["zb-h1"][0]).table
    times = ", ".join(f"{kind} {means[1, kind] * 1e3:.1f}" for kind in "FIW")
    say(f"mean times of rank 1 in zb-h1: {times} ms")
    took = [slot.end - slot.start for step in runs["1f1b"] for slot in step.ranks[1] if slot.action.kind == "F"]
    low, high = np.percentile(took, [10, 90]) * 1e3
    say(f"the noise: {len(took)} equal forwards of rank 1 took {low:.1f} to {high:.1f} ms (the middle 80 %)")

# %% [markdown]
# The zero-bubble schedules gain less than $F = I = W$ promises: in a small model W, which is products and nothing else,
# is shorter than F and I, and $(p-1)(F + I - W)$ stays large. *From means* knows that, the last column does not.
#
# `mpirun -n 8 python -m minipar.bench pipeline` measures the same with larger layers and more steps; there GPipe and
# 1F1B come within about 0.02 of their 0.467.
#
# The picture shows the step of ZB-H1 with the smallest bubble, disturbed least: above what the means predict, below
# what happened.

# %%
if runs and rank == 0:
    step = min(runs["zb-h1"], key=lambda step: step.bubble_fraction)
    show(plot_schedule({"predicted": predicted_timeline(step), "measured": step}, seconds=True), "07_measured")

# %% [markdown]
# ## 7.9 The embedding that two ranks need
#
# GPT-2's output head *is* the token embedding: one matrix of $V \times h$, used first and last. In a pipeline two ranks
# need it. Its gradient is a sum of two contributions, one from each end. Both copies must get **the sum**, once, and
# take the same update.
#
# minipar gives the matrix to the first stage. The head borrows it. After the last backward the head's contribution
# travels up, is added, and after the optimizer's step the new values travel down. (Megatron all-reduces the two
# gradients and updates both copies. The same bytes over a ring of two; but then both ranks hold optimizer state, and
# the norm must not count the matrix twice.)

# %%
from minipar.parallel.pipeline.stage import PipelineParallel

if rank == 0:
    show_source(PipelineParallel.fetch_tied_gradient, PipelineParallel.send_tied_weight)

# %% [markdown]
# $Vh$ elements each way per step; `on_ranks` has counted them with `==`. ZB-V has both ends on rank 0 and sends none.
# The bits need care: $a + b$ is the same in any order, but contributions of *several microbatches* from *two ends* are
# not. One device would add head, embedding, head, embedding, ... So minipar keeps the two sums apart until the step, on
# one device too.
#
# ## 7.10 A pipeline for each replica
#
# Pipelines go with data parallelism: `dp` replicas of the whole pipeline, each with its own samples. The gradients of a
# stage are summed over the replicas, once per step (chapter 4). When may they travel? A stage's gradients are complete
# in its **last microbatch's** backward. The last rank is there first, while the ranks before it still work. The
# all-reduce then travels in the *cool-down*, in what would be bubble. Two pipelines of two ranks on the model clock,
# threads again, with a slow network:

# %%
SPEED = 1e9  # operations per second
SLOW = Network(alpha=COMM / SPEED, beta=6 / SPEED)


def replicas(comm, overlap):
    """One step of 2 x 2 ranks; (what was recorded, the time of the step)."""
    comm = Communicator(comm.transport, clock=ModelClock(SPEED), network=SLOW)
    flags = f"--layers 8 --hidden {H} --heads 4 --seq-len {T} --global-batch 16 --microbatches 8 --pp 2".split()
    trainer = Trainer(resolve(parse([*flags, "--schedule", "1f1b"], 1), 4), DeviceMesh(comm, dp=2, pp=2), tokens)
    if not overlap:
        trainer.pipelined.last = None  # no microbatch is the last: all buckets wait for `synchronize`
    comm.tracer.enabled = True
    trainer.step(0)
    return comm.tracer.chrome_events(comm.rank), comm.clock.now()


if rank == 0:
    found = {overlap: run_local(4, replicas, overlap) for overlap in (True, False)}
    spans = {overlap: max(end for _, end in ranks) for overlap, ranks in found.items()}
    events = [event for mine, _ in found[True] for event in mine]
    figure = plot_timeline(parse_trace({"traceEvents": events, "otherData": {"clock": "model"}}))
    figure.axes[0].set_title("2 pipelines of 2 ranks: gradients travel in the cool-down", loc="left", fontsize=10)
    show(figure, "07_replicas")
    assert spans[True] < spans[False]
    say(f"step: {spans[True] * 1e3:.2f} ms with overlap, {spans[False] * 1e3:.2f} ms without")

# %% [markdown]
# Ranks 0 and 1 hold the first stage of the two pipelines, ranks 2 and 3 the second. Each pink box is the all-reduce of
# one block's gradients. Those of the second stage are through when rank 0 has hardly begun its last backward. What
# sticks out is the first stage's last bucket, with the embedding. The thin lines at the end are the norm and the loss.
#
# And on the ranks, if there are at least four and an even number: half as many stages, two replicas, the bits of one
# device that takes the replicas one after the other.

# %%
from minipar.comm import wire_bytes

PP = N // 2
if N % 2 == 0 and PP > 1:
    comm.traffic.reset()
    trainer, steps = train("zb-h1", "--global-batch", str(2 * M), pp=PP)
    buckets = sum(wire_bytes("all_reduce", "ordered", b.size, 8, 2, trainer.mesh.dp.rank) for b in trainer.ddp.buckets)
    one_number = wire_bytes("all_reduce", "ordered", 1, 8, 2, trainer.mesh.dp.rank)
    assert comm.traffic.bytes("all_reduce", "dp") == STEPS * (buckets + one_number)  # the number is the loss
    verdict = verify(trainer, steps, tokens)
    assert verdict.passed
    say(f"--pp {PP} --dp 2: {verdict.line}")

# %% [markdown]
# Why once per step, and not after every microbatch? That is chapter 5's trouble with ZeRO 2 and 3 in pipelines: to keep
# gradients sharded they would have to be sent $m$ times.
#
# ## 7.11 Never draining: PipeDream and 2BW
#
# All schedules so far are *synchronous*: the pipeline drains, then the optimizer steps. **PipeDream** (Narayanan et al.
# 2019) does not drain. Microbatch after microbatch enters, in 1F1B's order, and a stage updates its weights after every
# backward. Only the first and the last microbatches of the whole training see a bubble.
#
# But then a microbatch meets weights of different age. Between its forward and its backward stage $s$ makes $p-1-s$
# updates, for the microbatches that entered before it. Its backward must use the weights of its forward; otherwise the
# result is not the gradient of any function. So stage $s$ keeps up to $p-s$ versions: *weight stashing*. **2BW**
# (Narayanan et al. 2020, arXiv 2006.09503) updates only after $m$ microbatches, so that two versions are enough, and
# every stage sees the same delay:
#
# $$W_{t+1} = W_t - \eta\, \nabla f(W_{t-1}).$$
#
# (Here with AdamW in the place of $\eta$. And each stage owns its weights, so the head gets a matrix of its own.)

# %%
import hashlib
import json

from chapters.support.pipedream import AsynchronousPipeline, Staleness, stale_reference

if rank == 0:
    show_source(Staleness.version, Staleness.updates, AsynchronousPipeline._around)
    for staleness in (Staleness(4), Staleness(4, group=4)):
        say(f"{staleness.name} on 4 stages: the version of the weights that microbatch 0, 1, 2, ... sees")
        for s in range(4):
            say(f"  stage {s}: {' '.join(str(staleness.version(s, m)) for m in range(12))}")

# %% [markdown]
# Neither equals synchronous training, and no reordering of sums can make it so: the gradients are of other weights.
# What *can* be proved: it equals one device that computes each microbatch with the same old weights, bit for bit. The
# reference is serial and much simpler:

# %%
if rank == 0:
    show_source(stale_reference)

COUNT = 4 * P
samples = np.random.default_rng(2).integers(0, VOCABULARY, (COUNT, 1, T + 1))
deep = GPTConfig(vocab_size=VOCABULARY, n_positions=T, n_embd=HIDDEN, n_layer=P, n_head=2)
pipe = DeviceMesh(comm, dp=D, pp=P).pp


def sample(m):
    return samples[m][:, :T], samples[m][:, 1:]


def digests(model, among=None):
    """The bits of the model's parameters, by name; of those in `among` only."""
    found = {name: p for name, p in model.named_parameters() if among is None or p in among}
    return {name: hashlib.sha256(p.data.tobytes()).hexdigest() for name, p in found.items()}


class Fresh(Staleness):
    """Synchronous training with as many microbatches per update: the latest weights, always."""

    def version(self, stage, microbatch):
        return microbatch // self.group


def serial(staleness):
    model = GPT(deep, dtype="float64")
    return stale_reference(model, staleness, COUNT, T, sample), model


for group in (1, max(2, P)):
    staleness = Staleness(P, group)
    model = GPT(deep, dtype="float64")
    pipeline = AsynchronousPipeline(model, pipe, staleness, COUNT, (1, T))
    pipeline.run(sample)
    mine = digests(model, set(pipeline.weights.parameters)), pipeline.losses.tolist(), pipeline.weights.peak
    ranks = [json.loads(one) for one in pipe.all_gather_bytes(json.dumps(mine).encode())]
    kept = [peak for _, _, peak in ranks]
    assert kept == [P - s if group == 1 else 2 for s in range(P)]
    if rank == 0:
        losses, stale = serial(staleness)
        assert digests(stale) == {name: bits for own, _, _ in ranks for name, bits in own.items()}
        assert losses == ranks[-1][1]
        say(f"{staleness.name} on {P} ranks = 1 device with the same old weights, bit for bit; versions kept: {kept}")
        _, fresh = serial(Fresh(P, group))
        pairs = zip(stale.parameters(), fresh.parameters(), strict=True)
        apart = max(float(np.abs(a.data - b.data).max()) for a, b in pairs)
        assert (apart > 1e-6) == (P > 1 or group > 1)
        say(f"  from synchronous training with {group} per update: weights differ by up to {apart:.1e} after {COUNT}")

# %% [markdown]
# Does staleness harm? It acts like a delay in a control loop. Small learning rates bear it, large ones oscillate; and
# $p-1$ updates of delay grow with the machine. Large models are trained synchronously today.
#
# ## 7.12 Exercises: break it, and see what notices
#
# Five mistakes. The first three are in the lists, the last two in the program. We have two instruments:
#
# - **check**, before anything runs, which sees lists only;
#
# - **verify**, afterwards: does one device get the same parameters, losses and norms?
#
# Before you read on: which catches which?
#
# 1. **A receive is missing.** And what if the *send* were missing too?
#
# 2. **A backward comes before its forward.**
#
# 3. **A W is forgotten**, or an action is done twice.


# %%
def edited(schedule, change):
    """The schedule with each rank's list of action names changed by `change(rank, names)`."""
    return written(
        schedule.name, *(" ".join(change(r, [str(a) for a in names])) for r, names in enumerate(schedule.ranks))
    )


whole = lower(make("1f1b", 3, 3))
refused(
    "1. a receive is missing:",
    check,
    edited(whole, lambda r, names: [name for name in names if name != "1RECV_F1"]),
)
refused(
    "   its send too:",
    check,
    edited(whole, lambda r, names: [name for name in names if name not in ("0SEND_F1", "1RECV_F1")]),
)


def backward_first(r, names):
    if r == 2:
        f, b = names.index("2F1"), names.index("2B1")
        names[f], names[b] = names[b], names[f]
    return names


refused("2. a backward before its forward:", check, edited(make("1f1b", 3, 3), backward_first))
split = make("zb-h1", 3, 3)
refused("3. a W is forgotten:", check, edited(split, lambda r, names: [name for name in names if name != "1W2"]))
message = refused("   a W is done twice:", check, edited(split, lambda r, names: names + (["1W2"] if r == 1 else [])))

# %% [markdown]
# And a mistake that no single rank's list shows: every rank's order is possible by itself, but together they wait in a
# circle. Rank 1 wants the backward of microbatch 1 first, and rank 0 the forward of microbatch 1 last.

# %%
circle = written("circle", "0F0 0B0 0F1 0B1", "1F0 1F1 1B1 1B0")
message = refused("   a circle:", check, circle)

# %% [markdown]
# The checker sees a list, not what an action means. Two mistakes that it cannot see:
#
# 4. **A microbatch is counted twice**: the schedule is right, but the program gives microbatch 1 the samples of
# microbatch 0.
#
# 5. **The tied gradient is dropped**: the head's contribution stays on the last rank.


# %%
class CountsTwice(Trainer):
    """Mistake 4."""

    def samples(self, replica, microbatch):
        return super().samples(replica, 0 if microbatch == 1 else microbatch)


class DropsTied(Trainer):
    """Mistake 5."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        if self.pipelined is not None:
            self.pipelined.pipeline.fetch_tied_gradient = lambda: None


right = " (one device: " + " -> ".join(f"{step.loss:.4f}" for step in single[1]) + ")" if single else ""
for what, kind in (("4. a microbatch counted twice:", CountsTwice), ("5. the tied gradient dropped:", DropsTied)):
    trainer, steps = train("1f1b", kind=kind)
    passed, line = judge(trainer, steps)
    say(f"{what} loss {steps[0].loss:.4f} -> {steps[-1].loss:.4f}{right}")
    if P > 1 or kind is CountsTwice:
        assert not passed
        say(f"  caught: {line}")

# %% [markdown]
# With mistake 5 the first loss is right, for the weights are: only their update is wrong. The run learns and looks
# healthy. In a real code base this bug has another face: with two copies of the matrix that are updated separately, the
# copies drift apart.
#
# ## 7.13 Names, problems and answers
#
# ### PyTorch's names
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
# | `zbv` | `ScheduleZBVZeroBubble` | |
# | `I`, `W` | `stage_backward_input`, `stage_backward_weight` | |
# | `load_csv`, `lower` | `_load_csv`, `_add_send_recv` | D: the instructions of a `PipeSchedule` |
# | the tied embedding | left to the user | M: an embedding group; D: `TiedLayerSpec` |
#
# ### Worked problems
#
# 1. **p = 8.** How many microbatches does 1F1B need for a bubble *below* 0.1? And interleaving with $v = 2$?
#
# 2. **p = 8, m = 16, times 4, 5, 3.** What are the idle times and bubbles of 1F1B and ZB-H1? By which factor does ZB-H1
# divide the idle time, and by which the bubble?
#
# 3. **p = 4, v = 2, m = 8.** How many forwards does each rank of the interleaved schedule do in its warm-up? How many
# activations, each of half a rank's layers, does rank 0 hold at most, and how many messages travel in a step?
#
# 4. **GPipe or 1F1B?** $p = 4$, $m = 32$, three blocks per rank, $A = 22.125\,x$. What is the peak of rank 0 in units
# of $x$: GPipe, 1F1B, and both with recompute?

# %%
single_stage = {m: simulate(make("1f1b", 8, m)).bubble_fraction for m in (63, 64)}
two_stages = {
    m: simulate(make("interleaved-1f1b", 8, m), Durations(HALF, HALF, HALF)).bubble_fraction for m in (24, 32)
}
assert single_stage == {63: Fraction(1, 10), 64: Fraction(7, 71)}
assert two_stages == {24: Fraction(7, 55), 32: Fraction(7, 71)}
say("1. (p-1)/(vm+p-1) < 1/10 means vm > 9(p-1) = 63: m = 64 for 1F1B. With v = 2, m > 31.5, and p divides 32: m = 32.")

times, work = TIMES[1], 16 * 12
idle = {name: library_makespan(name, 8, 16, times) - work for name in ("1f1b", "zb-h1")}
assert idle == {"1f1b": 7 * 12, "zb-h1": 7 * (4 + 5 - 3)}
bubble = {name: Fraction(each, work + each) for name, each in idle.items()}
assert idle["1f1b"] == 2 * idle["zb-h1"] and bubble["1f1b"] / bubble["zb-h1"] == Fraction(39, 23)
say(f"2. idle {idle['1f1b']} and {idle['zb-h1']}: half. Bubbles {bubble['1f1b']}, {bubble['zb-h1']}: divided by 39/23")
say("   and not by 2, because the total has become shorter too. A third needs F = I = W.")

report = check(make("interleaved-1f1b", 4, 8))
warm = [[kind for kind, *_ in actions].index("B") - 1 for actions in interleaved_lists(4, 8)]
assert warm == [10, 8, 6, 4] and report.peak_activations[0] == 11 and sum(report.sends) == 112 == 2 * 7 * 8
say("3. warm-up 10, 8, 6, 4 forwards: 2(p-1-r) + (v-1)p. Rank 0 holds one more, 11 halves. There are pv - 1 = 7 cuts,")
say("   each crossed by m = 8 microbatches in both directions: 112 messages.")

peaks = {(k, recompute): peak_bytes(k, 3, recompute) / input_bytes for k in (32, 4) for recompute in (False, True)}
assert peaks == {(32, False): 2161, (32, True): 124.125, (4, False): 274.5, (4, True): 40.125}
say("4. GPipe 32 (3 A + x) + 5 x = 2,161 x, with recompute 32 * 3 x + A + 6 x = 124.125 x. 1F1B 274.5 x, and 40.125 x.")
say("   Recompute helps GPipe more than 1F1B's order does, and costs a forward; 1F1B costs nothing.")

# %% [markdown]
# ### For you
#
# 1. Give `zb-h1` times in which W is *longer* than F and I. The formula $X = (p-1)(F+I-W)$ would become negative if
# $W > F + I$. What does the simulator say, and why?
#
# 2. Write a schedule of your own as a CSV, and run it: `mpirun -n 4 python -m minipar.train --pp 4 --schedule mine.csv
# --microbatches 8 --verify`. How far below ZB-H1's bubble do you get with at most 5 activations on rank 0?
#
# 3. The last stage has the head as well. With a vocabulary of 50,257 and $h = 768$ the head costs as much as four or
# five blocks. How should the cuts lie, and what bubble remains if they cannot? (`balanced_cuts`, and 7.8's table.)
#
# 4. Adam's step is also work, after all gradients are there. Which ranks could do it in the bubble, and what stands in
# the way?
#
# ### Answers
#
# 1. It says $X = (p-1)\max(F, I)$, never negative: if $W > F + I$, the chain *up* is shorter than the other two. The
# last rank cannot begin before $(p-1)F$, and rank 0 waits $(p-1)I$ for its first gradient (its own forwards cover only
# the way down).
#
# 2. With $F = I = W$ not at all. With one stage per rank the last rank begins at $(p-1)F$, and ZB-H1 has no other idle
# time. With 4, 5, 3 rank $r$ may run 4, 3, 2, 0 forwards ahead and do W 0, 1, 2, 5 microbatches after I. Rank 0 then
# holds 5 activations, and the idle time is 13 instead of 18 (the next cell). ZB-H2's is 12, with 7 activations.
#
# 3. For $T = 1024$ a block has $24h^2 + 4Th$ operations per token and the head $2hV$: 4.46 blocks. With 12 blocks and
# 4 ranks the cuts 4, 4, 4, 0 + head are nearly equal. With 8 ranks the head alone takes more than twice the mean of
# 16.46 / 8 blocks. It sets the pace, and at least $1 - 2.06/4.46 = 0.54$ of the time is idle, whatever the schedule.
#
# 4. In 1F1B rank $r$ has done its last backward $rB$ before rank 0 and could step in that time. In the way stand the
# global norm, for which all gradients must be there, and on the last rank the tied embedding, whose new values come
# from rank 0. Qi et al. step at once and correct later (7.5).

# %%
for f, i, w in ((1, 1, 3), (2, 3, 6), (4, 1, 6)):
    assert library_makespan("zb-h1", 4, 8, {"F": f, "I": i, "W": w}) == 8 * (f + i + w) + 3 * max(f, i)


def own_schedule(aheads, delays, m):
    """Rank r runs `aheads[r]` forwards ahead and does W `delays[r]` microbatches after I."""
    lists = []
    for ahead, delay in zip(aheads, delays, strict=True):
        actions = [("F", i) for i in range(ahead)]
        for i in range(m):
            actions += [("F", ahead + i)] if ahead + i < m else []
            actions += [("I", i)] + ([("W", i - delay)] if i >= delay else [])
        lists.append(actions + [("W", i) for i in range(m - delay, m)])
    return lists


mine = own_schedule((4, 3, 2, 0), (0, 1, 2, 5), 8)
assert max(ends(mine, TIMES[1]).values()) - 8 * 12 == 13
assert [library_makespan(name, 4, 8, TIMES[1]) - 8 * 12 for name in ("zb-h1", "zb-h2")] == [18, 12]
assert check(written("mine", *(as_text(actions, r) for r, actions in enumerate(mine)))).peak_activations[0] == 5
blocks = [24 * 768**2 + 4 * 1024 * 768] * 12
head = 2 * 768 * 50257
assert round(head / blocks[0], 2) == 4.46 and round(1 - (sum(blocks) + head) / 8 / head, 2) == 0.54
say("your own schedule, p = 4, m = 8, times 4, 5, 3: idle 13 with 5 activations; ZB-H1 18 with 4, ZB-H2 12 with 7")

# %% [markdown]
# In the notebook, the last cell lets you change $p$, $m$, $v$, the schedule and the times, and the picture follows.
# (The first picture there is a static one, for readers without widgets.)

# %% tags=["active-ipynb"]
# %autopx

# %% tags=["active-ipynb"]
# # Back in one process: stop the eight, and explore.
# cluster.stop_cluster_sync()

# %% tags=["active-ipynb"]
# from chapters.support.figures_pipeline import explore_schedules, picture_of
# from chapters.support.show import show
# from minipar.parallel.pipeline import Durations
#
# show(picture_of("zb-h1", 4, 8, 1, Durations()), "07_explore")
# explore_schedules()
