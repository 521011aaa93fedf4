"""Claims about a checkpoint that an earlier version wrote, recorded because nothing else shows that it still loads.

recorded/checkpoint-v1 was written after 2 steps on dp 2 x tp 2 at ZeRO stage 1, when parameters had no placements yet.
expected.json holds the first 16 hex digits of each array's SHA-256, and what one rank of that version reported as it
resumed for 2 more steps.
"""

import hashlib
import json
from pathlib import Path

import pytest
from training import config_for, on_each_rank, ranks_of, trainer_for

from chapters.support.whole_runs import bound
from minipar.comm import run_local
from minipar.train.checkpoint import KINDS, MANIFEST, Checkpoint
from minipar.train.data import load_tokens

FOLDER = Path(__file__).parent / "recorded" / "checkpoint-v1"
EXPECTED = json.loads((FOLDER / "expected.json").read_text())
FLAGS = "--layers 1 --hidden 12 --heads 2 --seq-len 8 --global-batch 4 --vocab-size 16 --weight-decay 0.1 --steps 4"
TOKENS = load_tokens(str(FOLDER / "tokens.bin"), vocab_size=16, seq_len=8)
LAYOUTS = ["", "--dp 4 --zero-stage 3", "--dp 2 --tp 2 --zero-stage 2 --sequence-parallel"]


def digests(path):
    """The digest of every array in a checkpoint, parameters and moments, by "kind/name"."""
    checkpoint = Checkpoint(path, (path / MANIFEST).read_bytes())
    names = [(kind, name) for kind in KINDS for name in checkpoint.shapes]
    arrays = {f"{kind}/{name}": checkpoint.array(kind, name) for kind, name in names}
    return {key: hashlib.sha256(array.tobytes()).hexdigest()[:16] for key, array in arrays.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_loads_the_recorded_arrays_to_the_bit(layout, tmp_path):
    """What a layout has loaded, it saves again."""
    config = config_for(f"{FLAGS} {layout} --resume {FOLDER}")
    run_local(ranks_of(config), lambda comm: trainer_for(config, TOKENS, comm).save(tmp_path, 2))
    assert digests(tmp_path / "step-00000002") == EXPECTED["sha256"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_goes_on_with_the_recorded_losses_and_norms(layout):
    """Within rounding: the sums of float32 depend on the layout and on the machine's BLAS."""
    config = config_for(f"{FLAGS} {layout} --resume {FOLDER}")
    for results in on_each_rank(config, TOKENS, lambda trainer, results: results):
        assert [r.step for r in results] == [step["step"] for step in EXPECTED["steps"]] == [2, 3]
        for result, step in zip(results, EXPECTED["steps"], strict=True):
            assert result.loss == pytest.approx(step["loss"], rel=bound("float32", 1) / 100)
            assert result.grad_norm == pytest.approx(step["grad_norm"], rel=bound("float32", 1) / 100)
