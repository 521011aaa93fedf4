"""Claims about memory: model state in closed form."""

from fractions import Fraction

import numpy as np
import pytest

from minipar.parallel.placement import BucketSlice, Placement
from minipar.parallel.predicted_memory import FLOAT32, FLOAT64, MIXED, elements_placed, model_state

STAGES = (0, 1, 2, 3)

# Rajbhandari et al. 2020, Table 1, the 7.5B column: GB on each of N ranks at stages 1, 2, 3. (The table truncates.)
PAPER = {
    4: (52.5, 41.3, 30),
    16: (35.6, 21.6, 7.5),
    64: (31.4, 16.6, 1.88),
    256: (30.4, 15.4, 0.47),
    1024: (30.1, 15.1, 0.12),
}


@pytest.mark.parametrize("ranks", PAPER)
def test_the_papers_table_for_7_5_billion_parameters(ranks):
    psi = 7_500_000_000
    for stage, gigabytes in zip((1, 2, 3), PAPER[ranks], strict=True):
        assert abs(model_state(psi, Fraction(psi, ranks), stage, MIXED).total / 10**9 - gigabytes) < 1
    # Stage 3's column is exact to the digits printed.
    assert float(model_state(psi, Fraction(psi, ranks), 3, MIXED).total / 10**9) == pytest.approx(
        PAPER[ranks][2], abs=0.005
    )


@pytest.mark.parametrize(("psi", "ranks"), [(1, 1), (7, 3), (124_439_808, 1024)])
def test_the_formulas_with_nothing_rounded(psi, ranks):
    share = Fraction(psi, ranks)
    mixed = [model_state(psi, share, stage, MIXED).total for stage in STAGES]
    assert mixed == [16 * psi, 4 * psi + 12 * share, 2 * psi + 14 * share, 16 * share]
    single = [model_state(psi, share, stage, FLOAT32).total for stage in STAGES]
    assert single == [16 * psi, 8 * psi + 8 * share, 4 * psi + 12 * share, 16 * share]
    double = [model_state(psi, share, stage, FLOAT64).total for stage in STAGES]
    assert double == [2 * total for total in single]


def placed(buckets, ranks):
    """Return placements of parameters of these sizes, given bucket by bucket."""
    return [
        Placement("", (size,), dp=BucketSlice(sum(bucket[:i]), size, sum(bucket), 0, ranks))
        for bucket in buckets
        for i, size in enumerate(bucket)
    ]


@pytest.mark.parametrize(
    ("buckets", "ranks"), [([[1]], 3), ([[10]], 4), ([[7], [9, 4], [2]], 5), ([[3, 497], [2197], [1, 2196]], 8)]
)
def test_a_ranks_share_is_its_piece_of_every_bucket(buckets, ranks):
    pieces = [[len(piece) for piece in np.array_split(np.empty(sum(sizes)), ranks)] for sizes in buckets]
    shares = []
    for rank in range(ranks):
        psi, own = elements_placed(placed(buckets, ranks), rank)
        assert psi == sum(map(sum, buckets))
        shares.append(own)
    assert shares == [sum(each) for each in zip(*pieces, strict=True)]
    assert sum(shares) == psi and shares[0] == max(shares)  # every element once, no padding


def test_accumulating_microbatches_count_whole_gradients_too():
    """Without a reduce-scatter for each microbatch stage 2 saves nothing over stage 1."""
    gradients = [model_state(1500, 375, stage, FLOAT32, accumulating=True).gradients for stage in STAGES]
    assert gradients == [4 * 1500, 4 * 1500, 4 * (1500 + 375), 4 * (1500 + 375)]
