"""Claims about the rules of the configuration, each on both sides of its bound, and the whole line of a refusal."""

from dataclasses import replace

import pytest
from training import config_for

from minipar.errors import UsageError
from minipar.parallel.pipeline.schedule_file import save_csv
from minipar.train.config import check_settings, parse, resolve, schedule_of, shape_of
from minipar.train.settings import sizes_of

APART = "--model mixtral --sequence-parallel"
WHOLE = "the tokens of whole samples, of which"
SHARDS = "shards of experts have no replicas; give 1 replica or"
EVEN = "neighbours are added in pairs, and then the pairs, so it is a power of two"
REFUSED = {
    "--zero-stage 1 --sync-every-microbatch": "--sync-every-microbatch keeps gradients sharded between microbatches, "
    "but with --zero-stage 1 every rank has them whole; it needs stage 2 or 3",
    "--zero-stage 2 --sync-every-microbatch --pp 2": "--sync-every-microbatch: a pipeline mixes microbatches; its "
    "gradients travel once per step",
    "--model mixtral --tp 2 --etp 1": "--etp 1 with --tp 2: each rank of tp routes its own tokens, which it has with "
    "--sequence-parallel; give that flag, too",
    "--model mixtral --cp 2 --capacity-factor 1": f"--capacity-factor shares out {WHOLE} --cp gives a rank a part",
    f"{APART} --tp 2 --etp 1 --capacity-factor 1": f"--capacity-factor shares out {WHOLE} --etp 1 gives a rank a part",
    "--cp-order contiguous": "--context-parallel and --cp-order are about context parallelism; give --cp 2 or more",
    "--cp 2 --dropout 0.1": "--dropout 0.1 needs all of attention's probabilities, which --context-parallel ring never "
    "has: give --context-parallel ulysses or --dropout 0",
    "--dropout 0.1 --attention blockwise": "--dropout 0.1 needs all of attention's probabilities, which --attention "
    "blockwise never has: give --attention full or --dropout 0",
    "--resume a --init-from b": "--resume and --init-from both say which weights to start from; give one of them",
    "--warmup-steps 5 --steps 4": "warmup-steps 5 is more than steps 4: the learning rate would never reach 0.001",
    "--model mixtral --dp 2 --ep 2 --zero-stage 1 --zero-replicas 2": f"zero-replicas 2 with ep 2: {SHARDS} ep = 1",
    f"{APART} --dp 2 --tp 2 --etp 1 --zero-stage 1 --zero-replicas 2": "zero-replicas 2 with ep 1, etp 1: "
    f"{SHARDS} ep = 1 and etp = tp",
    "--dp 4 --zero-stage 3 --zero-replicas 3": "dp/zero-replicas = 4/3 is not a whole number",
    "--cp 2 --seq-len 6": "seq-len/(2*cp) = 6/4 is not a whole number: zigzag has equal chunks",
    "--cp 2 --cp-order contiguous --tp 2 --sequence-parallel --seq-len 6": "tokens/tp = 3/2 is not a whole number: "
    "--sequence-parallel splits seq-len/cp evenly",
    "--cp 4 --tp 2 --context-parallel ulysses": "heads/cp = 2/4 is not a whole number: ulysses cuts each tp rank's "
    "heads",
    "--model llama --kv-heads 2 --cp 2 --tp 2 --context-parallel ulysses": "kv-heads/cp = 1/2 is not a whole number: "
    "ulysses cuts each tp rank's kv-heads",
    "--model llama --kv-heads 1 --cp 2 --tp 2 --context-parallel ulysses": "kv-heads/cp = 1/2 is not a whole number: "
    "ulysses cuts each tp rank's kv-heads",
    "--dp 4 --global-batch 2": "global-batch 2 is not divisible by dp*microbatches = 4*1 = 4",
    "--dp 4 --global-batch 2 --reduction tree": "global-batch 2 is not divisible by dp*microbatches = 4*1 = 4",
    "--reduction tree --microbatches 3": f"--reduction tree with microbatches = 3: {EVEN}",
    "--reduction tree --cp 2": "--reduction tree does not go with --cp 2: a product of a part of a sequence's rows has "
    "other bits",
    "--reduce-dtype fp32": "--reduce-dtype float32 is for --dtype bf16 or fp16",
    "--dtype bf16 --reduce-dtype fp16": "--reduce-dtype float16 is for --dtype fp16, which scales the loss into its "
    "range",
    "--network 1e-6 0": "--network 1e-06 0.0 does nothing without --clock cpu or model",
    "--save-every 3": "--save-every 3 does nothing without --save DIR",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_a_rule_that_is_broken_is_one_line(flags):
    with pytest.raises(UsageError) as caught:
        config_for(flags)
    assert str(caught.value) == REFUSED[flags]


@pytest.mark.parametrize(
    "flags",
    [
        "--dp 2 --zero-stage 2 --sync-every-microbatch",
        f"{APART} --tp 2 --etp 1",
        "--model mixtral --tp 2 --etp 2",
        "--model mixtral --capacity-factor 1 --dp 2 --ep 2",
        "--cp 2 --cp-order contiguous",
        "--dropout 0.1 --cp 2 --context-parallel ulysses",
        "--dropout 0.1 --attention full",
        "--warmup-steps 4 --steps 4",
        "--seq-len 7",
        "--model mixtral --dp 2 --ep 2 --zero-stage 1",
        "--dp 2 --zero-stage 1 --zero-replicas 2",
        "--dp 2 --zero-stage 3 --zero-replicas 1",
        "--cp 2 --cp-order contiguous --tp 2 --sequence-parallel --seq-len 12",
        "--cp 2 --tp 2 --context-parallel ulysses",
        "--model llama --kv-heads 2 --cp 2 --context-parallel ulysses",
        "--heads 4 --hidden 12 --seq-len 4 --reduction tree --tp 4",
    ],
)
def test_the_bound_of_a_rule_is_allowed(flags):
    config_for(flags)


def test_a_start_from_a_directory_may_be_saved_and_resumed():
    """`--init-from` alone, and with `--resume auto`, which continues where a checkpoint is."""
    for flags in ("--init-from d", "--init-from d --save e", "--init-from d --save e --resume auto", "--resume d"):
        parse(flags.split())


def test_bytes_may_have_any_unit():
    units = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3}
    for unit, size in units.items():
        for text in (f"2{unit}", f"2 {unit}", f"2.0{unit}"):
            assert parse(["--memory-limit", text]).mesh.memory_limit == 2 * size
    assert parse(["--memory-limit", "1"]).mesh.memory_limit == 1
    for text in ("0.999", "1e400", "inf", "1TB", "MB", ""):
        with pytest.raises(UsageError) as caught:
            parse([f"--memory-limit={text}"])
        expected = "is not a number of bytes such as 1500000, 1.5MB or 512KiB"
        assert str(caught.value) == f"argument --memory-limit: {text!r} {expected}"


def test_the_help_begins_with_the_command(capsys):
    with pytest.raises(SystemExit):
        parse(["--help"])
    assert capsys.readouterr().out.startswith("usage: mpirun -n N python -m minipar.train [-h] [--version] [--dp N]")


# ---- what is filled in -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("hidden", "columns"), [(8, 64), (24, 64), (32, 128), (48, 128), (128, 384), (4096, 10944)])
def test_an_mlp_has_8_thirds_of_hidden_in_whole_64s(hidden, columns):
    config = parse(["--model", "llama", "--hidden", str(hidden)])
    assert shape_of(config.model).n_inner == columns
    assert shape_of(replace(config.model, ffn=40)).n_inner == 40


def test_a_mixtral_has_8_experts_of_which_2():
    model = config_for("--model mixtral").model
    assert (model.experts, model.top_k, model.kv_heads, model.ffn) == (8, 2, 4, 384)
    model = config_for("--model mixtral --experts 4 --top-k 1 --kv-heads 2 --ffn 40").model
    assert (model.experts, model.top_k, model.kv_heads, model.ffn) == (4, 1, 2, 40)


def test_a_model_has_the_sizes_of_its_kind():
    gpt2 = ["--layers", "--hidden", "--heads", "--vocab-size", "--model"]
    assert list(sizes_of("gpt2")) == gpt2
    assert list(sizes_of("llama")) == [*gpt2, "--kv-heads", "--ffn"]
    assert list(sizes_of("mixtral")) == [*gpt2, "--kv-heads", "--ffn", "--experts", "--top-k"]


@pytest.mark.parametrize(
    ("flags", "order"),
    [
        ("--pack 5", "zigzag"),
        ("--pack 5 --cp 2", "documents"),
        ("--pack 5 --cp 2 --cp-order zigzag", "zigzag"),
        ("--pack 5 --cp 2 --context-parallel ulysses", "zigzag"),
        ("--pack 255 --cp 2", "documents"),
        ("--cp 2", "zigzag"),
    ],
)
def test_documents_are_dealt_out_where_nothing_else_is_said(flags, order):
    assert config_for(flags).mesh.cp_order == order


@pytest.mark.parametrize(
    ("flags", "count"),
    [
        ("--dp 2 --global-batch 8", 4),
        ("--dp 2 --global-batch 8 --microbatches 1", 1),
        ("--dp 2 --global-batch 8 --microbatches 2", 2),
        ("--dp 8 --global-batch 8", 1),
    ],
)
def test_a_tree_has_microbatches_of_one_sample(flags, count):
    assert config_for(f"--reduction tree {flags}").data.microbatches == count


def test_microbatches_that_a_program_gives_are_kept():
    config = parse("--reduction tree --global-batch 8".split())
    given = replace(config, data=replace(config.data, microbatches=2))
    check_settings(given)
    assert resolve(given, 1).data.microbatches == 2


@pytest.mark.parametrize(
    ("flags", "dtypes"),
    [
        ("", (None, None)),
        ("--dtype bf16", ("float32", "float32")),
        ("--dtype bf16 --gradients bf16", ("bfloat16", "float32")),
        ("--dtype fp16 --reduce-dtype fp16", ("float32", "float16")),
    ],
)
def test_gradients_of_2_bytes_are_float32_unless_given(flags, dtypes):
    run = config_for(flags).run
    assert (run.gradients, run.reduce_dtype) == dtypes


def test_a_schedule_in_a_file_is_for_its_ranks_and_microbatches(tmp_path):
    """The file says which rank has which stages."""
    path = tmp_path / "s.csv"
    named = schedule_of(config_for("--pp 2 --microbatches 2"))
    assert named.name == "1f1b"
    save_csv(named, path)
    assert schedule_of(config_for(f"--pp 2 --microbatches 2 --schedule {path}")).ranks == named.ranks
    for flags, line in {
        "--microbatches 4": f"schedule {path} is for 2 ranks and 2 microbatches, but pp = 2 and microbatches = 4",
        "--microbatches 2 --virtual-stages 2": f"--virtual-stages is for a named schedule; {path} says which rank has "
        "which stages",
    }.items():
        with pytest.raises(UsageError) as caught:
            schedule_of(config_for(f"--pp 2 --schedule {path} {flags}"))
        assert str(caught.value) == line
