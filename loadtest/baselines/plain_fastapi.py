"""The obvious server: a FastAPI handler in the thread pool that calls torch once for each request."""

from __future__ import annotations

import argparse

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

from loadtest.baselines import classifier


class Question(BaseModel):
    text: str


class Answer(BaseModel):
    scores: list[float]


def build() -> FastAPI:
    app, scores = FastAPI(), classifier.load()

    @app.post("/predict")
    def predict(question: Question) -> Answer:
        return Answer(scores=scores([question.text])[0])

    @app.get("/health")
    def health() -> bool:
        return True

    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    uvicorn.run(build(), port=parser.parse_args().port, access_log=False, log_level="warning")


if __name__ == "__main__":
    main()
