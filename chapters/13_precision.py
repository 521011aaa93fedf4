# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 13. Precision
#
# **How can a model be trained in two bytes per value, and which values need more?**
#
# All runs so far were float32 or float64. Large models are trained in 2 bytes: activations take half the memory, and
# matrix products are many times as fast on hardware that is made for them. But a bf16 weight has 7 bits of mantissa and
# the leading 1, two or three decimal digits. At the end of this chapter a small GPT learns Python's text for 200 steps,
# and its loss in bf16 is that of float32, 3.48. With one array left out it is 3.63. No value is infinite, no gradient
# is wrong, and no error is raised. Here is the reason, with one weight:

# %% tags=["active-ipynb", "setup"]
# from chapters.support.notebook import start
#
# cluster = start(8)

# %% tags=["setup"]
import ml_dtypes
import numpy as np

from chapters.support.ch13 import train
from chapters.support.predict import predict, reveal
from chapters.support.show import printer
from minipar.comm import chunk_bounds, world

comm = world()
rank, P = comm.rank, comm.size  # this rank, and the number of ranks
say = printer(rank)  # rank 0 prints and draws; every rank checks
if rank == 0:
    from chapters.support.ch13 import figures
    from chapters.support.overview import draw_strategies
    from chapters.support.show import show, show_file, show_source

# %%
bf16 = np.dtype(ml_dtypes.bfloat16)  # NumPy has no bf16 of its own
update = 2**-9
steps = 24
weight = bf16.type(1)
master = np.float32(1)
curves = {"exact": [1.0], "bf16": [1.0], "bf16, with an fp32 master": [1.0]}
for i in range(1, steps + 1):
    weight = weight + bf16.type(update)  # adds, and rounds the sum to bf16
    master = master + np.float32(update)
    for curve, value in zip(curves.values(), (1 + i * update, weight, bf16.type(master)), strict=True):
        curve.append(float(value))
say(f"after {steps} updates of 2^-9: {curves['bf16'][-1]:.4f} in bf16, {curves['bf16, with an fp32 master'][-1]:.4f}")
if rank == 0:
    show(figures.plot_weight(curves, 2**-9, 2**-8), "13_weight")

# %% [markdown]
# The weight is 1, and each step adds $2^{-9}$ to it. In bf16 it never moves. The grey band ends halfway between 1 and
# the next bf16 values, of which the lower one is nearer: what lands in it is rounded back to 1. An fp32 copy of the
# weight, the *master*, collects the updates, and the bf16 weight is rounded from it. That is the array that was left
# out.
#
# Training in 2 bytes works because a few values are *not* kept in 2 bytes. Most of its bugs are one of three:
#
# - a small update is added to a large weight, and nothing happens (13.2);
#
# - a small gradient becomes zero, or a large one infinite (13.4);
#
# - a sum has many terms, and the precision of its partial sums is that of the terms (13.5).
#
# Among the strategies of this course precision is no row of its own. It says how many bytes the filled part of a box
# has, in the first row and in all others:

# %%
if rank == 0:
    show(draw_strategies(["one"]), "13_here")

# %% [markdown]
# ## 13.1 Sixteen bits
#
# *Core, 6 minutes.*
#
# A floating-point value is a sign, an exponent and a mantissa: $\pm\, 1.b_1 b_2 \dots b_m \cdot 2^e$. The bits of the
# exponent say how far the values reach, those of the mantissa how close to each other they lie. IEEE's half precision,
# **fp16**, has 5 and 10. **bf16** (bfloat16, from Google Brain) has 8 and 7: as many bits for the exponent as float32
# (**fp32**), and so the same range. The last two formats are for 13.9.

# %%
FORMATS = {"fp32": (8, 23), "bf16": (8, 7), "fp16": (5, 10), "fp8 e4m3": (4, 3), "fp8 e5m2": (5, 2)}
if rank == 0:
    show(figures.plot_bits(FORMATS), "13_bits")

# %% [markdown]
# The exponent of all ones is kept for infinities and NaN, that of all zeros for *subnormal* values, which have no
# leading 1 and reach down to 0 in equal steps. The **unit roundoff** is the largest relative error of rounding a value
# to the nearest: half the distance from 1 to its upper neighbour. The distance of a value to its upper neighbour is an
# *ulp* (unit in the last place); it doubles with each power of two.


# %%
def limits(exponent, mantissa):
    """Return the largest value, the smallest normal one, the smallest of all, and the unit roundoff."""
    bias = 2 ** (exponent - 1) - 1
    return (2 - 2.0**-mantissa) * 2.0**bias, 2.0 ** (1 - bias), 2.0 ** (1 - bias - mantissa), 2.0 ** -(mantissa + 1)


def table(name, dtype, largest, normal, smallest, roundoff):
    info = ml_dtypes.finfo(dtype)
    assert [largest, normal, smallest, 2 * roundoff] == [
        float(x) for x in (info.max, info.smallest_normal, info.smallest_subnormal, info.eps)
    ]
    powers = " ".join(f"2^{int(np.log2(x)):<5}" for x in (normal, smallest, roundoff))
    say(f"{name:<9} largest {largest:<9.3g} smallest normal, smallest, unit roundoff: {powers}")


for name, dtype in (("fp32", "float32"), ("bf16", bf16), ("fp16", "float16")):
    table(name, dtype, *limits(*FORMATS[name]))
assert limits(8, 7)[3] == 2**-8 and limits(5, 10)[3] == 2**-11 and limits(5, 10)[:2] == (65504, 2**-14)

# %% [markdown]
# bf16 reaches as far as fp32 and knows 8 bits (7, and the leading 1). fp16 knows 11, but ends at 65,504 and begins at
# $2^{-24}$, about $6 \cdot 10^{-8}$. Each of the two has one of our troubles: bf16 loses small *differences* (13.2 and
# 13.5), fp16 loses small *values* (13.4).

# %% [markdown]
# ### A cast in three lines
#
# *Core, 5 minutes.*
#
# A bf16 value is the upper half of an fp32 one. Cutting the lower half off would round towards zero. To round to the
# nearest, add half of what is cut off, $2^{15}$, and then cut. A value in the middle between two neighbours must go to
# the one that ends in 0 (*to even*), so that errors do not add up in one direction: add $2^{15} - 1$, and 1 more if the
# last bit that stays is 1. A carry runs on into the exponent, which is right.


# %%
def to_bf16(x):
    """Round float32 to the nearest bfloat16, and of two equally near ones to the even one."""
    bits = x.view(np.uint32)
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded).view(bf16)  # a carry must not make a NaN an infinity


def to_fp32(x):
    return (x.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def same(a, b):
    """Tell whether two arrays of bfloat16 have the same bits, where they are not NaN."""
    nan = [np.isnan(x.astype(np.float32)) for x in (a, b)]
    return np.array_equal(*nan) and np.array_equal(a.view(np.uint16)[~nan[0]], b.view(np.uint16)[~nan[1]])


patterns = np.arange(2**16, dtype=np.uint16).view(bf16)  # all of them, with infinities and NaN
assert np.array_equal(to_fp32(patterns), patterns.astype(np.float32), equal_nan=True)
assert same(to_bf16(to_fp32(patterns)), patterns)
lower = np.array([0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)  # near, below the middle, in it, above it, far
between = (np.arange(2**16, dtype=np.uint32)[:, None] << 16 | lower).view(np.float32)
values = np.random.default_rng(13).integers(0, 2**32, 1_000_000, dtype=np.uint32).view(np.float32)  # of every size
with np.errstate(invalid="ignore"):  # NaN among them
    assert same(to_bf16(between), between.astype(bf16)) and same(to_bf16(values), values.astype(bf16))
say("the cast = ml_dtypes': all 65,536 patterns, five values above each, and a million values of every size")

# %% [markdown]
# The library uses the package ml_dtypes, as we did above. Its casts are torch's to the bit, which
# `tests/reference/test_precision.py` checks.

# %% [markdown]
# ## 13.2 An update that is too small
#
# *Core, 6 minutes.*
#
# Back to the first picture. The upper neighbour of 1 in bf16 is $1 + 2^{-7}$, and everything up to the middle between
# them, $1 + 2^{-8}$, is rounded back to 1. After a million steps of $2^{-9}$ the weight is 1. This is not a rare case:
# AdamW divides a gradient by its own size, so each step moves each weight by about the learning rate $\eta$, however
# small its gradient is. **A step of $\eta$ is lost where half an ulp is more than $\eta$**, and that is so for each
# weight above $2^9 \eta$, and for some above $2^8 \eta$. With $\eta = 10^{-3}$ no weight above a half learns.
#
# The moments need fp32 too. $\beta_2 = 0.999$ lowers $v$ by at most a thousandth, which is less than half an ulp of
# bf16, so $v$ would never fall: after 1,000 steps without a gradient a 1 is still 1, where 0.37 is right.
#
# The remedy is from Micikevicius et al. 2017 (arXiv 1710.03740): the optimizer keeps a **master** of each weight in
# fp32, updates it, and gives the model a rounded copy. The third curve of the picture is never further from the exact
# one than half an ulp:

# %%
assert set(curves["bf16"]) == {1.0} and to_bf16(np.float32([1 + 2**-8])) == 1  # the middle, too: 1 is the even one
assert np.abs(np.array(curves["bf16, with an fp32 master"]) - curves["exact"]).max() <= 2**-8  # half an ulp

# %% [markdown]
# ### AdamW with masters
#
# *Core, 5 minutes.*
#
# Here is the whole optimizer step. Of its five arrays `weight` has 2 bytes, and so may have the gradient it is given:


# %%
import math

from minipar.more.precision import MixedPrecisionAdamW, enable_two_bytes
from minipar.nn import AdamW, Parameter

enable_two_bytes()  # before, parameters of 2 bytes would be multiplied in 2 bytes


def adamw_step(weight, master, m, v, gradient, step, lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8):
    gradient = gradient.astype(np.float32)  # wide before anything is squared or added
    m += (1 - beta1) * (gradient - m)
    v *= beta2
    v += (1 - beta2) * gradient**2
    master -= lr / (1 - beta1**step) * (m / (np.sqrt(v) / math.sqrt(1 - beta2**step) + eps))
    weight[...] = master  # rounds to the nearest


start = np.linspace(-2, 2, 500, dtype=np.float32).astype(bf16)
ours = start.copy()
parameter = Parameter(start.copy())
state = ours.astype(np.float32), np.zeros(500, np.float32), np.zeros(500, np.float32)
library = MixedPrecisionAdamW([parameter], lr=1e-3)
for i in range(1, 11):
    parameter.grad = np.random.default_rng(i).normal(1, 0.3, 500).astype(bf16)
    adamw_step(ours, *state, parameter.grad, i)
    library.step()
assert same(ours, parameter.data) and np.array_equal(state[0], library.masters[0])
wide = start.astype(np.float32)
stuck = to_bf16(wide - np.float32(1e-3)) == start
assert (state[0] < wide - 0.008).all() and stuck[np.abs(wide) > 0.5].all()
say(f"ten steps: our masters and weights = AdamW's; without masters {stuck.mean():.0%} of these would stand still")

# %% [markdown]
# The library's version is the same, with weight decay: AdamW, which updates what `value(i)` returns, and a subclass in
# which that is the master. Parameters of 4 or 8 bytes have no masters:

# %%
if rank == 0:
    show_source(AdamW.update, MixedPrecisionAdamW.update)

# %% [markdown]
# ### An aside: stochastic rounding
#
# *Deeper, 4 minutes.*

# %% [markdown]
# There is another way, without a master: round up or down *by chance*, up with a probability that is the distance from
# the lower neighbour in ulps (Gupta et al. 2015, arXiv 1502.02551). Each single result is worse than the nearest one.
# But its mean is exact, so small steps are not lost: of four steps of a quarter ulp, one on average moves the weight.
# On bits it is simpler than the cast above: add 16 random bits to the 16 that are cut off, and let the carry decide.


# %%
def round_by_chance(x, random):
    """Round float32 to bfloat16, up with the probability of the distance from the lower neighbour."""
    return ((x.view(np.uint32) + random.integers(0, 2**16, x.shape, np.uint32)) >> 16).astype(np.uint16).view(bf16)


random = np.random.default_rng(7)
many = np.full(100_000, 1 + 2**-9, np.float32)
mean = to_fp32(round_by_chance(many, random)).mean(dtype=float)
deviation = 2**-7 * np.sqrt(3 / 16 / many.size)  # of a mean of values that are 1 or 1 + 2^-7, these a quarter of all
assert abs(mean - (1 + 2**-9)) < 4 * deviation and set(to_bf16(many)) == {1}
assert same(round_by_chance(to_fp32(patterns), random), patterns)  # what needs no rounding is not changed
weight = np.ones(1, bf16)
curves["bf16, rounded by chance"] = [1.0]
for _ in range(steps):
    weight = round_by_chance(to_fp32(weight) + np.float32(update), random)
    curves["bf16, rounded by chance"].append(float(weight[0]))
say(f"1 + {2**-9:.6f}, rounded {many.size:,} times: the mean is 1 + {mean - 1:.6f} by chance, 1 to the nearest")
if rank == 0:
    show(figures.plot_weight(curves, 2**-9, 2**-8), "13_chance")

# %% [markdown]
# Stochastic rounding saves 4 bytes per parameter and is used where
# hardware supports it. Its noise grows with each step, and the result depends on random bits, which a proof "bit for
# bit" would have to key as chapter 2 keys dropout. Masters are the standard.

# %% [markdown]
# ## 13.3 Bytes per parameter
#
# *Core, 6 minutes.*
#
# In fp32 a run holds 16 bytes of model state per parameter: parameter and gradient 4 bytes each, and two moments of 4.
# In bf16 parameters have 2 bytes, and activations too. Gradients of several microbatches are added up, and a sum in
# bf16 loses terms as a weight loses updates. So most frameworks add up in fp32, and so does the library.
#
# **Predict**: how many bytes of model state per parameter does such a run in bf16 hold?

# %%
predict("bytes of model state per parameter", ...)  # replace the dots by a number

# %% [markdown]
# The ledger of chapter 5 says what a run really holds. Here a small GPT trains over our ranks at each ZeRO stage:

# %%
from chapters.support.training import step_layout
from minipar.comm import DeviceMesh
from minipar.memory import MemoryLedger
from minipar.parallel.predicted_memory import elements_placed, model_state
from minipar.plan.layout import PRECISIONS
from minipar.train.data import load_tokens
from minipar.train.flags import parse
from minipar.train.trainer import Trainer

text = load_tokens(None, vocab_size=256, seq_len=32)


def trainer_for(flags, kind=Trainer, **axes):
    axes = axes or {"dp": P}
    mesh = " ".join(f"--{axis} {size}" for axis, size in axes.items())
    args = parse(f"{train.MODEL} --steps 3 {mesh} {flags}".split(), P)
    return kind(args, DeviceMesh(comm, **axes), text)


def held_by(flags):
    """Train and return the trainer, and the bytes of parameters, gradients and optimizer at all moments of a step."""
    ledger = MemoryLedger()
    with ledger.recording():
        trainer = trainer_for(f"--dtype bfloat16 --global-batch {P} {flags}")
        list(trainer.train())
    return trainer, {kinds[:3] for _, kinds in ledger.moments}


for stage in range(4):
    trainer, held = held_by(f"--zero-stage {stage}")
    psi, own = elements_placed(step_layout(trainer.args).placements(), rank)
    expected = model_state(psi, own, stage, PRECISIONS["bf16"])
    assert psi == sum(trainer.sizes.values())
    assert held == {(expected.parameters, expected.gradients, expected.optimizer)}
    if stage == 0:
        assert held == {(2 * psi, 4 * psi, 12 * psi)}
        reveal("bytes of model state per parameter", expected.total // psi, say)
    equal = f"18 Psi, Psi = {psi:,}" if stage == 0 else "the formula's"
    say(f"stage {stage}: {expected.total:>7,} bytes on rank 0 = {equal}")

# %% [markdown]
# Weight 2 bytes, gradient 4, master 4, two moments 4 each: $2 + 4 + 12 = 18$. **Training in 16 bits saves no model
# state**; with fp32 gradients it takes 2 bytes more than fp32 (but ZeRO's stages save more of it, since they divide the
# 12). It saves activations, the bytes of all messages but sums (13.7), and time. The ZeRO paper's 16 bytes (chapter 5)
# have gradients in bf16. Some frameworks add up in fp32 and sum over ranks in bf16 (13.5): then plain data parallelism
# has the gradient in both, 20 bytes. The ledger and the formula are equal at every moment of a step. As a command line:
# `--dtype bfloat16 --memory out/memory.json`.

# %% [markdown]
# ## 13.4 Gradients that vanish
#
# *Core, 8 minutes.*
#
# fp16 begins at $2^{-24}$, and what is below half of that becomes zero. Is a gradient so small? The loss is a mean over
# the tokens of a step, so backward begins with 1 / tokens: $2^{-9}$ in our small run, $2^{-22}$ in one with 4 million.
# The weights' gradients are sums over tokens; the *activations'* gradients, of which they are made, are not.
#
# The remedy is one multiplication: **scale the loss**. If the loss is $2^{16}$ times as large, so is each gradient of
# the backward pass, by the chain rule. After the last microbatch the trainer divides the gradients by the scale, in
# fp32, **before it clips**: a norm of scaled gradients is $2^{16}$ times too large, so that every step would be clipped
# to nearly nothing. (In PyTorch `scaler.unscale_(optimizer)` comes before `clip_grad_norm_`.) A power of two changes no
# mantissa. How large? We compute one gradient of a small GPT (512 tokens) with each scale, and compare it with that in
# fp32:

# %%
from chapters.support.share_work import shared

exact = train.first_gradient("float32")
scales = list(range(-26, 29, 2))
errors = {"fp16": [], "bf16": []}
for (_, found), dtype in zip(errors.items(), ("float16", "bfloat16"), strict=True):
    jobs = [(dtype, 2.0**power) for power in scales]
    gradients = shared(comm, lambda *job: float(np.linalg.norm(train.first_gradient(*job) - exact)), jobs)
    found += [error / float(np.linalg.norm(exact)) for error in gradients]
best = min(errors["fp16"])
window = [power for power, error in zip(scales, errors["fp16"], strict=True) if error < 1.5 * best]
assert window[0] <= 2 and window[-1] >= 16 and errors["fp16"][scales.index(-12)] > 0.5 > 2**-8 > max(errors["bf16"])
say(f"relative error: fp16 {best:.1e} with scales from 2^{window[0]} to 2^{window[-1]}; bf16 {errors['bf16'][0]:.1e}")
say(f"fp16 with 2^-12, as if a step had 2 million tokens: {errors['fp16'][scales.index(-12)]:.1f}")
if rank == 0:
    show(figures.plot_scales(train.activation_gradients(), 16, errors, scales), "13_scales")

# %% [markdown]
# The left picture shows the gradients of all activations, computed in fp32, and what fp16 has room for. The right one
# shows the error of the weights' gradient, which is made of them. With fp16 there is a window. To its left values
# vanish; to its right they become infinite (such points are not drawn). Our small run needs no scale, as $2^0$ is just
# inside; the run with 2 million tokens would learn nothing. bf16 has fp32's range and needs no scale, and that is why
# it has taken over. In the window its error is 8 times that of fp16.

# %% [markdown]
# ### A loop that finds the scale
#
# *Deeper, 12 minutes.*

# %% [markdown]
# The window moves as a training goes on. So the scale is found by trial: start with $2^{16}$; if a gradient is infinite
# or NaN, *skip the step* and halve the scale; after 2000 good steps in a row double it. A skipped step costs little.
#
# One question is left: the sum over ranks is a reduce-scatter, as in ZeRO, so each rank sees only its chunk of it. Who
# decides that a step is good? **[Exercise 19](exercises/e19_loss_scaling.py)** asks for such a step over ranks. Write
# it before you open the cell after the next one: `make exercises PYTEST="-k e19"`.
#
# The problem on plain arrays: weights `whole` shall become `targets`. Weight $i$ has the gradient `slopes[i]` times its
# distance, and the slopes lie between $2^{-34}$ and 1. The last weight is special: only the last rank has a gradient
# for it, and that one overflows fp16 at the first scale.

# %%
from minipar.more.precision import LossScale
from minipar.train.scaled_trainer import ScaledTrainer

LOSS_SCALE = LossScale().factor  # 2^16, at the start
size = 8 * P
slopes = np.geomspace(2.0**-34, 1 / P, size)
targets = np.ones(size)
targets[-1] = P if rank == P - 1 else 0  # the mean over the ranks is 1, everywhere
begin, end = chunk_bounds(size, P)[rank]  # this rank's chunk


# %% tags=["hide-input"]
def next_scale(scale, good, finite, patience=2000):
    """Return the scale of the next step, and the good steps since it changed."""
    if not finite:
        return scale / 2, 0
    if good + 1 == patience:
        return scale * 2, 0
    return scale, good + 1


def descend(is_good, scale=LOSS_SCALE):
    """Take 60 steps. Return all weights, and the scale in each step; those of skipped steps are negative.

    is_good: decides whether this rank takes a step, from whether its own chunk of the sum is finite
    """
    whole = np.zeros(size)
    good = 0
    scales = []
    for _ in range(60):
        with np.errstate(over="ignore", invalid="ignore"):
            gradient = (scale * slopes * (whole - targets)).astype(np.float16)  # may vanish, or become infinite
            chunk = comm.reduce_scatter(gradient.astype(np.float32))  # the sum is in fp32
        finite = is_good(np.isfinite(chunk).all())
        scales.append(scale if finite else -scale)
        own = whole[begin:end]
        if finite:  # as AdamW does, each step is relative to the gradient's own size
            own = own - 0.3 * chunk / scale / P / slopes[begin:end]
        scale, good = next_scale(scale, good, finite, patience=20)
        whole = comm.all_gather(own)
    return whole, scales


def all_agree(mine):
    return not comm.all_reduce(np.array([float(not mine)]), op="max")[0]


# %% [markdown]
# We run it three times: all ranks agree on each step; without a scale; and each rank decides for itself.

# %%
whole, agreed = descend(all_agree)
every = comm.all_gather(np.array(agreed)).reshape(P, -1)
assert (every == agreed).all() and agreed[:2] == [-LOSS_SCALE, LOSS_SCALE / 2]
assert np.abs(whole - 1).max() < 0.01
unscaled, _ = descend(all_agree, scale=1.0)
alone, by_itself = descend(lambda mine: mine)
say(f"all ranks agree: {sum(x < 0 for x in agreed)} of 60 steps skipped, errors up to {np.abs(whole - 1).max():.1e}")
assert (unscaled == 0).any()
say(f"without a scale {np.mean(unscaled == 0):.0%} of the weights never move")
if P > 1:
    every = comm.all_gather(np.array(by_itself)).reshape(P, -1)
    assert (every != every[0]).any() and np.abs(alone - 1).max() > 0.1
    say(f"each rank for itself: after a step their scales are 2^{np.log2(np.abs(every[:, 1])).astype(int).tolist()}")
    say(f"and the weights end with errors up to {np.abs(alone - 1).max():.2f}; nothing says so")
assert [next_scale(8.0, 0, False), next_scale(8.0, 1999, True), next_scale(8.0, 5, True)] == [(4, 0), (16, 0), (8, 6)]

# %% [markdown]
# The infinity of one rank arrives in one chunk, after the reduce-scatter. That chunk's owner skips the step. If the
# others do not, the ranks hold parameters of different steps, and from then on they scale their losses differently and
# add up what cannot be added. So **all ranks of all axes must agree before anybody steps**. In PyTorch's GradScaler the
# flag is called `found_inf`, and who forgets to reduce it over a new axis has this bug (a second way to have it: to
# read the flag before the all-reduce has arrived, [pytorch, pull request
# 115710](https://github.com/pytorch/pytorch/pull/115710)).
#
# The library sends no flag. Each step needs the norm of the whole gradient anyway, which is a sum over all ranks of all
# axes (chapter 9). An infinity anywhere makes that sum infinite or NaN, and all ranks have the same value of it:

# %%
if rank == 0:
    show_source(ScaledTrainer.gradient, ScaledTrainer.update, LossScale.update)
for stage in (0, 2, 3):
    trainer = trainer_for(f"--zero-stage {stage} --dtype float16 --global-batch {P}", train.OverflowingTrainer)
    steps_taken = [(trainer.scale.values["skipped"], trainer.optimizer.steps) for _ in trainer.train()]
    assert steps_taken == [(0, 1), (1, 1), (1, 2)] and trainer.scale.factor == LOSS_SCALE / 2
say(f"an overflow on rank {P - 1} in the second step: every rank skipped it, and the scale is 2^15 everywhere")

# %% [markdown]
# In bf16 there is no scale, and an infinity means that the training has diverged. The run stops with an error that
# names step, rank and parameter.

# %% [markdown]
# ## 13.5 The sum over ranks
#
# *Core, 8 minutes.*
#
# **Predict**: 512 ranks hold the value 1 each and add up in bf16, one after the other. What is the sum?

# %%
predict("the sum of 512 ones in bf16", ...)  # replace the dots by a number

# %% [markdown]
# In a ring all-reduce a chunk travels from rank to rank, and each adds its own values (chapter 3). If the messages are
# bf16, each partial sum is rounded: $p - 1$ times, by at most $2^{-8}$ of itself. And a partial sum is at most the sum
# of all absolute values. So
#
# $$\lvert \text{ring sum} - \text{sum} \rvert \;\le\; (p-1)\, 2^{-8} \sum_r \lvert G_r \rvert .$$
#
# (To first order, and in fact always: Rump 2012, BIT 52.) If the sum is computed in fp32, there are **two roundings
# whatever $p$** is: that of each gradient to bf16, and that of the sum. Here is a ring sum on plain arrays, and it has
# the bits of the library's all-reduce over our ranks:


# %%
def ring_sum(terms, dtype=bf16):
    """Return the sum over p rows in the order of a ring: chunk c from rank c + 1 on, and around to rank c."""
    p, n = terms.shape
    chunk = np.repeat(np.arange(p), [stop - start for start, stop in chunk_bounds(n, p)])
    order = (chunk + 1 + np.arange(p)[:, None]) % p  # (p, n): which rank's value comes when
    ordered = np.take_along_axis(terms, order, axis=0).astype(dtype)
    total = ordered[0]
    for row in ordered[1:]:
        total = total + row  # in bf16: ml_dtypes adds in fp32 and rounds the result
    return total


terms = np.random.default_rng(5).normal(size=(P, 1001)).astype(bf16)
assert same(ring_sum(terms), comm.all_reduce(terms[rank].copy(), algorithm="ring"))
reveal("the sum of 512 ones in bf16", float(ring_sum(np.ones((512, 1), bf16))[0]), say)


def largest_error(terms, dtype):
    """Return the largest error of the ring sum, rounded to bf16, in units of sum |G|."""
    wide = terms.astype(np.float64)
    return float((np.abs(ring_sum(terms, dtype).astype(bf16) - wide.sum(axis=0)) / np.abs(wide).sum(axis=0)).max())


RANKS = [2**i for i in range(1, 11)]
of_gpt = train.sample_gradients(128).astype(bf16)  # of the first MLP's matrix: one row for each of 128 samples
alike = np.random.default_rng(6).uniform(1, 1.2, (1024, 256)).astype(bf16)
lines = {
    "bf16, terms that are nearly equal": [largest_error(alike[:p], bf16) for p in RANKS],
    "bf16, gradients of samples": [largest_error(of_gpt[:p], bf16) for p in RANKS[:7]],
    "fp32, gradients of samples": [largest_error(of_gpt[:p], np.float32) for p in RANKS[:7]],
}
bounds = [(p - 1) / 2**8 for p in RANKS]
first, second, third = lines.values()
for line in (first, second):
    assert all(error <= bound for error, bound in zip(line, bounds, strict=False))
assert max(third) <= 2**-8 and first[-1] > 0.5 and second[-1] > 3 * third[-1]
if rank == 0:
    show(figures.plot_ring_error(RANKS, lines, bounds), "13_ring_error")
for name, line in lines.items():
    say(f"{name:<34} p = 2: {line[0]:.1e}, p = {RANKS[len(line) - 1]}: {line[-1]:.1e}")

# %% [markdown]
# **The sum stands still**, for the reason of 13.2. At 256 the next bf16 value is 258, and $256 + 1$ is rounded back, to
# the even one. However many ones follow, the sum stays. The nearly equal terms end with an error of more than a half.
# The gradients of samples have different signs, so their partial sums stay smaller. Their error grows with $p$ all the
# same, and in fp32 it does not.

# %% [markdown]
# ## 13.6 A run that trains on 96 ranks and fails on 384
#
# *Deeper, 8 minutes.*

# %% [markdown]
# In 2023 somebody reported that a Llama of 1 and of 7 billion parameters trained well on 12 hosts of 8 GPUs and became
# unstable on 48 hosts. The cause was `reduce_dtype=bf16` ([pytorch, issue
# 106395](https://github.com/pytorch/pytorch/issues/106395)). 96 and 384: between them is $2^8$.
#
# We have no 384 GPUs, but we can build the mechanism. **What follows is constructed**: the model is a vector $\theta$,
# rank $r$ wants it to be $t_r$, and its gradient is $\theta - t_r$, with some noise. The mean of the $t_r$ is the
# solution. On all ranks but one, $t_r$ lies a bit to one side of it. One rank has read other data, and its $t_r$ lies
# $p - 1$ times as far on the other side. So at the solution one large gradient is balanced by $p - 1$ small ones, as at
# a rare token that only one rank has seen. Everything else is as in data parallelism: gradients are rounded to bf16,
# summed around the ring, divided by $p$, and the step is taken in fp32.


# %%
def distances(p, dtype, steps=30, n=192, offset=12.0):
    """Train over p ranks with sums in this dtype; return the squared distance to the solution, 1 at the start."""
    random = np.random.default_rng(0)
    solution, side = random.normal(size=(2, n))
    aside = np.full(p, -1.0)
    aside[0] = p - 1
    theta = np.zeros(n)
    found = []
    for _ in range(steps):
        found.append(float(((theta - solution) ** 2).sum() / (solution**2).sum()))
        gradients = theta - (solution + offset * aside[:, None] * side) + 0.1 * random.normal(size=(p, n))
        theta = theta - 0.25 * ring_sum(gradients.astype(bf16), np.dtype(dtype)).astype(float) / p
    return found


CASES = [(96, "bfloat16"), (384, "bfloat16"), (96, "float32"), (384, "float32"), (12, "bfloat16"), (48, "bfloat16")]
NAMES = [f"{p} ranks, sums in {'bf16' if dtype == 'bfloat16' else 'fp32'}" for p, dtype in CASES]
runs = dict(zip(NAMES, shared(comm, distances, CASES), strict=True))
for name, run in runs.items():
    say(f"{name:<24} squared distance: 1 at the start, {run[-1]:.4f} in the end")
ends = [run[-1] for run in runs.values()]
assert ends[1] > 1 > 0.2 > ends[0] > max(ends[2:]) and ends[0] > 100 * max(ends[2:4])

partial = {"exact": 1 - np.arange(385) / 385}
for p in (96, 384):
    sums = [np.float32(p).astype(bf16)]
    for _ in range(p - 1):
        sums.append((sums[-1] - np.float32(1)).astype(bf16))
    partial[f"bf16, {p} ranks"] = np.array(sums, np.float64) / p
assert float(partial["bf16, 96 ranks"][-1]) * 96 == 1 and set(partial["bf16, 384 ranks"]) == {1}
if rank == 0:
    show(figures.plot_standing_still(partial, dict(list(runs.items())[:4]), 1.0), "13_standing_still")

# %% [markdown]
# Left: the partial sums of one element whose first term is $p - 1$ times as large as the others and has the other sign
# (here $p$, and then $p - 1$ times $-1$). With 96 terms the sum comes down. With 384 it stands still. Near 384 bf16
# values are 2 apart: 383 lies halfway between 382 and 384, and the tie goes to the even mantissa, 384. Right: with 96
# ranks the squared distance to the solution falls to a tenth, and stays there, because terms that are no whole numbers
# are rounded in each addition. With 384 it ends *farther* away than it began: much of what the 383 ranks say is lost,
# and $\theta$ moves until the rest is balanced. With sums in fp32 both arrive, with the same gradients in bf16. What
# counts is not the precision of the terms, but that of the sum. (The printed lines have 12 and 48 ranks as well: the
# fewer the ranks, the nearer they come.)
#
# Be careful with the other direction: that a run trains well with bf16 sums on 4 ranks (13.8) proves nothing about 512.
#
# **In fp16, divide before the sum or after it?** A sum of $p$ gradients can be $p$ times as large as one, and end above
# 65,504. If each rank divides by $p$ first, small gradients fall below $2^{-24}$ and vanish. PyTorch's `fully_shard`
# divides by about $\sqrt p$ before the sum and by the rest after it, if the sum is fp16. In the library the question
# does not arise: the loss is divided by the global count of tokens, and sums are fp32. bf16 has the range of fp32, so
# there neither order overflows or vanishes.

# %% [markdown]
# ## 13.7 Where the library rounds
#
# *Core, 4 minutes.*
#
# "Trained in bf16" says little; which values are rounded? In the library an operation with inputs of 2 bytes gets fp32
# arrays. What it returns, and what forward saves for backward, is rounded. So a matrix product adds up in fp32 and
# rounds once, as a GPU's tensor cores (its units for matrix products) do, and so do a softmax and a norm.
#
# | value | dtype | why |
# | --- | --- | --- |
# | weights and activations, and messages that hold them | bf16 | memory, bytes, products |
# | inside an operation: products, softmax, norms, the loss | fp32 | sums of many terms |
# | the residual stream, a sum over $2L$ results | bf16, rounded after each addition | memory; see below |
# | values of rows that are kept: a log-sum-exp | fp32 | near 5 bf16 errs by up to $2^{-6}$, 1.6 % of each probability |
# | gradients of activations | bf16 | memory, bytes, products |
# | gradients of weights, added up over microbatches | fp32 | a sum (13.3) |
# | sums over ranks, of dp, cp and tp | fp32 | a sum (13.5) |
# | masters, moments, the update | fp32 | small differences (13.2) |
# | loss, norm of the gradient | fp32, added up in float64 | sums over everything |
#
# Why may the residual stream be rounded, when other sums may not? It has only $2L$ terms, most of which are not small
# beside the sum, and nothing is added to it again in the next step: an error of $2^{-8}$ per addition stays one of this
# token in this step. A weight's lost update is lost in every step. Where $L$ is large and the stream grows, results of
# late layers do lose bits. Megatron-LM has `--fp32-residual-connection` for that, which doubles the stream's bytes.

# %% [markdown]
# ### One file, and equal bits
#
# *Deeper, 6 minutes.*

# %% [markdown]
# The rounding is a node around the operation's own node, and no operation knows of it. `enable_two_bytes` adds it to
# `node_wrappers`, the functions that may put another node in the place of an operation's:

# %%
from minipar.more import precision

if rank == 0:
    show_source(precision.rounded, precision.Rounded)

# %% [markdown]
# Rounding is a function of its input like any other, so the proofs of the other chapters hold: where the order of sums
# is the same, the bits are the same. In each of these layouts, trainings in bf16 and in fp16 have **the bits of one
# device** that computes all of it alone:

# %%
from minipar.train.verify import verify

LAYOUTS = [({"dp": P}, f"--layers 1 --zero-stage {stage}") for stage in range(4)]
if P > 1:
    LAYOUTS.append(({"pp": P}, f"--layers {P} --schedule 1f1b"))
if P > 2 and P % 2 == 0:
    LAYOUTS.append(({"dp": P // 2, "pp": 2}, "--schedule zb-h1 --zero-stage 1"))
KINDS = {"bfloat16": Trainer, "float16": ScaledTrainer}
SMALL = f"--hidden 16 --seq-len 8 --microbatches 2 --global-batch {2 * P} --steps 2 --clip-grad 0.5"
for axes, flags in LAYOUTS:
    for dtype, kind in KINDS.items():
        trainer = trainer_for(f"{SMALL} {flags} --dtype {dtype} --reduction ordered", kind, **axes)
        verdict = verify(trainer, list(trainer.train()))
        assert verdict.passed and "bit for bit" in verdict.line, verdict.line
    name = " ".join(f"{axis} {size}" for axis, size in axes.items())
    say(f"{name} {flags}: the bits of one device, in both")

# %% [markdown]
# (All ZeRO stages equal one device, so they equal each other.) A value of 2 bytes counts as two on the wire. The sums
# over dp are fp32, so their bytes are those of fp32; a pipeline's activations take half. Of a step:

# %%
from chapters.support.training import step_traffic

for axes in ({"dp": P}, {"pp": P}):
    for dtype in ("float32", "bfloat16"):
        trainer = trainer_for(f"--layers {P} --dtype {dtype} --global-batch {P}", **axes)
        trainer.step(0)
        comm.traffic.reset()
        trainer.step(1)
        (axis,) = axes
        sent = comm.traffic.bytes(axis=axis)
        assert sent == step_traffic(trainer.args, rank)[axis]
        say(f"{dtype}: rank 0 sends {sent:>7,} bytes over {axis} {P}")

# %% [markdown]
# ## 13.8 Four trainings
#
# *Core, 5 minutes.*
#
# Does one see all this in a loss? A small GPT learns Python's text for 200 steps, with a learning rate that falls from
# $5 \cdot 10^{-4}$ to a tenth of it: in fp32; in bf16; in bf16 *without masters*, where AdamW starts from the rounded
# weight (its moments are fp32, and it computes in fp32); and in bf16 with sums in bf16, over 4 ranks.
#
# **Predict**: which share of the LayerNorms' weights, which begin at 1, is still 1 after the run without masters? And
# after the run in bf16 with masters?

# %%
predict("share of weights of LayerNorms that never moved, without masters", ...)  # a value from 0 to 1
predict("share that is 1 with masters", ...)

# %%
if rank == 0:
    show_source(train.WithoutMasters, train.SumsInBfloat16)
RUNS = {
    "fp32": ("",),
    "bf16": ("--dtype bfloat16",),
    "bf16 without masters": ("--dtype bfloat16", False),
    "bf16 sums over 4 ranks": ("--dtype bfloat16", True, 4),
}
trained = dict(zip(RUNS, shared(comm, train.train_precision, list(RUNS.values())), strict=True))
final = {name: float(np.mean(losses[-20:])) for name, (losses, _) in trained.items()}
for name, (_, untouched) in trained.items():
    say(f"{name:<24} loss of the last 20 steps {final[name]:.3f}, weights of LayerNorms still 1: {untouched:.0%}")
reveal("share of weights of LayerNorms that never moved, without masters", trained["bf16 without masters"][1], say)
reveal("share that is 1 with masters", trained["bf16"][1], say)
behind = np.subtract(trained["bf16 without masters"][0], trained["fp32"][0])
assert behind[-20:].mean() > 0.1 and behind[-20:].mean() > 1.5 * behind[100:120].mean()
assert all(abs(final[name] - final["fp32"]) < 0.02 for name in ("bf16", "bf16 sums over 4 ranks"))
assert abs(final["bf16"] - 3.48) < 0.02 and abs(final["bf16 without masters"] - 3.63) < 0.02  # as the first page says
assert trained["bf16 without masters"][1] == 1 > 0.2 > trained["bf16"][1]
if rank == 0:
    show(figures.plot_losses({name: losses for name, (losses, _) in trained.items()}, 20), "13_losses")

# %% [markdown]
# bf16 with masters is on fp32's curve. So are the sums in bf16: with 4 ranks and this model they do no harm that we
# could measure. Without masters the loss is worse by a seventh of a nat, and the distance grows as the learning rate
# falls, because ever more weights stand still. *Not one* weight of a LayerNorm has moved: they begin at 1, where half
# an ulp is $2^{-8}$ upwards and $2^{-9}$ downwards, and $\eta$ is at most about a quarter of that. (With masters some
# copies are still 1, too. Their masters are not.) Nothing else shows it: the gradients are right, and so is their norm.

# %% [markdown]
# ## 13.9 Eight bits
#
# *Deeper, 8 minutes.*

# %% [markdown]
# Hardware since 2022 multiplies matrices of **fp8**, twice as fast as bf16 (Micikevicius et al. 2022, arXiv
# 2209.05433). There are two kinds: **e4m3** for weights and activations, and **e5m2**, which reaches further, for
# gradients. e4m3 has no infinities and one NaN: the other patterns of the largest exponent are values, so it ends at
# 448 instead of 240.

# %%
e4m3 = np.dtype(ml_dtypes.float8_e4m3fn)
e5m2 = np.dtype(ml_dtypes.float8_e5m2)
table("fp8 e4m3", e4m3, 448.0, *limits(4, 3)[1:])
table("fp8 e5m2", e5m2, *limits(5, 2))
assert limits(4, 3)[0] == 240 and limits(4, 3)[3] == 2**-4 and limits(5, 2)[0] == 57344


def relative_errors(dtype, powers):
    """Return the largest relative error of rounding values of each power of two; nan where all are too large."""
    values = np.linspace(1, 2, 4000, endpoint=False) * 2.0 ** powers[:, None]
    with np.errstate(over="ignore", invalid="ignore"):
        errors = np.abs(values.astype(dtype).astype(float) / values - 1)
    fits = values <= float(ml_dtypes.finfo(dtype).max)
    return np.where(fits.any(axis=1), errors.max(axis=1, where=fits, initial=0), np.nan)


powers = np.arange(-30, 18)
kinds = {"bf16": bf16, "fp16": np.dtype("float16"), "fp8 e4m3": e4m3, "fp8 e5m2": e5m2}
roundoff = {name: relative_errors(dtype, powers) for name, dtype in kinds.items()}
assert all(0.85 < np.nanmin(roundoff[name]) / limits(*FORMATS[name])[3] < 1 for name in kinds)
if rank == 0:
    largest = {name: float(ml_dtypes.finfo(dtype).max) for name, dtype in kinds.items()}
    show(figures.plot_roundoff(powers, roundoff, largest), "13_roundoff")

# %% [markdown]
# The normal values of e4m3 span 15 powers of two, and a tensor must lie inside them. So each tensor gets a *scale* of
# its own, which maps its largest absolute value to the largest of the format, as the loss scale did for all at once:


# %%
def to_fp8(x, dtype):
    """Return x in 8 bits, and the scale that it was multiplied by."""
    scale = float(ml_dtypes.finfo(dtype).max) / np.abs(x).max()
    return (x * scale).astype(dtype), scale


random = np.random.default_rng(8)
x = random.normal(size=(64, 512))
w = 1e-3 * random.normal(size=(512, 64))


def product_error(a, b, scale=1.0):
    product = a.astype(np.float32) @ b.astype(np.float32) / scale  # adds up in fp32
    return float(np.linalg.norm(product - x @ w) / np.linalg.norm(x @ w))


x8, x_scale = to_fp8(x, e4m3)
w8, w_scale = to_fp8(w, e4m3)
found = [product_error(x.astype(bf16), w.astype(bf16)), product_error(x8, w8, x_scale * w_scale)]
found.append(product_error(x.astype(e4m3), w.astype(e4m3)))
for name, error in zip(("bf16", "fp8 with scales", "fp8 without"), found, strict=True):
    say(f"a product over 512 terms in {name:<16} relative error {error:.4f}")
assert found[0] < 2**-8 < found[1] < 2**-4 < found[2]

# %% [markdown]
# An error of a few percent, and yet models train so, because of what fp8 is *not* used for. Only the operands of matrix
# products are 8 bits, in forward and backward. The product adds up in fp32 and gives bf16. Masters, moments, sums over
# ranks, norms, softmax, embedding and head stay as they were. Finer scales, one for each 128 values, are the next step
# (DeepSeek-V3, arXiv 2412.19437). The library has no fp8.

# %% [markdown]
# ## 13.10 Names elsewhere
#
# *Deeper, 2 minutes.*

# %% [markdown]
# | minipar | Megatron-LM | DeepSpeed | PyTorch |
# | --- | --- | --- | --- |
# | `--dtype bfloat16` | `--bf16` | `bf16: {enabled: true}` | `MixedPrecisionPolicy`, `torch.autocast` |
# | `--dtype float16` | `--fp16` | `fp16: {enabled: true}` | the same, and `GradScaler` |
# | `MixedPrecisionAdamW.masters` | `main_param` | `single_partition_of_fp32_groups` | parameters kept in fp32 |
# | fp32 gradients (13.3) | `--accumulate-allreduce-grads-in-fp32` | `data_types.grad_accum_dtype` | `reduce_dtype` |
# | fp32 sums (13.5) | `--grad-reduce-in-bf16` | `communication_data_type` | `reduce_dtype` |
# | start at $2^{16}$ | `--initial-loss-scale` | `initial_scale_power: 16` | `init_scale=2.**16` |
# | 2000 good steps | `--loss-scale-window` | `loss_scale_window` | `growth_interval=2000` |
# | the run ends below 1 | `--min-loss-scale` | `min_loss_scale` | |
#
# The names are alike, the defaults are not always. With PyTorch's DDP your loss function divides by the tokens of a
# rank, and DDP divides the gradients by the ranks when it sums them. So the gradients of activations are $d$ times as
# large as ours (13.4). `torch.autocast` leaves
# parameters, gradients and optimizer in fp32 (16 bytes), and casts the inputs of products. `--dtype bfloat16` has bf16
# weights, and fp32 masters.
#
# The same in PyTorch: [chapters/pytorch/ch13.py](pytorch/ch13.py).

# %%
if rank == 0:
    show_file("chapters/pytorch/ch13.py")

# %% [markdown]
# ## 13.11 Problems
#
# *Deeper, 20 minutes.*

# %% [markdown]
# 1. AdamW's steps are $3 \cdot 10^{-4}$, and there are no masters. Up to which size do bf16 weights learn? And fp16
# weights?
#
# 2. A model of 7 billion parameters, ZeRO stage 1 over 64 ranks. How many GB of model state has a rank with gradients
# in bf16, and how many with gradients in fp32?
#
# 3. All absolute values of an fp16 run's gradients are between $2^{-30}$ and $2^{-2}$. With which loss scales are all
# normal values?
#
# 4. The ranks of a pipeline's third stage find an infinity in their gradients. Their dp group agrees to skip. The other
# stages step. What is wrong afterwards?
#
# 5. 1024 ranks sum in bf16. What is the bound's factor in a ring? In a hierarchical sum, rings of 8 inside a host and
# then rings over 128 hosts? In recursive doubling?
#
# 6. A matrix product over 4096 terms. What is the bound with partial sums in bf16, and what with partial sums in fp32,
# if the result is rounded to bf16?

# %% [markdown]
# ## 13.12 Answers
#
# *Deeper, 5 minutes.*

# %% [markdown]
# <details><summary>Answers</summary>
#
# 1. Half an ulp of the values from $2^k$ to $2^{k+1}$ is $2^{k-8}$ in bf16, and must be less than $3 \cdot 10^{-4}$: $k
# \le -4$, so weights below $2^{-3} = 0.125$ learn. In fp16, with $2^{k-11}$, weights below 1.
#
# 2. $4\Psi + 12\Psi/64 = 29.3$ GB, and $6\Psi + 12\Psi/64 = 43.3$ GB.
#
# 3. $2^{16}$ and $2^{17}$: $2^{-30}$ must become at least $2^{-14}$, and $2^{-2}$ at most 65,504.
#
# 4. The model is one of no step: its third stage has parameters of the step before. And the third stage halves its
# scale, while the gradients that it gets from the last stage, and those that it hands on, have another one. No stage
# sees an error.
#
# 5. 1023, $7 + 127 = 134$, and 10, each times $2^{-8}$: an addition in every round.
#
# 6. $4095 \cdot 2^{-8} \approx 16$ times the sum of absolute values, which says nothing. In fp32 $4095 \cdot 2^{-24}
# \approx 2.4 \cdot 10^{-4}$, and one rounding of $2^{-8}$ of the result.
#
# </details>

# %% tags=["hide-input"]
for dtype, largest in ((bf16, 0.125), (np.dtype("float16"), 1.0)):
    weights = np.geomspace(1e-3, 4, 5000).astype(dtype)
    learns = (weights.astype(float) + 3e-4).astype(dtype) != weights
    assert (learns == (weights < largest)).all()
assert [round(7 * (each + 12 / 64), 1) for each in (4, 6)] == [29.3, 43.3]  # GB
assert [k for k in range(40) if 2.0 ** (k - 30) >= limits(5, 10)[1] and 2.0 ** (k - 2) <= 65504] == [16, 17]
assert round(4095 / 2**8) == 16 and round(4095 / 2**24, 5) == 0.00024
say("the answers hold")

# %% tags=["active-ipynb"]
# %autopx

# %% tags=["active-ipynb"]
# # Back in one process: stop the eight.
# cluster.stop_cluster_sync()
