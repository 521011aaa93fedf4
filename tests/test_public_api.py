"""Claims about `import minipar`: the public names, found when they are used, and nothing changed by importing."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import minipar

ROOT = Path(__file__).parents[1]
CONTRACT = (
    "GPT GPTConfig AdamW DistributedDataParallel shard fully_shard launch Module DeviceMesh PipelineModule "
    "ZeroOptimizer VocabParallelEmbedding ColumnParallelLinear RowParallelLinear"
).split()


def test_every_public_name_is_there_and_documented():
    assert [name for name in minipar.__all__ if not getattr(minipar, name).__doc__] == []
    assert set(CONTRACT) <= set(minipar.__all__) == set(dir(minipar))


def test_every_public_name_is_shown_to_a_reader():
    files = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("docs/examples/*"), *ROOT.glob("chapters/**/*.py")]
    words = set(re.findall(r"\w+", " ".join(path.read_text(encoding="utf-8") for path in files if path.is_file())))
    assert set(minipar.__all__) - words == set()


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="Adam"):
        minipar.Adam  # noqa: B018


def test_importing_changes_nothing_in_the_process():
    program = (
        "import os, sys; before = dict(os.environ); import minipar; "
        "assert dict(os.environ) == before; assert 'numpy' not in sys.modules; "
        "import numpy, threadpoolctl; count = [l['num_threads'] for l in threadpoolctl.threadpool_info()]; "
        "import minipar.train.trainer; "
        "assert [l['num_threads'] for l in threadpoolctl.threadpool_info()] == count; assert dict(os.environ) == before"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
