"""Predict Megatron-Core's table of dense models on H100 (its README prints the table as a picture).

Sequences of 4096 tokens, a vocabulary of 131,072. Microbatches and stages per rank are not printed: those that are
predicted to be fastest stand in, with ZeRO-1, sequence parallelism and flash attention.
"""

from collections.abc import Iterator

from minipar.plan.cluster import GPUS, Cluster
from minipar.plan.layout import PRECISIONS, Layout
from minipar.plan.model import ModelShape
from minipar.plan.rank_bytes import memory
from minipar.plan.search import judge

LENGTH = 4096
TABLE = {  # heads, hidden, layers, tp, pp, GPUs, batch, TFLOP/s per GPU
    "1.7B": (16, 2048, 24, 1, 1, 48, 192, 408.8),
    "7.1B": (32, 4096, 30, 2, 1, 96, 192, 465.9),
    "16B": (48, 6144, 32, 4, 1, 192, 192, 489.1),
    "32B": (56, 7168, 48, 8, 1, 384, 192, 459.6),
    "70B": (64, 8192, 84, 8, 2, 768, 384, 419.7),
    "119B": (80, 10240, 92, 8, 4, 1536, 768, 420.5),
    "177B": (96, 12288, 96, 8, 6, 2304, 1152, 432.8),
    "314B": (128, 16384, 96, 8, 8, 3072, 1536, 474.4),
    "462B": (144, 18432, 112, 8, 16, 6144, 3072, 459.9),
}


def possible(layers: int, dp: int, tp: int, pp: int, batch: int) -> Iterator[Layout]:
    """Yield the layouts that the table leaves open."""
    for microbatch in (1, 2, 4):
        m, rest = divmod(batch, dp * microbatch)
        for v in (1, 2, 3, 4, 6, 7, 8, 12, 14):
            uneven = v > 1 and (pp == 1 or m % pp or -(-layers // pp) % v)
            for recompute in () if rest or uneven else ("none", "full"):
                yield Layout(
                    dp=dp,
                    tp=tp,
                    pp=pp,
                    microbatch=microbatch,
                    microbatches=m,
                    zero=1,
                    schedule="interleaved-1f1b" if v > 1 else "1f1b",
                    virtual_stages=v,
                    sequence_parallel=tp > 1,
                    recompute=recompute,
                    attention="flash",
                    precision=PRECISIONS["bf16"],
                )


def predicted_and_printed(name: str) -> tuple[float, float]:
    """Return the seconds of a row's step, predicted and as printed."""
    heads, hidden, layers, tp, pp, gpus, batch, tflops = TABLE[name]
    model, cluster = ModelShape(layers, hidden, heads, 131072, positions=LENGTH), Cluster(GPUS["h100"], gpus)
    steps = [
        judge(model, layout, cluster, batch, LENGTH, exact=False).time.total
        for layout in possible(layers, gpus // (tp * pp), tp, pp, batch)
        if memory(model, layout, LENGTH).total <= cluster.usable_memory
    ]
    return min(steps), batch * model.model_flops(LENGTH) / (tflops * 1e12 * gpus)
