"""ONNX graphs that import or are refused."""

from __future__ import annotations

from tests.importers.onnx import convolution_cases, recurrent_cases, step_cases

CASES = [*recurrent_cases.CASES, *convolution_cases.CASES, *step_cases.CASES]
