"""docs/models.md names every key of layers and heads with its default, and every activation with its parameters."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from service.modeling.spec import ModelSpec, SequenceInput
from service.modeling.spec.activations import PARAMETERS, Gated, Kind
from service.modeling.spec.heads import Head
from service.modeling.spec.heads.descriptor import HeadDense
from service.modeling.spec.layers import Layer

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
ROW = re.compile(r"^\| `(\w+)` \|(.*)$", re.MULTILINE)
LAYERS = {get_args(kind.model_fields["kind"].annotation)[0]: kind for kind in get_args(get_args(Layer)[0])}
HEADS = {get_args(kind.model_fields["kind"].annotation)[0]: kind for kind in get_args(get_args(Head)[0])}


def words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text))


@pytest.mark.parametrize("kind", [*LAYERS, *HEADS])
def test_page_names_every_key_and_its_default(kind: str) -> None:
    described = " ".join(row for name, row in ROW.findall(PAGE) if name == kind)
    assert described, f"docs/models.md has no row for {kind}"
    for name, field in (LAYERS | HEADS)[kind].model_fields.items():
        assert name in words(PAGE), f"docs/models.md lacks {name} of {kind}"
        default = field.get_default(call_default_factory=True)
        if name in words(described) and isinstance(default, bool | int | float) and not field.is_required():
            written = str(default).lower() if isinstance(default, bool) else f"{default:g}".replace("e-0", "e-")
            forms = f"`{name}` ({written})", f"`{name}` ({written}.0)"
            assert any(form in described for form in forms), f"docs/models.md has another default of {name} of {kind}"


def test_page_names_every_other_key_and_every_activation_with_its_parameters() -> None:
    section = PAGE[PAGE.index("### Activations") : PAGE.index("## Heads")]
    assert {*ModelSpec.model_fields, *SequenceInput.model_fields, *HeadDense.model_fields} <= words(PAGE)
    assert {*get_args(Kind)} <= words(section) and {*get_args(Gated)} <= words(PAGE)
    for name, parameters in PARAMETERS.items():
        row = next(line for line in section.splitlines() if line.startswith(f"| {name} "))
        assert all(f"{value:g}" in row for value in parameters.values()), row
