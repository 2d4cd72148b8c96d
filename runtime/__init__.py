"""Both sides of the socket between ComfyUI and its group of ranks. Never imports comfy."""
