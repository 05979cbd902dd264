"""The formats of checkpoints that can be written. Loads no writer."""

SUFFIXES = {"pytorch": (".pt", ".pth", ".bin", ".ckpt", ".safetensors"), "onnx": (".onnx",)}
"""The ends of the names of files of each format, by which `seqserve import` knows it."""
