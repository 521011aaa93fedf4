"""Claims about `--reduction tree`: all layouts have the bits of one device, after 20 steps; the others are refused."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import training
from training import run_until, trained, verdicts

from minipar.autograd import embedding
from minipar.comm import algorithms
from minipar.errors import UsageError
from minipar.parallel import exact_norm, tree
from minipar.train.data import Tokens

VOCAB = 64
RANDOM = np.random.Generator(np.random.Philox(7))
LETTERS = RANDOM.integers(0, VOCAB, 900)
LETTERS[RANDOM.random(900) < 0.5] &= 32  # 0 and 32 occur often, as some letters do in any text
TEXT = Tokens(LETTERS.astype(np.uint8), "random text", VOCAB)
SHAPE = f"--hidden 32 --heads 8 --seq-len 16 --vocab-size {VOCAB} --global-batch 8"
UPDATE = "--clip-grad 0.5 --lr-schedule cosine --weight-decay 0.1"
MODELS = ("--model gpt2 --dtype float32", "--model llama --dtype float32 --ffn 64")
MODELS += ("--model llama --dtype float64 --ffn 48", "--model gpt2 --dtype float64 --dropout 0.1")
SCHEDULES = ("1f1b", "zb-h1", "gpipe")
# dp, tp, pp on 2, 4 and 8 ranks. The first one is in `make test` with two of MODELS.
SHAPES = [(2, 2, 2), (8, 1, 1), (1, 8, 1), (1, 1, 8), (4, 2, 1), (4, 1, 2), (2, 4, 1), (1, 4, 2), (2, 1, 4), (1, 2, 4)]
SHAPES += [(4, 1, 1), (1, 4, 1), (1, 1, 4), (2, 2, 1), (2, 1, 2), (1, 2, 2), (2, 1, 1), (1, 2, 1), (1, 1, 2)]


def layout_flags(number: int, shape: tuple[int, int, int]) -> str:
    """The flags of a layout, with all ZeRO stages, schedules and both kinds of tensor parallelism in turn."""
    dp, tp, pp = shape
    flags = f"--dp {dp} --tp {tp} --pp {pp}"
    place = SHAPES.index(shape) + number
    if dp > 1:
        flags += f" --zero-stage {(place + 3) % 4}"
    if dp > 2 and place % 4 == 2:
        flags += " --zero-replicas 2"
    if tp > 1 and place % 2 == 0:
        flags += " --sequence-parallel"
    if pp > 1:
        flags += f" --schedule {SCHEDULES[place % 3]}"
    if place % 5 == 0:
        flags += " --recompute full"
    return flags


LAYOUTS = [(model, layout_flags(i, shape)) for i, model in enumerate(MODELS) for shape in SHAPES]


def config_for(flags: str, steps: int = 20):
    layers = 8 if "--pp 8" in flags else 4
    length = f"--layers {layers} --steps {steps} --warmup-steps {min(5, steps - 1)}"
    return training.config_for(f"{SHAPE} {UPDATE} {length} --reduction tree {flags}")


@cache
def one_device(model: str, layers: int, steps: int = 20):
    """The bits of one device's parameters, and its losses and norms."""
    return trained(config_for(f"{model} --layers {layers}", steps), TEXT)


# ---- the same bits ---------------------------------------------------------------------------------------------------


@pytest.mark.sampled(4 * len(SHAPES))
@pytest.mark.parametrize(("model", "flags"), LAYOUTS)
def test_a_layout_has_the_bits_of_one_device(model, flags):
    config = config_for(f"{model} {flags}")
    assert trained(config, TEXT) == one_device(model, config.model.layers)


def test_the_layouts_have_every_strategy():
    assert len(LAYOUTS) >= 60
    words = " ".join(flags for _, flags in LAYOUTS)
    stages = [f"--zero-stage {stage}" for stage in range(4)]
    for flag in (*stages, *SCHEDULES, "--sequence-parallel", "--zero-replicas 2", "--recompute full"):
        assert flag in words
    assert len({flags for _, flags in LAYOUTS[:: len(SHAPES)]}) == len(MODELS)


def test_one_device_really_trains_and_clips():
    first, *_, last = one_device(MODELS[0], 4)[1]
    assert last[0] < first[0] - 0.05
    assert first[1] > 0.5  # --clip-grad


def test_whole_products_have_other_bits():
    assert trained(replaced(config_for(MODELS[0], 3), "ordered"), TEXT) != one_device(MODELS[0], 4, 3)


def replaced(config, reduction):
    return replace(config, run=replace(config.run, reduction=reduction))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("flags", ["--dp 2 --tp 2 --zero-stage 3", "--tp 4 --sequence-parallel", "--dp 4 --pp 2"])
def test_verify_demands_bits(flags):
    for verdict in verdicts(config_for(f"{MODELS[0]} {flags}", 2), TEXT):
        assert verdict.passed and "bit for bit" in verdict.line, verdict.line


# ---- from any layout to any other ------------------------------------------------------------------------------------

ORDERS = [
    ["--dp 2 --tp 2 --zero-stage 3", "--pp 4 --schedule zb-h1", "", "--dp 8 --zero-stage 1"],
    ["", "--tp 8 --sequence-parallel", "--dp 4 --zero-stage 2", "--dp 2 --tp 2 --pp 2"],
    ["--pp 2 --dp 4 --zero-stage 3", "--dp 8", "--tp 4", "--pp 4 --tp 2 --sequence-parallel"],
]


@pytest.mark.long
@pytest.mark.parametrize(("model", "layouts"), list(zip(MODELS, ORDERS, strict=False)))
def test_a_run_goes_on_in_any_layout(tmp_path, model, layouts):
    reports = []
    resume = ""
    for i, flags in enumerate(layouts):
        stop = 5 * (i + 1)
        config = config_for(f"{model} {flags} {resume}")
        state, steps = run_until(TEXT, config, tmp_path, stop)
        reports += steps
        resume = f"--resume {tmp_path}"
    assert (training.bits(state), reports) == one_device(model, 4)


def test_a_resumed_run_keeps_the_leaves(tmp_path):
    run_until(TEXT, config_for(f"{MODELS[0]} --dp 2"), tmp_path, 1)
    with pytest.raises(UsageError, match=r"written with dp\*microbatches = 8 leaves of a tree, but this run has 4"):
        run_until(TEXT, config_for(f"{MODELS[0]} --dp 2 --microbatches 2 --resume {tmp_path}"))


# ---- leaves ----------------------------------------------------------------------------------------------------------


def test_a_leaf_is_one_sample_unless_microbatches_are_given():
    assert config_for("--dp 2").data.microbatches == 4
    assert config_for("").data.microbatches == 8
    assert config_for("--dp 2 --microbatches 2").data.microbatches == 2


def test_the_model_alone_decides_the_leaves_of_its_layers():
    def count(flags):
        config = config_for(flags)
        return tree.leaf_count(training.trainer_for(config, TEXT).model.config, config.model.seq_len)

    assert count("") == 8
    assert count("--heads 4") == 4
    assert count("--model llama --kv-heads 2") == 2
    assert count("--model llama --ffn 20") == 4
    assert count("--seq-len 12") == 4
    assert count("--vocab-size 98") == 2


REFUSED = {
    "--dp 3 --global-batch 6": "with dp = 3: neighbours are added in pairs",
    "--tp 3 --hidden 24 --heads 12 --seq-len 12": "with tp = 3: neighbours",
    "--microbatches 6 --global-batch 12": "with microbatches = 6: neighbours",
    "--global-batch 12": "with microbatches = 12: neighbours",
    "--tp 4 --vocab-size 66": "with tp = 4: each rank has at least one leaf, but a layer has 2, the largest",
    "--cp 2": "does not go with --cp 2: a product of a part of a sequence's rows has other bits",
    "--model mixtral": "does not go with --model mixtral: how many rows an expert has depends on the batch",
    "--dtype bf16": "does not go with --dtype bfloat16: each rank rounds its term to 2 bytes",
    "--device cuda": "does not go with --device cuda: its library",
    "--zero-stage 2 --sync-every-microbatch": "does not go with --sync-every-microbatch: it sums over dp",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_what_cannot_have_the_bits_is_refused(flags):
    with pytest.raises(UsageError) as error:
        config_for(flags)
    assert f"--reduction tree {REFUSED[flags]}" in str(error.value)
    assert "\n" not in str(error.value)


# ---- sums ------------------------------------------------------------------------------------------------------------


def left_to_right(terms):
    """The sum in the order of one loop."""
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def test_subtrees_may_come_in_any_order():
    terms = np.random.Generator(np.random.Philox(1)).standard_normal((8, 5)).astype(np.float32)
    for seed in range(20):
        total = tree.TreeSum()
        for number in np.random.Generator(np.random.Philox(seed)).permutation(8):
            total.add(int(number), terms[number])
        assert total.total().tobytes() == tree.tree_sum(terms).tobytes()
    assert left_to_right(terms).tobytes() != tree.tree_sum(terms).tobytes()


def test_sums_in_order_hold_few_subtrees():
    total = tree.TreeSum()
    for number in range(64):
        total.add(number, 1.0)
        assert len(total.subtrees) <= 6
    assert total.total() == 64.0


def test_leaves_are_cut_and_joined_by_groups():
    matrix = np.arange(24).reshape(2, 12)
    assert tree.cut(matrix, 2, 3)[1].tolist() == [[2, 3, 6, 7, 10, 11], [14, 15, 18, 19, 22, 23]]
    assert np.array_equal(tree.join(tree.cut(matrix, 2, 3), 3), matrix)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_norm_rounds_nothing_that_has_an_order(dtype):
    random = np.random.Generator(np.random.Philox(3))
    values = (random.standard_normal(1000) * 10.0 ** random.uniform(-8, 8, 1000)).astype(dtype)
    whole = exact_norm.exact_square_sum([values], [])
    for cuts in ([1], [500], [7, 8, 900]):
        assert exact_norm.exact_square_sum(np.split(random.permutation(values), cuts), []) == whole
    assert whole == pytest.approx(float((values.astype(np.float64) ** 2).sum()), rel=1e-14)


def test_the_norm_of_extremes():
    def norm_of(*values):
        return exact_norm.exact_square_sum([np.array(values)], [])

    assert norm_of(0.0) == 0.0
    assert norm_of(3.0, 4.0) == 25.0
    assert norm_of(1e-150, 1e-150) == pytest.approx(2e-300, rel=1e-12)
    assert norm_of(1e150) == pytest.approx(1e300, rel=1e-15)
    assert norm_of(np.inf, 1.0) == np.inf
    assert np.isnan(norm_of(np.nan, np.inf))


# ---- planted changes of order ----------------------------------------------------------------------------------------


def add_in_arrival(self, number, term):
    """TreeSum.add that adds each term to the sum of those before it."""
    self.subtrees[1, 0] = self.subtrees.pop((1, 0), 0) + term


def sum_tokens_at_once(x, leaves):
    return x.reshape(-1, x.shape[-1]).sum(axis=0)


def zeros_among_rows(weight, index, is_own):
    """own_rows whose gradient adds up all rows, those of other ranks as zeros."""
    return embedding(weight, index) * is_own[..., None].astype(weight.dtype)


def whole_norm(gradients, axes):
    total = np.array([sum(float((g * g).sum(dtype=np.float64)) for g in gradients)])
    for axis in axes:
        axis.all_reduce(total, algorithm="ordered")
    return float(total[0])


@pytest.mark.parametrize("bits", [60, 61])
def test_a_norm_of_too_many_squares_is_refused(monkeypatch, bits):
    """Equal squares are the worst case. The limit of the test's integers is 2^3 or 2^2 elements."""
    monkeypatch.setattr(exact_norm, "BITS", bits)
    most = 2 ** (63 - bits)
    value = np.float32(1 - 2**-20)  # its square is just below a power of two
    exact_norm.check_size(most)
    total = exact_norm.exact_square_sum([np.full(most, value)], [])
    assert total == pytest.approx(most * float(value) ** 2, rel=1e-15)
    beyond = exact_norm.exact_square_sum([np.full(most + 1, value)], [])
    assert beyond < total
    with pytest.raises(UsageError, match=f"{most + 1} parameters: .* at most {most} squares"):
        exact_norm.check_size(most + 1)


PLANTED = {
    "leaves from left to right": (tree, "tree_sum", left_to_right),
    "microbatches from left to right": (tree.TreeSum, "add", add_in_arrival),
    "a whole product for its columns": (tree, "multiply_by_leaves", lambda a, b, leaves, groups=1: a @ b),
    "a whole product for its terms": (tree, "multiply_as_tree", lambda a, b, leaves, groups=1: a @ b.T),
    "tokens at once": (tree, "token_sums", sum_tokens_at_once),
    "zeros among an embedding's rows": (tree, "own_rows", zeros_among_rows),
    "squares as they come": (exact_norm, "exact_square_sum", whole_norm),
}
GENERATORS = {
    "ranks from left to right": algorithms.ordered_reduce_scatter,
    "far ranks first": algorithms.recursive_halving_reduce_scatter,
    "ranks round the ring": algorithms.ring_reduce_scatter,
}
ALL_AXES = f"{MODELS[0]} --dp 4 --tp 2 --sequence-parallel"


def differs(flags: str = ALL_AXES) -> bool:
    config = config_for(flags, 2)
    return trained(config, TEXT) != trained(config_for(f"{MODELS[0]}", 2), TEXT)


@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", PLANTED)
def test_another_order_is_seen(monkeypatch, name):
    monkeypatch.setattr(*PLANTED[name])
    assert differs()


@pytest.mark.parametrize("name", GENERATORS)
def test_another_order_of_the_ranks_is_seen(monkeypatch, name):
    monkeypatch.setitem(algorithms.GENERATORS, ("reduce_scatter", "tree"), GENERATORS[name])
    assert differs(f"{MODELS[0]} --dp 4 --zero-stage 1")


def test_q_k_and_v_that_are_cut_together_are_seen(monkeypatch):
    cut, join = tree.cut, tree.join
    monkeypatch.setattr(tree, "cut", lambda matrix, leaves, groups=1: cut(matrix, leaves))
    monkeypatch.setattr(tree, "join", lambda blocks, groups=1: join(blocks))
    assert differs()
