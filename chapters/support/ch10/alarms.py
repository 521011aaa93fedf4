"""Notice mistakes in the planner by a run and by what was printed (section 10.8)."""

from chapters.support.ch10.published import KORTHIKANTI, NARAYANAN, narayanan
from chapters.support.training import make_trainer
from minipar.comm import Communicator, run_local
from minipar.parallel.memory import FLOAT64
from minipar.plan import rank_bytes
from minipar.plan.layout import Layout
from minipar.plan.model import ModelShape, find_model, utilization

RUN = (
    "--layers 4 --hidden 32 --heads 8 --seq-len 16 --vocab-size 256 --dtype float64 --dp 2 --zero-stage 3 "
    "--sync-every-microbatch --microbatches 4 --global-batch 8"
)


def bytes_of_a_run() -> int:
    """Train one step of RUN on two threads, and return the bytes that a rank sends over dp."""

    def sent(comm: Communicator) -> int:
        trainer = make_trainer(comm, RUN)
        comm.traffic.reset()
        trainer.step(0)
        return comm.traffic.bytes(axis="dp")

    return run_local(2, sent)[0]


def alarms(sent: int) -> list[str]:
    """Name what notices a mistake.

    run     RUN's traffic over dp, predicted within a thousandth of the bytes `sent`
    print   Korthikanti's MFU within 0.3 points, Narayanan's speeds within 15 %
    """
    shape = ModelShape(layers=4, hidden=32, heads=8, vocab_size=256, positions=16)
    layout = Layout(dp=2, tp=1, pp=1, microbatch=1, microbatches=4, zero=3, precision=FLOAT64)
    agree = {"run": abs(float(rank_bytes.volume(shape, layout, 16).dp) / sent - 1) < 1e-3, "print": True}
    for name, (gpus, batch, *_, seconds, _, printed) in KORTHIKANTI.items():
        mfu = utilization(batch * find_model(name).model_flops(2048), seconds, gpus, 312e12)
        agree["print"] &= abs(100 * mfu - printed) < 0.3
    agree["print"] &= all(abs(row.ratio - 1) < 0.15 for name in NARAYANAN for row in narayanan(name))
    return [name for name in agree if not agree[name]]
