"""Writes model folders as checkpoints of other frameworks, offline: `seqserve export`. The server never imports this package."""

SUFFIXES = {"pytorch": (".pt", ".pth", ".bin", ".ckpt", ".safetensors"), "onnx": (".onnx",)}
"""The ends of the names of files of each format, by which `seqserve import` knows it."""
