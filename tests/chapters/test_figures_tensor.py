"""Figures of chapter 6: what is drawn is what was given, and the shapes are those of the program."""

import numpy as np
import pytest
from matplotlib.colors import to_hex

from chapters.support.ch06.figures import (
    RANKS,
    block_halves,
    draw_caught,
    draw_groups,
    draw_split_loss,
    plot_blocks,
    plot_cuts,
    plot_kept,
    plot_links,
)
from minipar.autograd import causal_attention, gelu
from minipar.comm import run_local
from minipar.nn import GPT, GPTConfig
from minipar.parallel.tensor.plan import tensor_parallel


def words_of(figure):
    return [text.get_text() for text in figure.axes[0].texts if text.get_text()]


def shapes_in_a_block(comm, sequence):
    """The shape of what leaves each operation of a block on this rank, dropout and the residual sum left out."""
    model = GPT(GPTConfig(vocab_size=48, n_positions=6, n_embd=24, n_layer=1, n_head=4))
    tensor_parallel(model, comm, sequence=sequence)
    block, stream = model.h[0], model.embed(np.zeros((5, 6), int))
    shapes = []
    for norm, columns, middle, rows in (
        (block.ln_1, block.attn.c_attn, lambda x: causal_attention(x, block.attn.heads), block.attn.c_proj),
        (block.ln_2, block.mlp.c_fc, gelu, block.mlp.c_proj),
    ):
        x = norm(stream)
        y = middle(columns(x))
        term = y.data @ rows.weight.data
        shapes.append([a.shape for a in (x, columns.border.enter(x), columns(x), y, term, rows(y))])
    return shapes


@pytest.mark.parametrize("sequence", [False, True])
def test_the_shapes_on_the_edges_are_the_programs(sequence):
    sizes = {"B": 5, "T": 6, "h": 24, "t": 2}
    drawn = []
    for nodes in block_halves(sequence).values():
        texts = [shape.replace("3h", "3*h").replace("4h", "4*h") for _, shape in nodes]
        drawn.append([tuple(int(eval(size, {}, sizes)) for size in text.split(",")) for text in texts])
        assert drawn[-1][5:] == [drawn[-1][5]] * 3  # the mapping's result, and what dropout and the sum make of it
    assert run_local(2, shapes_in_a_block, sequence) == [[half[:6] for half in drawn]] * 2


def test_a_block_shows_every_operation_and_shape():
    words = words_of(plot_blocks(True))
    for nodes in block_halves(True).values():
        for name, shape in nodes:
            assert name in words and shape in words
    assert words.count("all-\ngather") == words.count("reduce-\nscatter") == 2
    assert not {"f", "g"} & set(words) and words.count("B, T/t, h") == 8


def test_two_blocks_stand_one_below_the_other():
    words = words_of(plot_blocks(False, True))
    assert words.count("f") == words.count("g") == 2 and words.count("forward:\nall-reduce") == 2
    assert words.index("f") < words.index("all-\ngather")
    assert len(words) == len(words_of(plot_blocks(False))) + len(words_of(plot_blocks(True)))


def test_cuts_cover_each_matrix_in_the_ranks_order():
    columns, rows = ("qkv", 4, 12, 1, 3), ("proj", 4, 4, 0, 1)
    figure = plot_cuts([columns, rows], ranks=2)
    patches = figure.axes[0].patches
    assert [to_hex(patch.get_facecolor()).upper() for patch in patches] == [RANKS[i % 2] for i in range(8)]
    areas = [patch.get_width() * patch.get_height() for patch in patches]
    assert sum(areas[:6]) == pytest.approx(48) and sum(areas[6:]) == pytest.approx(16)
    assert patches[0].get_height() == 4 and patches[6].get_width() == 4  # whole columns, whole rows
    *words, note = words_of(figure)
    assert words == [*"010101", *"qkv", "qkv", *"01", "proj"] and note.startswith("Drawn to scale")


def test_groups_show_each_head_on_the_ranks_that_need_it():
    few, many = draw_groups(heads=8, kv_heads=4, rank_counts=(4, 8)).axes
    few_words, many_words = ([text.get_text() for text in axes.texts] for axes in (few, many))
    assert few_words.count("k1") == few_words.count("v1") == 1
    assert many_words.count("k1") == many_words.count("v1") == 2
    assert few_words.count("q3") == many_words.count("q3") == 1
    dashed = [patch for patch in many.patches if patch.get_linestyle() == "--"]
    assert len(dashed) == 16 and not [patch for patch in few.patches if patch.get_linestyle() == "--"]


def test_the_split_loss_names_what_is_summed():
    words = words_of(draw_split_loss(tokens=4, columns=9, ranks=3))
    assert {"all-reduce:\nmaximum", "all-reduce:\nsum", "loss"} <= set(words)


def test_bars_of_memory_and_links_are_as_long_as_their_values():
    kept = plot_kept({"a": (1e6, 2e6, 4e6)}, ("x", "y", "z")).axes[0]
    assert [patch.get_width() for patch in kept.patches] == [1, 2, 4]
    bars, lines = plot_links({"fast": (2.0, 1.0)}, {"fast": ([1, 2], [5.0, 3.0])}, alone=5.0).axes
    assert [patch.get_height() for patch in bars.patches] == [2.0, 1.0]
    assert list(lines.lines[0].get_ydata()) == [5.0, 3.0]


def test_a_check_is_filled_where_it_has_noticed():
    axes = draw_caught({"one": {"b"}, "two": set()}, ("a", "b")).axes[0]
    assert [text.get_text() for text in axes.texts] == ["", "caught", "", ""]
