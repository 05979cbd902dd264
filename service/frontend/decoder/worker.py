"""The work of a decoder: bodies in, options and packed inputs out. The modules of each API define the rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from service.errors import SERVICE_FAILED, InferenceFailed, ServiceError, TooLarge
from service.frontend.decoder.client import MAX_LOOP_BODY_BYTES
from service.frontend.grpc.messages import read_request, split_request
from service.frontend.oip import json
from service.frontend.oip.inputs import InputTensors
from service.frontend.oip.types import InferRequest
from service.frontend.rest import infer
from service.frontend.rest.chunks import ChunkBody
from service.frontend.run import validation
from service.frontend.run.catalog import ServedModel
from service.frontend.run.validation import PackedInputs
from service.ipc.channel import Frame, encode
from service.ipc.messages.decoder import BodyDecoded, DecodeBody, DefineModel, InputsPacked, PackInputs
from service.ipc.messages.inference import Cancel
from service.ipc.messages.message import Message, Refusal
from service.ipc.messages.models import ModelKey
from service.log import Log
from service.modeling.spec import ModelSpec
from service.modeling.tokenizer import Tokenizer
from service.settings import Settings


class ParsedBody(NamedTuple):
    """A body without errors so far. options: everything but inputs and states. pack: validates these for a model; raises a ServiceError."""

    options: bytes
    pack: Callable[[ServedModel, Settings], PackedInputs]


class Decoder:
    """Handles the frontend's messages. `handle` returns the reply to a call, as a frame."""

    def __init__(self, settings: Settings, log: Log) -> None:
        self._settings = settings
        self._log = log
        self._models: dict[ModelKey, ServedModel] = {}
        self._bodies: dict[int, tuple[DecodeBody, bytes]] = {}
        self._parsed: dict[int, ParsedBody] = {}
        """The body whose inputs are packed next. Packing the inputs of another body again, for another model, parses it again."""

    def handle(self, frame: Frame) -> bytes | None:
        try:
            return self._handle(frame.id, frame.message, bytes(frame.tail))
        except ServiceError as error:
            # A variable that outlives this block would refer to the frames that refer to it. Such a cycle would keep the body: nothing
            # collects garbage here.
            return encode(Refusal.of(error), frame.id)
        except Exception as error:
            self._log.error("bug", error=f"{type(error).__name__}: {error}")
            return encode(Refusal.of(InferenceFailed(SERVICE_FAILED)), frame.id)

    def _handle(self, id: int, message: Message, data: bytes) -> bytes | None:
        match message:
            case DecodeBody():
                body = PARSERS[message.api](message, data)
                if len(body.options) > MAX_LOOP_BODY_BYTES:
                    problem = f"everything but the inputs takes {len(body.options)} bytes, and at most {MAX_LOOP_BODY_BYTES} are allowed"
                    raise TooLarge(f"{problem}: send shorter names and fewer parameters")
                self._parsed[id], self._bodies[id] = body, (message, data)
                return encode(BodyDecoded(id), id, (body.options,))
            case PackInputs():
                call, data = self._bodies[message.body]
                parsed = self._parsed.pop(message.body) if message.body in self._parsed else PARSERS[call.api](call, data)
                packed = parsed.pack(self._models[message.key], self._settings)
                return encode(InputsPacked(packed.lengths, packed.state_bytes), id, (packed.data,))
            case DefineModel():
                spec, tokenizer = ModelSpec.model_validate_json(message.spec), Tokenizer(data) if data else None
                model = ServedModel(spec, message.version, tokenizer, message.generation)
                self._models[model.key] = model
            case Cancel():
                self._bodies.pop(id, None)
                self._parsed.pop(id, None)
        return None


def _parse_infer(call: DecodeBody, data: bytes) -> ParsedBody:
    body = infer.parse_body(data, call.session)
    options = msgspec.structs.replace(body, inputs=[None], states=None)
    return ParsedBody(msgspec.json.encode(options), lambda model, settings: infer.pack_inputs(body, model, settings))


def _parse_stream(call: DecodeBody, data: bytes) -> ParsedBody:
    message = ChunkBody.parse(data)

    def pack(model: ServedModel, settings: Settings) -> PackedInputs:
        return validation.pack_inputs([message.input], lambda _: "input", model, settings)

    return ParsedBody(msgspec.json.encode(msgspec.structs.replace(message, input=None)), pack)


def _parse_oip_json(call: DecodeBody, data: bytes) -> ParsedBody:
    return _oip_body(*json.parse_request(data, call.header_length, call.model, call.version))


def _parse_oip_protobuf(call: DecodeBody, data: bytes) -> ParsedBody:
    return _oip_body(*read_request(split_request(data)))


def _oip_body(request: InferRequest, inputs: InputTensors) -> ParsedBody:
    return ParsedBody(msgspec.msgpack.encode(request), inputs.pack)  # not JSON, which has no infinite numbers


PARSERS: dict[str, Callable[[DecodeBody, bytes], ParsedBody]] = {
    "infer": _parse_infer,
    "stream": _parse_stream,
    "oip_json": _parse_oip_json,
    "oip_protobuf": _parse_oip_protobuf,
}
