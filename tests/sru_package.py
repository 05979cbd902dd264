"""The SRU of its authors, without its compiled code: compiling takes most of a minute, and with gradients the package computes in
Python."""

from unittest.mock import patch

with patch("torch.utils.cpp_extension.load"), patch("torch.jit.script", lambda function: function):
    import sru

SRU = sru.SRU
