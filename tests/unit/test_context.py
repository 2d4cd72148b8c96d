"""The context axes without ranks: what is cut and joined, in which order tokens lie, and what every plan names."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any
from unittest import mock

import diffusers.models.transformers
import pytest
import torch
from torch import nn

from runtime.engine import context
from runtime.engine.attention import ContextAxes, Tokens, _four_dims, _places, context_attention, cut_lengths
from runtime.engine.context import Sequences, divide_sequence, fits
from runtime.engine.context_plans import CONTEXT_PLANS, Attends, ContextPlan, Count, Cut, context_plan
from runtime.engine.dispatch import Participant, take_part
from runtime.engine.loading import empty_model
from tests.parity.matrix import ALL, difference, drawn, outputs
from tests.parity.model_case import Draw
from tests.support.refusals import refused
from tests.support.threads import one_torch_thread

ALONE = ContextAxes(ring=1, ulysses=1, ring_rank=0, ulysses_rank=0)
PICTURE, TEXT = Cut(1, "picture"), Cut(1, "text")
FLUX = "FluxTransformer2DModel"


@pytest.fixture(scope="module", autouse=True)
def polite() -> Iterator[None]:
    with one_torch_thread(), torch.no_grad():
        yield


def ranks(ring: int = 2, ulysses: int = 2) -> list[ContextAxes]:
    return [ContextAxes(ring, ulysses, r, u) for r in range(ring) for u in range(ulysses)]


def numbered(tokens: int, dim: int = 1, ndim: int = 3) -> torch.Tensor:
    """A tensor whose numbers tell the place along `dim`; its other sizes are 2."""
    shape, sizes = [1] * ndim, [2] * ndim
    shape[dim] = sizes[dim] = tokens
    return torch.arange(tokens).view(shape).expand(sizes)


def divided(model: nn.Module, axes: ContextAxes = ALONE) -> nn.Module:
    with mock.patch.object(context.ContextAxes, "of_mesh", lambda _: axes):
        divide_sequence(model, mock.sentinel.mesh)
    return model


# ---- cut and join


@pytest.mark.parametrize("tokens", [1, 3, 4, 7, 16])
@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2])
def test_the_ranks_parts_side_by_side_are_the_whole(tokens: int, dim: int) -> None:
    whole = numbered(tokens, dim)
    parts = [Sequences(axes).cut(whole, Cut(dim, "picture")) for axes in ranks()]
    assert torch.equal(torch.cat(parts, dim), whole)
    sizes = [part.shape[dim] for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == [part.shape[dim] for part in whole.tensor_split(4, dim)]
    assert all(part.is_contiguous() for part in parts)


def test_a_cut_tells_the_length_of_its_sequence() -> None:
    for axes in ranks():
        sequences = Sequences(axes)
        sequences.cut(numbered(11), PICTURE)
        sequences.cut(numbered(3), TEXT)
        assert sequences.lengths == {"picture": 11, "text": 3}
        tokens = sequences.tokens(("text", "picture"))
        assert tokens == Tokens(((1, 1, 1, 0), (3, 3, 3, 2)))
        assert (tokens.per_rank, tokens.total) == ([4, 4, 4, 2], 14)


def test_a_sequence_has_one_length_in_a_forward_and_another_in_the_next() -> None:
    sequences = Sequences(ranks()[1])
    sequences.cut(numbered(11), PICTURE)
    with pytest.raises(ValueError, match="'picture' has 11 tokens and 12"):
        sequences.cut(numbered(12), PICTURE)
    sequences.begin()
    assert sequences.cut(numbered(12), PICTURE).shape[1] == 3
    assert sequences.tokens(("picture",)).total == 12


def test_what_is_no_tensor_of_the_sequence_stays_as_it_is() -> None:
    sequences = Sequences(ranks()[0])
    for value in (None, 3, "text"):
        assert sequences.cut(value, PICTURE) is value
    one_for_all, of_sample = numbered(1), numbered(2, 0, 1)
    assert sequences.cut(one_for_all, replace(PICTURE, spreads=True)) is one_for_all
    assert sequences.cut(of_sample, replace(PICTURE, ndim=2)) is of_sample
    assert sequences.lengths == {}


def test_every_tensor_of_a_list_tuple_or_dict_is_cut() -> None:
    sequences = Sequences(ranks()[3])
    whole, last = numbered(7), numbered(7)[:, 6:]
    as_list = sequences.cut([whole, None, whole], PICTURE)
    assert isinstance(as_list, list)
    assert as_list[1] is None
    assert torch.equal(as_list[0], last)
    as_tuple = sequences.cut((whole, numbered(5, 0)), (PICTURE, Cut(0, "text")))
    assert isinstance(as_tuple, tuple)
    assert torch.equal(as_tuple[0], last)
    assert torch.equal(as_tuple[1], numbered(5, 0)[4:])
    assert torch.equal(sequences.cut({"cos": whole}, PICTURE)["cos"], last)


def test_a_sequence_that_leads_is_cut_and_what_follows_kept() -> None:
    for axes in ranks():
        sequences = Sequences(axes)
        own = sequences.cut(numbered(9), PICTURE)
        both = torch.cat([numbered(9), -numbered(2)], dim=1)
        found = sequences.cut(both, replace(PICTURE, leads=True))
        assert torch.equal(found, torch.cat([own, -numbered(2)], dim=1))


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("counted", [0, 1, 4, 9, 11])
def test_ranks_share_the_first_or_last_tokens_of_a_sequence(counted: int, last: bool) -> None:
    found = []
    for axes in ranks():
        sequences = Sequences(axes)
        own = sequences.cut(numbered(11), PICTURE)[0, :, 0].tolist()
        count = sequences.cut(counted, Count("picture", last=last))
        assert count == sum(token >= 11 - counted if last else token < counted for token in own)
        found.append(count)
    assert sum(found) == counted


def test_a_model_that_needs_a_token_on_every_rank_gets_no_fewer() -> None:
    everywhere = replace(TEXT, everywhere=True)
    for axes in ranks():
        assert Sequences(axes).cut(numbered(4), everywhere).shape[1] == 1
        with pytest.raises(
            ValueError, match="'text' has 3 tokens, and the model needs one on each of 4 ranks"
        ):
            Sequences(axes).cut(numbered(3), everywhere)


def test_a_join_of_another_length_is_an_error() -> None:
    sequences = Sequences(ranks()[0])
    sequences.cut(numbered(11), PICTURE)
    with pytest.raises(ValueError, match="4 tokens of 'picture' to join instead of 3"):
        sequences.join(numbered(4), PICTURE)


def test_alone_a_cut_and_a_join_change_nothing() -> None:
    sequences = Sequences(ALONE)
    whole = numbered(11)
    assert torch.equal(sequences.join(sequences.cut(whole, PICTURE), PICTURE), whole)


# ---- masks


def test_padding_of_one_sequence_is_that_of_the_joined_ones() -> None:
    sequences = Sequences(ranks()[0])
    sequences.cut(numbered(3), TEXT)
    sequences.cut(numbered(2), PICTURE)
    assert sequences.key_mask(("text", "picture")) is None
    sequences.mask_keys("text", torch.tensor([[1, 1, 0], [1, 0, 0]]))
    mask = sequences.key_mask(("text", "picture"))
    assert mask is not None
    assert mask.shape == (2, 1, 1, 5)
    assert mask.flatten(1).tolist() == [[True, True, False, True, True], [True, False, False, True, True]]
    other = sequences.key_mask(("picture", "text"))
    assert other is not None
    assert other.flatten(1).tolist() == [[True, True, True, True, False], [True, True, True, False, False]]
    assert sequences.key_mask(("picture",)) is None
    sequences.begin()
    assert sequences.key_mask(("text", "picture")) is None


def test_a_padding_mask_among_the_inputs_is_kept_whole() -> None:
    sequences = Sequences(ranks()[1])
    mask = torch.tensor([[True, True, False, False], [True, False, False, False]])
    assert sequences.cut(mask, replace(TEXT, pads=True)).shape == (2, 1)
    found = sequences.key_mask(("text",))
    assert found is not None
    assert torch.equal(found[:, 0, 0], mask)


def test_a_mask_that_a_module_would_prepare_by_its_own_lengths_is_taken_whole() -> None:
    """[B, queries, keys] holds for every head."""
    attends = Attends(("picture",), ("picture",), mask="attention_mask")
    sequences = Sequences(ranks()[1])
    own, whole = torch.zeros(2, 1, 3, 3), torch.ones(2, 11, 11)
    assert sequences.mask(attends, own) is own
    sequences.masks[attends] = whole
    taken = sequences.mask(attends, None)
    assert taken is not None
    assert torch.equal(taken, whole[:, None])
    sequences.begin()
    assert sequences.mask(attends, None) is None


QUERY = torch.zeros(2, 5, 3, 8)  # of 20 queries, 24 keys in all


@pytest.mark.parametrize(
    "shape", [(2, 24), (1, 1, 1, 24), (2, 1, 1, 24), (2, 3, 20, 24), (1, 3, 1, 24), (20, 24), (3, 1, 24)]
)
def test_masks_that_fit_have_four_dims(shape: tuple[int, ...]) -> None:
    mask = _four_dims(torch.zeros(shape), QUERY, 20, 24)
    assert mask is not None
    assert torch.broadcast_shapes(mask.shape, (2, 3, 20, 24)) == (2, 3, 20, 24)


@pytest.mark.parametrize(
    "shape",
    [(2, 23), (3, 24), (2, 1, 1, 5), (2, 2, 1, 24), (2, 3, 5, 24), (3, 1, 1, 24), (1, 1, 1, 1, 24), (24, 20)],
)
def test_masks_that_fit_nothing_are_errors(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="does not fit 2 x 3 heads with 20 queries and 24 keys"):
        _four_dims(torch.zeros(shape), QUERY, 20, 24)


# ---- order


def test_places_are_where_one_process_has_the_tokens() -> None:
    lengths = (3, 6, 1)
    whole = torch.arange(sum(lengths))
    all_ranks = ranks()
    tokens = Tokens(tuple(cut_lengths(length, all_ranks[0]) for length in lengths))
    for axes in all_ranks:
        own = torch.cat([one.tensor_split(4)[axes.rank] for one in whole.split(list(lengths))])
        assert torch.equal(_places(tokens, range(axes.rank, axes.rank + 1), whole.device), own)
    stretch = _places(tokens, range(2, 4), whole.device)
    assert stretch.tolist() == [
        2,
        7,
        8,
    ]  # rank 2 has the text's last and the picture's fifth, rank 3 its sixth
    assert _places(tokens, range(4), whole.device).sort().values.tolist() == whole.tolist()


def test_a_wrong_number_of_tokens_is_an_error_before_anything_is_sent() -> None:
    axes = ranks()[1]
    tokens = Tokens((cut_lengths(11, axes),))
    query = torch.zeros(1, 4, 4, 8)
    with pytest.raises(ValueError, match="4 queries on rank 1 of the context axes instead of 3"):
        context_attention(query, query, query, None, None, queries=tokens, keys=tokens, axes=axes)


# ---- patterns


@pytest.mark.parametrize(
    ("pattern", "path", "expected"),
    [
        ("blocks.*.attn1", "blocks.11.attn1", True),
        ("blocks.*.attn1", "blocks.11.attn12", False),
        ("blocks.*.attn1", "blocks.x.attn1", False),
        ("blocks.*.attn1", "vace_blocks.1.attn1", False),
        ("", "", True),
        ("", "blocks", False),
        ("**.attn", "attn", True),
        ("**.attn", "a.b.3.attn", True),
        ("**.attn", "a.b.3.xattn", False),
        ("layers.*-*", "layers.2-1", True),
        ("a.b", "axb", False),
    ],
)
def test_patterns(pattern: str, path: str, expected: bool) -> None:
    assert fits(pattern, path) is expected


def test_minus_one_is_the_last_of_a_list() -> None:
    model = nn.ModuleDict({"blocks": nn.ModuleList(nn.Sequential(nn.Linear(1, 1)) for _ in range(3))})
    assert [path for path, _ in context._matching(model, "blocks.-1")] == ["blocks.2"]
    assert [path for path, _ in context._matching(model, "blocks.-1.0")] == ["blocks.2.0"]


# ---- refusals


def test_a_class_without_a_plan_is_refused() -> None:
    model = nn.Linear(1, 1)
    with refused("Linear cannot run", "There is no context plan for it", "tensor"):
        divided(model)


def test_an_attention_that_the_plan_does_not_know_is_refused() -> None:
    model = tiny(FLUX)
    known = CONTEXT_PLANS[FLUX]
    fewer = replace(
        known, attentions={"transformer_blocks.*.attn": known.attentions["transformer_blocks.*.attn"]}
    )
    with (
        mock.patch.dict(CONTEXT_PLANS, {FLUX: fewer}),
        refused(FLUX, "'single_transformer_blocks.0.attn' is not in the context plan", "tensor"),
    ):
        divided(model)


@pytest.mark.parametrize("name", [name for name, plan in CONTEXT_PLANS.items() if plan.refuses])
def test_arguments_that_need_the_whole_sequence_are_refused(name: str) -> None:
    case = ALL[name]
    model, inputs = drawn(case, 0)
    divided(model)
    for argument in (one for names in CONTEXT_PLANS[name].refuses.values() for one in names):
        with refused(name, argument, "tensor"):
            case.run(model, inputs | {argument: torch.ones(2, 3)})


class _Silent(nn.Module):
    """An attention that does not call PyTorch's."""

    processor = None

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states


def test_an_attention_that_cannot_be_led_is_an_error() -> None:
    module = _Silent()
    take_part(module, Participant(Sequences(ALONE), Attends(("picture",), ("picture",))))
    with pytest.raises(RuntimeError, match="_Silent attends in a way that cannot be divided"):
        module(numbered(3))


# ---- every plan


@functools.cache
def tiny(label: str, seed: int = 0) -> nn.Module:
    """Without memory for its weights."""
    case = ALL[label]
    return empty_model(case.name, case.config(Draw(seed)))


def labels_of(name: str) -> list[str]:
    return [label for label, case in ALL.items() if case.name == name]


def named_by(plan: ContextPlan) -> Mapping[str, tuple[str, ...]]:
    """Every pattern of a plan, with the arguments that it names there."""
    found: dict[str, tuple[str, ...]] = {}
    for by_argument in (plan.inputs, plan.refuses):
        for pattern, arguments in by_argument.items():
            found[pattern] = (*found.get(pattern, ()), *arguments)
    for pattern in (*plan.outputs, *plan.joins, *plan.attentions, *plan.whole):
        found.setdefault(pattern, ())
    for pattern, attends in plan.attentions.items():
        found[pattern] = (*found[pattern], *((attends.mask,) if attends.mask else ()))
    return found


@pytest.mark.parametrize("name", CONTEXT_PLANS)
def test_every_attention_is_either_divided_or_whole(name: str) -> None:
    plan = CONTEXT_PLANS[name]
    for label in labels_of(name):
        assert context_plan(tiny(label)) is plan
        for path, module in tiny(label).named_modules():
            if hasattr(module, "processor"):
                claims = [one for one in (*plan.attentions, *plan.whole) if fits(one, path)]
                assert len(claims) == 1, f"{path}: {claims}"


def test_every_pattern_and_argument_of_a_plan_is_some_models() -> None:
    """Classes may share a plan: what it names must be in one of theirs, at one of the configs drawn."""
    missing: dict[int, set[tuple[str, str]]] = {}
    for plan in CONTEXT_PLANS.values():
        named = {(pattern, one) for pattern, arguments in named_by(plan).items() for one in ("", *arguments)}
        missing.setdefault(id(plan.attentions), set()).update(named)
    for seed in range(12):
        for name, plan in CONTEXT_PLANS.items():
            left = missing[id(plan.attentions)]
            for label in labels_of(name) if left else ():
                left -= {one for one in left if _has(tiny(label, seed), *one)}
    assert not any(missing.values()), missing


def _has(model: nn.Module, pattern: str, argument: str) -> bool:
    return any(
        not argument or argument in inspect.signature(type(module).forward).parameters
        for _, module in context._matching(model, pattern)
    )


@pytest.mark.parametrize("name", CONTEXT_PLANS)
def test_sequences_that_are_attended_to_are_cut_somewhere(name: str) -> None:
    plan = CONTEXT_PLANS[name]
    changes: list[Any] = [
        change
        for by_place in (*plan.inputs.values(), *plan.outputs.values())
        for one in by_place.values()
        for change in (one if isinstance(one, tuple) else (one,))
    ]
    cut = {change.of for change in changes if isinstance(change, Cut)}
    attended = {one for attends in plan.attentions.values() for one in (*attends.queries, *attends.keys)}
    assert attended <= cut
    assert {one.of for joins in plan.joins.values() for one in joins.values()} <= cut
    assert {change.of for change in changes if isinstance(change, Count)} <= cut


@pytest.mark.parametrize("name", CONTEXT_PLANS)
def test_alone_a_divided_model_computes_what_it_did(name: str) -> None:
    """A group of one: every hook and every attention is led, nothing is cut."""
    case = ALL[name]
    model, inputs = drawn(case, 3)
    expected = outputs(case.run(model, inputs))
    max_rel, _ = difference(outputs(case.run(divided(model), inputs)), expected)
    assert max_rel <= 1e-6
    assert math.isfinite(max_rel)


def test_plans_are_of_classes_that_diffusers_has() -> None:
    assert all(hasattr(diffusers.models.transformers, name) for name in CONTEXT_PLANS)
