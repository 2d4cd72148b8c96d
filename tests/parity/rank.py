"""One rank of the matrix: loads every model folder sharded, runs one forward, compares. Run by torchrun.

Arguments: directory, seed, the layout as JSON, class names. The first rank emits a row per class.
"""

from __future__ import annotations

import datetime
import sys
import traceback
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from runtime.engine.backend import Backend
from runtime.engine.checkpoints.folder import open_folder
from runtime.engine.context import divide_sequence
from runtime.engine.mesh import build_mesh
from runtime.engine.transformer import load_transformer, plan_transformer
from runtime.environment import rank_environment
from runtime.spec import ParallelSpec
from tests.parity.matrix import CASES, difference, inputs_of, outputs
from tests.support.torchrun import emit


def main() -> None:
    directory, seed = Path(sys.argv[1]), int(sys.argv[2])
    parallel = msgspec.json.decode(sys.argv[3], type=ParallelSpec)
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    place = rank_environment()
    dist.init_process_group("cpu:gloo", timeout=datetime.timedelta(seconds=60))
    backend = Backend(torch.device("cpu"), place)
    for name in sys.argv[4:]:
        try:
            found = _compare(directory, name, seed, parallel, backend)
        except Exception as error:
            print(traceback.format_exc(), file=sys.stderr, flush=True)
            found = {"error": f"{type(error).__name__}: {error}"[:300]}
        if place.rank == 0:
            emit({"family": name, **found})
    dist.destroy_process_group()


def _compare(
    directory: Path, name: str, seed: int, parallel: ParallelSpec, backend: Backend
) -> dict[str, Any]:
    mesh = build_mesh(parallel, "cpu")
    start = backend.memory().host or 0
    planned = plan_transformer(open_folder(directory / name), parallel, mesh)
    model: Any = load_transformer(
        planned, backend, torch.float32, on_bytes=lambda _: None, cancelled=lambda: False
    )
    if parallel.context > 1:
        divide_sequence(model, mesh)
    grown = (backend.memory().host or 0) - start
    ours = outputs(CASES[name].run(model, inputs_of(CASES[name], seed, model.config)))
    expected = load_file(directory / name / "expected.st")
    reference = [expected[str(number)] for number in range(len(expected))]
    figures = torch.tensor([*difference(ours, reference), grown / 2**20])
    dist.all_reduce(figures, op=dist.ReduceOp.MAX)
    rel, absolute, peak = figures.tolist()
    return {"max_rel": rel, "max_abs": absolute, "peak_mb": round(peak, 1)}


if __name__ == "__main__":
    main()
