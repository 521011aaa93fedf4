"""Against PyTorch's pipeline schedules (torch.distributed.pipelining): the same orders, and the same CSV both ways.

Its schedules are built on stand-ins for stages, so no process group is needed. Names that begin with an underscore are
PyTorch's own internals, as of 2.13: it has no public name for an action, its parser, the checks or the CSV.
"""

import pytest
import torch
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from minipar.errors import UsageError
from minipar.parallel.pipeline.actions import parse_action, simulate
from minipar.parallel.pipeline.check import check, lower
from minipar.parallel.pipeline.schedules import make
from visualize.schedule_file import load_csv, save_csv

OURS = [
    *[(name, p, m, None) for name in ("naive", "gpipe", "1f1b", "zb-h1", "zb-h2", "zbv")
      for p, m in ((1, 2), (2, 1), (2, 4), (3, 5), (4, 8), (8, 16))],
    *[("dualpipev", p, m, None) for p, m in ((1, 2), (2, 4), (2, 5), (3, 6), (4, 8), (8, 19))],
    *[("interleaved-1f1b", p, m, v) for p, m, v in ((1, 2, 2), (2, 4, 2), (3, 6, 3), (4, 8, 2))],
]  # fmt: skip


class Stage:
    """What a schedule asks of a stage; it notes what it is told to do."""

    def __init__(self, stage, stages, ranks, rank=0):
        self.stage_index, self.num_stages, self.group_size, self.group_rank = stage, stages, ranks, rank
        self.is_first, self.is_last = stage == 0, stage == stages - 1
        self.submod = torch.nn.Identity()
        self.done = []

    def forward_one_chunk(self, microbatch, args, kwargs=None, **options):
        self.done.append(f"{self.stage_index}F{microbatch}")

    def backward_one_chunk(self, microbatch, **options):
        self.done.append(f"{self.stage_index}B{microbatch}")

    def get_fwd_recv_ops(self, microbatch):
        return []

    get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = get_fwd_recv_ops

    def perform_reduce_grad(self, scale):
        pass


def several(kind, p, m, per_rank):
    """A torch schedule of several stages per rank, as rank 0 builds it: it knows all ranks' lists."""
    return kind([Stage(s, p * per_rank, p) for s in range(per_rank)], m)


def texts(rows):
    return [[str(action) for action in row if action is not None] for row in rows]


def orders(schedule):
    return texts(schedule.pipeline_order[rank] for rank in sorted(schedule.pipeline_order))


def executed(kind, p, m):
    """Return what each rank of a torch schedule of one stage per rank does, noted while it runs."""
    rows = []
    for rank in range(p):
        stage = Stage(rank, p, p, rank)
        schedule = kind(stage, m)
        schedule._initialize_stage = lambda *args: None  # would ask the process group for the shapes
        schedule._step_microbatches()
        rows.append(stage.done)
    return rows


def actions_of(path):
    return {
        rank: [torch_schedules._Action.from_str(cell) for cell in line.split(",")]
        for rank, line in enumerate(path.read_text().splitlines())
    }


# -- our lists, their tools --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", OURS, ids=lambda case: "-".join(map(str, case)))
def test_pytorch_reads_and_accepts_our_csv(case, tmp_path):
    schedule = make(*case)
    stages, m = schedule.stages, schedule.microbatches
    for mine in (schedule, lower(schedule)):
        save_csv(mine, tmp_path / "a.csv")
        theirs = actions_of(tmp_path / "a.csv")
        assert texts(theirs[rank] for rank in sorted(theirs)) == texts(mine.ranks)
        homes = torch_schedules._validate_schedule(theirs, len(mine.ranks), stages, m)
        assert homes == schedule.home
    # Its dry run finds that our messages get through. It knows no pairs: their halves, one after the other.
    theirs = {rank: [half for a in row if a for half in a.sub_actions or (a,)] for rank, row in theirs.items()}
    torch_schedules._simulate_comms_compute(theirs, lambda s: schedule.home[s], stages)


@pytest.mark.parametrize("case", OURS, ids=lambda case: "-".join(map(str, case)))
def test_pytorch_adds_the_same_messages(case):
    """Each once, from the same rank to the same; where between the computations is its own choice, and passes here."""
    schedule = make(*case)
    rows = {
        rank: [torch_schedules._Action.from_str(cell) for cell in row] for rank, row in enumerate(texts(schedule.ranks))
    }
    lowered = torch_schedules._add_send_recv(rows, lambda s: schedule.home[s], schedule.stages)
    theirs = texts(lowered[rank] for rank in sorted(lowered))
    assert [sorted(row) for row in theirs] == [sorted(row) for row in texts(lower(schedule).ranks)]
    check(type(schedule).of("torch", [[parse_action(cell) for cell in row] for row in theirs]))


@pytest.mark.parametrize(
    "broken, m",
    [
        ("0F0,0F1,0B0\n1F0,1B0,1F1,1B1\n", 2),  # no B
        ("0B0,0F0\n1F0,1B0\n", 1),  # B before F
        ("0F0,0I0\n1F0,1B0\n", 1),  # no W
        ("0F0,0W0,0I0\n1F0,1B0\n", 1),  # W before I
        ("0F0,0B0,1F1,1B1,0F1,0B1\n1F0,1B0\n", 2),  # a stage on two ranks
    ],
)
def test_pytorch_refuses_what_we_refuse(broken, m, tmp_path):
    path = tmp_path / "broken.csv"
    path.write_text(broken)
    with pytest.raises(UsageError):
        check(load_csv(path))
    with pytest.raises(AssertionError):
        torch_schedules._validate_schedule(actions_of(path), 2, 2, m)


# -- their schedules ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p, m", [(1, 1), (1, 3), (2, 1), (2, 4), (3, 7), (4, 2), (4, 8), (8, 16)])
def test_gpipe_is_pytorchs(p, m):
    ours = texts(make("gpipe", p, m).ranks)
    assert executed(ScheduleGPipe, p, m) == ours
    table = orders(ScheduleGPipe(Stage(0, p, p), m))
    assert [[cell for cell in row if "REDUCE_GRAD" not in cell] for row in table] == ours


@pytest.mark.parametrize("p, m", [(1, 1), (1, 3), (2, 2), (2, 5), (3, 7), (4, 4), (4, 8), (8, 16)])
def test_1f1b_is_what_pytorch_runs(p, m):
    """PyTorch calls the forward that begins the steady state a warm-up too: p-r, not p-1-r; the lists are the same. It
    needs m >= p.
    """
    ours = texts(make("1f1b", p, m).ranks)
    assert executed(Schedule1F1B, p, m) == ours
    # The table that it exports agrees, except that on the last rank, which warms up with nothing, its forwards count
    # from 1. (That is a slip in PyTorch 2.13: they are not what it runs.)
    table = [[c for c in row if "REDUCE_GRAD" not in c] for row in orders(Schedule1F1B(Stage(0, p, p), m))]
    assert table[:-1] == ours[:-1]
    assert [cell for cell in table[-1] if "F" in cell] == [f"{p - 1}F{i}" for i in range(1, m + 1)]


@pytest.mark.parametrize(
    "p, m, v", [(1, 2, 2), (2, 2, 1), (2, 4, 2), (2, 6, 3), (3, 6, 2), (4, 4, 3), (4, 12, 2), (8, 16, 2)]
)
def test_interleaved_1f1b_is_pytorchs(p, m, v):
    """Megatron's warm-up, 2(p-1-r) + (v-1)p, in both."""
    assert orders(several(ScheduleInterleaved1F1B, p, m, v)) == texts(make("interleaved-1f1b", p, m, v).ranks)


@pytest.mark.parametrize("p, m", [(4, 10), (4, 3), (2, 5)])
def test_where_p_does_not_divide_m_pytorch_differs_and_we_refuse(p, m, tmp_path):
    with pytest.raises(UsageError, match="is not whole"):
        make("interleaved-1f1b", p, m, 2)
    if m == 5:  # two groups of 2 microbatches leave one over
        with pytest.raises(ValueError, match="multiple of the number of rounds"):
            several(ScheduleInterleaved1F1B, p, m, 2)
    else:  # but what it makes of the others runs here
        several(ScheduleInterleaved1F1B, p, m, 2)._dump_csv(tmp_path / "flex.csv", format="compute_only")
        assert load_csv(tmp_path / "flex.csv").microbatches == m
        check(load_csv(tmp_path / "flex.csv"))


@pytest.mark.parametrize("p, m", [(1, 1), (1, 4), (2, 1), (2, 3), (2, 8), (3, 4), (4, 2), (4, 7), (4, 16), (8, 16)])
def test_zbv_is_pytorchs(p, m):
    assert orders(several(ScheduleZBVZeroBubble, p, m, 2)) == texts(make("zbv", p, m).ranks)


@pytest.mark.parametrize("p, m", [(p, m) for p in (1, 2, 3, 4, 8) for m in (2 * p, 2 * p + 1, 3 * p + 2, 4 * p, 40)])
def test_dualpipev_is_pytorchs(p, m):
    """The pairs too."""
    assert orders(several(ScheduleDualPipeV, p, m, 2)) == texts(make("dualpipev", p, m).ranks)


@pytest.mark.parametrize("p, m", [(1, 3), (2, 2), (2, 6), (3, 3), (4, 8), (8, 16)])
def test_zb_h1_is_pytorchs_zero_bubble_with_one_stage_per_rank(p, m):
    """Its "ZB1P". For p | m; else its groups of another size make no difference with one stage."""
    assert orders(several(ScheduleInterleavedZeroBubble, p, m, 1)) == texts(make("zb-h1", p, m).ranks)


# -- their CSV, our tools ----------------------------------------------------------------------------------------------

THEIRS = [
    (ScheduleInterleaved1F1B, 4, 8, 2),
    (ScheduleInterleaved1F1B, 3, 3, 3),
    (ScheduleLoopedBFS, 4, 6, 2),
    (ScheduleInterleavedZeroBubble, 4, 8, 1),
    (ScheduleInterleavedZeroBubble, 4, 8, 2),
    (ScheduleZBVZeroBubble, 4, 8, 2),
    (ScheduleZBVZeroBubble, 3, 2, 2),
    (ScheduleDualPipeV, 2, 4, 2),
    (ScheduleDualPipeV, 3, 7, 2),
    (ScheduleDualPipeV, 4, 8, 2),
]


@pytest.mark.parametrize("kind, p, m, v", THEIRS)
def test_pytorchs_exported_csv_loads_checks_and_simulates(kind, p, m, v, tmp_path):
    theirs = several(kind, p, m, v)
    theirs._dump_csv(tmp_path / "theirs.csv", format="compute_only")
    loaded = load_csv(tmp_path / "theirs.csv")
    assert texts(loaded.ranks) == orders(theirs)
    assert (loaded.stages, loaded.microbatches, loaded.home) == (p * v, m, theirs.stage_index_to_group_rank)
    check(loaded)
    line = simulate(loaded)
    assert 0 < line.bubble_fraction < 1
    # With the messages that PyTorch adds. Its cells for sharded parameters (UNSHARD, RESHARD, REDUCE_GRAD), which ask
    # nothing of a pipeline, are left out: load_csv does not know them.
    theirs._dump_csv(tmp_path / "comms.csv", format="compute_comms")
    rows = [line.split(",") for line in (tmp_path / "comms.csv").read_text().splitlines()]
    skipped = ("UNSHARD", "RESHARD", "REDUCE_GRAD")
    (tmp_path / "comms.csv").write_text(
        "".join(",".join(c for c in row if not c.endswith(skipped)) + "\n" for row in rows)
    )
    whole = load_csv(tmp_path / "comms.csv")
    check(whole)
    assert lower(whole) is whole
    assert simulate(whole).makespan == line.makespan


def test_a_csv_of_ours_makes_a_pytorch_schedule(tmp_path):
    """_PipelineScheduleRuntime is what PyTorch runs a schedule from a file with."""
    for case in (("zb-h2", 4, 8, None), ("zbv", 2, 5, None), ("1f1b", 2, 3, None), ("dualpipev", 2, 5, None)):
        mine = make(*case)
        save_csv(mine, tmp_path / "ours.csv")
        p, per_rank = len(mine.ranks), mine.stages // len(mine.ranks)
        runtime = torch_schedules._PipelineScheduleRuntime(
            [Stage(s, p * per_rank, p) for s in range(per_rank)], case[2]
        )
        runtime._load_csv(tmp_path / "ours.csv", format="compute_only")
        assert orders(runtime) == texts(mine.ranks)
        assert runtime.stage_index_to_group_rank == mine.home
