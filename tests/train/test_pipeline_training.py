"""Claims about training through a pipeline: every synchronous schedule trains one device's bits."""

import re
from itertools import product

import numpy as np
import pytest
import training
from launcher import run_each, run_mpi
from training import LeavesTheTiedGradientBehind, LeavesTheTiedWeightBehind, bits, reports, trainer_for, verified

from minipar.comm import run_local
from minipar.errors import UsageError
from minipar.parallel.pipeline.actions import Durations, simulate
from minipar.parallel.pipeline.schedule_file import save_csv
from minipar.parallel.pipeline.schedules import SCHEDULES
from minipar.parallel.pipeline.stage import PipelineParallel
from minipar.train.config import schedule_of
from minipar.train.data import load_tokens
from minipar.train.one_device import train_on_one_device
from minipar.train.trainer import Trainer

pytestmark = pytest.mark.sampled(3)

SHAPE = "--layers 8 --hidden 16 --heads 2 --seq-len 8 --steps 3 --dtype float64 --reduction ordered"
TOKENS = load_tokens(None, vocab_size=256, seq_len=8)


def config_for(flags, size):
    return training.config_for(f"{SHAPE} {flags}", size)


def train(size, flags, kind=Trainer):
    """Rank 0's whole parameters and every rank's (losses and norms, verdict, peak of live activations, bytes)."""

    config = config_for(flags, size)

    def rank(comm):
        trainer = trainer_for(config, TOKENS, comm, kind)
        results, verdict = verified(trainer)
        sent, state = comm.traffic.bytes("send", "pp"), trainer.state_dict()
        return state, reports(results), verdict, trainer.executor.peak_alive, sent

    return run_local(size, rank)


def assert_one_devices_bits(size, flags):
    expected, steps = train_on_one_device(config_for(flags, size), TOKENS)
    results = train(size, flags)
    assert list(results[0][0]) == list(expected) and bits(results[0][0]) == bits(expected)
    for _, reported, verdict, _, _ in results:
        assert reported == reports(steps)
        assert verdict.passed and "bit for bit" in verdict.line


CASES = [
    (2, "--pp 2 --microbatches 3 --global-batch 6 --layers 5"),
    (3, "--pp 3 --microbatches 6 --global-batch 6 --layers 7 --recompute full"),
    (4, "--pp 2 --dp 2 --microbatches 4 --global-batch 8 --dropout 0.1 --clip-grad 0.5 --weight-decay 0.1"),
    (8, "--pp 4 --dp 2 --microbatches 8 --global-batch 16 --clip-grad 0.5"),
]


@pytest.mark.sampled(11)
@pytest.mark.parametrize(
    ("size", "flags"), [pytest.param(*case, marks=pytest.mark.long) if case[0] == 8 else case for case in CASES]
)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_trains_one_devices_bits(schedule, size, flags):
    pp, m = int(flags.split()[1]), int(flags.split("--microbatches ")[1].split()[0])
    if (schedule == "interleaved-1f1b" and m % pp) or (schedule == "dualpipev" and m < 2 * pp):
        flags = flags.replace("--microbatches 3 --global-batch 6", "--microbatches 4 --global-batch 8")
    assert_one_devices_bits(size, f"{flags} --schedule {schedule}")


@pytest.mark.sampled(9)
@pytest.mark.parametrize(("schedule", "microbatches"), [*product(["1f1b", "zb-h1", "zbv"], [1, 5, 16])])
def test_any_number_of_microbatches(schedule, microbatches):
    flags = f"--pp 3 --global-batch {microbatches} --microbatches {microbatches} --schedule {schedule}"
    assert_one_devices_bits(3, flags)


@pytest.mark.long
def test_eight_stages_and_uneven_ones():
    assert_one_devices_bits(8, "--pp 8 --microbatches 3 --global-batch 3 --schedule 1f1b")
    assert_one_devices_bits(8, "--pp 8 --microbatches 8 --global-batch 8 --schedule zb-h2 --layers 11 --dropout 0.1")


def test_ring_over_dp_stays_within_the_bound():
    for *_, verdict, _, _ in train(6, "--pp 2 --dp 3 --microbatches 2 --global-batch 6 --reduction ring"):
        assert verdict.passed and "within rounding" in verdict.line


def test_a_run_holds_and_sends_what_its_schedule_says():
    flags = "--pp 4 --microbatches 6 --global-batch 12 --schedule"
    for schedule, peaks in (("gpipe", [6] * 4), ("1f1b", [4, 3, 2, 1])):
        results = train(4, f"{flags} {schedule}")
        assert [peak for *_, peak, _ in results] == peaks
        one_way = 2 * 8 * 16 * 8  # B T h elements of 8 bytes
        embedding = 256 * 16 * 8
        cuts = [6 * one_way, 2 * 6 * one_way, 2 * 6 * one_way, 6 * one_way]
        tied = [embedding, 0, 0, embedding]
        sent = [bytes_sent for *_, bytes_sent in results]
        assert sent == [3 * (cut + tie) for cut, tie in zip(cuts, tied, strict=True)]


def test_a_schedule_from_a_file_trains_the_same_bits(tmp_path):
    path = tmp_path / "schedule.csv"
    flags = "--pp 3 --microbatches 4 --global-batch 4 --schedule"
    save_csv(schedule_of(config_for(f"{flags} zb-h1", 3)), path)
    assert_one_devices_bits(3, f"{flags} {path}")


@pytest.mark.parametrize("schedule", ["naive", "gpipe", "1f1b", "zb-h1", "zb-h2", "zbv", "dualpipev"])
def test_on_the_model_clock_a_step_takes_the_simulated_time(schedule):
    """One block per stage; the head, which the last stage has besides, is made free. A pair's halves run one after the
    other, so the time of dualpipev is that of the same list without pairs.
    """
    layers = 8 if schedule in ("zbv", "dualpipev") else 4
    flags = f"--pp 4 --microbatches 8 --global-batch 8 --layers {layers} --steps 1 --schedule {schedule}"
    config = config_for(flags, 4)

    def rank(comm):
        trainer = trainer_for(config, TOKENS, comm)
        trainer.model.project = lambda x, weight: x + weight.sum()
        trainer.model.criterion = lambda x, targets: x.sum()
        trainer.step(0)
        return comm.clock.now() * comm.clock.flops_per_second

    forward = 24 * 8 * 16 * 16 + 4 * 8 * 8 * 16  # one sample, one block
    weights = 24 * 8 * 16 * 16
    durations = Durations(forward, 2 * forward - weights, weights)
    predicted = simulate(schedule_of(config).unpaired(), durations).makespan
    assert predicted <= simulate(schedule_of(config), durations).makespan
    assert max(run_local(4, rank, clock="model")) == pytest.approx(predicted, rel=1e-9)


def test_the_memory_limit_is_for_a_ranks_part_of_the_pipeline():
    flags = "--pp 2 --microbatches 2 --global-batch 2 --memory-limit"
    # Five blocks with the embeddings on the first rank; three and the last LayerNorm, beside the head, on the other.
    fullest = 32 * (5 * 3280 + 256 * 16 + 8 * 16)
    assert all(verdict.passed for _, _, verdict, _, _ in train(2, f"{flags} {fullest}"))
    with pytest.raises(UsageError, match=f"= {fullest:,} bytes"):
        train(2, f"{flags} {fullest - 1}")


@pytest.mark.parametrize("kind", [LeavesTheTiedGradientBehind, LeavesTheTiedWeightBehind])
def test_verify_catches_a_tied_embedding_that_is_not_tied(kind):
    for *_, verdict, _, _ in train(2, "--pp 2 --microbatches 2 --global-batch 2 --schedule 1f1b", kind):
        assert not verdict.passed and "FAILED" in verdict.line


def test_a_part_is_one_stages_and_the_embedding_the_firsts():
    def rank(comm):
        trainer = trainer_for(config_for("--pp 3 --microbatches 3 --global-batch 3", 3), TOKENS, comm)
        pipeline = trainer.pipeline
        assert isinstance(pipeline, PipelineParallel)
        names = {p: name for name, p in trainer.model.named_parameters()}
        return [names[p] for group in pipeline.groups for p in group], np.isnan(trainer.model.wpe.weight.data).all()

    owned = run_local(3, rank)
    everything = [name for names, _ in owned for name in names]
    assert len(everything) == len(set(everything)) == 4 + 8 * 12
    assert owned[0][0][:2] == ["wte.weight", "wpe.weight"] and owned[2][0][-1] == "ln_f.bias"
    assert [absent for _, absent in owned] == [False, True, True]  # what a rank does not have, it does not hold


@pytest.mark.parametrize(
    ("pp", "schedule"),
    [(2, "zbv"), *(pytest.param(4, each, marks=pytest.mark.long) for each in ("1f1b", "interleaved-1f1b", "zbv"))],
)
def test_the_command_line_proves_it(pp, schedule):
    flags = f"{SHAPE} --pp {pp} --dp 2 --schedule {schedule} --microbatches 8 --global-batch 16 --clip-grad 1 --verify"
    result = run_mpi(2 * pp, ["-m", "minipar.train", *flags.split()], timeout=120)
    assert result.returncode == 0, result.stderr
    assert f"verify: {2 * pp} ranks = 1 device, bit for bit" in result.stdout


BAD = {
    "--pp 2 --layers 1": "layers 1 are fewer than the pipeline's 2 stages",
    "--pp 2 --schedule interleaved-1f1b --microbatches 3 --global-batch 3": "microbatches/pp = 3/2 is not whole",
    "--pp 2 --schedule dualpipev --microbatches 3 --global-batch 3": "microbatches 3 are fewer than 2*pp = 2*2 = 4",
    "--pp 2 --schedule none": "schedule none: choose from naive, gpipe",
    "--pp 2 --schedule pipedream": "asynchronous",
    "--schedule 1f1b": "does nothing without --pp 2 or more",
    "--pp 2 --schedule 1f1b --virtual-stages 3": "has 1 stage per rank, not 3",
    "--pp 2 --zero-stage 2 --microbatches 2 --sync-every-microbatch": "its gradients travel once per step",
    "--pp 3": "pp = 3, but mpirun started 2 ranks",
}


@pytest.fixture(scope="module")
def refusals():
    commands = [["minipar.train", "--steps", "1", *flags.split()] for flags in BAD]
    return dict(zip(BAD, run_each(2, commands, timeout=30), strict=True))


@pytest.mark.parametrize("flags", BAD)
def test_bad_input_is_refused_before_anything_runs(flags, refusals):
    result = refusals[flags]
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.count("\n") == 1 and BAD[flags] in result.stderr


def test_a_bad_file_is_refused_with_action_and_rank(tmp_path):
    path = tmp_path / "bad.csv"
    path.write_text("0F0,0SEND_F0,0RECV_B0,0B0\n1F0,1B0,1SEND_B0\n")
    flags = f"--steps 1 --pp 2 --microbatches 1 --global-batch 1 --schedule {path}"
    result = run_mpi(2, ["-m", "minipar.train", *flags.split()], timeout=30)
    assert result.returncode == 2 and "rank 1, 1F0: needs 0F0 from rank 0, but rank 1 has no 1RECV_F0" in result.stderr


def test_a_memory_limit_counts_each_ranks_own_stage():
    """Rank 0 trains both tables and two blocks of 3,280 parameters, rank 1 a block and the last norm."""

    def rank(comm):
        try:
            trainer_for(config, TOKENS, comm)
        except UsageError as error:
            return re.search(r"holds 4\*([\d,]+) \(parameters\)", str(error))[1]

    config = training.config_for("--layers 3 --hidden 16 --heads 2 --seq-len 8 --pp 2 --memory-limit 1KB", 2)
    assert run_local(2, rank) == [f"{4096 + 128 + 2 * 3280:,}", f"{3280 + 32:,}"]
