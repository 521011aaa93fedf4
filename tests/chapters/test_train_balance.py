"""Chapter 12's small Mixtral: every row is counted, and each remedy balances."""

import numpy as np

from chapters.support.ch12.balance import train_balance

SHORT = "--global-batch 4 --lr 5e-3 --steps 25"


def test_every_row_of_every_step_is_counted():
    losses, loads = train_balance("", SHORT)
    assert len(losses) == 25 and losses[-1] < losses[0]
    assert (np.array(loads).sum(axis=1) == 4 * 32 * 2).all() and np.array(loads).shape == (25, 8)


def test_a_bias_gives_every_expert_rows():
    alone, balanced = (np.array(train_balance(options, SHORT)[1]) for options in ("", "--router-bias 0.02"))
    used = [int((loads[-5:].sum(axis=0) > 10).sum()) for loads in (alone, balanced)]
    assert used[0] <= 4 and used[1] == 8
