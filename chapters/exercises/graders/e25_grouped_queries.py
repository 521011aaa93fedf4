"""Grader of exercise 25, grouped queries under tensor parallelism."""

import numpy as np

from chapters.exercises.grading import RingCommunicator, call, counted, expect, on_ranks, random, require
from minipar.autograd import Tensor, causal_attention

HIDDEN, SIZE, TOKENS = 5, 2, 6  # SIZE: of a head
SETTINGS = ((8, 4, 1), (8, 4, 2), (4, 4, 4), (8, 2, 8), (8, 2, 4), (6, 3, 6), (8, 1, 4))  # a, G, t
SOLVED = "Copies of a head stay equal, and the norm counts each head once (chapters/more/grouped_queries)."


class Ranks(RingCommunicator):
    """A communicator whose rows have rings, too."""

    def new_group(self, ranks, axis):
        require(self.rank in ranks, f"new_group({list(ranks)}): rank {self.rank} is not among them")
        return RingCommunicator(self.comm.new_group(list(ranks), axis))


def backward(x, q_k_v, a, G, dy):
    """Return the gradients of the three matrices. dy: (T, a SIZE)."""
    qkv = Tensor(np.concatenate([x @ weight for weight in q_k_v], axis=1)[None], requires_grad=True)
    causal_attention(qkv, a, G).backward(dy[None])
    ends = np.cumsum([weight.shape[1] for weight in q_k_v])
    return [x.T @ d for d in np.split(qkv.grad[0], ends[:2], axis=1)]


def columns(array, heads):
    return array[:, heads.start * SIZE : heads.stop * SIZE]


def expected_heads(a, G, t, r):
    of_q = range(r * a // t, (r + 1) * a // t)
    return of_q, range(of_q[0] * G // a, of_q[-1] * G // a + 1)


def check_heads(solution, a, G, t):
    for r in range(t):
        where = f"own_heads({a}, {G}, {t}, {r})"
        found, right = call(solution, solution.own_heads, a, G, t, r), expected_heads(a, G, t, r)
        require(isinstance(found, tuple) and len(found) == 2, f"{where}: return two ranges, of q and of k and v")
        of_q, of_kv = found
        require(of_q == right[0], f"{where}: heads {of_q} of q, expected {right[0]}: a / t of them, in order")
        require(len(of_kv) > 0, f"{where}: no head of k and v; with t > G a rank has one, and others have the same")
        require(
            of_kv == right[1],
            f"{where}: heads {of_kv} of k and v; query heads {of_q} read {right[1]}: head i reads i G // a",
        )


def grade(solution):
    for a, G, t in SETTINGS:
        check_heads(solution, a, G, t)
        x, q_k_v = random(a, G).normal(size=(TOKENS, HIDDEN)), []
        for which, heads in enumerate((a, G, G)):
            q_k_v.append(random(a, G, which).normal(size=(HIDDEN, heads * SIZE)))
        dy = random(a, G, 9).normal(size=(TOKENS, a * SIZE))
        whole = backward(x, q_k_v, a, G, dy)
        parts = []
        for r in range(t):
            of_q, of_kv = expected_heads(a, G, t, r)
            own = [columns(weight, heads) for weight, heads in zip(q_k_v, (of_q, of_kv, of_kv), strict=True)]
            parts.append(backward(x, own, len(of_q), len(of_kv), columns(dy, of_q)))

        def program(comm, G=G, parts=parts):
            ranks = Ranks(comm.comm)
            found = solution.gradients(ranks, G, *[part.copy() for part in parts[comm.rank]])
            require(isinstance(found, tuple) and len(found) == 3, "gradients returns those of q, k and v")
            sent = comm.traffic.bytes() // 8
            arrays = [np.array(array) for array in found]
            length = solution.norm(ranks, G, *found)
            return arrays, length, sent, comm.traffic.bytes() // 8 - sent

        results = on_ranks(solution, t, program)
        copies = max(1, t // G)
        for r, (found, _, _, _) in enumerate(results):
            of_q, of_kv = expected_heads(a, G, t, r)
            for which, (name, heads) in enumerate((("q", of_q), ("k", of_kv), ("v", of_kv))):
                right = columns(whole[which], heads)
                mistakes = {}
                if which == 0 and copies > 1:
                    first = r - r % copies
                    mistakes["each rank has queries of its own: only k and v are copied"] = sum(
                        part[0] for part in parts[first : first + copies]
                    )
                if t > 1 and (which == 0 or copies == 1):
                    mistakes["no other rank has these columns: sum nothing"] = sum(part[which] for part in parts)
                if which and copies > 1:
                    mistakes["other ranks have the same head: sum the copies' gradients"] = parts[r][which]
                    if G > 1:
                        everything = sum(part[which] for part in parts)
                        mistakes["heads that are not the same are added up: sum over the ranks of one head"] = (
                            everything
                        )
                    mistakes["the copies' gradients are parts of one sum: add them, and do not average"] = (
                        right / copies
                    )
                expect(found[which], right, f"a {a}, G {G}, rank {r} of {t}: the gradient of {name}", mistakes)
        where = f"a {a}, G {G}, {counted(t, 'rank')}"
        sent, fewest = sum(result[2] for result in results), 2 * (copies - 1) * 2 * G * HIDDEN * SIZE
        require(
            sent == fewest,
            f"{where}: gradients sends {sent} elements, expected {fewest}: only ranks that have the same head talk, "
            "and about that head alone",
        )
        squares = [float((array**2).sum()) for array in whole]
        own = [float(np.sqrt(sum((array**2).sum() for array in found))) for found, _, _, _ in results]
        each = float(np.sqrt(squares[0] + copies * (squares[1] + squares[2])))
        mistakes = {
            "each copy is counted: a head that c ranks have must count once": each,
            "this is the square of the norm": sum(squares),
        }
        for r, (_, length, _, _) in enumerate(results):
            mistakes["this is the norm of one rank's gradients: sum the squares over all ranks"] = own[r]
            expect(length, np.sqrt(sum(squares)), f"{where}: the norm on rank {r}", mistakes)
        sent = sum(result[3] for result in results)
        require(
            sent == 2 * (t - 1),
            f"{where}: norm sends {sent} elements, expected {2 * (t - 1)}: one all-reduce of one value",
        )
