"""Claims about programs of users: README's and the examples' train on a device what they train under NumPy, unchanged.

They give NumPy's arrays, and call NumPy's functions on what they get back, as far as CuPy takes part in these.
"""

import re
from contextlib import nullcontext

import numpy as np
import pytest
import strict_array
from example_runs import EXAMPLES
from training import using

import minipar as mp
from minipar.comm import run_local

README = (EXAMPLES.parents[1] / "README.md").read_text(encoding="utf-8")
TWENTY_LINES, OWN_MODEL = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
TRAIN_IT = """
import numpy as np
import minipar as mp

def main(world):
    model = mp.shard(MLP(), world, stage=2)
    optimizer = mp.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    for step in range(20):
        x = np.random.default_rng(step).standard_normal((8, 8))[world.rank :: world.size]
        loss = model.loss(x, np.sin(x[:, :1]))
        loss.backward()
        norm = mp.clip_grad_norm(model.parameters(), 0.1, world)
        optimizer.step()
        optimizer.zero_grad()
        with mp.no_grad():
            print(f"loss {model.loss(x, np.cos(x[:, :1])).item() + norm:.6f}")
    state = mp.gather_state(model.model, model.parameters(), world)
    if world.rank == 0:
        own = MLP()
        own.load_state_dict(state)
        print(f"loss {own.loss_sum(x, x[:, :1]).item():.6f}")

mp.launch(main)
"""
PROGRAMS = [  # of README or docs/examples, and ranks
    (TWENTY_LINES, 2),
    (TRAIN_IT.replace("def main", OWN_MODEL + "\ndef main"), 2),
    ("serial", 1),
    ("ddp", 2),
    ("zero", 2),
    ("fsdp", 2),
    ("tensor", 2),
    ("sequence", 2),
    ("context", 2),
    ("expert", 2),
    ("pipeline", 2),
    ("three_d", 8),
    ("stages", 16),
    ("resume", 1),
]


def losses_of(program, ranks, module, capsys, monkeypatch):
    """Run a program on threads, for three steps or as many as it needs, and return the losses that it prints."""
    path = EXAMPLES / f"{program}.py"
    text = path.read_text(encoding="utf-8") if "\n" not in program else program
    monkeypatch.setattr(mp, "launch", lambda main: run_local(ranks, main))
    monkeypatch.syspath_prepend(EXAMPLES)
    with using(module), strict_array.as_cupy() if module is strict_array else nullcontext():
        exec(re.sub(r"(steps=|range\()20\b", r"\g<1>3", text), {"__name__": "__main__"})
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("loss")]
    return sorted(float(line.split()[1]) for line in lines)


@pytest.mark.parametrize(("program", "ranks"), PROGRAMS, ids=lambda value: str(value)[:8])
def test_a_program_trains_on_a_device_what_it_trains_under_numpy(program, ranks, device, capsys, monkeypatch):
    found = losses_of(program, ranks, device, capsys, monkeypatch)
    expected = losses_of(program, ranks, np, capsys, monkeypatch)
    assert len(found) >= 3 and found == pytest.approx(expected, rel=2e-5, abs=2e-6)
