"""One device mesh with the five axes of `ParallelSpec`."""

from __future__ import annotations

from functools import cache

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..spec import AXES, ParallelSpec


def build_mesh(spec: ParallelSpec, device_type: str) -> DeviceMesh:
    """The mesh of `spec`, replica outermost and tensor innermost, so that tensor neighbours are adjacent cards."""
    return _mesh(tuple(spec.degrees().values()), device_type)


@cache  # its process groups are never freed, so every load of a layout must use the same
def _mesh(degrees: tuple[int, ...], device_type: str) -> DeviceMesh:
    return init_device_mesh(device_type, degrees, mesh_dim_names=AXES)
