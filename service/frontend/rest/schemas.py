"""The base classes of JSON bodies and query parameters, their error messages, and their part of the OpenAPI document."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, StrictStr, ValidationError, WithJsonSchema
from pydantic_core import from_json

from service.errors import InvalidInput, InvalidRequest, ServiceError
from service.frontend.openapi import named_examples
from service.frontend.quoting import quote
from service.frontend.validation import SESSION_ID_SCHEMA, check_session_id

SessionId = Annotated[StrictStr, AfterValidator(check_session_id), WithJsonSchema(SESSION_ID_SCHEMA)]


class JsonBody(BaseModel):
    """A JSON object from a client. The class variables appear in error messages: where it is sent, its noun, and an example."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)
    endpoint: ClassVar[str]
    noun: ClassVar[str] = "the body"
    example: ClassVar[str]

    @classmethod
    def parse(cls, data: bytes | str) -> Self:
        """Return the validated body; raises InvalidRequest for data that is no JSON object, InvalidInput for the first wrong field."""
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            raise _body_error(cls, error.errors(include_url=False)[0]) from None

    def without(self, *fields: str) -> bytes:
        """Return the fields that the client sent, except these, as JSON."""
        return self.model_dump_json(by_alias=True, exclude=set(fields), exclude_unset=True).encode()

    @classmethod
    def restore(cls, fields: bytes, **placeholder: Any) -> Self:
        """Return a body with these fields, which `without` returned, and a placeholder for the missing fields."""
        return cls.model_validate(from_json(fields) | placeholder)


class QueryParameters(BaseModel):
    """The query parameters of one endpoint."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)
    endpoint: ClassVar[str]

    @classmethod
    def parse(cls, items: Iterable[tuple[str, str]]) -> Self:
        """Return the validated parameters; raises InvalidInput for the first wrong one."""
        try:
            return cls.model_validate(cls.collect(items))
        except ValidationError as error:
            raise _query_error(cls, error.errors(include_url=False)[0]) from None

    @classmethod
    def collect(cls, items: Iterable[tuple[str, str]]) -> dict[str, Any]:
        """Return the parameters by name; the last value of a repeated parameter counts."""
        return dict(items)


def describe_body(body: type[JsonBody], **examples: dict[str, Any]) -> dict[str, Any]:
    """Return the OpenAPI description of a JSON body, for `openapi_extra`: FastAPI does not see a body that the endpoint reads itself.

    examples: by name, with spaces in place of underscores.
    """
    content = {"schema": body.model_json_schema(by_alias=True), "examples": named_examples(**examples)}
    return {"requestBody": {"required": True, "content": {"application/json": content}}}


def describe_query(query: type[QueryParameters]) -> dict[str, Any]:
    """Return the OpenAPI description of query parameters, for `openapi_extra`."""
    schema = query.model_json_schema(by_alias=True)
    required = schema.get("required", [])
    return {
        "parameters": [
            {"name": name, "in": "query", "required": name in required, "schema": parameter}
            for name, parameter in schema["properties"].items()
        ]
    }


def _body_error(body: type[JsonBody], error: Mapping[str, Any]) -> ServiceError:
    if error["type"] == "json_invalid":
        return InvalidRequest(f"{body.noun} is not JSON: {quote(str(error['msg']))}")
    if not error["loc"]:
        return InvalidRequest(f"{body.noun} is not a JSON object: send {body.example}")
    name, *rest = error["loc"]
    field = quote(str(name)) + "".join(f"[{part}]" for part in rest if isinstance(part, int))
    if error["type"] == "extra_forbidden":
        return InvalidInput(f"{field} is not a field of {body.endpoint}: known fields are {_names(body)}", field=field)
    if error["type"] == "missing":
        return InvalidInput(f"{field} is missing: {body.noun} needs {_required_names(body)}", field=field)
    return InvalidInput(f"{field}: {_message(error)}", field=field)


def _query_error(query: type[QueryParameters], error: Mapping[str, Any]) -> ServiceError:
    field = quote(str(error["loc"][0]))
    if error["type"] == "extra_forbidden":
        return InvalidInput(
            f"{field} is not a parameter of {query.endpoint}: known parameters are {_names(query)}", field=field
        )
    if error["type"] == "missing":
        return InvalidInput(f"{field} is missing: {query.endpoint} needs {_required_names(query)}", field=field)
    return InvalidInput(f"{field} is {quote(str(error['input']))}: {_message(error)}", field=field)


def _message(error: Mapping[str, Any]) -> str:
    """Return pydantic's message without its capital letter."""
    message: str = error["msg"]
    return message[0].lower() + message[1:]


def _names(model: type[BaseModel]) -> str:
    return ", ".join(info.alias or name for name, info in model.model_fields.items())


def _required_names(model: type[BaseModel]) -> str:
    return " and ".join(info.alias or name for name, info in model.model_fields.items() if info.is_required())
