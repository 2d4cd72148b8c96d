"""A tensor plan for every family: what each rank holds of it, and what a user's own plan may and may not say."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch.distributed as dist
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from runtime.engine.loading import empty_model, shard_loaded
from runtime.engine.plans import TensorPlan, apply_plan, tensor_plan
from runtime.engine.structure import GATHERED, SPLIT_INPUT, Split, hidden, read_structure
from runtime.engine.tensor import AcrossHeadsNorm, Ranks, RowSplitLinear, Shard
from runtime.spec import Refusal
from tests.parity.matrix import CASES, drawn
from tests.support.refusals import check_lines, refused
from tests.support.threads import one_torch_thread

LAYOUTS = ((1, 1), (1, 1, 1), (1, 1, 1, 1), (2, 1))
FLUX, FLUX2 = "FluxTransformer2DModel", "Flux2Transformer2DModel"
# Tiny as they are here, some are mostly patches: what no rule splits.
MOSTLY_EMBEDDINGS = ("HeliosTransformer3DModel",)


@pytest.fixture(scope="module", autouse=True)
def polite() -> Iterator[None]:
    with one_torch_thread():
        yield


@functools.cache
def tiny(name: str, seed: int = 0) -> nn.Module:
    return drawn(CASES[name], seed)[0]


@functools.cache
def plan_for(name: str, degree: int) -> TensorPlan:
    return tensor_plan(tiny(name), (1,) * degree)


def plan_of(name: str, shares: tuple[int, ...]) -> TensorPlan:
    """Which layers are split, and in which units, is the same for all shares: a test says so."""
    return plan_for(name, len(shares))


def own_plan(name: str, plan: Mapping[str, object], shares: Sequence[int] = (1, 1)) -> TensorPlan:
    return tensor_plan(tiny(name), shares, json.dumps(plan))


# ---- every family


@pytest.mark.parametrize("shares", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_all_ranks_together_hold_the_model(name: str, shares: tuple[int, ...]) -> None:
    model, plan = tiny(name), plan_of(name, shares)
    parameters, shards = dict(model.named_parameters()), plan.shards(model)
    assert shards.keys() <= parameters.keys()
    held = [0] * len(shares)
    for path, parameter in parameters.items():
        shard = shards.get(path)
        for rank in range(len(shares)):
            length = shard.length(rank, shares) if shard else parameter.shape[0] if parameter.ndim else 1
            assert length > 0
            size = parameter.shape[shard.dim] if shard else length
            held[rank] += parameter.numel() // size * length
        if shard:
            lengths = [shard.length(rank, shares) for rank in range(len(shares))]
            assert sum(lengths) == parameter.shape[shard.dim], path
    whole = sum(parameter.numel() for parameter in parameters.values())
    if shares == (1, 1, 1, 1) and name not in MOSTLY_EMBEDDINGS:
        assert max(held) <= 0.5 * whole
    assert max(held) < whole


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_split_that_the_plan_does_not_name(name: str) -> None:
    model, plan = tiny(name), plan_of(name, (1, 1))
    named = {*plan.splits, *plan.norms, *plan.depthwise, *plan.experts}
    for path in plan.shards(model):
        assert path.rpartition(".")[0] in named or path in plan.per_head
    for path, split in plan.splits.items():
        is_row = split.style in ("rowwise", SPLIT_INPUT)
        assert (f"{path}.bias" in plan.shards(model)) == (
            not is_row and model.get_submodule(path).bias is not None
        )


@pytest.mark.parametrize("name", CASES)
def test_heads_are_cut_with_the_layers_that_make_them(name: str) -> None:
    """Every planned attention keeps the width of a head on every rank, and every other one its count."""
    model, plan = tiny(name), plan_of(name, (2, 1))
    for path, attention in plan.attentions.items():
        query = next(
            plan.splits[f"{path}.{one}"].blocks[0]
            for one in ("to_q", "to_query", "to_qkv_mlp_proj", "img_attn_qkv", "img_qkv_proj")
            if f"{path}.{one}" in plan.splits
        )
        assert query.units == attention.groups
        heads = next(
            block for count, block in attention.counts.items() if "heads" in count and "kv" not in count
        )
        for (first, last), (start, stop) in zip(heads.ranges((2, 1)), query.ranges((2, 1)), strict=True):
            assert (stop - start) * heads.size == (last - first) * query.size
    assert plan.attentions == read_structure(model).attentions


@pytest.mark.parametrize("shares", [(2, 1), (24, 16), (1, 100)], ids=str)
def test_shares_change_what_a_rank_holds_and_not_the_plan(shares: tuple[int, ...]) -> None:
    assert tensor_plan(tiny(FLUX), shares) == plan_of(FLUX, shares)


def test_modulation_in_the_blocks_is_gathered() -> None:
    plan = plan_of(FLUX, (1, 1))
    gathered = {path for path, split in plan.splits.items() if split.style == GATHERED}
    assert {"transformer_blocks.0.norm1.linear", "single_transformer_blocks.1.norm.linear"} <= gathered
    assert not any("proj" in path or "attn" in path for path in gathered)


def test_a_large_model_keeps_its_embeddings_whole() -> None:
    """FLUX.1 as published: outside the blocks nothing is worth a collective."""
    model = empty_model(FLUX, {"num_layers": 3, "num_single_layers": 6})
    plan = tensor_plan(model, (1, 1))
    assert all(path.startswith(("transformer_blocks.", "single_transformer_blocks.")) for path in plan.splits)


def test_units_are_whole_heads() -> None:
    """38 heads over four ranks: 10, 10, 9, 9."""
    model = empty_model(
        FLUX,
        {
            "num_layers": 1,
            "num_single_layers": 1,
            "num_attention_heads": 38,
            "attention_head_dim": 32,
            "axes_dims_rope": (8, 12, 12),
        },
    )
    shard = tensor_plan(model, (1, 1, 1, 1)).shards(model)["transformer_blocks.0.attn.to_q.weight"]
    assert [shard.length(rank, (1, 1, 1, 1)) for rank in range(4)] == [320, 320, 288, 288]


@pytest.mark.parametrize("missing", ["num_layers", "num_single_layers"])
def test_a_config_without_a_kind_of_block_needs_no_key_for_it(missing: str) -> None:
    sizes = {"num_layers": 1, "num_single_layers": 1, "attention_head_dim": 8, "axes_dims_rope": (2, 2, 4)}
    plan = tensor_plan(empty_model(FLUX, sizes | {missing: 0}), (1, 1))
    prefixes = {path.partition(".")[0] for path in plan.attentions}
    assert prefixes == {
        "transformer_blocks" if missing == "num_single_layers" else "single_transformer_blocks"
    }


@pytest.mark.parametrize(
    "text",
    [
        "",
        json.dumps(
            {"transformer_blocks.*.ff.net.0.proj": "colwise", "transformer_blocks.*.ff.net.2": "rowwise"}
        ),
    ],
)
def test_planning_needs_no_weights_and_changes_nothing(text: str) -> None:
    model = empty_model(FLUX, dict(tiny(FLUX).config))
    before = repr(model)
    plan = tensor_plan(model, (2, 1), text)
    assert plan == tensor_plan(tiny(FLUX), (2, 1), text)
    assert repr(model) == before
    assert all(parameter.is_meta for parameter in model.parameters())


# ---- a planned model on one of its ranks


@pytest.fixture
def three_ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """This process as one of three; the others are not there, and nothing that is sent arrives."""
    dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=3)
    try:
        yield Ranks(dist.group.WORLD, request.param, (2, 1, 1))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("three_ranks", [0, 2], indirect=True)
@pytest.mark.parametrize("name", [FLUX, FLUX2, "WanTransformer3DModel", "SanaTransformer2DModel"])
def test_modules_are_told_what_the_rank_has(name: str, three_ranks: Ranks) -> None:
    rank, shares = three_ranks.rank, three_ranks.shares
    model, plan = drawn(CASES[name], 0)[0], plan_of(name, shares)
    biases = {path for path in plan.splits if model.get_submodule(path).bias is not None}
    shard_loaded(model, plan.shards(model), rank, shares)
    apply_plan(model, plan, three_ranks)
    for path, split in plan.splits.items():
        module, length = model.get_submodule(path), Shard(split.dim, split.blocks).length(rank, shares)
        if isinstance(module, nn.Linear):
            assert (module.out_features, module.in_features) == tuple(module.weight.shape)
            assert isinstance(module, RowSplitLinear) == (split.style == "rowwise")
        else:
            assert (module.out_channels, module.in_channels) == tuple(module.weight.shape[:2])
        assert module.weight.shape[split.dim] == length
        adds_bias = path in biases and (split.dim == 0 or rank == 0)
        assert (module.bias is not None) == adds_bias
    for path, blocks in plan.depthwise.items():
        module, length = model.get_submodule(path), Shard(0, blocks).length(rank, shares)
        assert (module.groups, module.out_channels, module.in_channels) == (length,) * 3
    for path, block in plan.norms.items():
        norm = model.get_submodule(path)
        assert isinstance(norm, AcrossHeadsNorm)
        assert norm.features == block.size
        assert norm.weight.numel() == Shard(0, (block,)).length(rank, shares)
    for path, attention in plan.attentions.items():
        for attribute, block in attention.counts.items():
            assert getattr(model.get_submodule(path), attribute) == Shard(0, (block,)).length(rank, shares)
    for path, counts in plan.counts.items():
        for attribute, block in counts.items():
            assert getattr(model.get_submodule(path), attribute) == Shard(0, (block,)).length(rank, shares)


# ---- a user's own plan: what it may say

FLUX_UPSTREAM: dict[str, object] = {
    **{f"transformer_blocks.*.attn.{name}": "colwise" for name in ("to_q", "to_k", "to_v")},
    **{f"transformer_blocks.*.attn.add_{name}_proj": "colwise" for name in "qkv"},
    **dict.fromkeys(
        ["transformer_blocks.*.attn.to_out.0", "transformer_blocks.*.attn.to_add_out"], "rowwise"
    ),
    **{f"transformer_blocks.*.{ff}.net.0.proj": "colwise" for ff in ("ff", "ff_context")},
    **{f"transformer_blocks.*.{ff}.net.2": "rowwise" for ff in ("ff", "ff_context")},
    **{f"single_transformer_blocks.*.attn.{name}": "colwise" for name in ("to_q", "to_k", "to_v")},
    "single_transformer_blocks.*.proj_mlp": "colwise",
}
ATTENTION = {
    key: style for key, style in FLUX_UPSTREAM.items() if key.startswith("transformer_blocks.*.attn.")
}


def single_out() -> dict[str, object]:
    """The projection out of FLUX.1's single blocks: attention and hidden features, in sizes."""
    out = tiny(FLUX).get_submodule("single_transformer_blocks.0.proj_out")
    inner = out.out_features
    return {"single_transformer_blocks.*.proj_out": {"packed_rowwise": [inner, out.in_features - inner]}}


def without_gathered(plan: TensorPlan) -> dict[str, Split]:
    return {path: split for path, split in plan.splits.items() if split.style != GATHERED}


def test_upstreams_plan_as_text_is_the_one_taken_without() -> None:
    plan = own_plan(FLUX, FLUX_UPSTREAM | single_out())
    built_in = plan_of(FLUX, (1, 1))
    assert dict(plan.splits) == without_gathered(built_in)
    assert plan.attentions == built_in.attentions
    assert plan.counts == built_in.counts
    shards = plan.shards(tiny(FLUX))
    assert shards == {path: shard for path, shard in built_in.shards(tiny(FLUX)).items() if path in shards}


def test_layers_may_be_named_one_by_one() -> None:
    layers = len(tiny(FLUX).single_transformer_blocks)
    plan = {
        key.replace("*", str(n)): style
        for key, style in FLUX_UPSTREAM.items()
        for n in range(layers)
        if n == 0 or key.startswith("single")
    }
    out = {key.replace("*", str(n)): style for key, style in single_out().items() for n in range(layers)}
    assert own_plan(FLUX, plan | out).splits == own_plan(FLUX, FLUX_UPSTREAM | single_out()).splits


def test_one_layer_alone_may_be_split() -> None:
    plan = own_plan(
        FLUX, {"transformer_blocks.0.ff.net.0.proj": "colwise", "transformer_blocks.0.ff.net.2": "rowwise"}
    )
    assert set(plan.splits) == {"transformer_blocks.0.ff.net.0.proj", "transformer_blocks.0.ff.net.2"}
    assert not plan.attentions and not plan.counts


@pytest.mark.parametrize(("style", "dim"), [(SPLIT_INPUT, 1), (GATHERED, 0)])
def test_a_modulation_may_be_split_on_either_side(style: str, dim: int) -> None:
    plan = own_plan(FLUX, {"transformer_blocks.*.norm1.linear": style})
    weight = tiny(FLUX).get_submodule("transformer_blocks.0.norm1.linear").weight
    assert plan.splits == {"transformer_blocks.0.norm1.linear": Split(style, (hidden(weight.shape[dim]),))}
    shards = plan.shards(tiny(FLUX))
    assert shards["transformer_blocks.0.norm1.linear.weight"].dim == dim
    assert ("transformer_blocks.0.norm1.linear.bias" in shards) == (dim == 0)


@pytest.mark.parametrize("scale", ["proportions", "sizes"])
def test_packed_blocks_are_proportions_or_sizes(scale: str) -> None:
    out = tiny(FLUX2).get_submodule("single_transformer_blocks.0.attn.to_out")
    inner, features = out.out_features, out.in_features - out.out_features
    ratio = features // inner
    blocks = [1, 1, 1, ratio, ratio] if scale == "proportions" else [inner] * 3 + [features] * 2
    plan = own_plan(
        FLUX2,
        {
            "single_transformer_blocks.*.attn.to_qkv_mlp_proj": {"packed_colwise": blocks},
            "single_transformer_blocks.*.attn.to_out": {
                "packed_rowwise": [1, ratio] if scale == "proportions" else [inner, features]
            },
            "transformer_blocks.*.ff.linear_in": {
                "packed_colwise": [1, 1] if scale == "proportions" else [features] * 2
            },
            "transformer_blocks.*.ff.linear_out": "rowwise",
        },
    )
    built_in = plan_of(FLUX2, (1, 1))
    assert all(built_in.splits[path] == split for path, split in plan.splits.items())
    assert len(plan.splits) == 2 * 2 + 2


def test_a_gathered_attention_is_not_one_of_parts() -> None:
    """Its heads are whole again after each layer, so its counts and norms stay as they are."""
    plan = own_plan(FLUX, dict.fromkeys(ATTENTION, GATHERED) | single_out_gathered())
    assert not plan.attentions and not plan.counts and not plan.norms


def single_out_gathered() -> dict[str, object]:
    return dict.fromkeys(single_out(), GATHERED)


# ---- and what it may not

NEXT = "transformer_blocks.*.attn."


@pytest.mark.parametrize(
    ("plan", "sentences"),
    [
        (
            {"transformer_blocks.*.attn.to_qq": "colwise"},
            (
                "The plan's key 'transformer_blocks.*.attn.to_qq' matches nothing in FluxTransformer2DModel.",
                "Works here: transformer_blocks.*.attn.to_q",
            ),
        ),
        (
            {"blocks.*.attn.to_q": "colwise"},
            ("The plan's key 'blocks.*.attn.to_q' matches nothing", "transformer_blocks.*.attn.to_q"),
        ),
        (
            {"transformer_blocks.7.attn.to_q": "colwise"},
            ("matches nothing", "transformer_blocks.*.attn.to_q"),
        ),
        (
            {"single_transformer_blocks.*.ff.net.0.proj": "colwise"},
            ("'single_transformer_blocks.*.ff.net.0.proj' matches nothing",),
        ),
        (
            {"transformer_blocks.0.attn.*.to_q": "colwise"},
            (
                "The plan's key 'transformer_blocks.0.attn.*.to_q' has its * in the wrong place.",
                "'transformer_blocks.0.attn' is a FluxAttention, and a * stands for the elements of a ModuleList.",
                "Works here: transformer_blocks.*.attn.to_q",
            ),
        ),
        (
            {"time_text_embed.*.linear_1": "colwise"},
            ("'time_text_embed' is a CombinedTimestep", "a * stands for the elements of a ModuleList"),
        ),
        (
            {"transformer_blocks.*.attn.norm_q": "colwise"},
            (
                "The plan splits 'transformer_blocks.0.attn.norm_q', a RMSNorm.",
                "Only Linear layers are split by a plan; norms and embeddings stay whole.",
                "Works here: leave that key out.",
            ),
        ),
        ({"pos_embed": "colwise"}, ("The plan splits 'pos_embed', a FluxPosEmbed.",)),
        (
            {"transformer_blocks.*": "colwise"},
            ("The plan splits 'transformer_blocks.0', a FluxTransformerBlock.",),
        ),
        ({"transformer_blocks": "colwise"}, ("The plan splits 'transformer_blocks', a ModuleList.",)),
        (
            {NEXT + "to_q": GATHERED, "transformer_blocks.0.attn.to_q": GATHERED},
            (
                "The plan names 'transformer_blocks.0.attn.to_q' twice.",
                "The key 'transformer_blocks.0.attn.to_q' and another both match it.",
                "Works here: one key for each module.",
            ),
        ),
        (
            {"transformer_blocks.*.ff.net.0.proj": "colwise"},
            (
                "The plan's 'transformer_blocks.0.ff.net.2' must be rowwise.",
                "It works together with 'transformer_blocks.0.ff.net.0.proj'",
                'Works here: "transformer_blocks.*.ff.net.2": "rowwise".',
            ),
        ),
        (
            {"transformer_blocks.*.ff.net.2": "rowwise"},
            (
                "The plan's 'transformer_blocks.0.ff.net.0.proj' must be colwise.",
                "It works together with 'transformer_blocks.0.ff.net.2'",
                'Works here: "transformer_blocks.*.ff.net.0.proj": "colwise".',
            ),
        ),
        (
            {"transformer_blocks.*.ff.net.0.proj": "colwise", "transformer_blocks.*.ff.net.2": SPLIT_INPUT},
            ("The plan's 'transformer_blocks.0.ff.net.2' must be rowwise.",),
        ),
        (
            {"transformer_blocks.*.ff.net.0.proj": "rowwise", "transformer_blocks.*.ff.net.2": "rowwise"},
            ("The plan's 'transformer_blocks.0.ff.net.0.proj' must be colwise.",),
        ),
        (
            {
                "transformer_blocks.*.ff.net.0.proj": {"packed_colwise": [1, 1]},
                "transformer_blocks.*.ff.net.2": "rowwise",
            },
            ("The plan's 'transformer_blocks.0.ff.net.0.proj' must be colwise.",),
        ),
        (
            {key: style for key, style in ATTENTION.items() if key != NEXT + "to_add_out"},
            ("The plan's 'transformer_blocks.0.attn.to_add_out' must be rowwise.", "one without the other"),
        ),
        (
            {key: style for key, style in ATTENTION.items() if key != NEXT + "to_k"},
            ("The plan's 'transformer_blocks.0.attn.to_k' must be colwise.", "gives wrong pictures"),
        ),
        (
            {key: style for key, style in FLUX_UPSTREAM.items() if key.startswith("single")},
            (
                "The plan's 'single_transformer_blocks.0.proj_out' must be packed_rowwise [",
                'Works here: "single_transformer_blocks.*.proj_out": {"packed_rowwise": [',
            ),
        ),
        (
            {"transformer_blocks.*.norm1.linear": "colwise"},
            (
                "The plan's 'transformer_blocks.0.norm1.linear' cannot be colwise.",
                "No layer is known that works with the other side of it, so its result could not be verified.",
                'Works here: "colwise_gathered" or "rowwise_split_input" for "transformer_blocks.*.norm1.linear".',
            ),
        ),
        ({"norm_out.linear": "rowwise"}, ("The plan's 'norm_out.linear' cannot be rowwise.",)),
    ],
    ids=lambda value: str(value)[:60] if isinstance(value, dict) else "",
)
def test_a_plan_that_would_be_wrong_is_refused(plan: dict[str, object], sentences: tuple[str, ...]) -> None:
    with refused(*sentences):
        own_plan(FLUX, plan)


@pytest.mark.parametrize("blocks", [[3, 5, 7], [1, 1000], [10**9, 1]], ids=str)
def test_blocks_that_do_not_fit_are_refused_with_the_layers_size(blocks: list[int]) -> None:
    size = tiny(FLUX).get_submodule("transformer_blocks.0.norm1.linear").out_features
    assert size % sum(blocks)
    with refused(
        f"The plan cuts 'transformer_blocks.0.norm1.linear' into blocks {blocks}, ",
        f"which do not divide its {size} outputs.",
        f"Blocks are sizes that sum to {size}, or proportions whose sum ({sum(blocks)}) divides it.",
        f"Works here: blocks that sum to {size}.",
    ):
        own_plan(FLUX, {"transformer_blocks.*.norm1.linear": {"packed_colwise": blocks}})


def test_blocks_of_rows_are_compared_with_the_inputs() -> None:
    inputs = tiny(FLUX).get_submodule("transformer_blocks.0.ff.net.2").in_features
    with refused(f"which do not divide its {inputs} inputs."):
        own_plan(FLUX, {"transformer_blocks.*.ff.net.2": {"packed_rowwise": [inputs, 1]}})


def test_what_the_refusal_says_works_does() -> None:
    """Following it, key by key, ends in a plan that is accepted."""
    plan: dict[str, object] = {"single_transformer_blocks.*.proj_mlp": "colwise"}
    for _ in range(10):
        try:
            accepted = own_plan(FLUX, plan)
            break
        except Refusal as refusal:
            check_lines(refusal)
            plan |= json.loads(f"{{{refusal.instead.removeprefix('Works here: ').removesuffix('.')}}}")
    assert {path.partition(".")[0] for path in accepted.splits} == {"single_transformer_blocks"}
    assert len(plan) == 5


@pytest.mark.parametrize("name", [FLUX, "Lumina2Transformer2DModel"])
def test_more_ranks_than_heads_are_refused(name: str) -> None:
    fewest = min(one.groups for one in read_structure(tiny(name)).attentions.values())
    tensor_plan(tiny(name), (1,) * fewest)
    with refused(
        f"tensor {fewest + 1} cannot divide '",
        f"It has {fewest} units that stay whole (attention heads, or features), and every rank needs one.",
        f"Works instead: tensor {fewest}.",
    ):
        tensor_plan(tiny(name), (1,) * (fewest + 1))


def test_more_ranks_than_heads_are_refused_for_a_users_plan_too() -> None:
    heads = tiny(FLUX).config.num_attention_heads
    with refused(
        f"tensor {heads + 1} cannot divide 'transformer_blocks.0.attn.", f"Works instead: tensor {heads}."
    ):
        own_plan(FLUX, ATTENTION, (1,) * (heads + 1))
    few = {"transformer_blocks.*.ff.net.0.proj": "colwise", "transformer_blocks.*.ff.net.2": "rowwise"}
    assert own_plan(FLUX, few, (1,) * (heads + 1)).splits, "its hidden features are enough"


@pytest.mark.parametrize("name", ["LTXVideoTransformer3DModel", "MochiTransformer3DModel"])
def test_layers_that_share_a_rotary_table_are_split_together(name: str) -> None:
    model = tiny(name)
    structure = read_structure(model)
    first, other, *_ = structure.turned["rope"]
    plan = {
        path: {f"packed_{split.style}": [block.size for block in split.blocks]}
        if len(split.blocks) > 1
        else split.style
        for path, split in structure.splits.items()
        if path.startswith(f"{first}.")
    }
    with refused(
        f"The plan splits the heads of '{first}' and not those of '{other}'.",
        "Both take one table from 'rope', which has either all heads or this rank's.",
        "Works here: the same styles for the layers of 'transformer_blocks.*.attn1'",
    ):
        own_plan(name, plan)
    everywhere = {path.replace(".0.", ".*.", 1): style for path, style in plan.items()}
    assert own_plan(name, everywhere).rotary == structure.rotary


def test_weights_that_are_read_without_a_call_stay_whole() -> None:
    """HunyuanDiT's pooling gives its layers' weights to torch's attention: no hook would run."""
    name = "HunyuanDiT2DModel"
    readers = [path for path, _ in tiny(name).named_modules() if ".pooler." in path]
    assert readers
    for path in readers:
        with refused(
            f"The plan splits '{path}'.", "reads its weight without calling it", "leave that key out"
        ):
            own_plan(name, {path: GATHERED})
    assert not set(readers) & set(plan_of(name, (1, 1)).splits)


def test_modules_with_any_name_can_be_named() -> None:
    """Z-Image calls its embedders "2-1"."""
    name = "ZImageTransformer2DModel"
    path = next(
        path for path, one in tiny(name).named_modules() if "-" in path and isinstance(one, nn.Linear)
    )
    assert set(own_plan(name, {path: GATHERED}).splits) == {path}


# ---- whatever is written


@pytest.mark.parametrize("name", [FLUX, FLUX2, "SanaTransformer2DModel"])
def test_any_plan_is_followed_or_refused(name: str) -> None:
    """Half-right plans: what is accepted splits each group of layers that belong together whole, or gathers it."""
    draw, model, structure = random.Random(name), tiny(name), read_structure(tiny(name))
    paths = [path for path, _ in model.named_modules() if path]
    linears = [path for path in paths if isinstance(model.get_submodule(path), nn.Linear)]
    right = {
        path: split.style
        if len(split.blocks) == 1
        else {f"packed_{split.style}": [one.size for one in split.blocks]}
        for path, split in structure.splits.items()
        if path in linears
    }
    styles: tuple[Any, ...] = (
        "colwise",
        "rowwise",
        GATHERED,
        SPLIT_INPUT,
        {"packed_colwise": [1, 1]},
        "",
        None,
    )
    accepted = 0
    for _ in range(40):
        groups = [group for group in structure.partners if draw.random() < 0.5]
        plan: dict[str, object] = {path: right[path] for group in groups for path in group if path in right}
        for _ in range(draw.choice((0, 0, 1, 2))):
            plan[draw.choice(draw.choice((linears, paths)))] = draw.choice(styles)
        for path in draw.sample(sorted(plan), min(len(plan), draw.choice((0, 0, 1)))):
            del plan[path]
        try:
            found = own_plan(name, plan)
        except Refusal as refusal:
            check_lines(refusal)
            continue
        accepted += 1
        for group in structure.partners:
            kinds = {
                found.splits[path].style in ("colwise", "rowwise") if path in found.splits else False
                for path in group
            }
            assert len(kinds) == 1
    assert accepted >= 3


class OneLayer(ModelMixin, ConfigMixin):
    """The least that is a model of diffusers, with all its properties and methods."""

    @register_to_config
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4)])


@pytest.mark.parametrize("key", ["{}", "{}.x", "{}.*", "{}.*.x", "layers.{}", "layers.0.{}", "layers.*.{}"])
def test_any_attribute_of_a_model_as_a_key_is_refused(key: str) -> None:
    """Properties, methods and buffers are no layers."""
    model = OneLayer()
    assert tensor_plan(model, (1, 1), json.dumps({"layers.*": GATHERED})).splits
    names = {name for part in (model, model.layers, model.layers[0]) for name in dir(part)}
    for name in sorted(names):
        with refused("Works here:"):
            tensor_plan(model, (1, 1), json.dumps({key.format(name): "colwise"}))
