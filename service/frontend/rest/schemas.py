"""The base classes of JSON bodies and query parameters, their error messages, and their part of the OpenAPI document."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from types import UnionType
from typing import Annotated, Any, ClassVar, Self, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import NODEFAULT, Meta, UnsetType
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema, create_model

from service.errors import InvalidInput, InvalidRequest, ServiceError
from service.frontend.rest.openapi import inline_schema, named_examples
from service.frontend.run.quoting import quote
from service.frontend.run.validation import SESSION_ID_SCHEMA, check_session_id

SessionId = Annotated[
    str,
    Meta(extra_json_schema=SESSION_ID_SCHEMA),
    *(AfterValidator(check_session_id), WithJsonSchema(SESSION_ID_SCHEMA)),
]
_CONSTRAINTS = ("gt", "ge", "lt", "le", "min_length", "max_length")


class JsonBody(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """A JSON object from a client. The class variables appear in error messages: where it is sent, its noun, and an example.

    msgspec decodes it. If it does not decode, pydantic explains why, by the same definition of its fields.
    """

    endpoint: ClassVar[str]
    noun: ClassVar[str] = "the body"
    example: ClassVar[str]

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Return the decoded body; raises InvalidRequest for data that is no JSON object, InvalidInput for the first wrong field."""
        try:
            body: Self = _decoder(cls).decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return cls._explain(data)
        return body

    @classmethod
    def _explain(cls, data: bytes) -> Self:
        """Raise the error of a body that does not decode. Return the body if pydantic takes it."""
        try:
            body = _explaining_model(cls).model_validate_json(data)
        except ValidationError as error:
            raise _body_error(cls, error.errors(include_url=False)[0]) from None
        return cls(**{name: getattr(body, name) for name in body.model_fields_set})


@cache
def _decoder(body: type[JsonBody]) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(body)


@cache
def _explaining_model(body: type[JsonBody]) -> type[BaseModel]:
    """Return a model of pydantic with the fields of a body."""
    hints = get_type_hints(body, include_extras=True)
    fields: dict[str, Any] = {
        field.name: (
            _with_constraints(hints[field.name]),
            Field(... if _is_required(field) else None, alias=field.encode_name),
        )
        for field in msgspec.structs.fields(body)
    }
    return create_model(body.__name__, __config__=ConfigDict(extra="forbid", strict=True), **fields)


def _is_required(field: msgspec.structs.FieldInfo) -> bool:
    return field.default is NODEFAULT and field.default_factory is NODEFAULT


def _with_constraints(hint: Any) -> Any:
    """Return a type with its constraints as pydantic takes them."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        base, *metadata = arguments
        return Annotated[_with_constraints(base), *[_constraint(each) for each in metadata]]
    if origin in (Union, UnionType):
        return Union[*[_with_constraints(each) for each in arguments if each is not UnsetType]]
    return list[_with_constraints(arguments[0])] if origin is list else hint  # type: ignore[misc]


def _constraint(metadata: Any) -> Any:
    if not isinstance(metadata, Meta):
        return metadata
    return Field(**{name: value for name in _CONSTRAINTS if (value := getattr(metadata, name)) is not None})


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
    content = {"schema": inline_schema(body), "examples": named_examples(**examples)}
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


def _names(model: type[JsonBody | QueryParameters]) -> str:
    return ", ".join(_fields(model))


def _required_names(model: type[JsonBody | QueryParameters]) -> str:
    return " and ".join(name for name, required in _fields(model).items() if required)


def _fields(model: type[JsonBody | QueryParameters]) -> dict[str, bool]:
    """Return the names of all fields, and whether each is required."""
    if issubclass(model, JsonBody):
        return {field.encode_name: _is_required(field) for field in msgspec.structs.fields(model)}
    return {info.alias or name: info.is_required() for name, info in model.model_fields.items()}
