"""Claims about the configuration of a training: every flag arrives, and what is not given is filled in."""

import dataclasses
from dataclasses import replace

import pytest
from refusals import refused
from training import config_for

from minipar.errors import UsageError
from minipar.nn import GPTConfig
from minipar.parallel.pipeline.schedule_file import save_csv
from minipar.train.config import check_settings, parse, resolve, schedule_of, shape_of, with_shape
from minipar.train.settings import TrainConfig, flags, sizes_of

DEFAULTS = """
    --tp 1 --cp 1 --ep 1 --pp 1 --zero-stage 0 --zero-replicas 1 --layers 2 --hidden 128 --heads 4 --seq-len 64
    --vocab-size 256 --model gpt2 --aux-loss 0 --router-bias 0 --order random --global-batch 32 --microbatches 1
    --steps 300 --lr 1e-3 --lr-schedule constant --warmup-steps 0 --betas 0.9 0.999 --eps 1e-8 --weight-decay 0.01
    --dropout 0 --clip-grad 0 --seed 0 --dtype float32 --device cpu --recompute none --attention auto --reduction ring
    --clock wall --network 0 0
"""
GIVEN = """
    --dp 8 --tp 2 --cp 2 --pp 4 --zero-stage 2 --zero-replicas 4 --layers 3 --hidden 96 --heads 6 --seq-len 48
    --vocab-size 300 --data a.txt --pack 3 --order sequential --global-batch 24 --microbatches 2 --steps 20 --lr 3e-4
    --lr-schedule cosine --warmup-steps 5 --betas 0.8 0.95 --eps 1e-7 --weight-decay 0.1 --clip-grad 1 --dropout 0.1
    --seed 7 --dtype fp16 --gradients bf16 --reduce-dtype fp16 --device cuda --recompute full --attention full
    --reduction ordered --context-parallel ulysses --cp-order contiguous --schedule interleaved-1f1b
    --virtual-stages 3 --clock cpu --network 1e-6 1e-9 --metrics m.jsonl --trace t.json --memory l.json --record r
    --memory-limit 5000 --save c --save-every 5 --resume c --eval-every 7 --eval-data e.txt --export d
    --export-dtype float16
"""
ARRIVES = {"--dtype": "float16", "--gradients": "bfloat16", "--reduce-dtype": "float16"}
MIXTRAL = """
    --model mixtral --kv-heads 2 --ffn 40 --experts 6 --top-k 3 --aux-loss 0.01 --router-bias 0.001
    --capacity-factor 1.25 --ep 2 --etp 2 --tp 2
"""


def values_of(line):
    return {flag: value for _, _, flag, value in flags(parse(line.split()))}


def words_of(line):
    """Return the flags of a line, each with the texts of its values."""
    words = {}
    for word in line.split():
        if word.startswith("--"):
            words[word] = []
        else:
            list(words.values())[-1].append(word)
    return words


@pytest.mark.parametrize("line", [GIVEN, MIXTRAL])
def test_every_flag_arrives_where_it_belongs(line):
    found = values_of(line)
    for flag, texts in words_of(line).items():
        value = found[flag] if isinstance(found[flag], tuple) else (found[flag],)
        expected = [ARRIVES.get(flag, text) for text in texts]
        assert list(value) == [type(one)(text) for one, text in zip(value, expected, strict=True)], flag


def test_a_flag_without_a_value_is_true():
    for flag in ("--verify", "--sync-every-microbatch", "--sequence-parallel", "--skip-nonfinite"):
        line = f"--tp 2 --zero-stage 2 --dtype bf16 {flag}"
        assert values_of(line)[flag] is True and not values_of("")[flag]
    assert values_of("--init-from gpt2 --seq-len 32")["--init-from"] == "gpt2"


def test_a_flag_that_is_not_given_has_the_value_it_always_had():
    """A change would make an old command line another run."""
    assert parse([]) == TrainConfig()
    check_settings(TrainConfig())
    without = values_of("")
    assert values_of(DEFAULTS) == without
    others = {flag: value for flag, value in without.items() if flag not in DEFAULTS.split()}
    assert {flag: value for flag, value in others.items() if value} == {
        "--context-parallel": "ring",
        "--cp-order": "zigzag",
    }


def test_the_configuration_knows_what_was_given_and_stays():
    assert parse("--lr 1e-3 --data x --verify".split()).given == {"optimizer.lr", "data.path", "run.verify"}
    assert parse("--lr 1e-3".split()) == parse([])
    with pytest.raises(dataclasses.FrozenInstanceError):
        TrainConfig().data.global_batch = 3


def test_help_names_every_flag_on_rank_0_only(capsys):
    for rank in (0, 1):
        with pytest.raises(SystemExit) as left:
            parse(["--help"], rank)
        assert left.value.code == 0
        printed = capsys.readouterr()
        missing = [flag for flag in values_of("") if flag not in printed.out]
        assert (missing == [] if rank == 0 else printed.out == "") and printed.err == ""


ALLOWED = """
    --dp 2 --zero-stage 2 --sync-every-microbatch
    --model mixtral --sequence-parallel --tp 2 --etp 1
    --model mixtral --tp 2 --etp 2
    --model mixtral --capacity-factor 1 --dp 2 --ep 2
    --cp 2 --cp-order contiguous
    --dropout 0.1 --cp 2 --context-parallel ulysses
    --dropout 0.1 --attention full
    --warmup-steps 4 --steps 4
    --seq-len 7
    --model mixtral --dp 2 --ep 2 --zero-stage 1
    --dp 2 --zero-stage 1 --zero-replicas 2
    --cp 2 --cp-order contiguous --tp 2 --sequence-parallel --seq-len 12
    --model llama --kv-heads 2 --cp 2 --context-parallel ulysses
    --heads 4 --hidden 12 --seq-len 4 --reduction tree --tp 4
    --init-from d --save e --resume auto
""".strip().splitlines()


def test_the_bounds_of_the_rules_are_allowed():
    for line in ALLOWED:
        config_for(line)


def test_bytes_have_decimal_and_binary_units():
    units = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3}
    for unit, size in units.items():
        for text in (f"2{unit}", f"2 {unit}", f"2.0{unit}"):
            assert parse(["--memory-limit", text]).mesh.memory_limit == 2 * size
    for text in ("0.999", "1e400", "-1", "MB"):
        refused(UsageError, "--memory-limit", text, by=lambda text=text: parse([f"--memory-limit={text}"]))


# ---- what is filled in -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_dp_takes_all_ranks(ranks):
    assert resolve(parse(["--global-batch", str(4 * ranks)]), ranks).mesh.dp == ranks


@pytest.mark.parametrize(("hidden", "columns"), [(8, 64), (24, 64), (32, 128), (128, 384), (4096, 10944)])
def test_an_mlp_has_8_thirds_of_hidden_in_whole_64s(hidden, columns):
    config = parse(["--model", "llama", "--hidden", str(hidden)])
    assert shape_of(config.model).n_inner == columns
    assert shape_of(replace(config.model, ffn=40)).n_inner == 40


def test_a_mixtral_has_8_experts_of_which_2():
    model = config_for("--model mixtral").model
    assert (model.experts, model.top_k, model.kv_heads, model.ffn) == (8, 2, 4, 384)
    sizes = ["--layers", "--hidden", "--heads", "--vocab-size", "--model"]
    assert list(sizes_of("gpt2")) == sizes
    assert list(sizes_of("mixtral")) == [*sizes, "--kv-heads", "--ffn", "--experts", "--top-k"]


@pytest.mark.parametrize(
    ("line", "order"),
    [
        ("--pack 5", "zigzag"),
        ("--pack 5 --cp 2", "documents"),
        ("--pack 5 --cp 2 --cp-order zigzag", "zigzag"),
        ("--pack 5 --cp 2 --context-parallel ulysses", "zigzag"),
        ("--cp 2", "zigzag"),
    ],
)
def test_documents_are_dealt_out_where_nothing_else_is_said(line, order):
    assert config_for(line).mesh.cp_order == order


def test_a_tree_has_microbatches_of_one_sample_unless_given():
    for line, count in {"--dp 2": 4, "--dp 2 --microbatches 1": 1, "--dp 2 --microbatches 2": 2, "--dp 8": 1}.items():
        assert config_for(f"--reduction tree --global-batch 8 {line}").data.microbatches == count


@pytest.mark.parametrize(
    ("line", "dtypes"),
    [
        ("", (None, None)),
        ("--dtype bf16", ("float32", "float32")),
        ("--dtype bf16 --gradients bf16", ("bfloat16", "float32")),
        ("--dtype fp16 --reduce-dtype fp16", ("float32", "float16")),
    ],
)
def test_gradients_of_2_bytes_are_float32_unless_given(line, dtypes):
    run = config_for(line).run
    assert (run.gradients, run.reduce_dtype) == dtypes


def test_a_model_directory_gives_the_shape():
    config = parse("--init-from d --seq-len 16".split())
    shaped = with_shape(config, GPTConfig(vocab_size=99, n_positions=16, n_embd=48, n_layer=3, n_head=4)).model
    assert (shaped.layers, shaped.hidden, shaped.heads, shaped.vocab_size, shaped.seq_len) == (3, 48, 4, 99, 16)
    short = GPTConfig(vocab_size=99, n_positions=8, n_embd=48, n_layer=3, n_head=4)
    refused(UsageError, "16", "8", "d", by=lambda: with_shape(config, short))


def test_a_schedule_in_a_file_is_for_its_ranks_and_microbatches(tmp_path):
    path = tmp_path / "s.csv"
    named = schedule_of(config_for("--pp 2 --microbatches 2"))
    assert named.name == "1f1b"
    save_csv(named, path)
    assert schedule_of(config_for(f"--pp 2 --microbatches 2 --schedule {path}")).ranks == named.ranks
    other, stages = (
        config_for(f"--pp 2 --schedule {path} {line}")
        for line in ("--microbatches 4", "--microbatches 2 --virtual-stages 2")
    )
    refused(UsageError, str(path), "2", "4", by=lambda: schedule_of(other))
    refused(UsageError, str(path), "--virtual-stages", by=lambda: schedule_of(stages))
