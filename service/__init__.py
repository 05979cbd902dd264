"""seqserve: a server for sequence models."""

__version__ = "0.1.0"
