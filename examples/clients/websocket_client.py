"""A client with websockets: `python websocket_client.py [URL]`. pip install websockets"""

import json
import os
import sys

from websockets.exceptions import InvalidStatus
from websockets.sync.client import ClientConnection, connect

ROWS = [[0.1, -0.4, 0.2], [0.3, -0.4, 0.5], [0.2, -0.3, 0.4]]


class Refused(Exception):
    """An error of the service. The code is for programs, the message for people."""

    def __init__(self, answer: dict[str, str]) -> None:
        super().__init__(f"{answer['code']}: {answer['error']}")


def opened(url: str, model: str) -> ClientConnection:
    """Return a socket with a new session. Raises Refused if the service does not open it."""
    key = os.environ.get("SEQSERVE_CLIENT_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        return connect(f"{url.replace('http', 'ws', 1)}/stream?model={model}", additional_headers=headers)
    except InvalidStatus as error:
        raise Refused(json.loads(error.response.body)) from error


def send(stream: ClientConnection, chunk: list[list[float]], end: bool = False) -> None:
    """Send a chunk, print the answer for all steps so far. Raises Refused for a chunk that the service refuses."""
    stream.send(json.dumps({"input": chunk, "end": end}))
    answer = json.loads(stream.recv(timeout=10))
    if "error" in answer:
        raise Refused(answer)
    print(answer["session"]["steps"], "steps:", *(f"{x:.3f}" for x in answer["outputs"][0]["value"]))


def main(url: str) -> None:
    with opened(url, "sensor-forecast") as stream:
        send(stream, ROWS, end=True)  # a whole sequence is one chunk

        for row in ROWS:  # after an end the next chunk begins a session
            send(stream, [row])
        try:
            send(stream, [[0.1]])
        except Refused as error:
            print(error)  # the session is as it was

    try:
        opened(url, "nobody")
    except Refused as error:
        print(error)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
