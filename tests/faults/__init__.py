"""The fault suite: every way a group can break, provoked on a real ComfyUI server with CPU ranks, a JSON line each."""
