"""Work that the ranks of a chapter share out."""

import pytest

from chapters.support.share_work import shared
from minipar.comm import run_local


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_every_job_is_done_once_and_every_rank_has_all_results(ranks):
    done = []

    def work(number):
        done.append(number)
        return number * number

    results = run_local(ranks, lambda comm: shared(comm, work, [(number,) for number in range(5)]))
    assert results == [[0, 1, 4, 9, 16]] * ranks
    assert sorted(done) == [0, 1, 2, 3, 4]
