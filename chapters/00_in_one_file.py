# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 0. minipar in one file
#
# **How is one Transformer trained by many machines?**
#
# Eight devices train one GPT. They can divide the samples, the optimizer's memory, the matrices or the layers. Each way
# takes 10 to 90 lines of NumPy and mpi4py, and all of them stand in this file. The result stays the same: after five
# steps on eight devices, data parallelism and ZeRO agree in all 417,408 parameters to the last bit. And yet with ZeRO
# each device keeps only 834,816 of the optimizer's 6,678,528 bytes. At the end of this chapter you can say of each
# strategy what it divides, what it sends, and when.
#
# ![What each of eight devices holds under nine strategies, and what it sends](../visualize/gallery/strategies.png)
#
# *The whole course in one picture. A strip of eight full boxes says that every device has a copy. A staircase says that
# each device has its own eighth.*
#
# What a device does not hold, it must be sent: the right part of the picture says what. This file trains with data
# parallelism (0.6) and ZeRO 1 (0.7). Tensor parallelism (0.8) is shown on one pair of layers. For one device (0.1 to
# 0.3) and the pipeline (0.9) the file computes the gradient and does not train. Each part is checked at once, and most
# are compared with the library at the end, bit for bit.
#
# This file can be read first, or last as a summary. It answers exercises [1](exercises/e01_ring_reduce_scatter.py),
# [2](exercises/e02_all_reduce.py), [6](exercises/e06_zero1_step.py), [8](exercises/e08_column_row_layers.py) and
# [10](exercises/e10_one_f_one_b.py) of chapters 3 to 7. **Predict**: ZeRO 1 keeps an eighth of the optimizer's memory
# on each device. Does it send more bytes than data parallelism, as many, or fewer? Section 0.7 has the answer.

# %% tags=["active-ipynb"]
# from chapters.support.notebook import start
#
# cluster = start(8)

# %%
import math
import os

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # one core per rank, set before NumPy starts its threads
import numpy as np
from mpi4py import MPI

world = MPI.COMM_WORLD
r = world.rank  # this rank: a rank is one process; think of one GPU
p = world.size  # the number of ranks


def say(text):
    """Print on rank 0. Every rank computes and checks."""
    if r == 0:
        print(text)


def close(a, b):
    """Tell whether two arrays are equal within rounding, on the scale of the largest element."""
    return np.abs(a - b).max() <= 1e-12 * np.abs(b).max()


def same_on_all_ranks(array):
    """Tell whether all ranks have the same bits."""
    return world.allgather(array.tobytes()) == [array.tobytes()] * p


# %% [markdown]
# ## 0.1 A tensor that knows what it was computed from
#
# *Core, 4 minutes.*
#
# A `Tensor` keeps its inputs, and for each input a function that turns the result's gradient into that input's. Tensors
# are numbered as they are made, so a tensor's users have larger numbers than itself. Backward goes from large numbers
# to small ones: when backward reaches a tensor, every tensor that was computed from it has already sent its
# contribution.


# %%
class Tensor:
    """An array, the tensors it was computed from, and for each of them a function from gradient to gradient."""

    count = 0

    def __init__(self, data, inputs=(), gradients=()):
        Tensor.count += 1
        self.number = Tensor.count
        self.data = data
        self.inputs = inputs
        self.gradients = gradients
        self.grad = None

    def __add__(self, other):
        return add(self, other)

    def backward(self, gradient):
        """Add the gradient of sum(self * gradient) to `grad` of each tensor that was computed from nothing."""
        waiting = {self: gradient}
        while waiting:
            tensor = max(waiting, key=lambda each: each.number)
            g = waiting.pop(tensor)
            if not tensor.inputs:
                tensor.grad = g if tensor.grad is None else tensor.grad + g
            for x, gradient_of in zip(tensor.inputs, tensor.gradients, strict=False):  # an index has no gradient
                if x in waiting:
                    waiting[x] = waiting[x] + gradient_of(g)
                else:
                    waiting[x] = gradient_of(g)


def operation(rule):
    """Make an operation on tensors of a rule on arrays, which returns its result and a gradient for each input."""

    def apply(*inputs):
        arrays = [x.data if isinstance(x, Tensor) else x for x in inputs]
        result, *gradients = rule(*arrays)
        return Tensor(result, inputs, gradients)

    return apply


# %% [markdown]
# ## 0.2 Seven operations
#
# *Core, 8 minutes; the formulas are derived in chapters 1 and 2.*
#
# A GPT needs seven operations. Each computes its result, and states below it the gradient of every input. $B$ samples
# of $T$ tokens are $N = B T$ rows, one below the other, of $h$ elements each.


# %%
@operation
def add(x, y):
    return x + y, lambda g: g, lambda g: g


@operation
def linear(x, weight, bias=0.0):
    y = x @ weight + bias  # (N, in), (in, out), (out,) -> (N, out)
    return (
        y,
        lambda g: g @ weight.T,  # of x
        lambda g: x.T @ g,  # of the weight
        lambda g: g.sum(axis=0),  # of the bias
    )


@operation
def embedding(weight, index):
    def of_weight(g):
        order = np.argsort(index, kind="stable")  # equal indices stand side by side
        rows = index[order]
        starts = np.flatnonzero(np.diff(rows, prepend=-1))
        full = np.zeros_like(weight)
        full[rows[starts]] = np.add.reduceat(g[order], starts)  # a row that is used twice gets the sum of two
        return full

    return weight[index], of_weight  # (V, h), integers (N,) -> (N, h)


@operation
def layer_norm(x, weight, bias):
    h = x.shape[-1]
    centered = x - x.mean(axis=-1, keepdims=True)
    variance = np.einsum("ni,ni->n", centered, centered)[:, None] / h
    rstd = 1 / np.sqrt(variance + 1e-5)
    xhat = centered * rstd  # (N, h): each row has mean 0 and variance 1

    def of_x(g):
        gw = g * weight
        mean = gw.mean(axis=-1, keepdims=True)
        slope = (g * xhat * weight).mean(axis=-1, keepdims=True)
        return (gw - mean - xhat * slope) * rstd

    return (
        xhat * weight + bias,
        of_x,
        lambda g: (g * xhat).sum(axis=0),  # of the weight
        lambda g: g.sum(axis=0),  # of the bias
    )


@operation
def gelu(x):
    # GPT-2's approximation: x (1 + t) / 2 with t = tanh(s (x + c x^3)).
    c = 0.044715
    s = math.sqrt(2 / math.pi)
    t = np.tanh((x * x * c + 1) * x * s)
    # Its derivative is (1 + t) (1 + (1 - t) x s (1 + 3 c x^2)) / 2. Written with 1 - t it keeps the digits at t near 1.
    rest = 1 - t
    slope = ((x * x * (3 * c * s) + s) * x * rest + 1) * (2 - rest) * 0.5
    return (t + 1) * x * 0.5, lambda g: slope * g


@operation
def attention(qkv):
    # softmax(q k^T / sqrt(h/a) + mask) v for each of a heads: (N, 3h) -> (N, h)
    scale = (h // a) ** -0.5
    q, k, v = map(to_heads, np.split(qkv, 3, axis=-1))  # (B, a, T, h/a) each
    mask = np.triu(np.full((T, T), -np.inf), 1)  # a token sees none that come later
    scores = q @ k.swapaxes(2, 3) * scale + mask  # (B, a, T, T)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))  # without the maximum, exp overflows
    weights /= weights.sum(axis=-1, keepdims=True)
    output = weights @ v  # (B, a, T, h/a)

    def of_qkv(g):
        g = to_heads(g)
        # Softmax: ds = w (dw - sum_j w dw), and that sum is the product of the output and its gradient.
        delta = np.einsum("bhtd,bhtd->bht", g, output)[..., None]
        ds = g @ v.swapaxes(2, 3) - delta
        ds = ds * weights * scale
        dq = ds @ k
        dk = ds.swapaxes(2, 3) @ q
        dv = weights.swapaxes(2, 3) @ g
        return np.concatenate([from_heads(dq), from_heads(dk), from_heads(dv)], axis=-1)

    return from_heads(output), of_qkv


def to_heads(x):
    return x.reshape(-1, T, a, h // a).transpose(0, 2, 1, 3)  # (N, h) -> (B, a, T, h/a)


def from_heads(x):
    return x.transpose(0, 2, 1, 3).reshape(-1, h)  # (B, a, T, h/a) -> (N, h)


@operation
def cross_entropy_sum(logits, targets):
    # The sum of -log softmax(logits)[target]: (N, V), (N,) -> one value
    shifted = logits - logits.max(axis=-1, keepdims=True)
    total = np.exp(shifted).sum(axis=-1, keepdims=True)
    correct = shifted[np.arange(targets.size), targets]
    loss = (np.log(total[:, 0]) - correct).sum()

    def of_logits(g):
        softmax = np.exp(shifted) / total
        one_hot = np.eye(V)[targets]
        return (softmax - one_hot) * g

    return loss, of_logits


# %% [markdown]
# ## 0.3 A GPT
#
# *Core, 5 minutes.*
#
# GPT-2 with as many heads and layers as ranks, and with GPT-2's names. All parameters are views of one array, `flat`,
# on which collectives and optimizers work. The output head has the same values as the token embedding `wte`, and a
# gradient of its own. One device adds the two in the end; in the pipeline of 0.9 they stay on two ranks, and 7.7 adds
# them.

# %%
V = 256  # words in the vocabulary: bytes
T = 16  # tokens of a sample
B = 2 * p  # samples of the global batch
L = p  # layers
a = p  # heads
h = 8 * p  # elements per token


def shapes():
    """Return the shape of each parameter of the GPT by its name."""
    shapes = {"wte.weight": (V, h), "wpe.weight": (T, h)}
    for i in range(L):
        shapes[f"h.{i}.ln_1.weight"] = (h,)
        shapes[f"h.{i}.ln_1.bias"] = (h,)
        shapes[f"h.{i}.attn.c_attn.weight"] = (h, 3 * h)
        shapes[f"h.{i}.attn.c_attn.bias"] = (3 * h,)
        shapes[f"h.{i}.attn.c_proj.weight"] = (h, h)
        shapes[f"h.{i}.attn.c_proj.bias"] = (h,)
        shapes[f"h.{i}.ln_2.weight"] = (h,)
        shapes[f"h.{i}.ln_2.bias"] = (h,)
        shapes[f"h.{i}.mlp.c_fc.weight"] = (h, 4 * h)
        shapes[f"h.{i}.mlp.c_fc.bias"] = (4 * h,)
        shapes[f"h.{i}.mlp.c_proj.weight"] = (4 * h, h)
        shapes[f"h.{i}.mlp.c_proj.bias"] = (h,)
    shapes["ln_f.weight"] = (h,)
    shapes["ln_f.bias"] = (h,)
    return shapes


class GPT:
    """GPT-2. Its values are drawn from one seed, so they are the same on every rank."""

    def __init__(self):
        sizes = [math.prod(shape) for shape in shapes().values()]
        self.flat = np.random.default_rng(0).normal(0, 0.1, sum(sizes))
        self.parameters = {}
        stop = 0
        for name, shape in shapes().items():
            start = stop
            stop = start + math.prod(shape)
            self.parameters[name] = Tensor(self.flat[start:stop].reshape(shape))
        self.head = Tensor(self.parameters["wte.weight"].data.T)

    def of(self, layer):
        """Return a layer's weight and bias."""
        return self.parameters[f"{layer}.weight"], self.parameters[f"{layer}.bias"]

    def embed(self, x):
        positions = np.tile(np.arange(T), len(x))
        tokens = embedding(self.parameters["wte.weight"], x.reshape(-1))  # (B, T) -> (N, h)
        return tokens + embedding(self.parameters["wpe.weight"], positions)

    def block(self, i, x):
        y = layer_norm(x, *self.of(f"h.{i}.ln_1"))
        y = attention(linear(y, *self.of(f"h.{i}.attn.c_attn")))  # (N, h) -> (N, 3h) -> (N, h)
        x = x + linear(y, *self.of(f"h.{i}.attn.c_proj"))
        y = layer_norm(x, *self.of(f"h.{i}.ln_2"))
        y = gelu(linear(y, *self.of(f"h.{i}.mlp.c_fc")))  # (N, 4h)
        return x + linear(y, *self.of(f"h.{i}.mlp.c_proj"))  # (N, h)

    def criterion(self, x, targets):
        """Return the summed loss, given the last block's output, (N, h), and the targets, (B, T)."""
        logits = linear(layer_norm(x, *self.of("ln_f")), self.head)  # (N, V)
        return cross_entropy_sum(logits, targets.reshape(-1))

    def loss_sum(self, x, targets):
        """Return the sum of the losses of all tokens of x and targets, (B, T)."""
        x = self.embed(x)
        for i in range(L):
            x = self.block(i, x)
        return self.criterion(x, targets)

    def take_gradient(self):
        """Return the gradient of all parameters as one flat array, and forget it."""
        gradients = {name: parameter.grad for name, parameter in self.parameters.items()}
        gradients["wte.weight"] += self.head.grad.T
        for parameter in (*self.parameters.values(), self.head):
            parameter.grad = None
        return np.concatenate([gradient.reshape(-1) for gradient in gradients.values()])


# %% [markdown]
# One device computes the gradient that all strategies below have to equal. The first check needs no second program: a
# small step along a random direction must change the loss as the gradient says.


# %%
def batch(step):
    """Return the inputs and targets of a step, (B, T) each: bytes of English; a target is the byte after its input."""
    text = np.frombuffer(np.__doc__.encode(), np.uint8)
    starts = np.random.default_rng(step).integers(text.size - T, size=(B, 1))
    tokens = text[starts + np.arange(T + 1)]
    return tokens[:, :-1], tokens[:, 1:]


def backward(model, x, targets):
    """Add the gradient of (summed loss) / (tokens of the global batch) to the model's; return that quotient."""
    loss = model.loss_sum(x, targets)
    loss.backward(1 / (B * T))
    return loss.data / (B * T)


model = GPT()
Psi = model.flat.size
loss = backward(model, *batch(0))
truth = model.take_gradient()

direction = np.random.default_rng(1).normal(size=Psi) / math.sqrt(Psi)
model.flat += 1e-5 * direction
above = backward(model, *batch(0))
model.flat -= 2e-5 * direction
below = backward(model, *batch(0))
slope = (above - below) / 2e-5
assert abs(slope - truth @ direction) < 1e-8 * np.linalg.norm(truth)
say("0. minipar in one file\n")
say("0.1 A tensor that knows what it was computed from\n0.2 Seven operations\n0.3 A GPT")
say(f"{Psi:,} parameters, loss {loss:.3f}, slope {slope:.6f}, by backward {truth @ direction:.6f}")

# %% [markdown]
# ## 0.4 Four ways to share the work
#
# *Core, 2 minutes.*
#
# A training step has samples, parameters, and two means that Adam keeps for each parameter. Every strategy cuts one of
# them.
#
# ![What each of four ranks holds under four strategies](../visualize/gallery/four_strategies.png)
#
# *What each of four ranks holds. A model is drawn as its layers, one above the other; a layer has columns.*

# %% [markdown]
# ## 0.5 A ring all-reduce
#
# *Core, 6 minutes.*
#
# Every rank has an array, and all need the sum. Each of the $p$ ranks cuts its array into $p$ chunks. The sum of chunk
# $c$ starts on rank $c+1$ and travels around the ring to rank $c$. Each rank on the way adds its part. That is a
# *reduce-scatter*: rank $r$ has chunk $r$ of the sum. In $p-1$ more steps the finished chunks travel around the ring,
# an *all-gather*. Each rank sends $2\frac{p-1}{p}$ of the array. No algorithm sends less in total (chapter 3).
#
# ![Four ranks in a ring send one chunk per round](../visualize/gallery/ring_all_reduce.gif)
#
# *Four ranks in a ring. Each sends one chunk per round to its right neighbour. For half of the rounds it adds what
# arrives, for the other half it copies.*

# %%
right = (r + 1) % p
left = (r - 1) % p


def isend(array, rank, tag=0):
    return world.Isend(array, rank, tag)


def irecv(array, rank, tag=0):
    return world.Irecv(array, rank, tag)


def reduce_scatter(x):
    """Return chunk r of the sum of all ranks' x, a flat array."""
    chunks = np.array_split(x, p)
    travelling = chunks[left]  # its sum starts here
    for step in range(p - 1):
        own = chunks[(r - step - 2) % p]
        received = np.empty_like(own)
        MPI.Request.Waitall([isend(travelling, right), irecv(received, left)])
        travelling = received + own
    return travelling


def all_gather(chunk, size):
    """Return the ranks' chunks, one after another: `size` elements."""
    whole = np.empty(size)
    chunks = np.array_split(whole, p)  # views
    chunks[r][...] = chunk
    for step in range(p - 1):
        here = chunks[(r - step) % p]
        next_one = chunks[(r - step - 1) % p]
        MPI.Request.Waitall([isend(here, right), irecv(next_one, left)])
    return whole


def all_reduce(x):
    """Return the sum of all ranks' x, of any shape."""
    chunk = reduce_scatter(x.reshape(-1))
    return all_gather(chunk, x.size).reshape(x.shape)


mine = np.random.default_rng(r).normal(size=1001)  # chunks need not be equal
total = all_reduce(mine)
assert close(total, world.allreduce(mine))  # MPI adds in another order
assert same_on_all_ranks(total)
say("\n0.4 Four ways to share the work\n\n0.5 A ring all-reduce")
say("all ranks have the same bits, and MPI's sum within rounding")

# %% [markdown]
# ## 0.6 Data parallelism
#
# *Core, 4 minutes.*
#
# The loss is a sum over tokens, divided by the number of tokens of the *global* batch. So the gradients of its parts
# add up. Every rank takes $1/p$ of the samples. After one all-reduce all ranks have the same gradient and take the same
# step. One device that adds the same parts in the same order has the same bits (chapter 4).


# %%
class Adam:
    """torch.optim.Adam on a flat array, which it changes in place. It keeps two means for each element."""

    def __init__(self, flat, lr=1e-3):
        self.flat = flat
        self.lr = lr
        self.m = np.zeros_like(flat)
        self.v = np.zeros_like(flat)
        self.steps = 0

    def step(self, g):
        self.steps += 1
        b1 = 0.9
        b2 = 0.999
        self.m += (1 - b1) * (g - self.m)
        self.v *= b2
        self.v += (1 - b2) * (g * g)
        root = np.sqrt(self.v) / math.sqrt(1 - b2**self.steps)
        self.flat -= self.lr / (1 - b1**self.steps) * (self.m / (root + 1e-8))


def shard(step):
    """Return this rank's samples of a step: inputs and targets."""
    x, targets = batch(step)
    return np.array_split(x, p)[r], np.array_split(targets, p)[r]


model = GPT()
optimizer = Adam(model.flat)
for step in range(5):
    backward(model, *shard(step))
    gradient = all_reduce(model.take_gradient())
    if step == 0:
        assert close(gradient, truth)
    optimizer.step(gradient)
data_parallel = model.flat
assert same_on_all_ranks(data_parallel)
say("\n0.6 Data parallelism\nthe gradient is one device's within rounding, and all ranks stay equal")

# %% [markdown]
# ## 0.7 ZeRO stage 1
#
# *Core, 3 minutes.*
#
# An all-reduce is a reduce-scatter and an all-gather. Between the two, rank $r$ has chunk $r$ of the sum. Adam works on
# each element alone, so rank $r$ can update chunk $r$ of the parameters. Then the all-gather carries *updated
# parameters* in the place of gradients. That answers the question of the first page: ZeRO 1 sends as many bytes as data
# parallelism. But each rank keeps Adam's two means for $1/p$ of the $\Psi$ parameters only.

# %%
model = GPT()
chunk = np.array_split(model.flat, p)[r].copy()
optimizer = Adam(chunk)
for step in range(5):
    backward(model, *shard(step))
    optimizer.step(reduce_scatter(model.take_gradient()))
    model.flat[...] = all_gather(chunk, Psi)
assert model.flat.tobytes() == data_parallel.tobytes()
means = f"{2 * chunk.nbytes:,} bytes of {16 * Psi:,}"
say(f"\n0.7 ZeRO stage 1\nthe bits of data parallelism; Adam's means take {means}")

# %% [markdown]
# ## 0.8 A column-parallel and a row-parallel layer
#
# *Core, 5 minutes.*
#
# The MLP is $\mathrm{gelu}(x W_1) W_2$. Cut $W_1$ into columns: each rank computes some columns of the activation, and
# gelu works on each element alone. Cut $W_2$ into the matching rows: each rank gets a term of the result, and one
# all-reduce adds the terms (*g* in NVIDIA's Megatron-LM). In backward it is the gradient of $x$ whose terms are added
# (*f*).


# %%
def f(x):
    """Pass x on. Backward sums its gradient over the ranks."""
    return Tensor(x.data, [x], [all_reduce])


def g(x):
    """Sum x over the ranks. Backward passes the gradient on."""
    return Tensor(all_reduce(x.data), [x], [lambda gradient: gradient])


random = np.random.default_rng(2)
x = Tensor(random.normal(size=(T, h)))
w1 = Tensor(random.normal(size=(h, 4 * h)))
w2 = Tensor(random.normal(size=(4 * h, h)))
gradient = random.normal(size=(T, h))
y = linear(gelu(linear(x, w1)), w2)
y.backward(gradient)

own = slice(4 * h // p * r, 4 * h // p * (r + 1))
x_r = Tensor(x.data)
w1_r = Tensor(w1.data[:, own].copy())  # (h, 4h/p)
w2_r = Tensor(w2.data[own].copy())  # (4h/p, h)
hidden = gelu(linear(f(x_r), w1_r))  # (T, 4h/p)
y_r = g(linear(hidden, w2_r))  # a bias of w2 comes after g
y_r.backward(gradient)
assert close(y_r.data, y.data)
assert close(x_r.grad, x.grad)
assert close(w1_r.grad, w1.grad[:, own])
assert close(w2_r.grad, w2.grad[own])
say("\n0.8 A column-parallel and a row-parallel layer\nresult and gradients are one device's within rounding")

# %% [markdown]
# ## 0.9 A pipeline with the schedule 1F1B
#
# *Core, 8 minutes.*
#
# Rank $r$ runs block $r$. The first rank also embeds, and the last one computes the loss. The batch is cut into $m$
# microbatches. A forward (F) sends activations to the right, a backward (B) sends gradients to the left. A rank runs a
# forward for each rank to its right, then one forward and one backward in turn, then the backwards that are left. So it
# keeps the activations of at most $p - r$ microbatches.
#
# ![1F1B on 8 ranks with 16 microbatches](../visualize/gallery/schedule_1f1b_8x16.png)
#
# *The schedule on 8 ranks, with 16 microbatches. Time runs from left to right. White is waiting: the first microbatch
# must come down to the last rank before any gradient can come back. Below are the activations that each rank keeps.*


# %%
def one_f_one_b(rank, m):
    """Return the actions of a rank, in order: (kind, microbatch)."""
    ahead = min(p - 1 - rank, m)
    actions = []
    for i in range(ahead):  # warmup
        actions.append(("F", i))
    for i in range(m - ahead):  # steady state
        actions.append(("F", ahead + i))
        actions.append(("B", i))
    for i in range(m - ahead, m):  # cooldown
        actions.append(("B", i))
    return actions


class Stage:
    """This rank's part of the model: block r, on the first rank the embedding too, on the last one the loss."""

    def __init__(self, model, xs, targets):
        self.model = model
        self.xs = xs  # the microbatches
        self.targets = targets
        self.is_first = r == 0
        self.is_last = r == p - 1
        self.kept = {}  # start and end of each microbatch that waits for its backward
        self.sends = []  # messages under way, with their arrays, which must live as long

    def forward(self, i):
        if self.is_first:
            start = self.model.embed(self.xs[i])
        else:
            start = Tensor(np.empty((self.xs[i].size, h)))
            irecv(start.data, left, i).Wait()
        end = self.model.block(r, start)
        if self.is_last:
            end = self.model.criterion(end, self.targets[i])
        else:
            self.sends.append((isend(end.data, right, i), end.data))
        self.kept[i] = start, end
        assert len(self.kept) <= p - r

    def backward(self, i):
        start, end = self.kept.pop(i)
        tag = len(self.xs) + i
        if self.is_last:
            gradient = np.array(1 / (B * T))
        else:
            gradient = np.empty_like(end.data)
            irecv(gradient, right, tag).Wait()
        end.backward(gradient)
        if not self.is_first:
            self.sends.append((isend(start.grad, left, tag), start.grad))


def run_pipeline(model, xs, targets):
    """Leave in this rank's part of the model the gradient of the mean loss of the microbatches xs and targets."""
    stage = Stage(model, xs, targets)
    for kind, i in one_f_one_b(r, len(xs)):
        if kind == "F":
            stage.forward(i)
        else:
            stage.backward(i)
    MPI.Request.Waitall([request for request, _ in stage.sends])


m = 2 * p
xs, targets = (np.split(array, m) for array in batch(0))
pipeline = GPT()
run_pipeline(pipeline, xs, targets)

device = GPT()
for i in range(m):  # one device adds up the microbatches in the same order
    backward(device, xs[i], targets[i])
trained = 0
for name, whole in device.parameters.items():
    mine = pipeline.parameters[name]
    if mine.grad is not None:
        trained += 1
        assert np.array_equal(mine.grad, whole.grad)
assert world.allreduce(trained) == len(device.parameters)  # each gradient is on one rank
if r == p - 1:
    assert np.array_equal(pipeline.head.grad, device.head.grad)
say(f"\n0.9 A pipeline with the schedule 1F1B\n{m} microbatches: the gradients are one device's, bit for bit")
few = min(m, 6)  # as many as fit on a line
say(f"lists of {few} microbatches (a rank with {few - 1} or more ranks to its right does all forwards first):")
for rank in range(p):
    actions = [f"{kind}{i}" for kind, i in one_f_one_b(rank, few)]
    say(f"rank {rank}  " + "   " * rank + " ".join(actions))

# %% [markdown]
# ## 0.10 The library gives the same bits
#
# *Deeper, 4 minutes.*
#
# minipar has the functions above under the same names: `all_reduce` in comm/algorithms.py, `linear` and `attention` in
# autograd, ZeRO stage 1 in parallel/zero.py, *f* and *g* in parallel/tensor/mappings.py, 1F1B in
# parallel/pipeline/schedules.py. It adds what real use needs: any dtype, buckets and overlap, checkpoints, errors with
# a remedy.
#
# **Where it goes on.** [9.1](09_3d_parallel.ipynb) lists the groups of a rank where three strategies are combined, and
# 9.4 what is sent in each. Several steps are compared with one process in [4.7](04_data_parallel.ipynb) and
# [7.5](07_pipeline.ipynb) bit for bit, in [6.10](06_tensor_parallel.ipynb) within rounding.
# [6.4](06_tensor_parallel.ipynb) and 6.9 say which parameters are cut or whole and over which ranks their gradients are
# summed, [7.7](07_pipeline.ipynb) what a tied head on another stage needs.
#
# **What does a simulation on one machine keep?** Ranks are processes here, and elsewhere in the course also threads
# (`run_local`, [3.1](03_collectives.ipynb)). Both keep the values, the messages, the orders of sums and the deadlocks.
# Threads show a deadlock for any size of message, MPI only for large ones (3.2). Both lose real time: ranks share cores
# and memory, so neither bandwidth nor overlap is a network's. The model clock (3.7) computes times instead, but there
# messages do not slow one another down. A simulation in *lockstep*, one loop in which all ranks do the same line in
# turn, is simpler still. It cannot deadlock, so it cannot show one either.

# %%
import minipar as mp
from minipar.comm import world as library_world
from minipar.parallel.pipeline.schedules import make

comm = library_world()
for stage in (0, 1):  # data parallelism and ZeRO stage 1, with one bucket as above
    config = mp.GPTConfig(vocab_size=V, n_positions=T, n_embd=h, n_layer=L, n_head=a)
    library = mp.GPT(config, dtype="float64")
    values = GPT().parameters
    for name, parameter in library.named_parameters():
        parameter.data[...] = values[name].data
    one_bucket = [(library.parameters(), comm)]
    wrapper = mp.shard(library, comm, stage, groups=one_bucket)
    optimizer = mp.AdamW(wrapper.parameters(), lr=1e-3, weight_decay=0)
    for step in range(5):
        wrapper.loss(*shard(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    trained = np.concatenate([parameter.data.reshape(-1) for parameter in library.parameters()])
    assert trained.tobytes() == data_parallel.tobytes()

up = mp.ColumnParallelLinear(h, 4 * h, comm, name="up", bias=False, dtype="float64")
down = mp.RowParallelLinear(4 * h, h, comm, name="down", bias=False, dtype="float64")
up.weight.data[...] = w1_r.data
down.weight.data[...] = w2_r.data
x_library = mp.Tensor(x.data[None], requires_grad=True)  # (1, T, h)
y_library = down(mp.gelu(up(x_library)))
y_library.backward(gradient[None])
assert np.array_equal(y_r.data, y_library.data[0])
assert np.array_equal(x_r.grad, x_library.grad[0])
assert np.array_equal(w1_r.grad, up.weight.grad)
assert np.array_equal(w2_r.grad, down.weight.grad)

actions = [(action.kind, action.microbatch) for action in make("1f1b", p, m).ranks[r]]
assert actions == one_f_one_b(r, m)
say("\n0.10 The library gives the same bits\nequal: data parallelism, ZeRO stage 1, the parallel layers and 1F1B")

# %% tags=["active-ipynb"]
# %autopx

# %% tags=["active-ipynb"]
# cluster.stop_cluster_sync()
