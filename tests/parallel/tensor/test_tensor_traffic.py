"""Claims about what tensor-parallel ranks send and hold: the closed forms, with ==."""

import pytest
from tensor_cases import HIDDEN, LAYERS, LAYOUTS, ROWS, SHAPES, TEXT, config_for, loss_and_backward, model_of
from training import trainer_for

from minipar.comm import run_local, wire_bytes
from minipar.memory import MemoryLedger
from minipar.nn import DropoutKeys, dropping
from minipar.parallel.tensor.plan import tensor_parallel

pytestmark = pytest.mark.sampled(3)

# ---- bytes -----------------------------------------------------------------------------------------------------------


def closed_form(tp, rank, sequence, reduction="ring", microbatches=1, recompute=False, norms=1):
    """What one step sends over tp, in bytes of float64: see `tensor_parallel`.

    n = B T h elements travel: per layer and microbatch twice forward and twice backward, after the embedding once
    forward, before the head once backward. Each time as an all-reduce; with sequence parallelism as a reduce-scatter
    where partial results are summed and an all-gather where the whole is needed, one of them in each direction: forward
    and backward of embedding and head then send one of each. Recompute runs each layer's forward again. The loss adds
    all-reduces of N = B T maxima and 2N sums. The norm adds a number for each chunk of the flat gradient that this rank
    has (`norms`: dp of them, with ZeRO 1). Sequence parallelism adds, once per step and bucket, the gradients of what
    is replicated: 6h for a layer (two LayerNorms, two biases), (T + 2) h for positions and last LayerNorm.
    """
    length = SHAPES[tp][1]
    n, tokens = length * HIDDEN, length  # of one sample

    def wire(op, elements, algorithm=reduction):
        if op == "all_gather":
            algorithm = {"ring": "ring", "ordered": "pairwise"}[reduction]
        return wire_bytes(op, algorithm, elements, 8, tp, rank)

    pair = wire("all_gather", n) + wire("reduce_scatter", n)
    whole = pair if sequence else wire("all_reduce", n)
    per_layer = (6 if recompute else 4) * whole
    loss = wire("all_reduce", tokens) + wire("all_reduce", 2 * tokens)
    total = microbatches * (LAYERS * per_layer + 2 * whole + loss)
    if sequence:
        total += LAYERS * wire("all_reduce", 6 * HIDDEN) + wire("all_reduce", (length + 2) * HIDDEN)
    return total + wire("all_reduce", norms, "ordered")


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("microbatches", "reduction", "recompute"), [(1, "ring", False), (3, "ordered", False), (2, "ring", True)]
)
@pytest.mark.parametrize(("tp", "sequence"), LAYOUTS)
def test_a_step_sends_what_the_closed_form_says(tp, sequence, microbatches, reduction, recompute):
    flags = f"--global-batch {microbatches} --microbatches {microbatches} --reduction {reduction} --steps 2"
    flags += " --recompute full" * recompute + " --sequence-parallel" * sequence
    config = config_for(flags, tp, tp)

    def rank(comm):
        trainer = trainer_for(config, TEXT, comm)
        trainer.step(0)
        comm.traffic.reset()
        trainer.step(1)
        return comm.traffic.counts

    for r, sent in enumerate(run_local(tp, rank)):
        assert {axis for (_, axis), (messages, _) in sent.items() if messages} == {"tp"}
        expected = closed_form(tp, r, sequence, reduction, microbatches, recompute)
        assert sum(nbytes for _, nbytes in sent.values()) == expected


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_a_layer_adds_8_bsh_with_and_without_sequence(tp):
    """Korthikanti et al., section 4.2.2: the same bytes, as all-reduces or as all-gathers and reduce-scatters."""

    def sent(comm, layers, sequence):
        model = model_of(tp, layers=layers)
        tensor_parallel(model, comm, sequence=sequence)
        comm.traffic.reset()
        loss_and_backward(model)
        return comm.traffic.bytes(), [op for op, _ in comm.traffic.counts]

    length = SHAPES[tp][1]
    elements = 8 * 3 * length * HIDDEN * (tp - 1) // tp
    for sequence in (False, True):
        one, two = (run_local(tp, sent, layers, sequence) for layers in (1, 2))
        for (less, ops), (more, _) in zip(one, two, strict=True):
            assert more - less == 8 * elements
            assert ("all_gather" in ops) == sequence == ("reduce_scatter" in ops)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_dp_sends_a_t_th_and_leaves_the_tensor_axis_alone(stage, sequence):
    """dp 2, tp 2: over tp what tp alone sends; over dp 2 Psi (p-1)/p for this rank's Psi (stage 3: half as much more),
    besides loss and norm.
    """
    flags = f"--global-batch 2 --steps 1 --zero-stage {stage}" + " --sequence-parallel" * sequence
    config = config_for(flags, 4, 2)

    def rank(comm):
        trainer = trainer_for(config, TEXT, comm)
        psi = sum(bucket.size for bucket in trainer.ddp.buckets)
        comm.traffic.reset()
        trainer.step(0)
        sent = comm.traffic.bytes(axis="tp"), comm.traffic.bytes(axis="dp")
        return *sent, psi, trainer.mesh.coordinates, trainer.ddp.buckets

    for over_tp, over_dp, psi, place, buckets in run_local(4, rank):
        assert over_tp == closed_form(2, place["tp"], sequence, norms=1 if stage else 2)
        assert psi == 2 * LAYERS * HIDDEN * 3 + LAYERS * (12 * HIDDEN**2 + 7 * HIDDEN) // 2 + (7 + 8 + 2) * HIDDEN
        d = place["dp"]
        expected = wire_bytes("all_reduce", "ordered", 1, 8, 2, d)  # the loss
        for bucket in buckets:
            if stage == 0:
                expected += wire_bytes("all_reduce", "ring", bucket.size, 8, 2, d)
            else:
                gather = wire_bytes("all_gather", "pairwise", bucket.size, 8, 2, d)
                gathers = 2 if stage == 3 else 1
                expected += wire_bytes("reduce_scatter", "ring", bucket.size, 8, 2, d) + gathers * gather
        expected += wire_bytes("all_reduce", "ordered", 1, 8, 2, d) if stage else 0  # the norm
        assert over_dp == expected


# ---- activations -----------------------------------------------------------------------------------------------------


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


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("dtype", "itemsize", "dropout"), [("float64", 8, 0.1), ("float32", 4, 0.0)])
@pytest.mark.parametrize(("tp", "sequence"), [(1, False), *LAYOUTS])
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
    4.2.1, s b h (10 + 24/t + ...), leaves whole what is whole here: two LayerNorms, two inputs, two masks (1 byte).
    With sequence parallelism these are a t-th too, *except* the inputs of the two column layers, which are kept as they
    were gathered; Megatron keeps its slice and gathers once more in backward (4.2.2 divides everything by t).
    """
    heads, length = SHAPES[tp]
    n, a, rows = 3 * length * HIDDEN, 3 * heads * length**2, 3 * length
    slices = tp if sequence else 1  # of the sequence, in LayerNorm and dropout
    elements = 2 * n / slices + 2 * n + 16 * n / tp + a / tp + 2 * rows / slices
    masks = (2 * n / slices + a / tp) if dropout else 0
    assert held_per_layer(tp, sequence, dropout, dtype=dtype) == {itemsize * elements + masks}


@pytest.mark.parametrize(("tp", "dropout"), [(2, 0.1), (3, 0.0), (4, 0.1)])
def test_sequence_divides_all_but_the_column_layers_inputs(tp, dropout):
    """Against one device with this shape: (what it keeps - 2N) / t + 2N."""

    def held_on_one_device():
        ledger = MemoryLedger()
        heads, length = SHAPES[tp]
        with ledger.recording():
            held = []
            for layers in (1, 2):
                model = model_of(tp, dropout, layers=layers)
                with dropping(DropoutKeys(0, 0, range(3))):
                    loss = model.loss_sum(ROWS[:, :length], ROWS[:, 1 : length + 1])
                held.append(ledger.held["activations"])
                del loss
        return held[1] - held[0]

    inputs, serial_bytes = 2 * 3 * SHAPES[tp][1] * HIDDEN * 8, held_on_one_device()
    assert held_per_layer(tp, True, dropout) == {(serial_bytes - inputs) / tp + inputs}
    (without,) = held_per_layer(tp, False, dropout)
    (with_sequence,) = held_per_layer(tp, True, dropout)
    assert with_sequence < without < serial_bytes


@pytest.mark.sampled(1)
@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_recompute_keeps_the_input_which_sequence_divides(tp):
    n = 3 * SHAPES[tp][1] * HIDDEN
    assert held_per_layer(tp, False, 0.1, recompute=True) == {8 * n}
    if tp > 1:
        assert held_per_layer(tp, True, 0.1, recompute=True) == {8 * n / tp}
