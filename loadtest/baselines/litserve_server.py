"""The model on LitServe, with its batching."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import litserve

from loadtest.baselines import classifier

MAX_BATCH, DELAY_SECONDS = 32, 0.002


class Classifier(litserve.LitAPI):  # type: ignore[misc] # the package is in another environment
    def setup(self, device: str) -> None:
        self._scores = classifier.load()

    def decode_request(self, request: dict[str, str]) -> str:
        return request["text"]

    def batch(self, inputs: Sequence[str]) -> Sequence[str]:
        return inputs

    def predict(self, texts: Sequence[str]) -> classifier.Scores:
        return self._scores(texts)

    def unbatch(self, output: classifier.Scores) -> classifier.Scores:
        return output

    def encode_response(self, output: list[float]) -> dict[str, list[float]]:
        return {"scores": output}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    api = Classifier(max_batch_size=MAX_BATCH, batch_timeout=DELAY_SECONDS)
    server = litserve.LitServer(api, accelerator="cpu", timeout=60)
    server.run(
        host="127.0.0.1", port=parser.parse_args().port, num_api_servers=1, generate_client_file=False, log_level="error"
    )


if __name__ == "__main__":
    main()
