"""A sample of ComfyUI's own models against sharded MODELs (all of it: `python -m tests.parity_native`)."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.parity_native.verdict import as_text, passes
from tools import ROOT

LAYOUTS = {"FLUX.1": "tensor=2", "Qwen-Image": "ulysses=2", "Wan 2.1 / 2.2": "replica=2"}


@pytest.mark.slow
def test_each_family_samples_as_comfyuis_own_model_does() -> None:
    """In a process of its own: ComfyUI's `nodes` and the pack's cannot both be imported by that name."""
    command = [sys.executable, "-m", "tests.parity_native", "--quick", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    report = "\n".join(map(as_text, rows))
    print(report)
    assert done.returncode == 0 and all(map(passes, rows)), f"{report}\n{done.stderr[-4000:]}"
    assert {row["family"]: row["layout"] for row in rows} == LAYOUTS
    assert {row["dtype"] for row in rows} == {"float32", "bfloat16"}
