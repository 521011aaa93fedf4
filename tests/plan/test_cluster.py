"""Collectives on a cluster, its links, and GPUs that a user describes."""

import os
from dataclasses import replace

import pytest
from planning import a100s

from minipar.errors import UsageError
from minipar.plan.cluster import GB, GPUS, AlphaBeta, Cluster, Gpu, fetch_seconds, gather_seconds, scalar_seconds
from minipar.plan.layout import MINIPAR
from minipar.plan.programs import PROGRAMS, find_gpu, find_program  # fmt: skip

# As data sheets print them: dense 16-bit TFLOP/s, GB, GB/s, GB/s of NVLink both ways, Gb/s of cards for each GPU.
SHEETS = {
    "v100": (125, 32, 900, 300, 4 * 100 / 8),
    "a100": (312, 80, 2039, 600, 200),
    "h100": (989, 80, 3350, 900, 400),
    "h200": (989, 141, 4800, 900, 400),
}


def test_gpus_are_those_of_the_data_sheets():
    assert list(GPUS) == list(SHEETS)
    for name, (flops, memory, bandwidth, nvlink, cards) in SHEETS.items():
        gpu = GPUS[name]
        assert (gpu.peak, gpu.memory, gpu.memory_bandwidth) == (flops * 1e12, memory * 1e9, bandwidth * 1e9)
        assert (gpu.inside, gpu.between) == (nvlink / 2 * 1e9, cards / 8 * 1e9)


def test_a_ring_in_one_host_and_between_hosts():
    cluster = a100s(64)
    inside, between, n = cluster.inside, cluster.between, 1e9
    assert gather_seconds(cluster, n, 1, 1) == 0
    assert gather_seconds(cluster, n, 1, 8) == pytest.approx(7 * inside.alpha + n * 7 / 8 * inside.beta)
    # One rank of each of eight hosts: every message crosses.
    assert gather_seconds(cluster, n, 8, 8) == pytest.approx(7 * between.alpha + n * 7 / 8 * between.beta)
    # All 64: eight rings, an eighth of the bytes through each network card.
    expected = 56 * inside.alpha + 7 * between.alpha + n / 8 * 63 / 64 * between.beta
    assert gather_seconds(cluster, n, 1, 64) == pytest.approx(expected)
    # Sixteen hosts of two: half of the bytes through each card, or all of them over a link inside that is slower.
    slow = Cluster(replace(GPUS["a100"], inside=30 * GB), 32, 2)
    expected = 16 * slow.inside.alpha + 15 * slow.between.alpha + n * 31 / 32 * slow.inside.beta
    assert gather_seconds(slow, n, 1, 32) == pytest.approx(expected)


def test_a_ring_whose_last_host_is_not_full():
    cluster, n = Cluster(replace(GPUS["a100"], inside=1e9), 24, 4), 1e6
    inside, between = cluster.inside, cluster.between
    assert inside.beta > between.beta
    six = gather_seconds(cluster, n, 1, 6)  # four and two
    assert six == pytest.approx(4 * inside.alpha + between.alpha + n * 5 / 6 * inside.beta, rel=1e-12)
    assert gather_seconds(cluster, n, 4, 6) == pytest.approx(5 * between.alpha + n * 5 / 6 * between.beta, rel=1e-12)


def test_minipar_has_one_ring_and_pairwise_gathers():
    cluster, n = replace(a100s(64), framework=MINIPAR), 1e9
    inside, between = cluster.inside, cluster.between
    assert gather_seconds(cluster, n, 1, 64) == pytest.approx(63 * (between.alpha + n / 64 * between.beta))
    near, far = (link.alpha + n / 64 * link.beta for link in (inside, between))
    assert fetch_seconds(cluster, n, 1, 64) == pytest.approx(7 * near + 56 * far)
    scalar = 2 * (7 * inside.alpha + 56 * between.alpha)
    assert scalar_seconds(cluster, 1, 64) == pytest.approx(scalar, rel=1e-12)
    assert scalar_seconds(a100s(64), 1, 64) == pytest.approx(2 * 6 * between.alpha)


def test_links_of_a_mesh():
    cluster = a100s(64)
    assert cluster.link(1, 8) == cluster.inside and cluster.link(8, 2) == cluster.between
    uneven = Cluster(GPUS["a100"], 12, 6)  # ranks 0 and 4 share a host, 2 and 6 do not
    assert uneven.link(4, 2) == uneven.between and uneven.link(3, 2) == uneven.inside
    assert [cluster.members_per_host(stride, 8) for stride in (1, 2, 8, 16)] == [8, 4, 1, 1]
    assert cluster.between == AlphaBeta(cluster.assumptions.alpha_between, 1 / (25e9 * 0.8))


@pytest.mark.parametrize(
    ("gpus", "per_host", "words"),
    [
        (0, 8, "gpus 0, gpus-per-node 8: expected at least 1 of each"),
        (8, 0, "gpus 8, gpus-per-node 0: expected at least 1 of each"),
        (12, 8, "gpus 12 are not a multiple of gpus-per-node 8"),
    ],
)
def test_hosts_are_full_unless_one_holds_all_gpus(gpus, per_host, words):
    assert Cluster(GPUS["a100"], 4, 8).gpus == 4 and Cluster(GPUS["a100"], 16, 8).gpus == 16
    with pytest.raises(UsageError, match=f"^{words}$"):
        Cluster(GPUS["a100"], gpus, per_host)


def test_a_users_own_gpu(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text('{"like": "a100", "memory": 40e9}')
    assert find_gpu(str(path)) == replace(GPUS["a100"], memory=40e9)
    path.write_text('{"like": "h100", "products": 0.7}')
    assert find_gpu(str(path)) == replace(GPUS["h100"], products=0.7)
    path.write_text('{"peak": 1e15, "memory": 1e11, "memory_bandwidth": 1e12, "inside": 1e11, "between": 1e10}')
    assert find_gpu(str(path)) == Gpu(1e15, 1e11, 1e12, 1e11, 1e10)
    assert (find_gpu(str(path)).products, find_gpu(str(path)).attention) == (0.75, 0.61)
    path.write_text('{"like": "h100", "attention": 2}')
    with pytest.raises(UsageError, match="attention is 2, expected a value from 1e-06 to 1"):
        find_gpu(str(path))
    for wrong in ("0", '"40e9"', "true", "NaN", "Infinity", "1" + 400 * "0", "[]", "null"):
        path.write_text('{"like": "a100", "memory": ' + wrong + "}")
        with pytest.raises(UsageError, match="memory is .*, expected a value from 1 to"):
            find_gpu(str(path))
    for text in ('{"memory": 1}', '{"like": "b", "memory": 1}', '{"like": [], "memory": 1}', "[]", "x", 10**5 * "["):
        path.write_text(text)
        with pytest.raises(UsageError):
            find_gpu(str(path))


def test_a_users_own_program(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text('{"like": "nanotron", "links": 0.5, "host_layer": 0}')
    mine, like = find_program(str(path)), PROGRAMS["nanotron"]
    assert mine.assumptions == replace(like.assumptions, links=0.5, host_layer=0)
    assert (mine.framework, mine.spread) == (like.framework, like.spread)
    assert mine.evidence.startswith("no run was compared with these values; of nanotron: without a pipeline")
    path.write_text("{}")
    assert find_program(str(path)) == PROGRAMS["megatron"] == find_program("Megatron")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"like": "pytorch"}', "\"like\" is 'pytorch', expected one of megatron, megatron-2021, "),
        ('{"like": ["nanotron"]}', '"like" is'),
        ('{"link": 1}', "no program has 'link'; did you mean links?"),
        ('{"kept": {}}', "no program has 'kept'"),
        ('{"pairwise": true}', "no program has 'pairwise'"),
        ('{"links": true}', "links is True, expected a value from 1e-06 to 1"),
        ('{"links": 0}', "links is 0, expected"),
        ('{"products": 1.5}', "products is 1.5, expected a value from 1e-06 to 1"),
        ('{"host_layer": -1}', "host_layer is -1, expected a value from 0 to 1e"),
        ('{"half_work": NaN}', "half_work is nan"),
        ("[]", "mine.json"),
    ],
)
def test_a_file_that_describes_no_program(tmp_path, text, words):
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        find_program(str(path))
    assert words in str(caught.value)


def test_a_gpu_file_that_is_a_pipe_or_a_device_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (str(tmp_path / "pipe"), "/dev/zero", str(tmp_path)):
        with pytest.raises(UsageError, match="not a regular file"):
            find_gpu(path)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_fraction_of_a_data_sheet_is_at_most_1(name):
    known = PROGRAMS[name].assumptions
    for fraction in (known.products, known.copies, known.links, known.cards, known.memory_used):
        assert fraction is None or 0 < fraction <= 1
    assert 1 <= known.all_reduce <= 2  # as many reduce-scatters: a ring takes 2, a tree fewer
