"""A custom node pack for tests on a real server: the nodes of tests/parity_native, and some like those that users have.

ComfyUI loads it from its custom_nodes. ParityModel gives ComfyUI's own MODEL of a file in its diffusion_models; the
`source` is the file's name without the suffix.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import comfy.model_management
import folder_paths

ROOT = Path(__file__).resolve().parents[3]


def _make_tests_importable() -> None:
    """ComfyUI has a package of the name `tests` too, and its folder leads the path."""
    package = ModuleType("tests")
    package.__path__ = [str(ROOT / "tests")]
    sys.modules["tests"] = package
    sys.path.append(str(ROOT))


_make_tests_importable()

from tests.parity_native.models import native_model  # noqa: E402
from tests.parity_native.nodes import node_classes  # noqa: E402
from tests.support.native_checkpoints import CHECKPOINTS  # noqa: E402

_loaded: dict[str, tuple[float, Any]] = {}  # ComfyUI's own MODELs, by source: the file's time with each


def _path(source: str) -> Path:
    return Path(folder_paths.get_full_path_or_raise("diffusion_models", f"{source}.safetensors"))


def _load(source: str) -> Any:
    path = _path(source)
    changed = path.stat().st_mtime
    if source not in _loaded or _loaded[source][0] != changed:
        _loaded[source] = (changed, native_model(path, CHECKPOINTS[source], "float32"))
    return _loaded[source][1]


def _config_of(source: str) -> Any:
    return _load(source).model.model_config.unet_config


class Fresh:
    """Hands a LATENT on; another `key` makes everything behind it run again."""

    INPUT_TYPES = staticmethod(lambda: {"required": {"samples": ("LATENT",), "key": ("STRING", {})}})
    RETURN_TYPES = ("LATENT",)
    FUNCTION = "make"

    def make(self, samples: Any, key: str) -> tuple[Any]:
        return (samples,)


class NeedsTheDevice(Fresh):
    """Hands a LATENT on, after ComfyUI has made room on its device for something that needs all of it."""

    def make(self, samples: Any, key: str) -> tuple[Any]:
        comfy.model_management.free_memory(1e30, comfy.model_management.get_torch_device())
        return (samples,)


class Patched:
    """A MODEL patched as custom nodes do it: by the method `kind` of its patcher, or that entry of its options."""

    INPUT_TYPES = staticmethod(lambda: {"required": {"model": ("MODEL",), "kind": ("STRING", {})}})
    RETURN_TYPES = ("MODEL",)
    FUNCTION = "make"

    def make(self, model: Any, kind: str) -> tuple[Any]:
        patched = model.clone()
        if kind == "optimized_attention_override":
            patched.model_options["transformer_options"][kind] = _unchanged
        elif kind == "set_model_patch_replace":
            patched.set_model_patch_replace(_unchanged, "dit", "double_block", 0)
        else:
            getattr(patched, kind)(_unchanged)
        return (patched,)


def _unchanged(given: Any, *_more: Any, **_others: Any) -> Any:
    return given


class Model(node_classes(_load, _config_of, lambda *_: None)["ParityModel"]):  # type: ignore[misc]
    IS_CHANGED = staticmethod(lambda source: _path(source).stat().st_mtime)


NODE_CLASS_MAPPINGS = {
    **node_classes(_load, _config_of, lambda *_: None),
    "ParityModel": Model,
    "ParityFresh": Fresh,
    "ParityNeedsTheDevice": NeedsTheDevice,
    "ParityPatched": Patched,
}
del NODE_CLASS_MAPPINGS["ParityResult"]  # results are saved by ComfyUI's own Save Latent
