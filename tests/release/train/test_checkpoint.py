"""Claims about checkpoints in 19 layouts: each is written under one and resumed under itself and two others."""

import numpy as np
import pytest
from combinations import TEXT, config_of
from training import bits, ranks_of, run_until, trainer_for

from chapters.support.whole_runs import relative_difference
from minipar.comm import run_local
from minipar.train import checkpoint

# Heads that 1, 2 and 4 ranks share, and buckets (6,016; 10,740) and a vocabulary that they do not divide.
RUN = "--layers 4 --hidden 20 --heads 4 --seq-len 8 --global-batch 24 --steps 4 --weight-decay 0.1"
LAYOUTS = [
    "--dp 1",
    "--dp 2 --microbatches 2",
    "--dp 2 --microbatches 2 --zero-stage 1",
    "--dp 2 --microbatches 2 --zero-stage 3",
    "--dp 2 --pp 2 --microbatches 2",
    "--dp 2 --pp 4 --microbatches 2 --schedule zb-h1 --zero-stage 2",
    "--dp 2 --pp 2 --microbatches 2 --schedule interleaved-1f1b --zero-stage 1",
    "--dp 3",
    "--dp 3 --zero-stage 2 --reduction ring",
    "--tp 4",
    "--tp 2 --sequence-parallel",
    "--dp 2 --tp 2 --pp 2 --microbatches 2 --zero-stage 3",
    "--dp 3 --tp 2 --zero-stage 1 --sequence-parallel",
    "--pp 3 --tp 2 --microbatches 3 --schedule gpipe",
    "--dp 8 --zero-stage 3",
    "--dp 4 --zero-stage 3 --zero-replicas 2",
    "--dp 4 --tp 2 --zero-stage 1 --zero-replicas 2",
    "--cp 2 --zero-stage 1 --context-parallel ulysses",
    "--dp 2 --cp 2 --tp 2 --zero-stage 3 --context-parallel ulysses",
]
# Those that add the same numbers in the same order, and so train the same bits as one another.
ALIKE = {flags for flags in LAYOUTS if "--dp 2" in flags and "--tp" not in flags}
PAIRS = [(each, LAYOUTS[(i + k) % len(LAYOUTS)]) for i, each in enumerate(LAYOUTS) for k in (0, 1, 4)]


@pytest.mark.parametrize(("saved", "resumed"), PAIRS)
def test_resuming_under_any_layout_is_never_having_stopped(saved, resumed, tmp_path):
    """To the bit where the layout is the same or adds in the same order; else within the bound of so many steps."""
    state, whole = run_until(TEXT, config_of(f"{RUN} {resumed}"))
    run_until(TEXT, config_of(f"{RUN} {saved}"), tmp_path, 2)
    again, later = run_until(TEXT, config_of(f"{RUN} {resumed} --resume {tmp_path}"))
    if saved == resumed or {saved, resumed} <= ALIKE:
        assert bits(again) == bits(state) and later == whole[2:]
        return
    assert max(relative_difference(again[name], state[name]) for name in state) <= 4e-12
    np.testing.assert_allclose(later, whole[2:], rtol=4e-12)


def contents(folder):
    """The bytes of all arrays that a checkpoint holds."""
    place = folder / "step-00000002"
    return {str(path.relative_to(place)): path.read_bytes() for path in place.glob("*/*.npy")}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_loaded_is_what_was_saved_to_the_bit(layout, tmp_path):
    """Saved by one layout, by the next without a step, and compared whole."""
    run_until(TEXT, config_of(f"{RUN} --dp 3"), tmp_path / "first", 2)
    config = config_of(f"{RUN} {layout} --resume {tmp_path / 'first'}")
    then = str(tmp_path / "then")
    run_local(ranks_of(config), lambda comm: checkpoint.save(trainer_for(config, TEXT, comm), then, 2))
    assert contents(tmp_path / "then") == contents(tmp_path / "first") != {}
