"""Metadata, configuration and readiness of models, and the version policy of a load request."""

from __future__ import annotations

import json
from typing import Any

import pytest

from service.errors import InvalidInput, UnknownModel, Unsupported
from service.frontend.oip.metadata import model_config, model_metadata, model_ready, server_metadata, version_policy
from service.frontend.oip.tensors import BYTES
from tests import models
from tests.frontend.oip.harness import SETTINGS, InferHarness, three_sequences


@pytest.mark.parametrize("name", models.OF_EVERY_HEAD)
def test_metadata_configuration_and_outputs_agree(harness: InferHarness, name: str) -> None:
    metadata, config = model_metadata(harness.frontend, name, ""), model_config(harness.frontend, name, "")
    assert (metadata["name"], metadata["versions"], metadata["platform"]) == (name, ["1"], "seqserve")
    assert config["max_batch_size"] == SETTINGS.max_inputs
    for described, configured in ((metadata["inputs"], config["input"]), (metadata["outputs"], config["output"])):
        assert [tensor["name"] for tensor in described] == [tensor["name"] for tensor in configured]
        assert [tensor["shape"] for tensor in described] == [[-1, *tensor["dims"]] for tensor in configured]
        assert [tensor["data_type"].removeprefix("TYPE_").replace("STRING", BYTES) for tensor in configured] == [
            tensor["datatype"] for tensor in described
        ]
    by_name = {tensor["name"]: tensor for tensor in metadata["outputs"]}
    for output in harness.infer(name, *three_sequences(name)).outputs:
        assert output.datatype == by_name[output.name]["datatype"]
        for size, declared in zip(output.shape, by_name[output.name]["shape"], strict=True):
            assert declared in (-1, size)


def test_inputs_that_may_be_left_out_are_optional(harness: InferHarness) -> None:
    def optional(name: str) -> list[str]:
        return [tensor["name"] for tensor in model_config(harness.frontend, name, "1")["input"] if tensor["optional"]]

    assert optional("words") == ["ids", "lengths", "offsets"]
    assert optional("speller") == optional("forecaster") == ["lengths", "offsets"]


def test_model_with_sessions_has_sequence_batching(harness: InferHarness) -> None:
    with_sessions, without = (model_config(harness.frontend, name, "") for name in ("forecaster", "words"))
    assert with_sessions["sequence_batching"] == {"max_sequence_idle_microseconds": 60_000_000}
    assert "dynamic_batching" not in with_sessions
    assert without["dynamic_batching"] == {}
    assert "sequence_batching" not in without


def test_model_is_ready_when_an_engine_has_loaded_it(harness: InferHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    assert model_ready(harness.frontend, "words", "") and model_ready(harness.frontend, "alias", "1")
    monkeypatch.setattr(harness.dispatcher, "models", harness.dispatcher.models[1:])
    assert not model_ready(harness.frontend, "words", "1")
    monkeypatch.setattr(harness.dispatcher, "ready", False)
    assert not model_ready(harness.frontend, "forecaster", "")
    for name, version in (("nobody", ""), ("words", "2")):
        with pytest.raises(UnknownModel):
            model_ready(harness.frontend, name, version)


@pytest.mark.parametrize(
    ("config", "setting"),
    [
        ({}, None),
        ({"version_policy": {"all": {}}}, "all"),
        ({"version_policy": {"latest": {"num_versions": 2}}}, "latest:2"),
        ({"version_policy": {"specific": {"versions": [1, 3]}}}, "1,3"),
    ],
)
def test_version_policy_is_read_from_a_configuration(config: dict[str, Any], setting: str | None) -> None:
    assert version_policy({"config": json.dumps(config), "unload_dependents": False}) == setting


def test_length_of_a_version_policy_is_limited() -> None:
    longest, too_long = (json.dumps({"version_policy": {"specific": {"versions": [1000] * count}}}) for count in (200, 201))
    assert len(version_policy({"config": longest}) or "") == 999
    with pytest.raises(InvalidInput, match="has 1004 characters and at most 1000 are allowed: list fewer versions") as raised:
        version_policy({"config": too_long})
    assert raised.value.field == "parameters.config"


def test_no_configuration_has_no_version_policy() -> None:
    assert version_policy({}) is None


@pytest.mark.parametrize(
    "config",
    [
        *("", "[]", "{", "7", "null", 7, None, "[" * 100_000, '{"version_policy": 1}', '{"version_policy": {}}'),
        *('{"version_policy": {"all": 1}}', '{"version_policy": {"all": {"x": 1}}}', '{"version_policy": {"latest": {}}}'),
        '{"version_policy": {"latest": {"num_versions": 0}}}',
        '{"version_policy": {"latest": {"num_versions": true}}}',
        '{"version_policy": {"latest": {"num_versions": 10000}}}',
        '{"version_policy": {"specific": {"versions": []}}}',
        '{"version_policy": {"specific": {"versions": ["1"]}}}',
        '{"version_policy": {"specific": {"versions": [0]}}}',
        '{"version_policy": {"all": {}, "latest": {"num_versions": 1}}}',
    ],
)
def test_invalid_configuration_is_rejected(config: Any) -> None:
    with pytest.raises(InvalidInput) as raised:
        version_policy({"config": config})
    assert raised.value.field == "parameters.config"


@pytest.mark.parametrize(
    ("parameters", "field"),
    [
        ({"config": '{"max_batch_size": 8}'}, "parameters.config"),
        ({"config": '{"version_policy": {"all": {}}, "name": "x"}'}, "parameters.config"),
        ({"file:1/model.onnx": "AAAA"}, "parameters.file:1/model.onnx"),
    ],
)
def test_other_load_parameters_are_unsupported(parameters: dict[str, Any], field: str) -> None:
    with pytest.raises(Unsupported) as raised:
        version_policy(parameters)
    assert raised.value.field == field


def test_server_metadata_has_name_version_and_extensions() -> None:
    metadata = server_metadata()
    assert (metadata["name"], set(metadata)) == ("seqserve", {"name", "version", "extensions"})
    assert {"statistics", "model_repository", "sequence(string_id)"} < set(metadata["extensions"])
