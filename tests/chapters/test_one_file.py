"""Claims about chapter 0's picture and density: what each rank holds, and code that is read once."""

import io
import tokenize

import numpy as np
import pytest
from launcher import ROOT

from chapters.support.ch00.figures import KINDS, RANKS, STRATEGIES, draw_four_strategies, held

SCRIPT = (ROOT / "chapters" / "00_in_one_file.py").read_text(encoding="utf-8")
LAYOUT = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_cuts_what_it_does_not_repeat(strategy):
    copies = {kind: sum(held(strategy, kind, rank).astype(int) for rank in range(RANKS)) for kind in KINDS}
    assert all(set(np.unique(count)) in ({1}, {RANKS}) for count in copies.values())
    whole = {kind for kind, count in copies.items() if count.max() == RANKS}
    assert (
        whole
        == {
            "data parallelism": {"parameters", "Adam's means"},
            "ZeRO stage 1": {"parameters"},
            "tensor parallelism": {"samples"},
            "pipeline": {"samples"},
        }[strategy]
    )


def test_the_picture_names_every_strategy_and_kind():
    texts = {text.get_text().replace("\n", " ") for axes in draw_four_strategies().axes for text in axes.texts}
    assert texts >= {*STRATEGIES, *KINDS, "0", "3"}
    assert (ROOT / "visualize" / "gallery" / "four_strategies.png").exists() and "four_strategies.png" in SCRIPT


def test_a_line_has_at_most_ten_and_a_half_tokens():
    tokens = [t for t in tokenize.generate_tokens(io.StringIO(SCRIPT).readline) if t.type not in LAYOUT]
    lines = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    assert len(tokens) / len(lines) <= 10.5
