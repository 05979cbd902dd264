"""Lists the formats of checkpoints that can be imported, and detects the format of a file. Loads no reader."""

import zipfile
from pathlib import Path

FORMATS = ("pytorch", "keras", "onnx", "tensorflow1", "torch_archive")
BY_SUFFIX = {
    **dict.fromkeys((".pt", ".pth", ".bin", ".ckpt", ".safetensors"), "pytorch"),
    **dict.fromkeys((".keras", ".h5"), "keras"),
    ".onnx": "onnx",
    ".pt2": "torch_archive",
    ".npz": "tensorflow1",
}
"""The format of a checkpoint by the end of its name."""
LAYER_TABLES = {
    "keras": ("graph", "LAYERS"),
    "onnx": ("operators", "OPERATORS"),
    "torch_archive": ("operators", "OPERATORS"),
}
"""Module and name of the dict of layers or operators, by format. Checkpoints of the other formats have tensors only."""


def has_code(file: Path) -> bool:
    """Whether a file is an archive of torch.jit.save, which has the same suffixes as the tensors of torch.save."""
    try:
        with zipfile.ZipFile(file) as archive:
            return any(name.endswith("/constants.pkl") for name in archive.namelist())
    except (OSError, ValueError, NotImplementedError, zipfile.BadZipFile):
        return False
