"""Grader of exercise 12, the gradient norm over three axes."""

from math import sqrt

import numpy as np

from chapters.exercises.e12_gradient_norm import Gradient
from chapters.exercises.grading import Hint, expect, on_ranks, random
from minipar.comm import DeviceMesh

MESHES = ((1, 1, 1), (1, 2, 1), (1, 1, 2), (2, 1, 1), (2, 1, 2), (2, 2, 2), (3, 1, 2), (1, 3, 2))  # pp, dp, tp
SOLVED = "Each element of the model counts once on every mesh, and a few values travelled, no gradient (chapter 9)."


def gradients_of(mesh):
    """Return a rank's gradients: of its stage's matrix (divided) and bias (replicated), and of the tied embedding."""
    stage, part, parts = mesh.pp.rank, mesh.tp.rank, mesh.tp.size
    matrix, bias, embedding = (random(key, stage * (key < 2)).normal(size=(4, 6)) for key in range(3))
    gradients = [Gradient(np.split(matrix, parts, 1)[part], True, False), Gradient(bias[0].copy(), False, False)]
    if stage in (0, mesh.pp.size - 1):
        gradients.append(Gradient(np.split(embedding, parts, 1)[part], True, True))
    return gradients


def squares(pp):
    """Return the sums of squares of one device's matrices, biases and embedding, over all stages."""
    arrays = [[random(key, stage * (key < 2)).normal(size=(4, 6)) for stage in range(pp)] for key in range(3)]
    matrices, biases = arrays[0], [bias[0] for bias in arrays[1]]
    return [float(sum((a * a).sum() for a in group)) for group in (matrices, biases, arrays[2][:1])]


def grade(solution):
    for pp, dp, tp in MESHES:

        def program(comm, dp=dp, tp=tp, pp=pp):
            mesh = DeviceMesh(comm, dp=dp, tp=tp, pp=pp)
            gradients = gradients_of(mesh)
            comm.traffic.reset()
            value = solution.gradient_norm(mesh, gradients)
            own = sum(float((gradient.array**2).sum()) for gradient in gradients)
            return value, own, comm.traffic.bytes() // 8

        matrices, biases, embedding = squares(pp)
        total = matrices + biases + embedding
        twice = embedding if pp > 1 else 0.0
        results = on_ranks(solution, pp * dp * tp, program)
        for rank, (value, own, sent) in enumerate(results):
            where = f"rank {rank} of pp {pp} x dp {dp} x tp {tp}"
            mistakes = {
                "a replicated parameter is counted on all t ranks of tp: count it once": sqrt(
                    total + (tp - 1) * biases
                ),
                "the tied embedding is counted on the first and on the last stage": sqrt(total + twice),
                "replicas along dp have the same gradients: do not sum over dp": sqrt(dp * total),
                "all ranks' squares are summed: count each element of the model once": sqrt(
                    dp * (total + (tp - 1) * biases + twice)
                ),
                "replicated parameters and the tied embedding are counted more than once": sqrt(
                    total + (tp - 1) * biases + twice
                ),
                "this is the norm of one rank's gradients: sum the squares over tp and pp, those of divided parameters "
                "of every rank": sqrt(own),
                "the root is taken twice: add squares, and take it once": total**0.25,
                "this is the sum of the squares, the norm is its square root": total,
            }
            if value is not None:
                norms = sum(sqrt(other) for _, other, _ in results) / dp
                mistakes["norms are added: add squares, and take the root once"] = norms
            expect(value, sqrt(total), where, mistakes)
            if sent > 12:
                raise Hint(f"{where}: it sends {sent} values; sum your own squares first, and send the sum")
