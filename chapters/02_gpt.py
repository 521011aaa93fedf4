# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 2. A GPT
#
# **What is a GPT, where are its parameters and its arithmetic, and what does training keep in memory?**
#
# GPT-2 small has 124 million parameters, 0.46 GiB in float32. Train it on eight samples of 1024 tokens, and its blocks
# keep 10.1 GiB for backward, 22 times as much as the model. A few lines in 2.8 bring the peak of all activations, with
# the logits, from 11.7 down to 1.9 GiB, and not one bit of the gradients changes. The price is computation, and it can
# be counted exactly. At the end of this chapter you can draw a block from memory, count its parameters, operations and
# bytes, and say what the optimizer does with the gradients of [chapter 1](01_autograd.ipynb).

# %% tags=["active-ipynb", "setup"]
# from chapters.support.notebook import start
#
# cluster = start(8)

# %% tags=["setup"]
import math

import numpy as np

from chapters.support.ch02.watch import check_slope
from chapters.support.show import printer
from minipar import nn
from minipar.autograd import Tensor, causal_attention
from minipar.comm import world
from minipar.nn import optim
from minipar.train.data import Batches, load_tokens

comm = world()
say = printer(comm.rank)  # rank 0 prints and draws; every rank checks
if comm.rank == 0:
    from chapters.support.ch02 import figures
    from chapters.support.show import show, show_source

# %%
B, T, h, a = 4, 48, 64, 4  # samples, tokens of a sample, elements per token, attention heads
N = B * T  # tokens
per_block = 20 * N * h + a * B * T**2 + 2 * N  # elements that a block keeps for backward
if comm.rank == 0:
    operations = figures.block_operations(B, T, h, a)
    assert sum(operation.kept for operation in operations) == per_block
    show(figures.plot_block(operations, skips=[(0, 4), (5, 9)]), "02_block")

# %% [markdown]
# A *block* of GPT-2, from top to bottom, with the shape that each operation returns. There are $B$ samples of $T$
# tokens, $N = B T$ tokens together, and $h$ elements per token. The bars are to scale: what each operation keeps for
# backward. Two things are worth a look now: the MLP (below) keeps most, and attention's probabilities are the only
# thing that grows with $T^2$. A GPT is $L$ such blocks one after another. Later chapters take this picture apart:
#
# - [chapters 4](04_data_parallel.ipynb) and [5](05_zero.ipynb) give each rank other samples,
# - [chapter 6](06_tensor_parallel.ipynb) cuts the matrices, [chapter 7](07_pipeline.ipynb) the list of blocks,
# - [chapter 11](11_long_sequences.ipynb) cuts the tokens of a sample,
# - [chapter 12](12_experts.ipynb) puts many MLPs in the place of one.
#
# Here every rank trains the same whole model on the same data: the first row of the picture of chapter 0.

# %%
if comm.rank == 0:
    from chapters.support.overview import draw_strategies

    show(draw_strategies(["one"]), "02_here")

# %% [markdown]
# ## 2.1 GPT-2 on plain arrays
#
# *Core, 12 minutes.*
#
# GPT-2 (Radford et al. 2019) predicts the next token from those before it. A *token* here is a byte: the vocabulary has
# $V = 256$ entries, and no tokenizer stands between the text and the model.
#
# Each token starts as a row of $h$ elements, the embedding of the token plus that of its position. A *block* adds to
# these rows twice: $x \leftarrow x + \mathrm{attention}(\mathrm{norm}(x))$, then
# $x \leftarrow x + \mathrm{mlp}(\mathrm{norm}(x))$. The sum that runs through all blocks is the *residual stream*. At
# the end a last LayerNorm and a product with the transposed table of embeddings (the *head*) give $V$ logits per token.
#
# *Causal attention* is the only place where one token sees another. In each of $a$ heads a token has a query, a key and
# a value of $h/a$ elements. Token $i$ takes the mean of the values $v_j$, $j \le i$, with the weights
# $\mathrm{softmax}_j(q_i \cdot k_j / \sqrt{h/a})$. The *MLP* widens each row to $4h$ elements, applies GELU and comes
# back to $h$.


# %%
def layer_norm(x, gain, bias):
    centered = x - x.mean(axis=-1, keepdims=True)
    return centered / np.sqrt((centered**2).mean(axis=-1, keepdims=True) + 1e-5) * gain + bias


def gelu(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def attention(q, k, v):
    """Causal attention of heads, each array (..., T, h/a): the output, and the probabilities (..., T, T)."""
    scores = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])
    scores = np.where(np.tri(q.shape[-2], dtype=bool), scores, -np.inf)  # (..., T, T), no later tokens
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    return p @ v, p


def linear(x, weight, bias):
    return x @ weight + bias


def block(x, weights, heads):
    """A block of GPT-2: (B, T, h) -> (B, T, h). `weights` are those of this block, by name."""
    B, T, h = x.shape

    def pair(name):
        return weights[f"{name}.weight"], weights[f"{name}.bias"]

    def split(part):
        return part.reshape(B, T, heads, h // heads).swapaxes(1, 2)  # (B, a, T, h/a)

    qkv = linear(layer_norm(x, *pair("ln_1")), *pair("attn.c_attn"))  # (B, T, 3h)
    q, k, v = map(split, np.split(qkv, 3, axis=-1))
    output, _ = attention(q, k, v)  # (B, a, T, h/a)
    output = output.swapaxes(1, 2).reshape(B, T, h)
    x = x + linear(output, *pair("attn.c_proj"))
    y = gelu(linear(layer_norm(x, *pair("ln_2")), *pair("mlp.c_fc")))  # (B, T, 4h)
    return x + linear(y, *pair("mlp.c_proj"))


def below(weights, prefix):
    """The weights whose names begin with the prefix, without it."""
    return {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}


def gpt(inputs, weights, layers, heads):
    """GPT-2: tokens (B, T) -> logits (B, T, V)."""
    x = weights["wte.weight"][inputs] + weights["wpe.weight"][: inputs.shape[1]]  # (B, T, h)
    for i in range(layers):
        x = block(x, below(weights, f"h.{i}."), heads)
    x = layer_norm(x, weights["ln_f.weight"], weights["ln_f.bias"])
    return x @ weights["wte.weight"].T


# %%
L, V = 2, 256  # layers, that is blocks; tokens in the vocabulary
config = nn.GPTConfig(vocab_size=V, n_positions=96, n_embd=h, n_layer=L, n_head=a)
tokens = load_tokens(None, vocab_size=V, seq_len=config.n_positions)  # source text of Python's standard library
inputs, targets = Batches(tokens, length=T, global_batch=B, order="random", seed=0).batch(step=0, samples=range(B))
model = nn.GPT(config, seed=0, dtype="float64")
weights = model.state_dict()
random = np.random.Generator(np.random.Philox(2))  # for values of the checks below
logits = gpt(inputs, weights, L, a)


def assert_close(result, expected):
    """Compare on the scale of the largest element: the library adds in another order in a few places."""
    assert np.abs(result - expected).max() <= 1e-12 * np.abs(expected).max()


assert_close(logits, model(inputs).data)
say(f"a GPT on plain arrays = nn.GPT: {logits.size:,} logits, within rounding")

# %% [markdown]
# The library's block is the same two sums. It adds modules that hold parameters under Hugging Face's names, dropout,
# and the graph for backward.

# %%
if comm.rank == 0:
    show_source(nn.gpt.Attention.forward, nn.gpt.MLP.forward, nn.gpt.Block.forward)

# %% [markdown]
# ## 2.2 Attention's backward
#
# *Deeper, 8 minutes.*

# %% [markdown]
# Let $Z = q k^\top / \sqrt{h/a}$ be a head's scores, $\Pi = \mathrm{softmax}(Z)$ row by row, $o = \Pi v$, and $g$ the
# gradient of $o$. The product gives $dv = \Pi^\top g$ and $d\Pi = g v^\top$. Softmax (chapter 1) gives
# $dZ = \Pi \odot (d\Pi - D)$ with $D_i = \sum_j \Pi_{ij}\, d\Pi_{ij}$, the same for a whole row. That sum need not be
# computed from two $T \times T$ matrices: $D_i = \sum_j \Pi_{ij}\, (g_i \cdot v_j) = g_i \cdot o_i$. At last
# $dq = dZ\, k / \sqrt{h/a}$ and $dk = dZ^\top q / \sqrt{h/a}$. A masked score has the probability 0 and so the gradient
# 0.


# %%
def attention_backward(q, k, v, output, p, g):
    """The gradients of q, k and v of one head, for the gradient g of the output; p are the probabilities."""
    dz = p * (g @ v.T - (g * output).sum(axis=1, keepdims=True)) / math.sqrt(q.shape[1])
    return dz @ k, dz.T @ q, p.T @ g


qkv = Tensor(random.standard_normal((1, T, 3 * h)), requires_grad=True)
g = random.standard_normal((1, T, h))
library_output = causal_attention(qkv, heads=1)
library_output.backward(g)
q, k, v = np.split(qkv.data[0], 3, axis=1)
output, p = attention(q, k, v)
assert_close(output, library_output.data[0])
assert_close(np.concatenate(attention_backward(q, k, v, output, p, g[0]), axis=1), qkv.grad[0])
say("attention by hand = the library's, forward and backward")
say(f"the whole model: backward = slope of the loss, relative error {check_slope(model, inputs, targets):.1e}")

# %% [markdown]
# The last line checks all parameters at once with the idea of chapter 1. `check_slope` moves them along one random
# direction $u$ of length 1 and compares $\langle \nabla \ell, u \rangle$ with the slope of the loss.
#
# The head's probabilities, and the gradients of its scores:

# %%
dz = p * (g[0] @ v.T - (g[0] * output).sum(axis=1, keepdims=True))
assert np.abs(dz.sum(axis=1)).max() < 1e-13
if comm.rank == 0:
    show(figures.plot_attention(p, dz), "02_attention")

# %% [markdown]
# White above the diagonal: no token looks at a later one, and no gradient comes back from there. Each row on the left
# has the sum 1 (the darkest blue is 0.5 or more), so each row on the right has the sum 0. The first token sees only
# itself and has no gradient at all. Both arrays have $T^2$ elements. At $T = 8192$ each is 256 MiB in float32, for one
# head of one sample, and chapter 11 ([long sequences](11_long_sequences.ipynb)) is about not storing them.

# %% [markdown]
# ## 2.3 Where the parameters are
#
# *Core, 3 minutes.*
#
# In a block: `c_attn` has $3h^2 + 3h$, `attn.c_proj` $h^2 + h$, `c_fc` $4h^2 + 4h$, `mlp.c_proj` $4h^2 + h$, and the
# two LayerNorms $4h$. That is $12 h^2 + 13 h$. Add the embeddings of $V$ tokens and $T_{\max}$ positions and the last
# LayerNorm. All $\Psi$ parameters are:
#
# $$\Psi = L\, (12 h^2 + 13 h) + (V + T_{\max})\, h + 2h .$$
#
# (Narayanan et al. 2021, arXiv 2104.04473, equation 2, leaves out the last $2h$.)

# %% [markdown]
# ## 2.4 Where the arithmetic is
#
# *Core, 6 minutes.*
#
# A product of an $i \times j$ and a $j \times k$ matrix takes $2ijk$ floating-point operations, half of them
# multiplications and half additions. Per block: the four projections, $2N \cdot 12h^2$; attention's two products,
# scores and weighted values, $2 \cdot 2 B T^2 h = 4 N T h$. The head: $2 N h V$. So forward takes
#
# $$L \left( 24 N h^2 + 4 N T h \right) + 2 N h V$$
#
# operations (Narayanan et al. 2021, appendix). Attention counts the whole $T \times T$ square, as this code and most
# others compute it, though the mask throws away almost half. Everything else, such as LayerNorm and GELU, is of order
# $N h$ and is left out. Backward takes exactly twice forward: each product has two inputs, hence two gradients, each as
# large as the product itself ([chapter 1](01_autograd.ipynb)).
#
# **Predict** for GPT-2 small, $h = 768$, with $V = 50257$: which share of forward's operations does the head alone do?

# %%
from chapters.support.predict import predict, reveal
from minipar.autograd.fused import flop_counter

predict("share of the head", ...)  # put your answer in the place of the dots, such as 0.1


# %%
def parameter_count(c):
    per_layer = 12 * c.n_embd**2 + 13 * c.n_embd
    return c.n_layer * per_layer + (c.vocab_size + c.n_positions) * c.n_embd + 2 * c.n_embd


def forward_operations(c, batch, length):
    n = batch * length
    per_layer = 24 * n * c.n_embd**2 + 4 * n * length * c.n_embd
    return c.n_layer * per_layer + 2 * n * c.n_embd * c.vocab_size


forward = []  # the operations of each matrix product
backward = []
with flop_counter(forward.append):
    loss = model.loss(inputs, targets)
with flop_counter(backward.append):
    loss.backward()
assert sum(p.size for p in model.parameters()) == parameter_count(config) == 122_624
assert sum(forward) == forward_operations(config, B, T) == B * T * sum(config.segment_flops(T))
assert sum(backward) == 2 * sum(forward)
gpt2 = nn.GPTConfig()
assert parameter_count(gpt2) == 124_439_808  # GPT-2 small, "124M"
say(f"{parameter_count(config):,} parameters; forward {sum(forward):,} operations, backward {sum(backward):,}")

embeddings = (50257 + 1024) * 768
head = 2 * 1024 * 768 * 50257
assert round(embeddings / parameter_count(gpt2), 2) == 0.32
share = round(head / forward_operations(gpt2, 1, 1024), 2)
assert share == 0.27
reveal("share of the head", share, say)
if comm.rank == 0:
    parameters, operations = figures.shares(gpt2, 1024)
    show(
        figures.plot_shares({"parameters of GPT-2 small": parameters, "operations, T = 1024": operations}), "02_shares"
    )

# %% [markdown]
# The MLP has twice the parameters and the operations of attention's projections. In GPT-2 small the embeddings hold
# 32 % of the 124,439,808 parameters, and the head does 27 % of the operations. Attention's two products have no
# parameters at all, and their share grows with $T$.

# %% [markdown]
# ## 2.5 One table, two gradients
#
# *Deeper, 3 minutes.*

# %% [markdown]
# The head uses the token embedding `wte` again (it is *tied*), so `wte` gets two gradients. As input, only the rows of
# tokens in the batch get anything. As head, every row gets some: each of the $V$ logits has a gradient.
#
# The library keeps the two gradients apart: `Parameter.tie()` makes a second leaf with the same values, and its
# gradient is added when the optimizer steps. The reason comes in [chapter 7](07_pipeline.ipynb): in a pipeline two
# ranks hold the two leaves, and each adds up its own sum first. One device that adds in another order would get other
# bits.

# %%
model.zero_grad()
model.loss(inputs, targets).backward()
as_input = np.count_nonzero(model.wte.weight.grad.any(axis=1))
as_head = np.count_nonzero(model.head_weight.grad.any(axis=1))
assert as_input == len(np.unique(inputs))
assert as_head == V
say(f"rows of the table with a gradient: {as_input} as input, {as_head} as head")
if comm.rank == 0:
    show_source(nn.Parameter.tie, nn.Parameter.fold_tied_gradients)

# %% [markdown]
# ## 2.6 Training, and AdamW's rule
#
# *Core, 10 minutes.*
#
# The optimizer is AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101), as in PyTorch. For each parameter $\theta$ it
# keeps two running means, $\mu_1$ of the gradient $g$ and $\mu_2$ of its square. In step $k = 1, 2, \dots$, with the
# learning rate $\eta$, the weight decay $\lambda$ and the paper's $\beta_1$, $\beta_2$ and $\epsilon$:
#
# $$\mu_1 \leftarrow \beta_1 \mu_1 + (1 - \beta_1)\, g, \qquad
# \mu_2 \leftarrow \beta_2 \mu_2 + (1 - \beta_2)\, g^2, \qquad
# \theta \leftarrow (1 - \eta \lambda)\, \theta
# - \eta\, \frac{\mu_1 / (1 - \beta_1^k)}{\sqrt{\mu_2 / (1 - \beta_2^k)} + \epsilon}.$$
#
# - Both means start from 0, so after $k$ steps the weights of the gradients in them add up to $1 - \beta^k$ only. The
#   divisions correct that. In step 1 the fraction is $g / (|g| + \epsilon)$, about $\pm 1$.
# - A gradient that is always twice as large gives the same step, up to $\epsilon$. That matters later: a wrong constant
#   factor in a sum over ranks stays unnoticed.
# - *Decoupled* weight decay shrinks $\theta$ itself and does not pass through the means. It applies to matrices, the
#   embeddings among them, and not to biases and LayerNorms.
# - The rule works on each element alone. So a rank may update any part of the parameters if it has that part's $g$ and
#   means. ZeRO uses that (chapter 5). The two means are the *optimizer state*: two values per parameter.


# %%
class SmallAdamW:
    def __init__(self, theta):
        self.theta = theta.copy()
        self.mean = np.zeros_like(theta)
        self.square = np.zeros_like(theta)
        self.steps = 0

    def step(self, g, rate=0.01, beta1=0.9, beta2=0.999, epsilon=1e-8, decay=0.1):
        self.steps += 1
        self.mean = beta1 * self.mean + (1 - beta1) * g
        self.square = beta2 * self.square + (1 - beta2) * g**2
        mean = self.mean / (1 - beta1**self.steps)
        root = np.sqrt(self.square / (1 - beta2**self.steps))
        self.theta = (1 - rate * decay) * self.theta - rate * mean / (root + epsilon)


theta = random.standard_normal((3, 4))
parameter = nn.Parameter(theta.copy())
small = SmallAdamW(theta)
adamw = nn.AdamW([parameter], lr=0.01, weight_decay=0.1)
for _ in range(3):
    parameter.grad = random.standard_normal(theta.shape)
    small.step(parameter.grad)
    adamw.step()
assert_close(small.theta, parameter.data)
say("AdamW on plain arrays = nn.AdamW, three steps")
if comm.rank == 0:
    show_source(optim.adamw)

# %% [markdown]
# The library's function has the same algebra in place. `step` calls it for all parameters in turn, and adds tied
# gradients first.
#
# The data is the source text of the running interpreter's standard library. Two levels to compare the loss with, in
# nats (natural logarithms) per byte: $\ln 256 = 5.545$ for a model that finds every byte equally likely, and the
# *unigram entropy* $-\sum_b f_b \ln f_b$ of the byte frequencies $f_b$, the best for a model that does not look at what
# came before. Below it, the model uses context. (The first loss is below $\ln 256$: the tied head prefers the token
# just read, and a fifth of the bytes, mostly spaces, repeat the one before.) A step is five lines. The learning rate
# rises over the first five steps (*warm-up*) and then falls along half a cosine.
#
# A trained model writes text: it gets a beginning, draws the next byte from its probabilities, appends it, and so on.
# So we can see what 50 steps do. They show the model 12,800 bytes, less than half of this chapter.

# %%
from minipar.generate import generate


def train(model, steps=50, rate=4e-3):
    """Train with AdamW; returns the loss of each step."""
    batches = Batches(tokens, length=32, global_batch=8, order="random", seed=0)
    optimizer = nn.AdamW(model.parameters(), lr=rate)
    losses = []
    for step in range(steps):
        model.zero_grad()
        loss = model.loss(*batches.batch(step, range(8)))  # inputs and targets (8, 32)
        loss.backward()
        optimizer.lr = nn.learning_rate(step, rate, "cosine", warmup_steps=5, total_steps=50)
        optimizer.step()
        losses.append(loss.item())
    return losses


def written(model, beginning="def ", count=120):
    """The beginning and the text that the model adds to it. A dot stands for a byte that is no printable character."""
    drawn = generate(model, list(beginning.encode()), count, temperature=0.8, seed=2)
    return "".join(chr(byte) if byte == 10 or 32 <= byte < 127 else "·" for byte in drawn)


frequency = np.bincount(tokens.ids[: 2**20], minlength=V) / 2**20
unigram = -float((frequency[frequency > 0] * np.log(frequency[frequency > 0])).sum())
trained = nn.GPT(config, seed=0)  # float32
if comm.rank == 0:
    say(f"---- before training\n{written(trained)}")
losses = train(trained)
if comm.rank == 0:
    say(f"---- after 50 steps\n{written(trained)}\n----")
last = sum(losses[-10:]) / 10
assert last < unigram < losses[0]
say(f"loss: {losses[0]:.3f} at first, {last:.3f} over the last 10 steps; unigram entropy {unigram:.3f}")
if comm.rank == 0:
    from visualize import plot_loss

    curve = [{"step": step, "loss": value} for step, value in enumerate(losses)]
    show(plot_loss({"GPT": curve}, unigram, "unigram entropy"), "02_loss")

# %% [markdown]
# Before training the text is noise from all 256 bytes. After 50 steps there are lowercase letters, spaces, line breaks
# and indented lines: what source text looks like from far away. Words need a longer training or a shorter text:
# `make demo` trains 200 steps on 857 bytes, and its model then writes whole sentences of them. The loss says the same:
# below the unigram entropy, the model has begun to use the bytes before. (The mean of the last ten steps is below it;
# a single step may still be above, such as the last one of the picture.)

# %% [markdown]
# ## 2.7 The same bits on every rank
#
# *Core, 5 minutes.*
#
# Parallel training will be compared with one device by its bits, so both must start from the same values. Two habits
# make that impossible: one random generator from which the layers draw in turn (a rank that holds only block 1 draws
# block 0's values), and seeds that depend on the rank.
#
# Here each parameter has a generator of its own. It is *counter-based* (Philox, Salmon et al. 2011): its $i$-th block
# of random bits is a function of a key and $i$. The key is a hash of the seed and the parameter's name. Matrices are
# drawn with GPT-2's deviation 0.02, and the two `c_proj` of a block with $0.02/\sqrt{2L}$, so that the $2L$ additions
# to the residual stream do not make it grow with $L$.

# %%
import hashlib

from minipar.nn.layers import generator, normal


def draw(name, shape, seed=0):
    key = hashlib.sha256(f"{seed}:{name}".encode()).digest()[:16]
    return np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little"))).standard_normal(shape)


name = f"h.{comm.rank % L}.mlp.c_fc.weight"  # a rank makes one matrix without the rest of the model
assert np.array_equal(0.02 * draw(name, (h, 4 * h)), weights[name])
if comm.rank == 0:
    show_source(generator, normal)


def digest(arrays):
    """A hash of the arrays' bytes: one wrong bit changes it."""
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).digest()


digests = comm.all_gather_bytes(digest([*weights.values(), np.array(losses), *trained.state_dict().values()]))
assert len(set(digests)) == 1, f"{len(set(digests))} different digests on {comm.size} ranks"
say(f"initial weights, 50 losses, trained weights: the same bits on {len(digests)} rank(s)")

# %% [markdown]
# The bits agree because all ranks run the same arithmetic in the same order. Between machines with different processors
# they may not: the library of matrix products (BLAS) chooses its code by processor, and so the order of its sums.

# %% [markdown]
# ## 2.8 Activation memory, and recompute
#
# *Core, 14 minutes.*
#
# Forward keeps arrays for backward, the *activations*. The picture on the first page lists them. Together a block keeps
#
# $$20 N h + a B T^2 + 2N$$
#
# elements, and the last norm, the head and the loss keep $2 N h + N + N V$. (Korthikanti et al. 2022, arXiv 2205.05198,
# section 4.1, count $34\, s b h + 5\, a s^2 b$ bytes in 16 bit, with $s = T$ and $b = B$. Without dropout and its masks
# that is $16 N h$ elements and the probabilities; we keep the tanh, $4 N h$, besides.)
#
# In the library an operation saves what its backward reads under names, and the node of the graph has them as `saved`.
# So the graph of a block can be asked what it keeps. (A matrix product saves its input as rows. That of the second is
# attention's result, which attention has saved, too: the same memory, which counts once.)

# %%
from chapters.support.ch02.watch import saved_bytes, watch_step
from minipar.autograd import Function, checkpoint, no_grad
from minipar.autograd.backward import reachable

block_input = Tensor(np.zeros((B, T, h)), requires_grad=True)
block_output = model.h[0](block_input)
for node in reachable(block_output.node)[0]:
    saved = [f"{name} {value.shape}" for name, value in node.saved.items() if isinstance(value, np.ndarray)]
    say(f"{node.operation_name():<15} saves {', '.join(saved) or 'nothing'}")
assert saved_bytes(block_output, model.parameters()) == 8 * per_block

# %% [markdown]
# *Recompute* (activation checkpointing; Chen et al. 2016, arXiv 1604.06174) keeps only a block's input, $N h$ elements,
# and runs the block's forward again when backward reaches it. Then the activations of one block live at a time. The
# activations while backward is in a block fall from at most $L\,(20 N h + a B T^2 + 2N)$ to
#
# $$L\, N h + (20 N h + a B T^2 + 2 N)$$
#
# elements. The head's arrays are gone by then. Before, at the loss, $L\,Nh + 2 N h + N + N V$ elements are alive. The
# peak is the larger of the two. Here it is inside a block; with a large vocabulary it is at the loss. Gradients on
# their way, less than $8 N h$ elements here, come on top. The price is a second forward through the blocks.
#
# Segments of several blocks keep fewer inputs and have more activations alive at a time. **[Exercise
# 22](exercises/e22_segments.py)** asks for them, and for the best size: `make exercises PYTEST="-k e22"`.


# %%
class Recompute(Function):
    """A block of which only the input is kept: backward runs it again, this time with a graph."""

    def forward(self, x, block):
        self.save_for_backward(x=x, block=block)
        with no_grad():
            return block(Tensor(x)).data

    def backward(self, grad, x, block):
        x = Tensor(x, requires_grad=True)
        block(x).backward(grad)
        return x.grad, None


rows = random.standard_normal((2, 5, h))
g = random.standard_normal((2, 5, h))
gradients = []
for run in (model.h[0], lambda x: Recompute.apply(x, model.h[0])):
    model.zero_grad()
    x = Tensor(rows, requires_grad=True)
    run(x).backward(g)
    gradients.append(digest(leaf.grad for leaf in (x, *model.h[0].parameters())))
assert gradients[0] == gradients[1]
say("a block with recompute: the gradients are the same bits")
if comm.rank == 0:
    show_source(checkpoint)

# %% [markdown]
# The library's `checkpoint` also keeps the keys of random values, so that dropout draws the same masks again. And it
# lists the block's parameters as inputs of its node, so that the result requires a gradient even if no input does.
#
# There is a second reason to list them: gradient hooks (section 1.4). The backward inside finds only the uses of a
# parameter in its own block. Let a parameter be used in two recomputed blocks. Without the list, its count would fall
# to zero after the first of them, and its hook would fire too early: data parallelism would send half of a gradient.
# With the list, the outer pass counts both uses before it begins.
#
# Now a model of 6 layers, without and with recompute. `watch_step` counts the arrays that the graph keeps after
# forward, and asks `tracemalloc` for the bytes that are held as forward and backward pass each block.
#
# **Predict**: which share of the peak is left with recompute, and how many times as many operations does the step take?

# %%
predict("share of the peak that recompute leaves", ...)
predict("operations with recompute / without", ...)

# %%
deep = nn.GPTConfig(vocab_size=V, n_positions=96, n_embd=h, n_layer=6, n_head=a)
per_head = 2 * N * h + N + N * V
forward = forward_operations(deep, B, T)
plain = watch_step(nn.GPT(deep, seed=0, dtype="float64"), inputs, targets)
recompute = watch_step(nn.GPT(deep, seed=0, dtype="float64", recompute=True), inputs, targets)

assert plain.kept == 8 * (6 * per_block + per_head)
assert recompute.kept == 8 * (6 * N * h + per_head)
assert plain.operations == 3 * forward and recompute.operations == 4 * forward - 2 * N * h * V
for step in (plain, recompute):
    assert step.kept <= step.held <= 1.02 * step.kept + 2**17  # Python's own objects are few
    say(f"kept {step.kept / 2**20:.2f} MiB = formula to the byte, seen {step.held / 2**20:.2f} MiB")
    say(f"peak {step.peak / 2**20:.1f} MiB, {step.operations:,} operations")
formula = 8 * (6 * N * h + per_block)
assert formula < recompute.peak < formula + 8 * (8 * N * h)
assert [round(step.peak / 2**20, 1) for step in (plain, recompute)] == [14.0, 3.3]
reveal("share of the peak that recompute leaves", round(recompute.peak / plain.peak, 2), say)
reveal("operations with recompute / without", round(recompute.operations / plain.operations, 2), say)
if comm.rank == 0:
    show(figures.plot_memory({"plain": plain.moments, "recompute": recompute.moments}, turn="loss"), "02_memory")

# %% [markdown]
# Without recompute, memory rises by a block's activations at each block and falls while backward empties the graph.
# With it, memory rises by $N h$ elements per block, and backward shows the activations of one block at a time, made
# again and freed. Here the peak falls to 0.24 of the other's, from 14.0 to 3.3 MiB, for 1.32 times the operations: if
# forward takes $F$, a step takes $4F - 2NhV$ instead of $3F$, since the head runs only once. The gradients are the same
# bits because the second forward does the same arithmetic on the same values.

# %% [markdown]
# ## 2.9 Mistakes, and which check notices
#
# *Core, 6 minutes.*
#
# **1. The forgotten residual.** Backward of a hand-written block returns the gradient of the branch and drops that of
# the skip path. Forward is right, so the first loss is the same bit for bit. But every gradient before the last block's
# MLP is wrong. **Predict**: after 20 steps the right model has the loss 3.094. What has this one?

# %%
predict("loss of step 20 without the skip path's gradient", ...)

# %%
from chapters.support.caught import catcher
from chapters.support.ch02.watch import ForgottenResidual, check_matrices_differ

caught = catcher(say)  # runs a check that must fail, and prints what it says
wrong_losses = train(ForgottenResidual(config, seed=0), 20)
assert wrong_losses[0] == losses[0] and wrong_losses[-1] < losses[0] - 0.5
reveal("loss of step 20 without the skip path's gradient", round(wrong_losses[19], 3), say)
say(f"right: {losses[19]:.3f}")
caught("skip path dropped", lambda: check_slope(ForgottenResidual(config, dtype="float64"), inputs, targets))

# %% [markdown]
# The loss falls almost as well: the branches alone carry enough gradient for 20 steps. No one would see this in a loss
# curve. `check_slope` notices at once: along one random direction it compares the gradient with the slope of the loss,
# as in 1.2.
#
# **2. Same shape, same values.** Key the generator by the shape instead of the name, or reset a seed in a layer's
# constructor, and matrices of one shape start equal. No gradient is wrong, so `check_slope` passes, and the loss looks
# normal. Another check notices: no two matrices may have the same digest. Its parallel form is worse. If two
# tensor-parallel ranks use one seed, both hold the same half of a matrix. Then the second half computes nothing new.


# %%
check_matrices_differ(model)
twins = nn.GPT(config, seed=0, dtype="float64")
for parameter in twins.parameters():
    if parameter.ndim == 2:
        parameter.data[...] = 0.02 * draw(str(parameter.shape), parameter.shape)
check_slope(twins, inputs, targets)
caught("values keyed by shape", lambda: check_matrices_differ(twins))

# %% [markdown]
# ## 2.10 PyTorch's names
#
# *Deeper, 2 minutes.*

# %% [markdown]
# | here | PyTorch and others |
# | --- | --- |
# | `GPT`, `load_pretrained` | `transformers.GPT2LMHeadModel`, with the same names of parameters |
# | `causal_attention` | `torch.nn.functional.scaled_dot_product_attention(is_causal=True)` |
# | `checkpoint` | `torch.utils.checkpoint.checkpoint`; Megatron-LM `--recompute-granularity full` |
# | `AdamW`, `exp_avg`, `exp_avg_sq` | `torch.optim.AdamW`, with the same names in its state |
# | `flop_counter` | `torch.utils.flop_counter.FlopCounterMode` |
# | `Parameter.tie` | none: `lm_head.weight = wte.weight` is one leaf; Megatron-LM all-reduces the two in a pipeline |

# %% [markdown]
# ## 2.11 Problems
#
# *Deeper, 40 minutes.*

# %% [markdown]
# 1. GPT-3 has 96 layers, $h = 12288$, 50257 tokens and 2048 positions. How many parameters are that, and how many bytes
#    are parameters, gradients and AdamW's means together, in float32 and without the tie's second gradient?
# 2. GPT-2 small ($L = 12$, $h = 768$, $a = 12$) trains on 8 samples of 1024 tokens in float32. How many bytes do the
#    blocks keep for backward, without dropout? With recompute, how many are alive while backward is in a block, and how
#    many at the loss, for 50257 tokens? Which of the two is the peak?
# 3. How many operations does the forward of GPT-3 take per token of a sequence of 2048? How far is the rule "two per
#    parameter" from that?
# 4. From which $T$ on do the attention probabilities take more memory than all else that a block keeps for backward, in
#    general and for GPT-2 small? What does it cost, as a fraction of the block's forward and as a function of $T$, to
#    run attention's two products again in backward?
# 5. Between `I` and `W` (section 1.6) the inputs of a block's four linear layers and the gradients of their outputs
#    wait. How many elements are they together?
# 6. A parameter gets the gradient 1 in step 1 and $-1$ in step 2. By how much does AdamW move it in step 2, in units of
#    $\eta$, with $\beta_1 = 0.9$, $\beta_2 = 0.999$ and no weight decay?
# 7. What if softmax subtracted the maximum of a head's whole $(T, T)$ score matrix instead of each row's? Which scores
#    show it, in float64, where $e^x$ is 0 for $x$ below about $-745$?
# 8. The first loss of a model with $V = 256$ is 22. In another run it starts at 4.9 and falls to 0.2 in 50 steps. What
#    do you suspect in each?

# %% [markdown]
# ## 2.12 Answers
#
# *Deeper, 8 minutes.*

# %% [markdown]
# <details><summary>Answers</summary>
#
# 1. 174.6 billion (to four digits); 4 + 4 + 8 = 16 bytes each, 2.54 TiB. The usual approximation $12 L h^2$ has the
#    matrices of the blocks only, without biases, norms and embeddings: 173.9 billion, 0.4 % too few. For GPT-2 small it
#    is 32 % too few. It is good where $12 L h$ is much larger than $V + T_{\max}$.
# 2. 10.13 GiB. With recompute 1.13 GiB in a block (12 inputs, and one block's activations), but 1.86 GiB at the loss,
#    of which 1.53 GiB are logits: the head sets the peak.
# 3. 359 billion, 1.027 times two per parameter.
# 4. $a B T^2 > 20 N h$ (plus $2N$, which is negligible) from $T = 20 h / a$ on: 1280 tokens for GPT-2 small. The cost
#    is $4 N T h / (24 N h^2 + 4 N T h) = T / (6h + T)$ of the block's forward: little while $T$ is below $h$.
#    (Korthikanti et al. call it selective recompute.)
# 5. The inputs are $(1 + 1 + 1 + 4) N h$ and the gradients of the outputs $(3 + 1 + 4 + 1) N h$, together $16 N h$.
# 6. $\mu_1 = 0.9 \cdot 0.1 - 0.1 = -0.01$, divided by $1 - 0.81$: $-0.0526$. $\mu_2$, corrected, is 1. So $\theta$
#    rises by $0.0526\, \eta$, though the last gradient is as large as the first, which moved it by $-\eta$.
# 7. Softmax does not change while all rows have similar maxima, so forward and the gradient checker pass. A row whose
#    largest score is more than 745 below the matrix's maximum shows it: all its exponentials are 0, and 0 / 0 is NaN.
# 8. The first should be near $\ln 256 = 5.5$, whatever the targets are. Far above it the logits are too large, mostly
#    because the initial weights are: matrices 50 times as large give this model 22. In the second a token can see its
#    target: the targets are the inputs, not shifted by one (this model's loss falls to 0.2), or the mask is missing. Or
#    it trains on a text so short that it learns it by heart.
#
# </details>

# %% tags=["hide-input"]
GiB = 2**30
gpt3 = nn.GPTConfig(vocab_size=50257, n_positions=2048, n_embd=12288, n_layer=96, n_head=96)
parameters = parameter_count(gpt3)
assert f"{parameters / 1e9:.1f} {16 * parameters / 2**40:.2f}" == "174.6 2.54"
elements = 20 * 8192 * 768 + 12 * 8 * 1024**2 + 2 * 8192
inputs_kept = 12 * 8192 * 768
at_head = 2 * 8192 * 768 + 8192 + 8192 * 50257
assert f"{4 * 12 * elements / GiB:.2f} {4 * (inputs_kept + elements) / GiB:.2f}" == "10.13 1.13"
assert f"{4 * (inputs_kept + at_head) / GiB:.2f} {4 * 8192 * 50257 / GiB:.2f}" == "1.86 1.53"
assert round(12 * elements / parameter_count(gpt2)) == 22  # the first page
assert f"{4 * (12 * elements + at_head) / GiB:.1f}" == "11.7"  # the first page
assert [round(1 - 12 * c.n_layer * c.n_embd**2 / parameter_count(c), 3) for c in (gpt3, gpt2)] == [0.004, 0.317]
per_token = forward_operations(gpt3, 1, 2048) / 2048
assert f"{per_token / 1e9:.0f} {per_token / (2 * parameters):.3f}" == "359 1.027"
mean = 0.9 * 0.1 - 0.1
square = 0.999 * 0.001 + 0.001
assert f"{mean / (1 - 0.9**2) / math.sqrt(square / (1 - 0.999**2)):.4f}" == "-0.0526"
say("problems 1, 2, 3 and 6: the answers are right")

# %% tags=["active-ipynb"]
# %autopx

# %% tags=["active-ipynb"]
# # Back in one process: stop the eight.
# cluster.stop_cluster_sync()
