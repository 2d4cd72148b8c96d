"""Runs a module on the ranks of a torchrun and hands over the rows they emit while they run.

Rows go through a file and not through standard output: gloo of torch 2.9 prints there too, in the middle of a line.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools import ROOT

_ROWS = "SHARDED_TEST_ROWS"  # tells the ranks the file


def emit(row: dict[str, Any]) -> None:
    """Called in a rank: hand `row` to whoever started it."""
    with Path(os.environ[_ROWS]).open("a", encoding="utf-8") as rows:
        rows.write(json.dumps(row) + "\n")


def torchrun(directory: Path, ranks: int, module: str, *arguments: str) -> Iterator[dict[str, Any]]:
    """The rows that the ranks of a group running `module` emit, as they come."""
    own = Path(tempfile.mkdtemp(dir=directory))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", str(own / "meeting")]
    command += ["--rdzv-conf", "store_type=file", "--rdzv-id", "tests"]
    command += ["--log-dir", str(own / "logs")]  # by default in /tmp, and left there
    command += ["-m", module, *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    environment |= {"GLOO_SOCKET_IFNAME": "lo", _ROWS: str(own / "rows")}
    (own / "rows").touch()
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
    try:
        with (own / "rows").open(encoding="utf-8") as rows:
            ended = False
            while not ended:
                ended = process.poll() is not None
                while line := rows.readline():
                    yield json.loads(line)
                time.sleep(0.05)
    finally:
        process.terminate()
        process.wait()
