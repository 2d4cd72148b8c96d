"""Compiles the repeated blocks of a sharded transformer on the ranks of a torchrun; each compares with its eager run.

Arguments: a directory written by tests.parity.matrix, a class name, the seed. The first rank emits one row.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from runtime.engine.backend import Backend
from runtime.engine.checkpoints.folder import open_folder
from runtime.engine.mesh import build_mesh
from runtime.engine.transformer import load_transformer, plan_transformer
from runtime.environment import rank_environment
from runtime.spec import ParallelSpec
from tests.parity.matrix import CASES, difference, inputs_of, outputs
from tests.support.torchrun import emit


def main() -> None:
    directory, name, seed = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    place = rank_environment()
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo")
    backend = Backend(torch.device("cpu"), place)
    parallel = ParallelSpec(tensor=place.world_size)
    planned = plan_transformer(open_folder(directory / name), parallel, build_mesh(parallel, "cpu"))
    model: Any = load_transformer(
        planned, backend, torch.float32, on_bytes=lambda _: None, cancelled=lambda: False
    )
    inputs = inputs_of(CASES[name], seed, model.config)
    eager = outputs(model(**inputs))
    called: list[str] = []

    def record(graph: torch.fx.GraphModule, _inputs: object) -> Any:
        called.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    model.compile_repeated_blocks(fullgraph=True, backend=record)
    compiled = outputs(model(**inputs))
    found = {
        "max_rel": difference(compiled, eager)[0],
        "collectives": sorted({one for one in called if "all_reduce" in one or "all_gather" in one}),
    }
    if place.rank == 0:
        emit(found)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
