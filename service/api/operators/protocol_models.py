"""The answers of the endpoints that describe models, in the terms of the Open Inference Protocol."""

from __future__ import annotations

from pydantic import BaseModel, Field


class ServerMetadata(BaseModel):
    """The server."""

    name: str
    version: str
    extensions: list[str] = Field(description="Extensions of the protocol.")


class IndexEntry(BaseModel):
    """A model in the list."""

    name: str
    version: str
    state: str
    reason: str


class TensorMetadata(BaseModel):
    """An input or output of a model."""

    name: str
    datatype: str = Field(description="The datatype of the tensor's default dtype; others are taken, too.")
    shape: list[int] = Field(description="-1 for a dimension of any length.")


class ModelMetadata(BaseModel):
    """A model, and its tensors."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class ConfiguredOutput(BaseModel):
    """An output as Triton describes it."""

    name: str
    data_type: str
    dims: list[int]


class ConfiguredInput(ConfiguredOutput):
    """An input as Triton describes it."""

    optional: bool


class ModelConfiguration(BaseModel):
    """A model as Triton describes it."""

    name: str
    platform: str
    max_batch_size: int
    input: list[ConfiguredInput]
    output: list[ConfiguredOutput]


class ModelReady(BaseModel):
    """A model that takes requests."""

    name: str
    ready: bool


class Duration(BaseModel):
    """The time of some requests."""

    count: int
    ns: int = Field(description="Nanoseconds in all.")


class InferenceDurations(BaseModel):
    """The times of a model's requests, by phase."""

    success: Duration
    fail: Duration
    queue: Duration
    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration
    cache_hit: Duration
    cache_miss: Duration


class OneModelStatistics(BaseModel):
    """The statistics of a model."""

    name: str
    version: str
    last_inference: int = Field(description="Milliseconds since 1970; 0 before the first.")
    inference_count: int
    execution_count: int
    inference_stats: InferenceDurations
    batch_stats: list[str] = Field(description="Always empty: no requests are batched.")


class ModelStatistics(BaseModel):
    """The statistics of models."""

    model_stats: list[OneModelStatistics]
