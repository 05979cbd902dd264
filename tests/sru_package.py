"""The SRU of its authors, which computes in Python with gradients on a CPU. Compiling its code would take most of a minute."""

from unittest.mock import patch

with patch("torch.utils.cpp_extension.load"), patch("torch.jit.script", lambda function: function):
    import sru

SRU, SRUCell = sru.SRU, sru.SRUCell
