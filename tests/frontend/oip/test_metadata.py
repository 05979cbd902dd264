"""Metadata, configuration and readiness of models, and the version policy of a load request."""

from __future__ import annotations

import json
from typing import Any

import pytest

from service.errors import InvalidInput, ServiceError, UnknownModel, Unsupported
from service.frontend.oip.metadata import model_config, model_metadata, model_ready, server_metadata, version_policy
from service.frontend.oip.tensors import BYTES
from tests import models
from tests.frontend.oip.harness import InferHarness, three_sequences


@pytest.mark.parametrize("name", models.OF_EVERY_HEAD)
def test_metadata_configuration_and_outputs_agree(harness: InferHarness, name: str) -> None:
    metadata, config = model_metadata(harness.frontend, name, ""), model_config(harness.frontend, name, "")
    assert (metadata["name"], metadata["versions"], metadata["platform"]) == (name, ["1"], "seqserve")
    assert config["max_batch_size"] == 8
    for described, configured in ((metadata["inputs"], config["input"]), (metadata["outputs"], config["output"])):
        assert [(tensor["name"], tensor["shape"], tensor["datatype"]) for tensor in described] == [
            (tensor["name"], [-1, *tensor["dims"]], tensor["data_type"].removeprefix("TYPE_").replace("STRING", BYTES))
            for tensor in configured
        ]
    by_name = {tensor["name"]: tensor for tensor in metadata["outputs"]}
    for output in harness.infer(name, *three_sequences(name)).outputs:
        assert output.datatype == by_name[output.name]["datatype"]
        for size, declared in zip(output.shape, by_name[output.name]["shape"], strict=True):
            assert declared in (-1, size)


def test_configuration_shows_what_a_model_takes(harness: InferHarness) -> None:
    """The input that each request needs, for load generators that send all that are listed, and sessions."""
    words, forecaster = (model_config(harness.frontend, name, "1") for name in ("words", "forecaster"))
    assert [tensor["name"] for tensor in (*words["input"], *forecaster["input"])] == ["text", "inputs"]
    assert forecaster["sequence_batching"] == {"max_sequence_idle_microseconds": 60_000_000}
    assert words["dynamic_batching"] == {}
    assert "dynamic_batching" not in forecaster and "sequence_batching" not in words


def test_model_is_ready_when_an_engine_has_loaded_it(harness: InferHarness) -> None:
    frontend, dispatcher = harness.frontend, harness.dispatcher
    assert model_ready(frontend, "words", "") and model_ready(frontend, "alias", "1")
    del dispatcher.models[0]
    assert not model_ready(frontend, "words", "1")
    dispatcher.ready = False
    assert not model_ready(frontend, "forecaster", "")
    for name, version in (("nobody", ""), ("words", "2")):
        with pytest.raises(UnknownModel):
            model_ready(frontend, name, version)


def policy(text: str) -> dict[str, Any]:
    return {"config": f'{{"version_policy": {text}}}'}


def test_version_policy_is_read_from_a_configuration() -> None:
    assert version_policy({}) is None and version_policy({"config": "{}", "unload_dependents": False}) is None
    assert version_policy(policy('{"all": {}}')) == "all"
    assert version_policy(policy('{"latest": {"num_versions": 2}}')) == "latest:2"
    assert version_policy(policy('{"specific": {"versions": [1, 3]}}')) == "1,3"
    longest, too_long = (policy(json.dumps({"specific": {"versions": [1000] * count}})) for count in (200, 201))
    assert len(version_policy(longest) or "") == 999
    with pytest.raises(InvalidInput, match="has 1004 characters and at most 1000 are allowed: list fewer versions"):
        version_policy(too_long)


CONFIG = "parameters.config"
REFUSED: list[tuple[dict[str, Any], type[ServiceError], str]] = [
    *(({"config": config}, InvalidInput, CONFIG) for config in ("", "[]", "{", "null", 7, None, "[" * 100_000)),
    *((policy(text), InvalidInput, CONFIG) for text in ("1", "{}", '{"all": 1}', '{"all": {"x": 1}}', '{"latest": {}}')),
    *((policy(f'{{"latest": {{"num_versions": {count}}}}}'), InvalidInput, CONFIG) for count in ("0", "true", "10000")),
    *((policy(f'{{"specific": {{"versions": {value}}}}}'), InvalidInput, CONFIG) for value in ("[]", '["1"]', "[0]")),
    (policy('{"all": {}, "latest": {"num_versions": 1}}'), InvalidInput, CONFIG),
    ({"config": '{"max_batch_size": 8}'}, Unsupported, CONFIG),
    ({"config": '{"version_policy": {"all": {}}, "name": "x"}'}, Unsupported, CONFIG),
    ({"file:1/model.onnx": "AAAA"}, Unsupported, "parameters.file:1/model.onnx"),
]


@pytest.mark.parametrize(("parameters", "error", "field"), REFUSED, ids=range(len(REFUSED)))
def test_other_load_parameters_are_refused(parameters: dict[str, Any], error: type[ServiceError], field: str) -> None:
    with pytest.raises(ServiceError) as raised:
        version_policy(parameters)
    assert (type(raised.value), raised.value.field) == (error, field)


def test_server_metadata_has_name_version_and_extensions() -> None:
    metadata = server_metadata()
    assert (metadata["name"], set(metadata)) == ("seqserve", {"name", "version", "extensions"})
    assert {"statistics", "model_repository", "sequence(string_id)"} < set(metadata["extensions"])
