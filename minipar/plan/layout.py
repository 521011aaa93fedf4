"""A layout: how many GPUs each kind of parallelism takes, and everything else that a step's time and memory hang on."""

from __future__ import annotations

from dataclasses import dataclass

from minipar.parallel.memory import MIXED, Precision
from minipar.plan.model import ModelShape

# Bytes of parameters, gradients, optimizer state: 16 in all (Rajbhandari et al. 2020), or with gradients added up and
# sent in fp32, as Megatron-LM does when it trains in bf16.
ATTENTION = ("stored", "flash")
PRECISIONS = {"fp16": MIXED, "bf16": Precision(2, 4, 12)}


@dataclass(frozen=True)
class Layout:
    """`microbatch`: samples in one; `microbatches`: of them per replica and step. dp * microbatch * microbatches is the
    global batch. `attention`: "stored" keeps the scores for backward, "flash" computes them tile by tile, and once more
    in backward (Dao et al. 2022, arXiv 2205.14135).
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

    @property
    def gpus(self) -> int:
        return self.dp * self.tp * self.pp

    @property
    def splits_backward(self) -> bool:
        """Whether the schedule computes weight gradients in actions of their own."""
        return self.schedule.startswith("zb")

    def layers_per_rank(self, model: ModelShape) -> int:
        """On the fullest rank."""
        return -(-model.layers // self.pp)

    def __str__(self) -> str:
        words = [f"dp {self.dp}", f"tp {self.tp}", f"pp {self.pp}", f"ZeRO-{self.zero}"]
        words += [f"microbatch {self.microbatch} x {self.microbatches}"]
        if self.pp > 1:
            words += [self.schedule + (f" v={self.virtual_stages}" if self.virtual_stages > 1 else "")]
        words += ["sequence-parallel"] * self.sequence_parallel
        words += [f"{self.recompute} recompute"] * (self.recompute != "none")
        words += ["flash attention"] * (self.attention == "flash")
        return ", ".join(words)
