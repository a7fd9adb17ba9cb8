"""The obvious alternative to this service: a plain FastAPI application with ReluGrad in NumPy.

The endpoints are `def`: `async def` would block the event loop, and FastAPI's thread pool is no slower.
"""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
from fastapi import FastAPI
from pydantic import BaseModel

app = FastAPI()


class Lists(BaseModel):
    dY: list[float]
    X: list[float]


class ListsAnswer(BaseModel):
    dX: list[float]


class Base64(BaseModel):
    dY: str
    X: str


class Base64Answer(BaseModel):
    dX: str


def relu_grad(dY: np.ndarray[Any, Any], X: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.where(X > 0, dY, np.float32(0))


@app.get("/health")
def health() -> dict[str, bool]:
    return {"ready": True}


@app.post("/lists")
def lists(body: Lists) -> ListsAnswer:
    dX = relu_grad(np.array(body.dY, np.float32), np.array(body.X, np.float32))
    return ListsAnswer(dX=dX.tolist())


@app.post("/base64")
def as_base64(body: Base64) -> Base64Answer:
    dY, X = (np.frombuffer(base64.b64decode(text), np.float32) for text in (body.dY, body.X))
    return Base64Answer(dX=base64.b64encode(relu_grad(dY, X).tobytes()).decode())
