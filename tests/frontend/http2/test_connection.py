"""The rules of RFC 9113 on one connection: frames of a client, and the error that the RFC requires."""

from __future__ import annotations

import struct
from functools import partial

import hpack
import pytest

from service.frontend.http2.frames import ErrorCode
from service.frontend.http2.header_blocks import encode_fields
from tests.frontend.http2.peer import (
    FLAGS,
    KINDS,
    PREFACE,
    REQUEST,
    ClockLoop,
    Peer,
    block,
    frame,
    request,
    reset,
    settings,
    window,
)

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = KINDS
END_STREAM, ACK, END_HEADERS, PADDED, PRIORITIZED = FLAGS
_, PROTOCOL_ERROR, _, FLOW_CONTROL_ERROR, STREAM_CLOSED, FRAME_SIZE_ERROR, REFUSED_STREAM, _, COMPRESSION_ERROR, _ = ErrorCode
WORD = struct.Struct(">I").pack
OPEN = request(1, b"/hold", ended=False)
HALF_CLOSED = request(1, b"/hold")
ANSWERED = request(1)


def sized(length: bytes) -> bytes:
    return frame(HEADERS, 4, 1, block((b"content-length", length)))


# Connection errors: section of the RFC, frames after the greeting, error code.
CONNECTION_ERRORS = [
    ("4.1 DATA beyond the frame size", [OPEN, frame(DATA, 0, 1, bytes(16_385))], FRAME_SIZE_ERROR),
    ("4.2 HEADERS beyond the frame size", [frame(HEADERS, 5, 1, bytes(16_385))], FRAME_SIZE_ERROR),
    ("4.2 unknown type beyond the frame size", [frame(99, 0, 1, b"", size=1 << 23)], FRAME_SIZE_ERROR),
    ("4.3 invalid header block", [frame(HEADERS, 5, 1, b"\xff" * 11 + b"\x7f")], COMPRESSION_ERROR),
    ("4.3 index beyond the table", [frame(HEADERS, 5, 1, b"\xfe")], COMPRESSION_ERROR),
    ("4.3 truncated literal", [frame(HEADERS, 5, 1, b"\x00\x05ab")], COMPRESSION_ERROR),
    ("4.3 table size update in the middle", [frame(HEADERS, 5, 1, b"\x82\x20")], COMPRESSION_ERROR),
    ("4.3 table size beyond the setting", [frame(HEADERS, 5, 1, b"\x3f\xe2\x1f")], COMPRESSION_ERROR),
    ("4.3 DATA inside a header block", [frame(HEADERS, 1, 1, block()), frame(DATA, 1, 1)], PROTOCOL_ERROR),
    ("4.3 unknown frame inside a header block", [frame(HEADERS, 1, 1, block()), frame(99, 0, 1)], PROTOCOL_ERROR),
    ("5.1 idle: DATA", [frame(DATA, 1, 1, b"x")], PROTOCOL_ERROR),
    ("5.1 idle: RST_STREAM", [reset(1)], PROTOCOL_ERROR),
    ("5.1 idle: WINDOW_UPDATE", [window(1, 9)], PROTOCOL_ERROR),
    ("5.1 idle: CONTINUATION", [frame(CONTINUATION, 4, 1, block())], PROTOCOL_ERROR),
    ("5.1 closed: HEADERS", [ANSWERED, request(1)], STREAM_CLOSED),
    ("5.1 closed: CONTINUATION", [ANSWERED, frame(CONTINUATION, 4, 1, block())], PROTOCOL_ERROR),
    ("5.1.1 even stream", [request(2)], PROTOCOL_ERROR),
    ("5.1.1 stream 0", [request(0)], PROTOCOL_ERROR),
    ("5.1.1 smaller stream", [request(5), request(3)], PROTOCOL_ERROR),
    ("6.1 DATA on stream 0", [frame(DATA, 1, 0, b"x")], PROTOCOL_ERROR),
    ("6.1 padding as long as the payload", [OPEN, frame(DATA, PADDED, 1, b"\x05abc\0")], PROTOCOL_ERROR),
    ("6.1 padded DATA without a payload", [OPEN, frame(DATA, PADDED, 1)], PROTOCOL_ERROR),
    ("6.2 padding beyond the HEADERS", [frame(HEADERS, 0xD, 1, b"\xff" + block())], PROTOCOL_ERROR),
    ("6.2 priority beyond the HEADERS", [frame(HEADERS, 0x25, 1, b"\0\0")], FRAME_SIZE_ERROR),
    ("6.3 PRIORITY on stream 0", [frame(PRIORITY, 0, 0, bytes(5))], PROTOCOL_ERROR),
    ("6.4 RST_STREAM on stream 0", [reset(0)], PROTOCOL_ERROR),
    ("6.4 RST_STREAM of 3 bytes", [OPEN, frame(RST_STREAM, 0, 1, bytes(3))], FRAME_SIZE_ERROR),
    ("6.5 SETTINGS on a stream", [frame(SETTINGS, 0, 1)], PROTOCOL_ERROR),
    ("6.5 SETTINGS of 5 bytes", [frame(SETTINGS, 0, 0, bytes(5))], FRAME_SIZE_ERROR),
    ("6.5 SETTINGS with ACK and payload", [frame(SETTINGS, ACK, 0, bytes(6))], FRAME_SIZE_ERROR),
    ("6.5.2 ENABLE_PUSH is 2", [settings((2, 2))], PROTOCOL_ERROR),
    ("6.5.2 INITIAL_WINDOW_SIZE too large", [settings((4, 1 << 31))], FLOW_CONTROL_ERROR),
    ("6.5.2 MAX_FRAME_SIZE too small", [settings((5, 16_383))], PROTOCOL_ERROR),
    ("6.5.2 MAX_FRAME_SIZE too large", [settings((5, 1 << 24))], PROTOCOL_ERROR),
    ("6.5.2 invalid value before a valid one", [settings((4, 1 << 31), (4, 1))], FLOW_CONTROL_ERROR),
    ("6.6 PUSH_PROMISE", [OPEN, frame(PUSH_PROMISE, 4, 1, WORD(2) + block())], PROTOCOL_ERROR),
    ("6.7 PING on a stream", [frame(PING, 0, 1, bytes(8))], PROTOCOL_ERROR),
    ("6.7 PING of 7 bytes", [frame(PING, 0, 0, bytes(7))], FRAME_SIZE_ERROR),
    ("6.8 GOAWAY on a stream", [frame(GOAWAY, 0, 1, bytes(8))], PROTOCOL_ERROR),
    ("6.8 GOAWAY of 7 bytes", [frame(GOAWAY, 0, 0, bytes(7))], FRAME_SIZE_ERROR),
    ("6.9 WINDOW_UPDATE of 3 bytes", [frame(WINDOW_UPDATE, 0, 0, bytes(3))], FRAME_SIZE_ERROR),
    ("6.9 WINDOW_UPDATE of 0", [window(0, 0)], PROTOCOL_ERROR),
    ("6.9.1 connection window overflows", [window(0, 2**31 - 1)], FLOW_CONTROL_ERROR),
    ("6.9.2 setting overflows a window", [OPEN, window(1, 2**31 - 1 - 65_535), settings((4, 65_536))], FLOW_CONTROL_ERROR),
    ("6.10 CONTINUATION of another stream", [frame(HEADERS, 1, 1, block()), frame(CONTINUATION, 4, 3, b"")], PROTOCOL_ERROR),
    ("6.10 CONTINUATION after the end", [OPEN, frame(CONTINUATION, 4, 1, block())], PROTOCOL_ERROR),
]

# Stream errors on stream 1.
STREAM_ERRORS = [
    ("5.1 half closed: DATA", [HALF_CLOSED, frame(DATA, 1, 1, b"x")], STREAM_CLOSED),
    ("5.1 half closed: HEADERS", [HALF_CLOSED, request(1)], STREAM_CLOSED),
    ("5.1 closed: DATA", [ANSWERED, frame(DATA, 1, 1, b"x")], STREAM_CLOSED),
    ("6.3 PRIORITY of 4 bytes", [OPEN, frame(PRIORITY, 0, 1, bytes(4))], FRAME_SIZE_ERROR),
    ("6.9 WINDOW_UPDATE of 0", [OPEN, window(1, 0)], PROTOCOL_ERROR),
    ("6.9.1 stream window overflows", [OPEN, window(1, 2**31 - 1)], FLOW_CONTROL_ERROR),
    ("8.1 trailers do not end the stream", [OPEN, frame(HEADERS, 4, 1, b"")], PROTOCOL_ERROR),
    ("8.1.1 content-length too small", [sized(b"1"), frame(DATA, 0, 1, b"ab")], PROTOCOL_ERROR),
    ("8.1.1 content-length too large", [sized(b"3"), frame(DATA, 1, 1, b"ab")], PROTOCOL_ERROR),
    ("8.1.1 content-length without a body", [frame(HEADERS, 5, 1, block((b"content-length", b"3")))], PROTOCOL_ERROR),
]

MALFORMED = {
    "8.2 upper case": [*REQUEST, (b"Upper", b"x")],
    "8.2.1 space in a name": [*REQUEST, (b"a b", b"x")],
    "8.2.1 empty name": [*REQUEST, (b"", b"x")],
    "8.2.1 line break in a value": [*REQUEST, (b"x", b"a\r\nb")],
    "8.2.1 NUL in a value": [*REQUEST, (b"x", b"a\0b")],
    "8.2.1 space around a value": [*REQUEST, (b"x", b" a")],
    "8.2.1 line break in a pseudo-header": [*REQUEST[:3], (b":authority", b"a\nb")],
    "8.2.2 connection": [*REQUEST, (b"connection", b"close")],
    "8.2.2 transfer-encoding": [*REQUEST, (b"transfer-encoding", b"chunked")],
    "8.2.2 te": [*REQUEST, (b"te", b"gzip")],
    "8.3 unknown pseudo-header": [*REQUEST, (b":x", b"y")],
    "8.3 pseudo-header of a response": [*REQUEST, (b":status", b"200")],
    "8.3 pseudo-header after a field": [*REQUEST[:3], (b"x", b"y"), REQUEST[3]],
    "8.3 pseudo-header twice": [*REQUEST, (b":method", b"GET")],
    "8.3.1 no method": REQUEST[1:],
    "8.3.1 no scheme": [REQUEST[0], *REQUEST[2:]],
    "8.3.1 no path": [*REQUEST[:2], REQUEST[3]],
    "8.3.1 empty path": [*REQUEST[:2], (b":path", b"")],
    "8.1.1 two content lengths": [*REQUEST, (b"content-length", b"1"), (b"content-length", b"2")],
    "8.1.1 content-length is no number": [*REQUEST, (b"content-length", b"-1")],
}


def cases(table: list[tuple[str, list[bytes], ErrorCode]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("frames", "code"), [case[1:] for case in table], ids=[case[0] for case in table])


@cases(CONNECTION_ERRORS)
def test_connection_error_ends_the_connection(peer: Peer, frames: list[bytes], code: ErrorCode) -> None:
    sent = peer.send_parts(frames)
    assert sent.goaways == [code]
    assert sent[-1].kind == GOAWAY and peer.closed
    assert peer.application.faults == 1 and not peer.application.errors
    assert not peer.send(request(99)), "nothing is answered after GOAWAY"


@cases(STREAM_ERRORS)
def test_stream_error_resets_the_stream_alone(peer: Peer, frames: list[bytes], code: ErrorCode) -> None:
    sent = peer.send_parts(frames)
    assert sent.resets(1) == [code] and not peer.closed
    assert peer.send(request(3, ended=False), frame(DATA, 1, 3, b"alive")).body(3) == b"alive"


@pytest.mark.parametrize("fields", MALFORMED.values(), ids=MALFORMED)
def test_malformed_request_is_reset(peer: Peer, fields: list[tuple[bytes, bytes]]) -> None:
    encoder = hpack.Encoder()
    sent = peer.send(frame(HEADERS, END_HEADERS | END_STREAM, 1, encoder.encode(fields)))
    assert sent.resets(1) == [PROTOCOL_ERROR] and not peer.application.requests
    again = peer.send(frame(HEADERS, END_HEADERS | END_STREAM, 3, encoder.encode(REQUEST)))
    assert again.body(3) == b"" and len(peer.application.requests) == 1, "the decoder's table is that of the client"


def test_greeting_has_the_limits(peer: Peer) -> None:
    first, update, ack = peer.greeting
    assert (first.kind, dict(struct.iter_unpack(">HI", first.payload))) == (SETTINGS, {3: 8, 4: 1 << 18, 6: 16 << 10})
    assert (update.kind, update.stream, update.word) == (WINDOW_UPDATE, 0, (1 << 22) - 65_535)
    assert (ack.kind, ack.flags) == (SETTINGS, ACK)


@pytest.mark.parametrize("start", [b"GET / HTTP/1.1\r\n", PREFACE[:-5], PREFACE + request(1), PREFACE + frame(SETTINGS, ACK)])
def test_other_protocols_are_refused(loop: ClockLoop, start: bytes) -> None:
    """The first frame must be SETTINGS."""
    peer = Peer(loop, greet=False)
    assert peer.send(start + b"X").goaways == [PROTOCOL_ERROR] and peer.closed


def test_bytes_may_arrive_one_by_one(loop: ClockLoop) -> None:
    """With padding and a priority, which is ignored. The response is HEADERS, DATA and trailers."""
    peer, sized_block = Peer(loop, greet=False), block((b"content-length", b"4"))
    headers = frame(HEADERS, END_HEADERS | PADDED | PRIORITIZED, 1, b"\x03" + bytes(5) + sized_block + bytes(3))
    body = frame(DATA, PADDED, 1, b"\x02ab\0\xff") + frame(DATA, END_STREAM, 1, b"cd")
    data = PREFACE + settings() + frame(PRIORITY, 0, 9, bytes(5)) + headers + body + frame(PING, 0, 0, b"12345678")
    sent = peer.send_parts(bytes((octet,)) for octet in data)
    assert [part.payload for part in sent if part.kind == PING] == [b"12345678"]
    answer = [part for part in sent if part.stream == 1]
    last = END_HEADERS | END_STREAM
    assert [(part.kind, part.flags) for part in answer] == [(HEADERS, END_HEADERS), (DATA, 0), (HEADERS, last)]
    assert sent.body(1) == b"abcd"
    assert peer.header_fields(sent) == [{b":status": b"200"}, {b"x-end": b"yes"}]


def test_header_block_may_be_in_several_frames(peer: Peer) -> None:
    data = block((b"x", b"y" * 100))
    parts = [frame(HEADERS, END_STREAM, 1, data[:7])]
    parts += [frame(CONTINUATION, 0, 1, data[7 + at : 8 + at]) for at in range(6)]
    assert peer.send(*parts, frame(CONTINUATION, 4, 1, data[13:]))[0].kind == HEADERS, "8 frames at most"
    assert peer.application.requests[0].get(b"x") == b"y" * 100


def test_trailers_end_a_request_and_are_checked(peer: Peer) -> None:
    def trailers(stream: int, name: bytes) -> bytes:
        return frame(HEADERS, END_HEADERS | END_STREAM, stream, hpack.Encoder().encode([(name, b"y")]))

    assert peer.send(request(1, ended=False), frame(DATA, 0, 1, b"ab"), trailers(1, b"x")).body(1) == b"ab"
    for stream, name in ((3, b":path"), (5, b"Upper"), (7, b"connection")):
        sent = peer.send(request(stream, b"/hold", ended=False), trailers(stream, name))
        assert sent.resets(stream) == [PROTOCOL_ERROR]


def test_unknown_frames_settings_and_flags_are_ignored(peer: Peer) -> None:
    setting = frame(SETTINGS, 0xFE, 0, struct.pack(">HI", 99, 7))
    goaway = frame(GOAWAY, 0, 0, bytes(8) + b"bye")
    sent = peer.send(goaway, frame(99, 0xFF, 1, b"x"), setting, frame(PING, 0xFE, 0, bytes(8)), request(1))
    assert [part.kind for part in sent if part.kind in (SETTINGS, PING)] == [SETTINGS, PING]
    assert not peer.closed


def test_more_streams_than_allowed_are_refused(peer: Peer) -> None:
    """The fields of a refused request remain in the header table."""
    encoder, fields = hpack.Encoder(), [*REQUEST, (b"x-new", b"first")]
    assert not peer.send(*[request(id, b"/hold") for id in range(1, 17, 2)])
    assert peer.send(frame(HEADERS, 5, 17, encoder.encode(fields))).resets(17) == [REFUSED_STREAM]
    sent = peer.send(reset(1), frame(HEADERS, 5, 19, encoder.encode(fields)))
    assert sent.resets(19) == [] and peer.application.lost == [1]
    assert peer.application.requests[-1].get(b"x-new") == b"first"


def test_end_of_the_connection_loses_its_streams_once(peer: Peer, loop: ClockLoop) -> None:
    """It is lost, or the application fails, which is reported."""
    failing = Peer(loop)
    sent = failing.send(request(1, b"/hold"), request(3, b"/fail"))
    assert sent.goaways == [ErrorCode.INTERNAL_ERROR] and len(failing.application.errors) == 1
    peer.send(request(1, b"/hold"), request(3, b"/hold"))
    peer.run(peer.transport.close)
    assert failing.application.lost == peer.application.lost == [1, 3] and not peer.connections


def test_answer_before_the_end_of_the_request_stops_it(peer: Peer) -> None:
    sent = peer.send(request(1, b"/refuse", ended=False))
    assert [part.kind for part in sent] == [HEADERS, RST_STREAM] and sent.resets(1) == [ErrorCode.NO_ERROR]
    late = [frame(DATA, 0, 1, b"on its way"), frame(HEADERS, END_HEADERS | END_STREAM, 1, b"")]
    assert not peer.send(*late) and not peer.closed, "late data and trailers are ignored"


def test_large_header_block_leaves_in_several_frames(peer: Peer) -> None:
    fields = [(b"x-%d" % number, b"y" * 15_000) for number in range(3)]
    peer.send(request(1, b"/hold"), request(3, b"/hold"))
    [whole] = peer.run(peer.application.handlers[3].stream.send_headers, bytes(16_384))
    assert (whole.kind, whole.flags, whole.payload) == (HEADERS, END_HEADERS, bytes(16_384))
    sent = peer.run(partial(peer.application.handlers[1].stream.send_headers, encode_fields(fields), last=True))
    assert [(part.kind, part.flags) for part in sent] == [(HEADERS, END_STREAM), (CONTINUATION, 0), (CONTINUATION, END_HEADERS)]
    assert hpack.Decoder(1 << 20).decode(b"".join(part.payload for part in sent), raw=True) == fields


# Flow control.


def test_response_waits_for_the_windows(peer: Peer) -> None:
    sent = peer.send(request(1, b"/large"))
    assert len(sent.body(1)) == 65_535 and max(len(part.payload) for part in sent) == 16_384
    assert not peer.send(window(1, 100_000)), "the window of the connection is used up"
    assert len(peer.send(window(0, 50_000)).body(1)) == 50_000
    rest = peer.send(window(0, 2_000_000), window(1, 2_000_000))
    assert len(rest.body(1)) == 1_000_000 - 65_535 - 50_000
    assert rest[-1].flags == END_HEADERS | END_STREAM and peer.application.sent == [1]


def test_initial_window_changes_open_streams(peer: Peer) -> None:
    peer.send(settings((4, 1)))
    assert peer.send(request(1, ended=False), frame(DATA, 1, 1, b"abcdefg")).body(1) == b"a"
    assert peer.send(settings((4, 4))).body(1) == b"bcd"
    assert peer.send(settings((4, 2))).body(1) == b"", "the window is -2 now"
    assert peer.send(window(1, 2)).body(1) == b"" and peer.send(window(1, 1)).body(1) == b"e"
    assert peer.send(settings((4, 100))).body(1) == b"fg"


def test_streams_share_the_connection(peer: Peer) -> None:
    peer.send(settings((4, 1 << 20)), request(1, b"/large"), request(3, b"/large"), window(0, 200_000))
    sent = peer.send(window(0, 400_000))
    assert abs(len(sent.body(1)) - len(sent.body(3))) <= 16_384


def test_client_waits_until_the_application_has_consumed(peer: Peer) -> None:
    data = frame(DATA, 0, 1, bytes(16_384))
    assert not peer.send(request(1, b"/slow", ended=False), data * 16)
    [update] = peer.run(peer.application.handlers[1].stream.consumed, 1 << 18)
    assert (update.kind, update.stream, update.word) == (WINDOW_UPDATE, 1, 1 << 18)
    assert not peer.send(data * 16).resets(1)
    assert peer.send(frame(DATA, 0, 1, b"x")).resets(1) == [FLOW_CONTROL_ERROR] and peer.application.lost == [1]


def test_padding_is_part_of_the_window(peer: Peer) -> None:
    padded = frame(DATA, PADDED, 1, b"\xff" + bytes(1) + bytes(255))
    sent = peer.send(request(1, b"/slow", ended=False), padded * 1100)
    granted = sum(part.word for part in sent if part.kind == WINDOW_UPDATE and part.stream == 1)
    assert granted >= 1 << 17 and not peer.closed and not sent.resets(1)


# Remembered header blocks.


def test_remembered_block_is_forgotten_when_the_table_changes(peer: Peer) -> None:
    """A block with an index into the dynamic table means something else after an insertion."""
    encoder = hpack.Encoder()
    fields = [*REQUEST[:2], (b":path", b"/"), (b"x-other", b"0"), (b"x-value", b"one")]  # the first are in the static table
    peer.send(frame(HEADERS, 5, 1, encoder.encode(fields)))
    repeated = encoder.encode(fields)
    peer.send(frame(HEADERS, 5, 3, repeated), frame(HEADERS, 5, 5, repeated))
    assert peer.application.requests[1] is peer.application.requests[2], "the block is remembered"
    peer.send(frame(HEADERS, 5, 7, block() + b"\x40\x07x-value\x03two"))
    peer.send(frame(HEADERS, 5, 9, repeated))
    assert repeated[-1:] == b"\xbe", "the newest entry of the table"
    inserting = block() + b"\x40\x07x-value\x03one"  # the same bytes insert twice, so the older field has the second index
    peer.send(frame(HEADERS, 5, 11, inserting), frame(HEADERS, 5, 13, inserting), frame(HEADERS, 5, 15, block() + b"\xbf"))
    assert [actual.get(b"x-value") for actual in peer.application.requests[-5:]] == [*[b"two"] * 2, *[b"one"] * 3]


def test_blocks_decode_as_hpack_decodes_them(peer: Peer) -> None:
    """A client's usual blocks: the same fields again and again, with values that change in between."""
    encoder = hpack.Encoder()
    expected = []
    for number in range(200):
        fields = [*REQUEST, (b"grpc-timeout", b"%dm" % (number // 7)), (b"x-trace", b"%d" % (number % 5))]
        if number % 50 == 20:
            encoder.header_table_size = 256 if number % 100 == 20 else 4096
        expected.append(fields[len(REQUEST) :])
        peer.send(frame(HEADERS, END_HEADERS | END_STREAM, 2 * number + 1, encoder.encode(fields)))
    assert [actual.fields for actual in peer.application.requests] == expected


# Pings, GOAWAY, time.


def test_quiet_client_is_pinged_and_then_closed(peer: Peer) -> None:
    assert not peer.sweep(59)
    [ping] = peer.sweep(2)
    assert (ping.kind, ping.flags) == (PING, 0)
    peer.send(frame(PING, ACK, 0, ping.payload))
    assert not peer.sweep(21) and not peer.closed
    assert [part.kind for part in peer.sweep(50)] == [PING]
    peer.sweep(21)
    assert peer.closed


def test_drain_accepts_what_was_sent_and_closes_after_the_last_stream(peer: Peer) -> None:
    peer.send(request(1, b"/hold", ended=False))
    announced, ping = peer.run(peer.connection.drain)
    assert (announced.kind, announced.payload[:4], announced.word) == (GOAWAY, b"\x7f\xff\xff\xff", 0) and ping.kind == PING
    assert peer.send(request(3, ended=False), frame(DATA, 1, 3, b"late")).body(3) == b"late"
    [last] = peer.send(frame(PING, ACK, 0, ping.payload))
    assert (last.kind, last.payload[:4]) == (GOAWAY, WORD(3))
    assert not peer.send(request(5)) and not peer.closed, "streams after the last one are ignored"
    answer = peer.run(peer.application.handlers[1].stream.respond, b"\x88", b"answer", b"\x88")
    assert answer.body(1) == b"answer" and peer.closed


def test_old_connection_is_drained(loop: ClockLoop) -> None:
    """The drain of a silent client ends after a second."""
    silent = Peer(loop)
    silent.run(silent.connection.drain)
    assert not silent.sweep(0.9)
    [last] = silent.sweep(0.2)
    assert last.kind == GOAWAY and silent.closed
    peer = Peer(loop, max_age_seconds=20)
    peer.send(request(1, b"/hold", ended=False))
    assert not peer.sweep(17.9), "the youngest age at which it may end is 18 s"
    [announced, ping] = peer.sweep(4.2)
    assert (announced.kind, announced.payload[:4], ping.kind) == (GOAWAY, b"\x7f\xff\xff\xff", PING)
    peer.send(frame(PING, ACK, 0, ping.payload))
    peer.sweep(1000)
    assert not peer.closed
