"""The plan that a new Tensor Plan node starts with is the one the pack takes for FLUX.1 by itself."""

from __future__ import annotations

import json
from typing import Any

import pytest

from runtime.engine.loading import empty_model
from runtime.engine.plans import tensor_plan
from runtime.plan_text import read_plan_text
from tests.support.models import DEMO
from tests.support.refusals import refused
from tools import ROOT


def default_plan() -> str:
    """From the recorded schema: the nodes cannot be imported without ComfyUI."""
    recorded = json.loads((ROOT / "tests" / "unit" / "node_schema.json").read_text(encoding="utf-8"))
    return str(recorded["ShardedTensorPlan"]["input"]["required"]["plan"][1]["default"])


def demo_config() -> dict[str, Any]:
    return dict(json.loads((DEMO / "transformer" / "config.json").read_text(encoding="utf-8")))


@pytest.mark.parametrize("shares", [(1, 1), (1, 1, 1), (24, 16)])
@pytest.mark.parametrize(
    "config", [{}, {"guidance_embeds": True}, demo_config()], ids=["schnell", "dev", "demo"]
)
def test_the_default_of_the_node_is_the_packs_own_plan(
    config: dict[str, Any], shares: tuple[int, ...]
) -> None:
    own = {key: value for key, value in config.items() if not key.startswith("_")}
    model = empty_model("FluxTransformer2DModel", own)
    assert tensor_plan(model, shares, default_plan()) == tensor_plan(model, shares)


@pytest.mark.parametrize("text", ["", " \n", "{}"])
def test_an_empty_plan_is_refused_with_an_example(text: str) -> None:
    with refused(
        "The tensor plan holds no keys", "module path -> style", '{"blocks.*.attn.to_q": "colwise"}'
    ):
        read_plan_text(text)
