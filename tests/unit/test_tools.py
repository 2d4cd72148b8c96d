"""The environment and the private ComfyUI tree, as far as nothing need be installed or started for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import ROOT, comfy_source, environment
from tools.base_directory import BaseDirectory


def test_comfyuis_list_is_taken_without_the_torch_family(tmp_path: Path) -> None:
    lines = ["torch", "torchvision", "torchaudio>=2", "torchsde", "", "# a remark", "av>=14.2.0 # video"]
    (tmp_path / "requirements.txt").write_text("\n".join(lines))
    assert environment._comfy_requirements(tmp_path) == ["torchsde", "av>=14.2.0"]


@pytest.mark.parametrize(
    ("version", "needed"), [("0.3.75", False), ("0.8.0", True), ("0.29.0", True), ("1.2", True)]
)
def test_torchaudio_is_for_the_releases_that_need_it(tmp_path: Path, version: str, needed: bool) -> None:
    (tmp_path / "comfyui_version.py").write_text(f'__version__ = "{version}"\n')
    assert comfy_source.version(tmp_path) == version
    assert environment._needs_torchaudio(tmp_path) is needed


def test_a_checkout_of_the_users_own_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMFYUI_PATH", str(tmp_path))
    with pytest.raises(comfy_source.SourceError, match=r"no main\.py"):
        comfy_source.obtain()
    (tmp_path / "main.py").touch()
    assert comfy_source.obtain() == tmp_path.resolve()


def test_the_pack_is_linked_under_any_name_and_again(tmp_path: Path) -> None:
    for _ in range(2):
        base = BaseDirectory.create(
            tmp_path / "base", pack_folder="Some Other.Name", pipelines={"mine": tmp_path / "model"}
        )
    assert (base.path / "custom_nodes" / "Some Other.Name").resolve() == ROOT
    assert (base.path / "models" / "diffusers" / "mine").is_symlink()
    assert [path.name for path in (base.path / "custom_nodes").iterdir()] == ["Some Other.Name"]
