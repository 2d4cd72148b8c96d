"""ComfyUI's own model against the sharded MODEL on the same weights, through ComfyUI's own executor and samplers."""
