"""A client with httpx: `python http_client.py [URL]`. pip install httpx"""

import os
import sys
import time

import httpx

QUESTION = "How far is it from Denver to Aspen ?"
ROWS = [[0.1, -0.4, 0.2], [0.3, -0.4, 0.5], [0.2, -0.3, 0.4]]
RETRIES = 3


class Refused(Exception):
    """An error of the service. The code is for programs, the message for people."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


def infer(client: httpx.Client, body: dict[str, object], session: str = "") -> dict[str, object]:
    """Return the reply to POST /infer. Proxies read the session of a chunk in its header.

    If the service is too busy, repeats the request after `Retry-After`.
    """
    headers = {"x-session-id": session} if session else {}
    for _ in range(RETRIES):
        reply = client.post("/infer", json=body, headers=headers)
        if reply.status_code not in (429, 503) or "Retry-After" not in reply.headers:
            break
        time.sleep(float(reply.headers["Retry-After"]))
    answer: dict[str, object] = reply.json()
    if reply.is_error:
        raise Refused(str(answer["code"]), str(answer["error"]))
    return answer


def main(url: str) -> None:
    key = os.environ.get("SEQSERVE_CLIENT_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with httpx.Client(base_url=url, headers=headers, timeout=10) as client:
        answer = infer(client, {"model": "question-type", "inputs": [QUESTION]})
        print(answer["outputs"][0]["label"])  # type: ignore[index] # JSON

        for sent, row in enumerate(ROWS, 1):  # each request is the next chunk of the session
            chunk = {"model": "sensor-forecast", "inputs": [[row]], "start": sent == 1, "end": sent == len(ROWS)}
            answer = infer(client, chunk, session=f"pump-{os.getpid()}")
            print(answer["session"]["steps"], "steps:", *(f"{x:.3f}" for x in answer["outputs"][0]["value"]))  # type: ignore[index]

        try:
            infer(client, {"model": "nobody", "inputs": ["?"]})
        except Refused as error:
            print(error)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
