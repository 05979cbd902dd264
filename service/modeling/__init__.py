"""Models: their folders, layers, heads and tokenizers."""
