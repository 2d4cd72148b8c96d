"""One device mesh with the five axes of `ParallelSpec`."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..spec import AXES, ParallelSpec


def build_mesh(spec: ParallelSpec, device_type: str) -> DeviceMesh:
    """The mesh of `spec`, replica outermost and tensor innermost, so that tensor neighbours are adjacent cards."""
    return init_device_mesh(device_type, tuple(spec.degrees().values()), mesh_dim_names=AXES)
