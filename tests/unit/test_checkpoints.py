"""Single files in original layouts and folders: recognised, read only where indexed, or refused by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import diffusers
import pytest
import torch
from accelerate import init_empty_weights
from safetensors.torch import save_file

from runtime.engine.checkpoints.files import StoredTensor, open_files
from runtime.engine.checkpoints.single_file import open_single_file
from runtime.engine.checkpoints.source import Index, WeightSource
from runtime.families.table import FAMILIES
from runtime.recognise import PREFIXES
from runtime.safetensors_header import read_header
from tests.support.folders import entries, safetensors
from tests.support.original_layout_images import CASES, LAYERED, Case, build
from tests.support.original_layouts import original_layout, write_single_file
from tests.support.refusals import refused

SD3_MEDIUM = {"num_layers": 24, "num_attention_heads": 24, "caption_projection_dim": 1536}
SD3_LARGE = {"num_layers": 38, "num_attention_heads": 38, "caption_projection_dim": 2432}
NORMED = {"qk_norm": "rms_norm"}
# As their config.json says, where it differs from diffusers' defaults.
PUBLISHED = (
    Case("FLUX.1-schnell", "FluxTransformer2DModel", {}),
    Case("FLUX.1-dev", "FluxTransformer2DModel", {"guidance_embeds": True}),
    Case(
        "FLUX.1-Fill-dev",
        "FluxTransformer2DModel",
        {"in_channels": 384, "out_channels": 64, "guidance_embeds": True},
    ),
    Case("Chroma1-HD", "ChromaTransformer2DModel", {}),
    Case("SD3-medium", "SD3Transformer2DModel", SD3_MEDIUM | {"pos_embed_max_size": 192}),
    Case("SD3.5-large", "SD3Transformer2DModel", SD3_LARGE | NORMED | {"pos_embed_max_size": 192}),
    Case(
        "SD3.5-medium",
        "SD3Transformer2DModel",
        SD3_MEDIUM | NORMED | {"pos_embed_max_size": 384, "dual_attention_layers": tuple(range(13))},
    ),
    Case("Qwen-Image", "QwenImageTransformer2DModel", {}),
    Case("Qwen-Image-Layered", "QwenImageTransformer2DModel", LAYERED),
    Case("Z-Image-Turbo", "ZImageTransformer2DModel", {"axes_lens": [1536, 512, 512]}),
    Case("Lumina-Image-2.0", "Lumina2Transformer2DModel", {"cap_feat_dim": 2304}),
)


class Tiny(NamedTuple):
    """A case with weights, and its single file."""

    case: Case
    model: torch.nn.Module
    state: dict[str, torch.Tensor]
    file: Path


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    case = request.param
    model = build(case)
    state = model.state_dict()
    file = tmp_path_factory.mktemp("single") / "model.safetensors"
    write_single_file(file, case.model_class, state, prefix="model.diffusion_model.")
    return Tiny(case, model, state, file)


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    case = CASES[1]
    model = build(case)
    file = tmp_path_factory.mktemp("flux") / "flux.safetensors"
    write_single_file(file, case.model_class, model.state_dict())
    return Tiny(case, model, model.state_dict(), file)


class Reads:
    """Counts what is read from files."""

    def __init__(self) -> None:
        self.elements = 0
        self.keys: list[str] = []


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Reads]:
    counted, read = Reads(), StoredTensor.read

    def counting(self: StoredTensor, index: Index) -> torch.Tensor:
        part = read(self, index)
        counted.elements += part.numel()
        counted.keys.append(self.key)
        return part

    monkeypatch.setattr(StoredTensor, "read", counting)
    yield counted


def whole(shape: tuple[int, ...]) -> Index:
    return tuple(slice(0, size) for size in shape)


def parts(shape: tuple[int, ...], ranks: int) -> Iterator[Index]:
    """The nearly equal parts of each of `ranks` along rows, and along columns."""
    for dim in range(min(2, len(shape))):
        bounds = [shape[dim] * rank // ranks for rank in range(ranks + 1)]
        for first, last in zip(bounds, bounds[1:], strict=False):
            yield (*whole(shape[:dim]), slice(first, last), *whole(shape[dim + 1 :]))


def read_all(source: WeightSource) -> torch.Tensor:
    return source.read(whole(tuple(source.shape)))


# ---- every family: the same model comes out


def test_a_single_file_holds_the_models_parameters(tiny: Tiny) -> None:
    found = open_single_file(tiny.file)
    assert found.model_class == tiny.case.model_class
    assert found.sources.keys() == tiny.state.keys()
    for name, tensor in tiny.state.items():
        source = found.sources[name]
        assert tuple(source.shape) == tuple(tensor.shape), name
        assert torch.equal(read_all(source), tensor), name


@pytest.mark.parametrize("ranks", [2, 3])
def test_slices_of_a_single_file_are_slices_of_the_parameters(tiny: Tiny, ranks: int) -> None:
    found = open_single_file(tiny.file)
    for name, tensor in tiny.state.items():
        for index in parts(tuple(tensor.shape), ranks):
            assert torch.equal(found.sources[name].read(index), tensor[index]), (name, index)


def test_the_config_is_the_models(tiny: Tiny) -> None:
    config = dict(open_single_file(tiny.file).config)
    wanted = {name: value for name, value in tiny.model.config.items() if not name.startswith("_")}
    config.setdefault("out_channels", None)
    if tiny.case.model_class == "Lumina2Transformer2DModel":  # many pairs of these give the same feed-forward
        for name in ("multiple_of", "ffn_dim_multiplier"):
            del config[name], wanted[name]
    if config["out_channels"] is None:
        wanted["out_channels"] = None
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in config.items()}
    for name, value in wanted.items():
        assert plain.get(name, value) == (list(value) if isinstance(value, tuple) else value), name
    for name in tiny.case.config:
        assert name in config or name == "multiple_of", f"{name} is not told"


@pytest.mark.parametrize("case", PUBLISHED, ids=lambda case: case.name)
def test_the_shapes_of_published_models_give_their_published_configs(case: Case) -> None:
    with torch.device("meta"):
        model = getattr(diffusers, case.model_class)(**case.config)
    tensors = original_layout(case.model_class, model.state_dict())
    shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    (family,) = [family for family in FAMILIES if family.recognises(shapes)]
    config = family.config(shapes)
    for name, value in model.config.items():
        found = config.get(name, value)
        assert name.startswith("_") or found == value or list(found) == list(value), name


def test_the_config_builds_a_model_of_these_parameters(tiny: Tiny) -> None:
    found = open_single_file(tiny.file)
    with init_empty_weights():
        model = getattr(diffusers, found.model_class)(**found.config)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert shapes == {name: tuple(source.shape) for name, source in found.sources.items()}


def test_opening_reads_no_weight(tiny: Tiny, reads: Reads) -> None:
    open_single_file(tiny.file)
    assert reads.elements == 0


def test_a_slice_reads_nothing_but_itself(tiny: Tiny, reads: Reads) -> None:
    for source in open_single_file(tiny.file).sources.values():
        for index in parts(tuple(source.shape), 3):
            reads.elements = 0
            assert source.read(index).numel() == reads.elements, source.where


def test_sources_come_in_the_files_order(tiny: Tiny) -> None:
    order = [entry.key for entry in read_header(tiny.file).entries]
    first = [
        order.index(source.where.split("'")[1]) for source in open_single_file(tiny.file).sources.values()
    ]
    assert first == sorted(first)


# ---- one family in every wrapping


@pytest.mark.parametrize("prefix", PREFIXES)
def test_every_prefix_is_found(flux: Tiny, tmp_path: Path, prefix: str) -> None:
    file = write_single_file(tmp_path / "m.safetensors", flux.case.model_class, flux.state, prefix)
    found = open_single_file(file)
    assert found.sources.keys() == flux.state.keys()
    assert all(torch.equal(read_all(found.sources[name]), tensor) for name, tensor in flux.state.items())


@pytest.mark.parametrize("name", ["flux dev", "flux fill", "z-image", "qwen image"])
def test_a_single_file_may_be_in_diffusers_layout(name: str, tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == name)
    state = build(case).state_dict()
    save_file(dict(state), tmp_path / "m.safetensors")
    found = open_single_file(tmp_path / "m.safetensors")
    assert found.model_class == case.model_class and found.sources.keys() == state.keys()
    assert all(torch.equal(read_all(found.sources[name]), tensor) for name, tensor in state.items())
    with init_empty_weights():
        model = getattr(diffusers, case.model_class)(**found.config)
    assert {name: tensor.shape for name, tensor in model.state_dict().items()} == {
        name: tensor.shape for name, tensor in state.items()
    }


def test_other_parts_of_an_all_in_one_file_are_left_aside(flux: Tiny, tmp_path: Path) -> None:
    others = {
        "vae.decoder.conv_in.weight": torch.ones(2),
        "first_stage_model.encoder.conv_in.weight": torch.ones(2),
        "text_encoders.t5xxl.transformer.shared.weight": torch.ones(2),
        "text_encoders.t5xxl.transformer.x.qweight": torch.ones(2, dtype=torch.int8),
    }
    file = write_single_file(
        tmp_path / "m.safetensors", flux.case.model_class, flux.state, "model.diffusion_model.", **others
    )
    assert open_single_file(file).sources.keys() == flux.state.keys()


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_keys_that_nobody_knows_stay_visible(flux: Tiny, tmp_path: Path, prefix: str) -> None:
    """Under their own name, beside the model's: whoever compares with the model must see them."""
    extra = {f"{prefix}double_blocks.0.new.weight": torch.ones(2), f"{prefix}surprise": torch.ones(2)}
    file = write_single_file(tmp_path / "m.safetensors", flux.case.model_class, flux.state, prefix, **extra)
    left = open_single_file(file).sources.keys() - flux.state.keys()
    assert left == {"double_blocks.0.new.weight", "surprise"}


def test_keys_outside_the_prefix_stay_visible(flux: Tiny, tmp_path: Path) -> None:
    file = write_single_file(
        tmp_path / "m.safetensors", flux.case.model_class, flux.state, "net.", somewhere=torch.ones(2)
    )
    assert open_single_file(file).sources.keys() - flux.state.keys() == {"somewhere"}


def test_a_parameter_inside_and_outside_the_prefix_is_refused(flux: Tiny, tmp_path: Path) -> None:
    extra = {"x_embedder.bias": torch.ones(24)}
    file = write_single_file(tmp_path / "m.safetensors", flux.case.model_class, flux.state, "net.", **extra)
    with refused("'net.img_in.bias'", "'x_embedder.bias'"):
        open_single_file(file)


def test_neither_of_two_keys_with_one_new_name_vanishes(tmp_path: Path) -> None:
    """diffusers' converter for Z-Image renames without a check whether the name is free."""
    case = next(case for case in CASES if case.name == "z-image")
    state = build(case).state_dict()
    twin = {"layers.0.attention.norm_q.weight": torch.ones(16)}
    file = write_single_file(tmp_path / "m.safetensors", case.model_class, state, **twin)
    with refused("layers.0.attention.q_norm.weight", "layers.0.attention.norm_q.weight"):
        open_single_file(file)


def test_comfyuis_mark_for_qwen_edit_2511_becomes_a_setting(tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == "qwen image")
    state = build(case).state_dict()
    mark = {"__index_timestep_zero__": torch.zeros(0)}
    file = write_single_file(tmp_path / "m.safetensors", case.model_class, state, **mark)
    found = open_single_file(file)
    assert found.config["zero_cond_t"] is True and found.sources.keys() == state.keys()


def test_a_missing_key_is_named(flux: Tiny, tmp_path: Path) -> None:
    tensors = original_layout(flux.case.model_class, flux.state)
    del tensors["double_blocks.0.img_mlp.2.bias"]
    save_file(tensors, tmp_path / "m.safetensors")
    with refused("double_blocks.0.img_mlp.2.bias", "FLUX.1"):
        open_single_file(tmp_path / "m.safetensors")


def test_a_variant_that_diffusers_has_not_is_refused_with_its_reason(tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == "chroma")
    extra = {"nerf_blocks.0.norm.scale": torch.ones(2)}
    file = write_single_file(tmp_path / "m.safetensors", case.model_class, build(case).state_dict(), **extra)
    with refused("Radiance", "Chroma1"):
        open_single_file(file)


@pytest.mark.parametrize(
    "family", {family.model_class: family for family in FAMILIES}.values(), ids=lambda f: f.name
)
def test_every_family_is_of_a_class_that_diffusers_has(family: Any) -> None:
    assert hasattr(diffusers, family.model_class)


# ---- what is no diffusion transformer

FOREIGN: Mapping[str, tuple[str, ...]] = {
    "T5": ("shared.weight", "encoder.block.0.layer.0.SelfAttention.q.weight"),
    "CLIP text": ("text_model.encoder.layers.0.self_attn.q_proj.weight", "text_model.embeddings.x"),
    "CLIP vision": ("vision_model.encoder.layers.0.self_attn.q_proj.weight", "visual_projection.weight"),
    "Qwen-VL": ("visual.blocks.0.attn.qkv.weight", "model.layers.0.self_attn.q_proj.weight"),
    "Llama": ("model.layers.0.self_attn.q_proj.weight", "model.embed_tokens.weight"),
    "VAE": ("encoder.conv_in.weight", "decoder.conv_in.weight"),
    "UNet": (
        "model.diffusion_model.input_blocks.0.0.weight",
        "model.diffusion_model.input_blocks.1.0.x.weight",
    ),
    "upscaler": ("model.0.weight", "model.1.sub.0.RDB1.conv1.0.weight"),
    "ControlNet": ("controlnet_blocks.0.weight", "double_blocks.0.img_mod.lin.weight"),
    "LoRA": ("diffusion_model.double_blocks.0.img_attn.qkv.lora_A.weight", "diffusion_model.x.lora_B.weight"),
}
SPELLINGS_OF_LORA = (
    "lora_unet_double_blocks_0_img_attn_qkv.lora_up.weight",
    "transformer.transformer_blocks.0.attn.to_q.lora_down.weight",
    "transformer_blocks.0.attn.to_q.lora_A.default.weight",
    "diffusion_model.blocks.0.lokr_w1",
    "blocks.0.attn.hada_w1_a",
)


@pytest.mark.parametrize("kind", FOREIGN)
def test_other_kinds_of_files_are_called_what_they_are(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "m.safetensors"
    save_file({key: torch.ones(1) for key in FOREIGN[kind]}, file)
    with refused(kind.split()[0], "m.safetensors", "FLUX.1"):
        open_single_file(file)


@pytest.mark.parametrize("key", SPELLINGS_OF_LORA)
def test_a_lora_is_known_in_every_spelling(key: str, tmp_path: Path) -> None:
    save_file({key: torch.ones(1)}, tmp_path / "m.safetensors")
    with refused("a LoRA"):
        open_single_file(tmp_path / "m.safetensors")


def test_a_controlnet_made_of_flux_blocks_is_no_flux(flux: Tiny, tmp_path: Path) -> None:
    extra = {"controlnet_blocks.0.weight": torch.ones(2)}
    file = write_single_file(tmp_path / "m.safetensors", flux.case.model_class, flux.state, **extra)
    with refused("a ControlNet"):
        open_single_file(file)


def test_an_unknown_architecture_is_shown_by_its_keys(tmp_path: Path) -> None:
    save_file({"backbone.stage.0.w": torch.ones(1), "head.w": torch.ones(1)}, tmp_path / "m.safetensors")
    with refused("'backbone.stage.0.w'", "'head.w'", "Qwen-Image", "Z-Image"):
        open_single_file(tmp_path / "m.safetensors")


def test_a_file_without_tensors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").write_bytes(safetensors({}))
    with refused("none at all"):
        open_single_file(tmp_path / "m.safetensors")


@pytest.mark.parametrize(
    "name, start, said",
    [
        ("m.gguf", b"GGUF\x03\0\0\0", "GGUF"),
        ("renamed.safetensors", b"GGUF\x03\0\0\0", "GGUF"),
        ("m.ckpt", b"PK\x03\x04\0\0\0\0", "pickle"),
        ("m.pt", b"\x80\x02}q\0.\0\0", "pickle"),
        ("renamed.safetensors", b"PK\x03\x04\0\0\0\0", "pickle"),
        ("m.bin", b"", "pickle"),
        ("m.flashpack", b"\0" * 8, "FlashPack"),
        ("m.safetensors", b"<!DOCTYPE html>", "not a safetensors file"),
    ],
)
def test_other_formats_are_refused_by_their_first_bytes(
    tmp_path: Path, name: str, start: bytes, said: str
) -> None:
    (tmp_path / name).write_bytes(start)
    with refused(said, name):
        open_single_file(tmp_path / name)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with refused("m.safetensors"):
        open_single_file(tmp_path / "m.safetensors")


# ---- headers that lie

TWO = entries({"a": ("F32", (2, 3)), "b": ("BF16", (4,))})


def changed(key: str, **fields: Any) -> dict[str, Any]:
    return {**TWO, key: {**TWO[key], **fields}}


@pytest.mark.parametrize(
    "header, said",
    [
        (changed("a", shape=[2, 4]), ("'a'", "needs 32 bytes")),
        (changed("a", dtype="F16"), ("'a'", "needs 12 bytes")),
        (changed("b", data_offsets=[20, 28]), ("'b'", "overlaps 'a'")),
        (changed("b", data_offsets=[26, 34]), ("'b'", "belong to no tensor")),
        (changed("a", dtype="F7"), ("'a'", "F7")),
        (changed("a", shape=[-2, -3]), ("'a'", "impossible")),
        (changed("a", shape=[True, 6]), ("'a'", "impossible")),
        (changed("a", shape=[1 << 60, 0]), ("'a'", "impossible")),
        (changed("a", data_offsets=[24, 0]), ("'a'", "impossible")),
        (changed("a", data_offsets="all"), ("'a'", "not a dtype")),
        ({**TWO, "c": 5}, ("'c'", "not a dtype")),
        ({**TWO, "__metadata__": [1]}, ("__metadata__",)),
        ({**TWO, "__metadata__": {"a": 1}}, ("__metadata__",)),
        ([1], ("not a safetensors file",)),
        (b"{", ("not a safetensors file",)),
        (b"[" * 100_000, ("not a safetensors file",)),
    ],
)
def test_a_header_that_lies_is_refused_by_key_and_file(
    tmp_path: Path, header: Any, said: tuple[str, ...]
) -> None:
    file = tmp_path / "m.safetensors"
    file.write_bytes(safetensors(header, data=32))
    with refused(*said, "m.safetensors"):
        open_files([file])


@pytest.mark.parametrize("size, said", [(31, "cut short"), (33, "too long")])
def test_a_file_of_another_length_is_refused(tmp_path: Path, size: int, said: str) -> None:
    (tmp_path / "m.safetensors").write_bytes(safetensors(TWO, data=size))
    whole = (tmp_path / "m.safetensors").stat().st_size
    with refused(said, "m.safetensors", f"has {whole:,}"):
        open_files([tmp_path / "m.safetensors"])


def test_a_key_in_two_files_is_refused(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.safetensors").write_bytes(safetensors(TWO))
    with refused("'a'", "'one.safetensors'", "'two.safetensors'"):
        open_files([tmp_path / "one.safetensors", tmp_path / "two.safetensors"])


def test_several_files_are_one_set_of_tensors_in_the_order_on_disk(tmp_path: Path) -> None:
    save_file(
        {"z": torch.arange(6.0), "a": torch.ones(2, dtype=torch.bfloat16)}, tmp_path / "one.safetensors"
    )
    save_file({"m": torch.tensor(3.0), "k": torch.zeros(0)}, tmp_path / "two.safetensors", {"note": "text"})
    found = open_files([tmp_path / "one.safetensors", tmp_path / "two.safetensors"])
    assert list(found.tensors)[:2] == ["z", "a"] and set(found.tensors) == {"z", "a", "m", "k"}
    assert found.metadata == {"note": "text"}
    assert found.tensors["m"].read(()).item() == 3.0
    assert found.tensors["a"].item_bytes == 2 and found.tensors["a"].where == "'a' in 'one.safetensors'"
    assert found.tensors["z"].read((slice(2, 4),)).tolist() == [2.0, 3.0]
