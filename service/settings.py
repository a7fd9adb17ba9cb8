"""Every setting of the server, once: an environment variable `GRADSERVE_<NAME>`, its type, default and meaning."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, PositiveFloat, PositiveInt  # noqa: TID251 - pydantic-settings judges settings by pydantic's types
from pydantic_settings import BaseSettings, SettingsConfigDict


class Settings(BaseSettings):
    """The server's settings. An invalid value stops the start with a message that names the variable."""

    model_config = SettingsConfigDict(env_prefix="GRADSERVE_", env_ignore_empty=True, frozen=True, allow_inf_nan=False)

    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    allow_anonymous: bool = Field(
        False, description="Listen beyond loopback although whoever reaches the port may use the service."
    )
    keys: Path | None = Field(
        None, description="File of API keys (gradserve keys); where it is set, every request needs one, but for probes."
    )
    metrics_open: Literal["loopback", "always", "never"] = Field(
        "loopback",
        description="From where /metrics may be read without an API key with the scope admin, where keys are needed:"
        " loopback, always (from anywhere) or never.",
    )
    tls_certificate: Path | None = Field(None, description="File of the certificate, PEM, with which to speak HTTPS.")
    tls_key: Path | None = Field(None, description="File of the certificate's key, PEM.")
    workers: int = Field(1, ge=1, le=256, description="Processes that share the port.")
    threads: PositiveInt = Field(
        default_factory=lambda given: max(1, len(os.sched_getaffinity(0)) // given.get("workers", 1)),
        description="Width of the thread pool that computes, in each process; by default they share the cores.",
    )
    store: str = Field(
        "lmdb:./gradserve-data",
        description="Where buffers are kept: lmdb:PATH, on disk, or memory:, until the process ends.",
    )
    store_bytes: PositiveInt = Field(
        64 << 30,
        le=1 << 60,
        description="Largest size of what the store holds, in bytes; the disk gives what is needed, up to this.",
    )
    idempotency_seconds: float = Field(
        24 * 3600,
        ge=24 * 3600,
        le=1e9,
        description="Seconds for which an Idempotency-Key is remembered, a day at least.",
    )
    max_body_bytes: PositiveInt = Field(256 << 20, description="Largest request body, in bytes.")
    max_tensor_bytes: PositiveInt = Field(1 << 30, description="Largest input or output tensor, in bytes.")
    max_inflated_bytes: PositiveInt = Field(
        256 << 20, description="Largest size, in bytes, of a compressed request body once it is inflated."
    )
    max_tensors: PositiveInt = Field(1 << 14, description="Most tensors in a request.")
    max_dimensions: int = Field(64, ge=1, le=64, description="Most dimensions of a tensor, and of a new buffer.")
    max_name_length: int = Field(200, ge=1, le=200, description="Most characters in the name of a new buffer.")
    max_buffers: PositiveInt = Field(100_000, description="Most buffers in a namespace.")
    max_bytes_in_flight: PositiveInt = Field(
        1 << 30,
        description="Bytes of the requests in flight in each process, beyond which large ones are told to come again.",
    )
    max_waiting: PositiveInt = Field(
        256,
        description="Requests that may wait for a thread in each process, beyond which large ones are told to come"
        " again.",
    )
    request_timeout: PositiveFloat = Field(
        60,
        description="Seconds without a byte, or with less than 16 KB a second, after which a request whose body is not"
        " complete is given up.",
    )
    keep_alive: PositiveInt = Field(
        75,
        description="Seconds for which a connection may wait for a request, for the rest of its head, for more of a"
        " body that is thrown away, or for its client to read more of an answer.",
    )
    reuse_bytes: int = Field(
        256 << 20, ge=0, description="Memory of past requests, in bytes, that each process keeps for later ones."
    )
    access_log: bool = Field(False, description="Log a line for each request.")
    log_format: Annotated[Literal["text", "json"], BeforeValidator(str.lower)] = Field(
        "text", description="How the log, on stderr, is written: text or json."
    )
    log_level: Annotated[Literal["debug", "info", "warning", "error"], BeforeValidator(str.lower)] = Field(
        "info", description="What is logged at least: debug, info, warning or error."
    )
    tracing: bool = Field(
        False, description="Send a span of each request by OpenTelemetry, which OTEL_ variables tell where to."
    )
    drain_timeout: PositiveInt = Field(
        30, description="Seconds that requests in flight may take to finish once the server is told to stop."
    )
