"""A user's question to the planner, and the assumptions of its answer in sentences."""

from dataclasses import dataclass

from minipar.plan.layout import PRECISIONS
from minipar.plan.model import MOST
from minipar.plan.space import Question

CONTEXT = (
    "cp: the ring's messages hide behind the products of its steps, but for the last one; gathers and all-to-alls are "
    "waited for; gradients are summed, and ZeRO shards, over dp x cp"
)
EXPERTS = (
    "ep: tokens are spread evenly over the experts; every all-to-all is waited for, its messages one after the other "
    "on a GPU's own link, and each tp rank sends whole rows, of etp/tp of the tokens, as in minipar (Megatron gathers "
    "rows over etp after the all-to-all); ZeRO shards experts over dp x cp x tp / (ep x etp)"
)


@dataclass(frozen=True)
class Request(Question):
    """The question that a user asked; `name`, `gpu` and `program` are the names as the user wrote
    them.
    """

    name: str
    gpu: str
    program: str
    spread: float
    evidence: str

    @property
    def precision(self) -> str:
        return next(name for name, widths in PRECISIONS.items() if widths == self.space.precision)

    @property
    def tokens(self) -> int:
        return self.global_batch * self.length

    @property
    def tries_cp(self) -> bool:
        """Return whether the search has layouts with context parallelism."""
        return max(self.space.context_sizes(self.length)) > 1

    @property
    def tries_ep(self) -> bool:
        """Return whether the search has layouts with expert parallelism."""
        return max(self.space.expert_sizes(self.model, 0, MOST)) > 1

    @property
    def tries_etp(self) -> bool:
        """Return whether the search has layouts in which not all of tp cut an expert."""
        whole = self.space.tp != 1 and self.space.sequence_parallel is not False
        return self.model.experts is not None and whole


def assumptions(request: Request) -> list[str]:
    """Return the assumptions of the predictions in sentences."""
    a = request.cluster.assumptions
    gpu = request.cluster.gpu
    widths = request.space.precision
    framework = request.cluster.framework
    products = request.cluster.product_rate / gpu.peak
    attention = request.cluster.attention_rate / gpu.peak
    copy = f" + {framework.gradient_copy:g}" if framework.gradient_copy else ""
    hidden = (
        "backward's hide behind weight gradients (not in zb schedules)"
        if framework.hidden_sums
        else "backward too"
    )
    waited = (
        "every message is waited for"
        if framework.blocking_hops
        else "messages travel next to computation"
    )
    updated = (
        "updated parameters of stages 1 and 2 behind the next forward, "
        if framework.gathers_ahead
        else ""
    )
    reduced = (
        "hide behind backward" if framework.hidden_reductions else "are reduced after backward"
    )
    often = "for every microbatch" if framework.every_microbatch else "once"
    host = [
        f"the host launches a layer's kernels, forward and backward, in {a.host_layer * 1e3:.1f} ms per microbatch"
    ]
    return [
        f"{request.gpu}: {gpu.peak / 1e12:.0f} TFLOP/s dense 16-bit, {gpu.memory / 1e9:.0f} GB at "
        f"{gpu.memory_bandwidth / 1e9:.0f} GB/s; to each GPU {gpu.inside / 1e9:.0f} GB/s inside a host and "
        f"{gpu.between / 1e9:.4g} GB/s between hosts (one direction)",
        f"of these {request.program} gets {products:.0%} in large products, {attention:.0%} in flash attention, "
        f"{a.copies:.0%} in elementwise kernels, {a.links:.0%} on links inside a host and {a.links * a.cards:.0%} "
        f"between; a message starts in {a.alpha_inside * 1e6:.1f} us inside and {a.alpha_between * 1e6:.0f} us between "
        f"hosts; {a.memory_used:.0%} of memory can be used",
        f"{request.precision}: {widths.parameters} + {widths.gradients}{copy} + {widths.optimizer} bytes per parameter "
        "(weights, gradients, AdamW), 16-bit activations; "
        + (
            "attention's scores are stored"
            if request.space.attention == "stored"
            else "flash attention"
        )
        + " (--precision and --attention choose)",
        f"tp: forward waits for its sums, {hidden}; pp: {waited}",
        *([CONTEXT] if request.tries_cp else []),
        *([EXPERTS] if request.tries_ep or request.tries_etp else []),
        f"dp: gradients {reduced}, stage 3's gathers hide behind all computation, {updated}and take "
        f"{a.contention:.0%} of the hidden time from it; from stage 2 on gradients travel {often}",
        *(host if a.host_layer else []),
        request.evidence,
        "attention counts all pairs of tokens; data loading, checkpoints, stragglers, failures: not counted",
    ]
