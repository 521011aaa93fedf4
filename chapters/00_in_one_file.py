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
# This file is the answer in small, with NumPy and mpi4py only. Each part is checked as soon as it is written, most of
# them against one device, and most again with the library, bit for bit. The other chapters explain each part, count its
# bytes and measure its time. Run it as `mpirun -n 8 python chapters/00_in_one_file.py`, on any number of ranks. A rank
# is one process; think of one GPU. Letters: $p$ ranks, of which this one is $r$; $B$ samples of $T$ tokens, $N = B T$;
# $h$ elements per token, $L$ layers, $a$ heads, $V$ words in the vocabulary, $\Psi$ parameters, $m$ microbatches.

# %% tags=["active-ipynb"]
# # Eight MPI ranks for this notebook. From here on every cell runs on all of them.
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
import math
import os

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # one core per rank, set before NumPy starts its threads
import numpy as np
from mpi4py import MPI

world = MPI.COMM_WORLD
r, p = world.rank, world.size
say = print if r == 0 else (lambda *words: None)  # every rank computes and checks; rank 0 prints

# %% [markdown]
# ## 0.1 A tensor that knows what it was computed from
#
# A `Tensor` keeps its inputs, and for each input the function from the result's gradient to its own. Tensors are
# numbered as they are made, so a tensor's users have larger numbers than itself. Backward goes from large numbers to
# small ones: when it reaches a tensor, all users have sent their gradients.


# %%
def close(a, b):  # on the scale of the largest element: where large terms cancel, a small element has their rounding
    return np.abs(a - b).max() <= 1e-12 * np.abs(b).max()


def operation(rule):  # a rule takes arrays; it returns the result and, for each input, gradient(g)
    def apply(*inputs):
        result, *gradients = rule(*(x.data if isinstance(x, Tensor) else x for x in inputs))
        return Tensor(result, list(zip(inputs, gradients, strict=False)))  # an index has none

    return apply


class Tensor:
    count = 0

    def __init__(self, data, inputs=()):
        Tensor.count += 1
        self.data, self.inputs, self.grad, self.number = data, inputs, None, Tensor.count

    def backward(self, gradient):
        """Add the gradient of sum(self * gradient) to `grad` of each tensor that was computed from nothing."""
        waiting = {self: gradient}
        while waiting:
            tensor = max(waiting, key=lambda t: t.number)
            g = waiting.pop(tensor)
            if not tensor.inputs:
                tensor.grad = g if tensor.grad is None else tensor.grad + g
            for x, gradient_of in tensor.inputs:
                waiting[x] = waiting[x] + gradient_of(g) if x in waiting else gradient_of(g)

    @operation
    def __add__(x, y):
        return x + y, lambda g: g, lambda g: g

    @operation
    def linear(x, w, b=0.0):  # (N, i), (i, o), (o,) -> (N, o)
        return x @ w + b, lambda g: g @ w.T, lambda g: x.T @ g, lambda g: g.sum(axis=0)

    @operation
    def rows(w, index):  # (V, h), integers (N,) -> (N, h)
        def gradient(g):
            full, order = np.zeros_like(w), np.argsort(index, kind="stable")  # equal indices side by side
            starts = np.flatnonzero(np.diff(index[order], prepend=-1))
            full[index[order][starts]] = np.add.reduceat(g[order], starts)  # a row used twice gets two gradients
            return full

        return w[index], gradient

    @operation
    def layer_norm(x, w, b):  # each row of xhat has mean 0 and variance 1
        centered = x - x.mean(axis=-1, keepdims=True)
        rstd = 1 / np.sqrt(np.einsum("ni,ni->n", centered, centered)[:, None] / x.shape[-1] + 1e-5)
        xhat = centered * rstd

        def gradient(g):
            gw, mean = g * w, (g * xhat * w).mean(axis=-1, keepdims=True)
            return (gw - gw.mean(axis=-1, keepdims=True) - xhat * mean) * rstd

        return xhat * w + b, gradient, lambda g: (g * xhat).sum(axis=0), lambda g: g.sum(axis=0)

    @operation
    def gelu(x):  # x (1 + t) / 2 with t = tanh(s (x + c x^3)), GPT-2's approximation
        c, s = 0.044715, math.sqrt(2 / math.pi)
        t = np.tanh((x * x * c + 1) * x * s)
        rest = 1 - t  # the slope is (1 + t) (1 + (1 - t) x s (1 + 3 c x^2)) / 2, and 1 + t = 2 - rest
        slope = ((x * x * (3 * c * s) + s) * x * rest + 1) * (2 - rest) * 0.5
        return (t + 1) * x * 0.5, lambda g: slope * g

    @operation
    def attention(qkv):  # (N, 3h) -> (N, h): softmax(q k^T / sqrt(h/a) + mask) v for each head
        def split(x):
            return x.reshape(-1, T, a, h // a).transpose(0, 2, 1, 3)  # (B, a, T, h/a)

        def join(x):
            return x.transpose(0, 2, 1, 3).reshape(-1, h)  # (N, h)

        q, k, v = (split(part) for part in np.split(qkv, 3, axis=-1))
        mask = np.triu(np.full((T, T), -np.inf), 1)  # a token sees none that come later
        scores = q @ k.swapaxes(2, 3) * (h // a) ** -0.5 + mask  # (B, a, T, T)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))  # without the maximum, exp overflows
        weights /= weights.sum(axis=-1, keepdims=True)
        output = weights @ v

        def gradient(g):
            # Softmax: ds = w (dw - sum_j w dw), and that sum is the product of the output and its gradient.
            ds = split(g) @ v.swapaxes(2, 3) - np.einsum("bhtd,bhtd->bht", split(g), output)[..., None]
            ds = ds * weights * (h // a) ** -0.5
            dq, dk, dv = ds @ k, ds.swapaxes(2, 3) @ q, weights.swapaxes(2, 3) @ split(g)
            return np.concatenate([join(dq), join(dk), join(dv)], axis=-1)

        return join(output), gradient

    @operation
    def cross_entropy_sum(logits, targets):  # (N, V), (N,) -> one value: the sum of -log softmax(logits)[target]
        shifted = logits - logits.max(axis=-1, keepdims=True)
        total = np.exp(shifted).sum(axis=-1, keepdims=True)
        softmax, one_hot = np.exp(shifted) / total, np.eye(V)[targets]
        correct = shifted[np.arange(targets.size), targets]
        return (np.log(total[:, 0]) - correct).sum(), lambda g: (softmax - one_hot) * g


# %% [markdown]
# ## 0.2 A GPT
#
# GPT-2 with as many heads and blocks as ranks. All parameters are views of one array, `flat`, on which collectives and
# optimizers work. The output head has the values of the token embedding `wte` and a gradient of its own.

# %%
V, T, a, L, h, B = 256, 16, p, p, 8 * p, 2 * p


class GPT:
    def __init__(self):
        shapes = {"wte": (V, h), "wpe": (T, h)}
        for i in range(L):
            shapes |= {f"{i}.ln_1.w": (h,), f"{i}.ln_1.b": (h,), f"{i}.qkv.w": (h, 3 * h), f"{i}.qkv.b": (3 * h,)}
            shapes |= {f"{i}.proj.w": (h, h), f"{i}.proj.b": (h,), f"{i}.ln_2.w": (h,), f"{i}.ln_2.b": (h,)}
            shapes |= {f"{i}.up.w": (h, 4 * h), f"{i}.up.b": (4 * h,), f"{i}.down.w": (4 * h, h), f"{i}.down.b": (h,)}
        shapes |= {"ln_f.w": (h,), "ln_f.b": (h,)}
        stops = np.cumsum([math.prod(shape) for shape in shapes.values()])
        self.flat = np.random.default_rng(0).normal(0, 0.1, stops[-1])  # one seed: the same values on every rank
        views = zip(shapes, np.split(self.flat, stops[:-1]), strict=True)
        self.weights = {name: Tensor(view.reshape(shapes[name])) for name, view in views}
        self.weights["head"] = Tensor(self.weights["wte"].data.T)

    def of(self, name):
        return self.weights[name + ".w"], self.weights[name + ".b"]

    def embed(self, x):  # (B, T) -> (N, h)
        return self.weights["wte"].rows(x.reshape(-1)) + self.weights["wpe"].rows(np.tile(np.arange(T), len(x)))

    def block(self, i, x):  # x + attention(norm(x)), then x + mlp(norm(x)): (N, h) -> (N, h)
        x = x + x.layer_norm(*self.of(f"{i}.ln_1")).linear(*self.of(f"{i}.qkv")).attention().linear(
            *self.of(f"{i}.proj")
        )
        return x + x.layer_norm(*self.of(f"{i}.ln_2")).linear(*self.of(f"{i}.up")).gelu().linear(*self.of(f"{i}.down"))

    def loss_sum(self, x, y):  # of the last block's output (N, h) and the targets (B, T)
        return x.layer_norm(*self.of("ln_f")).linear(self.weights["head"]).cross_entropy_sum(y.reshape(-1))

    def backward(self, x, y):  # of (summed loss) / (tokens of the global batch), which is returned
        stream = self.embed(x)
        for i in range(L):
            stream = self.block(i, stream)
        loss = self.loss_sum(stream, y)
        loss.backward(1 / (B * T))
        return loss.data / (B * T)

    def take_gradient(self):  # of all parameters, as one flat array
        gradients = {name: w.grad for name, w in self.weights.items()}
        gradients["wte"] += gradients.pop("head").T
        for w in self.weights.values():
            w.grad = None
        return np.concatenate([g.reshape(-1) for g in gradients.values()])


def batch(step):
    """Return inputs and targets of a step, (B, T) each: bytes of English, every target the byte after its input."""
    text = np.frombuffer(np.__doc__.encode(), np.uint8)
    tokens = text[np.random.default_rng(step).integers(text.size - T, size=(B, 1)) + np.arange(T + 1)]
    return tokens[:, :-1], tokens[:, 1:]


model = GPT()
Psi = model.flat.size
losses = [model.backward(*batch(0))]
truth = model.take_gradient()  # of one device: everything below is compared with it
direction = np.random.default_rng(1).normal(size=Psi) / math.sqrt(Psi)
for step in (1e-5, -2e-5):  # proof: along a random direction the loss rises as the gradient says
    model.flat += step * direction
    losses.append(model.backward(*batch(0)))
slope = (losses[1] - losses[2]) / 2e-5  # at +1e-5 and -1e-5
assert abs(slope - truth @ direction) < 1e-8 * np.linalg.norm(truth)
say("0. minipar in one file\n\n0.1 A tensor that knows what it was computed from\n0.2 A GPT")
say(f"{Psi:,} parameters, loss {losses[0]:.3f}, slope {slope:.6f}, by backward {truth @ direction:.6f}")

# %% [markdown]
# ## 0.3 A ring all-reduce
#
# Cut each rank's array into $p$ chunks. The sum of chunk $c$ starts on rank $c+1$ and travels around the ring to rank
# $c$; each rank adds its part. That is a *reduce-scatter*. In $p-1$ more steps the finished chunks travel around: an
# *all-gather*. Each rank sends $2\frac{p-1}{p}$ of the array, and in total no algorithm sends less.

# %%
isend, irecv = world.Isend, world.Irecv  # of an array to a rank, from a rank


def reduce_scatter(x):
    """Return chunk r of the sum of all ranks' x, a flat array."""
    chunks = np.array_split(x, p)
    travelling = chunks[r - 1]  # its sum starts here
    for step in range(p - 1):
        own = chunks[(r - step - 2) % p]
        received = np.empty_like(own)
        MPI.Request.Waitall([isend(travelling, (r + 1) % p), irecv(received, (r - 1) % p)])
        travelling = received + own
    return travelling


def all_gather(chunk, size):
    """Return the ranks' chunks, one after another: `size` elements."""
    whole = np.empty(size)
    chunks = np.array_split(whole, p)  # views
    chunks[r][...] = chunk
    for step in range(p - 1):
        here, there = chunks[(r - step) % p], chunks[(r - step - 1) % p]
        MPI.Request.Waitall([isend(here, (r + 1) % p), irecv(there, (r - 1) % p)])
    return whole


def all_reduce(x):  # the sum of all ranks' x, of any shape
    return all_gather(reduce_scatter(x.reshape(-1)), x.size).reshape(x.shape)


mine = np.random.default_rng(r).normal(size=1001)  # chunks need not be equal
total = all_reduce(mine)
assert close(total, world.allreduce(mine))  # MPI adds in another order
assert world.allgather(total.tobytes()) == [total.tobytes()] * p  # the same bits on every rank
say("\n0.3 A ring all-reduce\nall ranks have the same bits, and MPI's sum within rounding")

# %% [markdown]
# ## 0.4 Data parallelism
#
# The loss is a sum over tokens divided by the tokens of the *global* batch, so the gradients of its parts add up. Every
# rank takes $1/p$ of the samples, and after one all-reduce all take the same step.


# %%
class Adam:  # torch.optim.Adam on a flat array, which it changes in place; two means for each element
    def __init__(self, flat):
        self.flat, self.m, self.v, self.t = flat, np.zeros_like(flat), np.zeros_like(flat), 0

    def step(self, g):
        self.t, beta1, beta2 = self.t + 1, 0.9, 0.999
        self.m += (1 - beta1) * (g - self.m)
        self.v *= beta2
        self.v += (1 - beta2) * (g * g)
        root = np.sqrt(self.v) / math.sqrt(1 - beta2**self.t)
        self.flat -= 1e-3 / (1 - beta1**self.t) * (self.m / (root + 1e-8))  # learning rate 1e-3


def share(step):
    return (np.array_split(array, p)[r] for array in batch(step))  # this rank's samples


model = GPT()
optimizer = Adam(model.flat)
for step in range(5):
    model.backward(*share(step))
    gradient = all_reduce(model.take_gradient())
    assert step > 0 or close(gradient, truth)
    optimizer.step(gradient)
data_parallel = model.flat
assert world.allgather(data_parallel.tobytes()) == [data_parallel.tobytes()] * p
say("\n0.4 Data parallelism\nthe gradient is one device's within rounding, and all ranks stay equal")

# %% [markdown]
# ## 0.5 ZeRO stage 1
#
# An all-reduce is a reduce-scatter and an all-gather. Between the two, rank $r$ has chunk $r$ of the sum. Adam works on
# each element alone, so the rank can update chunk $r$ of the parameters, and the all-gather carries *updated
# parameters*. The bytes sent are the same, and each rank keeps Adam's two means for $1/p$ of the parameters only.

# %%
model = GPT()
chunk = np.array_split(model.flat, p)[r].copy()
optimizer = Adam(chunk)
for step in range(5):
    model.backward(*share(step))
    optimizer.step(reduce_scatter(model.take_gradient()))
    model.flat[...] = all_gather(chunk, Psi)
assert model.flat.tobytes() == data_parallel.tobytes()
say(f"\n0.5 ZeRO stage 1\nthe bits of data parallelism; Adam's means take {2 * chunk.nbytes:,} bytes of {16 * Psi:,}")

# %% [markdown]
# ## 0.6 A column-parallel and a row-parallel layer
#
# The MLP is $\mathrm{gelu}(x W_1) W_2$. Cut $W_1$ into columns: each rank computes some columns of the activation, and
# gelu works on each element alone. Cut $W_2$ into the matching rows: each rank gets a term of the result, and one
# all-reduce adds the terms (Megatron calls it *g*). In backward it is the gradient of $x$ whose terms are added (*f*).


# %%
def f(x):  # nothing in forward, a sum over the ranks in backward
    return Tensor(x.data, [(x, all_reduce)])


def g(x):  # a sum over the ranks in forward, nothing in backward
    return Tensor(all_reduce(x.data), [(x, lambda gradient: gradient)])


random = np.random.default_rng(2)
x, w1, w2 = (Tensor(random.normal(size=shape)) for shape in ((T, h), (h, 4 * h), (4 * h, h)))
y, gradient = x.linear(w1).gelu().linear(w2), random.normal(size=(T, h))
y.backward(gradient)
own = slice(4 * h // p * r, 4 * h // p * (r + 1))
x_r, w1_r, w2_r = Tensor(x.data), Tensor(w1.data[:, own].copy()), Tensor(w2.data[own].copy())
y_r = g(f(x_r).linear(w1_r).gelu().linear(w2_r))  # (N, 4h/p) inside; a bias of w2 comes after g
y_r.backward(gradient)
assert close(y_r.data, y.data) and close(x_r.grad, x.grad)
assert close(w1_r.grad, w1.grad[:, own]) and close(w2_r.grad, w2.grad[own])
say("\n0.6 A column-parallel and a row-parallel layer\nresult and gradients are one device's within rounding")

# %% [markdown]
# ## 0.7 A pipeline with the schedule 1F1B
#
# Rank $r$ runs block $r$; the first also embeds, the last computes the loss. The batch is cut into $m$ microbatches.
# Forward (F) sends activations to the right, backward (B) sends gradients to the left. A rank runs a forward for each
# rank to its right, then one forward and one backward in turn, then the backwards that are left. So it keeps the
# activations of at most $p - r$ microbatches.


# %%
def one_f_one_b(rank, m):  # the actions of a rank, in order: (kind, microbatch)
    ahead = min(p - 1 - rank, m)
    actions = [("F", i) for i in range(ahead)]  # warmup
    for i in range(m - ahead):
        actions += [("F", ahead + i), ("B", i)]  # steady state
    return actions + [("B", i) for i in range(m - ahead, m)]  # cooldown


def run_pipeline(model, x, y):
    """Leave in this rank's part of the model the gradient of the batch's mean loss. x, y: lists of microbatches."""
    kept, sends, first, last = {}, [], r == 0, r == p - 1
    for kind, i in one_f_one_b(r, len(x)):
        if kind == "F":
            start = model.embed(x[i]) if first else Tensor(np.empty((x[i].size, h)))
            if not first:
                irecv(start.data, r - 1, i).Wait()
            end = model.block(r, start)
            kept[i] = start, model.loss_sum(end, y[i]) if last else end
            assert len(kept) <= p - r
            if not last:
                sends.append((isend(end.data, r + 1, i), end.data))
        else:
            start, end = kept.pop(i)
            gradient = np.array(1 / (B * T)) if last else np.empty_like(end.data)
            if not last:
                irecv(gradient, r + 1, len(x) + i).Wait()
            end.backward(gradient)
            if not first:
                sends.append((isend(start.grad, r - 1, len(x) + i), start.grad))
    MPI.Request.Waitall([request for request, _ in sends])  # the arrays lived until here, in `sends`


m, pipeline, device = 2 * p, GPT(), GPT()
microbatches = [np.split(array, m) for array in batch(0)]
run_pipeline(pipeline, *microbatches)
for microbatch in zip(*microbatches, strict=True):
    device.backward(*microbatch)  # one device adds up the microbatches in the same order
same = [np.array_equal(w.grad, device.weights[name].grad) for name, w in pipeline.weights.items() if w.grad is not None]
assert all(same) and world.allreduce(len(same)) == len(device.weights)  # each gradient is on one rank
say(f"\n0.7 A pipeline with the schedule 1F1B\n{m} microbatches: the gradients are one device's, bit for bit")
for rank in range(p):
    say(f"rank {rank}  " + "   " * rank + " ".join(f"{kind}{i}" for kind, i in one_f_one_b(rank, min(m, 6))))

# %% [markdown]
# ## 0.8 The library gives the same bits
#
# minipar adds the cares of real use: any dtype, buckets and overlap, checkpoints, errors with a remedy.

# %%
import minipar as mp
from minipar.comm import world as library_world
from minipar.parallel.pipeline.schedules import make

comm = library_world()
for stage in (0, 1):  # data parallelism and ZeRO stage 1, with one bucket as above
    library = mp.GPT(mp.GPTConfig(vocab_size=V, n_positions=T, n_embd=h, n_layer=L, n_head=a), dtype="float64")
    for parameter, weight in zip(library.parameters(), GPT().weights.values(), strict=False):  # the head comes last
        parameter.data[...] = weight.data
    wrapper = mp.shard(library, comm, stage, groups=[library.parameters()])
    optimizer = mp.AdamW(wrapper.parameters(), lr=1e-3, weight_decay=0)
    for step in range(5):
        wrapper.loss(*share(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert b"".join(parameter.data.tobytes() for parameter in library.parameters()) == data_parallel.tobytes()

up = mp.ColumnParallelLinear(h, 4 * h, comm, name="up", bias=False, dtype="float64")
down = mp.RowParallelLinear(4 * h, h, comm, name="down", bias=False, dtype="float64")
up.weight.data[...], down.weight.data[...] = w1_r.data, w2_r.data
x_library = mp.Tensor(x.data[None], requires_grad=True)  # (1, T, h)
y_library = down(mp.gelu(up(x_library)))
y_library.backward(gradient[None])
assert np.array_equal(y_r.data, y_library.data[0]) and np.array_equal(x_r.grad, x_library.grad[0])
assert np.array_equal(w1_r.grad, up.weight.grad) and np.array_equal(w2_r.grad, down.weight.grad)
assert [(action.kind, action.microbatch) for action in make("1f1b", p, m).ranks[r]] == one_f_one_b(r, m)
say("\n0.8 The library gives the same bits\nequal: data parallelism, ZeRO stage 1, the parallel layers and 1F1B")

# %% tags=["active-ipynb"]
# %autopx

# %% tags=["active-ipynb"]
# cluster.stop_cluster_sync()
