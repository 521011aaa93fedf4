"""Claims about what a layer keeps for backward on tensor-parallel ranks: the closed forms, with ==."""

import pytest
from tensor_cases import HIDDEN, ROWS, SHAPES, model_of

from minipar.comm import run_local
from minipar.memory import MemoryLedger
from minipar.nn import DropoutKeys, dropping
from minipar.parallel.tensor.plan import tensor_parallel


def held_per_layer(tp, sequence, dropout, recompute=False, dtype="float64"):
    """Bytes of activations at the end of forward that one more layer adds, on each rank."""

    def held(comm, layers):
        ledger = MemoryLedger()
        with ledger.recording():
            model = model_of(tp, dropout, recompute, layers, dtype)
            if tp > 1:
                tensor_parallel(model, comm, sequence=sequence)
            length = model.config.n_positions
            with dropping(DropoutKeys(0, 0, range(3))):
                loss = model.loss_sum(ROWS[:, :length], ROWS[:, 1 : length + 1])
            total = ledger.held["activations"]
        del loss
        return total

    one, two = run_local(tp, held, 1), run_local(tp, held, 2)
    return {more - less for less, more in zip(one, two, strict=True)}


@pytest.mark.parametrize(
    ("tp", "sequence", "dropout", "dtype", "itemsize"),
    [
        (1, False, 0.1, "float64", 8),
        (2, False, 0.0, "float64", 8),
        (3, True, 0.0, "float64", 8),
        (4, True, 0.0, "float32", 4),
        (8, False, 0.0, "float32", 4),
        (8, True, 0.0, "float64", 8),
    ],
)
def test_a_layer_keeps_what_the_closed_form_says(tp, sequence, dropout, dtype, itemsize):
    """Elements that a layer keeps for backward, N = B T h and A = B a T^2 (a heads):

        LayerNorm, twice       N each: the normalized x (Megatron keeps x); B T each: 1 / standard deviation
        input of c_attn, c_fc  N each: the two column layers'
        attention              3N: q, k, v; A: the probabilities; N: the output, which is c_proj's input
        MLP                    4N: gelu's input; 4N: its tanh; 4N: its output, which is the second product's input
        dropout masks, 1 byte  2N behind the residual branches, A on the probabilities

    20 N + A + 2 B T, and 2N + A bytes. Korthikanti et al. 2022, section 4.1, in 16 bits: s b h (34 + 5 a s / h) bytes =
    16 N elements + 2N mask bytes, 2A + A mask bytes: without our tanh (4N; they recompute it in backward) and with the
    dropped probabilities, which we compute again.

    Over t ranks everything between a column layer and its row layer is a t-th: attention and MLP. Their section
    4.2.1, s b h (10 + 24/t + ...), leaves whole what is whole here: two LayerNorms, two inputs, and masks.
    With sequence parallelism these are a t-th too, *except* the inputs of the two column layers, which are kept as they
    were gathered; Megatron keeps its slice and gathers once more in backward (4.2.2 divides everything by t).
    """
    heads, length = SHAPES[tp]
    n, a, rows = 3 * length * HIDDEN, 3 * heads * length**2, 3 * length
    slices = tp if sequence else 1  # of the sequence, in LayerNorm
    elements = 2 * n / slices + 2 * n + 16 * n / tp + a / tp + 2 * rows / slices
    masks = (2 * n + a) if dropout else 0
    assert held_per_layer(tp, sequence, dropout, dtype=dtype) == {itemsize * elements + masks}


@pytest.mark.parametrize("tp", [1, 3])
def test_recompute_keeps_the_input_which_sequence_divides(tp):
    n = 3 * SHAPES[tp][1] * HIDDEN
    assert held_per_layer(tp, False, 0.0, recompute=True) == {8 * n}
    if tp > 1:
        assert held_per_layer(tp, True, 0.0, recompute=True) == {8 * n / tp}
