"""The store over PostgreSQL, which many servers on many machines may share."""

from service.buffers.postgres.readonly import opened_readonly
from service.buffers.postgres.store import PostgresStore

__all__ = ["PostgresStore", "opened_readonly"]
