"""POST /tokens: the tokens of a text as a model sees it, and the texts of token ids."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from msgspec import Meta
from pydantic import BaseModel, ConfigDict

from service.errors import InvalidInput, TooLarge
from service.frontend.rest.http_exchange import MANAGEMENT_LIMIT, caller_of, read_json, respond_json
from service.frontend.rest.schemas import JsonBody, describe_body
from service.frontend.run.frontend import Frontend
from service.frontend.run.head_outputs import input_field
from service.modeling.tokenizer import Tokenizer

_EXAMPLES: dict[str, dict[str, Any]] = {
    "text": {"model": "question-type", "inputs": ["How far is it from Denver to Aspen ?"]},
    "token_ids": {"model": "question-type", "inputs": [[4, 11, 2, 7]]},
}
TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]


class TokensBody(JsonBody):
    """Body of POST /tokens."""

    endpoint = "/tokens"
    example = '{"model": "...", "inputs": [...]}'

    model: Annotated[str, Meta(description="Name or alias of a served model over text.")]
    inputs: Annotated[list[str | list[TokenId]], Meta(min_length=1, description="Texts, or lists of token ids.")]
    version: Annotated[str | int | None, Meta(description="Version of the model; the newest by default.")] = None


class Tokens(BaseModel):
    """The tokens of one input."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    ids: list[int]
    tokens: list[str]
    """Each token as text: the characters that it covers, or that its id stands for."""
    offsets: list[tuple[int, int]] | None = None
    """Of a text: the first character of each token, and the character after its last. Both are equal for a token that was added."""


class TokensReply(BaseModel):
    """Reply to POST /tokens: one output per input."""

    model: str
    version: str
    outputs: list[Tokens]


def add_routes(router: APIRouter, frontend: Frontend) -> None:
    """Add POST /tokens."""
    turn = asyncio.Semaphore()

    @router.post("/tokens", response_model=TokensReply, openapi_extra=describe_body(TokensBody, **_EXAMPLES))
    async def tokens(request: Request) -> Response:
        """Split texts into tokens, or name the tokens of ids. Each token of a text is a step of the sequence that the model sees."""
        data = await read_json(request, frontend, MANAGEMENT_LIMIT)
        body = TokensBody.parse(data)
        model = frontend.catalog.find(body.model, body.version)
        if model.tokenizer is None:
            raise InvalidInput(f"{model.spec.name} has no tokenizer: name a model over text", field="model")
        limit = frontend.settings.max_inputs
        if len(body.inputs) > limit:
            raise TooLarge(
                f"inputs has {len(body.inputs)} entries and SEQSERVE_MAX_INPUTS is {limit}: send fewer", field="inputs"
            )
        with frontend.limits.quotas.hold(caller_of(request), len(body.inputs), len(data)):
            # In a thread: a text of 64 KiB takes milliseconds. One thread at a time: the event loop waits for each of them in turn.
            async with turn:
                outputs = await asyncio.to_thread(_tokens_of_all, model.tokenizer, body.inputs)
        return respond_json(frontend, {"model": model.spec.name, "version": model.version, "outputs": outputs})


def _tokens_of_all(tokenizer: Tokenizer, inputs: list[str | list[int]]) -> list[dict[str, Any]]:
    return [_tokens(tokenizer, value, input_field(index)) for index, value in enumerate(inputs)]


def _tokens(tokenizer: Tokenizer, value: str | list[int], field: str) -> dict[str, Any]:
    if isinstance(value, list):
        return {"ids": value, "tokens": [tokenizer.text_of(id) for id in value]}
    ids, offsets = tokenizer.tokens(value, field)
    return {
        "ids": ids,
        "tokens": [value[first:end] or tokenizer.text_of(id) for id, (first, end) in zip(ids, offsets, strict=True)],
        "offsets": offsets,
    }
