"""Claims about the flags of a training: every flag arrives, and what is not given is filled in.

test_checkpoint.py has what a resumed run takes from its checkpoint.
"""

import numpy as np
import pytest
from refusals import refused
from training import config_for, trainer_for

from minipar.errors import UsageError
from minipar.nn import GPT, GPTConfig
from minipar.train.data import Tokens
from minipar.train.flags import make_parser, parse
from minipar.train.pretrained import save_pretrained

DEFAULTS = """
    --dp 1 --tp 1 --cp 1 --ep 1 --pp 1 --context-parallel ring --zero-stage 0 --zero-replicas 1 --schedule 1f1b
    --layers 2 --hidden 128 --heads 4 --seq-len 64 --vocab-size 256 --model gpt2 --order random --global-batch 32
    --microbatches 1 --steps 300 --lr 1e-3 --lr-schedule constant --warmup-steps 0 --betas 0.9 0.999 --weight-decay 0.01
    --dropout 0 --clip-grad 0 --seed 0 --dtype float32 --device cpu --recompute none --reduction ring --clock wall
"""
GIVEN = """
    --dp 4 --tp 2 --cp 2 --pp 4 --zero-stage 2 --zero-replicas 2 --layers 8 --hidden 96 --heads 8 --seq-len 48
    --vocab-size 300 --data a.txt --order sequential --global-batch 32 --microbatches 4 --steps 20 --lr 3e-4
    --lr-schedule cosine --warmup-steps 5 --betas 0.8 0.95 --weight-decay 0.1 --clip-grad 1 --seed 7 --dtype bfloat16
    --device cuda --recompute full --reduction ordered --context-parallel ulysses --schedule interleaved-1f1b
    --virtual-stages 2 --clock cpu --network 1e-6 1e-9 --metrics m.jsonl --trace t.json --memory l.json --record r
    --save c --save-every 5 --eval-every 7 --export d --model llama
"""


def words_of(line):
    """Return the flags of a line, each with the texts of its values."""
    words = {}
    for word in line.split():
        if word.startswith("--"):
            words[word] = []
        else:
            list(words.values())[-1].append(word)
    return words


def value_of(args, flag):
    return getattr(args, flag.removeprefix("--").replace("-", "_"))


def test_every_flag_arrives():
    args = config_for(GIVEN)
    for flag, texts in words_of(GIVEN).items():
        value = value_of(args, flag)
        values = value if isinstance(value, list) else [value]
        assert values == [type(one)(text) for one, text in zip(values, texts, strict=True)], flag
    shape = args.shape
    assert (shape.model_type, shape.n_layer, shape.n_embd, shape.n_head, shape.vocab_size) == ("llama", 8, 96, 8, 300)


def test_a_flag_without_a_value_is_true():
    for flag in ("--verify", "--sync-every-microbatch", "--sequence-parallel"):
        line = f"--tp 2 --zero-stage 2 --dtype float64 {flag}"
        assert value_of(config_for(line), flag) is True and value_of(config_for(""), flag) is False
    assert config_for("--dropout 0.1").dropout == 0.1


def test_a_flag_that_is_not_given_has_the_value_it_always_had():
    """A change would make an old command line another run."""
    without = vars(config_for(""))
    assert vars(config_for(DEFAULTS)) == without
    others = {name: value for name, value in without.items() if f"--{name.replace('_', '-')}" not in DEFAULTS.split()}
    assert {name for name, value in others.items() if value} == {"shape", "eps"}  # the tests' own eps
    assert trainer_for(parse([]), Tokens(np.zeros(99, np.uint8), "a text")).optimizer.eps == 1e-8


def test_help_names_every_flag_on_one_rank_only(capsys):
    flags = [each for action in make_parser(True)._actions for each in action.option_strings]
    for prints in (True, False):
        with pytest.raises(SystemExit) as left:
            parse(["--help"], 1, prints)
        assert left.value.code == 0
        printed = capsys.readouterr()
        missing = [flag for flag in flags if flag not in printed.out]
        assert (missing == [] if prints else printed.out == "") and printed.err == ""


# ---- what is filled in -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_dp_takes_all_ranks(ranks):
    assert parse(["--global-batch", str(4 * ranks)], ranks).dp == ranks


@pytest.mark.parametrize(("hidden", "columns"), [(8, 64), (24, 64), (32, 128), (128, 384), (4096, 10944)])
def test_an_mlp_has_8_thirds_of_hidden_in_whole_64s(hidden, columns):
    shape = parse(["--model", "llama", "--hidden", str(hidden)]).shape
    assert (shape.n_inner, shape.n_kv_head) == (columns, 4)


def test_a_mixtral_has_8_experts_of_which_2():
    shape = parse(["--model", "mixtral"]).shape
    assert (shape.num_local_experts, shape.num_experts_per_tok, shape.n_kv_head, shape.n_inner) == (8, 2, 4, 384)
    assert shape.aux_coefficient == 0


def test_a_tree_has_microbatches_of_one_sample_unless_given():
    for line, count in {"--dp 2": 4, "--dp 2 --microbatches 1": 1, "--dp 2 --microbatches 2": 2, "--dp 8": 1}.items():
        assert config_for(f"--reduction tree --global-batch 8 {line}").microbatches == count


@pytest.mark.parametrize("flag", ["--model", "--init-from"])
def test_a_model_directory_gives_the_shape(flag, tmp_path):
    config = GPTConfig(vocab_size=99, n_positions=16, n_embd=48, n_layer=3, n_head=4, layer_norm_epsilon=1e-3)
    save_pretrained(GPT(config), tmp_path)
    args = parse(f"{flag} {tmp_path} --seq-len 16 --layers 3".split())
    assert (args.layers, args.hidden, args.heads, args.vocab_size, args.seq_len) == (3, 48, 4, 99, 16)
    assert args.shape == config
    refused(UsageError, "2", "3", by=lambda: parse(f"{flag} {tmp_path} --seq-len 16 --layers 2".split()))


def test_verify_is_refused_where_it_would_prove_nothing():
    """In float32 rounding and a mistake are not many digits apart; bits are bits in any dtype."""
    config_for("--verify --dtype float64 --tp 2")
    config_for("--verify --dp 2 --reduction ordered --dtype bfloat16")
    config_for("--verify --tp 2 --reduction tree")
    for line in ("--verify", "--verify --dp 2 --zero-stage 1", "--verify --tp 2 --reduction ordered"):
        refused(UsageError, "float32", by=lambda line=line: config_for(line))
