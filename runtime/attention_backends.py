"""The attention kernels that can be chosen by name: what each needs, what it can do, and which models take a choice.

Only kernels that are installed are ever used: diffusers' backends whose names end in `_hub` download code, and none of
them is here. Every one here gives the log-sum-exp of its rows, which a ring needs. Left out on purpose: `_flash_3`,
whose function in diffusers 0.42 takes no notice of a divided sequence and would attend to one rank's tokens only, and
`_native_efficient` and `_native_math`, which `native` takes by itself where they are the right ones.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from .spec import Refusal


@dataclass(frozen=True)
class AttentionBackend:
    """Kernels by their name on the Parallel Config.

    `upstream` is diffusers' name of them; `package` what they come in beyond PyTorch, with the module it holds and
    the oldest version that diffusers takes. `masks`: attention masks are taken. `half_only`: they compute in bfloat16
    and float16 on NVIDIA cards, of `capability` or newer, and in nothing else.
    """

    name: str
    upstream: str
    package: str = ""
    module: str = ""
    at_least: str = ""
    masks: bool = True
    half_only: bool = True
    capability: tuple[int, int] = (8, 0)


# Packages and versions: diffusers 0.42, models/attention_dispatch.py. All three ask for capability 8.0 (Ampere).
BACKENDS = {
    backend.name: backend
    for backend in (
        AttentionBackend("native", "native", half_only=False, capability=(0, 0)),
        AttentionBackend("flash", "flash", "flash-attn", "flash_attn", "2.6.3", masks=False),
        AttentionBackend("cudnn", "_native_cudnn"),
        AttentionBackend("sage", "sage", "sageattention", "sageattention", "2.1.1", masks=False),
    )
}
# Classes whose attention all takes the choice (of some, all but the text's refiner); a test that the classes are so.
# Others call PyTorch's own attention, or leave a part of the choice to a default of the whole process (Cosmos,
# Qwen-Image 2.1), or attend causally (Cosmos 3) or with masks of the shape [B, keys] (Kandinsky 6, NucleusMoE,
# LongCat-Audio), which kernels take in different ways.
CHOOSING_CLASSES = frozenset(
    {
        "AceStepTransformer1DModel",
        "AnyFlowTransformer3DModel",
        "BriaFibo2Transformer2DModel",
        "BriaFiboTransformer2DModel",
        "BriaTransformer2DModel",
        "ChromaTransformer2DModel",
        "ChronoEditTransformer3DModel",
        "ErnieImageTransformer2DModel",
        "Flux2Transformer2DModel",
        "Flux3Transformer2DModel",
        "FluxTransformer2DModel",
        "GlmImageTransformer2DModel",
        "HeliosTransformer3DModel",
        "HunyuanImageTransformer2DModel",
        "HunyuanVideo15Transformer3DModel",
        "HunyuanVideoFramepackTransformer3DModel",
        "HunyuanVideoTransformer3DModel",
        "Ideogram4Transformer2DModel",
        "JoyImageEditPlusTransformer3DModel",
        "JoyImageEditTransformer3DModel",
        "Kandinsky5Transformer3DModel",
        "Krea2Transformer2DModel",
        "LTX2VideoTransformer3DModel",
        "LTXVideoTransformer3DModel",
        "LongCatImageTransformer2DModel",
        "MiniMaxH3Transformer3DModel",
        "MiniMaxMusic3Transformer1DModel",
        "MotifVideoTransformer3DModel",
        "OvisImageTransformer2DModel",
        "PRXTransformer2DModel",
        "QwenImageTransformer2DModel",
        "SanaVideoTransformer3DModel",
        "SkyReelsV2Transformer3DModel",
        "StableAudio3DiTModel",
        "WanAnimate2Transformer3DModel",
        "WanAnimateTransformer3DModel",
        "WanTransformer3DModel",
        "WanVACETransformer3DModel",
        "ZImageTransformer2DModel",
    }
)
# Of these, the ones that hand their attention a mask in every forward, also for a single prompt without padding.
# Whether others do depends on the prompts: then the ranks refuse it, see `mask_refusal`.
MASKING_CLASSES = frozenset(
    {
        "ErnieImageTransformer2DModel",
        "HunyuanImageTransformer2DModel",
        "HunyuanVideo15Transformer3DModel",
        "HunyuanVideoFramepackTransformer3DModel",
        "HunyuanVideoTransformer3DModel",
        "Ideogram4Transformer2DModel",
        "LTXVideoTransformer3DModel",
    }
)

Problem = tuple[str, str]  # how the sentence "The attention backend ..." goes on, and why


def installed_version(backend: AttentionBackend) -> str | None:
    """The version of the package that `backend` comes in, None where it is not installed. Imports nothing."""
    with contextlib.suppress(ImportError, ValueError, PackageNotFoundError):
        if find_spec(backend.module) is not None:
            return version(backend.package)
    return None


def check_backend_name(wanted: str) -> None:
    """Refuse a backend that does not exist, or is not installed in the Python of ComfyUI and the ranks."""
    if wanted == "auto":
        return
    if wanted not in BACKENDS:
        raise Refusal(
            f"There is no attention backend '{wanted}'.",
            "Kernels are chosen by name, and none is ever downloaded.",
            f"Works here: {_here()}.",
        )
    problem = _missing(BACKENDS[wanted])
    if problem:
        raise _refusal(wanted, problem, f"Works here: {_here()}")


def choose_backend(wanted: str, *, on_cpu: bool, dtype: str, transformer_class: str) -> str:
    """The backend for this model on these devices, in the dtype it is held in, or Refusal.

    "auto" is "native", PyTorch's own choice among its kernels: that another is right and faster has to be measured on
    cards, model by model, before it may be chosen for anybody.
    """
    if wanted == "auto":
        return "native"
    check_backend_name(wanted)

    def problem(backend: AttentionBackend, dtype: str = dtype) -> Problem | None:
        return _missing(backend) or _unfit(backend, on_cpu, dtype, transformer_class)

    found = problem(BACKENDS[wanted])
    if not found:
        return wanted
    works = ", or ".join(name for name, backend in BACKENDS.items() if not problem(backend))
    if dtype == "float32" and not problem(BACKENDS[wanted], "bfloat16"):
        works += f", or dtype bfloat16 with {wanted}"
    raise _refusal(wanted, found, f"Works instead: {works}")


def mask_refusal(name: str) -> Refusal:
    """What a rank says when a mask comes with a backend that cannot take one: known only as the model runs."""
    takes = ", or ".join(other for other, backend in BACKENDS.items() if backend.masks)
    return _refusal(
        name,
        (
            "cannot be used with this prompt",
            "It comes with an attention mask, which these kernels cannot take",
        ),
        f"Works instead: {takes}, or prompts of one length without padding",
    )


def card_refusal(name: str, capability: tuple[int, int]) -> Refusal:
    """What a rank says whose card is too old for the kernels."""
    found, needed = (".".join(map(str, one)) for one in (capability, BACKENDS[name].capability))
    why = f"Its kernels need compute capability {needed}, and a card of this group has {found}"
    return _refusal(name, ("cannot run on this card", why), "Works instead: native, or newer cards")


def broken_refusal(name: str) -> Refusal:
    """What a rank says when the package is there, but does not load: often it was built for another PyTorch."""
    package = BACKENDS[name].package
    why = f"{package} is installed but does not load; the log of rank 0 says why"
    instead = f"Works instead: native, or {package} built for the installed PyTorch"
    return _refusal(name, ("cannot be used", why), instead)


def class_refusal(name: str, transformer_class: str) -> Refusal:
    """What the host, and a rank, say of a model that the choice would not reach."""
    return _refusal(name, _without_choice(transformer_class), "Works instead: native")


def _refusal(name: str, problem: Problem, instead: str) -> Refusal:
    what, why = problem
    return Refusal(f"The attention backend '{name}' {what}.", f"{why}.", f"{instead}.")


def _without_choice(transformer_class: str) -> Problem:
    why = "Not all of its attention takes a choice of kernels, and the rest would run PyTorch's own"
    return f"cannot be used with {transformer_class}", why


def _missing(backend: AttentionBackend) -> Problem | None:
    if not backend.package:
        return None
    found = installed_version(backend)
    why = f"It needs {backend.package} {backend.at_least} or newer in ComfyUI's Python; none is downloaded"
    if found is None:
        return f"cannot be used: {backend.package} is not installed", why
    if _numbers(found) < _numbers(backend.at_least):
        return f"cannot be used: {backend.package} is {found}", why
    return None


def _unfit(backend: AttentionBackend, on_cpu: bool, dtype: str, transformer_class: str) -> Problem | None:
    if not backend.half_only:
        return None
    if on_cpu:
        return "cannot be used on the CPU", "Its kernels run on NVIDIA cards only"
    if transformer_class not in CHOOSING_CLASSES:
        return _without_choice(transformer_class)
    if not backend.masks and transformer_class in MASKING_CLASSES:
        return (
            f"cannot be used with {transformer_class}",
            "This model masks its text at every step, and these kernels cannot take a mask",
        )
    if dtype == "float32":
        return "cannot be used with float32", "Its kernels compute in bfloat16 and float16 only"
    return None


def _here() -> str:
    return ", ".join(["auto", *(name for name, backend in BACKENDS.items() if not _missing(backend))])


def _numbers(text: str) -> tuple[int, ...]:
    """The release of a version, such as (2, 7, 4) of "2.7.4.post1"."""
    release = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, release[0].split("."))) if release else ()
