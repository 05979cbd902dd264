"""Turns checkpoints of other frameworks into model folders, offline: `seqserve import`. The server never imports this package."""
