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
# from chapters.support.notebook import start
#
# cluster = start(8)

# %%
from chapters.support.show import printer
from minipar.comm import world

comm = world()  # sets one BLAS thread for each rank; some times here are measured
rank = comm.rank

# %%
from dataclasses import asdict, fields, replace
from itertools import product
from math import isclose

import numpy as np

from chapters.support.ch10 import playbook, published, runs, sensitivity
from chapters.support.ch10.alarms import alarms, bytes_of_a_run
from chapters.support.planner_mistakes import MISTAKES, recommended
from chapters.support.share_work import shared
from chapters.support.three_models import LARGE, MIDDLE, SMALL
from minipar.bench import layouts as bench
from minipar.bench.costs import Costs, Machine, amounts_of, fit_costs
from minipar.bench.machine import pieces
from minipar.comm import Network
from minipar.plan.cluster import GPUS, Assumptions, Cluster
from minipar.plan.layout import MEGATRON, MEGATRON_2021, MINIPAR, Layout
from minipar.plan.model import find_model
from minipar.plan.rank_bytes import layer_activations
from minipar.plan.step_time import step_time

say = printer(rank)  # rank 0 prints and draws; every rank checks
if rank == 0:
    from chapters.support.ch10 import figures
    from chapters.support.show import show, show_source

# %% [markdown]
# One thing first. Programs differ: whether a rank waits for a message between stages, whether collectives between hosts
# use all network cards, whether ZeRO-1's gather hides behind the next forward. The planner must know which program it
# speaks of. What two programs do differently is data too, a `Framework`. Three of them: `MEGATRON`, chapter 9's, that
# of today; `MEGATRON_2021`, with which the first published figures were measured; `MINIPAR`, this repository's. Its
# fields say whether
#
# - `ring_per_card`: a sum between hosts runs one ring through each network card, not one ring in all;
# - `blocking_hops`: a pipeline rank waits for each message between stages;
# - `scattered_hops`: a tp rank always sends $1/t$ of the activations to the next stage, not only with sequence
#   parallelism;
# - `balanced_stages`: the layers are divided so that the head counts too, not into stages of equally many layers;
# - `every_microbatch`: ZeRO-2 and 3 reduce gradients after each microbatch, not once per step;
# - `pairwise`: gathers and sums of scalars go from each rank to each other rank, not around a ring or up a tree;
# - `gathers_ahead`: ZeRO-1's and 2's gather of parameters hides behind the next forward;
# - `embedding_returns`: the first stage sends the updated embedding to the last, instead of both updating it;
# - `lockstep`: in a ring over hosts every message waits for one between hosts;
# - `hidden_sums`, `hidden_reductions`: backward's sums over tp, and gradients' over dp, hide behind computation.
#
# Two more are bytes: `gradient_copy` of each parameter, for gradients in a second precision, and `overhead`.

# %%
say("a program that                 Megatron      2021   minipar")
for field in fields(MEGATRON):
    if field.name != "kept":  # what is kept for backward
        say(f"  {field.name:<27}", *(f"{getattr(one, field.name)!s:>9}" for one in (MEGATRON, MEGATRON_2021, MINIPAR)))

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
# of them in each layer. Backward's hide behind weight gradients: there is no sequence parallelism here (9.3). The sums
# take
#
# $$m \cdot 4 \cdot 2A.$$
#
# And the pipeline fills and drains: $p - 1$ times what a stage before the last, which has no head, does with one
# microbatch,
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
machine = runs.modelled(size, per_host=4)
eight = runs.planned(config, machine)
say(f"{'':<12}{'pencil':>12}{'planner':>12}")
for part, seconds in asdict(eight).items():
    if part not in ("exact", "cp"):
        say(f"{part:<12}{1e3 * pencil.get(part, 0):>9.3f} ms{1e3 * seconds:>9.3f} ms")
together = sum(pencil.values())
assert isclose(pencil["compute"], eight.compute) and 0 < 1 - together / eight.total < 0.03
((seconds,),) = shared(comm, lambda: [bench.modelled_step(config, machine)], [()])
say(f"{'together':<12}{1e3 * together:>9.3f} ms{1e3 * eight.total:>9.3f} ms; a run: {1e3 * seconds:.3f} ms")
assert isclose(seconds, eight.total, rel_tol=1e-4)

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
modelled, per_host = {}, comm.size if comm.size % 4 else 4  # all on one host, unless they fill hosts of four
for flags in runs.layouts_of(comm.size, per_host):
    config, _ = runs.configured(flags)
    machine = runs.modelled(comm.size, per_host)
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
# They agree to rounding, with one exception: pipelines of which only some hops leave a host. The planner takes the
# slower link for all of them, and is 2 or 3 % too high.
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

# Two constants for a block's forward, by least squares of the relative errors.
flops = np.array([amounts_of(shape, 0)["forward"] for shape in runs.SHAPES])
forward = np.array([one["F"] for one in times])
design = np.stack([np.ones_like(flops), flops], axis=1) / forward[:, None]
(once, per_operation), *_ = np.linalg.lstsq(design, np.ones_like(flops))
off = np.abs((once + per_operation * flops) / forward - 1)
say(f"a block's forward: {1e6 * once:.0f} us + operations / {1e-9 / per_operation:.0f} GFLOP/s, ", end="")
say(f"half of the times within {np.median(off):.0%}")

costs = fit_costs(list(zip(runs.SHAPES, times, strict=True)))
off = [
    abs(costs.seconds(name, shape, one["parameters"]) / one[name] - 1)
    for shape, one in zip(runs.SHAPES, times, strict=True)
    for name in one
    if name != "parameters"
]
say(f"the library's fit of {len(fields(Costs))} constants to {len(off)} times: half within {np.median(off):.0%}")
assert all(0 <= value < np.inf for value in asdict(costs).values())
if rank == 0:
    show_source(fit_costs)

# %% [markdown]
# The library's fit adds what the operations do not say: bytes that a block keeps, which elementwise work is
# proportional to, parameters that are read and updated, tensors and calls. Each rank measured other shapes, all at the
# same time, since in a run too all compute at the same time and share caches and memory.
#
# With these constants and a network of 20 µs and 1 GB/s: predict steps of a GPT with 8 layers, and the memory of the
# fullest rank. Then train in each layout, on the first ranks as many as it takes, and look at the clock, and at the
# ledger of bytes held (5.2).

# %%
network, cases = Network(20e-6, 1e-9), runs.cases(comm.size)
rows = bench.measure(comm, list(cases.values()), 3, network)
if rank == 0:
    say(f"{'planner, run:':<54}{'seconds of a step':>18}{'MB of the fullest rank':>26}")
    for (flags, config), row in zip(cases.items(), rows, strict=True):
        step, held = bench.predict(config, Machine(costs, network), config.model.seq_len)
        row |= {"predicted_seconds": step.total, "predicted_bytes": held.total}
        megabytes = f"{held.total / 1e6:>12.1f}{row['peak_bytes'] / 1e6:>8.1f}"
        say(f"{flags:<54}{step.total:>10.3f}{row['seconds']:>8.3f}{megabytes}")
        assert abs(held.total / row["peak_bytes"] - 1) < 0.15, flags
    say(f"{len(rows)} layouts: {bench.agreement(rows)}")
    panels = {
        "a step on the model clock, ms": [(1e3 * ours, 1e3 * run) for ours, run in modelled.values()],
        "a step on the CPU clock, ms": [(1e3 * row["predicted_seconds"], 1e3 * row["seconds"]) for row in rows],
        "memory in the ledger, MB": [(row["predicted_bytes"] / 1e6, row["peak_bytes"] / 1e6) for row in rows],
    }
    show(figures.plot_points(panels, 0.2), "10_agreement")

# %% [markdown]
# The last line's *Spearman* is the correlation of the two orders: number the layouts from the fastest to the slowest,
# once as predicted, once as measured; 1 means the same order, and the order is what a planner is for.
#
# Memory is asserted to 15 %, time is not: eight ranks share a few cores with whatever else runs here, and these
# constants were measured in seconds. On a busy machine most points lie below the line, furthest those that mix axes or
# have a pipeline over many ranks. Taking its time, `python -m minipar.bench machine` measures 30 shapes and the
# messages too, and `python -m minipar.bench layouts --machine FILE` predicts 28 layouts. On a quiet machine with two
# cores they found: all 28 within 14.3 %, half of them within 3.5 %, Spearman 0.992, memory within 8.2 %. A test holds
# the planner to that record. It also shows that the record can be contradicted: with one constant wrong by a factor of
# four it fails.
#
# ## 10.4 Why it agrees, and where not
#
# Because the planner is an *abstraction* of the program, not a theory beside it. It cuts layers into stages with the
# program's own function. It walks through the same lists of actions as the executor. Its rings are those of chapter 3,
# message by message; its buckets are those that ZeRO sends. What it leaves out is the values. Where it does not agree:
#
# - **Hops.** Where some neighbours of a pipeline share a host and others do not, it takes the slower link for all.
#
# - **Shared caches.** A rank's CPU time grows when its neighbours use the same cache and memory. Constants are measured
# with all ranks at work; a layout of one rank that has the machine for itself can be faster than they say.
#
# - **The slowest rank.** Every sum waits for its last rank. A rank that was held up for a moment holds up all of them;
# medians of pieces know nothing of that. So layouts of several ranks come out slower than planned.
#
# ## 10.5 Published runs
#
# So far nothing has tested the constants of a GPU. The following measurements are published:
#
# - **Narayanan et al. 2021** (arXiv 2104.04473): TFLOP/s per A100, recomputation included. Table 1: 1F1B, no ZeRO, full
# recompute. Table 2: the same in three axes, and ZeRO-3 without a pipeline and without tp. Figure 15: 5.9B with tp 2,
# values read off.
#
# - **Korthikanti et al. 2022** (arXiv 2205.05198, table 5): seconds of an iteration, with selective recompute and
# sequence parallelism, and with neither but full recompute. A100s; the layouts are theirs.
#
# - **Llama 3** (Llama Team 2024, arXiv 2407.21783, table 4): MFU of 405B on 8192 and 16,384 H100s, tp 8, pp 16,
# sequences of 8192, flash attention (9.2), which keeps no scores. The rest of the layout is left to the planner.
#
# - **LLaMA and Llama 2** (Touvron et al. 2023, arXiv 2302.13971 and 2307.09288): 82,432 GPU hours for 1.0T tokens with
# 7B; 380 tokens per second and GPU with 65B on 2048; 1,720,320 GPU hours for 2.0T tokens with 70B. A100s, batches of 4M
# tokens, attention that keeps no scores. Their layouts are not printed, so the planner's best one stands in; for 7B and
# 70B neither is the number of GPUs: we take 256 and 2048.
#
# Which program trained? A `Program` pairs a `Framework` with the shares of the data sheet that it reaches. `megatron`
# is chapter 9's, as it is today. `megatron-2021` hides nothing over tp or dp. `deepspeed-2021` sends as fast as *one*
# network card of each host, and hides no reduction either. `llama-3` keeps of a layer what no elementwise kernel can
# compute again.
#
# One row by hand: Narayanan's 145B, 148 TFLOP/s per GPU as printed. Their layout is tp 8, pp 8, so 1536 GPUs are 24
# replicas; 2304 sequences are 48 microbatches of 2 for each. The planner says 154. Then all rows, the worst first:
# predicted, printed, and how far the predicted time is off.

# %%
layout = Layout(dp=24, tp=8, pp=8, microbatch=2, microbatches=48, recompute="full")
model = find_model("megatron-145b")
seconds = step_time(model, layout, Cluster(GPUS["a100"], 1536), 2048).total
tflops = 2304 * model.hardware_flops(2048, "full") / (seconds * 1536) / 1e12
assert isclose(tflops, published.narayanan("megatron-145b")[0].predicted) and round(tflops) == 154

results = shared(comm, published.predicted, published.JOBS)
table = [published.Row(*row) for rows in results for row in rows]
ratios, groups = {}, {}
for row in sorted(table, key=lambda row: -row.distance):
    say(f"{row.ratio - 1:>+5.0%}  {row}")
    ratios.setdefault(row.source, []).append(row.ratio)
for row in reversed(table):  # in the figure: each printed run once, as the program of its time
    if row.source.endswith("-2021") or not (", megatron" in row.source + row.name or "stored" in row.name):
        groups.setdefault(row.source if row.source[-1] != "1" else "Narayanan 2021", {})[row.name] = row.ratio
if rank == 0:
    show(figures.plot_predictions(groups, 0.15), "10_published")
assert min(ratios["table 2, megatron"]) < 0.24 and all(abs(x - 1) < 0.10 for x in ratios["table 2, deepspeed-2021"])
assert all(abs(x - 1) < 0.04 for name in ("table 1", "table 2") for x in ratios[f"{name}, megatron-2021"])
assert all(-0.10 < x - 1 < 0.03 for name in ("table 1, megatron", "Korthikanti 2022") for x in ratios[name])
assert [round(x, 1) for x in ratios["figure 15, megatron-2021"]] == [0.6, 0.8, 0.9]
assert all(0.84 < x < 0.91 or 1.1 < x < 1.2 for x in ratios["Llama 3, 2024"])
assert all(0.65 < x < 1 for x in ratios["Touvron 2023"])

# %% [markdown]
# **ZeRO-3, four times too fast.** This is the worst miss, and the most useful one. With chapter 9's program ZeRO-3
# beats three axes in every row of table 2. In the printed runs it loses every row, and on the most GPUs it has a third
# of their speed. No constant does that. A ring through each of a host's eight cards, or one ring: with one, and
# reductions after backward, all six rows come within 9 %, and in the printed order. These two habits were *inferred*
# from the six rows. What other data would say is open.
#
# **Figure 15.** With one microbatch the gradients' sum is most of the step, and it took longer than even
# `megatron-2021` says. One ring instead of four would explain it, and would make figure 14 wrong, where two stages take
# the place of tp 2. We do not know.
#
# **LLaMA and Llama 2.** Where nobody says what was run, the planner answers another question: what is the *most* that
# these GPUs could have done? 20 to 40 % more tokens per second than was printed. GPU hours of a whole run include what
# is no step: restarts, checkpoints, evaluation. And nobody knows whether the layout was the best. (With stored scores,
# which these runs did not have, the same rows come out within about 20 %. Two errors of opposite sign. One value
# that agrees is not a model that agrees: that is why 10.1 and 10.2 compared part by part.)
#
# **Llama 3.** With what Megatron keeps, the authors' layouts do not fit: the planner recomputes every forward, and is
# 13 to 16 % too slow. They trained without: they freed tensors by hand as soon as they were of no use (their section
# 3.3.2). With the least that a layer can keep, the planner chooses *their* layout, on both numbers of GPUs, and is 11
# to 13 % too fast. Which tensors they freed is not printed, so the memory is an assumption that fits, not a proof.
#
# **Where the whole layout is printed**, and the program is that of its time, table 1 and table 2 come within 4 %. One
# constant was chosen for that, `half_work`, by figure 16's best microbatch. With today's program the same rows are up
# to 12 % too fast: **the planner is an optimist**, because every assumption says how well something goes, and none says
# what goes wrong. Of what figures 11 to 18 state, all but three hold; `docs/planning.md` lists them.
#
# Errors that all layouts share do no harm to a choice between them. Use a planner to rank layouts; if you promise a
# speed, promise less than it says.
#
# ### A thousand measured runs
#
# The authors of the Ultra-Scale Playbook (Hugging Face 2025) measured nanotron on up to 64 hosts of eight H100, the
# good layouts and the bad. A fifth program, `nanotron`: its constants are *fitted*, to the 1B runs without a pipeline
# on at most 32 hosts. The 8B runs judge it. What will it miss?

# %%
sets = {"1B, fitted": playbook.without_pipeline("1B"), "8B, held out": playbook.without_pipeline("8B")}
sets["with a pipeline"] = [run for run in playbook.runs() if run.layout.pp > 1 and run.hosts <= playbook.MOST_HOSTS]
shares, panels = {}, {}
for name, those in sets.items():
    points = [(playbook.seconds(run), run.seconds) for run in those]
    held = [(playbook.nbytes(run) / 1e9, run.nbytes / 1e9) for run in those]
    panels[f"seconds, {name}"] = points
    shares[name] = [sum(abs(x / y - 1) <= 0.2 for x, y in pairs) / len(pairs) for pairs in (points, held)]
    say(f"{name:<17}{len(those):>4} runs within 20 %: seconds {shares[name][0]:.0%}, memory {shares[name][1]:.0%}")
over = [x / y for name in list(sets)[:2] for x, y in panels[f"seconds, {name}"]]
say(f"without a pipeline the worst are {min(over):.2f} and {max(over):.2f} of the measured time")
assert shares["with a pipeline"][0] < 0.5 < 0.8 < shares["8B, held out"][0] < shares["1B, fitted"][0]
if rank == 0:
    show(figures.plot_points(panels, 0.2), "10_playbook")

# %% [markdown]
# Of the pipelines two in three are missed. The record misses them too: a layout measured at ZeRO 0 and once more at
# ZeRO 1 differs by a factor of three in the median, which no formula can follow. And five runs without a pipeline are
# said not to fit, although they ran. They report less memory than a straight line through their smaller microbatches,
# and took 1.7 to 4.4 times as long as with half the microbatch. Something else ran there than the layout says.
#
# Without a pipeline the held-out model comes out within 20 % in five of six runs. Megatron's constants reach one in
# twenty. What nanotron has, and Megatron in 2021 did not show, is a host that launches kernels too slowly: 4.2 ms for a
# layer and microbatch, however small.
#
# ## 10.6 Which assumptions matter
#
# All that is not in a data sheet stands in one place, `Assumptions` in `minipar/plan/cluster.py`, with its source, or
# called an assumption there:
#
# - `products`, `copies`, `links`, `memory_used`: shares of the data sheet's peak, memory bandwidth (of elementwise
#   kernels), link bandwidth and memory that a program gets;
# - `half_work`: the operations of a product that reaches half of that speed; larger ones are faster;
# - `forward_traffic`, `backward_traffic`: how often elementwise kernels move each byte that is kept for backward;
# - `update_traffic`: bytes that the optimizer moves for each parameter;
# - `alpha_inside`, `alpha_between`: seconds of a message inside a host and between hosts;
# - `contention`: seconds of computation that each hidden second of communication costs.
#
# Here is the experiment for one constant, on chapter 9's 7.5B on 64 A100s: products that reach 20 % less of the peak.

# %%
for field in fields(Assumptions):
    say(f"{field.name:<18}{field.default:>10.3g}")
usual = Cluster(GPUS["a100"], 64)
slower = replace(usual, assumptions=replace(usual.assumptions, products=0.8 * usual.assumptions.products))
layout = Layout(dp=64, tp=1, pp=1, microbatch=1, microbatches=32, zero=1)
before, after = (step_time(find_model(SMALL), layout, machine, 2048).total for machine in (usual, slower))
say(f"a step of the 7.5B: {before:.1f} s; with products at 0.6 of the peak instead of 0.75: {after / before - 1:+.1%}")
assert 0.15 < after / before - 1 < 0.25

# %% [markdown]
# Now each constant by 20 % up and down (a constant that is a share stays at most 1): how much does the best layout's
# predicted time change, is it still the best, and if not, how much is lost by having believed the old constant? Two
# questions: the 70B on 1024 A100s, whose best layout is a pipeline, and the 7.5B, whose best one has none. Predict the
# two longest bars.

# %%
questions = list(sensitivity.QUESTIONS)
numbers = shared(comm, sensitivity.near, [(question,) for question in questions])  # of layouts near the best one
near = {question: sensitivity.numbered(question, those) for question, those in zip(questions, numbers, strict=True)}


def constant_changed(question, *rest):
    return sensitivity.changed_constant(question, near[question], *rest)


def program_changed(question, program):
    return sensitivity.changed_program(question, near[question], program)


jobs = [(question, *rest) for question in questions for rest in product(sensitivity.CONSTANTS, sensitivity.CHANGES)]
effects = {question: {} for question in questions}
changes = zip(jobs, shared(comm, constant_changed, jobs), strict=True)
for (question, constant, change), (moved, another, regret, layout) in changes:
    effects[question].setdefault(constant, {})[change] = moved, another
    if another:
        loss = "does not fit" if regret is None else f"takes {regret:.1%} longer"
        say(f"{question}, {constant} {change}: {layout}; the old one {loss}")
        assert regret is None or regret < 0.02
for question in questions:
    largest = {name: max(abs(moved) for moved, _ in effects[question][name].values()) for name in effects[question]}
    assert sorted(largest, key=largest.get)[:-3:-1] == ["products", "copies"]
    alphas = round(100 * max(largest["alpha_inside"], largest["alpha_between"]), 1)
    assert alphas == {"70B on 1024 A100s": 0.0, "7.5B on 1024 A100s": 1.3}[question]
if rank == 0:
    show(figures.plot_tornado(effects), "10_sensitivity")

# %% [markdown]
# Time hangs on how much of the peak a product gets; then on memory bandwidth, and on how often elementwise kernels pass
# over it. What communication costs comes after that: the search has chosen layouts in which it hardly matters. (10.8
# shows the trap in this.) A latency that is a fifth larger or smaller moves the 70B by less than 0.1 % and the 7.5B by
# 1.3 %. That holds for 1024 GPUs and a fifth only. On 4096 the search has to avoid long rings: there the 7.5B's MFU is
# 37.0 %, and 48.2 % without latencies (9.5). And for large sums and gathers the planner knows rings only. NCCL also has
# trees, whose latency grows with $\log d$.
#
# The *choice* is sturdier than the time, because an error in a constant falls on all layouts. A star says that another
# layout has become the best. In the list printed above, having believed the old constant costs less than 2 % wherever
# that happens. The best few layouts are nearly tied, and any change breaks the tie anew.
#
# An assumption about *how something is done* weighs more. Three of them, on the same two questions. What if collectives
# between hosts go round *one* ring, not one for each network card? What if ZeRO-1's gather does not hide behind the
# next forward? And what if attention is flash attention? Predict which of them changes what.

# %%
jobs = [(question, program) for question in questions for program in sensitivity.PROGRAMS]
structure = dict(zip(jobs, shared(comm, program_changed, jobs), strict=True))
say(f"{'':<46}{'same layout':>14}{'best layout':>14}")
for (question, program), (same, now, layout) in structure.items():
    say(f"{question + ', ' + program:<46}{same:>+14.1%}{now:>+14.1%}   {layout}")
pipeline, small = questions
assert all(structure[question, "flash attention"][0] < -0.1 for question in questions)
for program, choice in zip(sensitivity.PROGRAMS, ("tp 8", "ZeRO-3", "tp 1"), strict=True):
    same, now, layout = structure[small, program]
    assert choice in layout.split(", ")
    assert program == "flash attention" or (same > 0.1 and now > 0.02 > structure[pipeline, program][1])

# %% [markdown]
# In one question or the other, each of them weighs more than any constant but the products' rate, and two weigh more
# than that. And they do move the choice:
#
# - **One ring**: in the 7.5B's layout, four GPUs of each host take part in the same sum. With one ring they share one
# of the host's cards, and a step takes more than half as long again. The planner then prefers tp 8, where only one GPU
# of each host is in a sum, and all cards are busy in any case. The 70B's pipeline sends few gradients and hardly
# notices.
#
# - **Gathers that wait**: with one or two microbatches to hide behind, ZeRO-1's gather is an eighth of the step.
# ZeRO-3, which gathers while it computes, gets most of that back: a planner that does not know how the gather is done
# recommends another stage.
#
# - **Flash attention** is worth 10 to 20 %, and the memory that it saves lets the 7.5B do without tp.
#
# So before you fit a constant, read what the program does. And the best few of a list are often within a percent or
# two, less than any planner knows. Measure its first five, not its first one.
#
# ## 10.7 What is not in it at all
#
# **Stragglers.** A step waits for the slowest of all GPUs. If the time of each varies by $\sigma$ = 1 % from step to
# step, and independently, how much slower is the slowest of $k$ = 4096? About $\sigma\sqrt{2\ln k}$ = 4.1 %; the cell
# draws them.
#
# **Tiles.** A product is cut into tiles, and the GPU's multiprocessors (an A100 has 108) compute them in rounds. The
# last round may be nearly empty. The MLP's first product with tp 8 in tiles of 128 x 256:

# %%
random = np.random.Generator(np.random.Philox(8))
for count in (8, 64, 512, 4096):
    slowest = (1 + 0.01 * random.standard_normal((200, count))).max(axis=1).mean()
    rule = 0.01 * (2 * np.log(count)) ** 0.5
    say(f"{count:>5} GPUs: the slowest takes {slowest - 1:.1%} longer; sigma sqrt(2 ln k) = {rule:.1%}")
    assert abs((slowest - 1) / rule - 1) < 0.35


def busy(rows, columns, multiprocessors=108):
    """The share of the multiprocessors that works, in a product with so many rows and columns of the result."""
    tiles = -(-rows // 128) * -(-columns // 256)
    return tiles / multiprocessors / -(-tiles // multiprocessors)


shares = [busy(tokens, find_model(name).inner // 8) for name in (SMALL, LARGE) for tokens in (2048, 4096)]
say("busy: 7.5B with 2048 and 4096 tokens, 1T with 2048 and 4096:", [f"{part:.0%}" for part in shares])
assert shares[0] < 0.6 < 0.9 < shares[2]

cores = []
for length in (4096, 32768):
    model = find_model(MIDDLE)
    layouts = [Layout(1, 1, 1, 1, 1, attention=kind) for kind in ("stored", "flash")]
    whole, without = (layer_activations(model, layout, length) for layout in layouts)
    core = 3 * model.layers * model.attention_core_flops(length) / model.model_flops(length)
    cores.append((core, 1 - without / whole))
    say(f"70B, {length:,} tokens: scores are {core:.0%} of all operations, and {cores[-1][1]:.0%} of all activations")

# %% [markdown]
# And one GPU that is throttled by 10 % costs the whole cluster 10 %. The planner's GPUs are all the same, and its
# products follow a smooth curve where the truth has teeth: in the 7.5B a second sequence takes half as long as the
# first, which leaves most of its second round empty: together they take three rounds instead of four. (Libraries choose
# among many tile shapes and soften it.)
#
# **Attention.** Stored scores are those of the papers of 2021 and 2022. At 4096 tokens they decide the memory of every
# layout. For a run of today plan with `--attention flash`. Two things are still not in it. The planner gives a flash
# kernel's products the speed of any other product; real ones reach less. And a causal kernel computes half of the pairs
# of tokens, where all are counted here and in the papers.
#
# **Contention.** Each collective here has the wire to itself. In truth dp, pp and the file system share network cards,
# and switches above the hosts are often oversubscribed. **Fragmentation.** 92 % of memory is a guess. Allocators lose
# some between blocks of different sizes, and peaks of a few milliseconds end a run like any other. **Unequal stages.**
# Odd layer counts and uneven cuts are seen by memory, hardly by time.
#
# **Everything else:** data loading, checkpoints, evaluation, failures. On thousands of GPUs something breaks every few
# hours. A fast step is not yet a fast run.
#
# ## 10.8 Mistakes, and what notices them
#
# Two instruments of this chapter, next to chapter 9's three:
#
# - **run**: does minipar, training, send the bytes that the planner says?
#
# - **print**: are utilizations within 0.3 points and speeds within 15 % of what was printed?
#
# And three mistakes. Which instrument catches which?
#
# 1. **ZeRO-3's gathers, once**: parameters travel once per step, not with each microbatch.
#
# 2. **Recomputation counted as useful**: MFU from all operations that were done.
#
# 3. **Bits and bytes**: the network card of 200 Gb/s taken as 200 GB/s.

# %%
(sent,) = shared(comm, bytes_of_a_run, [()])
EXPECTED = {"gathers_once": ["run"], "recomputation_is_useful": ["print"], "bits_as_bytes": []}


def examined(name):
    """What notices a mistake, and what this planner recommends."""
    with MISTAKES[name]():
        noticed = alarms(sent)
    return noticed, recommended(name)


assert alarms(sent) == []
for name, (noticed, choice) in zip(EXPECTED, shared(comm, examined, [(name,) for name in EXPECTED]), strict=True):
    say(f"{name}: noticed by {noticed or 'nothing'}; it recommends {choice['layout']}:")
    say(f"  MFU {choice['claimed_mfu']:.1%} claimed, {choice['mfu']:.1%} really")
    assert noticed == EXPECTED[name]

# %% [markdown]
# **1** changes no choice, only a number of bytes. A run of two ranks and a second settles it: this is what a small
# program is good for. **2** chooses well, because the choice is by seconds, and boasts. Only print tells, that is
# somebody else's count of the same thing.
#
# **3** is caught by *nothing*. The published layouts were chosen by people who knew their network, so that it hardly
# mattered: an eightfold error moves no row by 15 %. A model is only tested where its errors would show. To test the
# network, plan what depends on it: small batches, ZeRO-3 between hosts, 7.5B on 4096 GPUs.
#
# ## 10.9 Names, problems and answers
#
# | here | PyTorch | elsewhere |
# | --- | --- | --- |
# | the `cpu` clock, the timeline | `torch.profiler.profile`, Kineto's trace | Nsight Systems |
# | the ledger of bytes held | `torch.cuda.max_memory_allocated`, `torch.cuda.memory._snapshot` | |
# | counted operations | `torch.utils.flop_counter.FlopCounterMode` | M: `--log-throughput`; D: `FlopsProfiler` |
# | a run of 64 ranks as threads | `FakeStore` and the `fake` backend | |
# | measured alpha and beta | | nccl-tests' `all_reduce_perf` |
# | `ring_per_card` | NCCL's channels | `NCCL_MIN_NCHANNELS`, `NCCL_ALGO` |
# | `gathers_ahead` | `fully_shard`'s prefetch | M: `--overlap-param-gather` |
# | sums behind weight gradients | | M: `--tp-comm-overlap` |
#
# The same in PyTorch: `chapters/pytorch/ch10.py`.
#
# ### Worked problems
#
# 1. **Pencil.** 10.1's run with 16 microbatches in the place of 8. Which of its three parts change, and to what?
#
# 2. **Stragglers.** A cluster of 16,384 GPUs, $\sigma$ = 0.5 %. How much does a step lose, by the rule?
#
# 3. **Sensitivity.** A step is 70 % products, 20 % elementwise work, 10 % exposed communication. Products reach 0.6 of
# the peak instead of 0.75. How much longer does it take? And if links reach 0.8 of their speed? (Each part takes as
# much longer as its rate falls.)
#
# 4. **Tiles.** In tiles of 128 x 256 on 108 multiprocessors: which shares are busy for 2048 tokens and 2560 columns,
# and for 4096 tokens?
#
# ### For you
#
# 1. Write an instrument that catches mistake 3, bits and bytes.
#
# 2. The pencil of 10.1 leaves something out. Add the messages between stages, and the loss's sums over tp: for each
# microbatch an all-reduce of $T$ values and one of $2T$ values (6.5), of 4 bytes each. How far from the planner are you
# then?
#
# 3. What could you measure on *one* host of GPUs to make the planner's answer for 1000 GPUs better?

# %% [markdown]
# ### Answers
#
# 1. Computation and sums double, 16 in the place of 8 in both formulas. The bubble stays as it is: it does not depend
# on $m$.
#
# 2. $0.005\sqrt{2 \ln 16384}$ = **2.2 %**.
#
# 3. $0.7 \cdot 0.75/0.6$ = 0.875 in the place of 0.7: **17.5 %** longer. Links: $0.1/0.8$ = 0.125 in the place of 0.1,
# **2.5 %**.
#
# 4. $16 \cdot 10 = 160$ tiles take two rounds of 108: **74 %**. $32 \cdot 10 = 320$ take three: **99 %**. So twice the
# tokens take 1.5 times as long.
#
# **For you.** 1. Compare what depends on the network: predict the 7.5B on 4096 A100s with half the bandwidth, and ask
# that the time change as 9.3's formulas say. Or hold $1/\beta$ against nccl-tests: they print 85 to 96 GB/s between
# hosts whose cards give 100 together (`minipar/plan/cluster.py`). Or predict 10.5's rows of ZeRO-3: with the
# mistake they run 1.4 to 3.4 times as fast as was printed. 2. 142 µs are missing. A message has $4Th$ bytes and takes
# 5.3 µs, and `MINIPAR` does not wait for it (`blocking_hops`): only the first one forward and the last one back
# cost time, 10.6 µs, in the row `bubble`. The loss's two sums take 12.1 µs with each microbatch, 97 µs in the row `tp`.
# So you are 34 µs short. These are the embedding's sum over tp while the pipeline fills (8.3 µs, `bubble`), the norm
# over tp (6 µs, `tp`), and the 20 µs of the row `pp`: the tied embedding's gradient, which goes from the last stage to
# the first once per step (7.6 µs), and a scalar each for the loss and the norm (6 µs each). 3. `products`, `half_work`,
# `copies` and `contention`: the largest bars of 10.6 are properties of one GPU.

# %%
twice = runs.planned(runs.configured("--tp 2 --pp 2 --microbatches 16")[0], runs.modelled(4, per_host=4))
assert isclose(twice.compute, 2 * eight.compute) and isclose(twice.bubble, eight.bubble)
hop, scalar, tied = alpha + 4 * T * h * beta, 2 * alpha, alpha + 4 * V * h / t * beta
loss = sum(2 * (alpha + 4 * values / t * beta) for values in (T, 2 * T))
assert [round(1e6 * each, 1) for each in (hop, loss, all_reduce, tied, scalar)] == [5.3, 12.1, 8.3, 7.6, 6.0]
assert isclose(eight.bubble, pencil["bubble"] + 2 * hop + all_reduce)
assert isclose(eight.tp, pencil["tp"] + m * loss + scalar) and isclose(eight.pp, tied + 2 * scalar)
missing = eight.total - together
assert round(1e6 * missing) == 142 and round(1e6 * (missing - 2 * hop - m * loss)) == 34
assert round(0.005 * (2 * np.log(16384)) ** 0.5, 3) == 0.022
assert isclose(0.7 * 0.75 / 0.6 + 0.2 + 0.1, 1.175) and isclose(0.7 + 0.2 + 0.1 / 0.8, 1.025)
assert busy(2048, 2560) == 160 / 216 and busy(4096, 2560) == 320 / 324
say(f"1. computation {1e3 * twice.compute:.2f} ms, bubble {1e3 * twice.bubble:.2f} ms")

# %% tags=["active-ipynb"]
# %autopx

# %% tags=["active-ipynb"]
# # Back in one process: stop the eight.
# cluster.stop_cluster_sync()
