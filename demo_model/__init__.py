"""The demo model: a tiny FLUX.1-shaped pipeline, trained from scratch on pictures drawn by this package."""
