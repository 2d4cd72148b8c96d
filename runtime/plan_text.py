"""A user's own tensor plan as JSON text: what it may say, checked without torch or the model.

    {"transformer_blocks.*.attn.to_q": "colwise", "blocks.*.ff.linear_in": {"packed_colwise": [1, 1]}, ...}

Keys are module paths with at most one `*` (every element of a ModuleList). The vocabulary is that of diffusers' and
transformers' tensor plans; `colwise_gathered` adds a column split whose output every rank has whole again.
"""

from __future__ import annotations

import json
import re

import msgspec

from .safetensors_header import printable
from .spec import Refusal

PLAIN = ("colwise", "rowwise", "rowwise_split_input", "colwise_gathered")
PACKED = {"packed_colwise": "colwise", "packed_rowwise": "rowwise"}
_LONGEST = 1 << 20  # characters: an explicit key for every layer of the largest models is a tenth of that
_EXAMPLE = '{"blocks.*.attn.to_q": "colwise"}'
_PATH = re.compile(r"(\*|[\w-]+)(\.(\*|[\w-]+))*")
_LONGEST_KEY, _MOST_BLOCKS = 256, 64


class PlanEntry(msgspec.Struct, frozen=True):
    """One line of a plan. `blocks` are the packed parts, in proportion or absolute; () is one part."""

    key: str
    style: str
    blocks: tuple[int, ...] = ()


def read_plan_text(text: str) -> tuple[PlanEntry, ...]:
    """The entries of a plan. Raises Refusal that names the key, the reason and the mend."""
    if len(text) > _LONGEST:
        raise _refusal(
            "The tensor plan is too long.", f"It has {len(text):,} characters.", "one key per module"
        )
    try:
        plan = json.loads(text, object_pairs_hook=_once) if text.strip() else {}
    except (ValueError, RecursionError) as error:
        if isinstance(error, _Twice):
            raise _refusal(
                f"The tensor plan names '{_shown(error.key)}' twice.",
                "Only one of the two styles could be followed.",
                "each key once",
            ) from None
        raise _refusal("The tensor plan is not valid JSON.", f"{_shown(error)}.", _EXAMPLE) from None
    if not isinstance(plan, dict) or not plan:
        raise _refusal(
            "The tensor plan holds no keys.",
            "A plan is a JSON object: module path -> style.",
            _EXAMPLE,
        )
    return tuple(_entry(key, value) for key, value in plan.items())


class _Twice(ValueError):
    def __init__(self, key: str):
        super().__init__(key)
        self.key = key


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in pairs:
        if key in found:
            raise _Twice(key)
        found[key] = value
    return found


def _entry(key: str, value: object) -> PlanEntry:
    if key.count("*") > 1:
        raise _refusal(
            f"The plan's key '{_shown(key)}' has more than one *.",
            "One * stands for every element of a ModuleList; lists within lists are named one by one.",
            f"one key for each, such as '{_shown(key.replace('*', '0', key.count('*') - 1))}'",
        )
    if len(key) > _LONGEST_KEY or not _PATH.fullmatch(key) or key.startswith("*"):
        raise _refusal(
            f"The plan's key '{_shown(key)}' is no module path.",
            "A key is names joined by dots, with at most one * in the place of a number.",
            "blocks.*.attn.to_q",
        )
    if isinstance(value, str) and value in PLAIN:
        return PlanEntry(key, value)
    if isinstance(value, dict) and len(value) == 1:
        ((style, blocks),) = value.items()
        if style in PACKED and _are_blocks(blocks):
            return PlanEntry(key, PACKED[style], tuple(blocks))
    raise _refusal(
        f"The plan's style for '{_shown(key)}' is {_shown(_as_json(value))}.",
        "That is no style of a tensor plan.",
        f'{", ".join(PLAIN)}, or packed ones such as {{"packed_colwise": [1, 1]}}',
    )


def _as_json(value: object) -> str:
    try:
        return json.dumps(value)
    except RecursionError:
        return "nested too deeply"


def _are_blocks(value: object) -> bool:
    """Two or more whole positive numbers."""
    return (
        isinstance(value, list)
        and 1 < len(value) <= _MOST_BLOCKS
        and all(isinstance(n, int) and not isinstance(n, bool) and 0 < n < 1 << 31 for n in value)
    )


def _shown(value: object) -> str:
    text = str(value)
    return printable(text if len(text) <= 120 else f"{text[:117]}...")


def _refusal(what: str, why: str, works: str) -> Refusal:
    return Refusal(what, why, f"Works here: {works}.")
