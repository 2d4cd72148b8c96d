"""The tensor axis on real ranks: weighted shares, a user's own plan, a compiled model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from runtime.group import GROUPS
from runtime.spec import ParallelConfig, ShardedError
from tests.parity import matrix
from tests.support.groups import layout_of, make_slot, sample
from tests.support.models import FluxSize, make_flux
from tests.support.reference import Run, max_rel, reference_latents, reference_pipeline
from tests.support.torchrun import torchrun

RUN = Run(width=80, height=112, seed=6, steps=3, batch_size=2)
# Not all that could be divided: attention of the double blocks, one feed-forward, and modulation in both styles.
PLAN = {
    **{f"transformer_blocks.*.attn.{name}": "colwise" for name in ("to_q", "to_k", "to_v")},
    **{f"transformer_blocks.*.attn.add_{name}_proj": "colwise" for name in ("q", "k", "v")},
    "transformer_blocks.*.attn.to_out.0": "rowwise",
    "transformer_blocks.*.attn.to_add_out": "rowwise",
    "transformer_blocks.0.ff.net.0.proj": "colwise",
    "transformer_blocks.0.ff.net.2": "rowwise",
    "transformer_blocks.*.norm1.linear": "rowwise_split_input",
    "single_transformer_blocks.*.norm.linear": "colwise_gathered",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_flux(tmp_path_factory.mktemp("axis") / "flux", seed=31, size=FluxSize(heads=5))


@pytest.fixture(scope="module")
def expected(folder: Path) -> torch.Tensor:
    return reference_latents(reference_pipeline(folder), RUN)


@pytest.fixture(scope="module", autouse=True)
def groups_end() -> Iterator[None]:
    yield
    GROUPS.close_all()


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(layout_of(tensor=3, shares=(3, 1, 1)), marks=pytest.mark.slow),
        pytest.param(layout_of(tensor=3, tensor_plan=json.dumps(PLAN)), marks=pytest.mark.slow),
        layout_of(tensor=3, tensor_plan=json.dumps(PLAN), shares=(1, 2, 2)),
    ],
    ids=["weighted shares", "own plan", "own plan in weighted shares"],
)
def test_latents_equal_one_process(config: ParallelConfig, folder: Path, expected: torch.Tensor) -> None:
    slot = make_slot(folder, config, "float32")
    assert max_rel(sample(slot, RUN), expected) <= 1e-5
    slot.unload()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"transformer_blocks.*.attn.to_p": "colwise"}, "matches nothing in FluxTransformer2DModel"),
        ({"transformer_blocks.*.attn.to_out.0": None}, "must be rowwise"),
        ({"transformer_blocks.*.attn.norm_q": "colwise"}, "Only Linear layers are split"),
        ({"single_transformer_blocks.*.proj_out": "rowwise"}, "must be packed_rowwise"),
    ],
    ids=["no match", "no partner", "a norm", "a plain style for a packed layer"],
)
def test_a_plan_the_model_cannot_follow_is_refused_and_the_group_stays(
    changes: dict[str, str | None], said: str, folder: Path, expected: torch.Tensor
) -> None:
    good = make_slot(folder, layout_of(tensor=3), "float32")
    good.ensure()
    pids = _pids()
    plan = {key: style for key, style in {**PLAN, **changes}.items() if style is not None}
    slot = make_slot(folder, layout_of(tensor=3, tensor_plan=json.dumps(plan)), "float32")
    with pytest.raises(ShardedError, match=said):
        slot.ensure()
    assert _pids() == pids
    assert max_rel(sample(good, RUN), expected) <= 1e-5


@pytest.mark.slow
def test_a_compiled_model_uses_functional_collectives_without_a_graph_break(tmp_path: Path) -> None:
    name = "FluxTransformer2DModel"
    matrix.write(matrix.CASES[name], 3, tmp_path)
    (found,) = torchrun(tmp_path, 2, "tests.support.compile_probe", str(tmp_path), name, "3")
    assert found["max_rel"] <= matrix.TOLERANCE
    assert any("all_reduce" in one for one in found["collectives"]), found
    assert any("all_gather" in one for one in found["collectives"]), found


def _pids() -> list[int]:
    return [rank["pid"] for rank in GROUPS.snapshot()[0]["ranks"]]
