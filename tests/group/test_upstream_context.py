"""Known faults of upstream's context parallelism: each is shown first, then our right result on the same inputs.

A test that fails because upstream no longer does what it did is good news: what replaces it may go. The faults are
those of diffusers 0.42.x (`facts/parallel.md` 3.2, 3.5 and 5.1; diffusers #12568, #13277, #14316, #14725).
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from diffusers.models import attention_dispatch

from runtime.engine import dispatch
from runtime.engine.kernels import set_attention
from tests.parity.matrix import NOTICEABLE, TOLERANCE
from tests.support import upstream
from tests.support.torchrun import torchrun
from tests.support.upstream_probe import PROBES, flux

SILENT = "silently wrong"
# What upstream does: it raises an error with this text, or gives a wrong result without a word.
FAULTS = {
    "ring with a mask": SILENT,
    "ring of any length with a mask": "does not support non-None attn_mask",
    "LTX with its mask, ulysses": "size of tensor a .* must match",
    "LTX with its mask, ring": SILENT,
    "LTX-2 with its mask": "size of tensor a .* must match",
    "LTX-2 without a mask": "Expected 8 arguments but got 0",
    "Helios of another depth than 40": "'2' is not a submodule",
    "residuals of a ControlNet, Flux": r"size of tensor a \(8\) must match",
    "residuals of a ControlNet, Qwen-Image": r"size of tensor a \(8\) must match",
    "legacy processors": SILENT,
    "a picture that does not divide": "must be divisible by mesh size",
    "a text that does not divide": "must be divisible by mesh size",
    "heads that do not divide": "is invalid for input of size",
    "ring of native attention": "does not support return_lse",
    "uneven parts gathered by gloo": "invalid tensor size",
    "grouped queries, ulysses": "GQA is not yet supported",
    "grouped queries, ring": "GQA is not yet supported",
    "unified with a mask": "expanded size of the tensor",
    "unified over lengths that do not divide": "cannot be enabled when ring_degree > 1",
    "ulysses of any length with a mask": SILENT,
    "text shorter than the ranks": "Cannot shard tensor",
}


Rows = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """Every rank's row of every fault, and of the memory in every dtype."""
    directory = tmp_path_factory.mktemp("upstream")
    rows: Rows = {fault: [] for fault in FAULTS}
    for ranks in PROBES:
        for row in torchrun(directory, ranks, "tests.support.upstream_probe"):
            rows.setdefault(row.get("fault") or row["memory"], []).append(row)
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_upstream_is_wrong_where_ours_is_right(fault: str, found: Rows) -> None:
    rows = found[fault]
    ranks = next(ranks for ranks, probes in PROBES.items() if fault in probes)
    assert len(rows) == ranks, f"only {len(rows)} of {ranks} ranks came to an end"
    assert any(_shows(FAULTS[fault], row["upstream"]) for row in rows), ("upstream has changed", rows)
    for row in rows:
        assert isinstance(row["ours"], float), row
        assert row["ours"] <= TOLERANCE, row


def _shows(fault: str, upstreams: float | str) -> bool:
    if isinstance(upstreams, float):
        return fault == SILENT and upstreams >= NOTICEABLE * TOLERANCE
    return fault != SILENT and re.search(fault, upstreams) is not None


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["torch.float32", "torch.bfloat16"])
def test_a_ring_holds_less_than_upstreams_and_the_same_at_any_degree(dtype: str, found: Rows) -> None:
    rows = found[dtype]
    assert sorted(row["ranks"] for row in rows) == sorted(ranks for ranks in PROBES for _ in range(ranks))
    assert all(row["ours"] < row["upstream"] for row in rows), rows
    peaks = [row["ours"] for row in rows]
    assert max(peaks) <= 1.05 * min(peaks), rows


@pytest.mark.parametrize("attention", [upstream.original, dispatch._dispatched], ids=["upstream", "ours"])
def test_causal_attention_is_refused_by_both(attention: Any) -> None:
    one = torch.zeros(1, 4, 2, 8)
    with pytest.raises(ValueError, match="[Cc]ausal attention"):
        attention(one, one, one, is_causal=True, forward_op=None, backward_op=None, _parallel_config=None)


def test_the_attention_backend_of_a_model_is_its_own_with_ours_only() -> None:
    active = attention_dispatch._AttentionBackendRegistry.get_active_backend
    before, _ = active()
    model = flux()
    set_attention(model, "cudnn")
    assert model.transformer_blocks[0].attn.processor._attention_backend == "_native_cudnn"
    assert active()[0] == before
    with attention_dispatch.attention_backend("native"):
        flux().set_attention_backend("_native_cudnn")
        assert active()[0] == "_native_cudnn", (
            "upstream has changed: a model's choice no longer reaches others"
        )
    assert active()[0] == before
