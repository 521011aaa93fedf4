# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 1. Autograd
#
# **How does a program compute the gradient of a program, and how do we know that the gradient is right?**
#
# A gradient engine takes thirty lines. The one of this chapter finds that a small computation has the derivative 48 by
# one of its inputs. Ask it a second time, and the two should add up to 96. They do not, and there is no error. Such
# mistakes are the reason for this chapter: parallel training divides a step among ranks and claims that the parts
# compute the same gradient. So we must know the formula of each operation, the order in which backward visits the
# operations, and the moment at which a gradient is complete. At the end you can write an engine, and check any gradient
# with two forwards.

# %% tags=["active-ipynb", "setup"]
# from chapters.support.notebook import start
#
# cluster = start(8)

# %% tags=["setup"]
import itertools
from collections import Counter

import numpy as np

from chapters.support.show import printer
from minipar.comm import world

comm = world()
say = printer(comm.rank)  # rank 0 prints and draws; every rank checks
if comm.rank == 0:
    from chapters.support.ch01 import figures
    from chapters.support.show import show, show_source

# %%
say(f"{comm.size} rank(s)")
if comm.rank == 0:
    show(figures.plot_small_graph(), "01_backward")

# %% [markdown]
# Forward computes $c = (x w)(x w + x)$ from $w = 3$ and $x = 2$, from left to right. Boxes in a row are operations, in
# the order of their numbers. Backward goes the other way. Arrows carry what each operation sends to its inputs, its
# *contributions*, and each gradient is the sum of what arrives. As one formula $c = x^2 w^2 + x^2 w$. So
# $\partial c / \partial x = 2 x w^2 + 2 x w = 48$ and $\partial c / \partial w = 2 x^2 w + x^2 = 28$, as in the boxes.
#
# $x$ receives 6 from $b$ first, and then 42 from $a$. If another rank got the gradient of $x$ after its first
# contribution, it would get 6 instead of 48. That moment decides in [chapter 4](04_data_parallel.ipynb) when a gradient
# may be sent. In this chapter nothing is parallel: each rank, a process that `mpirun` started, computes the same. This
# chapter is about the first row of the picture of [chapter 0](00_in_one_file.ipynb):

# %%
if comm.rank == 0:
    from chapters.support.overview import draw_strategies

    show(draw_strategies(["one"]), "01_here")

# %% [markdown]
# ## 1.1 An engine in 30 lines
#
# *Core, 12 minutes.*
#
# Backward goes through a computation from its end to its beginning. Let $\ell$ be the end, the loss. At an operation
# $y = f(x)$ it has the gradient $g = \partial \ell / \partial y$, and by the chain rule it computes
# $\partial \ell / \partial x = J^\top g$, a *vector-Jacobian product*. $J$ itself is never formed: for an operation on
# $N$ rows of $h$ elements it would have $(N h)^2$ entries. Each operation has a *rule* instead, a function that
# computes $J^\top g$ with about the work of forward:
#
# | operation | gradient of its first input | of its second |
# |---|---|---|
# | $y = a + b$ | $g$ | $g$ |
# | $y = a \odot b$ (element by element) | $g \odot b$ | $g \odot a$ |
# | $y = A D$ (matrices) | $g D^\top$ | $A^\top g$ |
# | $y = \tanh a$ | $g \odot (1 - y^2)$ | |
#
# The rule of the product follows from its elements: $y_{ij} = \sum_k A_{ik} D_{kj}$, so $A_{ik}$ receives
# $\sum_j g_{ij} D_{kj}$.
#
# A tensor keeps the tensors that it was computed from and a rule for each. A tensor that is used several times receives
# a contribution from each use, and its gradient is their sum. Two questions remain: in which order does backward visit
# the tensors, and when is a gradient complete?
#
# **The order.** Backward may visit a tensor only when its gradient is complete, so after all its users. Textbooks find
# such an order, a *topological order*, by a recursive search. Numbers make the search unnecessary. Each tensor gets the
# next number when it is made, and an operation cannot use what does not exist yet:
#
# > The inputs of a tensor have smaller numbers than the tensor itself. So visiting the numbers from large to small
# > visits every user before what it used.
#
# Backward collects the tensors below its root, sorts them by number, and is then a plain loop.
#
# **Completeness.** While it collects, it counts how often each tensor is an input: its *uses*. Each arriving
# contribution lowers the count by one. At zero the gradient is complete.


# %%
class SmallTensor:
    """An array, the tensors that it was computed from, and a rule from its gradient to that of each of them."""

    numbers = itertools.count()

    def __init__(self, data, inputs=(), rules=()):
        self.data = data
        self.inputs = inputs
        self.rules = rules
        self.number = next(self.numbers)
        self.grad = 0.0

    def __add__(a, b):
        return SmallTensor(a.data + b.data, (a, b), (lambda g: g, lambda g: g))

    def __mul__(a, b):
        return SmallTensor(a.data * b.data, (a, b), (lambda g: g * b.data, lambda g: g * a.data))

    def __matmul__(a, b):
        return SmallTensor(a.data @ b.data, (a, b), (lambda g: g @ b.data.T, lambda g: a.data.T @ g))

    def tanh(a):
        y = np.tanh(a.data)
        return SmallTensor(y, (a,), (lambda g: g * (1 - y * y),))

    def receive(self, contribution):
        self.grad = self.grad + contribution  # a new array: the contribution may be another tensor's gradient too

    def count_uses(self):
        """How often each tensor below is an input."""
        uses = Counter()
        found = [self]
        while found:
            for x in found.pop().inputs:
                if x not in uses:
                    found.append(x)
                uses[x] += 1
        return uses

    def backward(self, gradient, complete=lambda tensor: None):
        """Add up the gradient of every tensor below, and call `complete` with each whose gradient is complete."""
        uses = self.count_uses()
        self.grad = gradient
        for tensor in sorted([self, *uses], key=lambda tensor: tensor.number, reverse=True):
            for x, rule in zip(tensor.inputs, tensor.rules, strict=True):
                x.receive(rule(tensor.grad))
                uses[x] -= 1
                if uses[x] == 0:
                    complete(x)


# %% [markdown]
# The graph of the first page. Backward visits $c$, $b$, $a$ in this order, and $b$, $a$, $x$, $w$ become complete in
# this order. A *leaf* is a tensor that nothing computed, such as a parameter: here $x$ and $w$.

# %%
w = SmallTensor(3.0)
x = SmallTensor(2.0)
a = x * w
b = a + x
c = a * b
completed = []
c.backward(1.0, completed.append)
assert (x.grad, w.grad, a.grad, b.grad) == (48, 28, 14, 6)
assert completed == [b, a, x, w]
say(f"gradient of x: {x.grad:g}, of w: {w.grad:g}")

# %% [markdown]
# ### Backward a second time
#
# Gradients of leaves add up, because a training step may run several backwards before the optimizer uses the sum. So a
# second `c.backward(1.0)` should leave $2 \cdot 48 = 96$ in `x.grad`. **Predict** what this engine leaves, with the
# picture of the first page. **[Exercise 21](exercises/e21_second_backward.py)** asks for an engine that adds up, frees
# what it has used, and refuses what is freed: `make exercises PYTEST="-k e21"`. Write it before you read on.

# %%
from chapters.support.predict import predict, reveal

predict("gradient of x after a second backward", ...)  # put your answer in the place of the dots

# %%
c.backward(1.0)
reveal("gradient of x after a second backward", x.grad, say)
assert x.grad == 162
if comm.rank == 0:
    graph = {"w (a leaf)": w, "x (a leaf)": x, "a = x w": a, "b = a + x": b, "c = a b": c}
    show(figures.plot_backward(graph), "01_second_backward")

# %% [markdown]
# *The second backward.* `b` still had the gradient 6 of the first pass. It received 6 more, and sent 12 down instead of
# 6. The mistake grows on the way: `a` sent 102 to `x`, and not 42. The leaves must add up over several passes. What was
# computed between them must start each pass from 0:


# %%
def backward_again(root, gradient):
    """Run backward through a graph that may have been used before."""
    for tensor in root.count_uses():
        if tensor.inputs:
            tensor.grad = 0.0  # a leaf keeps its gradient
    root.backward(gradient)


x.grad = 0.0
w.grad = 0.0
backward_again(c, 1.0)
backward_again(c, 1.0)
assert (x.grad, w.grad) == (2 * 48, 2 * 28)
say(f"mended: {x.grad:g}")

# %% [markdown]
# PyTorch and the library do something else. Backward frees what forward has saved as it goes, so that memory falls. The
# arrays for a second pass are gone then, and both refuse it with an error. (PyTorch's `retain_graph=True` keeps them.
# Here, of two losses of one graph take the sum first.)

# %%
from chapters.support.caught import catcher
from minipar.autograd import Tensor

caught = catcher(say)  # runs a check that must fail, and prints what it says
two = Tensor(np.array(2.0), requires_grad=True)
square = two * two
square.backward(np.array(1.0))
caught("a second backward in the library", lambda: square.backward(np.array(1.0)), ValueError)

# %% [markdown]
# ## 1.2 How do we know that a backward is right?
#
# *Core, 8 minutes.*
#
# For any $u$ and $g$ the transposed matrix satisfies $\langle J^\top g, u\rangle = \langle g, J u\rangle$ ($J^\top$ is
# also called the *adjoint* of $J$). The left side is what backward computes. The right side needs only forward: $J u$
# is the derivative of $f$ along $u$, and a central difference gives it:
#
# $$\langle J^\top g, u\rangle \;=\;
# \Big\langle g, \frac{f(x + \varepsilon u) - f(x - \varepsilon u)}{2 \varepsilon} \Big\rangle + O(\varepsilon^2).$$
#
# Draw $u$ and $g$ at random. If backward is wrong by a matrix $E \ne 0$, then $g^\top E\, u = 0$ has probability 0. One
# random direction sees every element (as long as its error weighs more than the tolerance), at the price of two
# forwards. A check of each element alone takes two forwards for each of them.

# %%
random = np.random.Generator(np.random.Philox(1))


def check_adjoint(f, arrays, step=1e-6, tolerance=1e-8, random=random):
    """Compare the two sides for f(*tensors), with random g and u; u moves all inputs at once. Returns the error."""
    inputs = [SmallTensor(array) for array in arrays]
    y = f(*inputs)
    g = random.standard_normal(y.data.shape)
    u = [random.standard_normal(array.shape) for array in arrays]
    y.backward(g)
    by_backward = sum((tensor.grad * direction).sum() for tensor, direction in zip(inputs, u, strict=True))
    moved = [[x + sign * step * v for x, v in zip(arrays, u, strict=True)] for sign in (1, -1)]
    ahead, behind = (f(*map(SmallTensor, point)).data for point in moved)
    by_forward = (g * (ahead - behind)).sum() / (2 * step)
    error = abs(by_backward - by_forward) / max(1.0, abs(by_forward))
    assert error < tolerance, f"backward gives {by_backward:.9f}, the difference quotient {by_forward:.9f}"
    return error


def chain(x, A, D):
    return (x @ A).tanh() @ D  # each tensor is used once


def with_skip(x, A, D):
    return x + (x @ A).tanh() @ D  # x is used twice


arrays = [random.standard_normal(shape) for shape in ((6, 4), (4, 16), (16, 4))]
say(f"a chain: error {check_adjoint(chain, arrays):.1e}; with a skip path: {check_adjoint(with_skip, arrays):.1e}")

# %% [markdown]
# Which step is best? Rank 0 tries all powers of ten, with the same $u$ and $g$ for each.

# %%
if comm.rank == 0:
    steps = [10.0**power for power in range(-12, -1)]
    errors = []
    for step in steps:
        same = np.random.Generator(np.random.Philox(5))
        errors.append(check_adjoint(with_skip, arrays, step, tolerance=1.0, random=same))
    show(figures.plot_steps(steps, errors), "01_steps")

# %% [markdown]
# A large step leaves the truncated terms, which are proportional to $\varepsilon^2$ (of a one-sided difference to
# $\varepsilon$, so its least error is some hundred times larger). A small step loses digits: the two values of $f$ are
# almost equal, and their rounding errors are divided by $\varepsilon$. In float64 the error is least near $10^{-5}$ or
# $10^{-6}$, about $10^{-10}$. A mistake in a formula is far above that for every step. (In float32 no step is better
# than about $10^{-4}$, so check in float64.)

# %% [markdown]
# ## 1.3 Backward without recursion
#
# *Core, 1 minute.*

# %% [markdown]
# A recursion from each tensor to its inputs is tempting, and has three traps. If it follows a tensor at each
# contribution, its sums are right, but for $x_{i+1} = x_i + x_i$ it visits $x_0$ $2^n$ times after $n$ sums. If it
# follows a tensor only at the first one, it is wrong: on the first page's graph $a$ sends on only the first of its two
# contributions, 8, and $x$ gets $24 + 6 = 30$ instead of 48. And Python allows about 1000 nested calls, so it fails on
# the graph of a long sum, as a recursive search for an order does. The loop does not notice the length. (Rank 0 alone
# builds the long sum.)

# %%
if comm.rank == 0:
    y = one = SmallTensor(1.0)
    for _ in range(100_000):
        y = y + one
    y.backward(1.0)
    assert one.grad == 100_001  # contributions of 1

# %% [markdown]
# ### Why not forward?
#
# *Deeper, 2 minutes.*

# %% [markdown]
# The chain rule can also be followed along with forward: *forward mode* carries $J u$ through the operations, at about
# twice the cost of forward. One pass gives the slope of the loss along *one* direction $u$, so the gradient by $\Psi$
# parameters takes $\Psi$ passes. Backward carries $J^\top g$. The loss is one value, so one pass gives all $\Psi$
# derivatives, at the same cost (1.6). Its price is memory: what forward computed must be kept until backward reads it
# (2.8).

# %% [markdown]
# ## 1.4 The library's engine
#
# *Deeper, 12 minutes.*

# %% [markdown]
# The library defines an operation as one function, too: its result and, next to it, the rule of each input. `g` is an
# array. A rule that reads other arrays names them: `Gradient(lambda g, b: g * b, b=b)` keeps $b$ until backward, and
# nothing else. `operation` makes a method of `Tensor` of it and undoes broadcasting: where forward repeated an input,
# backward sums over the repetitions. Without that the gradient of a bias has $N$ rows instead of one: an update in
# place fails by its shape, and `theta = theta - rate * grad` makes $N$ biases of one, without an error. The rule is
# general: what forward copies, backward sums. If the copies are on several ranks, that sum is an all-reduce, such as
# *f* in [6.2](06_tensor_parallel.ipynb). (`xp` in the listings is NumPy, or CuPy on a GPU.)

# %%
if comm.rank == 0:
    show_source(Tensor.__mul__, Tensor.tanh)

# %% [markdown]
# An operation that does more is a `Function`: a class with `forward`, which calls `save_for_backward(name=array)`, and
# `backward`, which gets these arrays by their names. Its instance is a *node* of the graph, apart from the tensor that
# it returns. `record` runs forward and gives the node its number. For each input that needs a gradient it notes in
# `inputs` where the input comes from: the node that computed it, or the leaf itself. (`node_wrappers` is empty, but for
# runs in 2 bytes, chapter 13. `hold` tells the memory ledger, the count of living bytes of 5.3, what is saved.)

# %%
from minipar.autograd.tensor import record

if comm.rank == 0:
    show_source(record)

# %% [markdown]
# `inputs` does not refer to the *tensor* of a computed input, only to the node that made it. So an array is freed as
# soon as neither the program nor a node needs it. (NB: PyTorch's nodes are separate from tensors for the same reason.)
#
# What forward has saved must not change before backward reads it. PyTorch counts the versions of each tensor, and
# refuses one that has changed. Here arrays are plain NumPy: nobody sees an assignment such as `x.data[...] = 0`, and
# the gradient is wrong. The library sees the one case that training loops have, an optimizer that steps between a
# forward and its backward, and refuses that backward.
#
# The backward pass is the loop of section 1.1. `reachable` counts the uses of the leaves only: nodes need no count,
# because their order guarantees that all users come first. `run_backward` adds one thing. It empties each node after
# its visit, `node.free()`, which frees what forward saved for it: memory falls while backward goes on. `close_use` adds
# the gradient of one use of a leaf. After the last one the leaf's *hooks* run, functions that a strategy registered:
# data parallelism starts to send the gradient there. Two names in the listing come later (1.6): a `LazyGradient` is a
# weight gradient that is computed when it is needed, and `_deferral` is the queue in which it waits.

# %%
from minipar.autograd import backward

if comm.rank == 0:
    show_source(backward.reachable, backward.run_backward, backward.BackwardPass.close_use)

# %%
leaves = [Tensor(array, requires_grad=True) for array in arrays]
x, A, D = leaves
completed = []
for leaf in leaves:
    leaf.register_post_accumulate_grad_hook(completed.append)
with_skip(*leaves).backward(np.ones((6, 4)))
assert completed == [D, x, A]

# %% [markdown]
# For `with_skip` of section 1.2 the hook of $D$ runs first: $D$ is the matrix that forward used last. The last visit is
# that of $x A$, the first operation: it brings $x$ its second contribution, and then $A$ its only one, in the order of
# the inputs.

# %% [markdown]
# ## 1.5 Three gradients by hand
#
# *Core, 12 minutes.*
#
# Rows of logits $z$ have $V$ elements, rows of activations $x$ have $h$.
#
# **Softmax.** Let $\pi = \mathrm{softmax}(z)$. From $\pi_i = e^{z_i} / \sum_j e^{z_j}$ follows
# $\partial \pi_i / \partial z_j = \pi_i (\delta_{ij} - \pi_j)$. With $g$ the gradient of $\pi$, that of $z_j$ is
# $\sum_i g_i \pi_i (\delta_{ij} - \pi_j)$, so the gradient of $z$ is
#
# $$\pi \odot \big(g - \textstyle\sum_i \pi_i g_i\big).$$
#
# **Cross-entropy.** The loss of a token with target $k$ is $-\log \pi_k = \log \sum_j e^{z_j} - z_k$. The first term
# has the derivative $\partial \log \sum_j e^{z_j} / \partial z_i = e^{z_i} / \sum_j e^{z_j} = \pi_i$, the second 1 at
# $i = k$ and 0 elsewhere, which we write as the vector $e_k$. So the gradient of $z$ is
#
# $$\pi - e_k .$$
#
# A token may have no target, such as padding or a prompt that is not to be learned. Its target is then -100, by
# PyTorch's convention. Its loss is 0, its row of the gradient is 0, and the mean is taken over the tokens that count.
#
# To compute the loss safely, subtract the row's maximum
# $\hat z$ from all logits first: $\log \sum_j e^{z_j - \hat z} - (z_k - \hat z)$ is the same value, and no term of the
# sum is above 1. Without that, $e^z$ overflows in float32 from $z = 89$ on.
#
# **LayerNorm** (Ba et al. 2016, arXiv 1607.06450) normalizes a row $x$ of $h$ elements, then scales and shifts it. Bars
# are means over the row:
#
# $$\tilde x = x - \bar x, \qquad \rho = \big(\overline{\tilde x^2} + \epsilon\big)^{-1/2}, \qquad
# \hat x = \rho\, \tilde x, \qquad y = \hat x \odot \mathrm{gain} + \mathrm{bias} .$$
#
# The gradient of $\hat x$ is $\hat g = g \odot \mathrm{gain}$. From $\hat x$ back to $x$ there are three paths. Think
# of $\tilde x$, $\rho$ and $\bar x$ as tensors of a graph, as in 1.1:
#
# - Directly: $\hat x$ is $\rho$ times $\tilde x$, so $\tilde x$ receives $\rho\, \hat g$.
# - Through $\rho$: $\rho$ receives $\sum_i \hat g_i \tilde x_i$. From $\rho$ back to $\tilde x$ the factor is
#   $\partial \rho / \partial \tilde x_i = -\rho^3 \tilde x_i / h$. So $\tilde x_i$ receives
#   $-\rho^3 \tilde x_i \cdot \frac1h \sum_j \hat g_j \tilde x_j$, which is
#   $-\rho\, \hat x_i\, \overline{\hat g \hat x}$ since $\hat x = \rho\, \tilde x$.
# - Through $\bar x$: each $\tilde x_i$ contains $-\bar x$, so $x$ receives what $\tilde x$ has received, less its mean.
#   The mean of what came directly is $\rho\, \bar{\hat g}$. The mean of what came through $\rho$ is 0, because $\hat x$
#   has the mean 0.
#
# Together, and with the sums over rows for gain and bias:
#
# $$\frac{\partial \ell}{\partial x} = \rho \left( \hat g - \bar{\hat g} - \hat x\, \overline{\hat g \hat x} \right),
# \qquad \frac{\partial \ell}{\partial\, \mathrm{gain}} = \sum_{\text{rows}} g \odot \hat x, \qquad
# \frac{\partial \ell}{\partial\, \mathrm{bias}} = \sum_{\text{rows}} g .$$
#
# Backward needs $\hat x$ and $\rho$, not $x$.

# %%
from minipar.autograd import cross_entropy_sum
from minipar.autograd.fused import layer_norm

NO_TARGET = -100


def cross_entropy_by_hand(z, targets):
    """The mean loss of logits z (N, V) with targets (N,), and the gradient of z. NO_TARGET does not count."""
    rows = np.flatnonzero(targets != NO_TARGET)
    z = z - z.max(axis=1, keepdims=True)
    total = np.exp(z).sum(axis=1, keepdims=True)
    loss = (np.log(total[rows, 0]) - z[rows, targets[rows]]).mean()
    gradient = np.zeros_like(z)  # also of the rows without a target
    gradient[rows] = np.exp(z[rows]) / total[rows]  # softmax
    gradient[rows, targets[rows]] -= 1
    return loss, gradient / len(rows)


def layer_norm_by_hand(x, gain, bias, g, epsilon=1e-5):
    """LayerNorm of the rows of x (N, h), and the gradients of x, gain and bias."""
    centered = x - x.mean(axis=1, keepdims=True)
    rho = 1 / np.sqrt((centered**2).mean(axis=1, keepdims=True) + epsilon)
    xhat = rho * centered
    ghat = g * gain
    dx = rho * (ghat - ghat.mean(axis=1, keepdims=True) - xhat * (ghat * xhat).mean(axis=1, keepdims=True))
    return xhat * gain + bias, dx, (g * xhat).sum(axis=0), g.sum(axis=0)


def assert_close(results, expected):
    """Compare on the scale of the largest element: sums are rounded differently in another order."""
    for x, y in zip(results, expected, strict=True):
        assert np.abs(x - y).max() <= 1e-12 * np.abs(y).max()


N, h, V = 6, 16, 10
z = Tensor(random.standard_normal((N, V)), requires_grad=True)
targets = random.integers(V, size=N)
targets[2] = NO_TARGET
loss = cross_entropy_sum(z, targets) * (1 / (N - 1))
loss.backward()
assert not z.grad[2].any()
assert_close((loss.data, z.grad), cross_entropy_by_hand(z.data, targets))

rows, gain, bias, g = (random.standard_normal(shape) for shape in ((N, h), h, h, (N, h)))
inputs = [Tensor(array, requires_grad=True) for array in (rows, gain, bias)]
output = layer_norm(*inputs)
output.backward(g)
assert_close((output.data, *(tensor.grad for tensor in inputs)), layer_norm_by_hand(rows, gain, bias, g))
say("cross-entropy and LayerNorm by hand = the library's, forward and backward")

# %% [markdown]
# The three paths, and what came on each of them in the row in which the path through $\rho$ brings most:

# %%
if comm.rank == 0:
    centered = rows - rows.mean(axis=1, keepdims=True)
    rho = 1 / np.sqrt((centered**2).mean(axis=1, keepdims=True) + 1e-5)
    xhat = rho * centered
    ghat = g * gain
    slope = (ghat * xhat).mean(axis=1, keepdims=True)
    row = np.abs(slope).argmax()
    paths = {
        "directly": (rho * ghat)[row],
        "through rho": (-rho * xhat * slope)[row],
        "through the mean": np.full(h, -(rho * ghat)[row].mean()),
    }
    assert_close([sum(paths.values())], [inputs[0].grad[row]])
    show(figures.plot_three_paths(paths), "01_three_paths")

# %% [markdown]
# *Blue: directly. Red: through $\rho$. Green: through the mean, the same for every element.* LayerNorm
# ignores a constant that is added to a row, so the gradient of $x$ must have the sum 0. The blue bars do not, and the
# green ones correct that. In the same way the red ones remove what would only scale the row.
#
# The library's LayerNorm has the same lines with fewer temporary arrays. `gradcheck` is the check of section 1.2, for
# each input alone, so that the message can name the input.

# %%
from minipar.autograd import fused
from minipar.autograd.gradcheck import gradcheck

if comm.rank == 0:
    show_source(fused._LayerNorm.backward)
say(f"gradcheck of layer_norm: largest relative error {gradcheck(layer_norm, [rows, gain, bias]):.1e}")

# %% [markdown]
# ## 1.6 Weight gradients can wait
#
# *Core, 6 minutes.*
#
# Backward of $Y = X A$ is two products, each with as many operations as forward's. $dX = dY A^\top$ is needed at once:
# the operation below waits for it; in a pipeline that operation may be on another rank. $dA = X^\top dY$ is needed by
# nobody until the optimizer steps. So a rank can put off the second and compute it when it would be idle (Zero Bubble,
# Qi et al. 2023, arXiv 2401.10241, section 2.1). A forward is written `F`, a backward `B`, and its two halves `I`
# (input gradients) and `W` (weight gradients). Chapter 8 fills the idle time of pipelines with `W`.
#
# In the library a weight gradient is not an array but a function that computes it, wrapped in `LazyGradient`. The
# backward loop calls it at once, or puts it in a queue inside `defer_weight_gradients`.

# %%
if comm.rank == 0:
    show_source(fused.LinearFunction.backward)

# %%
from minipar.autograd import defer_weight_gradients
from minipar.autograd.fused import flop_counter, gelu, linear

x, A, D = (Tensor(random.standard_normal(shape), requires_grad=True) for shape in ((N, h), (h, 4 * h), (4 * h, h)))
linear(gelu(linear(x, A)), D).backward(g)  # (N, h) -> (N, 4h) -> (N, h)
at_once = (A.grad, D.grad)
A.grad = None
D.grad = None

counts = []  # the floating-point operations of each matrix product
with flop_counter(counts.append):
    y = linear(gelu(linear(x, A)), D)
    with defer_weight_gradients() as queue:
        y.backward(g)
    assert A.grad is None and D.grad is None and len(queue) == 2
    queue.run()
assert counts == 6 * [8 * N * h * h]  # two products in F, two in I, two in W
assert np.array_equal(A.grad, at_once[0]) and np.array_equal(D.grad, at_once[1])
say(f"F, I and W have {sum(counts) // 3:,} operations each; the gradients of A and D are the same bits")

# %% [markdown]
# `F`, `I` and `W` have $16 N h^2$ operations each: two products of $2 \cdot N \cdot h \cdot 4h$. So a whole backward
# takes twice forward. `W` gives the same bits as before, because it is the same product of the same arrays.

# %% [markdown]
# ## 1.7 Mistakes, and which check notices
#
# *Core, 6 minutes.*
#
# **1. Assignment instead of addition.** `receive` overwrites the gradient. A chain, in which each tensor is used once,
# has right gradients. With a skip path the gradient of $x$ is that of one path only.

# %%
from unittest.mock import patch

with patch.object(SmallTensor, "receive", lambda self, contribution: setattr(self, "grad", contribution)):
    check_adjoint(chain, arrays)
    caught("a gradient that is assigned, not added", lambda: check_adjoint(with_skip, arrays))

# %% [markdown]
# **2. Statistics taken for constants.** The commonest mistake in a hand-written LayerNorm: backward treats the mean and
# the deviation as constants and returns $\rho\, \hat g$ alone, so two of the three paths are missing. `gradcheck` names
# input 0, which is $x$. The gradients of gain and bias are right.

# %%
from chapters.support.ch01 import wrong_gradients

caught("constant statistics", lambda: gradcheck(wrong_gradients.constant_statistics, [rows, gain, bias]))

# %% [markdown]
# **3. The derivative of the other GELU.** There are two: $x\,\Phi(x)$ with the normal distribution function $\Phi$, and
# GPT-2's approximation $\frac{x}{2} \big(1 + \tanh(\sqrt{2/\pi}\,(x + 0.044715\, x^3))\big)$, with the circle's $\pi$
# (Hendrycks and Gimpel 2016, arXiv 1606.08415). They differ by less than 0.0005, and their derivatives by less than
# 0.001. Forward with one and backward with the other trains without a visible difference. A check with a tolerance of
# 0.01 passes it. In float64 with the tolerance of $10^{-7}$ it does not pass.


# %%
points = random.standard_normal((4, 50))
gradcheck(wrong_gradients.other_gelu, [points], tolerance=1e-2)  # passes
caught("the derivative of the other GELU", lambda: gradcheck(wrong_gradients.other_gelu, [points]))

# %% [markdown]
# Not every difference is a mistake. On a GPU, threads may add in the order in which they finish (*atomic* additions),
# and libraries choose among their kernels by measuring them. Then two right runs differ in the last bits.

# %% [markdown]
# ## 1.8 PyTorch's names
#
# *Deeper, 2 minutes.*

# %% [markdown]
# | here | PyTorch |
# | --- | --- |
# | `Function` with `forward`, `save_for_backward`, `backward` | `torch.autograd.Function`; nodes are `tensor.grad_fn` |
# | `node.number` | `grad_fn._sequence_nr()`; the engine also counts the contributions that are missing |
# | `gradcheck` | `torch.autograd.gradcheck` (with `fast_mode=True` it uses random directions, too) |
# | `register_post_accumulate_grad_hook` | the same name, on `torch.Tensor` |
# | `queue_callback` (at the end of backward) | `Variable._execution_engine.queue_callback` |
# | `I` and `W` of a backward | `stage_backward_input`, `stage_backward_weight` in `torch.distributed.pipelining` |
# | the same in Megatron-LM | `--delay-wgrad-compute`; `WeightGradStore` in the fork of Zero Bubble's authors |

# %% [markdown]
# ## 1.9 Problems
#
# *Deeper, 30 minutes.*

# %% [markdown]
# 1. For $y = 2$ and $x = 3$ compute $a = x y$, $b = a + y$, $c = b x$. Give the gradients of all tensors, the order in
#    which backward visits $a$, $b$, $c$, and the uses of each leaf.
# 2. A token has three logits with $\pi = (0.5, 0.3, 0.2)$ and the second is its target. What is the gradient of the
#    logits? Why is its sum 0, whatever the logits are?
# 3. LayerNorm with $h = 4$, $\epsilon = 0$ and the gain 1 gets $x = (1, 1, 3, 3)$ and $g = (1, 0, 0, 0)$. Compute the
#    gradient of $x$. Why is it orthogonal to $(1, 1, 1, 1)$, and for $\epsilon = 0$ to $\hat x$? (Which changes of $x$
#    leave $\hat x$ as it is?)
# 4. How many forwards do the difference quotients of a LayerNorm of 8 rows of 768 elements take if each element is
#    checked alone, with gain and bias, and how many with one random direction for each input?
# 5. Between `I` and `W` of section 1.6 the queue holds arrays. Which ones, and how many elements have they, in terms of
#    $N$ and $h$? (The function of a weight gradient keeps both factors of its product.)
# 6. `run_backward` adds the gradients that meet at a node in the order in which it visits the users. Does that order
#    depend on anything but the program? Then why do two GPUs of one kind sometimes disagree?

# %% [markdown]
# ## 1.10 Answers
#
# *Deeper, 5 minutes.*

# %% [markdown]
# <details><summary>Answers</summary>
#
# 1. $a = 6$, $b = 8$, $c = 24$. Backward visits $c$, $b$, $a$. $b$ receives 3, $a$ receives 3 from $b$. $x$ receives 8
#    from $c$ and 6 from $a$, together 14. $y$ receives 3 from $b$ and 9 from $a$, together 12. Both leaves have 2 uses.
# 2. $\pi - e_k = (0.5, -0.7, 0.2)$. Adding a constant to all logits does not change the loss, so its derivative along
#    $(1, 1, 1)$, which is the sum of the gradient, is 0.
# 3. $\bar x = 2$, $\rho = 1$, $\hat x = (-1, -1, 1, 1)$, $\bar g = 1/4$, $\overline{g \hat x} = -1/4$. So the gradient
#    is $(1/2, -1/2, 0, 0)$. Adding a constant to the row, or scaling $\tilde x$, does not change $\hat x$ (for
#    $\epsilon = 0$).
# 4. Two for each of $8 \cdot 768 + 2 \cdot 768 = 7680$ elements: 15,360. Three inputs with two forwards each: 6.
# 5. For $dA$ its input $x$ and the gradient of $x A$, $N h + 4 N h$ elements; for $dD$ the output of GELU and $g$,
#    $4 N h + N h$. Together $10 N h$. Backward itself would have freed them as it passed the nodes.
# 6. The order depends on the numbers of the nodes, so on the program alone. GPUs disagree because of sums inside a
#    kernel, in the order of its threads, and because one may choose another kernel (end of 1.7).
#
# </details>

# %% tags=["hide-input"]
y = SmallTensor(2.0)
x = SmallTensor(3.0)
a = x * y
b = a + y
c = b * x
c.backward(1.0)
assert (a.data, b.data, c.data, b.grad, a.grad, x.grad, y.grad) == (6, 8, 24, 3, 3, 14, 12)
_, gradient = cross_entropy_by_hand(np.log([[0.5, 0.3, 0.2]]), np.array([1]))
assert_close([gradient], [np.array([[0.5, -0.7, 0.2]])])
_, gradient, _, _ = layer_norm_by_hand(np.array([[1.0, 1, 3, 3]]), 1.0, 0.0, np.eye(4)[:1], epsilon=0)
assert_close([gradient], [np.array([[0.5, -0.5, 0, 0]])])
say("problems 1 to 3: the answers are right")

# %% tags=["active-ipynb"]
# %autopx

# %% tags=["active-ipynb"]
# # Back in one process: stop the eight.
# cluster.stop_cluster_sync()
