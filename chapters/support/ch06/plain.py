"""Compute on plain arrays: gelu and attention (chapter 6), grouped attention, an MLP with and without leaves."""

from collections.abc import Callable, Sequence

import numpy as np

from minipar.autograd import Tensor, causal_attention
from minipar.comm import Communicator, run_local
from minipar.more.tree.tree_sums import tree_sum

LEAVES = 8


def gelu_array(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return GPT-2's gelu of an array, and its slope."""
    s = np.sqrt(2 / np.pi)
    tanh = np.tanh(s * (x + 0.044715 * x**3))
    return x * (1 + tanh) / 2, (1 + tanh) / 2 + x / 2 * (1 - tanh**2) * s * (1 + 3 * 0.044715 * x**2)


def attention_array(qkv: np.ndarray, heads: int, tokens: int) -> tuple[np.ndarray, Callable[[np.ndarray], np.ndarray]]:
    """Return causal attention of q, k and v side by side, in samples of so many tokens, and its backward."""
    whole = Tensor(qkv.reshape(-1, tokens, qkv.shape[1]), requires_grad=True)
    y = causal_attention(whole, heads)

    def backward(dy: np.ndarray) -> np.ndarray:
        y.backward(dy.reshape(y.shape))
        return whole.grad.reshape(qkv.shape)

    return y.data.reshape(len(qkv), -1), backward


def grouped_attention(
    x: np.ndarray, weights: Sequence[np.ndarray], heads: int, kv_heads: int, dy: np.ndarray
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return attention of x (T, h), and the gradients of the three weights; `heads` of q, `kv_heads` of k and v."""
    columns = np.concatenate([x @ weight for weight in weights], axis=1)  # q, k and v side by side
    qkv = Tensor(columns[None], requires_grad=True)
    y = causal_attention(qkv, heads, kv_heads)
    y.backward(dy[None])
    ends = np.cumsum([weight.shape[1] for weight in weights])
    return y.data[0], [x.T @ d for d in np.split(qkv.grad[0], ends[:2], axis=1)]


def in_one_product(comm: Communicator, X: np.ndarray, A: np.ndarray, D: np.ndarray) -> np.ndarray:
    """Compute the MLP with one product for all columns of this rank, and sum over the ranks."""
    A_own = np.split(A, comm.size, axis=1)[comm.rank].copy()
    D_own = np.split(D, comm.size)[comm.rank]
    return comm.all_reduce(gelu_array(X @ A_own)[0] @ D_own, algorithm="recursive_doubling")


def in_leaves(comm: Communicator, X: np.ndarray, A: np.ndarray, D: np.ndarray) -> np.ndarray:
    """Compute the MLP with a product for each leaf of this rank, and sum over the ranks."""
    A_leaves = np.split(A, LEAVES, axis=1)
    D_leaves = np.split(D, LEAVES)
    products = []
    for k in np.split(np.arange(LEAVES), comm.size)[comm.rank]:
        Y_k = gelu_array(X @ A_leaves[k].copy())[0]  # (N, 4h/8), whatever the number of ranks
        products.append(Y_k @ D_leaves[k])
    return comm.all_reduce(tree_sum(np.stack(products)), algorithm="recursive_doubling")


def differing(compute: Callable[..., np.ndarray], ranks: int, *arrays: np.ndarray) -> float:
    """Return which part of the values differs on so many ranks, which are threads, from those on one."""
    (alone,) = run_local(1, compute, *arrays)
    results = run_local(ranks, compute, *arrays)
    assert all(np.array_equal(result, results[0]) for result in results)
    return float(np.mean(results[0] != alone))
