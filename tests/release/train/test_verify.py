"""Claims about `--verify`: it sees mistakes in the first and in the 300th step, in 12 layouts."""

import pytest
from combinations import TEXT
from mistakes_in_training import MISTAKES, gradient_times
from training import config_for, run_until, verdicts

RUN = "--layers 4 --hidden 16 --heads 4 --seq-len 8 --vocab-size 16 --global-batch 8 --dtype float64"
LAYOUTS = [
    "--dp 2",
    "--dp 4 --zero-stage 1",
    "--dp 2 --zero-stage 2 --microbatches 2 --sync-every-microbatch",
    "--dp 4 --zero-stage 3",
    "--dp 4 --zero-stage 2 --zero-replicas 2",
    "--tp 2",
    "--tp 2 --sequence-parallel --dp 2 --zero-stage 1",
    "--cp 2",
    "--cp 2 --context-parallel ulysses",
    "--pp 2 --microbatches 4 --clip-grad 0.1",
    "--pp 2 --schedule zbv --microbatches 4 --tp 2 --dp 2",
    "--model mixtral --dp 2 --ep 2",
]
ANYWHERE = ["a sample of the next step", "a norm that counts twice", "the moment of the last step"]
KINDS = {"right": None, "a thousandth more": gradient_times(1.001), "never trained": gradient_times(0.0)}
KINDS |= {name: MISTAKES[name][1] for name in ANYWHERE}


@pytest.fixture(scope="module")
def after_299_steps(tmp_path_factory):
    """Directories with one device's checkpoint of step 299, by model."""
    folder = tmp_path_factory.mktemp("trained")
    for model in ("gpt2", "mixtral"):
        run_until(TEXT, config_for(f"{RUN} --model {model} --steps 300"), folder / model, stop=299)
    return folder


@pytest.mark.parametrize("reduction", ["ring", "ordered"])
@pytest.mark.parametrize("step", [1, 300])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_mistake_fails_and_the_right_run_passes(layout, step, reduction, after_299_steps):
    """In one step each, so a mistake need not add up."""
    flags = f"{RUN} {layout} --reduction {reduction} --steps {step}"
    if step > 1:
        flags += f" --resume {after_299_steps}/{'mixtral' if 'mixtral' in layout else 'gpt2'}"
    for name, kind in KINDS.items():
        outcomes = {(verdict.passed, verdict.line) for verdict in verdicts(config_for(flags), TEXT, kind)}
        assert len(outcomes) == 1, "every rank hears the same"
        passed, line = outcomes.pop()
        assert passed == (name == "right"), (name, line)
