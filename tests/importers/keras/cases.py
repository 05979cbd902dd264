"""The table of models of Keras that import or are refused. The tests import the model of each line."""

from __future__ import annotations

from collections.abc import Sequence

from tests.importers.keras import keras2_cases, layer_cases, model_cases, ops_cases, recurrent_cases
from tests.importers.keras.builders import Case
from tests.importers.table import Line

CASES: Sequence[Case] = (*recurrent_cases.CASES, *layer_cases.CASES, *model_cases.CASES, *ops_cases.CASES)
TABLE = [Line(case.part, case.option, case.refused) for case in (*CASES, *keras2_cases.CASES.values())]
