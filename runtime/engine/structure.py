"""What a transformer's own modules say about how it can be split over the tensor axis.

The rules look at modules and shapes, never at class names of models, so a new architecture of the usual parts needs
nothing here. A rule that fits only half (a projection without its counterpart) leaves the module whole; `plans.py`
then gathers what is large. Works on a model without weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from .tensor import Block

COLWISE, ROWWISE = "colwise", "rowwise"
SPLIT_INPUT, GATHERED = "rowwise_split_input", "colwise_gathered"

_QUERIES = (("to_q", "to_k", "to_v"), ("to_query", "to_key", "to_value"))
_INTO_HEADS = (
    *("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj", "to_query", "to_key", "to_value"),
    *("to_q_t", "to_k_t", "to_v_t", "q_img", "k_img", "v_img", "to_gate", "to_gate_logits"),
)
_OUT_OF_HEADS = ("to_out", "to_add_out", "out_layer", "to_out_t")
_NORMS = (
    *("norm_q", "norm_k", "norm_added_q", "norm_added_k", "query_norm", "key_norm"),
    *("q_norm", "k_norm", "q_rms_norm", "k_rms_norm", "q_rms_norm_t", "k_rms_norm_t"),
)
_HEAD_COUNTS = ("heads", "num_heads", "n_heads", "n_local_heads", "num_attention_heads")
_GROUP_COUNTS = ("kv_heads", "num_kv_heads", "n_kv_heads", "num_key_value_heads")
_HEAD_WIDTHS = ("inner_dim", "inner_kv_dim", "kv_inner_dim")
# Query, key and value in one projection: how many parts each has, and what turns the heads back into the stream.
_FUSED_QKV = (
    ({"img_attn_qkv": 3, "txt_attn_qkv": 3}, ("img_attn_proj", "txt_attn_proj")),  # JoyImage
    ({"img_qkv_proj": 3, "txt_kv_proj": 2}, ("to_out.0",)),  # PRX
)
# Pairs of a feed-forward: what goes in side by side, what comes out.
_FEED_FORWARDS = (
    (("w1", "w3"), "w2"),
    (("linear_1", "linear_3"), "linear_2"),
    (("linear_1", "linear_2"), "out_projection"),
    (("gate_proj", "up_proj"), "down_proj"),
    (("gate", "up"), "down"),
    (("gate_proj", "up_proj"), "linear_fc2"),
    (("proj", "gate_layer"), "out"),
    (("in_layer",), "out_layer"),
    (("linear_in",), "linear_out"),
    (("0",), "2"),
)
# Rotary tables over all heads: the module's class -> (where the heads lie, the attention whose heads they are).
_ROTARY = {
    "LTXVideoRotaryPosEmbed": (None, {"rope": "attn1"}),
    "LTX2AudioVideoRotaryPosEmbed": (
        None,
        {
            "rope": "attn1",
            "audio_rope": "audio_attn1",
            "cross_attn_rope": "audio_to_video_attn",
            "cross_attn_audio_rope": "video_to_audio_attn",
        },
    ),
    "MochiRoPE": (1, {"rope": "attn1"}),
}


@dataclass(frozen=True)
class Split:
    """How one Linear (or 1x1 convolution) is split. `blocks` cover its outputs (columns) or its inputs (rows)."""

    style: str
    blocks: tuple[Block, ...]

    @property
    def dim(self) -> int:
        """Of the weight: outputs are dim 0, inputs dim 1."""
        return 0 if self.style in (COLWISE, GATHERED) else 1


@dataclass(frozen=True)
class Attention:
    """An attention module: its heads in groups that share keys and values, and the counts it keeps of them."""

    groups: int
    counts: dict[str, Block] = field(default_factory=dict)  # attribute -> what of it each rank has


@dataclass
class Structure:
    """What was found in a model, by module path."""

    splits: dict[str, Split] = field(default_factory=dict)
    norms: dict[str, Block] = field(default_factory=dict)  # norms across all heads
    per_head: dict[str, Block] = field(default_factory=dict)  # parameters with one number for each head
    attentions: dict[str, Attention] = field(default_factory=dict)
    rotary: dict[str, tuple[int, int | None]] = field(default_factory=dict)  # path -> (heads, dim)
    turned: dict[str, tuple[str, ...]] = field(default_factory=dict)  # rotary path -> attentions that take it
    counts: dict[str, dict[str, Block]] = field(default_factory=dict)  # attributes of other modules
    depthwise: dict[str, tuple[Block, ...]] = field(default_factory=dict)  # convolutions of split channels
    experts: dict[str, Block] = field(default_factory=dict)  # packed experts, by their hidden features
    partners: list[tuple[str, ...]] = field(default_factory=list)  # splits that only work together


def hidden(size: int) -> Block:
    """Hidden features, in granules of up to 64 so that uneven parts stay fit for the kernels."""
    for width in (64, 32, 16, 8, 4, 2):
        if size % width == 0 and size // width >= 64:
            return Block(size, size // width)
    return Block(size, size)


def read_structure(model: nn.Module) -> Structure:
    """Everything in `model` that can be split by heads or by hidden features."""
    found = Structure()
    for path, module in model.named_modules():
        for rule in _RULES:
            if rule(found, path, module):
                break
    _forget_open_ends(found)
    _find_rotary(found, model)
    return found


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _linear(module: nn.Module, name: str) -> nn.Linear | None:
    child = getattr(module, name, None)
    return child if isinstance(child, nn.Linear) else None


def _outputs(module: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """The Linears that turn heads back into the stream; of a list, the first."""
    for name in _OUT_OF_HEADS:
        child = getattr(module, name, None)
        if isinstance(child, nn.ModuleList | nn.Sequential) and len(child):
            name, child = f"{name}.0", child[0]
        if isinstance(child, nn.Linear):
            yield name, child


def _number(module: nn.Module, names: tuple[str, ...]) -> int | None:
    for name in names:
        value = getattr(module, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _heads(module: nn.Module, query_width: int) -> int | None:
    """The number of query heads, by the module's own count or by the width of one head."""
    counted = _number(module, _HEAD_COUNTS)
    if counted is None:
        width = _number(module, ("head_dim", "dim_head"))
        counted = query_width // width if width and query_width % width == 0 else None
    return counted if counted and query_width % counted == 0 else None


def _counts(module: nn.Module, groups: int) -> dict[str, Block]:
    """The module's own counts of heads and head widths, each to be cut to what a rank has."""
    found = {}
    for name in (*_HEAD_COUNTS, *_GROUP_COUNTS, *_HEAD_WIDTHS):
        value = getattr(module, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0 and value % groups == 0:
            found[name] = Block(value, groups)
    return found


def _attention(found: Structure, path: str, module: nn.Module) -> bool:
    """Separate projections of query, key and value. What is not understood in full stays whole."""
    projections = [[_linear(module, name) for name in names] for names in _QUERIES]
    query, key, _ = next((three for three in projections if all(three)), (None, None, None))
    if query is None or key is None:
        return False
    heads, groups = _grouping(module, query, key)
    into = {name: one for name in _INTO_HEADS if (one := _linear(module, name)) is not None}
    outputs = dict(_outputs(module))
    widths = [one.out_features for one in into.values()] + [one.in_features for one in outputs.values()]
    if not groups or any(width % groups for width in widths) or _returns_heads(module):
        return True
    own = {name: one for name, one in module.named_parameters(recurse=False) if one.numel() > 1}
    norms = _norms(module)
    across = {query.out_features, key.out_features} - {query.out_features // heads}
    known = across | {1, query.out_features // heads}
    if any(tuple(one.shape) != (heads,) for one in own.values()) or set(norms.values()) - known:
        return True  # nobody knows what it is multiplied with
    for name, one in into.items():
        found.splits[_join(path, name)] = Split(COLWISE, (Block(one.out_features, groups),))
    for name, one in outputs.items():
        found.splits[_join(path, name)] = Split(ROWWISE, (Block(one.in_features, groups),))
    found.partners.append(tuple(_join(path, name) for name in (*into, *outputs)))
    found.per_head |= {_join(path, name): Block(heads, groups) for name in own}
    found.norms |= {_join(path, name): Block(size, groups) for name, size in norms.items() if size in across}
    counts = _counts(module, groups)
    if getattr(module, "out_dim", None) == query.out_features:  # some processors take it for all heads' width
        counts["out_dim"] = Block(query.out_features, groups)
    found.attentions[path] = Attention(groups, counts)
    return True


def _grouping(module: nn.Module, query: nn.Linear, key: nn.Linear) -> tuple[int, int]:
    """Query heads, and groups of them that share a key and a value; (0, 0) if the module's numbers do not fit."""
    heads = _heads(module, query.out_features) or 0
    groups = _number(module, _GROUP_COUNTS)
    if heads and groups is None:
        width = query.out_features // heads
        groups = key.out_features // width if key.out_features % width == 0 else 0
    return (heads, groups) if heads and groups and heads % groups == 0 else (0, 0)


def _norms(module: nn.Module) -> dict[str, int]:
    """The norms of queries and keys, and over how many features each goes."""
    found = {}
    for name in _NORMS:
        norm = getattr(module, name, None)
        weight = getattr(norm, "weight", None)
        # torch's norms tell their shape, diffusers' RMSNorm calls it dim; one without a weight has only that.
        shape = getattr(norm, "normalized_shape", None) or getattr(norm, "dim", None)
        if isinstance(weight, torch.Tensor):
            found[name] = weight.numel()
        elif isinstance(shape, tuple):
            found[name] = math.prod(shape)
    return found


def _returns_heads(module: nn.Module) -> bool:
    """Whether the text's part of the attention leaves without a projection that would sum it over the ranks."""
    processor = type(getattr(module, "processor", None)).__name__
    return processor == "EasyAnimateAttnProcessor2_0" and getattr(module, "to_add_out", None) is None


def _single_stream(found: Structure, path: str, module: nn.Module) -> bool:
    """Attention and feed-forward side by side, one projection out of both: [attention, hidden] -> stream."""
    into, out = _linear(module, "proj_mlp"), _linear(module, "proj_out")
    query = _linear(getattr(module, "attn", nn.Identity()), "to_q")
    if into is None or out is None or query is None:
        return False
    heads = _heads(module.attn, query.out_features)
    rest = out.in_features - query.out_features
    if not heads or rest <= 0 or into.out_features not in (rest, 2 * rest):
        return False
    block = hidden(rest)
    found.splits[_join(path, "proj_mlp")] = Split(COLWISE, (block,) * (into.out_features // rest))
    found.splits[_join(path, "proj_out")] = Split(ROWWISE, (Block(query.out_features, heads), block))
    found.partners.append((_join(path, "proj_mlp"), _join(path, "proj_out"), _join(path, "attn.to_q")))
    if getattr(module, "mlp_hidden_dim", None) == rest:
        found.counts[path] = {"mlp_hidden_dim": block}
    return True


def _fused_attention(found: Structure, path: str, module: nn.Module) -> bool:
    """FLUX.2's single blocks: query, key, value and a gated feed-forward in one projection, and one out of both."""
    into, out = _linear(module, "to_qkv_mlp_proj"), _linear(module, "to_out")
    inner = _number(module, ("inner_dim",))
    if into is None or out is None or inner is None:
        return False
    heads, rest = _heads(module, inner), out.in_features - inner
    gates, remainder = divmod(into.out_features - 3 * inner, rest) if rest > 0 else (0, 1)
    if not heads or remainder:
        return False
    of_heads, of_hidden = Block(inner, heads), hidden(rest)
    blocks = (*(of_heads,) * 3, *(of_hidden,) * gates)
    found.splits[_join(path, "to_qkv_mlp_proj")] = Split(COLWISE, blocks)
    found.splits[_join(path, "to_out")] = Split(ROWWISE, (of_heads, of_hidden))
    found.partners.append((_join(path, "to_qkv_mlp_proj"), _join(path, "to_out")))
    # The processor cuts the projection by these widths.
    found.attentions[path] = Attention(heads, _counts(module, heads))
    found.counts[path] = {"mlp_hidden_dim": of_hidden}
    return True


def _fused_qkv(found: Structure, path: str, module: nn.Module) -> bool:
    for parts, outs in _FUSED_QKV:
        into = {name: _linear(module, name) for name in parts}
        out = {name: submodule(module, name) for name in outs}
        if not all(isinstance(one, nn.Linear) for one in (*into.values(), *out.values())):
            continue
        inner = next(iter(out.values())).in_features  # type: ignore[union-attr]
        heads = _heads(module, inner)
        if not heads or any(one.out_features != parts[name] * inner for name, one in into.items()):  # type: ignore[union-attr]
            return False
        block = Block(inner, heads)
        found.splits |= {_join(path, name): Split(COLWISE, (block,) * count) for name, count in parts.items()}
        found.splits |= {_join(path, name): Split(ROWWISE, (block,)) for name in outs}
        found.partners.append(tuple(_join(path, name) for name in (*parts, *outs)))
        found.attentions[path] = Attention(heads, _counts(module, heads))
        return True
    return False


def _experts(found: Structure, path: str, module: nn.Module) -> bool:
    """Gated experts packed into two weights: [experts, stream, 2 x hidden] and [experts, hidden, stream]."""
    into, out = (getattr(module, name, None) for name in ("gate_up_proj", "down_proj"))
    if not (isinstance(into, nn.Parameter) and isinstance(out, nn.Parameter) and into.ndim == out.ndim == 3):
        return False
    if into.shape[2] != 2 * out.shape[1]:
        return False
    found.experts[path] = hidden(out.shape[1])
    return True


def _feed_forward(found: Structure, path: str, module: nn.Module) -> bool:
    pairs: list[tuple[tuple[str, ...], str]] = []
    net = getattr(module, "net", None)
    if isinstance(net, nn.ModuleList) and len(net) > 2 and _linear(net[0], "proj") is not None:
        pairs.append((("net.0.proj",), "net.2"))  # diffusers' FeedForward
    pairs += _FEED_FORWARDS
    for names, last in pairs:
        if _is_feed_forward(module, names, last):
            _add_feed_forward(found, path, module, names, last)
            return True
    return False


def submodule(module: nn.Module, path: str) -> nn.Module | None:
    """By the modules' own tables: a model of diffusers takes any other name for one of its config's."""
    found: nn.Module | None = module
    for name in path.split("."):
        found = found._modules.get(name) if found is not None else None
    return found


def _is_feed_forward(module: nn.Module, names: tuple[str, ...], last: str) -> bool:
    if names == ("0",) and not _is_plain_sequence(module):
        return False
    into = [submodule(module, name) for name in names]
    out = submodule(module, last)
    if not all(isinstance(one, nn.Linear) for one in (*into, out)):
        return False
    gates = {1, 2} if len(into) == 1 and names != ("0",) else {1}
    return all(
        one.out_features // out.in_features in gates  # type: ignore[union-attr]
        and one.out_features % out.in_features == 0  # type: ignore[union-attr]
        and (len(into) == 1 or one.in_features == out.out_features)  # type: ignore[union-attr]
        for one in into
    )


def _is_plain_sequence(module: nn.Module) -> bool:
    """Linear, an activation, Linear: a norm or softmax between them would need all features."""
    if not isinstance(module, nn.Sequential) or len(module) < 3:
        return False
    return isinstance(module[1], nn.SiLU | nn.GELU | nn.ReLU | nn.Identity | nn.Dropout | nn.Tanh | nn.Mish)


def _add_feed_forward(
    found: Structure, path: str, module: nn.Module, names: tuple[str, ...], last: str
) -> None:
    out = module.get_submodule(last)
    block = hidden(out.in_features)
    for name in names:
        parts = module.get_submodule(name).out_features // out.in_features
        found.splits[_join(path, name)] = Split(COLWISE, (block,) * parts)
    found.splits[_join(path, last)] = Split(ROWWISE, (block,))
    found.partners.append(tuple(_join(path, name) for name in (*names, last)))


def _convolutions(found: Structure, path: str, module: nn.Module) -> bool:
    """Sana's feed-forward: 1x1 into twice the hidden channels, depthwise, gated, 1x1 back."""
    into, depth, out = (getattr(module, f"conv_{name}", None) for name in ("inverted", "depth", "point"))
    if not all(isinstance(one, nn.Conv2d) for one in (into, depth, out)):
        return False
    width, both = out.in_channels, depth.out_channels  # type: ignore[union-attr]
    if both != depth.groups or into.out_channels != both or both not in (width, 2 * width):  # type: ignore[union-attr]
        return False
    block = hidden(width)
    blocks = (block,) * (both // width)
    found.splits[_join(path, "conv_inverted")] = Split(COLWISE, blocks)
    found.depthwise[_join(path, "conv_depth")] = blocks
    found.splits[_join(path, "conv_point")] = Split(ROWWISE, (block,))
    found.partners.append(tuple(_join(path, f"conv_{name}") for name in ("inverted", "point")))
    return True


_RULES = (_attention, _single_stream, _fused_attention, _fused_qkv, _experts, _feed_forward, _convolutions)


def _forget_open_ends(found: Structure) -> None:
    """An attention whose heads nobody turns back into the stream stays whole, and so do those beside it.

    Its block uses them in a way of its own: Lumina-Next adds them to the heads of the attention beside it, Motif
    Video's single blocks hand them to one (all of them, before the projection out of both).
    """
    for path in list(found.attentions):
        block = path.rpartition(".")[0]
        beside = [other for other in found.attentions if other.rpartition(".")[0] == block]
        ends = [s for s in found.splits if s.startswith(f"{path}.") and found.splits[s].style == ROWWISE]
        if ends or path not in beside or (_join(block, "proj_out") in found.splits and len(beside) == 1):
            continue
        for other in beside:
            _forget(found, other)
        _forget_single_stream(found, block)


def _forget(found: Structure, path: str) -> None:
    for table in (found.splits, found.norms, found.per_head):
        for name in [one for one in table if one.startswith(f"{path}.")]:
            del table[name]
    found.partners = [group for group in found.partners if not group[0].startswith(f"{path}.")]
    found.attentions.pop(path, None)


def _forget_single_stream(found: Structure, path: str) -> None:
    for name in ("proj_mlp", "proj_out"):
        found.splits.pop(_join(path, name), None)
    found.partners = [group for group in found.partners if group[0] != _join(path, "proj_mlp")]
    found.counts.pop(path, None)


def _find_rotary(found: Structure, model: nn.Module) -> None:
    for path, module in model.named_modules():
        dim, names = _ROTARY.get(type(module).__name__, (None, {}))
        wanted = names.get(path)
        turned = tuple(where for where in found.attentions if where.rpartition(".")[2] == wanted)
        groups = {found.attentions[where].groups for where in turned}
        if len(groups) == 1:
            found.rotary[path], found.turned[path] = (groups.pop(), dim), turned
