"""Loading: what does not fit is refused before a byte is read, and what is read is this rank's part and no more."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import nn

from runtime.engine.checkpoints.folder import open_folder
from runtime.engine.checkpoints.source import Checkpoint, Index, WeightSource
from runtime.engine.loading import (
    SliceRead,
    bytes_to_read,
    check_sources,
    empty_model,
    read_weights,
    shard_loaded,
    transformer_class,
)
from runtime.engine.plans import tensor_plan
from runtime.engine.tensor import Shard
from runtime.spec import Cancelled
from tests.parity.matrix import CASES, drawn
from tests.support.refusals import refused
from tests.support.threads import one_torch_thread

FLUX, WAN, SD3 = "FluxTransformer2DModel", "WanTransformer3DModel", "SD3Transformer2DModel"
CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def polite() -> Iterator[None]:
    with one_torch_thread():
        yield


@functools.cache
def tiny(name: str) -> nn.Module:
    return drawn(CASES[name], 0)[0]


def bare(name: str) -> nn.Module:
    """The same model without weights."""
    return empty_model(name, tiny(name).config)


@dataclass
class Held:
    """A weight source in memory, which notes what is read."""

    key: str
    whole: torch.Tensor
    item_bytes: int = 4
    reads: list[Index] = field(default_factory=list)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.whole.shape)

    @property
    def where(self) -> str:
        return f"'{self.key}' in 'model.safetensors'"

    def read(self, index: Index) -> torch.Tensor:
        self.reads.append(index)
        return self.whole[index]


def held(name: str) -> dict[str, Held]:
    return {key: Held(key, tensor) for key, tensor in tiny(name).state_dict().items()}


def sources_of(found: dict[str, Held]) -> dict[str, WeightSource]:
    return {**found}


def untouched(found: dict[str, Held]) -> bool:
    return not any(source.reads for source in found.values())


# ---- which class


@pytest.mark.parametrize("name", [FLUX, WAN, "StableAudioDiTModel", "Cosmos3OmniTransformer"])
def test_diffusers_transformers_are_found_by_name(name: str) -> None:
    assert transformer_class(name).__name__ == name


@pytest.mark.parametrize(
    "name",
    [
        *(
            "",
            "ModelMixin",
            "ConfigMixin",
            "AutoencoderKL",
            "UNet2DConditionModel",
            "FluxPipeline",
            "AutoModel",
        ),
        *("os", "torch", "nn", "transformer_flux", "transformer_flux.FluxTransformer2DModel", "__class__"),
        *(
            "__loader__",
            "__builtins__",
            "FluxTransformer2DModel ",
            "fluxtransformer2dmodel",
            "is_torch_available",
        ),
        *("../FluxTransformer2DModel", "Flux\nTransformer\nModel", "\x00\u2028", "x" * 10_000),
        *(None, 1, ["FluxTransformer2DModel"], {}),
    ],
    ids=lambda name: repr(name)[:40],
)
def test_nothing_else_is_ever_a_transformer(name: Any) -> None:
    with refused("There is no transformer called", "Only diffusers' own transformer classes") as caught:
        transformer_class(name)
    assert len(str(caught.value)) < 400


def test_an_empty_model_has_no_weights_and_real_tables() -> None:
    model = bare(SD3)
    assert all(parameter.is_meta and not parameter.requires_grad for parameter in model.parameters())
    assert not model.training
    assert torch.equal(model.get_buffer("pos_embed.pos_embed"), tiny(SD3).get_buffer("pos_embed.pos_embed"))


# ---- what does not fit


@pytest.mark.parametrize("name", [FLUX, WAN, SD3])
def test_a_models_own_checkpoint_fits(name: str) -> None:
    found = held(name)
    check_sources(bare(name), sources_of(found))
    assert untouched(found)


def test_a_missing_weight_is_refused_by_name() -> None:
    found = held(FLUX)
    del found["x_embedder.weight"]
    count = len(tiny(FLUX).state_dict())
    with refused(
        "The weight files lack 'x_embedder.weight'.",
        f"FluxTransformer2DModel needs every one of its {count} tensors.",
        "Download the model's files again; all parts of a model in several files are needed.",
    ):
        check_sources(bare(FLUX), sources_of(found))
    assert untouched(found)


def test_many_missing_weights_are_counted() -> None:
    found = held(FLUX)
    gone = sorted(key for key in found if key.startswith("single_transformer_blocks.1."))
    for key in gone:
        del found[key]
    with refused(f"The weight files lack {len(gone)} tensors, such as '{gone[0]}'."):
        check_sources(bare(FLUX), sources_of(found))


def test_a_weight_too_many_is_refused_with_its_file() -> None:
    found = held(FLUX)
    found["lora.down.weight"] = Held("lora.down.weight", torch.zeros(2))
    with refused(
        "The weight files hold 'lora.down.weight' too many: 'lora.down.weight' in 'model.safetensors'.",
        "This FluxTransformer2DModel has no place for it, and leaving it out could change the picture.",
        "Use the file as it was published; extensions such as LoRA or IP-Adapter are files of their own.",
    ):
        check_sources(bare(FLUX), sources_of(found))
    assert untouched(found)


def test_many_weights_too_many_are_counted() -> None:
    found = held(FLUX)
    for number in range(3):
        found[f"extra.{number}"] = Held(f"double.{number}", torch.zeros(2))
    with refused("hold 3 tensors, such as 'extra.0', too many: 'double.0' in 'model.safetensors'."):
        check_sources(bare(FLUX), sources_of(found))


def test_a_name_from_a_file_cannot_break_the_lines() -> None:
    found = held(FLUX)
    name = "a\nb\x1b[31m\u2028" + "x" * 5000
    found[name] = Held("key", torch.zeros(2))
    with refused("'a b [31m x") as caught:
        check_sources(bare(FLUX), sources_of(found))
    assert len(str(caught.value)) < 700


@pytest.mark.parametrize("shape", [(3, 5), (7,), (), (2, 3, 4)], ids=str)
def test_a_weight_of_another_shape_is_refused_with_both(shape: tuple[int, ...]) -> None:
    found = held(FLUX)
    wanted = " x ".join(map(str, found["proj_out.weight"].shape))
    found["proj_out.weight"] = Held("final_layer.linear.weight", torch.zeros(shape))
    with refused(
        "'final_layer.linear.weight' in 'model.safetensors' has the shape "
        f"{' x '.join(map(str, shape)) or 'of one number'}.",
        f"'proj_out.weight' of this FluxTransformer2DModel has the shape {wanted}.",
        "Download the file again, with the config that was published beside it.",
    ):
        check_sources(bare(FLUX), sources_of(found))
    assert untouched(found)


def test_a_table_of_another_shape_is_refused() -> None:
    found = held(SD3)
    found["pos_embed.pos_embed"] = Held("pos_embed", torch.zeros(1, 4, 4))
    with refused("'pos_embed' in 'model.safetensors' has the shape 1 x 4 x 4."):
        check_sources(bare(SD3), sources_of(found))


def test_the_wrong_config_is_refused() -> None:
    found = held(FLUX)
    config = dict(tiny(FLUX).config)
    with refused("has the shape"):
        check_sources(empty_model(FLUX, config | {"in_channels": 20}), sources_of(found))
    with refused("The weight files lack"):
        check_sources(empty_model(FLUX, config | {"num_layers": 2}), sources_of(found))
    with refused("too many"):
        check_sources(empty_model(FLUX, config | {"num_single_layers": 1}), sources_of(found))


def test_keys_that_upstream_leaves_out_are_left_out() -> None:
    """Wan's first image-to-video files hold norms that no version of the model uses."""
    assert bare(WAN)._keys_to_ignore_on_load_unexpected == ["norm_added_q"]
    found = held(WAN)
    unused = Held("blocks.0.attn2.norm_added_q.weight", torch.zeros(8))
    found[unused.key] = unused
    model = bare(WAN)
    check_sources(model, sources_of(found))
    read(model, found)
    assert not unused.reads
    del found[unused.key]
    found["blocks.0.attn2.norm_added_qq.other"] = unused  # a part of the name is enough for upstream too
    check_sources(model, sources_of(found))


def test_a_table_that_the_file_lacks_is_refused_too() -> None:
    """A computed one may not be the one the model was trained with."""
    found = held(SD3)
    del found["pos_embed.pos_embed"]
    with refused("The weight files lack 'pos_embed.pos_embed'."):
        check_sources(bare(SD3), sources_of(found))


# ---- what is read


def read(
    model: nn.Module,
    found: dict[str, Any],
    shards: dict[str, Shard] | None = None,
    rank: int = 0,
    shares: tuple[int, ...] = (1,),
    dtype: torch.dtype = torch.float32,
    stop_after: int = 10**9,
) -> tuple[list[int], list[SliceRead]]:
    """Load, and return the bytes told after each tensor and the slices; cancelled after some tensors."""
    told: list[int] = []
    slices: list[SliceRead] = []
    read_weights(
        model,
        found,
        shards or {},
        rank=rank,
        shares=shares,
        dtype=dtype,
        device=CPU,
        on_bytes=told.append,
        cancelled=lambda: len(told) >= stop_after,
        on_slice=slices.append,
    )
    return told, slices


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    """Folders as diffusers writes them, in several files."""
    opened = {}
    for name in (FLUX, WAN, SD3, "SanaTransformer2DModel", "NucleusMoEImageTransformer2DModel"):
        folder = tmp_path_factory.mktemp("models") / name
        tiny(name).save_pretrained(folder, max_shard_size="200KB")
        assert len(list(folder.glob("*.safetensors"))) > 1
        opened[name] = open_folder(folder)
    return opened


MODELS = (FLUX, WAN, SD3, "SanaTransformer2DModel", "NucleusMoEImageTransformer2DModel")


@pytest.mark.parametrize("shares", [(1,), (1, 1), (2, 1), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_every_rank_gets_its_part_of_the_files(
    name: str, shares: tuple[int, ...], saved: dict[str, Checkpoint]
) -> None:
    checkpoint = saved[name]
    assert checkpoint.model_class == name
    for rank in range(len(shares)):
        model = empty_model(name, checkpoint.config)
        check_sources(model, checkpoint.sources)
        shards = tensor_plan(model, shares).shards(model) if len(shares) > 1 else {}
        told, slices = read(model, dict(checkpoint.sources), shards, rank, shares)
        expected = drawn(CASES[name], 0)[0]
        shard_loaded(expected, shards, rank, shares)
        loaded = model.state_dict()
        assert loaded.keys() == expected.state_dict().keys()
        for key, tensor in expected.state_dict().items():
            assert torch.equal(loaded[key], tensor), key
        assert not any(parameter.requires_grad for parameter in model.parameters())
        # What was announced is what was read, and what was read is what is held.
        announced = bytes_to_read(checkpoint.sources, shards, rank, shares)
        assert sum(told) == announced == sum(4 * one.read for one in slices)
        assert announced == sum(4 * tensor.numel() for tensor in loaded.values())
        assert {one.name: one.read for one in slices} == {key: one.numel() for key, one in loaded.items()}
        assert all((one.read < one.stored) == (one.name in shards) for one in slices)


def test_all_ranks_together_read_each_planned_weight_once(saved: dict[str, Checkpoint]) -> None:
    checkpoint, shares = saved[FLUX], (2, 1)
    model = empty_model(FLUX, checkpoint.config)
    shards = tensor_plan(model, shares).shards(model)
    whole = bytes_to_read(checkpoint.sources, {}, 0, (1,))
    planned = sum(4 * model.get_parameter(name).numel() for name in shards)
    each = [bytes_to_read(checkpoint.sources, shards, rank, shares) for rank in range(2)]
    assert sum(each) == whole + (whole - planned)
    assert each[0] > each[1]


def test_bytes_are_those_of_the_file_whatever_is_held() -> None:
    found = {key: replace(source, item_bytes=2) for key, source in held(FLUX).items()}
    told, slices = read(bare(FLUX), found)
    assert sum(told) == bytes_to_read(sources_of(found), {}, 0, (1,)) == sum(2 * one.read for one in slices)


@pytest.mark.parametrize("count", [0, 1, 7])
def test_a_cancelled_load_stops_before_the_next_tensor(count: int) -> None:
    found = held(FLUX)
    with pytest.raises(Cancelled):
        read(bare(FLUX), found, stop_after=count)
    assert [bool(source.reads) for source in found.values()] == [n < count for n in range(len(found))]


# ---- in which dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", [WAN, FLUX, "Krea2Transformer2DModel", "CosmosTransformer3DModel"])
def test_some_modules_stay_in_float32(name: str, dtype: torch.dtype) -> None:
    """diffusers names them; a name counts where it is a whole part of the path."""
    model = bare(name)
    keep = set(model._keep_in_fp32_modules or ())
    read(model, held(name), dtype=dtype)
    kept = {key for key, one in model.named_parameters() if one.dtype == torch.float32}
    if dtype == torch.float32:
        assert kept == dict(model.named_parameters()).keys()
    else:
        assert kept == {key for key, _ in model.named_parameters() if keep & set(key.split("."))}
    assert bool(kept) == bool(keep or dtype == torch.float32)
    assert {one.dtype for one in model.parameters()} <= {dtype, torch.float32}


def test_a_part_of_what_stays_in_float32_does_too() -> None:
    shares = (2, 1)
    model = bare(WAN)
    shards = tensor_plan(model, shares).shards(model)
    read(model, held(WAN), shards, 1, shares, torch.bfloat16)
    for key, parameter in model.named_parameters():
        is_kept = bool(set(model._keep_in_fp32_modules) & set(key.split(".")))
        assert parameter.dtype == (torch.float32 if is_kept else torch.bfloat16)


def test_a_table_in_the_file_is_loaded() -> None:
    found = held(SD3)
    table = torch.randn_like(found["pos_embed.pos_embed"].whole)
    found["pos_embed.pos_embed"] = Held("pos_embed.pos_embed", table)
    model = bare(SD3)
    read(model, found, dtype=torch.bfloat16)
    loaded = model.get_buffer("pos_embed.pos_embed")
    assert torch.equal(loaded, table.bfloat16())
    assert "pos_embed.pos_embed" not in dict(model.named_parameters())
