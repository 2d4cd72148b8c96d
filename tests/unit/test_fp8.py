"""fp8 weights in every convention that ComfyUI reads: dequantised only where indexed, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from runtime.engine.checkpoints.files import StoredTensor, open_files
from runtime.engine.checkpoints.fp8 import dequantised
from runtime.engine.checkpoints.single_file import open_single_file
from runtime.engine.checkpoints.source import Index, WeightSource
from tests.support.original_layouts import original_layout
from tests.support.refusals import refused

OUT, IN = 7, 12
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
NAMES = {E4M3: "float8_e4m3fn", E5M2: "float8_e5m2"}
SCALE_SHAPES: dict[str, tuple[int, ...]] = {
    "one": (),
    "one in a list": (1,),
    "one in a table": (1, 1),
    "per channel": (OUT,),
    "per channel, column": (OUT, 1),
}
Files = tuple[dict[str, torch.Tensor], dict[str, str]]


def note(**fields: Any) -> torch.Tensor:
    return torch.tensor(list(json.dumps(fields).encode()), dtype=torch.uint8)


def weight(dtype: torch.dtype = E4M3, *shape: int) -> torch.Tensor:
    return torch.randn(shape or (OUT, IN), generator=torch.Generator().manual_seed(1)).mul(50).to(dtype)


def scale(name: str = "one", dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.rand(SCALE_SHAPES[name], generator=torch.Generator().manual_seed(2)).add(0.01).to(dtype)


def opened(path: Path, tensors: Mapping[str, torch.Tensor], metadata: dict[str, str] | None = None) -> Any:
    save_file(dict(tensors), path / "m.safetensors", metadata)
    return open_files([path / "m.safetensors"])


def whole(shape: Any) -> Index:
    return tuple(slice(0, size) for size in shape)


def parts() -> Iterator[Index]:
    for ranks in (1, 2, 3):
        for rank in range(ranks):
            yield slice(OUT * rank // ranks, OUT * (rank + 1) // ranks), slice(0, IN)
            yield slice(0, OUT), slice(IN * rank // ranks, IN * (rank + 1) // ranks)
    yield slice(2, 2), slice(0, IN)


def conventions(dtype: torch.dtype, one: torch.Tensor, layer: str = "a.b") -> dict[str, Files]:
    """The same weight as each writer stores it: tensors and the header's notes."""
    stored = {f"{layer}.weight": weight(dtype), f"{layer}.bias": torch.ones(OUT)}
    noted = json.dumps({"format_version": "1.0", "layers": {layer: {"format": NAMES[dtype]}}})
    named = json.dumps({"format_version": "1.0", "layers": {layer: NAMES[dtype]}})
    new = {**stored, f"{layer}.weight_scale": one, f"{layer}.input_scale": torch.tensor(0.5)}
    return {
        "scaled_fp8": (
            {
                **stored,
                f"{layer}.scale_weight": one,
                f"{layer}.scale_input": torch.tensor(0.5),
                "scaled_fp8": torch.zeros(2, dtype=dtype),
            },
            {},
        ),
        "no marker": ({**stored, f"{layer}.scale_weight": one}, {}),
        "bare weight_scale": (new, {}),
        "comfy_quant": ({**new, f"{layer}.comfy_quant": note(format=NAMES[dtype])}, {}),
        "full precision": (
            {**new, f"{layer}.comfy_quant": note(format=NAMES[dtype], full_precision_matrix_mult=True)},
            {},
        ),
        "header": (new, {"_quantization_metadata": noted}),
        "header, as documented": (new, {"_quantization_metadata": named}),
    }


@pytest.mark.parametrize("shape", SCALE_SHAPES)
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("convention", conventions(E4M3, torch.tensor(1.0)))
def test_every_convention_reads_as_the_weight_dequantised_whole(
    tmp_path: Path, convention: str, dtype: torch.dtype, shape: str
) -> None:
    tensors, metadata = conventions(dtype, scale(shape))[convention]
    found = dequantised(opened(tmp_path, tensors, metadata))
    assert found.keys() == {"a.b.weight", "a.b.bias"}, "only weights are left"
    source, one = found["a.b.weight"], scale(shape)
    expected = weight(dtype).to(torch.float32) * one.reshape(-1, 1)
    assert source.shape == (OUT, IN) and source.item_bytes == 1 and "'a.b.weight'" in source.where
    for index in parts():
        part = source.read(index)
        assert part.dtype == torch.float32 and torch.equal(part, expected[index]), index


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_fp8_without_a_scale_stands_for_itself(tmp_path: Path, dtype: torch.dtype) -> None:
    source = dequantised(opened(tmp_path, {"a.weight": weight(dtype)}))["a.weight"]
    for index in parts():
        assert torch.equal(source.read(index).to(torch.float32), weight(dtype).to(torch.float32)[index])


def test_a_marked_file_may_hold_layers_without_a_scale(tmp_path: Path) -> None:
    tensors = {
        "a.weight": weight(),
        "b.weight": weight(),
        "b.scale_weight": scale(),
        "scaled_fp8": weight(E4M3, 1),
    }
    found = dequantised(opened(tmp_path, tensors))
    assert torch.equal(found["a.weight"].read(whole((OUT, IN))).float(), weight().float())
    assert torch.equal(found["b.weight"].read(whole((OUT, IN))), weight().float() * scale())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_scale_may_be_stored_in_half_precision(tmp_path: Path, dtype: torch.dtype) -> None:
    one = scale("per channel", dtype)
    source = dequantised(opened(tmp_path, {"a.weight": weight(), "a.weight_scale": one}))["a.weight"]
    assert torch.equal(source.read(whole((OUT, IN))), weight().float() * one.float()[:, None])


def test_convolutions_have_scales_per_output_channel_too(tmp_path: Path) -> None:
    kernel = weight(E4M3, OUT, 2, 3, 3)
    source = dequantised(opened(tmp_path, {"a.weight": kernel, "a.weight_scale": scale("per channel")}))[
        "a.weight"
    ]
    index = (slice(2, 5), slice(0, 1), slice(0, 3), slice(0, 3))
    expected = kernel.float() * scale("per channel")[:, None, None, None]
    assert torch.equal(source.read(index), expected[index])


def test_a_part_reads_its_rows_and_their_scales_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = dequantised(opened(tmp_path, {"a.weight": weight(), "a.weight_scale": scale("per channel")}))
    seen, read = [], StoredTensor.read

    def noting(self: StoredTensor, index: Index) -> torch.Tensor:
        seen.append((self.key, index))
        return read(self, index)

    monkeypatch.setattr(StoredTensor, "read", noting)
    found["a.weight"].read((slice(2, 4), slice(3, 9)))
    assert seen == [("a.weight", (slice(2, 4), slice(3, 9))), ("a.weight_scale", (slice(2, 4),))]


def test_a_scale_without_its_weight_stays_visible(tmp_path: Path) -> None:
    tensors = {"a.weight": weight(), "lost.weight_scale": scale(), "lost.comfy_quant": torch.ones(2)}
    with refused("lost.comfy_quant"):
        dequantised(opened(tmp_path, tensors))
    del tensors["lost.comfy_quant"]
    assert "lost.weight_scale" in dequantised(opened(tmp_path, tensors))


REFUSED: dict[str, tuple[dict[str, torch.Tensor], str]] = {
    "scales per input": ({"a.weight": weight(), "a.weight_scale": torch.ones(1, IN)}, f"[1, {IN}]"),
    "scales in blocks": ({"a.weight": weight(), "a.weight_scale": torch.ones(OUT, 3)}, f"[{OUT}, 3]"),
    "too few scales": ({"a.weight": weight(), "a.scale_weight": torch.ones(OUT - 1)}, f"[{OUT - 1}]"),
    "mxfp8": ({"a.weight": weight(), "a.weight_scale": torch.ones(OUT, 1, dtype=torch.uint8)}, "mxfp8"),
    "a scale for bf16": (
        {"a.weight": torch.ones(2, 2, dtype=torch.bfloat16), "a.weight_scale": scale()},
        "BF16",
    ),
    "two scales": (
        {"a.weight": weight(), "a.weight_scale": scale(), "a.scale_weight": scale()},
        "second scale",
    ),
    "int8": ({"a.weight": torch.ones(2, 2, dtype=torch.int8), "a.weight_scale": scale()}, "I8"),
    "packed numbers": ({"a.weight": torch.ones(2, 2, dtype=torch.uint8)}, "U8"),
    "nvfp4": (
        {
            "a.weight": torch.ones(2, 2, dtype=torch.uint8),
            "a.weight_scale": weight(),
            "a.weight_scale_2": scale(),
        },
        "nvfp4",
    ),
    "smoothed": (
        {"a.weight": weight(), "a.weight_scale": scale(), "a.pre_quant_scale": scale()},
        "pre_quant_scale",
    ),
    "DeepSeek": ({"a.weight": weight(), "a.weight_scale_inv": torch.ones(1, 1)}, "fp8 in blocks"),
    "SVDQuant": ({"a.qweight": torch.ones(2, dtype=torch.int8), "a.wscales": torch.ones(2)}, "SVDQuant"),
    "bitsandbytes": (
        {
            "a.weight": torch.ones(2, dtype=torch.uint8),
            "a.weight.quant_state.bitsandbytes__nf4": torch.ones(2),
        },
        "bitsandbytes",
    ),
    "LLM.int8": ({"a.weight": torch.ones(2, dtype=torch.int8), "a.SCB": torch.ones(2)}, "bitsandbytes"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_other_storage_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    tensors, said = REFUSED[kind]
    stored = opened(tmp_path, tensors)
    with refused(said, "'a."):
        dequantised(stored)


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"format": "mxfp8"}, "mxfp8"),
        ({"format": "int8_tensorwise", "convrot": True}, "int8_tensorwise"),
        ({"format": "float8_e4m3fn", "convrot": True}, "convrot"),
        ({"format": "float8_e4m3fn", "hadamard": 128}, "hadamard"),
        ({"format": "float8_e4m3fn", "params": {"group_size": 32}}, "params"),
        ({"format": "float8_e5m2"}, "F8_E4M3, noted as float8_e5m2"),
        ({"form": "float8_e4m3fn"}, "None"),
    ],
)
def test_notes_that_change_the_weights_are_refused(tmp_path: Path, fields: dict[str, Any], said: str) -> None:
    tensors = {"a.weight": weight(), "a.weight_scale": scale(), "a.comfy_quant": note(**fields)}
    with refused(said, "'a.weight'"):
        dequantised(opened(tmp_path, tensors))


def test_a_note_without_its_scale_is_refused(tmp_path: Path) -> None:
    tensors = {"a.weight": weight(), "a.comfy_quant": note(format="float8_e4m3fn")}
    with refused("without its scale", "'a.weight'"):
        dequantised(opened(tmp_path, tensors))


def test_fp8_kept_as_bytes_is_refused(tmp_path: Path) -> None:
    """ComfyUI's text allows a uint8 container, its code reads the bytes' numbers: no reading is right."""
    tensors = {
        "a.weight": weight().view(torch.uint8),
        "a.weight_scale": scale(),
        "a.comfy_quant": note(format="float8_e4m3fn"),
    }
    with refused("U8, noted as float8_e4m3fn"):
        dequantised(opened(tmp_path, tensors))


@pytest.mark.parametrize("text", ["{", "[]", '{"layers": 5}', "[" * 100_000])
def test_notes_of_the_header_that_are_no_table_are_refused(tmp_path: Path, text: str) -> None:
    with refused("_quantization_metadata"):
        dequantised(opened(tmp_path, {"a.weight": weight()}, {"_quantization_metadata": text}))


@pytest.mark.parametrize(
    "bad", [torch.ones(3), torch.ones(3, dtype=torch.uint8), torch.ones(2, 2, dtype=torch.uint8)]
)
def test_a_layers_notes_that_are_no_table_are_refused(tmp_path: Path, bad: torch.Tensor) -> None:
    with refused("'a.comfy_quant'"):
        dequantised(opened(tmp_path, {"a.weight": weight(), "a.comfy_quant": bad}))


def quantised_flux(prefix: str, per_channel: bool) -> tuple[Files, dict[str, torch.Tensor]]:
    """A tiny FLUX.1 file whose Linears in blocks are fp8, and its weights dequantised, in the original layout."""
    import diffusers

    model = diffusers.FluxTransformer2DModel(
        in_channels=8,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=8,
        num_attention_heads=3,
        joint_attention_dim=12,
        pooled_projection_dim=10,
        axes_dims_rope=(4, 2, 2),
    )
    tensors, plain, layers = {}, dict(model.state_dict()), {}
    for key, tensor in original_layout("FluxTransformer2DModel", model.state_dict()).items():
        tensors[prefix + key] = tensor
        if key.endswith(".weight") and "blocks." in key:
            amax = tensor.abs().amax(dim=1) if per_channel else tensor.abs().amax()
            one = amax / torch.finfo(E4M3).max
            tensors[prefix + key] = (tensor / one.reshape(-1, 1)).to(E4M3)
            tensors[prefix + key.replace(".weight", ".weight_scale")] = one
            layers[key.removesuffix(".weight")] = {"format": "float8_e4m3fn"}
    metadata = {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": layers})}
    return (tensors, metadata), plain


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_scales_follow_their_rows_through_the_converter(
    tmp_path: Path, prefix: str, per_channel: bool
) -> None:
    (tensors, metadata), plain = quantised_flux(prefix, per_channel)
    save_file(tensors, tmp_path / "m.safetensors", metadata)
    found = open_single_file(tmp_path / "m.safetensors").sources
    assert found.keys() == plain.keys()
    fused = tensors[f"{prefix}double_blocks.0.img_attn.qkv.weight"].float()
    fused = fused * tensors[f"{prefix}double_blocks.0.img_attn.qkv.weight_scale"].reshape(-1, 1)
    width = fused.shape[0] // 3
    keys: WeightSource = found["transformer_blocks.0.attn.to_k.weight"]
    assert torch.equal(keys.read((slice(5, 20), slice(2, 9))), fused[width + 5 : width + 20, 2:9])
    for name, tensor in plain.items():
        read = found[name].read(whole(tensor.shape)).float()
        assert torch.allclose(read, tensor, rtol=0.07, atol=1e-3), name
