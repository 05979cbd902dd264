"""The formats of checkpoints that can be imported. Loads no reader."""

FORMATS = ("pytorch", "keras", "onnx", "tensorflow1")
BY_SUFFIX = {
    **dict.fromkeys((".pt", ".pth", ".bin", ".ckpt", ".safetensors"), "pytorch"),
    **dict.fromkeys((".keras", ".h5"), "keras"),
    ".onnx": "onnx",
    ".npz": "tensorflow1",
}
"""The format of a checkpoint by the end of its name."""
