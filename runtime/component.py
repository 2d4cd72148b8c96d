"""The files of a model on disk: a component's JSON and safetensors files by their usual names, and their state.

A component is a folder as diffusers and transformers write it: config.json, and its weights in one file or several.
No torch: the host and the ranks read folders the same way.
"""

from __future__ import annotations

import hashlib
import json
import os
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .safetensors_header import printable
from .spec import Refusal

DIFFUSERS_WEIGHTS = "diffusion_pytorch_model"
_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".flashpack")


def one_line(value: object) -> str:
    """A value that a file or the system gave, as part of one line of a message."""
    return printable(reprlib.repr(value) if isinstance(value, list | dict) else value)


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turns what the system refuses inside into a Refusal that names `path`."""
    try:
        yield
    except OSError as error:
        raise Refusal(
            f"'{one_line(path.name)}' cannot be read.",
            f"The system says: {one_line(error)}.",
            "Make it readable for ComfyUI, or download the model again.",
        ) from error


def read_json(file: Path, what: str, belongs: str) -> dict[str, Any]:
    """The JSON object in `file`. Raises Refusal: `what` cannot be done without it, `belongs` is where there is one."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise Refusal(what, f"It has no {one_line(file.parent.name)}/{file.name}.", belongs) from error
    except (OSError, ValueError, RecursionError) as error:
        raise Refusal(
            what, f"{file.name} cannot be read: {one_line(error)}.", "Download that file of the model again."
        ) from error
    if not isinstance(content, dict):
        raise Refusal(what, f"{file.name} holds no JSON object.", "Download that file of the model again.")
    return content


def refuse_quantised(what: str, config: Mapping[str, Any]) -> None:
    """Raise Refusal, which calls the component `what`, if its config says that its weights are packed."""
    if config.get("quantization_config") is not None:
        raise Refusal(
            f"{what} is quantized.",
            "Quantized weights are packed in a form that cannot be loaded or divided over ranks yet.",
            "Works instead: the same model in bf16, fp16 or fp32.",
        )


def weight_files(folder: Path, stem: str = DIFFUSERS_WEIGHTS) -> list[Path]:
    """The safetensors files of a component, one or as many as its index names; each of them exists.

    Raises Refusal for an index that names any other file, for other weights and for missing files.
    """
    files = _named_files(folder, stem)
    for file in files:
        if not file.is_file():
            others = sorted(f.name for f in folder.glob("*") if f.suffix in (*_OTHER_WEIGHTS, ".safetensors"))
            raise Refusal(
                f"The {one_line(folder.name)} has no file {one_line(file.name)}.",
                f"Weights are read from safetensors files under their usual names; there {_lie(others)}.",
                "Download the safetensors files of the model, and leave their names as they are.",
            )
    return files


def _named_files(folder: Path, stem: str) -> list[Path]:
    index = folder / f"{stem}.safetensors.index.json"
    if not index.exists():
        return [folder / f"{stem}.safetensors"]
    name = one_line(folder.name)
    placed = read_json(index, f"The {name} is damaged.", "Download that file of the model again.").get(
        "weight_map"
    )
    names = list(placed.values()) if isinstance(placed, dict) else []
    if not names or not all(isinstance(name, str) for name in names):
        raise Refusal(
            f"The {name} is damaged.",
            f"{index.name} does not say which file holds which tensor.",
            "Download that file of the model again.",
        )
    _check_names(name, names)
    return [folder / name for name in sorted(set(names))]


def _check_names(component: str, names: list[str]) -> None:
    """Refuse names of an index that lead out of the folder, or to anything but safetensors."""
    if any(Path(name).name != name or name == ".." for name in names):
        raise Refusal(
            f"The {component}'s index names files outside its folder.",
            "Weights are only read from the model's own folder.",
            "Download the model again from its publisher.",
        )
    if others := sorted({name for name in names if not name.endswith(".safetensors")}):
        raise Refusal(
            f"The {component}'s index names {one_line(others[0])}.",
            "Only files called .safetensors are read: other formats can run code.",
            "Download the safetensors files of the model, and leave their names as they are.",
        )


def _lie(names: list[str]) -> str:
    return f"is only {', '.join(map(one_line, names))}" if names else "are no weights at all"


def folder_version(path: Path) -> str:
    """Changes when any file of a model's folder does, so that a replaced model is loaded again.

    Looks into components that are links to folders elsewhere, but no deeper than a pipeline goes.
    """
    files = sorted(file for file in (*path.glob("*"), *path.glob("*/*")) if file.is_file())
    return _digest((str(file.relative_to(path)), file.stat()) for file in files)


def file_version(path: Path) -> str:
    """Changes when the file does; "" where there is none."""
    return _digest([(path.name, path.stat())]) if path.is_file() else ""


def _digest(files: Iterable[tuple[str, os.stat_result]]) -> str:
    digest = hashlib.sha256()
    for name, status in files:
        entry = f"{name} {status.st_size} {status.st_mtime_ns}\n"
        digest.update(entry.encode(errors="surrogateescape"))
    return digest.hexdigest()[:16]
