"""How much of the full-size models a rank of four holds: a selection of `python -m tests.plan_share`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.parity.matrix import CASES
from tests.plan_share import share
from tests.support.threads import one_torch_thread


@pytest.fixture(scope="module", autouse=True)
def polite() -> Iterator[None]:
    with one_torch_thread():
        yield


@pytest.mark.parametrize(
    "name",
    [
        "FluxTransformer2DModel",
        "Flux2Transformer2DModel",
        "QwenImageTransformer2DModel",
        "WanTransformer3DModel",
        "LTXVideoTransformer3DModel",
        "HunyuanVideoTransformer3DModel",
        "SD3Transformer2DModel",
        "ZImageTransformer2DModel",
        "ChromaTransformer2DModel",
    ],
)
def test_a_rank_of_four_holds_little_more_than_a_quarter(name: str) -> None:
    assert 0.25 <= share(CASES[name], 4) <= 0.30
