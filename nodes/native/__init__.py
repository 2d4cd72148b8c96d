"""The stock faces of a slot: objects that ComfyUI takes for its own MODEL while the work is done by a group."""
