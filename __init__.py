"""ComfyUI-Sharded: what ComfyUI imports, and nothing else."""

from .nodes import comfy_entrypoint

WEB_DIRECTORY = "./web"

__all__ = ["WEB_DIRECTORY", "comfy_entrypoint"]
