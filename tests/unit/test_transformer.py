"""One transformer on disk, a file or a component folder, is told exactly or refused, from headers and config alone."""

from __future__ import annotations

import functools
import inspect
import json
import os
import random
import subprocess
import sys
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch

from runtime import planner
from runtime.engine.checkpoints.folder import open_folder
from runtime.engine.checkpoints.single_file import open_single_file
from runtime.families.table import FAMILIES
from runtime.spec import ModelFacts, ParallelConfig, Refusal
from runtime.transformer import inspect_transformer
from runtime.transformer_config import DEFAULTS, count_heads
from runtime.verified import TENSOR_CLASSES
from tests.support import original_layout_images as images
from tests.support.folders import ITEM_BYTES, change_json, entries, safetensors, write_index, write_json
from tests.support.original_layout_cases import TINY
from tests.support.original_layouts import original_layout
from tests.support.refusals import check_lines, refused
from tools import ROOT

STEM = "diffusion_pytorch_model"
Shapes = Mapping[str, tuple[int, ...]]
Tensors = dict[str, tuple[str, tuple[int, ...]]]


# Variants of every family: class and config.
CASES: dict[str, tuple[str, Mapping[str, Any]]] = {
    case.name: (case.model_class, case.config) for case in (*images.CASES, *TINY)
}
VIDEO_CASES = {case.name: case for case in TINY}


@functools.cache
def parameters(name: str) -> dict[str, torch.Tensor]:
    """Of a variant, under diffusers' names, without memory."""
    model_class, config = CASES[name]
    with torch.device("meta"):
        return getattr(diffusers, model_class)(**config).state_dict()


def sizes(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {key: tuple(tensor.shape) for key, tensor in tensors.items()}


@functools.cache
def original_shapes(name: str) -> dict[str, tuple[int, ...]]:
    """Of a variant, under its authors' names, without prefix."""
    if name in VIDEO_CASES:
        return VIDEO_CASES[name].shapes()
    return sizes(original_layout(CASES[name][0], parameters(name)))


def stored(shapes: Shapes, dtype: str = "BF16", prefix: str = "") -> Tensors:
    return {prefix + key: (dtype, shape) for key, shape in shapes.items()}


def write(file: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]], **notes: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    header = {"__metadata__": notes, **entries(tensors)}
    file.write_bytes(safetensors(header))
    return file


def write_folder(folder: Path, name: str, dtype: str = "BF16", **changes: Any) -> Path:
    """A variant as a component folder of diffusers."""
    model_class, config = CASES[name]
    write(folder / f"{STEM}.safetensors", stored(sizes(parameters(name)), dtype))
    write_json(folder / "config.json", {"_class_name": model_class, **config, **changes})
    return folder


def nbytes(shapes: Shapes, item: int = 2) -> int:
    return sum(prod(shape) for shape in shapes.values()) * item


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "tiny-flux" / "transformer", "flux dev")


# ---- single files

# Other parts of an all-in-one checkpoint, stored as they like.
OTHERS: Tensors = {
    "vae.decoder.conv_in.weight": ("F32", (2,)),
    "first_stage_model.encoder.conv_in.weight": ("F32", (2,)),
    "text_encoders.t5xxl.transformer.shared.weight": ("F8_E4M3", (2, 2)),
    "text_encoders.t5xxl.transformer.shared.scale_weight": ("F32", (1,)),
    "text_encoders.clip_l.x.qweight": ("I8", (2,)),
}


@pytest.mark.parametrize(("prefix", "others"), [("", {}), ("model.diffusion_model.", OTHERS)])
@pytest.mark.parametrize(
    ("name", "family", "layout", "tokens", "block"),
    [
        ("flux dev", "FLUX.1", "original", 4096 + 512, "_blocks."),
        ("flux fill", "FLUX.1", "original", 4096 + 512, "_blocks."),
        ("qwen image", "Qwen-Image", "diffusers", 4096 + 512, "_blocks."),
        ("wan t2v", "Wan 2.1 / 2.2", "original", 21 * 30 * 52, "blocks."),
        ("wan i2v", "Wan 2.1 / 2.2", "original", 21 * 30 * 52, "blocks."),
    ],
)
def test_a_single_file_is_read(
    file: Path, name: str, family: str, layout: str, tokens: int, block: str, prefix: str, others: Tensors
) -> None:
    shapes = original_shapes(name)
    model_class, config = CASES[name]
    write(file, {**stored(shapes, prefix=prefix), **others})

    found = inspect_transformer(file)

    assert (found.family, found.layout, found.shapes) == (family, layout, shapes)
    assert {**DEFAULTS[model_class], **config} == found.config
    assert found.config == {**found.config, **open_single_file(file).config}
    matrices = {
        key: shape
        for key, shape in shapes.items()
        if block in key and len(shape) > 1 and not key.endswith((".modulation", "_table"))
    }
    assert 0 < nbytes(matrices) < nbytes(shapes)
    assert found.facts == ModelFacts(
        path=str(file),
        pipeline_class="",
        transformer_class=model_class,
        heads=config["num_attention_heads"],
        tokens=tokens,
        transformer_bytes=nbytes(shapes),
        split_bytes=nbytes(matrices),
        encoder_bytes=0,
        vae_bytes=0,
        stored_dtype="bfloat16",
        version=planner.model_version(file),
    )


@pytest.mark.parametrize("name", ["flux dev", "flux fill", "z-image"])
def test_a_single_file_may_be_in_diffusers_layout(file: Path, name: str) -> None:
    model_class, config = CASES[name]
    shapes = sizes(parameters(name))
    write(file, stored(shapes, prefix="transformer."))
    found = inspect_transformer(file)
    assert (found.layout, found.shapes) == ("diffusers", shapes)
    assert found.config == {**found.config, **open_single_file(file).config}


@pytest.mark.parametrize("name", CASES)
def test_every_family_is_read(file: Path, name: str) -> None:
    """Whether a node supports it is the node's to say."""
    shapes = original_shapes(name)
    model_class, config = CASES[name]
    found = inspect_transformer(write(file, stored(shapes)))
    assert found.shapes == shapes and found.facts.transformer_class == model_class
    heads = next(
        value for key, value in config.items() if key in ("num_attention_heads", "n_heads", "num_heads")
    )
    assert found.facts.heads == heads
    assert found.facts.split_bytes < found.facts.transformer_bytes <= nbytes(shapes)
    # Qwen-Image 2.1 is published under diffusers' names, and packed by ComfyUI.
    if model_class != "QwenImage21Transformer2DModel":
        names = parameters(name).keys()
        assert (found.layout == "diffusers") == (shapes.keys() == names)


def test_heads_in_groups_are_told(file: Path) -> None:
    facts = inspect_transformer(write(file, stored(original_shapes("lumina 2")))).facts
    assert (facts.heads, facts.head_groups, facts.units, facts.tokens) == (6, 2, 2, 0)


def test_what_the_model_does_without_is_a_key_but_no_weight(file: Path) -> None:
    """ComfyUI tells Qwen Edit 2511 by it."""
    shapes = original_shapes("qwen image")
    mark = {"__index_timestep_zero__": ("F32", (3,))}
    found = inspect_transformer(write(file, {**stored(shapes), **mark}))
    assert found.config["zero_cond_t"] is True
    assert found.shapes == {**shapes, "__index_timestep_zero__": (3,)}
    assert found.facts.transformer_bytes == nbytes(shapes)


def test_a_plan_is_followed_where_the_names_are_diffusers(file: Path) -> None:
    plan = json.dumps({"transformer_blocks.*.attn.to_q": "colwise", "img_in": "colwise_gathered"})
    shapes = original_shapes("qwen image")
    write(file, stored(shapes, prefix="diffusion_model."))
    named = {key: shape for key, shape in shapes.items() if key == "img_in.weight" or ".to_q.weight" in key}
    assert len(named) == 3
    assert inspect_transformer(file, plan).facts.split_bytes == nbytes(named)
    assert (
        planner.check_transformer(file, ParallelConfig(tensor_plan=plan)).facts
        == inspect_transformer(file, plan).facts
    )
    assert planner.check_transformer(file) == inspect_transformer(file)
    write(file, stored(original_shapes("flux dev")))
    assert inspect_transformer(file, plan) == inspect_transformer(file)


# ---- fp8


def in_fp8(shapes: Shapes, end: str, prefix: str = "") -> Tensors:
    """The matrices in fp8, each with a scale; the rest in bf16."""
    tensors = stored(shapes, prefix=prefix)
    for key, shape in shapes.items():
        if key.endswith(".weight") and len(shape) == 2:
            tensors[prefix + key] = ("F8_E4M3", shape)
            tensors[prefix + key.removesuffix(".weight") + end] = ("F32", ())
    return tensors


@pytest.mark.parametrize("name", ["flux dev", "qwen image", "wan i2v"])
@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
@pytest.mark.parametrize("convention", ["scaled_fp8", "weight_scale", "header"])
def test_fp8_with_scales_is_read_as_the_plain_checkpoint(
    file: Path, name: str, prefix: str, convention: str
) -> None:
    shapes = original_shapes(name)
    tensors = in_fp8(shapes, ".scale_weight" if convention == "scaled_fp8" else ".weight_scale", prefix)
    layers = [key.removesuffix(".weight") for key, (dtype, _) in tensors.items() if dtype == "F8_E4M3"]
    expected = sum(prod(shape) * ITEM_BYTES[dtype] for dtype, shape in tensors.values() if shape)
    notes = {}
    if convention == "scaled_fp8":
        tensors[f"{prefix}scaled_fp8"] = ("F8_E4M3", (2,))
        tensors |= {f"{layer}.scale_input": ("F32", ()) for layer in layers}
    elif convention == "weight_scale":
        tensors |= {f"{layer}.input_scale": ("F32", ()) for layer in layers}
    else:
        named = {layer.removeprefix(prefix): {"format": "float8_e4m3fn"} for layer in layers}
        notes = {"_quantization_metadata": json.dumps({"layers": named})}
    found = inspect_transformer(write(file, tensors, **notes))
    assert found.shapes == shapes
    assert found.facts.stored_dtype == "float8" and found.facts.transformer_bytes == expected
    assert found.config == {**found.config, **open_single_file(file).config}


NOTED = "double_blocks.0.img_attn.qkv"


@pytest.mark.parametrize(
    ("format_", "parts"),
    [
        ("float8_e4m3fn", ()),
        ("nvfp4", ("nvfp4", "notes say so")),
        ("float8_e5m2", ("One of the two is wrong",)),
    ],
)
def test_notes_of_layers_are_read(file: Path, format_: str, parts: tuple[str, ...]) -> None:
    """The only bytes beyond the header that are read."""
    shapes = original_shapes("flux dev")
    note = json.dumps({"format": format_}).encode()
    tensors = in_fp8(shapes, ".weight_scale")
    tensors[f"{NOTED}.comfy_quant"] = ("U8", (len(note),))
    write(file, tensors)
    content = file.read_bytes()
    file.write_bytes(content[: -len(note)] + note)
    if parts:
        with refused(f"'{NOTED}.weight' in 'model.safetensors'", *parts):
            inspect_transformer(file)
    else:
        assert inspect_transformer(file).shapes == shapes


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2"])
def test_fp8_without_scales_is_read(file: Path, dtype: str) -> None:
    shapes = original_shapes("flux dev")
    facts = inspect_transformer(write(file, stored(shapes, dtype))).facts
    assert (facts.stored_dtype, facts.transformer_bytes) == ("float8", nbytes(shapes, 1))


@pytest.mark.parametrize(("stored_as", "dtype"), [("F16", "float16"), ("F32", "float32")])
def test_the_stored_dtype_is_told(file: Path, stored_as: str, dtype: str) -> None:
    assert (
        inspect_transformer(write(file, stored(original_shapes("flux dev"), stored_as))).facts.stored_dtype
        == dtype
    )


# ---- folders


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("flux dev", "FLUX.1"),
        ("qwen image", "Qwen-Image"),
        ("wan t2v", "Wan 2.1 / 2.2"),
        ("wan i2v", "Wan 2.1 / 2.2"),
        ("sd3 medium", "Stable Diffusion 3 / 3.5"),
        ("cosmos 1.0", ""),  # its class is another family's too
    ],
)
def test_a_folder_is_read(tmp_path: Path, name: str, family: str, parts: int) -> None:
    path = write_folder(tmp_path / "tiny" / "transformer", name)
    model_class, config = CASES[name]
    shapes = sizes(parameters(name))
    if parts > 1:
        split_up(path, shapes, parts)

    found = inspect_transformer(path)

    assert (found.family, found.layout, dict(found.shapes)) == (family, "diffusers", shapes)
    expected = {**DEFAULTS.get(model_class, {}), **config}
    assert {key: as_tuple(value) for key, value in expected.items()} == found.config
    assert found.shapes == {key: source.shape for key, source in open_folder(path).sources.items()}
    facts = found.facts
    assert facts.path == str(path) and facts.pipeline_class == "" and facts.transformer_class == model_class
    assert facts.heads == config["num_attention_heads"] and facts.encoder_bytes == facts.vae_bytes == 0
    assert facts.transformer_bytes == nbytes(shapes) and 0 < facts.split_bytes < facts.transformer_bytes
    assert facts.version == planner.model_version(path)
    assert facts.stored_dtype == "bfloat16"


def as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def split_up(path: Path, shapes: Shapes, parts: int) -> list[Path]:
    """The weights of a folder in several files and an index instead."""
    (path / f"{STEM}.safetensors").unlink()
    names = [f"{STEM}-{part + 1:05}-of-{parts:05}.safetensors" for part in range(parts)]
    placed = {key: names[number % parts] for number, key in enumerate(shapes)}
    for name in names:
        write(path / name, stored({key: shape for key, shape in shapes.items() if placed[key] == name}))
    write_index(path, STEM, placed)
    return [path / name for name in names]


def test_a_plan_is_followed_in_a_folder(folder: Path) -> None:
    plan = json.dumps({"single_transformer_blocks.*.proj_out": "rowwise"})
    shapes = inspect_transformer(folder).shapes
    named = {key: shape for key, shape in shapes.items() if key.endswith("s.0.proj_out.weight")}
    assert inspect_transformer(folder, plan).facts.split_bytes == 2 * nbytes(named)


def test_fp8_with_scales_is_read_in_a_folder(folder: Path) -> None:
    shapes = inspect_transformer(folder).shapes
    write(folder / f"{STEM}.safetensors", in_fp8(shapes, ".weight_scale"))
    found = inspect_transformer(folder)
    assert found.shapes == shapes and found.facts.stored_dtype == "float8"


@pytest.mark.parametrize("model_class", DEFAULTS)
def test_what_a_config_leaves_out_is_diffusers_default(folder: Path, model_class: str) -> None:
    signature = inspect.signature(getattr(diffusers, model_class).__init__).parameters
    defaults = {name: one.default for name, one in signature.items() if name != "self"}
    assert DEFAULTS[model_class] == defaults
    write_json(folder / "config.json", {"_class_name": model_class, "_diffusers_version": "0.30"})
    found = inspect_transformer(folder)
    assert found.config == defaults and found.facts.heads == defaults["num_attention_heads"]


def test_every_verified_class_tells_its_heads() -> None:
    """From a config that says everything, as diffusers writes them."""
    found = {}
    for name in TENSOR_CLASSES:
        signature = inspect.signature(getattr(diffusers, name).__init__).parameters
        defaults = {key: one.default for key, one in signature.items() if key != "self"}
        found[name] = count_heads(name, name, defaults)
    assert found["FluxTransformer2DModel"] == (24, 0)
    assert found["BriaFibo2Transformer2DModel"] == (28, 0)
    assert found["Lumina2Transformer2DModel"] == (24, 8)
    assert found["StableAudioDiTModel"] == (24, 12)
    assert found["Kandinsky6Transformer3DModel"] == (32, 0)  # 4096 / (32 + 48 + 48)
    assert {family.model_class for family in FAMILIES} <= found.keys()


# ---- versions


def test_the_version_changes_with_the_file(file: Path, tmp_path: Path) -> None:
    write(file, stored(original_shapes("flux dev")))
    seen = [planner.model_version(file)]
    assert inspect_transformer(file).facts.version == seen[0]
    status = file.stat()
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    seen.append(planner.model_version(file))
    with file.open("ab") as opened:
        opened.write(b"\0")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    seen.append(planner.model_version(file))
    link = tmp_path / "link.safetensors"
    link.symlink_to(file)
    before = planner.model_version(link)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert planner.model_version(link) != before
    assert len(set(seen)) == 3 and all(seen)
    file.unlink()
    assert planner.model_version(file) == planner.model_version(link) == ""


def test_the_version_changes_with_any_file_of_the_folder(folder: Path) -> None:
    seen = {planner.model_version(folder)}
    for one in (folder / "config.json", folder / f"{STEM}.safetensors"):
        status = one.stat()
        os.utime(one, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
        seen.add(inspect_transformer(folder).facts.version)
    assert len(seen) == 3


# ---- files that are refused

FOREIGN: Mapping[str, tuple[str, ...]] = {
    "a T5 or UMT5 text encoder": ("shared.weight", "encoder.block.0.layer.0.SelfAttention.q.weight"),
    "a CLIP text encoder": ("text_model.encoder.layers.0.self_attn.q_proj.weight", "text_model.embeddings.x"),
    "a Qwen-VL text encoder": ("visual.blocks.0.attn.qkv.weight", "model.layers.0.self_attn.q_proj.weight"),
    "a VAE": ("encoder.conv_in.weight", "decoder.conv_in.weight"),
    "a LoRA": (
        "diffusion_model.double_blocks.0.img_attn.qkv.lora_A.weight",
        "diffusion_model.x.lora_B.weight",
    ),
    "a ControlNet": ("controlnet_blocks.0.weight", "double_blocks.0.img_mod.lin.weight"),
}


@pytest.mark.parametrize("kind", FOREIGN)
@pytest.mark.parametrize("dtype", ["BF16", "I8"])
def test_other_kinds_of_files_are_called_what_they_are(file: Path, kind: str, dtype: str) -> None:
    write(file, dict.fromkeys(FOREIGN[kind], (dtype, (2,))))
    with refused(
        f"'model.safetensors' is {kind}, not a diffusion transformer", "FLUX.1", "Qwen-Image", "Wan"
    ):
        inspect_transformer(file)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("m.gguf", b"GGUF\x03\0\0\0", "'m.gguf' is a GGUF file"),
        ("m.safetensors", b"GGUF\x03\0\0\0", "'m.safetensors' is a GGUF file"),
        ("m.pt", b"PK\x03\x04" + bytes(99), "'m.pt' is a PyTorch pickle"),
        ("m.safetensors", b"\x80\x02}q\0.", "'m.safetensors' is a PyTorch pickle"),
        ("m.flashpack", bytes(99), "'m.flashpack' is a FlashPack file"),
        ("m.safetensors", b"<!DOCTYPE html>" + bytes(99), "is not a safetensors file"),
        ("m.safetensors", b"", "is not a safetensors file"),
    ],
)
def test_other_formats_are_refused_by_name(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(content)
    with refused(said, "safetensors"):
        inspect_transformer(tmp_path / name)


def test_a_missing_path_is_refused(tmp_path: Path) -> None:
    with refused("'gone.safetensors' cannot be read", "No such file", "exists"):
        inspect_transformer(tmp_path / "gone.safetensors")


def test_a_file_that_is_cut_short_is_refused(file: Path) -> None:
    write(file, stored(original_shapes("flux dev")))
    os.truncate(file, file.stat().st_size - 1)
    with refused("model.safetensors is cut short", "Download that file again"):
        inspect_transformer(file)


def test_a_damaged_header_is_refused(file: Path) -> None:
    header = entries(stored(original_shapes("flux dev")))
    header["img_in.weight"]["shape"][0] += 1
    file.write_bytes(safetensors(header))
    with refused("model.safetensors is damaged", "'img_in.weight'"):
        inspect_transformer(file)


@pytest.mark.parametrize("only", [False, True])
@pytest.mark.parametrize("dtype", ["I8", "U8", "F64"])
def test_other_dtypes_are_refused_by_name(file: Path, dtype: str, only: bool) -> None:
    shapes = original_shapes("flux dev")
    tensors = stored(shapes, dtype if only else "BF16") | {
        f"{NOTED}.weight": (dtype, shapes[f"{NOTED}.weight"])
    }
    with refused("model.safetensors'", f"stored as {dtype}", "bf16"):
        inspect_transformer(write(file, tensors))


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({f"{NOTED}.qweight": ("I8", (2,))}, "packed integers"),
        ({f"{NOTED}.weight_scale_2": ("F32", (1,))}, "nvfp4"),
        ({f"{NOTED}.weight_scale": ("F32", (1,))}, "BF16 with a scale"),
    ],
)
def test_other_quantisations_are_refused_by_name(file: Path, extra: Tensors, said: str) -> None:
    with refused(said, "bf16"):
        inspect_transformer(write(file, stored(original_shapes("flux dev")) | extra))


def test_a_file_with_a_block_missing_is_refused(file: Path) -> None:
    shapes = original_shapes("wan t2v")
    hole = {key: shape for key, shape in shapes.items() if not key.startswith("blocks.1.")}
    with refused("'model.safetensors' is a Wan 2.1 / 2.2 model of a kind", "blocks.1"):
        inspect_transformer(write(file, stored({**hole, "blocks.2.modulation": (1, 6, 48)})))


def test_keys_beside_the_transformer_are_refused(file: Path) -> None:
    """The ranks would refuse them after they are started."""
    tensors = stored(original_shapes("flux dev"), prefix="model.diffusion_model.")
    with refused("'model.safetensors' holds 'somewhere'", "'model.diffusion_model.'"):
        inspect_transformer(write(file, tensors | {"somewhere": ("BF16", (2,))}))


def test_a_strange_name_does_not_break_the_three_lines(tmp_path: Path) -> None:
    path = tmp_path / "two\nlines\x1b[31m.safetensors"
    with refused("cannot be read"):
        inspect_transformer(path)
    write(path, {"a\nb": ("BF16", (2,))})
    with refused("'a b'"):
        inspect_transformer(path)


# ---- folders that are refused


@pytest.mark.parametrize(
    "found", ["UNet2DConditionModel", "os.system", None, 3, ["FluxTransformer2DModel"]], ids=str
)
def test_a_class_that_is_not_verified_is_refused(folder: Path, found: Any) -> None:
    change_json(folder / "config.json", _class_name=found)
    with refused("'tiny-flux/transformer' is a", "verified", "FLUX.1", "Qwen-Image", "Wan 2.1"):
        inspect_transformer(folder)


def test_a_text_encoders_folder_is_called_what_it_is(folder: Path) -> None:
    write_json(folder / "config.json", {"architectures": ["T5EncoderModel"], "model_type": "t5"})
    with refused("'tiny-flux/transformer' is a T5EncoderModel"):
        inspect_transformer(folder)


@pytest.mark.parametrize("config", [{"quant_method": "bitsandbytes"}, {}], ids=["bitsandbytes", "empty"])
def test_a_quantized_folder_is_refused(folder: Path, config: Any) -> None:
    change_json(folder / "config.json", quantization_config=config)
    with refused("'tiny-flux/transformer' is quantized", "bf16"):
        inspect_transformer(folder)


def test_a_folder_that_is_no_component_is_refused(folder: Path) -> None:
    with refused("is not a transformer's folder", "no tiny-flux/config.json", "config.json"):
        inspect_transformer(folder.parent)


@pytest.mark.parametrize(
    "content", ["", "[1]", "null", "[" * 100_000, '{"a": ' + "9" * 10_000 + "}"], ids=len
)
def test_a_config_that_is_no_object_is_refused(folder: Path, content: str) -> None:
    (folder / "config.json").write_text(content)
    with refused("'tiny-flux/transformer' is not a transformer's folder", "config.json"):
        inspect_transformer(folder)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_attention_heads", "24"),
        ("num_attention_heads", None),
        ("num_attention_heads", True),
        ("attention_head_dim", 16.0),
        ("num_layers", -1),
        ("in_channels", 10**12),
        ("guidance_embeds", 1),
        ("axes_dims_rope", 16),
        ("axes_dims_rope", [8, 8]),
        ("axes_dims_rope", [4, 2, "2"]),
        ("out_channels", "12"),
    ],
)
def test_a_config_that_says_what_cannot_be_is_refused(folder: Path, key: str, value: Any) -> None:
    change_json(folder / "config.json", **{key: value})
    with refused(f"'tiny-flux/transformer' has no usable {key}", "config.json"):
        inspect_transformer(folder)


@pytest.mark.parametrize("heads", [0, 10**6])
def test_a_number_of_heads_that_is_none_is_refused(folder: Path, heads: int) -> None:
    change_json(folder / "config.json", num_attention_heads=heads)
    with refused("attention heads", f"num_attention_heads {heads}"):
        inspect_transformer(folder)


def test_missing_parts_are_named(folder: Path) -> None:
    parts = split_up(folder, inspect_transformer(folder).shapes, 3)
    parts[1].unlink()
    with refused(f"The transformer has no file {parts[1].name}", parts[0].name, parts[2].name):
        inspect_transformer(folder)


def test_one_part_without_its_index_is_refused(folder: Path) -> None:
    parts = split_up(folder, inspect_transformer(folder).shapes, 2)
    (folder / f"{STEM}.safetensors.index.json").unlink()
    with refused(f"has no file {STEM}.safetensors", f"there is only {parts[0].name}"):
        inspect_transformer(folder)


def test_a_tensor_in_two_files_is_refused(folder: Path) -> None:
    """No file would be the right one to read it from."""
    first, second = split_up(folder, inspect_transformer(folder).shapes, 2)
    second.write_bytes(first.read_bytes())
    with refused(first.name, second.name, "no one value"):
        inspect_transformer(folder)


@pytest.mark.parametrize("name", ["../x.safetensors", "weights.bin"])
def test_an_index_that_leads_elsewhere_is_refused(folder: Path, name: str) -> None:
    write_index(folder, STEM, {"a": name})
    with refused("The transformer's index names"):
        inspect_transformer(folder)
    with refused("The transformer's index names"):
        open_folder(folder)


@pytest.mark.parametrize("dtype", ["I8", "F64"])
def test_other_dtypes_in_a_folder_are_refused(tmp_path: Path, dtype: str) -> None:
    path = write_folder(tmp_path / "x" / "transformer", "flux dev", dtype)
    with refused(f"stored as {dtype}"):
        inspect_transformer(path)


def test_a_folder_without_tensors_is_refused(folder: Path) -> None:
    write(folder / f"{STEM}.safetensors", {})
    with refused("'tiny-flux/transformer' holds no weights"):
        inspect_transformer(folder)


def test_what_the_system_refuses_is_said(tmp_path: Path) -> None:
    with refused("cannot be read", "File name too long"):
        inspect_transformer(tmp_path / ("x" * 300))


# ---- whatever is in the files


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_random_damage_is_read_or_refused(folder: Path, file: Path, kind: str) -> None:
    """A fixed seed, so that a failure can be seen again; a change of the seed is a new search."""
    write(file, in_fp8(original_shapes("flux schnell"), ".weight_scale"))
    damaged, path = ([file], file) if kind == "file" else (sorted(folder.iterdir()), folder)
    whole = {one: one.read_bytes() for one in damaged}
    rng = random.Random(22)
    for _ in range(100):
        one = rng.choice(damaged)
        end = min(len(whole[one]), 12_000)  # the header, and little more
        place = rng.randrange(end)
        byte = rng.choice([rng.randrange(256), ord(rng.choice('{}[]",:0-enl\\'))])
        cut = rng.random() < 0.2
        one.write_bytes(whole[one][:place] + (b"" if cut else bytes([byte]) + whole[one][place + 1 :]))
        try:
            inspect_transformer(path)
        except Refusal as refusal:
            check_lines(refusal)
        one.write_bytes(whole[one])
    inspect_transformer(path)


def test_it_takes_neither_torch_nor_diffusers(file: Path, folder: Path) -> None:
    """The host has torch loaded, but a rank's libraries belong to the ranks."""
    write(file, in_fp8(original_shapes("flux dev"), ".weight_scale"))
    code = (
        "import sys; from pathlib import Path; from runtime.planner import check_transformer as check\n"
        f"check(Path({str(file)!r})), check(Path({str(folder)!r}))\n"
        "print(sorted({'torch', 'numpy', 'diffusers', 'transformers', 'safetensors'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
