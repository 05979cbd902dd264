"""The table of ONNX graphs that import or are refused."""

from __future__ import annotations

from tests.importers.onnx import convolution_cases, export_cases, recurrent_cases, step_cases
from tests.importers.table import Line

CASES = [*recurrent_cases.CASES, *convolution_cases.CASES, *step_cases.CASES]
TABLE = [Line(case.operator, case.option, case.refused) for case in CASES] + export_cases.TABLE
