"""Which requests have a remembered form, and for how long. tests/frontend/test_hot_path.py compares the replies."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from service.frontend.catalog import Catalog, ServedModel
from service.frontend.oip.binary_forms import MAX_FORMS, BinaryForms, FormKey
from service.frontend.oip.json import parse_request
from service.settings import Settings
from tests import models

IDS = {"name": "ids", "datatype": "INT32", "shape": [3], "parameters": {"binary_data_size": 12}}
SCORES = {"name": "scores", "parameters": {"binary_data": True}}
VALUES = struct.pack("<3i", 1, 2, 3)


@pytest.fixture
def model(tmp_path: Path) -> ServedModel:
    return ServedModel(models.words(tmp_path), "1", None)


@pytest.fixture
def catalog(model: ServedModel) -> Catalog:
    return Catalog([model], {})


@pytest.fixture
def forms(catalog: Catalog) -> BinaryForms:
    return BinaryForms(catalog, Settings())


def remember(forms: BinaryForms, model: ServedModel, document: dict[str, Any], path: str = "/infer") -> FormKey:
    text = json.dumps(document).encode()
    key = (path, text)
    forms.remember(key, parse_request(text + VALUES, len(text), "words", ""), model, [3])
    return key


def test_form_has_the_size_of_its_values(forms: BinaryForms, model: ServedModel) -> None:
    form = forms.find(remember(forms, model, {"inputs": [IDS], "outputs": [SCORES]}))
    assert form is not None
    assert form.fits(VALUES)
    assert not form.fits(VALUES[:-1])
    assert form.pack(VALUES) == ([3], VALUES)
    assert form.pack(struct.pack("<3i", 1, -1, 3)) is None
    assert form.response_size == 4 * len(models.LABELS)


@pytest.mark.parametrize(
    "document",
    [
        {"inputs": [IDS], "id": "seven"},
        {"inputs": [IDS, {"name": "lengths", "datatype": "INT32", "shape": [1], "data": [3]}]},
    ],
)
def test_request_without_a_form(forms: BinaryForms, model: ServedModel, document: dict[str, Any]) -> None:
    assert forms.find(remember(forms, model, document)) is None


def test_forms_end_when_the_served_models_change(forms: BinaryForms, model: ServedModel, catalog: Catalog) -> None:
    key = remember(forms, model, {"inputs": [IDS]})
    assert forms.find(key) is not None
    catalog.serve([model.key], {})
    assert forms.find(key) is None


def test_number_of_forms_is_limited(forms: BinaryForms, model: ServedModel) -> None:
    keys = [remember(forms, model, {"inputs": [IDS]}, str(number)) for number in range(3 * MAX_FORMS)]
    assert sum(forms.find(key) is not None for key in keys) <= MAX_FORMS
    assert forms.find(keys[-1]) is not None
