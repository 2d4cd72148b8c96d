"""The developer's tools: environment, ComfyUI server, client, demo. Nothing in here is loaded by ComfyUI."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".cache"
DEMO_MODEL = ROOT / "demo_model" / "shapes-flux"
