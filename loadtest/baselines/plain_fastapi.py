"""The obvious server: a FastAPI handler in the thread pool that calls torch once for each request."""

from __future__ import annotations

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

    return app
