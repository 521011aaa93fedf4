"""Claims about layouts: the placements computed for any rank are those that the strategies record."""

import pytest
from combinations import TEXT, VOCAB
from training import trainer_for

from minipar.comm import run_local
from minipar.parallel.layout import StepLayout
from minipar.train.config import parse, resolve
from minipar.train.from_config import step_layout

SHAPE = f"--layers 5 --hidden 20 --heads 4 --seq-len 8 --vocab-size {VOCAB} --global-batch 8"
LAYOUTS = {
    "--dp 3 --global-batch 6": 3,
    "--dp 2 --zero-stage 3": 2,
    "--tp 4 --sequence-parallel": 4,
    "--dp 2 --tp 2 --pp 2 --microbatches 2 --zero-stage 1 --sequence-parallel": 8,
    "--pp 2 --microbatches 2 --schedule zbv": 2,
    "--dp 2 --cp 2 --tp 2 --zero-stage 2": 8,
    "--dp 4 --zero-stage 3 --zero-replicas 2": 4,
    "--model mixtral --hidden 24 --experts 4 --dp 2 --tp 2 --pp 2 --ep 2 --microbatches 2 --zero-stage 3": 8,
    "--model mixtral --hidden 24 --experts 4 --dp 2 --tp 4 --ep 4 --etp 2 --sequence-parallel --zero-stage 1": 8,
    "--model mixtral --hidden 24 --experts 4 --tp 2 --etp 1 --sequence-parallel": 2,
}


def test_without_coordinates_the_placements_are_those_of_rank_0():
    config = resolve(parse(f"{SHAPE} --dp 2 --cp 2 --tp 2 --pp 2 --microbatches 2 --zero-stage 1".split()), 16)
    layout = step_layout(config)
    assert layout.placements() == layout.placements(**layout.coordinates(0))
    others = [layout.placements(**layout.coordinates(rank)) for rank in (1, 2, 4, 8)]
    assert all(other != layout.placements() for other in others)


def test_a_layouts_defaults_are_those_of_no_flags():
    layout = step_layout(resolve(parse(SHAPE.split()), 1))
    sizes = (layout.model, layout.length, layout.samples, layout.microbatches, layout.itemsize)
    bytes_of_gradients = {"gradient_itemsize": layout.gradient_itemsize, "reduce_itemsize": layout.reduce_itemsize}
    assert StepLayout(*sizes, **bytes_of_gradients) == layout


@pytest.mark.parametrize("flags", LAYOUTS)
def test_computed_placements_are_the_recorded_ones(flags):
    ranks = LAYOUTS[flags]
    config = resolve(parse(f"{SHAPE} {flags}".split()), ranks)

    def rank(comm):
        ddp = trainer_for(config, TEXT, comm).ddp
        return [p.placement for bucket in reversed(ddp.buckets) for p in bucket.parameters]

    layout = step_layout(config)
    for r, recorded in enumerate(run_local(ranks, rank)):
        assert layout.placements(**layout.coordinates(r)) == recorded
