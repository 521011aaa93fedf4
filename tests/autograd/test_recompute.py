"""Claims about recompute: a block's gradients are those of the block, also if its input needs none."""

from contextlib import nullcontext

import numpy as np
import pytest

from minipar.autograd import Tensor, checkpoint, linear, no_grad


@pytest.mark.parametrize("needs", [False, True])
def test_parameters_get_their_gradients_whatever_the_input_needs(needs):
    """NB: the first block's input needs none where the embedding is frozen, or where the input is an array of data."""
    draw = np.random.Generator(np.random.Philox(3)).standard_normal
    arrays = [draw((3, 4)), draw((4, 5)), draw((5, 2))]
    gradients = []
    for recompute in (False, True):
        x, w1, w2 = Tensor(arrays[0], needs), *(Tensor(each, True) for each in arrays[1:])

        def block(x, w1=w1, w2=w2):
            return linear(linear(x, w1).tanh(), w2)

        y = checkpoint(block, x, parameters=[w1, w2]) if recompute else block(x)
        y.sum().backward()
        gradients.append([None if each.grad is None else each.grad.tobytes() for each in (x, w1, w2)])
    plain, recomputed = gradients
    assert (plain[0] is not None) == needs and None not in plain[1:]
    assert recomputed == plain


@pytest.mark.parametrize("depth", [1, 2])
def test_backward_inside_no_grad_recomputes_all_the_same(depth):
    """`no_grad` is about forward passes; the block is run again to get gradients, nested blocks too."""
    draw = np.random.Generator(np.random.Philox(5)).standard_normal
    arrays = [draw((3, 4)), draw((4, 4))]
    gradients = []
    for context in (nullcontext, no_grad):
        x, w = (Tensor(each, True) for each in arrays)

        def block(x, w=w):
            return linear(x, w).tanh()

        def outer(x, w=w, block=block):
            return checkpoint(block, x, parameters=[w]) if depth == 2 else block(x)

        y = checkpoint(outer, x, parameters=[w]).sum()
        with context():
            y.backward()
            assert not (Tensor(arrays[0], True) * 2.0).requires_grad or context is nullcontext  # restored
        gradients.append([x.grad.tobytes(), w.grad.tobytes()])
    assert gradients[0] == gradients[1]


def test_an_input_that_a_block_does_not_use_gets_nothing_from_it():
    """Its other users' gradients stay, whether they arrive before the block's or after them."""
    draw = np.random.Generator(np.random.Philox(6)).standard_normal
    values = draw((2, 3, 4))
    for block_is_last in (False, True):
        x, unused = (Tensor(each, True) for each in values)
        y, z = x.exp(), unused.exp()
        if block_is_last:
            other = z * 3.0
            block = checkpoint(lambda a, b: a * 2.0, y, z)
        else:
            block = checkpoint(lambda a, b: a * 2.0, y, z)
            other = z * 3.0
        (block + other).sum().backward()
        assert np.array_equal(x.grad, 2 * np.exp(x.data)) and np.array_equal(unused.grad, 3 * np.exp(unused.data))
    alone, unused = (Tensor(each, True) for each in values)
    checkpoint(lambda a, b: a * 2.0, alone.exp(), unused.exp()).sum().backward()
    assert alone.grad is not None and unused.grad is None
