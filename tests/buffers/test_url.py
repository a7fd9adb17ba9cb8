from __future__ import annotations

from pathlib import Path

import pytest

from service.buffers.lmdb.store import LmdbStore
from service.buffers.memory import MemoryStore
from service.buffers.url import open_store, path_of, without_password
from service.errors import StoreFailed
from tests.buffers.stores import KEY_SECONDS, MAX_BYTES


@pytest.mark.parametrize(
    ("url", "path"),
    [("memory:", None), ("lmdb:./a", Path("a")), ("lmdb:/x/y z", Path("/x/y z")), ("lmdb:a:b", Path("a:b"))],
)
def test_a_url_names_the_path_of_its_store(url: str, path: Path | None) -> None:
    assert path_of(url) == path


@pytest.mark.parametrize("url", ["", "memory", "lmdb", "lmdb:", "memory:x", "sqlite:a", "LMDB:a", "/a/b"])
def test_an_unknown_url_is_refused(url: str) -> None:
    what = "lmdb:PATH, postgresql://HOST/DATABASE or memory:"
    with pytest.raises(StoreFailed, match=rf"^GRADSERVE_STORE is .*, but must be {what}$"):
        path_of(url)


@pytest.mark.parametrize(
    ("url", "seen"),
    [
        ("memory:", "memory:"),
        ("lmdb:/a:b@c", "lmdb:/a:b@c"),
        ("postgresql://ann@db/g", "postgresql://ann@db/g"),
        ("postgresql://ann:s3cret@db:5432/g?sslmode=require", "postgresql://ann:***@db:5432/g?sslmode=require"),
        ("postgresql://:s3cret@a,b:5433/g", "postgresql://:***@a,b:5433/g"),
        ("postgresql://ann:s3@cret@db/g", "postgresql://ann:***@db/g"),
        ("postgres:///g?user=ann&password=s3cret&host=/run", "postgres:///g?user=ann&password=***&host=/run"),
        ("postgresql://db/g?sslkey=k&sslpassword=s3cret", "postgresql://db/g?sslkey=k&sslpassword=***"),
        ("postgresql://ann:s3?#cret@db/g?sslmode=require", "postgresql://ann:***@db/g?sslmode=require"),
        ("postgresql://db/g?p%61ssword=s3cret&user=ann", "postgresql://db/g?p%61ssword=***&user=ann"),
        ("postgresql://db/g?oauth_client_secret=s3cret", "postgresql://db/g?oauth_client_secret=***"),
    ],
)
def test_nobody_sees_the_password_of_a_url(url: str, seen: str) -> None:
    assert without_password(url) == seen


def test_an_error_does_not_show_a_password() -> None:
    with pytest.raises(StoreFailed, match=r"'mysql://ann:\*\*\*@db/g'"):
        path_of("mysql://ann:s3cret@db/g")


@pytest.mark.parametrize(("url", "kind"), [("memory:", MemoryStore), ("lmdb:{}/new/store", LmdbStore)])
def test_a_url_opens_its_store(url: str, kind: type, tmp_path: Path) -> None:
    store = open_store(url.format(tmp_path), max_bytes=MAX_BYTES, key_seconds=KEY_SECONDS)
    assert isinstance(store, kind)
    assert store.records() == []
    store.close()
