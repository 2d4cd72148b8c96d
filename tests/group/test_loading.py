"""Sharded loading of a checkpoint of more than 1 GB: what each rank reads, and what it ever holds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from runtime import planner
from runtime.spec import ParallelSpec
from tests.support.models import FluxSize, make_flux

ROOT = Path(__file__).resolve().parents[2]
BIG = FluxSize(heads=16, head_width=64, axes=(16, 24, 24), double_blocks=4, single_blocks=8)
MARGIN = 48 << 20  # bytes: one slice in flight, the allocator, Python


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_flux(tmp_path_factory.mktemp("big") / "flux", size=BIG)
    size = sum(file.stat().st_size for file in (folder / "transformer").glob("*.safetensors"))
    assert size >= 1 << 30, f"the checkpoint has {size} bytes"
    return folder


def load(folder: Path, axis: str, output: Path) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["--log-dir", str(output / "logs")]  # by default in /tmp, and left there
    command += ["-m", "tests.support.load_probe", str(folder), axis, str(output)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((output / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def reports(big: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the two ranks of tensor 2 say of their load."""
    return load(big, "tensor", tmp_path_factory.mktemp("reports"))


def test_no_rank_ever_holds_a_full_planned_weight(reports: list[dict[str, Any]]) -> None:
    for rank, report in enumerate(reports):
        read = {name: (stored, taken) for name, stored, taken in report["slices"]}
        planned = set(report["planned"])
        assert planned <= set(read)
        assert len(planned) > 100
        for name, (stored, taken) in read.items():
            assert taken == (stored // 2 if name in planned else stored), name
        full = 4 * sum(stored for stored, _ in read.values())
        held = report["weights"] + report["other"]
        print(
            f"rank {rank}: {full / 2**20:.0f} MiB in the file, {report['weights'] / 2**20:.0f} MiB held, "
            f"grew by {report['grown_at_peak'] / 2**20:.0f} MiB at most, {report['seconds']:.1f} s"
        )
        assert report["weights"] < 0.75 * full
        assert report["grown_at_peak"] <= held + MARGIN


def test_the_planner_knows_what_a_rank_will_hold(big: Path, reports: list[dict[str, Any]]) -> None:
    predicted = planner.rank_bytes(planner.check_pipeline(big), "float32", ParallelSpec(tensor=2))
    assert abs(predicted - reports[0]["weights"]) / reports[0]["weights"] < 0.01
