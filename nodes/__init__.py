"""The host side: what the user drags, and how a group looks like stock ComfyUI objects."""

from __future__ import annotations

from comfy_api.latest import ComfyExtension, io

from . import comfy_host
from .doctor import Doctor
from .group_control import ParkGroup, StopGroup
from .loaders import LoadDiffusionModel, LoadPipeline
from .parallel_config import ParallelConfigNode, TensorPlanNode
from .pipeline import Decode, EncodePrompt, SamplePipeline


class ShardedExtension(ComfyExtension):
    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [
            ParallelConfigNode,
            TensorPlanNode,
            LoadDiffusionModel,
            LoadPipeline,
            EncodePrompt,
            SamplePipeline,
            Decode,
            ParkGroup,
            StopGroup,
            Doctor,
        ]


def comfy_entrypoint() -> ShardedExtension:
    comfy_host.start()
    return ShardedExtension()
