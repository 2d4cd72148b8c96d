"""Which tensors of a checkpoint are weights, and which only describe how weights are stored; no torch.

Conventions of fp8 with scales, as ComfyUI reads them (comfy/ops.py and comfy/quant_ops.py of 0.3.75, comfy/utils.py of
0.29): `X.scale_weight` beside a `scaled_fp8` marker, and `X.weight_scale` with the format of each layer in
`X.comfy_quant` (JSON as bytes) or in `_quantization_metadata` of the file's header. fp8 without scales is just small
floats.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from .safetensors_header import printable
from .spec import Refusal

_FP8 = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}  # as stored -> ComfyUI's name of the format
_FLOATS = ("F64", "F32", "F16", "BF16")
_PLAIN = (*_FLOATS, *_FP8, "I64", "BOOL")  # what stands for itself; the last two are tables, never weights
_SCALES = (".scale_weight", ".weight_scale")
# Scales of activations, for matrix products in fp8; products run in the compute dtype here and need none.
_ACTIVATION_SCALES = (".scale_input", ".input_scale")
_MARKER = "scaled_fp8"
_NOTE = ".comfy_quant"
_HEADER_NOTE = "_quantization_metadata"
_MOST_NOTE_BYTES = 1 << 16
# Notes that change no weight: whether ComfyUI multiplies in fp8 or in the compute dtype.
_HARMLESS_NOTES = frozenset({"format", "full_precision_matrix_mult"})
# Ends of keys that show a storage that is not read here.
_OTHER_STORAGE = (
    (".weight_scale_2", "nvfp4"),
    (".pre_quant_scale", "smoothed weights (pre_quant_scale)"),
    (".weight_scale_inv", "fp8 in blocks (weight_scale_inv)"),
    (".weight.absmax", "bitsandbytes"),
    (".weight.quant_map", "bitsandbytes"),
    (".weight.quant_state", "bitsandbytes"),
    (".SCB", "bitsandbytes int8"),
    (".wscales", "SVDQuant (Nunchaku)"),
    (".smooth_factor", "SVDQuant (Nunchaku)"),
    (".qweight", "packed integers (SVDQuant, GPTQ or AWQ)"),
    (".qzeros", "packed integers (GPTQ or AWQ)"),
    (".weight._data", "Quanto"),
)


class OnDisk(Protocol):
    """A tensor as a file's header describes it."""

    @property
    def dtype(self) -> str:
        """As safetensors names it, such as "BF16" or "F8_E4M3"."""
        ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def where(self) -> str:
        """Where it lies, for messages."""
        ...


T = TypeVar("T", bound=OnDisk)


@dataclass(frozen=True)
class Weight(Generic[T]):
    """A weight, and for one in fp8 its scale if it has one: for all of it, or one per output channel."""

    tensor: T
    scale: T | None = None
    per_channel: bool = False


def find_weights(
    tensors: Mapping[str, T], metadata: Mapping[str, str], read: Callable[[T], bytes]
) -> dict[str, Weight[T]]:
    """The weights among `tensors`, in their order; scales, notes and markers are gone.

    `metadata` are the headers' own notes; `read` gives the bytes of a layer's note. Raises Refusal for any quantised
    storage but fp8 with one scale per tensor or output channel.
    """
    _refuse_other_storage(tensors)
    formats = _formats(tensors, metadata, read)
    weights: dict[str, Weight[T]] = {}
    scales = _scales(tensors)
    for key, tensor in tensors.items():
        if _describes_storage(key, tensors):
            continue
        layer = key.removesuffix(".weight")
        scale = scales.get(layer) if layer != key else None
        if layer != key and layer in formats:
            _check_format(tensor, formats[layer], scale)
        elif tensor.dtype not in _PLAIN:
            raise _refusal(tensor, tensor.dtype, "Numbers packed like that do not stand for themselves.")
        weights[key] = Weight(tensor) if scale is None else _scaled(tensor, scale)
    return weights


def _scales(tensors: Mapping[str, T]) -> dict[str, T]:
    """The weights' scales by layer, whichever way they are spelled."""
    found: dict[str, T] = {}
    for key, tensor in tensors.items():
        for end in _SCALES:
            if not key.endswith(end):
                continue
            layer = key.removesuffix(end)
            if layer in found:
                raise _refusal(tensor, "a second scale", f"{found[layer].where} is one already.")
            found[layer] = tensor
    return found


def _describes_storage(key: str, tensors: Mapping[str, OnDisk]) -> bool:
    """Whether a key is a scale, a note or a marker. A scale without its weight is not: it stays visible."""
    if key == _MARKER or key.endswith(f".{_MARKER}"):
        return True
    for end in (*_SCALES, *_ACTIVATION_SCALES, _NOTE):
        if key.endswith(end):
            return key.removesuffix(end) + ".weight" in tensors
    return False


def _scaled(weight: T, scale: T) -> Weight[T]:
    if weight.dtype not in _FP8:
        raise _refusal(weight, f"{weight.dtype} with a scale", f"Its scale is {scale.where}.")
    if scale.dtype not in _FLOATS:
        kind = "mxfp8" if scale.dtype in ("U8", "F8_E8M0") else f"fp8 with scales in {scale.dtype}"
        raise _refusal(weight, kind, f"Its scale is {scale.where}, in {scale.dtype}.")
    ones = scale.shape[1:] in ((), (1,) * (len(weight.shape) - 1), (1,))
    if all(size == 1 for size in scale.shape):
        return Weight(weight, scale, per_channel=False)
    if ones and weight.shape and scale.shape[0] == weight.shape[0]:
        return Weight(weight, scale, per_channel=True)
    raise _refusal(
        weight,
        "fp8 with scales of an unknown layout",
        f"The scale {scale.where} has shape {list(scale.shape)}, the weight {list(weight.shape)}; known are one scale "
        "for all of it and one per output channel.",
    )


def _formats(
    tensors: Mapping[str, T], metadata: Mapping[str, str], read: Callable[[T], bytes]
) -> dict[str, Mapping[str, Any]]:
    """What the files note about each layer: its name in the file (without '.weight') -> the note."""
    notes: dict[str, Mapping[str, Any]] = {}
    if text := metadata.get(_HEADER_NOTE):
        layers = _parsed(text, f"'{_HEADER_NOTE}' of the file's header").get("layers")
        if not isinstance(layers, dict):
            raise _unreadable(f"'{_HEADER_NOTE}' of the file's header")
        # Written with and without the prefix that the weights have in the file.
        weights = [key.removesuffix(".weight") for key in tensors if key.endswith(".weight")]
        full = {weight[at:]: weight for weight in weights for at in _starts(weight)}
        for layer, note in layers.items():
            notes[full.get(str(layer), str(layer))] = note if isinstance(note, dict) else {"format": note}
    for key, tensor in tensors.items():
        if key.endswith(_NOTE):
            notes[key.removesuffix(_NOTE)] = _note(tensor, read)
    return notes


def _starts(name: str) -> list[int]:
    """Where a dotted name's prefixes of up to two parts end, the whole name last so that it wins."""
    dots = [at + 1 for at, char in enumerate(name) if char == "."]
    return [*reversed(dots[:2]), 0]


def _note(tensor: T, read: Callable[[T], bytes]) -> Mapping[str, Any]:
    if tensor.dtype != "U8" or len(tensor.shape) != 1 or tensor.shape[0] > _MOST_NOTE_BYTES:
        raise _unreadable(tensor.where)
    return _parsed(read(tensor), tensor.where)


def _parsed(text: str | bytes, where: str) -> dict[str, Any]:
    try:
        note = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _unreadable(where) from error
    if not isinstance(note, dict):
        raise _unreadable(where)
    return note


def _check_format(weight: OnDisk, note: Mapping[str, Any], scale: OnDisk | None) -> None:
    """Refuse a layer whose note names another format than it is stored in, or one that changes what weights mean."""
    named = note.get("format")
    if named not in _FP8.values():
        raise _refusal(weight, f"{printable(named)}", "Its file's quantisation notes say so.")
    if others := sorted(name for name, value in note.items() if name not in _HARMLESS_NOTES and value):
        raise _refusal(
            weight, f"{named} with {printable(others[0])}", "That changes what the stored values mean."
        )
    if _FP8.get(weight.dtype) != named:
        raise _refusal(weight, f"{weight.dtype}, noted as {named}", "One of the two is wrong.")
    if scale is None:
        raise _refusal(weight, f"{named} without its scale", "The file's notes promise a weight_scale.")


def _refuse_other_storage(tensors: Mapping[str, OnDisk]) -> None:
    for key, tensor in tensors.items():
        for end, kind in _OTHER_STORAGE:
            if key.endswith(end) or f"{end}." in key:
                raise _refusal(tensor, kind, "Its keys show it.")


def _refusal(tensor: OnDisk, kind: str, why: str) -> Refusal:
    return Refusal(
        f"{tensor.where} is stored as {kind}, which cannot be read here.",
        why,
        "Use the model in bf16, fp16, fp32, or in fp8 with one scale per tensor or per output channel.",
    )


def _unreadable(where: str) -> Refusal:
    return Refusal(
        "The file's quantisation notes cannot be read.",
        f"{where} is not the JSON table that ComfyUI writes.",
        "Download the file again.",
    )
