"""Checkpoints as people have them: folders and single files, original layouts, fp8; read only where indexed."""
