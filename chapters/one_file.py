"""Parallel training in one file, with NumPy and mpi4py alone.

    mpirun -n 8 python chapters/one_file.py

A small language model learns four lines by heart: first on one device, then on all ranks in six ways. The ranks share
the samples, the optimizer's memory, the matrices or the layers, and at last all of these at once. Each way is proved
equal to one device in float64, and the bytes that it sends are counted. It runs on 1 to 8 ranks. Read it from the top;
sections 3 to 7 are chapters 3 to 7 of the course in small.
"""

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

# ---- 1. The model ----------------------------------------------------------------------------------------------------
# It reads C letters and predicts the next one. A letter has a vector for each place where it can stand. The sum of the
# C vectors goes through six residual blocks, and a last matrix makes of it a score for each letter of the vocabulary.

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


class Head:
    """A score for each letter of the vocabulary."""

    def __init__(self, weight):
        self.parameters = [weight]  # (h, V)

    def forward(self, x):
        return x @ self.parameters[0], x  # (N, h) -> (N, V)

    def backward(self, dy, x):
        self.gradients[0] += x.T @ dy
        return dy @ self.parameters[0].T  # (N, h)


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

# ---- 2. One device ---------------------------------------------------------------------------------------------------
# One device trains with AdamW. It is the judge: every way below has to train the same model. AdamW works on each
# element alone and keeps two means for it. So it can be given any part of the parameters, and that is all ZeRO needs.

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

# ---- 3. Messages -----------------------------------------------------------------------------------------------------
# A rank can send an array and receive one. Both return at once, with a request to wait for. All that follows is written
# from these two. `comm` is a group of ranks: the whole world, until section 8.

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


# In each half a rank sends p-1 of the p chunks. Together the p ranks send 2(p-1) times the array, whatever p is.
mine = np.random.default_rng(r).normal(size=1001)
total = np.empty_like(mine)
world.Allreduce(mine, total)  # MPI's own sum, in another order
assert np.abs(all_reduce(mine) - total).max() < 1e-12, "all_reduce is not MPI's"
assert world.allreduce(sum(sent)) == 2 * (p - 1) * mine.nbytes, "all_reduce sends more or less than it should"


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

# ---- 4. Data parallelism ---------------------------------------------------------------------------------------------
# Each rank has the whole model and some of the samples. The loss is a sum over samples, divided by the number of ALL
# samples, so the ranks' gradients add up to that of one device. (The mean of the ranks' means is another thing where
# the ranks have unequal counts. It trains, its loss falls, and it is wrong.)


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

# ---- 5. ZeRO 1 -------------------------------------------------------------------------------------------------------
# The update fits between the two halves. After the reduce-scatter rank r has chunk r of the sum. AdamW works on each
# element alone, so rank r can update chunk r of the parameters, with chunk r of the two means. Then the all-gather
# carries parameters in the place of gradients: as many bytes, the same bits, and 1/p of the optimizer's memory.

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

# ---- 6. Tensor parallelism -------------------------------------------------------------------------------------------
# All ranks have all samples, and each has a part of every block's matrices. Cut W1 by columns: a rank computes some
# columns of a, and tanh works on each element alone. Cut W2 by rows: a rank's a W2 is one term of the result, and one
# sum adds the terms (Megatron-LM calls it g). In backward it is the gradient of x whose terms are added (f). Where one
# of the two sums in forward, the other sums in backward: f and g are conjugate. Attention is cut in the same way, by
# heads.


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

# ---- 7. A pipeline ---------------------------------------------------------------------------------------------------
# Each rank has some of the layers: a stage. The samples are cut into m microbatches that follow one another. A forward
# sends its result to the next rank, a backward sends a gradient to the rank before. While the pipeline fills and drains
# ranks wait: (p-1)/(m+p-1) of the step is the bubble, so m should be large. GPipe runs all forwards, then all
# backwards, and rank 0 keeps the activations of m microbatches. 1F1B runs one forward for each rank that comes after
# this one, then one forward and one backward in turn. It keeps those of p microbatches, however large m is.


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

# ---- 8. All at once --------------------------------------------------------------------------------------------------
# A rank has a place on each of three axes. Along an axis it works with the ranks that have its places on the other two.
# Nothing above changes: a stage of split blocks runs the pipeline on its part of the samples, and ZeRO 1 updates it.

tp_size = math.gcd(p, 2)
pp_size = math.gcd(p // tp_size, 2)
dp_size = p // tp_size // pp_size  # 8 ranks are 2 x 2 x 2
tp_rank = r % tp_size
dp_rank = r // tp_size % dp_size
pp_rank = r // tp_size // dp_size
tp = world.Split(pp_rank * dp_size + dp_rank)  # the ranks that give the same number are one group
dp = world.Split(pp_rank * tp_size + tp_rank)
pp = world.Split(dp_rank * tp_size + tp_rank)

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

# What have they learned? Each letter that the model predicts becomes the last one of the letters that it sees.
seen = tokens[-C:]
for _ in range(N):
    scores, _ = forward(zero.layers, seen[None, -C:])  # (1, C) -> (1, V)
    seen = np.append(seen, scores.argmax())
say(f"\nAll are equal to one device. ZeRO 1 has learned by heart:\n\n{''.join(vocabulary[seen[C:]])}")
