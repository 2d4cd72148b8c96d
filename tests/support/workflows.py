"""The pipeline workflow in API format, for tests and benchmarks that vary it."""

from __future__ import annotations

from typing import Any

NODES = {
    "config": "ShardedParallelConfig",
    "load": "ShardedLoadPipeline",
    "encode": "ShardedEncodePrompt",
    "sample": "ShardedSample",
    "decode": "ShardedDecode",
    "save": "SaveImage",
}
DEGREES = {"tensor": 1, "ulysses": 1, "ring": 1, "stage": 1, "replica": 1}


def pipeline_prompt(
    pipeline_name: str = "shapes-flux",
    *,
    strategy: str = "manual",
    devices: str = "cpu",
    text: str = "a red circle on blue",
    dtype: str = "float32",
    seed: int = 7,
    steps: int = 8,
    width: int = 96,
    height: int = 96,
    **degrees: int,
) -> dict[str, dict[str, Any]]:
    """Config -> load -> encode -> sample -> decode -> save; node ids are the keys of NODES."""
    inputs: dict[str, dict[str, Any]] = {
        "config": {"strategy": strategy, "devices": devices, "attention": "auto", **DEGREES, **degrees},
        "load": {"pipeline_name": pipeline_name, "dtype": dtype, "parallel_config": ["config", 0]},
        "encode": {"pipeline": ["load", 0], "text": text},
        "sample": {
            "pipeline": ["load", 0],
            "positive": ["encode", 0],
            "seed": seed,
            "steps": steps,
            "guidance": 3.5,
            "width": width,
            "height": height,
            "batch_size": 1,
            "denoise": 1.0,
        },
        "decode": {"pipeline": ["load", 0], "samples": ["sample", 0]},
        "save": {"images": ["decode", 0], "filename_prefix": "sharded"},
    }
    return {name: {"class_type": NODES[name], "inputs": values} for name, values in inputs.items()}


def add_tensor_plan(prompt: dict[str, dict[str, Any]], plan: str) -> None:
    """Put a Tensor Plan node, "plan", between config and load."""
    inputs = {"plan": plan, "parallel_config": ["config", 0]}
    prompt["plan"] = {"class_type": "ShardedTensorPlan", "inputs": inputs}
    prompt["load"]["inputs"]["parallel_config"] = ["plan", 0]
