# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 0. Parallel training in one file
#
# **How is one model trained by many machines?**
#
# Eight devices train one language model. They can divide the samples, the optimizer's memory, the matrices or the
# layers. Each way takes 10 to 80 lines of NumPy and mpi4py, and all of them stand in one program of 330 lines of code,
# [one_file.py](one_file.py). Each trains what one device trains, within rounding, and sends as many bytes as a formula
# says. With ZeRO each device keeps only 130,944 of the optimizer's 1,047,552 bytes. At the end of this chapter you can
# say of each strategy what it divides, what it sends, and when to use it.
#
# ![What each of eight devices holds under nine strategies, and what it sends](../visualize/gallery/strategies.png)
#
# *The whole course in one picture. A strip of eight full boxes says that every device has a copy. A staircase says that
# each device has its own eighth.*
#
# What a device needs and others have must be sent: the right part of the picture says what. This chapter walks through
# the program. Its cells up to 0.9, but for those that print a heading, are the program's lines, all of them and in
# their order. They run on 1 to 8 ranks. The sections after that are deeper: they build autograd and a GPT, and compare
# with the library, bit for bit.
#
# This chapter can be read first, or last as a summary. It answers exercises [1](exercises/e01_ring_reduce_scatter.py),
# [2](exercises/e02_all_reduce.py), [6](exercises/e06_zero1_step.py), [8](exercises/e08_column_row_layers.py) and
# [10](exercises/e10_one_f_one_b.py) of chapters 3 to 7. **Predict**: ZeRO 1 keeps an eighth of the optimizer's memory
# on each device. Does it send more bytes than data parallelism, as many, or fewer? Section 0.6 has the answer.

# %% tags=["active-ipynb", "setup"]
# from chapters.support.notebook import start
#
# cluster = start(8)

# %% tags=["one-file"]
import math
import os
import sys
import time
import traceback
from copy import copy

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # one core per rank, set before NumPy starts its threads
import numpy as np
from mpi4py import MPI

world = MPI.COMM_WORLD
r = world.rank  # this rank: a rank is one process; think of one GPU
p = world.size  # the number of ranks


def say(text):
    """Print on rank 0. Every rank computes and checks."""
    if r == 0:
        print(text, flush=True)


def stop(text):
    """End the job with a line on rank 0. Every rank calls it."""
    say(text)
    sys.exit(1)


def end_all_ranks(kind, error, trace):
    """End the job because this rank has failed: the others would wait for its messages for ever."""
    traceback.print_exception(kind, error, trace)
    time.sleep(0.5)  # mpirun drops what it has not printed before the end
    world.Abort(1)


sys.excepthook = end_all_ranks
if p > 8:
    stop(f"one_file.py gives each rank some of 8 layers, so it runs on 1 to 8 ranks, and mpirun started {p}")

# %% [markdown]
# ## 0.1 Four ways to share the work
#
# *Core, 2 minutes.*
#
# A training step has samples, parameters, gradients, and two means that AdamW keeps for each parameter. *Data
# parallelism* cuts the samples, and each rank has the whole model. *ZeRO* cuts the samples and what the optimizer
# keeps. *Tensor parallelism* cuts the matrices inside the layers, and a *pipeline* cuts the list of layers. What is cut
# exists once, and the rest exists on every rank.
#
# ![What each of four ranks holds under four strategies](../visualize/gallery/four_strategies.png)
#
# *What each of four ranks holds. A model is drawn as its layers, one above the other; a layer has columns.*

# %% [markdown]
# ## 0.2 A model
#
# *Core, 12 minutes.*
#
# The model sees 16 letters and predicts the next one. A letter has a vector for each place where it can stand. The sum
# of the 16 vectors, $h = 32$ elements, goes through six residual blocks $x + \tanh(x W_1) W_2$, and a last matrix makes
# of it a score for each letter of the vocabulary. The text has $N = 128$ letters, and a step predicts each of them
# once.

# %%
say("0. Parallel training in one file\n\n0.1 Four ways to share the work\n0.2 A model")

# %% tags=["one-file"]
TEXT = """To see a World in a Grain of Sand
And a Heaven in a Wild Flower
Hold Infinity in the palm of your hand
And Eternity in an hour.
"""  # William Blake
vocabulary, tokens = np.unique(list(TEXT), return_inverse=True)
V = len(vocabulary)
N = len(tokens)  # samples: a step predicts each letter of the text once
C = 16  # letters that the model sees
h = 32  # elements of a vector
contexts = np.stack([np.roll(tokens, C - place) for place in range(C)], axis=1)  # (N, C): the text goes round

# %% [markdown]
# Forward and backward stand side by side. The block is what tensor parallelism will cut: two products, with a function
# of each element alone between them.


# %% tags=["one-file"]
# A layer's forward returns its result and its activations, which are what its backward needs. Its backward takes the
# gradient of the result, adds those of its parameters to `gradients`, and returns that of the input.
class Embedding:
    """The sum of the vectors of C letters."""

    def __init__(self, table):
        self.parameters = [table]  # (C, V, h)

    def forward(self, x):
        table = self.parameters[0]
        return table[np.arange(C), x].sum(axis=1), x  # (N, C) -> (N, C, h) -> (N, h)

    def backward(self, dy, x):
        np.add.at(self.gradients[0], (np.arange(C), x), dy[:, None])  # a vector that is used twice gets two gradients


class Block:
    """x + tanh(x W1) W2."""

    def __init__(self, w1, w2):
        self.parameters = [w1, w2]  # (h, 4h), (4h, h)

    def forward(self, x):
        w1, w2 = self.parameters
        a = np.tanh(x @ w1)  # (N, h) -> (N, 4h)
        return x + a @ w2, (x, a)  # (N, h)

    def backward(self, dy, activations):
        w1, w2 = self.parameters
        x, a = activations
        dz = dy @ w2.T * (1 - a * a)  # (N, 4h): the gradient of x W1
        self.gradients[0] += x.T @ dz
        self.gradients[1] += a.T @ dy
        return dy + dz @ w1.T  # (N, h)


# %% tags=["one-file"]
class Head:
    """A score for each letter of the vocabulary."""

    def __init__(self, weight):
        self.parameters = [weight]  # (h, V)

    def forward(self, x):
        return x @ self.parameters[0], x  # (N, h) -> (N, V)

    def backward(self, dy, x):
        self.gradients[0] += x.T @ dy
        return dy @ self.parameters[0].T  # (N, h)


# %% [markdown]
# All parameters lie in one flat array and all gradients in another, on which collectives and optimizers work. (That
# cell is folded; its lines say nothing about parallel training.)


# %% tags=["one-file", "hide-input"]
def new_layers():
    """Draw the eight layers from one seed, so that all ranks begin with the same."""
    random = np.random.default_rng(0)
    layers = [Embedding(random.normal(0, 0.2, (C, V, h)))]
    for _ in range(6):
        layers.append(Block(random.normal(0, 0.1, (h, 4 * h)), random.normal(0, 0.1, (4 * h, h))))
    layers.append(Head(random.normal(0, 0.1, (h, V))))
    return layers


class Model:
    """Copies of layers, whose parameters are views of one flat array, and their gradients of another."""

    def __init__(self, layers):
        self.layers = [copy(layer) for layer in layers]
        arrays = []
        for layer in layers:
            arrays += layer.parameters
        self.parameters = np.concatenate([array.reshape(-1) for array in arrays])
        self.gradient = np.zeros_like(self.parameters)
        start = 0
        for layer in self.layers:
            shapes = [array.shape for array in layer.parameters]
            layer.parameters = []
            layer.gradients = []
            for shape in shapes:
                part = slice(start, start + math.prod(shape))
                layer.parameters.append(self.parameters[part].reshape(shape))
                layer.gradients.append(self.gradient[part].reshape(shape))
                start = part.stop


# %% [markdown]
# The loss is a mean over *all* $N$ samples. A rank may have only some of them: `cross_entropy` still divides by $N$, so
# that the ranks' losses add up to the mean.


# %% tags=["one-file"]
def forward(layers, x):
    """Return the last layer's result and the activations of all layers."""
    kept = []
    for layer in layers:
        x, activations = layer.forward(x)
        kept.append(activations)
    return x, kept


def backward(layers, dy, kept):
    """Add to the layers' gradients, given the gradient of their result; return the gradient of their input."""
    for layer, activations in zip(reversed(layers), reversed(kept), strict=True):
        dy = layer.backward(dy, activations)
    return dy


def cross_entropy(scores, targets):
    """Return what these samples add to the mean loss of ALL samples, and its gradient with respect to the scores."""
    shifted = scores - scores.max(axis=1, keepdims=True)
    log_softmax = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    one_hot = np.eye(V)[targets]
    return -(log_softmax * one_hot).sum() / N, (np.exp(log_softmax) - one_hot) / N


def forward_backward(layers, x, targets):
    """Add to the layers' gradients those of the loss; return the loss."""
    scores, kept = forward(layers, x)
    loss, dy = cross_entropy(scores, targets)
    backward(layers, dy, kept)
    return loss


# %% [markdown]
# Backward is written by hand, so it is checked: a small step in a random direction must change the loss as the gradient
# says. (Section 0.10 writes a backward for each operation, and
# puts these together.)

# %% tags=["one-file"]
# Is the backward right? A small step in a random direction must change the loss as the gradient says.
model = Model(new_layers())
Psi = model.parameters.size
direction = np.random.default_rng(1).normal(size=Psi)
forward_backward(model.layers, contexts, tokens)
slope = model.gradient @ direction
model.parameters += 1e-6 * direction
above = forward_backward(model.layers, contexts, tokens)
model.parameters -= 2e-6 * direction
below = forward_backward(model.layers, contexts, tokens)
assert abs((above - below) / 2e-6 - slope) < 1e-7 * abs(slope), "the gradient is not the slope of the loss"

# %% [markdown]
# ## 0.3 One device
#
# *Core, 3 minutes.*
#
# One device trains with AdamW. It is the judge: every way below has to train the same model. AdamW works on each
# element alone and keeps two means for it. So it can be given any part of the parameters, and that is all ZeRO needs.
# The two means are twice as large as the parameters here. In mixed precision, where parameters and gradients have two
# bytes, the optimizer keeps both means and a copy of the parameters in four bytes each. That is twelve of sixteen bytes
# per parameter: the optimizer is the first thing to divide.

# %%
say("0.3 One device")

# %% tags=["one-file"]
STEPS = 12


class AdamW:
    """torch.optim.AdamW on a flat array, which it changes in place."""

    def __init__(self, parameters, gradient):
        self.parameters = parameters
        self.gradient = gradient
        self.mean = np.zeros_like(parameters)
        self.square = np.zeros_like(parameters)
        self.steps = 0

    def step(self, lr=0.01, b1=0.9, b2=0.99, eps=1e-8, weight_decay=0.01):
        self.steps += 1
        self.mean += (1 - b1) * (self.gradient - self.mean)
        self.square *= b2
        self.square += (1 - b2) * (self.gradient * self.gradient)
        root = np.sqrt(self.square) / math.sqrt(1 - b2**self.steps)
        self.parameters *= 1 - lr * weight_decay
        self.parameters -= lr / (1 - b1**self.steps) * (self.mean / (root + eps))


judge = Model(new_layers())
adam = AdamW(judge.parameters, judge.gradient)
judge_losses = []
for _ in range(STEPS):
    judge.gradient.fill(0)
    judge_losses.append(forward_backward(judge.layers, contexts, tokens))
    adam.step()

# %% [markdown]
# ## 0.4 A ring all-reduce
#
# *Core, 9 minutes.*
#
# A rank can send an array and receive one. Both return at once, with a request to wait for. All that training sends
# goes through these two.

# %%
say("0.4 A ring all-reduce\n")

# %% tags=["one-file"]
sent = []  # the bytes of each message that this rank sends


def isend(array, destination, comm):
    sent.append(array.nbytes)
    return comm.Isend(array, destination)  # the request keeps the array alive


def irecv(array, source, comm):
    return comm.Irecv(array, source)


def exchange(leaving, arriving, comm):
    """Send to the right neighbour in a ring of ranks, and receive from the left one at the same time."""
    right = (comm.rank + 1) % comm.size
    left = (comm.rank - 1) % comm.size
    MPI.Request.Waitall([isend(leaving, right, comm), irecv(arriving, left, comm)])


# %% [markdown]
# Every rank has an array, and all need the sum. Each of the $p$ ranks cuts its array into $p$ chunks. The sum of chunk
# $c$ begins on rank $c+1$ and travels around the ring to rank $c$. Each rank on the way adds its part. That is a
# *reduce-scatter*: rank $r$ has chunk $r$ of the sum. In $p-1$ more rounds the finished chunks travel around the ring,
# an *all-gather*. Each rank sends $2\frac{p-1}{p}$ of the array, on average over the ranks. No algorithm sends less in
# total, unless the network itself adds (chapter 3).
#
# Take four ranks, and follow chunk 0. Rank 1 sends its own chunk 0 to rank 2. Rank 2 adds its own and sends the sum of
# two to rank 3, which sends the sum of three to rank 0. Rank 0 adds its own, and has the sum of four. The other chunks
# travel at the same time, each one rank further on. So in every round each rank sends one chunk and receives one, and
# none is idle. Three rounds add, and three more pass the sums on.
#
# ![Four ranks in a ring send one chunk per round](../visualize/gallery/ring_all_reduce.gif)
#
# *Four ranks in a ring. Each sends one chunk per round to its right neighbour. For half of the rounds it adds what
# arrives, for the other half it copies.*


# %% tags=["one-file"]
def reduce_scatter(x, comm=world):
    """Leave the sum of all ranks' x in x, on rank r in chunk r only; the other chunks keep parts of sums.

    The sum of chunk c begins on rank c+1 and travels around the ring to rank c. Each rank on its way adds its part.
    """
    chunks = np.array_split(x.reshape(-1), comm.size)  # views, which need not be equal
    for step in range(1, comm.size):
        leaving = chunks[(comm.rank - step) % comm.size]
        growing = chunks[(comm.rank - step - 1) % comm.size]
        arriving = np.empty_like(growing)
        exchange(leaving, arriving, comm)
        growing += arriving


def all_gather(x, comm=world):
    """Copy chunk r of x from rank r to all ranks, for each r: the chunks travel once around the ring."""
    chunks = np.array_split(x.reshape(-1), comm.size)
    for step in range(1, comm.size):
        leaving = chunks[(comm.rank - step + 1) % comm.size]
        arriving = chunks[(comm.rank - step) % comm.size]
        exchange(leaving, arriving, comm)


def all_reduce(x, comm=world):
    """Leave the sum of all ranks' x in x, on all ranks; return x."""
    reduce_scatter(x, comm)
    all_gather(x, comm)
    return x


# %% tags=["one-file"]
# In each half a rank sends p-1 of the p chunks. Together the p ranks send 2(p-1) times the array, whatever p is.
mine = np.random.default_rng(r).normal(size=1001)
total = np.empty_like(mine)
world.Allreduce(mine, total)  # MPI's own sum, in another order
assert np.abs(all_reduce(mine) - total).max() < 1e-12, "all_reduce is not MPI's"
assert world.allreduce(sum(sent)) == 2 * (p - 1) * mine.nbytes, "all_reduce sends more or less than it should"

# %% [markdown]
# Each way below ends in a row of one table: first and last loss, the largest difference from one device in any loss or
# parameter, the bytes sent, and what rank 0 holds. The program ends if the bytes of all ranks are not exactly those of
# the formula. A difference of about 1e-15 is rounding: the same terms were added in another order. A mistake of
# meaning, such as a mean over the wrong count, is visible in the first digits. In float64 more than ten digits lie
# between the two, so one bound, 1e-12, decides.


# %% tags=["one-file", "hide-input"]
def prove(name, losses, model, expected, elements, formula, held):
    """Print a row of the table, or end the job if this way is not equal to one device or sends other bytes.

    `expected` is what this rank's parameters should be, `elements` is how many all ranks should send in a step.
    """
    differences = [np.abs(np.subtract(losses, judge_losses)).max(), np.abs(model.parameters - expected).max()]
    difference = np.max(world.allgather(differences))
    nbytes = world.allreduce(sum(sent))
    sent.clear()
    trained = f"{name:18} {losses[0]:.4f}  {losses[-1]:.4f}  {difference:.1e}"
    say(f"{trained}  {nbytes / STEPS / p:9,.0f} = {formula:22} {held}")
    if not difference < 1e-12:  # so that NaN is a mistake, too
        stop(f"{name}: this is not what one device trains")
    if nbytes != STEPS * 8 * elements:
        stop(f"{name}: all ranks together should send {8 * elements:,} bytes in a step")


sent.clear()
say(f"{p} ranks, Psi = {Psi:,} parameters, N = {N} samples, h = {h}, {STEPS} steps\n")
say("                       loss       differs  bytes that a rank sends")
say("                   first    last  at most  in a step, on average             rank 0 holds")
held = f"{Psi:,} parameters, {16 * Psi:,} bytes of AdamW"
prove("one device", judge_losses, judge, judge.parameters, 0, "0", held)

# %% [markdown]
# ## 0.5 Data parallelism
#
# *Core, 2 minutes.*
#
# Each rank has the whole model and $1/p$ of the samples. The loss is a sum over samples, divided by the number of *all*
# samples. So the gradients of its parts add up. After one all-reduce all ranks have the same gradient and take the same
# step. (The mean of the ranks' means is another thing where the ranks have unequal counts. If one rank has three
# samples of loss 1, and another has one of loss 5, then the mean of all is 2, and the mean of the means is 3. A program
# that mixes them up trains, its loss falls, and it is wrong: [4.6](04_data_parallel.ipynb).)

# %%
say("\n0.5 Data parallelism")


# %% tags=["one-file"]
def own(x, comm=world, axis=0):
    """Return this rank's part of x."""
    return np.array_split(x, comm.size, axis=axis)[comm.rank]


model = Model(new_layers())
adam = AdamW(model.parameters, model.gradient)
losses = []
for _ in range(STEPS):
    model.gradient.fill(0)
    loss = forward_backward(model.layers, own(contexts), own(tokens))
    reduce_scatter(model.gradient)
    all_gather(model.gradient)  # these two lines are an all-reduce
    adam.step()
    losses.append(world.allreduce(loss))  # only for the table, so not counted
data_parallel = model.parameters
held = f"{len(own(tokens))} of the {N} samples"
prove("data parallelism", losses, model, judge.parameters, 2 * (p - 1) * Psi, "2(p-1)/p x 8 Psi", held)

# %% [markdown]
# ## 0.6 ZeRO 1
#
# *Core, 3 minutes.*
#
# **The update fits between the two halves.** After the reduce-scatter rank $r$ has chunk $r$ of the sum. AdamW works on
# each element alone, so rank $r$ can update chunk $r$ of the parameters, with chunk $r$ of the two means. Then the
# all-gather carries *updated parameters* in the place of gradients. Compare the loop with the one above: two lines have
# changed places, and the all-gather has another argument. That answers the question of the first page: ZeRO 1 sends as
# many bytes as data parallelism, and it gives the same bits. But AdamW is given `own(...)`, so each rank keeps the two
# means of $1/p$ of the $\Psi$ parameters only.
#
# This is stage 1. Stage 2 keeps only chunk $r$ of the gradients, too, and sends the same. Stage 3 keeps only chunk $r$
# of the parameters. A layer is gathered for its forward, freed, and gathered again for its backward. With the
# reduce-scatter these are three transfers in place of two, one and a half times as much ([chapter 5](05_zero.ipynb)).

# %%
say("\n0.6 ZeRO 1")

# %% tags=["one-file"]
zero = Model(new_layers())
adam = AdamW(own(zero.parameters), own(zero.gradient))  # views of chunk r
losses = []
for _ in range(STEPS):
    zero.gradient.fill(0)
    loss = forward_backward(zero.layers, own(contexts), own(tokens))
    reduce_scatter(zero.gradient)
    adam.step()
    all_gather(zero.parameters)
    losses.append(world.allreduce(loss))
held = f"{adam.mean.nbytes + adam.square.nbytes:,} bytes of AdamW"
prove("ZeRO 1", losses, zero, judge.parameters, 2 * (p - 1) * Psi, "2(p-1)/p x 8 Psi", held)
assert np.array_equal(zero.parameters, data_parallel), "ZeRO 1 does not have the bits of data parallelism"

# %% [markdown]
# ## 0.7 Tensor parallelism
#
# *Core, 6 minutes.*
#
# All ranks have all samples, and each has a part of every block's matrices. Cut $W_1$ by columns: each rank computes
# some columns of the activation, and tanh works on each element alone. Cut $W_2$ by the matching rows: each rank gets a
# term of the result, and one sum adds the terms. In backward it is the gradient of $x$ whose terms are added. NVIDIA's
# Megatron-LM gives the two places names: at *g* forward sums and backward does nothing, at *f* backward sums and
# forward does nothing. They are *conjugate*. Attention is cut in the same way, by heads. The embedding and the head
# stay whole here; chapter 6b cuts them, too.
#
# Why columns first? If $W_1$ were cut by rows, each rank would have a term of $x W_1$. The tanh of a sum is not the sum
# of the tanhs, so the terms would have to be added before it, and once more after $W_2$. Columns first needs one sum
# for two products. Still, a block needs two sums of $N h$ elements in each step, and the next product waits for each of
# them. These are few elements here, but $N h$ grows with the samples. So tensor parallelism belongs on the fastest
# wire, between the devices of one host.

# %%
say("\n0.7 Tensor parallelism")


# %% tags=["one-file"]
class SplitBlock(Block):
    """This rank's columns of W1 and rows of W2, on one of t ranks."""

    def __init__(self, w1, w2, comm):
        super().__init__(own(w1, comm, axis=1), own(w2, comm))  # (h, 4h/t), (4h/t, h)
        self.comm = comm

    def forward(self, x):
        w1, w2 = self.parameters
        a = np.tanh(x @ w1)  # (N, h) -> (N, 4h/t)
        return x + all_reduce(a @ w2, self.comm), (x, a)  # g: (N, h)

    def backward(self, dy, activations):
        w1, w2 = self.parameters
        x, a = activations
        dz = dy @ w2.T * (1 - a * a)  # (N, 4h/t)
        self.gradients[0] += x.T @ dz
        self.gradients[1] += a.T @ dy
        return dy + all_reduce(dz @ w1.T, self.comm)  # f: (N, h)


def split(layers, comm=world):
    """Return the layers with split blocks. The embedding and the head stay whole, and all ranks compute the same."""
    return [SplitBlock(*layer.parameters, comm) if isinstance(layer, Block) else layer for layer in layers]


# %% tags=["one-file"]
model = Model(split(new_layers()))
adam = AdamW(model.parameters, model.gradient)
losses = []
for _ in range(STEPS):
    model.gradient.fill(0)
    losses.append(forward_backward(model.layers, contexts, tokens))
    adam.step()  # the gradients need no message: each rank has its own columns and rows
summed = 2 * 6 * N * h  # elements: two sums in each of six blocks
expected = Model(split(judge.layers)).parameters
held = f"{model.parameters.size:,} parameters"
prove("tensor parallelism", losses, model, expected, 2 * (p - 1) * summed, "2(p-1)/p x 8 x 12 N h", held)

# %% [markdown]
# ## 0.8 A pipeline
#
# *Core, 8 minutes.*
#
# Each rank has some of the layers: a *stage*. The samples are cut into $m$ *microbatches* that follow one another. A
# forward sends its result to the next rank, a backward sends a gradient to the rank before. While the pipeline fills
# and drains, ranks wait: $\frac{p-1}{m+p-1}$ of the step is the *bubble*, so $m$ should be large. On 8 ranks it is 30 %
# with 16 microbatches, and 10 % with 64. A message is a microbatch of $h$ elements per sample, and it goes to one
# neighbour: no other way here sends so little. So a pipeline can cross the slowest wire, between hosts. GPipe runs all
# forwards, then all backwards, and each rank keeps the activations of $m$ microbatches. 1F1B (one forward, one
# backward) runs one forward for each rank that comes after this one, then one forward and one backward in turn, then
# the backwards that are left. The bubble is the same. **Predict**: how many microbatches does rank 0 keep then?
#
# ![1F1B on 8 ranks with 16 microbatches](../visualize/gallery/schedule_1f1b_8x16.png)
#
# *1F1B on 8 ranks, with 16 microbatches. Time runs from left to right. White is waiting: the first microbatch must come
# down to the last rank before any gradient can come back. Below are the activations that each rank keeps.*

# %%
say("\n0.8 A pipeline")


# %% tags=["one-file"]
def schedule(ahead, m):
    """List a rank's actions: `ahead` forwards, then a forward and a backward in turn, then the backwards left."""
    actions = [("forward", i) for i in range(min(ahead, m))]
    for i in range(m):
        if ahead + i < m:
            actions.append(("forward", ahead + i))
        actions.append(("backward", i))
    return actions


def stage_of(layers, comm=world):
    """Return this rank's layers."""
    return [layers[i] for i in own(range(len(layers)), comm)]


def receive(samples, source, comm):
    """Wait for an array of (samples, h) elements and return it."""
    array = np.empty((samples, h))
    irecv(array, source, comm).Wait()
    return array


# %% [markdown]
# A schedule is a list of actions, and both schedules come from one function. A rank does its list in order. It waits
# only for what an action needs.


# %% tags=["one-file"]
def run_pipeline(stage, actions, xs, targets, comm=world):
    """Add to the stage's gradients those of all microbatches; return its loss and the most microbatches it kept."""
    is_first = comm.rank == 0
    is_last = comm.rank == comm.size - 1
    kept = {}  # the activations of each microbatch that waits for its backward
    peak = 0
    dscores = {}
    loss = 0.0
    sends = []
    for kind, i in actions:
        if kind == "forward":
            x = xs[i] if is_first else receive(len(xs[i]), comm.rank - 1, comm)
            y, kept[i] = forward(stage, x)
            peak = max(peak, len(kept))
            if is_last:
                part, dscores[i] = cross_entropy(y, targets[i])
                loss += part
            else:
                sends.append(isend(y, comm.rank + 1, comm))
        else:
            dy = dscores.pop(i) if is_last else receive(len(xs[i]), comm.rank + 1, comm)
            dx = backward(stage, dy, kept.pop(i))
            if not is_first:
                sends.append(isend(dx, comm.rank - 1, comm))
    MPI.Request.Waitall(sends)
    return loss, peak


# %% tags=["one-file"]
m = 2 * p
xs = np.array_split(contexts, m)
targets = np.array_split(tokens, m)
for name, ahead, most in ("GPipe", m, m), ("1F1B", p - 1 - r, p - r):
    model = Model(stage_of(new_layers()))
    adam = AdamW(model.parameters, model.gradient)
    losses = []
    for _ in range(STEPS):
        model.gradient.fill(0)
        loss, peak = run_pipeline(model.layers, schedule(ahead, m), xs, targets)
        adam.step()  # no message here either: each rank has its own layers
        losses.append(world.allreduce(loss))  # the last rank's; the others have 0
    assert peak == most, f"rank {r} keeps {peak} microbatches with {name}, and not {most}"
    expected = Model(stage_of(judge.layers)).parameters
    held = f"{len(model.layers)} of 8 layers, {peak} of {m} microbatches"
    prove(f"pipeline, {name}", losses, model, expected, 2 * (p - 1) * N * h, "2(p-1)/p x 8 N h", held)

# %% [markdown]
# Rank 0 keeps $p$ microbatches with 1F1B, however large $m$ is. Both schedules train the same model.

# %% [markdown]
# ## 0.9 All at once
#
# *Core, 5 minutes.*
#
# A rank has a place on each of three axes, *pp*, *dp* and *tp*. Ranks that differ in one place alone are a group of
# that axis: ranks 0 and 1 of *tp*, which should be neighbours on the fastest wire, 0 and 2 of *dp*, 0 and 4 of *pp*.
# With fewer than 8 ranks some axes have size 1. Nothing changes in the functions above: a stage of split blocks runs
# the pipeline on its part of the samples, and ZeRO 1 updates it over *dp*.

# %%
say("\n0.9 All at once")

# %% tags=["one-file"]
tp_size = math.gcd(p, 2)
pp_size = math.gcd(p // tp_size, 2)
dp_size = p // tp_size // pp_size  # 8 ranks are 2 x 2 x 2
tp_rank = r % tp_size
dp_rank = r // tp_size % dp_size
pp_rank = r // tp_size // dp_size
tp = world.Split(pp_rank * dp_size + dp_rank)  # the ranks that give the same number are one group
dp = world.Split(pp_rank * tp_size + tp_rank)
pp = world.Split(dp_rank * tp_size + tp_rank)

# %% tags=["one-file"]
model = Model(stage_of(split(new_layers(), tp), pp))
adam = AdamW(own(model.parameters, dp), own(model.gradient, dp))
m = 2 * pp.size
xs = np.array_split(own(contexts, dp), m)
targets = np.array_split(own(tokens, dp), m)
losses = []
for _ in range(STEPS):
    model.gradient.fill(0)
    loss, peak = run_pipeline(model.layers, schedule(pp.size - 1 - pp.rank, m), xs, targets, pp)
    reduce_scatter(model.gradient, dp)
    adam.step()
    all_gather(model.parameters, dp)
    losses.append(world.allreduce(loss) / tp.size)  # the ranks of tp have the same loss
# What all ranks together should send. The parameters of all ranks are those of dp copies of a model.
by_dp = 2 * (dp.size - 1) * world.allreduce(model.parameters.size) // dp.size
by_tp = 2 * (tp.size - 1) * summed
by_pp = 2 * (pp.size - 1) * N * h * tp.size
expected = Model(stage_of(split(judge.layers, tp), pp)).parameters
held = f"{model.parameters.size:,} parameters, {16 * adam.mean.size:,} bytes of AdamW"
prove(f"dp {dp.size}, tp {tp.size}, pp {pp.size}", losses, model, expected, by_dp + by_tp + by_pp, "all three", held)

# %% tags=["one-file"]
# What have they learned? Each letter that the model predicts becomes the last one of the letters that it sees.
seen = tokens[-C:]
for _ in range(N):
    scores, _ = forward(zero.layers, seen[None, -C:])  # (1, C) -> (1, V)
    seen = np.append(seen, scores.argmax())
say(f"\nAll are equal to one device. ZeRO 1 has learned by heart:\n\n{''.join(vocabulary[seen[C:]])}")

# %% [markdown]
# This is what to remember of each way:
#
# | | divides | a rank sends in a step | use it when |
# | --- | --- | --- | --- |
# | data parallelism | the samples | the sum of the gradients: almost twice their bytes | model and AdamW fit |
# | ZeRO | samples and AdamW's means; then gradients, parameters | as much; stage 3 1.5 times it | little memory |
# | tensor parallelism | the matrices of each block | two sums of $N h$ elements per block | large layers, fast wire |
# | pipeline | the list of layers | $h$ elements per sample forward, as many back | slow wire, large $m$ |
#
# They are combined because none of them is enough: one runs out of samples, of columns or of layers to divide, and each
# needs another kind of wire. Chapters 3 to 9 build each way for a whole GPT.

# %% [markdown]
# ## 0.10 A tensor that knows what it was computed from
#
# *Deeper, 4 minutes.*

# %% [markdown]
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


# %%
def operation(rule):
    """Make an operation on tensors of a rule on arrays, which returns its result and a gradient for each input."""

    def apply(*inputs):
        arrays = [x.data if isinstance(x, Tensor) else x for x in inputs]
        result, *gradients = rule(*arrays)
        return Tensor(result, inputs, gradients)

    return apply


# %% [markdown]
# ## 0.11 Seven operations
#
# *Deeper, 8 minutes; the formulas are derived in chapters 1 and 2.*

# %% [markdown]
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


# %%
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


# %%
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


# %%
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


# %%
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


# %%
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
# ## 0.12 A GPT
#
# *Deeper, 12 minutes.*

# %% [markdown]
# GPT-2 with as many heads and layers as ranks, and with GPT-2's names. All parameters are views of one array, `flat`,
# on which collectives and optimizers work. The output head has the same values as the token embedding `wte`, and a
# gradient of its own. One device adds the two in the end; in a pipeline they stay on two ranks, and 7.7 adds them.

# %%
# From here on V and h are those of the GPT.
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


def views(flat):
    """Return the parameters by name: tensors whose arrays are parts of the flat one."""
    parameters = {}
    start = 0
    for name, shape in shapes().items():
        size = math.prod(shape)
        parameters[name] = Tensor(flat[start : start + size].reshape(shape))
        start += size
    return parameters


# %%
class GPT:
    """GPT-2. Its values are drawn from one seed, so they are the same on every rank."""

    def __init__(self):
        sizes = [math.prod(shape) for shape in shapes().values()]
        self.flat = np.random.default_rng(0).normal(0, 0.1, sum(sizes))
        self.parameters = views(self.flat)
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
# The first check is that of 0.2: a small step along a random direction must change the loss as the gradient says.


# %%
def batch(step):
    """Return the inputs and targets of a step, (B, T) each: bytes of English; a target is the byte after its input."""
    text = np.frombuffer(np.__doc__.encode(), np.uint8)
    starts = np.random.default_rng(step).integers(text.size - T, size=(B, 1))
    tokens = text[starts + np.arange(T + 1)]
    return tokens[:, :-1], tokens[:, 1:]


def loss_backward(model, x, targets):
    """Add the gradient of (summed loss) / (tokens of the global batch) to the model's; return that quotient."""
    loss = model.loss_sum(x, targets)
    loss.backward(1 / (B * T))
    return loss.data / (B * T)


model = GPT()
loss = loss_backward(model, *batch(0))
truth = model.take_gradient()

direction = np.random.default_rng(1).normal(size=truth.size) / math.sqrt(truth.size)
model.flat += 1e-5 * direction
above = loss_backward(model, *batch(0))
model.flat -= 2e-5 * direction
below = loss_backward(model, *batch(0))
slope = (above - below) / 2e-5
assert abs(slope - truth @ direction) < 1e-8 * np.linalg.norm(truth)
say("\n0.10 A tensor that knows what it was computed from\n0.11 Seven operations\n0.12 A GPT")
say(f"{truth.size:,} parameters, loss {loss:.3f}, slope {slope:.6f}, by backward {truth @ direction:.6f}")

# %% [markdown]
# Data parallelism and ZeRO need not know the model. These are the loops of 0.5 and 0.6, for the GPT:


# %%
def train_gpt(zero):
    """Train a GPT for five steps, with ZeRO 1 or data parallelism; return its parameters, a flat array."""
    model = GPT()
    gradient = np.empty_like(model.flat)
    if zero:
        adam = AdamW(own(model.flat), own(gradient))
    else:
        adam = AdamW(model.flat, gradient)
    for step in range(5):
        x, targets = batch(step)
        loss_backward(model, own(x), own(targets))
        gradient[...] = model.take_gradient()
        reduce_scatter(gradient)
        if zero:
            adam.step(lr=1e-3, b2=0.999, weight_decay=0)
            all_gather(model.flat)
        else:
            all_gather(gradient)
            adam.step(lr=1e-3, b2=0.999, weight_decay=0)
    return model.flat


model = GPT()
x, targets = batch(0)
loss_backward(model, own(x), own(targets))
assert np.abs(all_reduce(model.take_gradient()) - truth).max() <= 1e-12 * np.abs(truth).max()
trained = train_gpt(zero=False)
assert trained.tobytes() == train_gpt(zero=True).tobytes()
assert world.allgather(trained.tobytes()) == [trained.tobytes()] * p
say("data parallelism and ZeRO 1: the gradient of one device within rounding, and the same bits on all ranks")

# %% [markdown]
# ## 0.13 The library gives the same bits
#
# *Deeper, 6 minutes.*

# %% [markdown]
# minipar has the functions above under the same names: `all_reduce` in comm/algorithms.py, `linear` and `attention` in
# autograd, ZeRO stage 1 in parallel/zero.py, *f* and *g* in parallel/tensor/mappings.py, 1F1B in
# parallel/pipeline/schedules.py. It adds what real use needs: any dtype, buckets and overlap, checkpoints, errors with
# a remedy.
#
# **Where it goes on.** [9.1](09_3d_parallel.ipynb) lists the groups of a rank where three strategies are combined, and
# 9.4 what is sent in each. Several steps are compared with one process in [4.7](04_data_parallel.ipynb) and
# [7.5](07_pipeline.ipynb) bit for bit, in [6b.6](06b_vocabulary_and_memory.ipynb) within rounding.
# [6b.1](06b_vocabulary_and_memory.ipynb) says which parameters are cut or whole,
# [6.5](06_tensor_parallel.ipynb) over which ranks their gradients are summed, and
# [7.7](07_pipeline.ipynb) what a tied head on another stage needs.
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
        x, targets = batch(step)
        wrapper.loss(own(x), own(targets)).backward()
        optimizer.step()
        optimizer.zero_grad()
    flat = np.concatenate([parameter.data.reshape(-1) for parameter in library.parameters()])
    assert flat.tobytes() == trained.tobytes()

# %%
random = np.random.default_rng(2)
x = random.normal(size=(T, h))
w1 = random.normal(size=(h, 4 * h))
w2 = random.normal(size=(4 * h, h))
dy = random.normal(size=(T, h))
pair = Model([SplitBlock(w1, w2, world)])  # it adds x to the result, and the library's two layers do not
y, kept = forward(pair.layers, x)
dx = backward(pair.layers, dy, kept)

up = mp.ColumnParallelLinear(h, 4 * h, comm, name="up", bias=False, dtype="float64")
down = mp.RowParallelLinear(4 * h, h, comm, name="down", bias=False, dtype="float64")
up.weight.data[...], down.weight.data[...] = pair.layers[0].parameters
x_library = mp.Tensor(x[None], requires_grad=True)  # (1, T, h)
y_library = x_library + down(up(x_library).tanh())
y_library.backward(dy[None])
assert np.array_equal(y, y_library.data[0])
assert np.array_equal(dx, x_library.grad[0])
assert np.array_equal(pair.layers[0].gradients[0], up.weight.grad)
assert np.array_equal(pair.layers[0].gradients[1], down.weight.grad)

# %%
for name, ahead in ("gpipe", 2 * p), ("1f1b", p - 1 - r):
    library = [(action.kind, action.microbatch) for action in make(name, p, 2 * p).ranks[r]]
    assert library == [(kind[0].upper(), i) for kind, i in schedule(ahead, 2 * p)]
say(
    "\n0.13 The library gives the same bits\nequal: data parallelism, ZeRO stage 1, the parallel layers, GPipe and 1F1B"
)

# %% tags=["active-ipynb"]
# %autopx

# %% tags=["active-ipynb"]
# cluster.stop_cluster_sync()
