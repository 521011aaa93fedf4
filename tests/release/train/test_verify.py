"""Claims about `--verify`: it sees mistakes in the first and in the 300th step, in 12 layouts and 4 dtypes."""

from functools import cache

import pytest
from combinations import TEXT, config_of
from mistakes_in_training import MISTAKES, gradient_times
from training import run_until, verdicts

from minipar.train.trainer import Trainer

RUN = "--layers 4 --eps 1e-8 --global-batch 8"
LAYOUTS = [
    "--dp 2",
    "--dp 4 --zero-stage 1",
    "--dp 2 --zero-stage 2 --microbatches 2 --sync-every-microbatch",
    "--dp 4 --zero-stage 3",
    "--dp 4 --zero-stage 2 --zero-replicas 2 --reduction ring",
    "--tp 2",
    "--tp 2 --sequence-parallel --dp 2 --zero-stage 1",
    "--cp 2 --seq-len 8 --hidden 20 --heads 4",
    "--cp 2 --context-parallel ulysses --tp 2 --seq-len 8 --hidden 20 --heads 4",
    "--pp 2 --microbatches 4 --clip-grad 0.1",
    "--pp 2 --schedule zbv --microbatches 4 --tp 2 --dp 2",
    "--model mixtral --experts 4 --dp 2 --ep 2",
]
ANYWHERE = ["a sample of the next step", "a norm that counts twice", "the moment of the last step"]
KINDS = {"a thousandth more": gradient_times(1.001), "never trained": gradient_times(0.0)}
KINDS |= {name: MISTAKES[name][1] for name in ANYWHERE}


@pytest.fixture(scope="module")
def after_299_steps(tmp_path_factory):
    """Return, for a dtype and the flags of a model, a directory with one device's checkpoint of step 299."""

    @cache
    def directory(dtype, model):
        folder = tmp_path_factory.mktemp("trained")
        run_until(TEXT, config_of(f"{RUN} {model} --dtype {dtype} --steps 300"), folder, stop=299)
        return folder

    return directory


@pytest.mark.parametrize("step", [1, 300])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bf16", "fp16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_mistake_fails_and_the_right_run_passes(layout, dtype, step, after_299_steps):
    """In one step each, so a mistake need not add up."""
    flags = f"{RUN} {layout} --dtype {dtype} --steps {step}"
    if step > 1:
        model = "--model mixtral --experts 4" if "mixtral" in layout else ""
        flags += f" --resume {after_299_steps(dtype, model)}"
    for name, kind in {"right": Trainer, **KINDS}.items():
        outcomes = {(verdict.passed, verdict.line) for verdict in verdicts(config_of(flags), TEXT, kind)}
        assert len(outcomes) == 1, "every rank hears the same"
        passed, line = outcomes.pop()
        assert passed == (name == "right"), (name, line)
        assert passed or f"after step {step} of {step}" in line, line
