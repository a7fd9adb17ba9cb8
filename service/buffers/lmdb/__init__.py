"""The store on one machine's disk, in LMDB and a file of slots beside it."""

from service.buffers.lmdb.readonly import opened_readonly
from service.buffers.lmdb.store import LmdbStore

__all__ = ["LmdbStore", "opened_readonly"]
