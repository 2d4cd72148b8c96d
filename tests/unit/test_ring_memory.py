"""What a ring holds at a time, by the allocator's profile: two parts of the keys and values, whatever its degree.

In one process: communication is replaced by buffers that nothing fills. Real rings of two and four ranks are in
`tests/group/test_upstream_context.py`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from diffusers.models import attention_dispatch

from runtime.engine import attention
from tests.support import upstream
from tests.support.allocated import peak_bytes

LOCAL = (1, 512, 8, 64)  # of a rank: batch, tokens, heads, width
DEGREES = (2, 4, 8)


def ours(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ring: int) -> None:
    tokens = attention.Tokens(((LOCAL[1],) * ring,))
    axes = attention.ContextAxes(ring=ring, ulysses=1, ring_rank=0, ulysses_rank=0)
    with mock.patch.object(attention, "_pass_on", lambda *_: []):
        attention.context_attention(query, key, value, None, None, queries=tokens, keys=tokens, axes=axes)


def upstreams(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ring: int) -> None:
    def gathered(part: torch.Tensor, gather_dim: int, group: Any) -> torch.Tensor:
        return part.new_empty(ring * part.shape[0])

    context: Any = SimpleNamespace(
        ring_degree=ring,
        ulysses_degree=1,
        ring_anything=False,
        convert_to_fp32=True,
        _ring_local_rank=0,
        _ring_mesh=mock.Mock(),
    )
    with upstream.running(), mock.patch.object(attention_dispatch.funcol, "all_gather_tensor", gathered):
        upstream.attention(query, key, value, SimpleNamespace(context_parallel_config=context))


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def peaks(request: pytest.FixtureRequest) -> dict[str, list[float]]:
    """Of every degree, as multiples of a rank's keys; their own tensors, which the caller holds, do not count."""
    with torch.no_grad():
        own = torch.randn(3, *LOCAL).to(request.param).unbind()
        return {
            path.__name__: [peak_bytes(lambda: path(*own, ring)) / own[0].nbytes for ring in DEGREES]  # noqa: B023
            for path in (ours, upstreams)
        }


def test_the_peak_is_the_same_at_any_degree(peaks: dict[str, list[float]]) -> None:
    assert max(peaks["ours"]) <= 1.05 * min(peaks["ours"]), peaks


def test_it_is_below_upstreams_which_gathers_all_keys(peaks: dict[str, list[float]]) -> None:
    for mine, other in zip(peaks["ours"], peaks["upstreams"], strict=True):
        assert mine < other, peaks
    assert peaks["upstreams"][-1] > 1.5 * peaks["upstreams"][0], ("upstream has changed", peaks)
