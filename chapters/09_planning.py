# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 9. Planning: memory first, then bandwidth, then bubble
#
# **You have a model and a number of GPUs. Which layout do you start?**
#
# A run on a thousand GPUs is not tried out: an hour of it costs thousands of dollars, and there are thousands of
# layouts. But everything in it can be counted. The earlier chapters counted parameters, activations, bytes on each axis
# and bubbles. This one puts a price on each of them, and searches.
#
# The order is that of the title. **Memory** says what is possible at all. **Bandwidth** says which axis may lie on
# which wires. The **bubble** says how far a pipeline may grow. For each we write the formula on plain values, hold it
# against the planner with `==`, and draw conclusions. Then a planner of thirty lines and the library's planner place a
# model of 7.5, one of 70 and one of 1000 billion parameters on 64 to 4096 GPUs. Chapter 10 asks whether they are right.
#
# **Letters:** B samples of a microbatch, T tokens per sample, m microbatches per replica and step; h hidden size,
# a heads, L layers, V vocabulary, Psi parameters, Psi' those of one rank; d, t, p ranks of dp, tp, pp, v stages on one
# pipeline rank; n bytes of an array; alpha and beta seconds per message and per byte; S operations per second of one
# GPU; g GPUs of a host; nu tokens of the global batch per GPU and step.
#
# Run it as `mpirun -n 8 python chapters/09_planning.py`, with any number of ranks. A planner needs no ranks; they share
# out the layouts.

# %% tags=["active-ipynb"]
# from chapters.support.notebook import start
#
# cluster = start(8)

# %%
from chapters.support.show import printer
from minipar.comm import world

comm = world()
rank = comm.rank

# %%
from dataclasses import asdict, replace
from fractions import Fraction
from itertools import product
from math import isclose

import numpy as np

from chapters.support.ch09.alarms import alarms
from chapters.support.planner_mistakes import MISTAKES, recommended
from chapters.support.share_work import shared
from chapters.support.three_models import ASK, LARGE, MIDDLE, SHORT, SMALL, fastest, first_choice, scaling, spending
from minipar.parallel.pipeline.actions import Durations, peak_live, simulate
from minipar.parallel.pipeline.schedules import make
from minipar.plan import rank_bytes
from minipar.plan.cluster import GPUS, Assumptions, Cluster, gather_seconds
from minipar.plan.layout import Layout
from minipar.plan.model import RECOMPUTE, find_model, utilization
from minipar.plan.rank_bytes import layer_activations, memory, rank_parameters
from minipar.plan.search import plan
from minipar.plan.step_time import UnitPass, overlapped, step_time

say = printer(rank)  # rank 0 prints and draws; every rank checks
if rank == 0:
    from chapters.support.ch09 import figures
    from chapters.support.show import show, show_source

# %% [markdown]
# ## 9.1 Count
#
# Chapter 2 counted a GPT: a layer has $12h^2 + 13h$ parameters, and a product of an $i \times j$ and a $j \times k$
# matrix takes $2ijk$ operations, a multiply and an add each. So
#
# $$\Psi = L\,(12h^2 + 13h) + (V + T)\,h + 2h, \qquad
# \text{operations of a sequence} = 3\,\big(L\,(24Th^2 + 4T^2h) + 2ThV\big).$$
#
# The factor 3 is one forward and a backward of two products for each of forward's. $4T^2h$ is attention's core, counted
# as if every token saw all others, as in the papers. Divided by the tokens this is nearly **$6\Psi$ operations per
# token**; the rule leaves out attention's core, which is $T/(6h)$ of a layer's other products.
#
# A planner's model is a `ModelShape`, these values and nothing else.

# %%
GPT3 = find_model("gpt3-175b")


def parameters(L, h, V, T):
    return L * (12 * h**2 + 13 * h) + (V + T) * h + 2 * h


def operations(L, h, V, T):
    return 3 * (L * (24 * T * h**2 + 4 * T**2 * h) + 2 * T * h * V)


for name in ("gpt2", SMALL, "gpt3-175b", LARGE):
    model = find_model(name)
    sizes = model.layers, model.hidden, model.vocab_size, model.positions
    assert parameters(*sizes) == model.parameters and operations(*sizes) == model.model_flops(model.positions)
    ratio = operations(*sizes) / (6 * parameters(*sizes) * model.positions)
    say(f"{name:<14}{parameters(*sizes):>18,} parameters, {ratio:.2f} times 6 Psi operations per token")
    assert 1 < ratio < 1.15 and (name == "gpt2" or ratio < 1.09)

llama, h = find_model(MIDDLE), 8192
assert h * (h + 2 * (8 * 128)) + h * h + 3 * h * 28672 == llama.layer_matrices == 12.75 * h**2

# %% [markdown]
# Llama 2 70B differs from GPT in two ways, and $12h^2$ does not hold for it. **Grouped attention**: 64 heads of
# queries, of 128 elements each, but only 8 heads of keys and 8 of values; eight heads of queries share one of each. The
# first product has $h + 2 \cdot 8 \cdot 128$ columns, not $3h$. **A gated MLP** (SwiGLU) has three matrices of $h
# \times 28672$: two go up, one of their results passes through an activation function and multiplies the other, one
# comes down. Together $12.75\,h^2$. Its head is not tied to its embedding either. The planner counts the columns that
# the model has; the formulas of this chapter are GPT's.
#
# ### Utilization
#
# The **model FLOPs utilization** (Chowdhery et al. 2022, arXiv 2204.02311) is the operations that the *model* needs,
# divided by what the GPUs' peak would have done in that time. Work that is repeated to save memory does not count. In
# the **hardware FLOPs utilization** it does. Korthikanti et al. (2022, arXiv 2205.05198, table 5) print for GPT-3 on
# 64 A100s, of 312 TFLOP/s, 13.75 s for 64 sequences of 2048 tokens, and 18.13 s with every forward computed twice. The
# rule says $6 \cdot 175\cdot10^9 \cdot 64 \cdot 2048 / (13.75 \cdot 64 \cdot 312\cdot10^{12}) = 0.50$.

# %%
useful, repeated = (64 * GPT3.hardware_flops(2048, kind) for kind in ("none", "full"))
mfu, slower_mfu = (utilization(useful, seconds, 64, 312e12) for seconds in (13.75, 18.13))
hfu = utilization(repeated, 18.13, 64, 312e12)
say(f"13.75 s: MFU {mfu:.1%} (printed: 51.4 %).  18.13 s, full recompute: MFU {slower_mfu:.1%}, HFU {hfu:.1%}")
assert abs(mfu - 0.514) < 0.003 and abs(slower_mfu - 0.39) < 0.003 and abs(hfu - 0.519) < 0.003

# %% [markdown]
# With full recompute the GPUs are as busy as before, 52 %, and take 32 % longer. HFU says how busy the GPUs are; only
# MFU, 39 %, says how fast the model trains.
#
# ## 9.2 Memory first
#
# A rank holds four things: parameters, gradients, the optimizer's state, and the activations that backward needs.
#
# **State.** Training in 16 bit with Adam keeps 2 + 2 + 12 bytes for each parameter (5.1). ZeRO-1 divides the 12 by the
# $d$ replicas, ZeRO-2 the gradients' 2 as well, ZeRO-3 all 16. tp divides a layer's matrices by $t$, but not the $6h$
# parameters of its LayerNorms and of the biases of its row-parallel products. pp divides the layers by $p$.
#
# **Activations of a layer.** In 16 bit, Korthikanti et al. count $34h + 5aT$ bytes for each token (section 4): $24h$
# inside attention and MLP, which tp divides; $10h$ around them, LayerNorms' and products' inputs and dropout's mask,
# which only sequence parallelism divides (6.9); and 5 for each of the $aT$ scores of attention, which is the larger
# term ($5aT/h = 80$ for GPT-3). Scores are cheap to compute again, $4T^2h$ of $24Th^2$: to throw away these only is
# **selective** recompute. **Full** recompute keeps the layer's input, $2h$ bytes, and does all of forward again.
#
# **In flight.** A pipeline rank has $L/p$ layers, but several microbatches at once (chapter 7): GPipe all $m$, 1F1B
# $\min(m, p)$ on its first rank, interleaving $p + (p-1)/v$. So with 1F1B $p$ microbatches of $L/p$ layers are as much
# as one of all $L$: **a pipeline divides the state, not the activations**.
#
# All of that is thirty lines. `bytes_held` is the first pipeline rank's, which has the embedding and most in flight.


# %%
def parameters_of_rank(L, h, V, T, t, p):
    layer = Fraction(12 * h**2 + 7 * h, t) + 6 * h
    last_norm = 2 * h if p == 1 else 0
    return Fraction(V * h, t) + T * h + Fraction(L, p) * layer + last_norm


def microbatches_in_flight(schedule, p, m, v):
    return {"gpipe": m, "1f1b": min(m, p), "interleaved-1f1b": min(m, p + Fraction(p - 1, v))}[schedule]


def bytes_held(model, T, d, t, p, B, m, zero, schedule, v, sequence_parallel, recompute):
    """Bytes of parameters, gradients, optimizer state and activations on the first pipeline rank."""
    L, h, a, V = model.layers, model.hidden, model.heads, model.vocab_size
    psi = parameters_of_rank(L, h, V, T, t, p)
    state = [psi * width / (d if zero >= least else 1) for width, least in ((2, 3), (2, 2), (12, 1))]

    slices = t if sequence_parallel else 1
    scores = 5 * a * T if recompute == "none" else 0
    per_token = Fraction(10 * h, slices) + Fraction(24 * h + scores, t)
    if recompute == "full":
        per_token = Fraction(2 * h, slices)
    return *state, microbatches_in_flight(schedule, p, m, v) * Fraction(L, p) * (B * T * per_token)


axes = [(d, t, p) for d in (1, 64) for t in (1, 8) for p in (1, 4)]
schedules = (("1f1b", 1), ("gpipe", 1), ("interleaved-1f1b", 2), ("interleaved-1f1b", 4))
options = list(product(range(4), schedules, (False, True), RECOMPUTE))
compared = 0
for name, (d, t, p), (zero, (schedule, v), sequence_parallel, recompute) in product((SMALL, LARGE), axes, options):
    if v == 1 or p > 1:
        layout = Layout(d, t, p, 2, 8, zero, schedule, v, sequence_parallel, recompute)
        ours = bytes_held(find_model(name), 2048, d, t, p, 2, 8, zero, schedule, v, sequence_parallel, recompute)
        held = memory(find_model(name), layout, 2048)
        assert ours == (held.parameters, held.gradients, held.optimizer, held.activations)
        compared += 1
assert compared == 1152
say(f"{compared:,} layouts: each of the four parts == the planner's")

# %% [markdown]
# Bytes, to the last one, in 1,152 layouts. Here is how the library writes a layer's activations:

# %%
if rank == 0:
    show_source(layer_activations)

# %% [markdown]
# It adds models that are not GPT (grouped attention's columns, the gated MLP), programs that keep other things than
# Megatron does (`kept`, chapter 10), and a fifth part next to these four: `buffers`, which exist for a moment, such as
# the logits, a layer that is recomputed, a unit that ZeRO-3 has gathered.
#
# It also knows **flash attention** (Dao et al. 2022, arXiv 2205.14135), a kernel that computes the scores tile by tile,
# keeps only two values per row of them, and computes them once more in backward. Then no scores are kept, as with
# selective recompute. This chapter plans for stored scores, as the runs of 2021 and 2022 had them; chapter 10 shows
# what flash attention changes.
#
# Two anchors, before we rely on it (the ZeRO paper's table is in chapter 5): what is in flight, counted in the lists of
# actions themselves, and what each means makes of GPT-3's $34 + 80$ bytes per element.

# %%
for name, v in (("gpipe", 1), ("1f1b", 1), ("zb-h1", 1), ("zb-h2", 1), ("interleaved-1f1b", 2)):
    lists = make(name, 8, 32, v if v > 1 else None).ranks
    counted = Fraction(max(peak_live(actions) for actions in lists), v)
    assert counted == rank_bytes.in_flight(Layout(1, 1, 8, 1, 32, schedule=name, virtual_stages=v))
    say(f"8 ranks, 32 microbatches, {name:<17}{float(counted):>5.1f} in flight, counted in the list")

tp, sharded = Layout(1, 8, 1, 1, 1), Layout(1, 8, 1, 1, 1, sequence_parallel=True)
ways = replace(tp, tp=1), tp, sharded, replace(sharded, recompute="selective"), replace(tp, recompute="full")
widths = [layer_activations(GPT3, way, 2048) / (2048 * GPT3.hidden) for way in ways]
assert widths == [114, 23, 14.25, 4.25, 2]
assert [round(96 * 2048 * GPT3.hidden * width / 1e9, 1) for width in widths] == [275.4, 55.6, 34.4, 10.3, 4.8]

# %% [markdown]
# | GPT-3, one sequence | one rank | tp 8 | and sequence-parallel | and selective recompute | tp 8, full recompute |
# | --- | --- | --- | --- | --- | --- |
# | bytes / $(BTh)$ | 114 | 23 | 14.25 | 4.25 | 2 |
# | GB in 96 layers | 275.4 | 55.6 | 34.4 | 10.3 | 4.8 |
#
# From 114 bytes per element to 4.25: tp with sequence parallelism divides by 8, selective recompute by another 3.4. It
# repeats $4T^2h$ operations in each layer: 3 % of forward at these sizes, 1 % of everything. Full recompute repeats all
# of forward, a third more of everything.
#
# ### What fits
#
# Before you look at the picture, predict:
#
# 1. 7.5B on 8 GPUs of 80 GB, data parallel, one sequence of 2048 in a microbatch: which ZeRO stage is the first to fit?
#
# 2. 70B on 64 GPUs with ZeRO-3 has $16 \cdot 69/64 = 17$ GB of state. Does it fit?
#
# 3. The same with tp 8 and pp 8 instead, GPipe with 64 microbatches: 18 GB of state. Does it fit? And 1F1B?

# %%
ROOM = 80e9  # an A100's bytes
eight, far = Layout(8, 1, 1, 1, 64), Layout(64, 1, 1, 1, 16, zero=3)
split = Layout(1, 8, 8, 1, 64, sequence_parallel=True)
first = {
    "dp 8": eight,
    "ZeRO-1": replace(eight, zero=1),
    "ZeRO-2": replace(eight, zero=2),
    "ZeRO-1, full": replace(eight, zero=1, recompute="full"),
    "tp 8,\nmicrobatch of 4": Layout(1, 8, 1, 4, 128, sequence_parallel=True),
}
second = {
    "dp 64, ZeRO-3": far,
    "the same, full": replace(far, recompute="full"),
    "tp 8 x pp 8, GPipe": replace(split, schedule="gpipe"),
    "1F1B": split,
    "1F1B, selective": replace(split, recompute="selective"),
}
small = {label: memory(find_model(SMALL), layout, 2048) for label, layout in first.items()}
middle = {label: memory(find_model(MIDDLE), layout, 4096) for label, layout in second.items()}
assert small["dp 8"].total > ROOM > small["ZeRO-1"].total > 0.92 * ROOM > small["ZeRO-2"].total
assert round(small["ZeRO-1"].total / 1e9) == 76 and 2 * small["tp 8,\nmicrobatch of 4"].total < ROOM
assert round(middle["dp 64, ZeRO-3"].activations / 1e9) == 544 and middle["the same, full"].total < ROOM
assert middle["tp 8 x pp 8, GPipe"].total > middle["1F1B"].total > ROOM > middle["1F1B, selective"].total
if rank == 0:
    panels = {"7.5B on 8 GPUs, sequences of 2048": small, "70B on 64 GPUs, sequences of 4096": middle}
    parts = {title: {label: asdict(held) for label, held in bars.items()} for title, bars in panels.items()}
    show(figures.plot_fit(parts, ROOM, 200e9), "09_memory")

# %% [markdown]
# 1. **ZeRO-1**, just so: 76 GB, nearly half of them the activations of one sequence. A planner must also leave room for
# what it does not see, the libraries and fragmentation (it uses 92 % of the 80 GB: then ZeRO-2 is the safe answer, or
# recompute). The last bar: tp 8 divides all four parts, so four sequences at once need less than half of the memory,
# without any ZeRO.
#
# 2. **No**: the state is small, but a GPU without tp has all 80 layers' activations, 544 GB for one sequence of 4096.
# ZeRO divides state only. It fits with full recompute.
#
# 3. GPipe keeps 64 microbatches. 1F1B keeps 8, and misses by little. With selective recompute it has room to spare.
#
# So two families of layouts fit large models: ZeRO-3 with recompute, or tp and pp with a little ZeRO. Bandwidth chooses
# between them.
#
# ## 9.3 Then bandwidth
#
# What does a rank send in a step? A ring all-gather or reduce-scatter of $n$ bytes over $r$ ranks sends
# $n\,\frac{r-1}{r}$, an all-reduce twice that (chapter 3).
#
# - **tp**: an all-reduce of $2BTh$ bytes after attention and after the MLP, forward and backward: four per layer and
#   microbatch, six with full recompute.
#
# - **pp**: $2BTh$ bytes to the next stage and as many back, per microbatch and stage of the rank; each tp rank sends
#   its $1/t$.
#
# - **dp**: an all-reduce of the gradients, $2\Psi'$ bytes for $\Psi'$ parameters of the rank, once per step. ZeRO-1
#   sends the same as a reduce-scatter of gradients and a gather of parameters. ZeRO-2 reduces with every microbatch;
#   ZeRO-3 also gathers twice with every microbatch.


# %%
def bytes_sent(layers, h, psi, T, d, t, p, B, m, zero, v=1, recompute="none"):
    """Bytes that a rank with these layers and psi parameters sends in a step over tp, pp and dp."""
    activation = 2 * B * T * h
    sums = 6 if recompute == "full" else 4
    tp = m * layers * sums * 2 * activation * Fraction(t - 1, t)
    pp = m * v * 2 * Fraction(activation, t) if p > 1 else 0
    passes = {0: 2, 1: 2, 2: m + 1, 3: 3 * m}[zero]  # over the rank's parameters or gradients, half an all-reduce each
    return tp, pp, passes * 2 * psi * Fraction(d - 1, d)


def sent_by(model, T, layout):
    layers, psi = layout.layers_per_rank(model), rank_parameters(model, layout)
    d, _, t, p, B, m = *layout.mesh, layout.microbatch, layout.microbatches
    return bytes_sent(layers, model.hidden, psi, T, d, t, p, B, m, layout.zero, layout.virtual_stages, layout.recompute)


cases = list(product(axes, range(4), ("none", "full"), (1, 2)))
for (d, t, p), zero, recompute, v in cases:
    layout = Layout(d, t, p, 2, 8, zero, "interleaved-1f1b" if v > 1 else "1f1b", v, True, recompute)
    sent = rank_bytes.volume(GPT3, layout, 2048)
    assert sent_by(GPT3, 2048, layout) == (sent.tp, sent.pp, sent.dp)
say(f"{len(cases)} layouts of GPT-3: bytes over tp, pp and dp == the planner's")

# %% [markdown]
# Now the wires. An A100 sends 300 GB/s to the other seven of its host (NVLink), and 25 GB/s through its network card to
# all others. A program gets some 80 % of both. A product gets, say, 75 % of 312 TFLOP/s: $S = 234\cdot10^{12}$. Then
# this section depends on one value for each link, $S\beta$: **the operations that the GPU could have done while one
# byte was on the wire**.

# %%
S, balance = {}, {}  # of each GPU: operations per second; S beta on NVLink and on the network
for kind in ("a100", "h100"):
    host = Cluster(GPUS[kind], 64)
    S[kind] = host.gpu.peak * Assumptions.products
    balance[kind] = S[kind] * host.inside.beta, S[kind] * host.between.beta
    say(kind, "operations per byte on NVLink, on the network:", [round(each) for each in balance[kind]])
NVLINK, NETWORK = (S_beta / S["a100"] for S_beta in balance["a100"])  # beta
assert [round(x) for x in balance["a100"] + balance["h100"]] == [975, 11700, 2060, 18544]
assert round(S["a100"] / GPUS["a100"].memory_bandwidth) == 115  # 9.4's third wire

# %% [markdown]
# On an A100 975 and 11,700, on an H100 2,060 and 18,544: computation became 3.2 times as fast, NVLink 1.5 times, the
# network twice. The gap widens.
#
# ### What each axis sends, beside what it computes
#
# Take a GPT layer and $BT$ tokens. (Attention's core is left out: it makes every ratio better.)
#
# **tp**, forward: two all-reduces, $8BTh\,\frac{t-1}{t}$ bytes, beside $24BTh^2/t$ operations. **pp**: a stage of $L/p$
# layers sends $4BTh/t$ bytes per microbatch, beside $72BTh^2L/(pt)$ operations. So
#
# $$\text{tp: } \frac{\text{communication}}{\text{computation}} = \frac{(t-1)\,S\beta}{3h}, \qquad
# \text{pp: } \frac{S\beta}{18\,h\,L/p}.$$
#
# The number of tokens is in neither. A larger batch does not help tp, only a larger $h$, or a faster wire.
#
# **dp.** The all-reduce of $2\Psi'$ bytes sends up to $4\Psi'$, and the last microbatch's backward has $4\Psi' BT$
# operations to hide it behind: it hides if a microbatch has more than $S\beta$ tokens. This assumes one rank per host
# in the sum, as with tp 8. With $k$ ranks per host $k$ network cards share the bytes, and $S\beta/k$ tokens are enough.
# ZeRO-1's reduce-scatter hides behind that backward ($BT > S\beta/2$), its gather behind the next step's first forward,
# of $2\Psi' BT$ operations ($BT > S\beta$). ZeRO-3 sends $6\Psi'$ with *every* microbatch, beside its $6\Psi' BT$
# operations: $BT > S\beta$ again, each time.
#
# **Latencies** come on top. In a ring of $d$ ranks a gather or a reduce-scatter takes $d - 1$ messages, one after the
# other: $(d-1)\,\alpha$ seconds for each layer, however few its bytes are. $\alpha$ is 14 µs on the network, 3.4 µs on
# NVLink; if $k$ ranks of the ring share a host, one message in $k$ crosses the network; the others cost NVLink's. A
# layer of the 7.5B with tp 8 has 50 MB of gradients on each rank, 2.5 ms on the network: from 180 replicas on the
# latencies are the larger part. A smaller batch leaves less computation beside them, and they stay.
#
# Predict for GPT-3 ($h$ = 12288, 12 layers per stage, tp 8): which axis can bear the network?

# %%
for link, S_beta in zip(("NVLink", "network"), balance["a100"], strict=True):
    tp, pp = (8 - 1) * S_beta / (3 * GPT3.hidden), S_beta / (18 * GPT3.hidden * 12)
    say(f"GPT-3 on {link:<8} tp 8, forward: {tp:.1%};  pp: {pp:.2%};  dp hides from {S_beta:,.0f} tokens on")
    assert round(tp, 3) == {"NVLink": 0.185, "network": 2.222}[link] and pp < 0.005

# %% [markdown]
# tp costs 18.5 % on NVLink, and 222 % on the network, more than twice what it divides: **tp stays inside a host**.
# (That is forward. Backward's all-reduces hide behind weight gradients, 6.11. With sequence parallelism only half of
# backward's bytes do: the reduce-scatters hide, the all-gathers do not.) pp costs less than half a percent and could
# live on anything. dp is in between: each microbatch of a replica must have enough tokens to hide behind. On the
# network these are 11,700, six sequences of 2048.
#
# ### Over the whole step
#
# How do these terms grow? GPT-3 on 128 A100s, 8 stages, a batch of 512, tp and dp sharing the remaining factor of 16;
# then tp 8 x pp 8 with more and more replicas for the same batch. Where ranks of a group share a host, NCCL builds one
# ring through each of their network cards, so $k$ members per host have $k$ times the network's bandwidth. Predict:
# which line falls, which stays, as $d$ grows?


# %%
def seconds_per_byte(stride, size, g=8):
    """beta of a ring over the ranks 0, stride, 2 stride, ... (`size` of them), g ranks to a host."""
    near = max(1, min(size, g // stride))
    return NVLINK if near == size else max(NVLINK, NETWORK / near)


free = Assumptions(alpha_inside=0.0, alpha_between=0.0)  # no latencies
for stride, size in product((1, 2, 4, 8, 16), (2, 4, 8, 16, 64)):
    ring = gather_seconds(Cluster(GPUS["a100"], 1024, assumptions=free), 1e6, stride, size)
    assert isclose(ring, 1e6 * (size - 1) / size * seconds_per_byte(stride, size))


def on_the_wires(layout):
    """Seconds of GPT-3's step: computation, and each axis's bytes on its wires if nothing hides anything."""
    d, _, t, p = layout.mesh
    tp, pp, dp = map(float, sent_by(GPT3, 2048, layout))
    tp, dp = tp * seconds_per_byte(1, t), dp * seconds_per_byte(t, d)
    return {"compute": 512 * GPT3.model_flops(2048) / (d * t * p * S["a100"]), "tp": tp, "pp": pp * NETWORK, "dp": dp}


by_tp = {t: on_the_wires(Layout(16 // t, t, 8, 1, 32 * t, 1)) for t in (1, 2, 4, 8, 16)}
by_dp = {d: on_the_wires(Layout(d, 8, 8, 1, 512 // d, 1)) for d in (1, 2, 4, 8, 16, 32, 64)}
shares = [by_tp[t]["tp"] / by_tp[t]["compute"] for t in (8, 16)] + [by_dp[64]["dp"] / by_dp[64]["compute"]]
say(f"beside the computation: tp 8 {shares[0]:.0%}, tp 16 {shares[1]:.0%}; dp 64 {shares[2]:.0%}")
assert [round(share, 2) for share in shares] == [0.12, 0.38, 0.47]
if rank == 0:
    left, right = ("tp (8 GPUs to a host)", by_tp), ("dp", by_dp)
    panels = {"128 GPUs, pp 8, dp = 16 / tp": left, "tp 8, pp 8, the same batch for all": right}
    show(figures.plot_wires(panels), "09_bandwidth")

# %% [markdown]
# Left: computation stays as it is, as many GPUs share the same work. The sums over tp come up to 12 % of it with tp 8.
# That is two thirds of forward's 18.5 %: the whole step has twice forward's sums and three times its computation. They
# jump where tp leaves the host, to 38 % with tp 16. That is with eight rings at once; with one ring they would take
# three times as long as the computation.
#
# Right: all that goes with microbatches, computation, tp and pp, falls with $1/d$. The gradients are of the same
# parameters whatever the batch: dp's line does not fall. **Sooner or later every cluster is too large for its batch**,
# and then dp is what is left: at dp 64 47 % of the computation, with only the last of eight microbatches to hide
# behind.
#
# ### What hides
#
# The rule said: from $S\beta$ tokens per microbatch on, an all-reduce hides behind the last backward. The planner does
# not use the rule. It goes through the backward layer by layer: a layer's gradients leave when they are there *and*
# what left before has arrived (4.4's buckets).


# %%
def exposed(layers, backward, reduce):
    """Seconds after the last backward until all gradients have arrived; both times are of one layer."""
    now = wire = 0
    for _ in range(layers):
        now += backward
        wire = max(now, wire) + reduce
    return wire - now


for backward, reduce in ((1, 3), (2, 2), (3, 1)):
    end, arrival = overlapped([UnitPass(backward, reduce=reduce)] * 36)
    assert arrival - end == exposed(36, backward, reduce)
model, psi = find_model(SMALL), find_model(SMALL).layer_parameters / 8
left = {}
for B in (1, 2, 4, 8, 16):  # 64 A100s: tp 8, eight replicas of one host each
    backward, reduce = B * 2 * model.layer_flops(2048) / 8 / S["a100"], 4 * psi * 7 / 8 * seconds_per_byte(8, 8)
    left[B] = exposed(36, backward, reduce) / (36 * reduce)
    say(f"{B * 2048:>7,} tokens, {B * 2048 / balance['a100'][1]:.2f} S beta: {left[B]:.0%} exposed")
# A layer's gradients; a ring of d ranks sends (d - 1)/d of their bytes, in d - 1 messages.
assert round(2 * psi / 1e6) == 50 and 179 < 2 * psi * NETWORK / Assumptions.alpha_between < 180
assert [round(100 * part) for part in left.values()] == [79, 58, 16, 3, 3]

# %% [markdown]
# With one sequence, a sixth of $S\beta$, 79 % of the all-reduce is exposed; with eight, 1.4 $S\beta$, only the last
# layer's 3 %, which has nothing to hide behind. The rule is right about where it turns. The planner's `overlapped` adds
# ZeRO-3: a unit also waits for its parameters, whose gather starts one unit ahead, and for room for its gradients. And
# it adds a price for what hides: 20 % of its time, since NCCL's kernels run on the same GPU and take some of its cores.
#
# ## 9.4 Then the bubble
#
# A pipeline idles while it fills and drains (7.2 to 7.4). Of all the time, with $v$ stages per rank,
#
# $$\text{bubble} = \frac{(p-1)/v}{m+(p-1)/v}.$$
#
# And $m$ is not free. The global batch, $BmdT$ tokens, is what the optimizer bears; it does not grow with the cluster.
# **Twice as many replicas leave half as many microbatches.** Predict: 8 stages, 512 samples, $B = 1$. How many replicas
# until a quarter of the time is bubble?


# %%
def bubble(p, m, v=1):
    return Fraction(p - 1, v) / (m + Fraction(p - 1, v))


curves = {}
for name, v in (("1f1b", 1), ("interleaved-1f1b", 2), ("interleaved-1f1b", 4), ("zb-h1", 1), ("zbv", 2)):
    lists = {m: make(name, 8, m, v if name == "interleaved-1f1b" else None) for m in (8, 16, 32, 64)}
    part = Fraction(1, v)  # F = I = W; a stage takes 1/v of the rank's time
    curve = {m: simulate(schedule, Durations(part, part, part)).bubble_fraction for m, schedule in lists.items()}
    curves[f"{name} v={v}" if "inter" in name else name] = {m: float(idle) for m, idle in curve.items()}
    assert name in ("zb-h1", "zbv") or curve == {m: bubble(8, m, v) for m in curve}
assert [round(curves[name][8], 3) for name in ("1f1b", "interleaved-1f1b v=2", "zb-h1")] == [0.467, 0.304, 0.226]
shrinking = {f"pp {p}": {d: float(bubble(p, 512 // d)) for d in (1, 2, 4, 8, 16, 32, 64)} for p in (4, 8, 16, 64)}
assert bubble(8, 21) == Fraction(1, 4) and 512 // 24 == 21
if rank == 0:
    left, right = ("microbatches m", curves), ("replicas dp  (m = 512 / dp)", shrinking)
    panels = {"8 stages, simulated": left, "a batch of 512 sequences, 1F1B": right}
    show(figures.plot_bubbles(panels), "09_bubble")

# %% [markdown]
# A quarter is bubble at $m = 3(p-1) = 21$ microbatches: from 24 replicas on. Interleaving divides the *idle time* by
# $v$, and multiplies messages by $v$ (cheap, 9.3) and memory by a little. ZB-H1 divides the idle time by three, with F,
# I and W equal, without more messages. The bubble fraction, idle / total, falls less: with $p = m = 8$ from 0.467 to
# 0.304 ($v = 2$) and to 0.226. On the right: with the batch fixed, pp 64 is out of the question from a few replicas on.
# There interleaving and zero bubble pay, or more tp and less pp.
#
# Memory, bandwidth, bubble: each pulls another way. More pp saves state and costs bubble. More tp saves everything and
# costs sums. More dp costs little while a microbatch has $S\beta$ tokens to hide behind and the ring's latencies,
# $(d-1)\,\alpha$ for each layer, are short. The three steps on one page ($\beta'$ is NVLink's $\beta$):

# %%
if rank == 0:
    show(figures.plot_decisions(), "09_decisions")

# %% [markdown]
# ### ZeRO-3 alone, with tp, or tp x pp?
#
# Section 9.2 left two families. Let $\nu$ be the tokens of the global batch per GPU and step.
#
# **ZeRO-3 with tp $t$** (alone: $t = 1$). A replica is $t$ GPUs, and a host holds $g/t$ of them. Each of the $t$ parts
# of the model is gathered by rings that enter and leave the host, and all the host's cards together carry $6\Psi$ bytes
# with each microbatch, whatever $t$ is: $6\Psi\beta/g$ seconds on $g$ cards. If the step is one microbatch, the host's
# $g$ GPUs compute $6\Psi \cdot g\nu$ operations beside them, in $6\Psi\nu/S$ seconds: they hide if $g\nu \ge S\beta$.
# With $\beta$ the network's and $\beta'$ NVLink's:
#
# $$\text{bandwidth: } g\,\nu \ge S\beta, \qquad \text{batch: } \nu\, t \ge T, \qquad \text{memory: }
# \frac{16\Psi}{d\,t} + \frac{\text{activations}}{t} \le \text{the GPU's}, \qquad
# \text{price of tp: } \frac{(t-1)\,S\beta'}{3h}.$$
#
# The first does not depend on $t$. The second and the third ask for tp, the last for none. So **the best $t$ is the
# smallest power of two, inside a host, that gives each replica a sequence and lets the activations fit** (if they do
# not, more tp competes with full recompute, which costs a third of the step).
#
# **tp x pp.** With $t = g$, a pipeline of $g\,p$ GPUs has $g\nu p$ tokens, so $m = g\nu p / T$ microbatches of one
# sequence, and its idle / ideal time is
#
# $$\frac{p-1}{m} = \frac{(p-1)\, T}{g\nu p} \approx \frac{T}{g\nu} \qquad\text{beside ZeRO-3's exposed}\qquad
# \frac{S\beta}{g\nu} - 1 \text{, if that is positive.}$$
#
# Both fall with $\nu$. With many tokens per GPU both are small, and memory decides. With few, the pipeline wins as soon
# as $S\beta > T + g\nu$.
#
# Predict for Llama 2 70B on A100s, with 1024 sequences of 4096 for the whole cluster: from 64 to 4096 GPUs, which
# family is the fastest? The planner, with the best microbatch and recompute that fit:

# %%
FAMILIES = {"ZeRO-3": (1, 1, 3), "tp 2, ZeRO-3": (2, 1, 3), "tp 8, ZeRO-3": (8, 1, 3), "tp 8 x pp 8, ZeRO-1": (8, 8, 1)}
sizes = (64, 256, 1024, 2048, 4096)
jobs = [(*FAMILIES[family], gpus) for family, gpus in product(FAMILIES, sizes)]
best = dict(zip(product(FAMILIES, sizes), shared(comm, fastest, jobs), strict=True))
say(f"{'GPUs':<22}{''.join(f'{gpus:>18,}' for gpus in sizes)}")
for family in FAMILIES:
    cells = [best[family, gpus] for gpus in sizes]
    say(f"{family:<22}{''.join(f'{c[0]:>8.1f} s {c[1]:<9}' if c else '      -           ' for c in cells)}")
winners = [min((best[family, gpus], family) for family in FAMILIES if best[family, gpus])[1] for gpus in sizes]
assert winners == ["tp 8 x pp 8, ZeRO-1", *["tp 2, ZeRO-3"] * 3, "tp 8 x pp 8, ZeRO-1"]
assert best["ZeRO-3", 64][1] == "full" and best["ZeRO-3", 2048] is None
host_tokens = {gpus: 8 * 1024 * 4096 // gpus for gpus in sizes}  # g nu
assert [host_tokens[gpus] > balance["a100"][1] for gpus in sizes] == [True] * 4 + [False]
assert host_tokens[4096] == 8192 and round(balance["a100"][1] / 8192 - 1, 2) == 0.43 and 7 * 4096 / (8192 * 8) == 7 / 16
assert all(1.10 < best["ZeRO-3", gpus][0] / best["tp 2, ZeRO-3", gpus][0] < 1.15 for gpus in (256, 1024))

# %% [markdown]
# - **64 GPUs**: $\nu$ = 65,536. Neither gather nor bubble matters; memory does. ZeRO-3 alone has the activations of
#   whole sequences and pays for full recompute. tp x pp cuts them, and wins.
# - **256 to 2048**: $g\nu$ is above $S\beta$ = 11,700, so the gathers hide. With tp 2 and sequence parallelism the
#   activations fit with selective recompute, and a replica has a sequence. ZeRO-3 with this smallest $t$ wins among
#   these four families (9.5 searches many more); more tp only costs. ZeRO-3 alone is 10 to 15 % slower, and at 2048
#   GPUs it ends: a GPU has less than one sequence.
# - **4096**: $g\nu$ = 8,192. The exposed gathers take 0.43 of the computing time, and the pipeline's bubble 7/16: by
#   the inequality almost a tie. The planner decides for the pipeline, because hidden communication is not free either.
#
# **The third wire: a GPU's own memory.** A product also waits for its GPU's memory (HBM). In 16 bit a product of an
# $i \times j$ and a $j \times k$ matrix takes $2ijk$ operations and moves $2(ij + jk + ik)$ bytes: $1 / (1/i + 1/j +
# 1/k)$ operations per byte. An A100 with 2 TB/s reaches its speed from $S\beta_{\text{HBM}}$ = 115 on, so $i$, $j$ and
# $k$ must all be well above that; training satisfies it. LayerNorm, gelu, dropout and residual sums do about one
# operation per byte, and always run at the memory's speed. This is the *roofline* (Williams et al. 2009): time is the
# larger of operations / $S$ and bytes $\cdot\,\beta_{\text{HBM}}$. The planner prices products and elementwise work
# this way.
#
# ## 9.5 Three models, 64 to 4096 GPUs
#
# With the functions of this chapter a planner is thirty lines: go through the layouts, drop what does not fit, price
# the rest, take the fastest. What is exposed of dp: at ZeRO-0 and 1 what is longer than the last microbatch's backward
# (and, for ZeRO-1, a forward), at ZeRO-2 and 3 what is longer than the step's computation.


# %%
def priced(model, T, batch, d, t, p, B, zero, recompute):
    """Seconds of a step of 1F1B; infinity if it does not fit."""
    m = batch // d // B
    if sum(bytes_held(model, T, d, t, p, B, m, zero, "1f1b", 1, True, recompute)) > 0.92 * ROOM:
        return np.inf
    psi = parameters_of_rank(model.layers, model.hidden, model.vocab_size, T, t, p)
    tp, pp, dp = bytes_sent(Fraction(model.layers, p), model.hidden, psi, T, d, t, p, B, m, zero, 1, recompute)
    compute = batch * model.hardware_flops(T, recompute) / (d * t * p * S["a100"])
    waiting = float(tp) * seconds_per_byte(1, t) + float(pp) * NETWORK
    hides = {0: 2 / 3 / m, 1: 1 / m, 2: 1, 3: 1}[zero] * compute
    exposed_dp = max(0, float(dp) * seconds_per_byte(t, d) - hides)
    return (1 + (p - 1) / m) * (compute + waiting) + exposed_dp


def thirty_line_plan(name, gpus, batch, T=2048):
    """The fastest layout of each mesh, fastest first: (seconds, (d, t, p), B, ZeRO stage, recompute)."""
    model, meshes = find_model(name), {}
    depths = [p for p in range(1, model.layers + 1) if model.layers % p == 0]
    for t, p, B, zero, recompute in product((1, 2, 4, 8), depths, (1, 2, 4, 8, 16), range(4), RECOMPUTE):
        d = gpus // (t * p)
        if d * t * p == gpus and batch % (d * B) == 0:
            seconds = priced(model, T, batch, d, t, p, B, zero, recompute)
            if seconds < meshes.get((d, t, p), (np.inf,))[0]:
                meshes[d, t, p] = seconds, (d, t, p), B, zero, recompute
    return sorted(meshes.values())


QUESTIONS = ((SMALL, 64, 2048), ("gpt3-175b", 256, 1536), (LARGE, 1024, 3072), ("gpt3-175b", 1024, 1536))


def compared(name, gpus, batch):
    """Our choices, and the library's first: its mesh, its seconds, its name."""
    space = replace(ASK, schedule="1f1b")
    best = plan(find_model(name), Cluster(GPUS["a100"], gpus), batch, 2048, space).plans[0]
    mesh = best.layout.dp, best.layout.tp, best.layout.pp
    return thirty_line_plan(name, gpus, batch), mesh, best.time.total, str(best.layout)


places = []  # of the library's choice, in our list
for (name, gpus, _), (ours, mesh, seconds, layout) in zip(QUESTIONS, shared(comm, compared, QUESTIONS), strict=True):
    say(f"{name} on {gpus}, library: {seconds:.1f} s, {layout}")
    say(f"  ours: {ours[0][0]:.1f} s, (d, t, p), B, ZeRO stage, recompute = {ours[0][1:]}")
    places.append([choice[1] for choice in ours].index(mesh))
    assert 0.75 < ours[0][0] / seconds < 0.95
assert places == [0, 0, 0, 9]

# %% [markdown]
# Three times it chooses the library's mesh; its seconds are 6 to 24 % too few. For GPT-3 on 1024 GPUs the library's
# choice is its tenth, 8 % behind its first. What does the library's `plan` add?

# %%
if rank == 0:
    show_source(plan)

# %% [markdown]
# More layouts (schedules, stages per rank), elementwise work and small products that do not reach $S$, latencies,
# buffers, and the five best simulated action by action. In GPT-3 on 1024 GPUs it is the elementwise work that decides:
# to recompute the scores means to carry them through the GPU's memory once more, which our thirty lines do not price.
#
# The models, each with the batch that it, or one like it, was
# trained with:
#
# | model | layers, hidden | sequence | batch | source |
# | --- | --- | --- | --- | --- |
# | 7.5B | 36, 4096 | 2048 | 2048 sequences, 4.2M tokens | Narayanan et al. 2021, table 1; batch as LLaMA's |
# | 70B | 80, 8192, grouped attention | 4096 | 1024 sequences, 4.2M tokens | Touvron et al. 2023, arXiv 2307.09288 |
# | 1T | 128, 25600 | 2048 | 3072 sequences, 6.3M tokens | Narayanan et al. 2021, table 1 |
#
# Predict before you run:
#
# 1. How many tokens per second can 1024 A100s make of the 70B at a utilization of one half? ($1024 \cdot 0.5 \cdot
# 312\cdot10^{12} / (6 \cdot 69\cdot10^9)$.)
#
# 2. Which of the three scales worst to 4096 GPUs, and what eats its time?
#
# 3. Does the 1T need pp? Does the 7.5B need tp?

# %%
SIZES = (64, 256, 1024, 4096)
jobs = [(name, kind, gpus) for gpus in SIZES for name in (LARGE, MIDDLE, SMALL) for kind in ("a100", "h100")]
plans = dict(zip(jobs, shared(comm, first_choice, jobs), strict=True))
for name, kind in product((SMALL, MIDDLE, LARGE), ("a100", "h100")):
    for gpus in SIZES:
        if choice := plans[name, kind, gpus]:
            say(f"{SHORT[name]:<5}{gpus:>5} {kind.upper()}   MFU {choice['mfu']:.1%}   {choice['layout']}")

# %% [markdown]
# The three at a glance: where the time goes, on A100s. Below each bar its layout. (Why is MFU 57 % where practically
# all of the time is computation? Products get 75 % of the peak. And computation is not only products: elementwise
# kernels carry the activations through memory, attention's scores above all.)

# %%
if rank == 0:
    show(figures.plot_spending(spending(plans, "a100")), "09_spending")
    show(figures.plot_scaling(scaling(plans)), "09_scaling")

mfu = {place: choice["mfu"] for place, choice in plans.items() if choice}
assert min(SHORT, key=lambda name: mfu[name, "a100", 4096] / mfu[name, "a100", 256]) == SMALL
assert all(mfu[name, "h100", gpus] < mfu[name, kind, gpus] for name, kind, gpus in mfu if kind == "a100")
for (name, _, gpus), choice in plans.items():
    if choice:
        _, t, p = choice["mesh"]
        assert {LARGE: t == 8 and p > 1, MIDDLE: t == 4 and p > 1, SMALL: gpus > 256 or t == p == 1}[name]
rule, planner = 1024 * 0.5 * 312e12 / (6 * llama.parameters), plans[MIDDLE, "a100", 1024]
say(f"the rule: {rule:,.0f} tokens/s; the planner: {planner['tokens']:,.0f}")
assert round(rule, -3) == 386_000 and round(planner["tokens"], -3) == 354_000 and "(0.0%)" in planner["next"]
assert plans[LARGE, "a100", 64] is None and "full recompute" in plans[LARGE, "a100", 256]["layout"]


def small_on_4096(kind, batches, assumptions):
    """MFU of the 7.5B on 4096 GPUs of a kind, with so many times its batch."""
    cluster = Cluster(GPUS[kind], 4096, assumptions=assumptions)
    return plan(find_model(SMALL), cluster, batches * 2048, 2048, ASK).plans[0].mfu


jobs = [("a100", 1, free), ("a100", 8, Assumptions()), ("a100", 8, free), ("h100", 1, free)]
found = [mfu[SMALL, "a100", 256], mfu[SMALL, "a100", 4096], *shared(comm, small_on_4096, jobs)]
assert [round(100 * each, 1) for each in found] == [56.3, 37.0, 48.2, 47.3, 56.1, 35.9]
wide = Layout(2048, 2, 1, 1, 1, zero=1, sequence_parallel=True)
for assumptions, seconds in ((free, 0.33), (Assumptions(), 1.17)):
    cluster = Cluster(GPUS["a100"], 4096, assumptions=assumptions)
    assert round(step_time(find_model(SMALL), wide, cluster, 2048).total, 2) == seconds

# %% [markdown]
# 1. The rule says 386,000 tokens per second, the planner 354,000. The rule of thumb is as good as a planner, if
# somebody tells it the utilization.
#
# 2. **The smallest scales worst**: from 56.3 % on 256 GPUs to 37.0 % on 4096. It has the same batch on 4096 GPUs, 1024
# tokens for each, so little computation beside its communication. And much of that is latency: with both $\alpha$ set
# to 0 the planner finds 48.2 %, with 2048 replicas of tp 2 and no pipeline. A step of that layout takes 0.33 s without
# latencies and 1.17 s with them, as each layer's rings have 2048 members (9.3). So the planner takes 256 replicas, and
# pays for a pipeline's messages and bubble. To use more GPUs well, a model must grow, or its batch.
#
# 3. The 1T needs tp 8 *and* pp everywhere. The 7.5B needs neither, up to 256 GPUs: data parallelism with ZeRO-1. The
# 70B is in between, tp 4 and a short pipeline.
#
# The 1T gets *better* from 256 GPUs to 1024. On 256 it only just fits, and computes every forward twice; on 64 nothing
# fits, and `plan` says how much is missing and what would do. An H100 has 3.2 times an A100's peak and less than 3
# times its speed: its utilization is lower in every row. And the second best layout is often very close. On 1024 A100s
# the 70B's is less than a tenth of a percent slower.
#
# ## 9.6 Mistakes, and what notices them
#
# A planner has no loss that goes up when it is wrong. It prints a table as neat as before. What could notice? Three
# instruments of this chapter:
#
# - **lists**: does the planner's number of microbatches in flight equal the number counted in the schedules' lists?
#
# - **layer**: do a layer's activations follow the paper's formula, with and without tp and dp?
#
# - **bytes**: are the bytes that ZeRO-3 sends $3m\frac{d-1}{d}$ times those of the rank's parameters?
#
# And three mistakes. Which instrument catches which, and what would each have recommended for 70B on 256 A100s?
#
# 1. **In flight, forgotten**: a pipeline rank keeps one microbatch.
#
# 2. **Activations divided by dp**, as ZeRO divides state.
#
# 3. **ZeRO-3's gathers, once**: parameters travel once per step, not with each microbatch.


# %%
EXPECTED = {"one_in_flight": "lists", "activations_by_dp": "layer", "gathers_once": "bytes"}
assert alarms() == []
for name, choice in zip(EXPECTED, shared(comm, recommended, [(name,) for name in EXPECTED]), strict=True):
    with MISTAKES[name]():
        noticed = alarms()
    say(f"{name}: noticed by {noticed[0]}; it recommends {choice['layout']}:")
    say(f"  {choice['claimed_bytes'] / 1e9:.0f} GB claimed, {choice['bytes'] / 1e9:.0f} GB really")
    assert noticed == [EXPECTED[name]] and (choice["bytes"] > ROOM) == (name != "gathers_once")

# %% [markdown]
# **1** and **2** recommend layouts that do not exist: the run ends with an out-of-memory error in its first step, on
# 256 GPUs that somebody has waited for. Each instrument catches one mistake and is blind to the other two: the formula
# for one layer is right under mistake 1, and the lists know nothing of dp. **3** changes no choice here, only a number
# of bytes, which a reader of the table would take to compare ZeRO-3 with a pipeline.
#
# ## 9.7 Names, problems and answers
#
# ### PyTorch's and Megatron's names
#
# | here | PyTorch | Megatron-LM (M), DeepSpeed (D) |
# | --- | --- | --- |
# | tp, pp | sizes in `init_device_mesh` | M: `--tensor-model-parallel-size`, `--pipeline-model-parallel-size` |
# | dp | a size in `init_device_mesh` | M: what is left of the ranks |
# | ZeRO-1 | `ZeroRedundancyOptimizer` | M: `--use-distributed-optimizer`; D: `"stage": 1` |
# | ZeRO-2, 3 | `fully_shard`, `reshard_after_forward=False`, `True` | D: `"stage": 2`, `"stage": 3` |
# | microbatch $B$ | | M: `--micro-batch-size`; D: `train_micro_batch_size_per_gpu` |
# | global batch $Bmd$ | | M: `--global-batch-size`; D: `train_batch_size` |
# | $v$ | stages on a rank of `ScheduleInterleaved1F1B` | M: `--num-layers-per-virtual-pipeline-stage`: $L/(pv)$ |
# | recompute | `torch.utils.checkpoint.checkpoint` | M: `--recompute-granularity selective`, `full` |
# | sequence parallelism | `SequenceParallel` | M: `--sequence-parallel` |
# | flash attention | `scaled_dot_product_attention` | M: `--use-flash-attn` |
#
# The same in PyTorch: `chapters/pytorch/ch09.py`.
#
# ### Worked problems
#
# 1. **Memory.** From which $d$ on does a model of $h$ = 5120, $L$ = 40, $a$ = 40, $V$ = 51200, $T$ = 2048 fit into 0.92
# of 80 GB with data parallelism and ZeRO-1 alone, one sequence in a microbatch and selective recompute? (Leave the
# buffers out.)
#
# 2. **Bandwidth.** An H100 cluster, tp 8: how many tokens must a microbatch of a replica have for its gradients to hide
# between hosts, and what is tp's price in forward for $h$ = 8192 inside a host? (Without latencies.)
#
# 3. **Bubble.** 16 stages, 1024 sequences in the batch, $B$ = 1. From how many replicas (a power of two) on is more
# than a tenth of the time bubble with 1F1B? And with $v = 4$?
#
# 4. **ZeRO-3 or tp x pp?** 70B on 2048 H100s, eight per host, sequences of 4096. Which size of the global batch (in
# tokens) do ZeRO-3's gathers need to hide? And with half of that, is the pipeline's bubble smaller than what is
# exposed?
#
# ### For you
#
# 1. A GPU like the H100 with twice the network (`--gpu` takes a JSON file: `{"like": "h100", "between": 100e9}`). For
# which of the three models would you buy it, on 4096 GPUs? And twice the memory instead (`{"like": "h100", "memory":
# 160e9}`)?
#
# 2. What do 2, 4 and 8 times the batch bring for the 7.5B on 4096 A100s? Predict with 9.3's rule and latencies, and
# 9.4's formula. Then ask `python -m minipar.plan --model megatron-7.5b --gpus 4096 --gpu a100 --global-batch 4096
# --seq-len 2048`.
#
# 3. You have as many GPU hours as last time, and twice as many tokens to train on. From $6\Psi$ per token: how large a
# model can you train?

# %% [markdown]
# ### Answers
#
# 1. $\Psi$ = 12,858,214,400. Parameters and gradients take $4\Psi$ = 51.4 GB, activations $34 \cdot 2048 \cdot 5120
# \cdot 40$ = 14.3 GB. Of 73.6 GB 7.9 remain for $12\Psi/d$: $d \ge$ **20** (73.4 GB; $d$ = 19 needs 73.8).
#
# 2. $S\beta$ = **18,544** tokens, ten sequences of 2048. Price of tp 8: $7 \cdot 2060 / (3 \cdot 8192)$ = **59 %** of
# forward. Flash attention does not help, a larger $h$ does.
#
# 3. $15/(m + 15) > 1/10$ means $m < 135$: $d$ = **8** ($m$ = 128, 0.105). With $v = 4$, $3.75/(m + 3.75) > 1/10$ means
# $m < 33.75$: $d$ = **32**.
#
# 4. $g\nu \ge S\beta$ means $\nu \ge 2318$, for 2048 GPUs **4.75 million tokens**. With half of that the exposed
# gathers take $2 - 1$ = 1 of the computing time, the bubble $T/(g\nu) = 4096/9272$ = 0.44: **tp x pp**.
#
# **For you.** 1. MFU with the H100's own values, twice the network, twice the memory: 7.5B 25.6, 27.7, 25.6 %; 70B
# 34.0, 35.4, 36.3 %; 1T 55.4, 57.2, 57.4 %. So the network for the smallest, and memory for the 70B, which then needs
# no recompute. But the network brings the 7.5B little: without latencies it would have 35.9 %. 2. From 37.0 to 40.9,
# 44.4 and 47.3 %. With both $\alpha$ 0 it would be 48.2, 53.1, 55.0 and 56.1 %: of what is lost since 256 GPUs (56.3
# %), latencies are the larger part. They do not grow with the batch, so a larger batch has more computation beside
# them. It also has more to hide bytes behind, and more microbatches beside a bubble. 3. $6\Psi$ times twice the tokens
# is as much as before for half the parameters.
#
# Exercise 13 in chapters/exercises is about this chapter.

# %%
model, choices = replace(GPT3, layers=40, hidden=5120, heads=40), ("1f1b", 1, False, "selective")
totals = [sum(bytes_held(model, 2048, d, 1, 1, 1, 8, 1, *choices)) for d in (19, 20)]
psi, kept = model.parameters, 34 * 2048 * 5120 * 40
assert psi == 12_858_214_400 and [round(4 * psi / 1e9, 1), round(kept / 1e9, 1)] == [51.4, 14.3]
assert [round(each / 1e9, 1) for each in (0.92 * ROOM - 4 * psi - kept, *map(float, totals))] == [7.9, 73.8, 73.4]
inside, between = balance["h100"]
assert round(between) == 18544 and round(7 * inside / (3 * 8192), 2) == 0.59
assert bubble(16, 256) < 0.1 < bubble(16, 128) and bubble(16, 64, v=4) < 0.1 < bubble(16, 32, v=4)
host_tokens = between / 2  # g nu
assert round(2048 * between / 8, -4) == 4_750_000 and round(4096 / host_tokens, 2) == 0.44
say(f"1. d = 20: {float(totals[1]) / 1e9:.1f} GB, d = 19: {float(totals[0]) / 1e9:.1f}")

# %% tags=["active-ipynb"]
# %autopx

# %% tags=["active-ipynb"]
# # Back in one process: stop the eight.
# cluster.stop_cluster_sync()
