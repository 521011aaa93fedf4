"""Claims about the command line: every flag arrives, and whatever is wrong with it is one clear line."""

import dataclasses

import pytest

from minipar.errors import UsageError
from minipar.nn import GPTConfig
from minipar.train.config import check_settings, inside, parse, resolve, with_shape
from minipar.train.settings import CHOICES, EXPECTED, FOR_MODELS, INTERVALS, NEEDS, SIZES, TrainConfig, flags


def config_of(argv: str, rank: int = 0) -> TrainConfig:
    return parse(argv.split(), rank)


def refused(argv: list[str]) -> str:
    with pytest.raises(UsageError) as caught:
        resolve(parse(argv), 1)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_without_flags_the_configuration_is_the_default():
    assert config_of("") == TrainConfig()
    check_settings(TrainConfig())


DEFAULTS = """
    --tp 1 --cp 1 --ep 1 --pp 1 --zero-stage 0 --zero-replicas 1 --layers 2 --hidden 128 --heads 4 --seq-len 64
    --vocab-size 256 --model gpt2 --aux-loss 0 --router-bias 0 --order random --global-batch 32 --microbatches 1
    --steps 300 --lr 1e-3 --lr-schedule constant --warmup-steps 0 --betas 0.9 0.999 --eps 1e-8 --weight-decay 0.01
    --dropout 0 --clip-grad 0 --seed 0 --dtype float32 --device cpu --recompute none --attention auto --reduction ring
    --clock wall --network 0 0
"""


def test_a_flag_that_is_not_given_has_the_value_it_always_had():
    """A change would make an old command line another run."""
    without = {flag: value for _, _, flag, value in flags(config_of(""))}
    assert {flag: value for _, _, flag, value in flags(config_of(DEFAULTS))} == without
    others = {flag for flag in without if flag not in DEFAULTS.split()}
    assert {flag for flag in others if without[flag]} == {"--context-parallel", "--cp-order"}
    assert (without["--context-parallel"], without["--cp-order"]) == ("ring", "zigzag")


def test_every_flag_arrives_where_it_belongs():
    expected = {
        "--dp": 8, "--layers": 3, "--hidden": 96, "--heads": 6, "--seq-len": 48, "--vocab-size": 300, "--data": "a.txt",
        "--order": "sequential", "--global-batch": 24, "--microbatches": 2, "--steps": 20, "--lr": 3e-4,
        "--lr-schedule": "cosine", "--warmup-steps": 5, "--betas": (0.8, 0.95), "--eps": 1e-7, "--weight-decay": 0.1,
        "--clip-grad": 1.0, "--seed": 7, "--dtype": "float64", "--device": "cuda", "--recompute": "full",
        "--reduction": "ordered", "--metrics": "m.jsonl", "--trace": "t.json", "--clock": "cpu",
        "--network": (1e-6, 1e-9), "--export": "d", "--zero-stage": 2, "--memory-limit": 5000,
        "--memory": "l.json", "--tp": 2, "--dropout": 0.1, "--save": "c", "--save-every": 5, "--resume": "c",
        "--eval-every": 7, "--eval-data": "e.txt", "--record": "r", "--attention": "full", "--cp": 2,
        "--context-parallel": "ulysses", "--cp-order": "contiguous", "--zero-replicas": 4, "--export-dtype": "float16",
        "--pack": 3,
    }  # fmt: skip
    argv = [
        str(word)
        for flag, value in expected.items()
        for word in (flag, *(value if isinstance(value, tuple) else [value]))
    ]
    given = {
        flag: value
        for _, _, flag, value in flags(parse([*argv, "--verify", "--sync-every-microbatch", "--sequence-parallel"]))
    }
    assert given == expected | {
        "--verify": True,
        "--gradients": None,
        "--reduce-dtype": None,
        "--skip-nonfinite": False,
        "--sync-every-microbatch": True,
        "--sequence-parallel": True,
        "--init-from": None,
        "--model": "gpt2",
        "--kv-heads": None,
        "--ffn": None,
        "--experts": None,
        "--top-k": None,
        "--aux-loss": 0.0,
        "--router-bias": 0.0,
        "--capacity-factor": None,
        "--ep": 1,
        "--etp": None,
        "--pp": 1,
        "--schedule": None,
        "--virtual-stages": None,
    }
    mesh = config_of("--pp 4 --schedule interleaved-1f1b --virtual-stages 3").mesh
    assert (mesh.pp, mesh.schedule, mesh.virtual_stages) == (4, "interleaved-1f1b", 3)
    model = config_of("--model llama --kv-heads 2 --ffn 40").model
    assert (model.model, model.kv_heads, model.ffn) == ("llama", 2, 40)
    model = config_of("--model mixtral --experts 6 --top-k 3").model
    assert (model.model, model.experts, model.top_k) == ("mixtral", 6, 3)
    assert config_of("--model mixtral --ep 2").mesh.ep == 2
    assert config_of("--model mixtral --tp 2 --etp 2").mesh.etp == 2
    model = config_of("--model mixtral --aux-loss 0.01 --router-bias 0.001 --capacity-factor 1.25").model
    assert (model.aux_loss, model.router_bias, model.capacity_factor) == (0.01, 0.001, 1.25)
    run = config_of("--dtype bf16 --gradients fp16 --reduce-dtype bf16 --skip-nonfinite").run
    assert (run.dtype, run.gradients, run.reduce_dtype) == ("bfloat16", "float16", "bfloat16") and run.skip_nonfinite
    assert config_of("--init-from gpt2 --seq-len 32").model.init_from == "gpt2"


def test_what_a_flag_needs_is_a_flag_too():
    own = {flag for _, _, flag, _ in flags(TrainConfig())}
    assert {needs.split()[0] for needs in NEEDS.values()} < own
    assert own > {*NEEDS, *CHOICES, *INTERVALS, *EXPECTED, *FOR_MODELS, *SIZES}


def test_the_configuration_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        TrainConfig().data.global_batch = 3


def test_who_is_not_told_its_rank_prints_the_help(capsys):
    with pytest.raises(SystemExit):
        parse(["--help"])
    assert "--zero-stage" in capsys.readouterr().out


def test_help_names_every_flag_on_rank_0_only(capsys):
    for rank in (0, 1):
        with pytest.raises(SystemExit) as left:
            config_of("--help", rank)
        assert left.value.code == 0
        printed = capsys.readouterr()
        assert printed.err == ""
        missing = [flag for _, _, flag, _ in flags(TrainConfig()) if flag not in printed.out]
        assert missing == [] if rank == 0 else printed.out == ""


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        ("--bogus 3", "unrecognized arguments: --bogus 3"),
        ("--hid 32", "unrecognized arguments: --hid 32"),
        ("--dtype float8", "argument --dtype: invalid choice: 'float8'"),
        ("--lr fast", "argument --lr: invalid float value: 'fast'"),
        ("--steps 1.5", "argument --steps: invalid int value: '1.5'"),
        ("--steps", "argument --steps: expected one argument"),
        ("--betas 0.9", "argument --betas: expected 2 arguments"),
        ("--lr nan", "--lr nan is outside (0, inf)"),
        ("--lr inf", "--lr inf is outside (0, inf)"),
        ("--lr 0", "--lr 0.0 is outside (0, inf)"),
        ("--lr -0.001", "--lr -0.001 is outside (0, inf)"),
        ("--steps 0", "--steps 0 is outside [1, inf)"),
        ("--layers -2", "--layers -2 is outside [1, inf)"),
        ("--dp 0", "--dp 0 is outside [1, inf)"),
        ("--betas 0.9 1", "--betas 1.0 is outside [0, 1)"),
        ("--betas nan 0.9", "--betas nan is outside [0, 1)"),
        ("--eps 0", "--eps 0.0 is outside (0, inf)"),
        ("--weight-decay -0.1", "--weight-decay -0.1 is outside [0, inf)"),
        ("--clip-grad nan", "--clip-grad nan is outside [0, inf)"),
        ("--seed -1", "--seed -1 is outside [0, 1.8e19]"),
        ("--warmup-steps 30 --steps 20", "warmup-steps 30 is more than steps 20: the learning rate would never reach"),
        ("--hidden 64 --heads 5", "hidden 64 is not divisible by heads 5"),
        ("--schedule gpipe", "--schedule gpipe does nothing without --pp 2 or more"),
        ("--virtual-stages 2", "--virtual-stages 2 does nothing without --pp 2 or more"),
        ("--sequence-parallel", "--sequence-parallel does nothing without --tp 2 or more"),
        ("--network 1e-6 0", "--network 1e-06 0.0 does nothing without --clock cpu or model"),
        ("--init-from d --layers 3", "--layers and --init-from both give the model's shape"),
        ("--init-from d --vocab-size 3", "--vocab-size and --init-from both give the model's shape"),
    ],
)
def test_a_mistake_is_one_line_with_its_values(argv, line):
    assert refused(argv.split()).startswith(line)


@pytest.mark.parametrize(
    ("argv", "flag"),
    [
        ("--stage 2", "--zero-stage"),
        ("--num-layers 2", "--layers"),
        ("--hidden-size 64", "--hidden"),
        ("--global_batch_size=4", "--global-batch"),
        ("--seq-length 64", "--seq-len"),
        ("--zero_stage 1", "--zero-stage"),
        ("--LAYERS 2", "--layers"),
        ("--layer 2", "--layers"),
        ("--warmup-step 2", "--warmup-steps"),
        ("--sequence_paralel", "--sequence-parallel"),
    ],
)
def test_a_similar_flag_is_suggested_for_an_unknown_one(argv, flag):
    assert refused(argv.split()) == f"unrecognized arguments: {argv}; did you mean {flag}?"


def test_a_whole_command_of_another_program_is_answered_at_once():
    line = refused("--num-layers 2 --hidden-size 64 --lr 1e-3 --nonsense --num_layers 3".split())
    assert line.endswith("--nonsense --num_layers 3; did you mean --layers, --hidden?")
    assert refused(["--nonsense", "3"]) == "unrecognized arguments: --nonsense 3"


def test_a_flag_that_is_not_similar_gets_no_suggestion():
    for argv in ("--nonsense 1", "--colour x", "--xyz 2"):
        assert refused(argv.split()) == f"unrecognized arguments: {argv}"


def test_the_configuration_knows_which_flags_were_given():
    assert config_of("--lr 1e-3 --data x --verify").given == {"optimizer.lr", "data.path", "run.verify"}
    assert config_of("--lr 1e-3") == config_of("")


@pytest.mark.parametrize("flag", ["--data", "--init-from", "--metrics", "--trace", "--export"])
def test_an_empty_path_is_refused(flag):
    assert refused([flag, ""]).startswith(f"{flag} is empty; expected ")


def test_a_value_of_two_dashes_is_no_value():
    assert refused(["--data=--"]) == "argument --data: expected one argument"
    assert refused([""]) == "unrecognized arguments: "


def test_a_choice_is_checked_without_the_command_line_too():
    config = TrainConfig()
    wrong = dataclasses.replace(config, run=dataclasses.replace(config.run, dtype="int8"))
    with pytest.raises(UsageError, match="--dtype int8: choose from float32, float64"):
        check_settings(wrong)


@pytest.mark.parametrize(
    ("value", "interval", "expected"),
    [
        (0, "[0, 1)", True), (1, "[0, 1)", False), (0, "(0, inf)", False), (1e300, "(0, inf)", True),
        (float("inf"), "(0, inf)", False), (float("nan"), "[0, 1]", False), (1, "[0, 1]", True),
    ],
)  # fmt: skip
def test_intervals_are_those_of_mathematics(value, interval, expected):
    assert inside(value, interval) is expected


@pytest.mark.parametrize(
    ("text", "count"),
    [("1500", 1500), ("1.5KB", 1500), ("2KiB", 2048), ("3 MB", 3_000_000), ("0.5MiB", 2**19), ("1GB", 10**9)],
)
def test_bytes_have_decimal_and_binary_units(text, count):
    assert parse(["--memory-limit", text]).mesh.memory_limit == count


@pytest.mark.parametrize("text", ["0", "0.5", "0.9B", "-1", "inf", "many"])
def test_less_than_a_byte_is_refused(text):
    with pytest.raises(UsageError, match="is not a number of bytes"):
        parse([f"--memory-limit={text}"])


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_dp_takes_all_ranks(ranks):
    assert resolve(config_of(f"--global-batch {4 * ranks}"), ranks).mesh.dp == ranks


@pytest.mark.parametrize(
    ("argv", "ranks", "line"),
    [
        ("--dp 3", 8, "dp = 3, but mpirun started 8 ranks"),
        ("--dp 8", 1, "dp = 8, but this process is one rank; start 8 with mpirun -n 8 python ..."),
        ("--dp 1", 8, "dp = 1, but mpirun started 8 ranks"),
        ("--tp 3 --heads 3 --hidden 24", 8, "tp = 3 does not divide the 8 ranks that mpirun started"),
        ("--tp 2 --pp 3", 8, "tp*pp = 2*3 = 6 does not divide the 8 ranks that mpirun started"),
        ("--tp 4", 2, "tp = 4, but mpirun started 2 ranks"),
        ("--dp 2 --tp 2 --pp 3", 8, "dp*tp*pp = 2*2*3 = 12, but mpirun started 8 ranks"),
        ("--pp 4 --tp 2", 1, "tp*pp = 2*4 = 8, but this process is one rank; start 8 with mpirun -n 8 python ..."),
        ("--global-batch 10 --microbatches 3", 4, "global-batch 10 is not divisible by dp*microbatches = 4*3 = 12"),
        ("--global-batch 8 --microbatches 3", 4, "global-batch 8 is not divisible by dp*microbatches = 4*3 = 12"),
        ("--global-batch 7", 2, "global-batch 7 is not divisible by dp*microbatches = 2*1 = 2"),
    ],
)
def test_mesh_and_batch_must_divide(argv, ranks, line):
    with pytest.raises(UsageError) as caught:
        resolve(config_of(argv), ranks)
    assert str(caught.value) == line


def test_a_model_directory_gives_the_shape():
    config = config_of("--init-from d --seq-len 16")
    shaped = with_shape(config, GPTConfig(vocab_size=99, n_positions=16, n_embd=48, n_layer=3, n_head=4))
    assert (shaped.model.layers, shaped.model.hidden, shaped.model.heads, shaped.model.vocab_size) == (3, 48, 4, 99)
    assert shaped.model.seq_len == 16
    with pytest.raises(UsageError, match="seq-len 16 is longer than the 8 positions of d"):
        with_shape(config, GPTConfig(vocab_size=99, n_positions=8, n_embd=48, n_layer=3, n_head=4))
