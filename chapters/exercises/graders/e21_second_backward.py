"""Grader of exercise 21, a second backward."""

from chapters.exercises.e21_second_backward import Small
from chapters.exercises.grading import Hint, call, require

SOLVED = "Backward may run again: gradients of leaves add up, and a freed graph is refused (section 1.1)."


def graph():
    """Return the leaves and the computed tensors of chapter 1's first page; one pass gives 48 and 28."""
    w, x = Small(3.0), Small(2.0)
    a = x * w
    b = a + x
    return (x, w), (a, b, a * b)


def gradients(leaves):
    return tuple(leaf.grad for leaf in leaves)


def refused(solution, root, leaves):
    """Tell whether a pass is refused with a ValueError. Hint if the refusal has changed a gradient."""
    before = gradients(leaves)
    try:
        solution.backward(root, 1.0)
    except ValueError:
        require(
            gradients(leaves) == before,
            "a refused pass has changed the gradient of a leaf: look for freed tensors before you send anything",
        )
        return True
    except IndexError as error:
        raise Hint(f"a pass through a freed graph ends in an IndexError: {error}; raise a ValueError first") from None
    return False


def expect(found, right, what, mistakes=()):
    for wrong, hint in mistakes:
        require(found != wrong, f"{what}: the leaves have {found}, expected {right}: {hint}")
    require(found == right, f"{what}: the leaves have {found}, expected {right}")


def grade(solution):
    leaves, computed = graph()
    root = computed[-1]
    call(solution, solution.backward, root, 1.0, True)
    expect(gradients(leaves), (48, 28), "one pass; a tensor sends when all of its users have sent, by its number")
    require(not any(tensor.freed for tensor in computed), "retain_graph=True: the pass must free nothing")
    call(solution, solution.backward, root, 1.0, True)
    stale = "a, b or c still had a gradient of the first pass, and sent it again"
    wrong = [((48, 28), "leaves must keep theirs, and add"), ((162, 96), stale), ((210, 124), stale)]
    expect(gradients(leaves), (96, 56), "a second pass with retain_graph=True", wrong)
    call(solution, solution.backward, root, 1.0)
    expect(gradients(leaves), (144, 84), "a third pass")
    kept = [name for name, tensor in zip("abc", computed, strict=True) if not tensor.freed]
    require(not kept, f"after a pass without retain_graph {', '.join(kept)} is not freed: free each computed tensor")
    require(not any(leaf.freed for leaf in leaves), "a leaf is freed: nothing computed it, and it has no rules")
    require(refused(solution, root, leaves), "a pass through a freed graph was accepted: raise a ValueError")

    # Two losses with a common part: the first pass frees it. The second would reach x and w directly, and then a.
    (x, w), (a, _, first) = graph()
    second = (a + w) * x
    call(solution, solution.backward, first, 1.0)
    before = second.freed
    require(
        refused(solution, second, (x, w)),
        "two losses share a tensor, and the first pass freed it: the second must be refused. Ask every tensor below "
        "the root, not the root alone",
    )
    require(second.freed == before, "a refused pass has freed a tensor")
    (x, w), (a, _, first) = graph()
    second = (a + w) * x  # x^2 w + w x, whose gradients are 2 x w + w = 15 and x^2 + x = 6
    call(solution, solution.backward, first, 1.0, True)
    call(solution, solution.backward, second, 1.0)
    shared = [((48 + 15 + 14 * 3, 28 + 6 + 14 * 2), "the shared tensor must start each pass from 0")]
    expect(gradients((x, w)), (63, 34), "two losses that share a tensor", shared)

    total = one = Small(1.0)
    for _ in range(5000):
        total = total + one
    call(solution, solution.backward, total, 1.0)
    expect(gradients((one,)), (5001,), "a sum of 5000")
    square = one * one
    one.grad = 0.0
    call(solution, solution.backward, square, 1.0)
    expect(gradients((one,)), (2,), "a tensor times itself", [((1,), "it is used twice: two contributions")])
    alone = Small(7.0)
    call(solution, solution.backward, alone, 2.0)
    call(solution, solution.backward, alone, 2.0)
    expect(gradients((alone,)), (4,), "a leaf that is the root, two passes", [((2,), "leaves add up")])
