"""Grader of exercise 7, stage 3's gather and free."""

import weakref

import numpy as np

from chapters.exercises.grading import RingCommunicator, expect, on_ranks, random, require
from minipar.comm import chunk_bounds

HIDDEN, LAYERS, SAMPLES = 4, 5, 3
SOLVED = "Two whole weights are alive at most, for 3/2 of the bytes of data parallelism (section 5.4)."


class LedgerCommunicator(RingCommunicator):
    """A communicator that counts the gathered arrays that are still alive."""

    def __init__(self, comm):
        super().__init__(comm)
        self.alive = self.most = 0

    def all_gather(self, chunk, out=None, **options):
        result = super().all_gather(chunk, out, **options)
        memory = result
        while isinstance(memory.base, np.ndarray):
            memory = memory.base
        self.alive += 1
        self.most = max(self.most, self.alive)
        weakref.finalize(memory, self._free)
        return result

    def _free(self):
        self.alive -= 1


def one_device(weights, x, target, slope=True, back=np.transpose, passes=True):
    """Return the gradients of one rank's loss. The keywords are mistakes, if they are others."""
    inputs = [x]
    for weight in weights:
        inputs.append(np.tanh(inputs[-1] @ weight))
    g, result = inputs[-1] - target, []
    for weight, before, y in zip(weights[::-1], inputs[-2::-1], inputs[:0:-1], strict=True):
        u = g * (1 - y * y) if slope else g
        result.append((before.T @ u).reshape(-1))
        g = u @ back(weight) if passes else g
    return result[::-1]


def grade(solution):
    size = HIDDEN * HIDDEN
    for ranks in (1, 2, 3, 4):
        bounds = chunk_bounds(size, ranks)
        weights = [random(layer).normal(size=(HIDDEN, HIDDEN)) / 2 for layer in range(LAYERS)]
        batches = [random(9, rank).normal(size=(2, SAMPLES, HIDDEN)) for rank in range(ranks)]
        each = [one_device(weights, *batch) for batch in batches]
        wrong = {
            "the slope of tanh is missing: u = g * (1 - y * y)": {"slope": False},
            "the gradient of a layer's input is u @ w.T, not u @ w": {"back": np.copy},
            "g is that of the output in every layer: the layer before gets u @ w.T": {"passes": False},
        }
        ways = {hint: [one_device(weights, *batch, **how) for batch in batches] for hint, how in wrong.items()}

        def program(comm, bounds=bounds, weights=weights, batches=batches):
            ledger = LedgerCommunicator(comm)
            own = slice(*bounds[comm.rank])
            shards = [weight.reshape(-1)[own].copy() for weight in weights]
            result = solution.gradients(ledger, shards, *batches[comm.rank].copy())
            return result, ledger.most, comm.traffic.bytes() // 8, comm.traffic.bytes("all_reduce")

        for rank, (result, most, sent, reduced) in enumerate(on_ranks(solution, ranks, program)):
            where = f"rank {rank} of {ranks}"
            require(
                result is not None and len(result) == LAYERS, f"{where}: return a list of {LAYERS} chunks of gradients"
            )
            own = slice(*bounds[rank])
            for layer, value in enumerate(result):
                total = sum(gradients[layer] for gradients in each)
                mistakes = {
                    "this is your own samples' gradient: sum it over the ranks": each[rank][layer][own],
                    "this is the whole gradient: keep your chunk alone": total,
                    "this is the mean over the ranks, the sum is asked for": total[own] / ranks,
                    "this is the gradient of another layer: the list goes from the first layer to the last": sum(
                        gradients[LAYERS - 1 - layer] for gradients in each
                    )[own],
                }
                mistakes |= {hint: sum(gradients[layer] for gradients in way)[own] for hint, way in ways.items()}
                expect(value, total[own], f"{where}, layer {layer}", mistakes)
            require(
                not reduced,
                f"{where}: an all-reduce gives every rank the whole gradient; a reduce-scatter sends half of its bytes",
            )
            require(
                most <= 2,
                f"{where}: {most} whole weights are alive at the same time, at most 2 are allowed: free each after use "
                "(del weight), keep none for backward, and gather it again there",
            )
            if size % ranks == 0:
                fewest = 3 * LAYERS * size * (ranks - 1) // ranks
                require(sent <= fewest, f"{where}: it sends {sent} elements, at most {fewest} are needed")
