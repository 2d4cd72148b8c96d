"""A user's tensor plan as text: what it may say, and the sentence that is read when it says something else."""

from __future__ import annotations

import json
import random

import pytest

from runtime.plan_text import PlanEntry, read_plan_text
from runtime.spec import Refusal
from tests.support.refusals import check_lines, refused

KEY = "transformer_blocks.*.attn.to_q"
EXAMPLE = 'Works here: {"blocks.*.attn.to_q": "colwise"}.'


def plan(key: str = KEY, style: object = "colwise") -> str:
    return json.dumps({key: style})


# ---- what it may say


@pytest.mark.parametrize("style", ["colwise", "rowwise", "rowwise_split_input", "colwise_gathered"])
def test_plain_styles(style: str) -> None:
    assert read_plan_text(plan(style=style)) == (PlanEntry(KEY, style),)


@pytest.mark.parametrize(("style", "plain"), [("packed_colwise", "colwise"), ("packed_rowwise", "rowwise")])
@pytest.mark.parametrize("blocks", [[1, 1], [1, 1, 1, 3, 3], [3072, 12288], [1] * 64], ids=len)
def test_packed_styles(style: str, plain: str, blocks: list[int]) -> None:
    assert read_plan_text(plan(style={style: blocks})) == (PlanEntry(KEY, plain, tuple(blocks)),)


@pytest.mark.parametrize(
    "key",
    [
        "proj_out",
        "blocks.*",
        "blocks.*.ff.net.0.proj",
        "blocks.17.ff.net.0.proj",
        "text_fusion.layerwise_blocks.*.attn.to_out.0",
        "all_final_layer.2-1.linear",
        "_private.x1",
        "größe.*.außen",
    ],
)
def test_keys_are_module_paths(key: str) -> None:
    assert read_plan_text(plan(key)) == (PlanEntry(key, "colwise"),)


def test_entries_keep_their_order() -> None:
    keys = [f"blocks.{number}.attn.to_q" for number in (3, 1, 2)]
    assert [entry.key for entry in read_plan_text(json.dumps(dict.fromkeys(keys, "rowwise")))] == keys


def test_white_space_is_free() -> None:
    assert read_plan_text(f'\n\t {{ "{KEY}" :\n "colwise" }} \n') == (PlanEntry(KEY, "colwise"),)


# ---- what it may not


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "Expecting property name enclosed in double quotes: line 1 column 2"),
        (KEY, "Expecting value: line 1 column 1 (char 0)."),
        (f"{{'{KEY}': 'colwise'}}", "Expecting property name enclosed in double quotes"),
        (plan() + ",", "Extra data"),
        (f'{{"{KEY}": colwise}}', "Expecting value: line 1 column 36"),
        (f'{{"{KEY}": "colwise",}}', "line 1 column"),
        ('{"a\nb": "colwise"}', "Invalid control character"),
        ("\ufeff" + plan(), "BOM"),
        ("[" * 100_000, "recursion"),
        (f'{{"a": {"9" * 5000}}}', "digits"),
    ],
    ids=lambda text: repr(text[:24]),
)
def test_text_that_is_no_json_is_refused(text: str, reason: str) -> None:
    with refused("The tensor plan is not valid JSON.", reason, EXAMPLE):
        read_plan_text(text)


@pytest.mark.parametrize(
    "text", ["", "  ", "\n\t", "{}", "[]", "null", "1", '"colwise"', f'["{KEY}"]', "NaN", "true"]
)
def test_a_plan_without_keys_is_refused(text: str) -> None:
    with refused("The tensor plan holds no keys.", "A plan is a JSON object: module path -> style.", EXAMPLE):
        read_plan_text(text)


def test_a_plan_beyond_all_bounds_is_refused() -> None:
    with refused("The tensor plan is too long.", "It has 1,048,577 characters.", "one key per module"):
        read_plan_text("x" * (2**20 + 1))


def test_a_key_twice_is_refused() -> None:
    with refused(
        f"The tensor plan names '{KEY}' twice.",
        "Only one of the two styles could be followed.",
        "Works here: each key once.",
    ):
        read_plan_text(f'{{"{KEY}": "colwise", "proj_out": "rowwise", "{KEY}": "colwise"}}')


def test_a_long_key_twice_is_cut() -> None:
    with refused("names 'aaaaa", "aaa...' twice.") as caught:
        read_plan_text(f'{{"{"a" * 5000}": "colwise", "{"a" * 5000}": "rowwise"}}')
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("key", "instead"),
    [
        ("blocks.*.layers.*.to_q", "blocks.0.layers.*.to_q"),
        ("*.*.to_q", "0.*.to_q"),
        ("a.*.b.*.c.*.d", "a.0.b.0.c.*.d"),
        ("blocks.**.to_q", "blocks.0*.to_q"),
    ],
)
def test_two_stars_are_refused(key: str, instead: str) -> None:
    with refused(
        f"The plan's key '{key}' has more than one *.",
        "One * stands for every element of a ModuleList; lists within lists are named one by one.",
        f"Works here: one key for each, such as '{instead}'.",
    ):
        read_plan_text(plan(key))


@pytest.mark.parametrize(
    "key",
    [
        "",
        "*",
        "*.to_q",
        ".blocks.0",
        "blocks.",
        "blocks..to_q",
        "blocks.0 .to_q",
        " blocks.0.to_q",
        "blocks[0].to_q",
        "blocks/0/to_q",
        "blocks.b*",
        "blocks.0*.to_q",
        "blocks\n.to_q",
        "to_q\n",
        "\x00",
        "\ud800",
        "blocks.*.to_q;",
        "a" * 300,
        "a." * 200 + "a",
    ],
    ids=lambda key: repr(key[:20]),
)
def test_a_key_that_is_no_path_is_refused(key: str) -> None:
    with refused(
        "The plan's key '",
        "' is no module path.",
        "A key is names joined by dots, with at most one * in the place of a number.",
        "Works here: blocks.*.attn.to_q.",
    ) as caught:
        read_plan_text(plan(key))
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "style",
    [
        "",
        "columnwise",
        "COLWISE",
        " colwise",
        "packed_colwise",
        "sequence_parallel",
        None,
        True,
        1,
        [],
        ["colwise"],
        {},
        {"colwise": [1, 1]},
        {"packed_colwise": []},
        {"packed_colwise": [1]},
        {"packed_colwise": [1] * 65},
        {"packed_colwise": 2},
        {"packed_colwise": None},
        {"packed_colwise": "11"},
        {"packed_colwise": [1, 0]},
        {"packed_colwise": [1, -1]},
        {"packed_colwise": [1, 1.0]},
        {"packed_colwise": [1, "1"]},
        {"packed_colwise": [1, True]},
        {"packed_colwise": [1, 2**31]},
        {"packed_colwise": [[1], [1]]},
        {"packed_colwise": [1, 1], "packed_rowwise": [1, 1]},
        {"packed_gathered": [1, 1]},
        float("nan"),
        float("inf"),
        "colwise\nrowwise",
        "x" * 5000,
    ],
    ids=lambda style: repr(style)[:30],
)
def test_a_style_that_is_none_is_refused(style: object) -> None:
    shown = json.dumps(style)
    with refused(
        f"The plan's style for '{KEY}' is {shown if len(shown) <= 120 else shown[:117] + '...'}.",
        "That is no style of a tensor plan.",
        "Works here: colwise, rowwise, rowwise_split_input, colwise_gathered, or packed ones such as "
        '{"packed_colwise": [1, 1]}.',
    ):
        read_plan_text(plan(style=style))


def test_the_first_fault_is_told() -> None:
    with refused("'blocks.*.to_k'"):
        read_plan_text(json.dumps({KEY: "colwise", "blocks.*.to_k": "col", "blocks.*.to_v": "row"}))


# ---- whatever is written

PIECES = (
    *'{}[]":,.* \n\t\\0123456789-+eE',
    *("colwise", "rowwise", "packed_colwise", "colwise_gathered", "null", "true", "NaN", "1e999", "\\ud800"),
    *(
        '{"',
        '": "',
        '", "',
        '"}',
        KEY,
        "blocks.*.x",
        "é",
        "\x00",
        "\u2028",
        "\ud800",
        "\U0001f600",
        "//",
        "'",
    ),
)


def check(text: str) -> bool:
    """Followed or refused in three lines; nothing else ever."""
    try:
        entries = read_plan_text(text)
    except Refusal as refusal:
        check_lines(refusal)
        assert len(str(refusal)) < 1000
        return False
    assert entries and all(isinstance(entry, PlanEntry) for entry in entries)
    return True


@pytest.mark.parametrize("seed", range(4))
def test_random_text_is_refused_and_breaks_nothing(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(2000):
        check("".join(draw.choices(PIECES, k=draw.randint(0, 40))))
        check("".join(map(chr, (draw.randrange(1, 0x11000) for _ in range(draw.randint(0, 20))))))


@pytest.mark.parametrize("seed", range(4))
def test_a_plan_with_a_fault_somewhere_is_followed_or_refused(seed: int) -> None:
    draw = random.Random(seed)
    good = json.dumps(
        {KEY: "colwise", "proj_out": {"packed_rowwise": [1, 3]}, "norm.linear": "colwise_gathered"}
    )
    followed = 0
    for _ in range(1500):
        text = list(good)
        for _ in range(draw.randint(1, 3)):
            place = draw.randrange(len(text))
            text[place : place + draw.randint(0, 2)] = draw.choice(PIECES) if draw.random() < 0.7 else ""
        followed += check("".join(text))
    assert 0 < followed < 1500


@pytest.mark.parametrize("opening", ["[", '{"a":', '[{"b":'])
def test_no_depth_of_nesting_breaks_it(opening: str) -> None:
    """Python's own reader and writer of JSON reach their limits at different depths."""
    closing = "".join({"[": "]", "{": "}"}.get(sign, "") for sign in reversed(opening))
    for depth in (*range(300, 1010), 5000, 100_000):
        text = f'{{"a": {opening * depth}1{closing * depth}}}'
        assert not check(text)
