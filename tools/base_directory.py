"""A private ComfyUI base directory: models/, output/, custom_nodes/ and so on, with the pack linked into it.

Nothing that a run writes lands in the ComfyUI tree or in the pack.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tools import DEMO_MODEL, ROOT

FOLDERS = ("models/diffusers", "output", "input", "temp", "user/default", "custom_nodes")
# Otherwise the frontend opens its template browser over the canvas on the first visit.
SETTINGS = {"Comfy.TutorialCompleted": True}


@dataclass(frozen=True)
class BaseDirectory:
    path: Path

    @classmethod
    def create(
        cls,
        path: Path,
        *,
        pack_folder: str | None = "comfyui-sharded",
        packs: Mapping[str, Path] | None = None,
        pipelines: Mapping[str, Path] | None = None,
        settings: Mapping[str, object] | None = None,
    ) -> BaseDirectory:
        """Make the tree under `path`, or complete the one that is there.

        `pack_folder` names the folder that the pack is linked as (None: leave it out); `packs` adds others by
        folder name. `pipelines` are the folders to link under models/diffusers; by default the demo model, where
        it exists. `settings` are ComfyUI's own, by id, for a tree that has none yet.
        """
        for folder in FOLDERS:
            (path / folder).mkdir(parents=True, exist_ok=True)
        saved = path / "user" / "default" / "comfy.settings.json"
        if not saved.exists():
            saved.write_text(json.dumps({**SETTINGS, **(settings or {})}))
        linked = dict(packs or {})
        if pack_folder is not None:
            linked[pack_folder] = ROOT
        for name, target in linked.items():
            _link(path / "custom_nodes" / name, target)
        if pipelines is None:
            pipelines = {DEMO_MODEL.name: DEMO_MODEL} if DEMO_MODEL.is_dir() else {}
        for name, target in pipelines.items():
            _link(path / "models" / "diffusers" / name, target)
        return cls(path)

    @property
    def output(self) -> Path:
        return self.path / "output"


def _link(link: Path, target: Path) -> None:
    if link.is_symlink():
        link.unlink()
    link.symlink_to(target.resolve(), target_is_directory=True)
