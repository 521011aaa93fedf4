"""Notice mistakes in the planner: by the schedules' lists, by a published formula, by a run, and by printed speeds.

Narayanan et al. 2021 (arXiv 2104.04473, table 1) and Korthikanti et al. 2022 (arXiv 2205.05198, table 5).
"""

from chapters.support.training import make_trainer
from minipar.comm import Communicator, run_local
from minipar.parallel.pipeline.actions import peak_live
from minipar.parallel.pipeline.schedules import make
from minipar.parallel.predicted_memory import FLOAT64
from minipar.plan import rank_bytes
from minipar.plan.cluster import GPUS, Cluster
from minipar.plan.layout import Layout
from minipar.plan.model import ModelShape, find_model, utilization
from minipar.plan.search import judge

RUN = (
    "--layers 4 --hidden 32 --heads 8 --seq-len 16 --vocab-size 256 --dtype float64 --dp 2 --zero-stage 3 "
    "--sync-every-microbatch --microbatches 4 --global-batch 8"
)
NARAYANAN = {  # tp, pp, GPUs, batch, microbatch, TFLOP/s per GPU as printed
    "megatron-1.7b": (1, 1, 32, 512, 16, 137),
    "megatron-7.5b": (4, 1, 128, 512, 16, 142),
    "megatron-39b": (8, 2, 512, 1536, 4, 138),
    "megatron-145b": (8, 8, 1536, 2304, 2, 148),
    "megatron-1t": (8, 64, 3072, 3072, 1, 163),
}
KORTHIKANTI = {  # GPUs, batch, seconds with selective recompute, MFU as printed
    "megatron-22b": (8, 4, 1.10, 41.5),
    "gpt3-175b": (64, 64, 13.75, 51.4),
    "megatron-1t": (512, 512, 71.49, 56.3),
}


def bytes_of_a_run() -> int:
    """Train one step of RUN on two threads, and return the bytes that a rank sends over dp."""

    def sent(comm: Communicator) -> int:
        trainer = make_trainer(comm, RUN)
        comm.traffic.reset()
        trainer.step(0)
        return comm.traffic.bytes(axis="dp")

    return run_local(2, sent)[0]


def speed(name: str) -> float:
    """Predict the TFLOP/s per A100 of a row of NARAYANAN: 1F1B, no ZeRO, full recompute."""
    tp, pp, gpus, batch, microbatch, _ = NARAYANAN[name]
    dp = gpus // (tp * pp)
    layout = Layout(dp, tp, pp, microbatch, batch // (dp * microbatch), recompute="full")
    return judge(find_model(name), layout, Cluster(GPUS["a100"], gpus), batch, 2048).tflops


def lists_agree() -> bool:
    """Compare GPipe's microbatches in flight with the schedule's own lists."""
    gpipe = Layout(dp=1, tp=1, pp=4, microbatch=1, microbatches=8, schedule="gpipe")
    return rank_bytes.in_flight(gpipe) == max(map(peak_live, make("gpipe", 4, 8).ranks))


def layer_agrees() -> bool:
    """Compare what a layer of GPT-3 keeps under tp 8, beside dp 8, with Korthikanti's formula."""
    model, length = find_model("gpt3-175b"), 2048
    sharded = Layout(dp=8, tp=8, pp=1, microbatch=1, microbatches=4, zero=3)
    formula = length * model.hidden * (10 + (24 + 80) / 8)
    return rank_bytes.layer_activations(model, sharded, length) == formula


def run_agrees(sent: int) -> bool:
    """Compare RUN's bytes over dp with those that a rank has `sent`, within a thousandth."""
    shape = ModelShape(layers=4, hidden=32, heads=8, vocab_size=256, positions=16)
    layout = Layout(dp=2, tp=1, pp=1, microbatch=1, microbatches=4, zero=3, precision=FLOAT64)
    return abs(float(rank_bytes.volume(shape, layout, 16).dp) / sent - 1) < 1e-3


def print_agrees() -> bool:
    """Compare utilizations with Korthikanti's within 0.3 points, and speeds with Narayanan's within 15 %."""
    for name, (gpus, batch, seconds, printed) in KORTHIKANTI.items():
        mfu = utilization(batch * find_model(name).model_flops(2048), seconds, gpus, 312e12)
        if abs(100 * mfu - printed) >= 0.3:
            return False
    return all(abs(row[-1] / speed(name) - 1) < 0.15 for name, row in NARAYANAN.items())


def alarms(sent: int) -> list[str]:
    """Name the instruments that notice a mistake; `sent` is what `bytes_of_a_run` returned."""
    agree = {"lists": lists_agree(), "layer": layer_agrees(), "run": run_agrees(sent), "print": print_agrees()}
    return [name for name in agree if not agree[name]]
