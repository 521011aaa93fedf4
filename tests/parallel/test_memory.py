"""Claims about memory: model state in closed form, and the limit that refuses."""

from fractions import Fraction

import numpy as np
import pytest

from minipar.errors import UsageError
from minipar.parallel.memory import (
    FLOAT32,
    FLOAT64,
    MIXED,
    OF_DTYPE,
    STAGES,
    Precision,
    check_limit,
    elements_held,
    elements_placed,
    model_state,
    precision_of,
)
from minipar.parallel.placement import BucketSlice, Placement

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


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8, 1024])
@pytest.mark.parametrize("psi", [1, 7, 124_439_808])
def test_the_formulas_with_nothing_rounded(psi, ranks):
    share = Fraction(psi, ranks)
    mixed = [model_state(psi, share, stage, MIXED).total for stage in STAGES]
    assert mixed == [16 * psi, 4 * psi + 12 * share, 2 * psi + 14 * share, 16 * share]
    single = [model_state(psi, share, stage, FLOAT32).total for stage in STAGES]
    assert single == [16 * psi, 8 * psi + 8 * share, 4 * psi + 12 * share, 16 * share]
    double = [model_state(psi, share, stage, FLOAT64).total for stage in STAGES]
    assert double == [2 * total for total in single]


def test_each_stage_shares_out_one_more_thing():
    assert [elements_held(100, 25, stage) for stage in STAGES] == [
        (100, 100, 100),
        (100, 100, 25),
        (100, 25, 25),
        (25, 25, 25),
    ]
    state = model_state(100, 25, 2, MIXED)
    assert (state.parameters, state.gradients, state.optimizer, state.total) == (200, 50, 300, 550)


def test_the_precisions_are_what_numpy_arrays_take():
    for dtype, precision in OF_DTYPE.items():
        width = np.dtype(dtype).itemsize  # parameter, gradient; AdamW keeps two means
        assert (precision.parameters, precision.gradients, precision.optimizer) == (width, width, 2 * width)


def placed(buckets, ranks):
    """Return placements of parameters of these sizes, given bucket by bucket."""
    return [
        Placement("", (size,), dp=BucketSlice(sum(bucket[:i]), size, sum(bucket), 0, ranks))
        for bucket in buckets
        for i, size in enumerate(bucket)
    ]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("buckets", [[[1]], [[10]], [[7], [9, 4], [2]], [[3, 497], [2197], [1, 2196]], [[8], [9, 7]]])
def test_a_ranks_share_is_its_piece_of_every_bucket(buckets, ranks):
    pieces = [[len(piece) for piece in np.array_split(np.empty(sum(sizes)), ranks)] for sizes in buckets]
    shares = []
    for rank in range(ranks):
        psi, own = elements_placed(placed(buckets, ranks), rank)
        assert psi == sum(map(sum, buckets))
        shares.append(own)
    assert shares == [sum(each) for each in zip(*pieces, strict=True)]
    assert sum(shares) == psi and shares[0] == max(shares)  # every element once, no padding


# ---- the limit -------------------------------------------------------------------------------------------------------

# In float32 on 4 ranks, rank 0 holds 250 + 125: the stages take 24,000, 15,000, 10,500 and 6,000 bytes.
BUCKETS = [[600, 400], [500]]


def refusal(limit, stage, ranks=4, accumulating=False, buckets=BUCKETS):
    with pytest.raises(UsageError) as error:
        check_limit(limit, placed(buckets, ranks), ranks, stage, [FLOAT32] * 4, accumulating)
    return str(error.value)


@pytest.mark.parametrize(("stage", "total"), list(enumerate([24_000, 15_000, 10_500, 6_000])))
def test_exactly_the_limit_fits_and_one_byte_less_does_not(stage, total):
    check_limit(total, placed(BUCKETS, 4), 4, stage, [FLOAT32] * 4, False)
    assert f" = {total:,} bytes" in refusal(total - 1, stage)


@pytest.mark.parametrize(
    ("limit", "fits"),
    [
        (15_000, "--zero-stage 1 fits: 4*1,500 (parameters) + 4*1,500 (gradients) + 8*375 (optimizer) = 15,000 bytes"),
        (14_999, "--zero-stage 2 fits: 4*1,500 (parameters) + 4*375 (gradients) + 8*375 (optimizer) = 10,500 bytes"),
        (6_000, "--zero-stage 3 fits: 4*375 (parameters) + 4*375 (gradients) + 8*375 (optimizer) = 6,000 bytes"),
    ],
)
def test_a_refusal_shows_the_sums_and_the_first_stage_that_fits(limit, fits):
    assert refusal(limit, 0) == (
        f"--memory-limit {limit:,} bytes of model state per rank, but --zero-stage 0 on 4 data-parallel ranks holds "
        f"4*1,500 (parameters) + 4*1,500 (gradients) + 8*1,500 (optimizer) = 24,000 bytes; {fits}"
    )


def test_a_limit_too_small_for_any_stage_says_so():
    message = refusal(5_999, 1)
    assert "--zero-stage 1 on 4 data-parallel ranks holds" in message and "= 15,000 bytes" in message
    assert message.endswith(
        "; the least, --zero-stage 3, holds 4*375 (parameters) + 4*375 (gradients) + 8*375 (optimizer) = 6,000 bytes; "
        "no stage fits"
    )
    message = refusal(5_999, 3)
    assert message.count("= 6,000 bytes") == 1 and "the least" not in message and message.endswith("no stage fits")


def test_the_fullest_rank_decides():
    """10 elements on 4 ranks: 3, 3, 2, 2."""
    check_limit(3 * 16, placed([[10]], 4), 4, 3, [FLOAT32] * 4, False)
    assert "4*3 (parameters)" in refusal(3 * 16 - 1, 3, buckets=[[10]])


def test_on_one_rank_nothing_is_shared_out():
    assert "on 1 data-parallel rank holds" in refusal(23_999, 0, ranks=1)
    assert refusal(23_999, 0, ranks=1).endswith("no stage fits")
    assert "--zero-stage 1 fits" in refusal(20_000, 0, ranks=2)


def test_accumulating_microbatches_count_whole_gradients_too():
    gradients = [model_state(1500, 375, stage, FLOAT32, accumulating=True).gradients for stage in STAGES]
    assert gradients == [4 * 1500, 4 * 1500, 4 * (1500 + 375), 4 * (1500 + 375)]
    check_limit(10_500, placed(BUCKETS, 4), 4, 2, [FLOAT32] * 4, False)
    # Without a reduce-scatter for each microbatch stage 2 saves nothing over stage 1; stage 3 still does.
    assert "4*1,875 (gradients) + 8*375 (optimizer) = 16,500 bytes; --zero-stage 1 fits" in refusal(15_000, 2, 4, True)
    assert "= 16,500 bytes; --zero-stage 3 fits" in refusal(12_000, 2, 4, True)
    assert "whole gradients while microbatches accumulate" in refusal(6_000, 3, accumulating=True)


def test_the_refusal_says_what_accumulating_costs_among_ranks():
    assert refusal(6_000, 3, accumulating=True).endswith(
        "no stage fits (whole gradients while microbatches accumulate, from stage 2 on next to the chunk of their sum; "
        "without a pipeline, --sync-every-microbatch keeps them sharded)"
    )
    assert refusal(100, 3, ranks=1, accumulating=True).endswith("no stage fits")
    assert refusal(100, 3).endswith("no stage fits")


@pytest.mark.parametrize(
    ("dtypes", "widths"),
    [
        (("float32",), (4, 4, 8)),
        (("float64",), (8, 8, 16)),
        (("bfloat16",), (2, 4, 12)),
        (("float16", "float16"), (2, 2, 12)),
        (("bfloat16", "float32", "float32"), (2, 4, 12)),
        (("bfloat16", "bfloat16", "float32"), (2, 2 + 4, 12)),
        (("bfloat16", None, "bfloat16"), (2, 4 + 2, 12)),
        (("bfloat16", "bfloat16", "bfloat16"), (2, 2, 12)),
    ],
)
def test_the_bytes_of_a_run_follow_from_its_dtypes(dtypes, widths):
    """In 2-byte training gradients have float32 unless said otherwise, and two dtypes if they are summed in another."""
    assert precision_of(*dtypes) == Precision(*widths)
