"""Every setting of the server, once: an environment variable `GRADSERVE_<NAME>`, its type, default and meaning."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PositiveFloat, PositiveInt  # noqa: TID251 - pydantic-settings validates with pydantic's types
from pydantic_core import PydanticCustomError
from pydantic_settings import BaseSettings, SettingsConfigDict

from service.host.system import cores


def _octal(mode: str) -> str:
    if re.fullmatch("0?[0-7]{3}", mode) is None:
        raise PydanticCustomError("octal", "Permissions are three octal digits, as in 0600")
    return mode


def _size(value: object) -> object:
    """Return the bytes of a size with a unit: 1GB is 1000 MB, and 1GiB or 1G is 1024 MiB."""
    found = re.fullmatch("([0-9]+)([kmgt])(i?b)?", str(value).lower())
    return int(found[1]) * (1000 if found[3] == "b" else 1024) ** ("kmgt".index(found[2]) + 1) if found else value


Size = Annotated[int, BeforeValidator(_size)]


class Settings(BaseSettings):
    """The server's settings. An invalid value stops the start with a message that names the variable."""

    model_config = SettingsConfigDict(env_prefix="GRADSERVE_", env_ignore_empty=True, frozen=True, allow_inf_nan=False)

    host: str = Field("127.0.0.1", description="Address to listen on. The default is reachable from this machine only.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 picks a free port.")
    socket: Path | None = Field(
        None,
        description="Path of a UNIX socket to listen on, in place of the address and the port; if one of them is set,"
        " beside them.",
    )
    socket_mode: Annotated[str, AfterValidator(_octal)] = Field(
        "0600", description="Octal permissions of the socket. The default lets only the server's own user connect."
    )
    allow_anonymous: bool = Field(
        False,
        description="Allow listening beyond loopback, or on a socket that others may open, without API keys: anyone who"
        " reaches it has access.",
    )
    keys: Path | None = Field(
        None,
        description="File of API keys (gradserve keys). If set, every request needs a key, except health probes and the"
        " documentation.",
    )
    metrics_open: Literal["loopback", "always", "never"] = Field(
        "loopback",
        description="Who may read /metrics without an admin key, if keys are set: loopback (this machine), always"
        " (everyone) or never.",
    )
    host_names: str = Field(
        "",
        pattern=r"^[A-Za-z0-9.*_ ,-]*$",
        description="Names, with commas between, for which a server without API keys answers; * is any text. localhost,"
        " addresses and GRADSERVE_HOST need no entry.",
    )
    tls_certificate: Path | None = Field(None, description="PEM file of the TLS certificate. If set, HTTPS is served.")
    tls_key: Path | None = Field(None, description="PEM file of the certificate's private key, not encrypted.")
    workers: int = Field(1, ge=1, le=256, description="Processes that share the port.")
    threads: PositiveInt = Field(
        default_factory=lambda fields: max(1, cores() // fields.get("workers", 1)),
        description="Threads that compute, in each process. By default the processes share the cores.",
    )
    store: str = Field(
        "lmdb:./gradserve-data",
        description="Where buffers are stored: lmdb:PATH (on this machine's disk), postgresql://HOST/DATABASE (for many"
        " servers) or memory: (LMDB in files without names, for tests and throw-away runs: lost with the process).",
    )
    postgres_schema: str = Field(
        "gradserve",
        pattern="^[a-z_][a-z0-9_]{0,62}$",
        description="Schema of the PostgreSQL database that has the tables of the buffers.",
    )
    durability: Literal["local", "replicated"] = Field(
        "local",
        description="When an add is answered, with PostgreSQL: once its primary has it on the disk (local), or its"
        " synchronous standby, too (replicated).",
    )
    store_bytes: Size = Field(
        64 << 30, gt=0, le=1 << 60, description="Bytes that the store may hold, at most. Disk space is taken as needed."
    )
    idempotency_seconds: float = Field(
        24 * 3600,
        ge=24 * 3600,
        le=1e9,
        description="Seconds for which an Idempotency-Key is remembered; at least one day.",
    )
    push_seconds: float = Field(
        900, ge=1, le=1e9, description="Seconds after which a push in parts is forgotten that is not complete."
    )
    shared_memory: bool = Field(
        False,
        description="Offer Triton's extension system_shared_memory: clients on this machine keep tensors in /dev/shm.",
    )
    max_body_bytes: Size = Field(256 << 20, gt=0, description="Bytes of the largest request body, as 1GB or 64MiB.")
    max_tensor_bytes: Size = Field(1 << 30, gt=0, description="Bytes of the largest input or output tensor.")
    max_inflated_bytes: Size = Field(
        256 << 20, gt=0, description="Bytes of the largest compressed request body, once it is decompressed."
    )
    max_tensors: PositiveInt = Field(
        1 << 14, description="Tensors in a request or a push, and buffers that it changes, at most."
    )
    max_dimensions: int = Field(64, ge=1, le=64, description="Dimensions of a tensor or new buffer, at most.")
    max_name_length: int = Field(200, ge=1, le=200, description="Characters in a new buffer's name, at most.")
    max_buffers: PositiveInt = Field(100_000, description="Buffers in one namespace, at most.")
    max_graphs: PositiveInt = Field(1000, description="Graphs in one namespace, at most.")
    max_graph_nodes: PositiveInt = Field(20_000, description="Nodes of a graph, at most.")
    max_bytes_in_flight: Size = Field(
        1 << 30, gt=0, description="Bytes that requests hold in each process, at most. Beyond, large requests get 429."
    )
    max_waiting: PositiveInt = Field(
        256, description="Requests of a namespace that wait for a thread in each process, at most; more get 429."
    )
    request_timeout: PositiveFloat = Field(
        60,
        description="Seconds to wait for more of a body, which must also bring 16 KB a second, or for a free thread.",
    )
    keep_alive: PositiveInt = Field(
        75,
        description="Seconds that a connection may be silent: between requests, in a request's head, or while its"
        " client reads nothing of an answer.",
    )
    reuse_bytes: Size = Field(
        256 << 20, ge=0, description="Bytes of freed memory that each process keeps for later requests."
    )
    graph_cache_bytes: Size = Field(
        512 << 20, ge=0, description="Bytes of planned graphs, and of unchanged parameters, that each process keeps."
    )
    access_log: bool = Field(False, description="Log one line per request.")
    log_format: Annotated[Literal["text", "json"], BeforeValidator(str.lower)] = Field(
        "text", description="Format of the log on stderr: text or json."
    )
    log_level: Annotated[Literal["debug", "info", "warning", "error"], BeforeValidator(str.lower)] = Field(
        "info", description="Lowest level that is logged: debug, info, warning or error."
    )
    tracing: bool = Field(
        False, description="Send an OpenTelemetry span for each request, to where the OTEL_ variables say."
    )
    drain_timeout: PositiveInt = Field(
        30, description="Seconds that running requests have to finish after the server is asked to stop."
    )

    @property
    def uses_tcp(self) -> bool:
        """Whether the server listens on an address and a port."""
        return self.socket is None or not self.model_fields_set.isdisjoint({"host", "port"})


VARIABLES = frozenset(f"GRADSERVE_{name.upper()}" for name in Settings.model_fields)
"""The environment variables of the settings."""
