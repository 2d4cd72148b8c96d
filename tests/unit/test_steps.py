"""Which step a stock sampler makes, from the noise levels that ComfyUI hands down."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from tools import ROOT


def _module() -> Any:
    """The file by itself: the rest of its package needs ComfyUI."""
    spec = importlib.util.spec_from_file_location("steps", ROOT / "nodes" / "native" / "steps.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


step_of = _module().step_of
LEVELS = torch.tensor([1.0, 0.9, 0.7, 0.4, 0.0])


def at(level: float, levels: torch.Tensor = LEVELS, batch: int = 1) -> Any:
    return step_of({"sample_sigmas": levels, "sigmas": torch.full((batch,), level)})


def test_each_level_is_a_step() -> None:
    assert [at(float(level)) for level in LEVELS[:-1]] == [(0, 4), (1, 4), (2, 4), (3, 4)]
    assert at(0.7, batch=4) == (2, 4)


def test_a_level_between_two_is_in_the_earlier_step() -> None:
    assert (at(0.95), at(0.5), at(0.1)) == ((0, 4), (2, 4), (3, 4))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_rounding_moves_no_step(dtype: torch.dtype) -> None:
    levels = torch.linspace(14.6, 0.0, 31).to(dtype)
    found = [at(float(level) * (1 - 5e-5), levels) for level in levels[:-1]]
    assert found == [(step, 30) for step in range(30)]


def test_the_end_is_in_the_last_step_and_what_is_above_in_the_first() -> None:
    assert (at(0.0), at(2.0)) == ((3, 4), (0, 4))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sample_sigmas": LEVELS},
        {"sigmas": LEVELS[:1]},
        {"sample_sigmas": None, "sigmas": LEVELS[:1]},
        {"sample_sigmas": LEVELS.flip(0), "sigmas": LEVELS[1:2]},  # unsampling
        {"sample_sigmas": LEVELS[:1], "sigmas": LEVELS[:1]},
        {"sample_sigmas": LEVELS[None], "sigmas": LEVELS[:1]},
        {"sample_sigmas": LEVELS, "sigmas": torch.empty(0)},
        {"sample_sigmas": [1.0, 0.0], "sigmas": LEVELS[:1]},
    ],
)
def test_where_it_cannot_be_known_nothing_is_said(options: dict[str, Any]) -> None:
    assert step_of(options) is None
