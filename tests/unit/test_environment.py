"""What a group's processes inherit: the user's settings, and nothing that would misdirect or expose them."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import pytest

from runtime import environment
from runtime.devices import cpu_devices
from tests.support.mocks import mock_cards


def test_a_rank_reads_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "3"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    assert environment.rank_environment() == (3, 1, 4)


@pytest.mark.parametrize("missing", ["RANK", "LOCAL_RANK", "WORLD_SIZE"])
def test_outside_torchrun_there_is_no_place(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "0")
    monkeypatch.delenv(missing)
    with pytest.raises(KeyError, match=missing):
        environment.rank_environment()


# ---- the environment of a group

# Every variable torchrun sets for its workers (torch.distributed.elastic, local_elastic_agent.py), and some of its
# own options as variables (torch.distributed.argparse_util: PET_ and the option's name).
OF_TORCHRUN = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    *("PET_STANDALONE", "PET_NNODES", "PET_NO_PYTHON", "PET_RDZV_BACKEND", "PET_LOG_DIR"),
)


@pytest.mark.parametrize("name", [*OF_TORCHRUN, "PYTHONSAFEPATH"])
def test_what_would_misdirect_the_ranks_is_not_inherited(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "1")
    assert name not in environment.group_environment(cpu_devices(2))


OF_THE_USER = {
    "HF_HOME": "/somewhere/hf",
    "HF_HUB_OFFLINE": "1",
    "HF_ENDPOINT": "https://mirror.example",
    "HTTPS_PROXY": "http://proxy.example:3128",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "PATH": "/usr/bin",
    "RANKS": "not torchrun's",
    "SOMETHING_ELSE": "yes",
}


@pytest.mark.parametrize("name", OF_THE_USER)
def test_what_the_user_has_set_is_inherited(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, OF_THE_USER[name])
    assert environment.group_environment(cpu_devices(2))[name] == OF_THE_USER[name]


@pytest.mark.parametrize("name", ["HF_HUB_OFFLINE", "HF_HOME", "TRANSFORMERS_OFFLINE"])
def test_hub_settings_the_user_has_not_made_are_not_made_for_him(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.delenv(name, raising=False)
    assert name not in environment.group_environment(cpu_devices(2))


@pytest.mark.parametrize("own", [None, "eth0"])
def test_collectives_are_bound_to_loopback(monkeypatch: pytest.MonkeyPatch, own: str | None) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"):
        if own:
            monkeypatch.setenv(name, own)
        else:
            monkeypatch.delenv(name, raising=False)
    made = environment.group_environment(cpu_devices(2))
    assert made["GLOO_SOCKET_IFNAME"] == made["NCCL_SOCKET_IFNAME"] == "lo"
    assert made["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"


@pytest.mark.parametrize("own", [None, "", "1", "7,6,5"])
def test_cards_are_named_by_uuid_in_the_order_of_the_ranks(
    monkeypatch: pytest.MonkeyPatch, own: str | None
) -> None:
    if own is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", own)
    first, second, third = mock_cards(24, 24, 24)
    made = environment.group_environment((third, first))
    assert made["CUDA_VISIBLE_DEVICES"] == f"{third.uuid},{first.uuid}"
    assert second.uuid not in made["CUDA_VISIBLE_DEVICES"]


def test_ranks_on_the_cpu_see_no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert environment.group_environment(cpu_devices(2))["CUDA_VISIBLE_DEVICES"] == ""


def test_what_the_machine_needs_is_put_on_top(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_P2P_DISABLE", "0")
    cards = mock_cards(24, 24)
    assert environment.group_environment(cards)["NCCL_P2P_DISABLE"] == "0"
    assert environment.group_environment(cards, {"NCCL_P2P_DISABLE": "1"})["NCCL_P2P_DISABLE"] == "1"


@pytest.mark.parametrize(
    ("cores", "ranks", "threads"), [(16, 2, 8), (16, 4, 4), (64, 2, 8), (2, 4, 1), (None, 2, 1)]
)
def test_ranks_share_the_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int | None, ranks: int, threads: int
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert environment.group_environment(cpu_devices(ranks))["OMP_NUM_THREADS"] == str(threads)


def test_the_hosts_own_environment_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    before = dict(os.environ)
    environment.group_environment(mock_cards(24, 24))
    assert dict(os.environ) == before


# ---- directories and platform


def test_private_directories_are_looked_for_where_the_system_has_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with (
        tempfile.TemporaryDirectory(dir="/tmp") as short,
        tempfile.TemporaryDirectory(prefix="long" * 20) as long,
    ):
        monkeypatch.setenv("XDG_RUNTIME_DIR", short)
        monkeypatch.setenv("TMPDIR", long)  # Unix socket paths end at 107 bytes
        assert environment.runtime_directories() == [Path(short), Path("/tmp")]


@pytest.mark.parametrize("value", ["", "/does/not/exist"])
def test_a_directory_that_cannot_be_used_is_passed_over(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    for name in ("XDG_RUNTIME_DIR", "TMPDIR"):
        monkeypatch.setenv(name, value)
    assert environment.runtime_directories() == [Path("/tmp")]


def test_the_cache_is_where_the_user_keeps_his(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert environment.cache_directory() == Path("/home/someone/.cache")
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert environment.cache_directory() == Path("/elsewhere")


@pytest.mark.parametrize(("value", "seen"), [(None, None), ("", ""), ("1,0", "1,0")])
def test_comfyuis_own_choice_of_cards_can_be_told(
    monkeypatch: pytest.MonkeyPatch, value: str | None, seen: str | None
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if value is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert environment.visible_cuda_devices() == seen


@pytest.mark.parametrize(
    ("platform", "name"),
    [("linux", None), ("win32", "Windows"), ("darwin", "macOS"), ("freebsd14", "freebsd14")],
)
def test_platforms_without_groups_are_named(
    monkeypatch: pytest.MonkeyPatch, platform: str, name: str | None
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    problem = environment.unsupported_platform()
    assert problem is None if name is None else problem is not None and name in problem
