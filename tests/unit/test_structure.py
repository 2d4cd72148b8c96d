"""What is read from a model's modules: where its heads and hidden features are, family by family."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch
from diffusers.hooks.tensor_parallel import TPShardSpec, resolve_tp_shard_specs
from torch import nn

from runtime.engine.structure import Split, Structure, hidden, read_structure
from runtime.engine.tensor import Block, Shard
from tests.parity.matrix import CASES, drawn
from tests.support.threads import one_torch_thread

UPSTREAM = (
    "FluxTransformer2DModel",
    "Flux2Transformer2DModel",
    "QwenImageTransformer2DModel",
    "QwenImage21Transformer2DModel",
)
# Two layers and an activation between them, before the blocks: upstream leaves them whole.
WHOLE_UPSTREAM = {"QwenImage21Transformer2DModel": {"txt_in.in_layer", "txt_in.out_layer"}}


@pytest.fixture(scope="module", autouse=True)
def polite() -> Iterator[None]:
    with one_torch_thread():
        yield


@functools.cache
def tiny(name: str, seed: int = 0) -> nn.Module:
    return drawn(CASES[name], seed)[0]


@functools.cache
def structure(name: str, seed: int = 0) -> Structure:
    return read_structure(tiny(name, seed))


def named(name: str, ending: str) -> list[str]:
    """The paths in a model that end in `ending`; there must be some."""
    found = [path for path, _ in tiny(name).named_modules() if path.endswith(ending)]
    assert found, f"no {ending} in {name}"
    return found


# ---- against upstream's plans


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", UPSTREAM)
def test_structure_finds_what_upstream_plans(name: str, seed: int) -> None:
    """When this fails upstream has changed a plan, or the modules under it."""
    model, found = tiny(name, seed), structure(name, seed)
    specs = resolve_tp_shard_specs(model, model._tp_plan, 1)
    theirs = {path.removesuffix(".weight"): spec for path, spec in specs.items() if path.endswith(".weight")}
    ours = {
        path: TPShardSpec(split.dim, [block.size for block in split.blocks])
        for path, split in found.splits.items()
    }
    assert theirs
    assert {path: ours.get(path) for path in theirs} == theirs
    assert ours.keys() - theirs.keys() == WHOLE_UPSTREAM.get(name, set())


@pytest.mark.parametrize("name", UPSTREAM)
def test_two_equal_ranks_hold_what_upstream_gives_them(name: str) -> None:
    """Upstream cuts each block in equal stretches; so do we where whole units allow it."""
    model = next(
        tiny(name, seed) for seed in range(20) if tiny(name, seed).config.num_attention_heads % 2 == 0
    )
    found = read_structure(model)
    specs = resolve_tp_shard_specs(model, model._tp_plan, 1)
    compared = 0
    for path, split in found.splits.items():
        spec = specs.get(f"{path}.weight")
        if spec is None or any(block.units % 2 for block in split.blocks):
            continue
        for rank in range(2):
            theirs, offset = [], 0
            for size in spec.block_sizes or []:
                half = size // 2
                theirs.append((offset + rank * half, offset + (rank + 1) * half))
                offset += size
            assert Shard(split.dim, split.blocks).ranges(rank, (1, 1)) == theirs
            compared += 1
    assert compared >= 20


def test_every_class_with_a_plan_upstream_is_compared() -> None:
    assert {name for name in CASES if getattr(tiny(name), "_tp_plan", None)} == set(UPSTREAM)


# ---- every family


@pytest.mark.parametrize("name", CASES)
def test_splits_cover_their_layers(name: str) -> None:
    model, found = tiny(name), structure(name)
    assert found.splits
    for path, split in found.splits.items():
        module = model.get_submodule(path)
        assert isinstance(module, nn.Linear | nn.Conv2d)
        assert sum(block.size for block in split.blocks) == module.weight.shape[split.dim]
        assert all(block.size % block.units == 0 for block in split.blocks)
    for path, block in found.norms.items():
        assert all(block.size == parameter.numel() for parameter in model.get_submodule(path).parameters())
    paths = {path for group in found.partners for path in group}
    assert paths == set(found.splits)


@pytest.mark.parametrize("name", CASES)
def test_what_an_attention_counts_is_cut_with_its_heads(name: str) -> None:
    model, found = tiny(name), structure(name)
    for path, attention in found.attentions.items():
        module = model.get_submodule(path)
        assert attention.counts, path
        for attribute, block in attention.counts.items():
            assert getattr(module, attribute) == block.size
            assert block.units == attention.groups


def test_an_empty_model_says_the_same_as_one_with_weights() -> None:
    with torch.device("meta"):
        empty = type(tiny(UPSTREAM[0])).from_config(tiny(UPSTREAM[0]).config)
    assert read_structure(empty) == structure(UPSTREAM[0])


# ---- heads


@pytest.mark.parametrize("name", ["Lumina2Transformer2DModel", "Krea2Transformer2DModel"])
def test_query_heads_are_split_by_the_groups_that_share_keys_and_values(name: str) -> None:
    found = structure(name)
    shared = 0
    for path, attention in found.attentions.items():
        (query,), (key,) = (found.splits[f"{path}.{one}"].blocks for one in ("to_q", "to_k"))
        assert query.units == key.units == attention.groups
        shared += query.size > key.size
        for shares in ((1, 1), (2, 1), (1, 1, 1, 1)):
            widths = [[stop - start for start, stop in block.ranges(shares)] for block in (query, key)]
            assert [q * key.size for q in widths[0]] == [k * query.size for k in widths[1]]
    assert shared, "no grouped-query attention in this model"


@pytest.mark.parametrize("name", ["Lumina2Transformer2DModel", "NucleusMoEImageTransformer2DModel"])
def test_an_attention_without_a_count_of_its_key_heads_tells_by_the_width(name: str) -> None:
    model = tiny(name)
    (groups,) = {attention.groups for attention in structure(name).attentions.values()}
    assert groups == model.config.get("num_kv_heads", model.config.get("num_key_value_heads"))
    assert groups < model.config.num_attention_heads


ACROSS_HEADS = (
    *("WanTransformer3DModel", "WanVACETransformer3DModel", "LTXVideoTransformer3DModel"),
    *("LTX2VideoTransformer3DModel", "HiDreamImageTransformer2DModel"),
)
OF_ONE_HEAD = ("FluxTransformer2DModel", "QwenImageTransformer2DModel", "Lumina2Transformer2DModel")


@pytest.mark.parametrize("name", ACROSS_HEADS)
def test_norms_across_all_heads_are_found(name: str) -> None:
    found = structure(name)
    for path in found.attentions:
        for norm, projection in (("norm_q", "to_q"), ("norm_k", "to_k"), ("q_rms_norm", "to_q")):
            if hasattr(tiny(name).get_submodule(path), norm):
                assert found.norms[f"{path}.{norm}"] == found.splits[f"{path}.{projection}"].blocks[0]
    assert found.norms


@pytest.mark.parametrize("name", OF_ONE_HEAD)
def test_norms_of_one_head_stay_whole(name: str) -> None:
    assert named(name, "norm_q")
    assert not structure(name).norms


ROTARY = {
    "LTXVideoTransformer3DModel": {"rope": None},
    "LTX2VideoTransformer3DModel": {
        "rope": None,
        "audio_rope": None,
        "cross_attn_rope": None,
        "cross_attn_audio_rope": None,
    },
    "MochiTransformer3DModel": {"rope": 1},
}


def test_three_families_have_a_rotary_table_for_each_head() -> None:
    found = {name: structure(name).rotary for name in CASES if structure(name).rotary}
    assert {
        name: {path: dim for path, (_, dim) in tables.items()} for name, tables in found.items()
    } == ROTARY
    for name, tables in found.items():
        assert set(structure(name).turned) == set(tables)
        for path, (heads, _) in tables.items():
            users = structure(name).turned[path]
            assert users
            assert {structure(name).attentions[user].groups for user in users} == {heads}


# ---- feed-forwards


@pytest.mark.parametrize(
    ("name", "into", "out"),
    [
        ("Flux2Transformer2DModel", "ff.linear_in", "ff.linear_out"),
        ("NucleusMoEImageTransformer2DModel", "shared_expert.net.0.proj", "shared_expert.net.2"),
    ],
)
def test_a_gate_and_what_it_gates_are_split_each_on_its_own(name: str, into: str, out: str) -> None:
    found = structure(name)
    for path, other in zip(named(name, into), named(name, out), strict=True):
        (block,) = found.splits[other].blocks
        assert found.splits[path] == Split("colwise", (block, block))


def test_gates_in_layers_of_their_own_are_split_alike() -> None:
    found, name = structure("Krea2Transformer2DModel"), "Krea2Transformer2DModel"
    for path in named(name, "ff.down"):
        block = found.splits[path].blocks
        for gate in ("gate", "up"):
            assert found.splits[path.replace("down", gate)] == Split("colwise", block)


def test_attention_and_feed_forward_out_of_one_projection() -> None:
    """FLUX.2's single blocks: query, key, value, gate and hidden in one layer."""
    found, name = structure("Flux2Transformer2DModel"), "Flux2Transformer2DModel"
    config = tiny(name).config
    heads = Block(config.num_attention_heads * config.attention_head_dim, config.num_attention_heads)
    for path in named(name, "to_qkv_mlp_proj"):
        owner = path.rpartition(".")[0]
        features = found.counts[owner]["mlp_hidden_dim"]
        assert found.splits[path].blocks == (heads, heads, heads, features, features)
        assert found.splits[f"{owner}.to_out"] == Split("rowwise", (heads, features))


def test_experts_are_split_by_their_hidden_features() -> None:
    name = "NucleusMoEImageTransformer2DModel"
    model, found = tiny(name), structure(name)
    assert set(found.experts) == set(named(name, "img_mlp.experts"))
    for path, block in found.experts.items():
        experts = model.get_submodule(path)
        assert experts.gate_up_proj.shape[2] == 2 * block.size
        assert experts.down_proj.shape[1] == block.size
    assert not any(path.endswith("img_mlp.gate") for path in found.splits), "the router chooses among all"


def test_sanas_convolutions_are_split_by_channels() -> None:
    name = "SanaTransformer2DModel"
    found = structure(name)
    for path in named(name, "ff"):
        (block,) = found.splits[f"{path}.conv_point"].blocks
        assert found.splits[f"{path}.conv_point"].style == "rowwise"
        assert found.splits[f"{path}.conv_inverted"] == Split("colwise", (block, block))
        assert found.depthwise[f"{path}.conv_depth"] == (block, block)


@pytest.mark.parametrize(
    ("size", "units"),
    [(12288, 192), (4096, 64), (4095, 4095), (3072, 96), (256, 64), (107, 107), (2, 2), (64, 64), (128, 64)],
)
def test_hidden_features_come_in_granules_while_there_are_enough(size: int, units: int) -> None:
    assert hidden(size) == Block(size, units)


# ---- what stays whole


def test_an_attention_that_returns_the_texts_heads_stays_whole() -> None:
    """EasyAnimate's last block has no projection for its text."""
    name = "EasyAnimateTransformer3DModel"
    found, model = structure(name), tiny(name)
    for path in named(name, "attn1"):
        is_closed = model.get_submodule(path).to_add_out is not None
        assert (path in found.attentions) == is_closed
        assert any(split.startswith(f"{path}.") for split in found.splits) == is_closed
    assert 0 < len(found.attentions) < len(named(name, "attn1"))


def test_attentions_that_share_one_projection_stay_whole() -> None:
    """Lumina-Next adds the heads of two attentions before the projection of one of them."""
    name = "LuminaNextDiT2DModel"
    found = structure(name)
    assert named(name, "attn1.to_q") and named(name, "attn2.to_q")
    assert not found.attentions
    assert not any(".attn" in path for path in (*found.splits, *found.norms))
    assert found.splits, "its feed-forwards are split all the same"


def test_heads_that_go_to_another_attention_stay_whole() -> None:
    """Motif Video's single blocks, where they have cross-attention: it projects the heads of the first again."""
    name = "MotifVideoTransformer3DModel"
    found, model = structure(name), tiny(name)
    for block in named(name, "proj_mlp"):
        owner = block.rpartition(".")[0]
        is_plain = model.get_submodule(owner).cross_attn is None
        assert any(path.startswith(f"{owner}.") for path in found.splits) == is_plain
        assert any(owner in path for group in found.partners for path in group) == is_plain
    assert {
        model.get_submodule(path.rpartition(".")[0]).cross_attn is None for path in named(name, "proj_mlp")
    } == {
        True,
        False,
    }


class Attention(nn.Module):
    """The least that is read as an attention: 6 heads of 4 in a stream of 24."""

    def __init__(self, **changes: object):
        super().__init__()
        self.heads: object = 6
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(24, 24) for _ in range(4))
        for name, value in changes.items():
            setattr(self, name, value)


def attentions(**changes: object) -> list[str]:
    return list(read_structure(nn.ModuleDict({"attn": Attention(**changes)})).attentions)


def test_an_attention_is_known_by_its_parts() -> None:
    assert attentions() == ["attn"]
    assert attentions(heads=None, head_dim=4) == ["attn"]
    assert attentions(heads=None, num_heads=6, num_kv_heads=6) == ["attn"]


def test_a_number_for_each_head_is_split_with_the_heads() -> None:
    model = nn.ModuleDict(
        {"attn": Attention(sinks=nn.Parameter(torch.ones(6)), scale=nn.Parameter(torch.ones(1)))}
    )
    found = read_structure(model)
    assert found.per_head == {"attn.sinks": Block(6, 6)}
    assert found.attentions


@pytest.mark.parametrize("shape", [(24,), (6, 4), (4,), (2, 6)], ids=str)
def test_an_attention_with_a_parameter_of_unknown_use_stays_whole(shape: tuple[int, ...]) -> None:
    assert attentions(other=nn.Parameter(torch.ones(shape))) == []


@pytest.mark.parametrize(
    ("width", "is_known", "is_across"),
    [(4, True, False), (24, True, True), (1, True, False), (12, False, False)],
)
def test_a_norm_is_of_one_head_or_across_all_of_them(width: int, is_known: bool, is_across: bool) -> None:
    found = read_structure(nn.ModuleDict({"attn": Attention(norm_q=nn.RMSNorm(width))}))
    assert bool(found.attentions) == is_known
    assert found.norms == ({"attn.norm_q": Block(24, 6)} if is_across else {})


def test_a_norm_without_a_weight_is_of_one_head() -> None:
    assert attentions(norm_q=nn.RMSNorm(4, elementwise_affine=False)) == ["attn"]


@pytest.mark.parametrize(
    "changes",
    [
        {"heads": None},
        {"heads": True},
        {"heads": 5},
        {"heads": 0},
        {"heads": 6, "kv_heads": 4},
        {"to_v": None},
        {"to_k": nn.Linear(24, 22), "to_v": nn.Linear(24, 22)},
        {"to_v": nn.Linear(24, 20)},
        {"to_out": nn.Linear(22, 24)},
        {"to_out": None},
    ],
    ids=str,
)
def test_what_fits_only_half_stays_whole(changes: dict[str, object]) -> None:
    model = nn.ModuleDict({"attn": Attention(**changes)})
    found = read_structure(model)
    assert not found.splits and not found.attentions and not found.partners
