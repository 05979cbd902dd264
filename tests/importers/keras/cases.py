"""Models of Keras that import or are refused. The tests import each of them."""

from __future__ import annotations

from collections.abc import Sequence

from tests.importers.keras import layer_cases, model_cases, ops_cases, recurrent_cases
from tests.importers.keras.builders import Case

CASES: Sequence[Case] = (*recurrent_cases.CASES, *layer_cases.CASES, *model_cases.CASES, *ops_cases.CASES)
