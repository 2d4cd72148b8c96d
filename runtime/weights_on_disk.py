"""What the planner reads from the headers of a transformer's files: the dtype, and what the tensor axis divides."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from .plan_text import read_plan_text
from .safetensors_header import Entry
from .spec import Refusal

# A number and two names after it: a block's module and its parameter. Numbered Linears outside of blocks (such as
# Wan's `time_embedding.0.weight`) have one name after it.
_IN_A_BLOCK = re.compile(r"\.\d+\.[^.]+\.")
_DTYPES = {
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    **dict.fromkeys(("F8_E4M3", "F8_E5M2"), "float8"),
}


def stored_dtype(what: str, entries: Iterable[Entry]) -> str:
    """The dtype most bytes are stored in.

    Raises Refusal, which calls the model `what`, if any are in one that cannot be loaded, or there are none.
    """
    amounts: dict[str, int] = {}
    for entry in entries:
        amounts[entry.dtype] = amounts.get(entry.dtype, 0) + entry.nbytes
    if not amounts:
        raise Refusal(
            f"{what} holds no weights.",
            "Its safetensors files name no tensor.",
            "Download the safetensors files of the model again.",
        )
    if others := sorted(set(amounts) - set(_DTYPES)):
        raise Refusal(
            f"{what} is {'partly ' if len(amounts) > 1 else ''}stored as {others[0]}.",
            "Only bf16, fp16, fp32 and fp8 weights can be divided over ranks yet.",
            "Works instead: the same model in bf16, fp16, fp32 or fp8.",
        )
    return _DTYPES[max(amounts, key=lambda name: amounts[name])]


def split_bytes(weights: Mapping[str, Entry], tensor_plan: str = "") -> int:
    """Bytes of the weights that the tensor axis divides; names are without the prefix they have in a file.

    Without a plan of the user's: the matrices inside numbered blocks, modulation included. With one: those that it
    names, which needs diffusers' names.
    """
    divided = _divided(tensor_plan)
    return sum(one.nbytes for name, one in weights.items() if divided.search(name) and len(one.shape) > 1)


def _divided(tensor_plan: str) -> re.Pattern[str]:
    if not tensor_plan:
        return _IN_A_BLOCK
    keys = (re.escape(entry.key).replace(r"\*", r"\d+") for entry in read_plan_text(tensor_plan))
    return re.compile(rf"^({'|'.join(keys)})\.weight$")
