"""One file per architecture that single files come in: how to recognise it, and its config from the shapes."""
