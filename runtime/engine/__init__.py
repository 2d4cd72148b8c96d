"""What a rank can do. Only ranks import this package: it brings torch.distributed, diffusers and transformers."""
