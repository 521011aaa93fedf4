"""Claims about docs/examples: scripts are short, and train on many ranks what one device trains."""

import pytest
from example_runs import EXAMPLES, losses_on_threads
from ladder import LADDER, README, with_differences

LLAMA = ("mp.GPT(CONFIG", "mp.Llama(mp.LlamaConfig(256, 32, 96, 2, 4)")
HYBRID = ("(model, world)", "(model, mp.HybridComm(world, 2))")
RUNS = [(after, ranks, "", "") for _, after, ranks, _ in LADDER]
RUNS += [("ddp", 3, "", ""), ("zero", 3, "stage=2", "stage=1"), ("fsdp", 4, *HYBRID), ("tensor", 4, *LLAMA)]
RUNS += [("context", 2, "ring", "all-gather"), ("context", 4, "ring", "ulysses"), ("expert", 4, "", "")]


@pytest.mark.parametrize(("name", "ranks", "old", "new"), RUNS)
def test_an_example_trains_what_one_device_trains(name, ranks, old, new, capsys):
    many = losses_on_threads(name, ranks, old, new, capsys)
    one = losses_on_threads("expert" if name == "expert" else "serial", 1, old, new, capsys)
    assert old in (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    assert len(many) == len(one) == 20 and one[-1] < one[0]
    assert many == pytest.approx(one, rel=1e-9)


def test_readme_has_the_last_loss_and_the_differences(capsys):
    text = README.read_text(encoding="utf-8")
    assert f"{losses_on_threads('serial', 1, '', '', capsys)[-1]:.9f}" in text
    assert text == with_differences(text)


def test_an_example_has_at_most_40_lines_and_is_in_readme():
    text = README.read_text(encoding="utf-8")
    for path in EXAMPLES.glob("*.py"):
        assert f"]({path.name})" in text and len(path.read_text(encoding="utf-8").splitlines()) <= 40, path.name
