"""The pipeline workflow in API format, for tests and benchmarks that vary it."""

from __future__ import annotations

from typing import Any

from tools import ROOT, workflow

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


def saved_demo(steps: int = 8, seed: int = 7, **config: Any) -> dict[str, Any]:
    """The shipped pipeline workflow as the editor saves it, on two ranks of the CPU; `config` are Parallel Config's.

    It runs on the same slot as `pipeline_prompt(tensor=2)`.
    """
    saved = workflow.load(ROOT / "workflows" / "flux_prefer_tensor.json")
    layout = {"strategy": "manual", "devices": "cpu", **DEGREES, "tensor": 2, **config}
    for node_type, values in (
        ("ShardedParallelConfig", layout),
        ("ShardedSample", {"steps": steps, "seed": seed}),
    ):
        (node,) = (one for one in saved["nodes"] if one["type"] == node_type)
        # The editor saves what it does after a run behind the seed, as if that were an input.
        names = [one["name"] for one in node["inputs"] if "widget" in one]
        if "seed" in names:
            names.insert(names.index("seed") + 1, "")
        for name, value in values.items():
            node["widgets_values"][names.index(name)] = value
    return saved
