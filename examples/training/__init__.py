"""Shared by the training scripts: data, encoders, the training loop, cards, and the table of results."""
