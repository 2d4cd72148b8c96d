"""Single files of the video families and the newer ones: told apart, their configs inferred, their weights found."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from safetensors.torch import save_file

from runtime.engine.checkpoints.single_file import open_single_file
from runtime.engine.checkpoints.source import Index, WeightSource
from runtime.families.family import Family, Shapes
from runtime.families.reading import (
    count,
    head_width,
    rotary_16_56_56,
    rotary_32_48_48,
    rotary_quarters,
)
from runtime.families.table import FAMILIES
from tests.support.original_layout_cases import PUBLISHED, TINY
from tests.support.original_layouts_video import Case

CASES = {case.name: case for case in TINY}


def in_full(model_class: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """`config` with the class's defaults for what it leaves out, and tuples for lists."""
    parameters = inspect.signature(getattr(diffusers, model_class).__init__).parameters
    assert config.keys() <= parameters.keys()
    defaults = {name: one.default for name, one in parameters.items() if name != "self"}
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in {**defaults, **config}.items()
    }


def sizes(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {key: tuple(tensor.shape) for key, tensor in tensors.items()}


def family_of(shapes: Shapes) -> Family:
    """The family that takes the file for its own; no two may."""
    (family,) = [family for family in FAMILIES if family.recognises(shapes)]
    return family


def whole(source: WeightSource) -> Index:
    return tuple(slice(0, size) for size in source.shape)


def read_by_ranks(source: WeightSource, ranks: int, dim: int) -> torch.Tensor:
    """`source` read in `ranks` slices along `dim`, as even as they can be, and put together again."""
    edges = [rank * source.shape[dim] // ranks for rank in range(ranks + 1)]
    before, after = whole(source)[:dim], whole(source)[dim + 1 :]
    slices = [slice(edges[rank], edges[rank + 1]) for rank in range(ranks)]
    return torch.cat([source.read((*before, one, *after)) for one in slices], dim=dim)


# ---- every variant


@pytest.mark.parametrize("name", CASES)
def test_a_single_file_holds_the_model_that_was_written(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    model = case.model()
    file = tmp_path / "model.safetensors"
    written = {case.prefix + key: tensor.contiguous() for key, tensor in case.original(model).items()}
    save_file({**written, **case.beside}, file)

    checkpoint = open_single_file(file)

    assert checkpoint.model_class == case.model_class
    assert in_full(case.model_class, checkpoint.config) == in_full(case.model_class, case.config)
    with torch.device("meta"):
        built = getattr(diffusers, case.model_class)(**checkpoint.config)
    expected = model.state_dict()
    assert sizes(built.state_dict()) == sizes(expected)
    assert {key: tuple(source.shape) for key, source in checkpoint.sources.items()} == sizes(expected)
    for key, tensor in expected.items():
        source = checkpoint.sources[key]
        assert torch.equal(source.read(whole(source)), tensor), key
        for ranks, dim in ((2, 0), (3, tensor.ndim - 1)):
            assert torch.equal(read_by_ranks(source, ranks, dim), tensor), key


@pytest.mark.parametrize("name", CASES)
def test_a_file_is_of_one_family_only(name: str) -> None:
    case = CASES[name]
    shapes = case.shapes()
    assert family_of(shapes).model_class == case.model_class


@pytest.mark.parametrize("case", PUBLISHED, ids=lambda case: case.name)
def test_the_shapes_of_published_models_give_their_published_configs(case: Case) -> None:
    shapes = case.shapes()
    family = family_of(shapes)
    assert family.model_class == case.model_class
    assert in_full(case.model_class, family.config(shapes)) == in_full(case.model_class, case.config)


# ---- variants that are refused, or are of no family


@pytest.mark.parametrize(
    ("name", "key", "reason"),
    [
        ("wan t2v", "control_adapter.conv.weight", "Fun Camera"),
        ("wan t2v", "casual_audio_encoder.encoder.final_linear.weight", "S2V"),
        ("wan i2v", "audio_proj.audio_proj_glob_1.layer.bias", "HuMo"),
        ("wan t2v", "ref_conv.weight", "reference image"),
        ("wan vace", "vace_blocks.2.after_proj.weight", "cannot be told"),
        ("wan animate", "face_adapter.fuser_blocks.2.q_norm.weight", "cannot be told"),
        ("wan animate", "motion_encoder.enc.net_app.convs.9.weight", "only 512"),
        ("wan t2v", "blocks.3.modulation", "has no blocks.2"),
        ("mochi", "blocks.48.mod_x.weight", "49 blocks"),
        ("sana", "blocks.0.attn.q_norm.weight", "1.5 or Sprint"),
        ("cosmos predict 2.5", "img_context_proj.0.weight", "Transfer"),
        ("minimax-h3", "adaln_t_table", "pruned"),
    ],
)
def test_a_variant_that_is_not_supported_is_refused_with_its_reason(name: str, key: str, reason: str) -> None:
    case = CASES[name]
    shapes = {**case.shapes(), key: (8, 4, 1, 1)}
    if "convs.9" in key:  # one more residual block: a picture of twice the size
        shapes["motion_encoder.enc.net_app.convs.8.conv2.1.weight"] = (8, 8, 3, 3)
    family = family_of(shapes)
    with pytest.raises(ValueError, match=reason):
        family.config(shapes)


@pytest.mark.parametrize(
    "key", ["vision_in.proj.0.weight", "cond_type_embedding.weight", "byt5_in.fc1.weight"]
)
def test_later_hunyuan_models_are_not_taken_for_the_first(key: str) -> None:
    case = CASES["hunyuan t2v"]
    shapes = {**case.shapes(), key: (4, 4)}
    assert not [family.name for family in FAMILIES if family.recognises(shapes)]


@pytest.mark.parametrize("name", ["wan t2v", "flux.2 dev", "ltx", "ltx-2.0", "hunyuan t2v", "cosmos 1.0"])
def test_a_config_names_the_key_that_it_misses(name: str) -> None:
    case = CASES[name]
    shapes = case.shapes()
    family = family_of(shapes)
    for key in shapes:
        rest = {other: one for other, one in shapes.items() if other != key}
        if family.recognises(rest):
            try:
                family.config(rest)
            except ValueError as error:
                assert key in str(error)


# ---- what shapes do not tell


@pytest.mark.parametrize(
    ("width", "published", "expected"),
    [
        (5120, 128, 128),
        (1536, 128, 128),
        (128, 128, 128),  # as published rather than four heads of 32
        (3072, 256, 256),
        (48, 128, 12),
        (64, 128, 16),
        (96, 128, 16),
        (144, 128, 16),
        (288, 128, 32),
        (320, 128, 64),
        (2240, 32, 32),
    ],
)
def test_the_width_of_heads(width: int, published: int, expected: int) -> None:
    assert head_width(width, published) == expected


def test_no_width_of_heads_fits_every_width() -> None:
    with pytest.raises(ValueError, match="31"):
        head_width(31, 128)


def test_rotary_widths_are_even_and_fill_a_head() -> None:
    for head in range(8, 257, 2):
        for axes in (rotary_16_56_56(head), rotary_32_48_48(head), rotary_quarters(head)):
            assert sum(axes) == head
            assert all(width % 2 == 0 and width > 0 for width in axes)


def test_rotary_widths_of_published_heads() -> None:
    assert rotary_16_56_56(128) == (16, 56, 56)
    assert rotary_32_48_48(128) == (32, 48, 48)
    assert rotary_quarters(128) == (32, 32, 32, 32)


def test_blocks_are_counted_without_a_gap() -> None:
    assert (
        count({"blocks.0.a": (1,), "blocks.1.a": (1,), "blocks.norm": (1,), "more.2.a": (1,)}, "blocks.") == 2
    )
    assert count({}, "blocks.") == 0
    with pytest.raises(ValueError, match="no blocks.1, though it has blocks.2"):
        count({"blocks.0.a": (1,), "blocks.2.a": (1,)}, "blocks.")
