"""The memory ledgers of all ranks as a JSON file, which `python -m visualize memory` draws."""

import json
from pathlib import Path
from typing import Any

from minipar.memory import KINDS, MemoryLedger


def save_ledgers(path: str, ledger: MemoryLedger, comm: Any) -> None:  # a Communicator
    """Write all ranks' ledgers on rank 0. All ranks of `comm` call it.

    {"kinds": [...], "ranks": [{"rank", "peak", "peak_parts", "moments": [[phase, bytes of each kind], ...]}, ...]}
    """
    account = {
        "rank": comm.rank,
        "peak": ledger.peak,
        "peak_parts": ledger.peak_parts,
        "moments": ledger.moments,
    }
    everyone = comm.all_gather_bytes(json.dumps(account).encode())
    if comm.rank == 0:
        content = {"kinds": KINDS, "ranks": [json.loads(data) for data in everyone]}
        Path(path).write_text(json.dumps(content))
