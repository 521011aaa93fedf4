"""Claims about `minipar.generate`: the likeliest bytes, or draws that follow temperature and seed."""

from types import SimpleNamespace

import numpy as np
import pytest
from combinations import TEXT, config_of
from training import run_until

from minipar.autograd import Tensor
from minipar.generate import generate, main
from minipar.nn import GPT, GPTConfig
from minipar.train.pretrained import save_pretrained

LOGITS = np.array([2.0, 0.0, 3.0, 1.0, 3.0])


def constant(logits=LOGITS):
    """A model whose next token does not depend on the text."""

    class Model:
        config = SimpleNamespace(n_positions=4)

        def __call__(self, tokens):
            assert tokens.shape[1] <= 4
            return Tensor(np.broadcast_to(logits, (*tokens.shape, len(logits))))

    return Model()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model directory of a short training, export/."""
    folder = tmp_path_factory.mktemp("trained")
    config = config_of("--dp 2 --zero-stage 1 --steps 8 --lr 1e-2 --vocab-size 256 --dtype float32")
    state, _ = run_until(TEXT, config, folder / "save", 8)
    save_pretrained(config.shape.build(), folder / "export", state)
    return folder


def printed(capsys, *argv):
    assert main([str(word) for word in argv]) == 0
    return capsys.readouterr().out


def test_a_text_is_continued(folder, capsys):
    text = printed(capsys, "--from", folder / "export", "--prompt", "def", "--tokens", 30, "--temperature", 1)
    assert text.startswith("def") and len(text) >= 3 + 30 / 4


def test_greedy_takes_the_likeliest_the_first_of_equals():
    assert generate(constant(), [7], 3, temperature=0.0, seed=5) == [7, 2, 2, 2]
    distinct = constant(np.array([2.0, 0.0, 3.0, 1.0]))
    assert generate(distinct, [7], 3, temperature=1e-9, seed=5) == [7, 2, 2, 2]


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_draws_follow_the_softmax(temperature):
    count = 4000
    drawn = generate(constant(), [0], count, temperature, seed=1)[1:]
    weights = np.exp(LOGITS / temperature)
    p = weights / weights.sum()
    frequencies = np.bincount(drawn, minlength=len(LOGITS)) / count
    assert (abs(frequencies - p) <= 5 * np.sqrt(p * (1 - p) / count)).all(), (frequencies, p)


def test_the_seed_decides_the_text():
    texts = [generate(constant(), [0], 50, 1.0, seed) for seed in (3, 3, 4)]
    assert texts[0] == texts[1] != texts[2]


def test_a_long_text_is_cut_at_its_left_end():
    model = GPT(GPTConfig(vocab_size=9, n_positions=4, n_embd=8, n_layer=1, n_head=2, initializer_range=0.5))
    whole = generate(model, [1, 2, 3, 4, 5, 6, 7], 6, 0.0, 0)
    assert whole[7:] == generate(model, [4, 5, 6, 7], 6, 0.0, 0)[4:]


@pytest.mark.parametrize("prompt", [[1], [1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4, 5, 6]])
def test_each_token_is_drawn_from_all_that_fits_before_it(prompt):
    """No token less than the model's positions, at no step."""
    seen, model = [], constant()

    class Watched:
        config = model.config

        def __call__(self, tokens):
            seen.append(tokens[0].tolist())
            return model(tokens)

    text = generate(Watched(), prompt, 5, 1.0, 0)
    ends = range(len(prompt), len(prompt) + 5)
    assert seen == [text[max(0, end - 4) : end] for end in ends] and len(text) == len(prompt) + 5


REFUSED = [
    ("--from nowhere", ["nowhere"]),
    ("--from {folder}", ["{folder}"]),
    ("--from {folder}/small", ["{folder}/small", "16", "256"]),
    ("--from {folder}/export --tokens 0", ["--tokens", "0"]),
    ("--from {folder}/export --tok 3", ["--tok"]),
    ("--prompt x", ["--from"]),
]


@pytest.mark.parametrize(("flags", "values"), REFUSED)
def test_a_wrong_input_is_one_line(flags, values, folder, capsys):
    save_pretrained(GPT(GPTConfig(vocab_size=16, n_positions=4, n_embd=4, n_layer=1, n_head=1)), folder / "small")
    assert main(flags.format(folder=folder).split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("minipar: error: ")
    assert all(value.format(folder=folder) in err for value in values)


@pytest.fixture
def small(tmp_path):
    """The directory of a model that has the 256 bytes of a text."""
    save_pretrained(GPT(GPTConfig(256, 8, 4, 1, 1)), tmp_path / "small")
    return tmp_path / "small"


def test_a_text_begins_with_the_prompt_or_a_line_break(small, capsys):
    tokens = ("--tokens", 1)
    assert printed(capsys, "--from", small, *tokens).startswith("\n")
    assert printed(capsys, "--from", small, *tokens, "--prompt", "ab").startswith("ab")


def test_bytes_that_are_no_text_are_replaced(small, capsys, monkeypatch):
    monkeypatch.setattr("minipar.generate.generate", lambda *_: [97, 255, 10, 98])
    assert printed(capsys, "--from", small) == "a\ufffd\nb\n"


def test_a_large_temperature_is_a_number(small, capsys):
    assert printed(capsys, "--from", small, "--tokens", 1, "--temperature", 1e300).startswith("\n")
