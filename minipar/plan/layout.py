"""A layout and a framework: how a training step is divided over GPUs, and how the program runs it.

The planner chooses the layout. It cannot choose the framework: `MEGATRON` is Megatron-LM of today,
`MEGATRON_2021`, `DEEPSPEED_2021`, `LLAMA_3` and `NANOTRON` are what published runs were measured
with, `MINIPAR` is this repository's own program, so that predictions can be compared with runs.
`PROGRAMS` in programs.py pairs each with its speeds.
"""

from dataclasses import dataclass

from minipar.errors import UsageError, check_divides
from minipar.more.context.token_order import METHODS, ORDERS, check_length
from minipar.more.context.ulysses import check_heads
from minipar.parallel.predicted_memory import MIXED, Precision
from minipar.plan.model import ModelShape

STAGES = (0, 1, 2, 3)
ATTENTION = ("stored", "flash")
# Bytes of parameters, gradients and optimizer state: 16 in all (Rajbhandari et al. 2020), or with
# gradients summed and sent in fp32, as Megatron-LM does when it trains in bf16.
PRECISIONS = {"fp16": MIXED, "bf16": Precision(parameters=2, gradients=4, optimizer=12)}


@dataclass(frozen=True)
class Layout:
    """The degrees of parallelism, and every other choice that a step's time and memory depend on.

    A microbatch has `microbatch` samples, and each replica runs `microbatches` of them per step:
    the global batch is dp * microbatch * microbatches. Attention is "stored" if its scores are kept
    for backward. It is "flash" if they are computed tile by tile, and once more in backward (Dao et
    al. 2022, arXiv 2205.14135). Context parallelism's ring and all-gather always compute it so.
    `context_parallel` and `cp_order` say how its cp ranks share each sample's tokens.

    Experts have a mesh of their own over the ranks of a stage: dp cp tp = edp ep etp. `etp`
    neighbours of tp (None: all) have parts of one expert, and `ep` ranks of dp cp tp/etp each hold
    1/ep of every layer's experts.
    """

    dp: int
    tp: int
    pp: int
    microbatch: int
    microbatches: int
    zero: int = 0
    schedule: str = "1f1b"
    virtual_stages: int = 1
    sequence_parallel: bool = False
    recompute: str = "none"
    attention: str = "stored"
    precision: Precision = MIXED
    zero_replicas: int = 1
    cp: int = 1
    context_parallel: str = "ring"
    cp_order: str = "zigzag"
    ep: int = 1
    etp: int | None = None

    @property
    def gpus(self) -> int:
        return self.dp * self.cp * self.tp * self.pp

    @property
    def samples(self) -> int:
        """Return the samples of a step: the global batch."""
        return self.dp * self.microbatch * self.microbatches

    @property
    def mesh(self) -> tuple[int, int, int, int]:
        return self.dp, self.cp, self.tp, self.pp

    @property
    def axes(self) -> tuple[int, ...]:
        """Return the mesh, and ep, which is folded from dp x cp x tp."""
        return *self.mesh, self.ep

    @property
    def replicas(self) -> int:
        """Return the number of ranks over which gradients are summed: dp cp."""
        return self.dp * self.cp

    def tokens(self, length: int) -> int:
        """Return the tokens of one microbatch on a rank: `microbatch` samples of length/cp."""
        return self.microbatch * (length // self.cp)

    @property
    def stores_scores(self) -> bool:
        """Return whether attention keeps its scores for backward, if nothing is recomputed."""
        return self.attention == "stored" and (self.cp == 1 or self.context_parallel == "ulysses")

    @property
    def shards(self) -> int:
        """Return the number of neighbouring ranks over which ZeRO shards: s = dp cp/q."""
        return self.replicas // self.zero_replicas

    @property
    def expert_tp(self) -> int:
        """Return the number of neighbours of tp that have parts of one expert: etp."""
        return self.tp if self.etp is None else self.etp

    @property
    def ranks_per_expert_copy(self) -> int:
        """Return the number of neighbours that hold all of a layer's experts once: ep etp."""
        return self.ep * self.expert_tp

    @property
    def expert_sums_apart(self) -> bool:
        """Return whether experts' gradients are summed over other ranks than all else's."""
        return self.ep > 1 or self.expert_tp < self.tp

    @property
    def expert_shards(self) -> int:
        """Return the number of ranks over which ZeRO shards experts (without replicas of shards),
        those that hold the same parts: edp.
        """
        return self.replicas * self.tp // self.ranks_per_expert_copy

    @property
    def splits_backward(self) -> bool:
        """Return whether the schedule computes weight gradients in actions of their own."""
        return self.schedule.startswith("zb")

    @property
    def sequence_slices(self) -> int:
        """Return the parts into which sequence parallelism divides a microbatch's tokens: tp, or 1
        without it.
        """
        return self.tp if self.sequence_parallel else 1

    @property
    def stages_per_rank(self) -> int:
        """Return the number of pipeline stages on each rank. ZBV always has two."""
        return 2 if self.schedule == "zbv" else self.virtual_stages

    def rank_of(self, stage: int) -> int:
        """Return the pipeline rank of a stage: stage modulo pp, or down and up again in ZBV's V."""
        return (
            2 * self.pp - 1 - stage
            if self.schedule == "zbv" and stage >= self.pp
            else stage % self.pp
        )

    def layers_per_rank(self, model: ModelShape) -> int:
        """Return the layers of the pipeline rank that has most: ceil(layers / pp)."""
        return -(-model.layers // self.pp)

    def __str__(self) -> str:
        words = [f"dp {self.dp}", f"tp {self.tp}", f"pp {self.pp}", f"ZeRO-{self.zero}"]
        words[-1] += f" in {self.zero_replicas} replicas" if self.zero_replicas > 1 else ""
        if self.cp > 1:
            order = f" {self.cp_order}" if self.cp_order != "zigzag" else ""
            words.insert(1, f"cp {self.cp} ({self.context_parallel}{order})")
        if self.ep > 1:
            words.insert(1 + (self.cp > 1), f"ep {self.ep}")
        if self.expert_tp < self.tp:
            words.insert(words.index(f"tp {self.tp}"), f"etp {self.etp}")
        words.append(f"microbatch {self.microbatch} x {self.microbatches}")
        if self.pp > 1:
            words.append(
                self.schedule + (f" v={self.virtual_stages}" if self.virtual_stages > 1 else "")
            )
        if self.sequence_parallel:
            words.append("sequence-parallel")
        if self.recompute != "none":
            words.append(f"{self.recompute} recompute")
        if self.attention == "flash":
            words.append("flash attention")
        return ", ".join(words)


def check_layout(
    model: ModelShape, layout: Layout, gpus: int, global_batch: int, length: int
) -> None:
    """Raise UsageError, with the equation that does not hold, if a layout contradicts what it is
    asked to run.
    """
    dp, cp, tp, pp, ep = layout.axes
    etp = layout.expert_tp
    sizes = {"dp": dp, "cp": cp, "tp": tp, "pp": pp, "ep": ep, "etp": etp}
    sizes |= {"microbatch": layout.microbatch, "microbatches": layout.microbatches}
    for name, size in sizes.items():
        if size < 1:
            raise UsageError(f"{name} {size}: expected at least 1")
    if layout.gpus != gpus:
        product = f"dp*cp*tp*pp = {dp}*{cp}*{tp}*{pp} = {layout.gpus}"
        raise UsageError(f"{product}, but the cluster has {gpus} GPUs")
    if layout.samples != global_batch:
        product = f"{dp}*{layout.microbatch}*{layout.microbatches} = {layout.samples}"
        raise UsageError(
            f"dp*microbatch*microbatches = {product}, but the global batch is {global_batch}"
        )
    q = layout.zero_replicas
    if q > 1 and layout.zero == 0:
        raise UsageError(f"{q} replicas of shards, but ZeRO stage 0 shards nothing")
    check_divides("dp*cp/replicas", dp * cp, q, "each replica of shards has as many ranks")
    check_experts(model, ep, layout.etp)
    check_divides("tp/etp", tp, etp, "the ranks of etp are neighbours of tp")
    ranks = dp * cp * tp
    check_divides("dp*cp*tp/(ep*etp)", ranks, ep * etp, "edp*ep*etp are the ranks of dp*cp*tp")
    if etp < tp and not layout.sequence_parallel:
        raise UsageError(
            f"etp {etp} with tp {tp}: each rank of tp routes its own tokens, which it has with "
            "sequence parallelism"
        )
    if layout.expert_sums_apart and q > 1:
        raise UsageError(
            f"{q} replicas of shards: those of experts have none; give 1 replica, or ep = 1 and etp = tp"
        )
    if not model.tp_divides(tp):
        raise UsageError(
            f"tp {tp} does not divide {model.heads} heads, {model.groups} of keys and values"
        )
    if pp > model.layers:
        raise UsageError(f"pp {pp}, but the model has {model.layers} layers")
    for value, known in ((layout.context_parallel, METHODS), (layout.cp_order, ORDERS)):
        if value not in known:
            raise UsageError(f"context parallelism {value!r}: expected {', '.join(known)}")
    if cp > 1:
        check_length(length, cp, layout.cp_order)
    if layout.context_parallel == "ulysses":
        check_heads(*model.rank_heads(tp), cp)


def check_experts(model: ModelShape, ep: int, etp: int | None) -> None:
    """Raise UsageError if ep > 1 ranks cannot share the model's experts equally, or if an etp is
    given for a model without experts.
    """
    if model.experts is None and (ep > 1 or etp is not None):
        size = f"ep {ep}" if ep > 1 else f"etp {etp}"
        raise UsageError(
            f"{size} divides the experts of a layer; each layer of this model has one MLP, no experts"
        )
    check_divides("experts/ep", model.experts or 1, ep, "each rank holds whole experts")


@dataclass(frozen=True)
class Activations:
    """Elements of one token that a framework keeps for backward (a one-byte mask counts half a
    16-bit element).

    In each layer:
    sliced    multiples of h that sequence parallelism divides over the tp ranks
    gathered  multiples of h that are whole on every tp rank
    rows      single values, which sequence parallelism divides
    qkv, context, inner, gated   multiples of queries, keys and values; of attention's output; of
                                 the inner size of a plain MLP, or of a gated one: tensor
                                 parallelism divides all of them
    scores    elements for each head and each token attended to, divided over tp
    routed    multiples of h, of each row: a token at one of its experts. They are whole on each rank
              of etp, which has the rows of etp/tp of the tokens
    router    values for each expert, which a rank has for the same tokens

    Outside the layers:
    logits    multiples of the vocabulary, divided over tp
    head      multiples of h on the rank with the output head: its norm and its input
    boundary  multiples of h in a pipeline, for the input and for the output of a stage
    moving, moving_whole   multiples of h, once: gradients during backward, divided by sequence
                           parallelism or whole
    """

    sliced: float = 5
    gathered: float = 0
    rows: float = 0
    qkv: float = 1
    context: float = 1
    inner: float = 2
    gated: float = 4
    scores: float = 2.5
    logits: float = 3
    head: float = 2
    boundary: float = 0
    moving: float = 0
    moving_whole: float = 0
    routed: float = 2
    router: float = 4


@dataclass(frozen=True)
class Framework:
    """The habits in which training frameworks differ, as far as they change a step's time or
    memory. The defaults are those of Megatron-LM today.

    ring_per_card      A collective over hosts runs k rings at once, each with 1/k of the bytes
                       through another of a host's k network cards. Otherwise it runs one ring.
    blocking_hops      A pipeline rank waits for every message that it sends or receives.
    scattered_hops     A tp rank always sends its 1/tp of a microbatch's activations (Narayanan et
                       al. 2021, section 4.1). Otherwise it does so only under sequence parallelism.
    balanced_stages    Layers are divided so that the output head counts. Otherwise every stage has
                       ceil(layers/stages).
    every_microbatch   From ZeRO stage 2 on, gradients are reduced after each microbatch. Otherwise
                       once per step.
    pairwise           Parameters are gathered, and scalars summed, by messages from each rank to
                       each other rank. An all-to-all over ep goes in steps, and each waits for the
                       slowest message. Otherwise no rank waits for another one's messages.
    gathers_ahead      ZeRO stages 1 and 2 gather updated parameters during the next step's first
                       forward.
    embedding_returns  The first stage sends the updated token embedding to the last. Otherwise both
                       update it.
    lockstep           In a ring over hosts every message waits for one between hosts. Otherwise one
                       per host does.
    hidden_sums        Backward's sums over tp hide behind weight gradients. Otherwise the rank
                       waits for them.
    hidden_reductions  Gradients are reduced over dp while backward goes on. Otherwise after a
                       stage's last backward.
    visible_pairs      Under cp attention counts the pairs of tokens that are computed: a rank's
                       own, and the visible ones of other ranks. Otherwise it counts all pairs, as
                       in the published formulas.
    parallel_messages  A rank sends keys and gradients to its neighbour in the ring at the same
                       time, and a layer's buckets of experts and of all else, as on minipar's clock
                       `model`. Otherwise one after the other.
    gradient_copy      Bytes per parameter of a second copy of the gradients: in 16 bits next to 32,
                       or the other way.
    overhead           Bytes of the libraries' own buffers on each GPU.
    kept               What is kept for backward.
    """

    ring_per_card: bool = True
    blocking_hops: bool = True
    scattered_hops: bool = True
    balanced_stages: bool = False
    every_microbatch: bool = True
    pairwise: bool = False
    gathers_ahead: bool = True
    embedding_returns: bool = False
    lockstep: bool = False
    hidden_sums: bool = True
    hidden_reductions: bool = True
    visible_pairs: bool = False
    parallel_messages: bool = False
    gradient_copy: float = 0.0
    overhead: float = 0.0
    kept: Activations = Activations()


# Megatron-LM on NCCL, with ZeRO as DeepSpeed does it. Activations: Korthikanti et al. 2022, section
# 4.1, s b h (34 + 5 a s / h) bytes in 16 bits; of a gated MLP both products' outputs, the activated
# one, and the last product's input; logits in 16 bits, and their softmax in 32. Of experts the rows
# that arrive and the results that go back, and of the router logits and probabilities in 32 bits:
# an assumption. NCCL builds a ring through each network card. Megatron's pipeline exchanges with
# both neighbours between two computations (p2p_communication.py). It has --overlap-param-gather.
MEGATRON = Framework()

# Megatron-LM as it was in 2021: nothing over tp or dp hides (--overlap-grad-reduce and tp's
# asynchronous sums came later), each stage keeps its output, and fp16 gradients are copied to fp32
# (20 bytes per parameter, its README).
MEGATRON_2021 = Framework(
    hidden_sums=False,
    hidden_reductions=False,
    gathers_ahead=False,
    gradient_copy=4,
    kept=Activations(boundary=1),
)

# DeepSpeed's ZeRO-3 of 2021, as in table 2 of Narayanan et al. Both habits are inferred from its
# six rows: collectives reach the speed of one card per host, and no reduction hides behind the
# backward pass that it belongs to.
DEEPSPEED_2021 = Framework(ring_per_card=False, hidden_reductions=False)

# Llama 3 (arXiv 2407.21783, 3.3.2) frees what it can, recomputes no layer, and sums gradients over
# microbatches first. What it frees is not said. The least is kept here, what no elementwise kernel
# computes again from the rest: the inputs of both norms; q, k, v; attention's output; both products
# of the gate.
LLAMA_3 = Framework(every_microbatch=False, kept=Activations(sliced=2, inner=1, gated=2))

# tests/parallel/tensor/test_activations.py counts what a layer keeps: 20 N + A + 2 B T elements.
MINIPAR = Framework(
    ring_per_card=False,
    blocking_hops=False,
    scattered_hops=False,
    balanced_stages=True,
    every_microbatch=False,
    pairwise=True,
    gathers_ahead=False,
    embedding_returns=True,
    hidden_sums=False,
    visible_pairs=True,
    parallel_messages=True,
    kept=Activations(
        sliced=2, gathered=2, rows=2, inner=3, scores=1, logits=2, boundary=1, moving=2, moving_whole=1,
    ),
)  # fmt: skip

# nanotron, as in the Ultra-Scale Playbook's benchmark: bf16 with gradients accumulated in fp32 (20
# bytes per parameter, `PRECISIONS["bf16"]` and the copy), flash attention, sequence parallelism
# with a column-parallel layer's whole input kept, blocks divided with the head in mind. Multiples
# of the logits and overhead: fitted (tests/release/plan/fit_nanotron.py).
NANOTRON = Framework(
    scattered_hops=False,
    balanced_stages=True,
    every_microbatch=False,
    gathers_ahead=False,
    lockstep=True,
    hidden_sums=False,
    gradient_copy=2,
    overhead=0.38e9,
    kept=Activations(gathered=2, logits=5.7),
)
