"""Writes model folders as checkpoints of other frameworks, offline: `seqserve export`. The server never imports this package."""
