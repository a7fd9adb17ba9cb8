"""The file of API keys: an edited file is judged as strictly as a new key, and no link, FIFO or device harms anyone."""

from __future__ import annotations

import errno
import json
import os
import resource
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.keys import KeyFile, KeyFileInvalid, add, load, remove
from tests.commands import called
from tests.serving import serving

HUGE = 10**400
"""An integer that no float holds."""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.json"
    add(path, "ann", ["ops"], "team")
    add(path, "bob", ["ops"])
    return path


def edit(path: Path, **members: Any) -> None:
    """Change members of bob's key; Ellipsis removes a member."""
    document = json.loads(path.read_text())
    changed = {**document["keys"][1], **members}
    document["keys"][1] = {name: value for name, value in changed.items() if value is not ...}
    path.write_text(json.dumps(document))


FAULTS: list[tuple[str, Any, str]] = [
    ("namespace", "ann/x", "has namespace 'ann/x', but it must be empty or 1 to 100 characters of A-Z"),
    ("namespace", "a" * 101, "has namespace 'aaa"),
    ("namespace", "a\n", "has namespace 'a\\n', but"),
    ("namespace", "a\0", "has namespace 'a\\x00', but"),
    ("namespace", "\u00e9", "has namespace"),
    ("namespace", None, "has namespace null, but"),
    ("namespace", ["a"], "has namespace ['a'], but"),
    ("id", "x", "has id 'x', but it must be 12 hexadecimal digits"),
    ("id", 7, "has id 7, but"),
    ("digest", "0" * 63, "has digest"),
    ("digest", "\u00e9", "has digest"),
    ("digest", None, "has digest null, but"),
    ("scopes", [], "has scopes [], but it must be a list of some of ops, buffers:read"),
    ("scopes", ["all"], "has scopes ['all'], but"),
    ("scopes", "admin", "has scopes 'admin', but"),
    ("scopes", [["ops"]], "has scopes [['ops']], but"),
    ("scopes", {"ops": 1}, "has scopes {'ops': 1}, but"),
    ("created", True, "has created true, but it must be seconds since 1970"),
    ("created", -1, "has created -1, but"),
    ("created", float("nan"), "has created nan, but"),
    ("expires", "2040-01-31", "has expires '2040-01-31', but it must be null or seconds since 1970"),
    ("expires", float("inf"), "has expires inf, but"),
    ("expires", False, "has expires false, but"),
    ("expires", HUGE, "has expires 1000"),
    ("expires", 1e12, "has expires 1000000000000.0, but it must be null or seconds since 1970, before the year 9999"),
    ("note", "Bob's", "has 'note', which this version does not know"),
    ("expires", ..., "lacks expires"),
]


@pytest.mark.parametrize(("member", "value", "words"), FAULTS)
def test_an_invalid_member_is_named_with_its_key(file: Path, member: str, value: Any, words: str) -> None:
    edit(file, **{member: value})
    with pytest.raises(KeyFileInvalid) as caught:
        load(file)
    assert str(caught.value).startswith(f"{file} is not a valid file of API keys: key 2, 'bob', {words}")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a b", "key 2, 'a b', has name 'a b', but"),
        ("ann", "2 keys have the name 'ann'"),
        ("", "has name '', but"),
        (None, "key 2 has name null"),
    ],
)
def test_names_are_valid_and_unique(file: Path, name: object, words: str) -> None:
    edit(file, name=name)
    with pytest.raises(KeyFileInvalid) as caught:
        load(file)
    assert words in str(caught.value)


def test_ids_are_unique(file: Path) -> None:
    """The id of a secret finds its key: of two keys with one id, one would be lost."""
    edit(file, id=load(file)[0].id)
    with pytest.raises(KeyFileInvalid, match="2 keys have the id"):
        load(file)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "it is [], but must be an object"),
        ("{}", "it lacks format"),
        ('{"format": 1}', "it lacks keys"),
        ('{"format": 2, "keys": []}', "it has format 2, but it must be 1, which this gradserve reads"),
        ('{"format": true, "keys": []}', "it has format true, but"),
        ('{"format": 1, "keys": {}}', "it has keys {}, but it must be a list"),
        ('{"format": 1, "keys": [7]}', "key 1 is 7, but must be an object"),
        ('{"format": 1, "keys": [],\n "keys": []}', "two members named 'keys'"),
        ('{"format": 1,\n "keys": [}', "it is not JSON: Expecting value: line 2 column 11"),
        ("[" * 100_000, "it is nested too deeply"),
        ("\ufeff{}", "it is not JSON"),
        ("", "it is not JSON"),
    ],
)
def test_an_invalid_document_is_explained(file: Path, text: str, words: str) -> None:
    file.write_text(text, "utf-8")
    with pytest.raises(KeyFileInvalid) as caught:
        load(file)
    assert f"{file} is not a valid file of API keys: {words}" in str(caught.value).replace("it has two", "two")


def test_a_text_that_is_not_utf_8_is_refused(file: Path) -> None:
    file.write_bytes(b'{"format": 1, "keys": ["\xff"]}')
    with pytest.raises(KeyFileInvalid, match="utf-8"):
        load(file)


def test_a_server_does_not_start_with_an_edited_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADSERVE_STORE", "memory:")
    monkeypatch.setenv("GRADSERVE_KEYS", str(file))
    edit(file, namespace="ann/x")
    for command in (("serve", "--port", "0"), ("keys", "ls"), ("keys", "rm", "ann")):
        status, out, complaint = called(*command)
        assert (status, out) == (2 if command[0] == "serve" else 1, "")
        assert complaint.startswith(f"gradserve: {file} is not a valid file of API keys: key 2, 'bob', has namespace")


def test_an_edited_namespace_does_not_leak_into_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "keys.json"
    names = ("buffers:read", "buffers:write")
    secrets = {name: add(file, name, [*names], name) for name in ("ann", "bob")}
    with serving(keys=file) as url:
        ann, bob = (httpx.Client(base_url=url, headers={"Authorization": f"Bearer {secrets[who]}"}) for who in secrets)
        with ann, bob:
            assert bob.get("/v1/buffers").status_code == 200
            edit(file, namespace="ann/x")
            assert bob.put("/v1/buffers/secret", json={"shape": [1]}).status_code == 201
            assert ann.get("/v1/buffers").json()["buffers"] == []
            edit(file, namespace="bob")
            assert [one["name"] for one in bob.get("/v1/buffers").json()["buffers"]] == ["secret"]
    (logged,) = [line for line in capsys.readouterr().err.splitlines() if "ERROR" in line]
    assert "the keys read before stay valid" in logged
    assert "key 2, 'bob', has namespace 'ann/x', but it must be empty or 1 to 100 characters of A-Z" in logged


def test_an_unreadable_key_file_is_retried(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = add(file, "eve", ["ops"])
    keys = KeyFile(file)
    assert keys.find(secret) is not None
    remove(file, "eve")
    opened, failures = os.open, [OSError(errno.EMFILE, "Too many open files")]

    def failing(path: Any, *rest: Any) -> int:
        if path == file and failures:
            raise failures.pop()
        return opened(path, *rest)

    monkeypatch.setattr(os, "open", failing)
    assert keys.find(secret) is not None
    assert keys.find(secret) is None


# ----- links, FIFOs and devices -----


def test_a_fifo_or_a_device_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    monkeypatch.setenv("GRADSERVE_STORE", "memory:")
    for path in (fifo, Path("/dev/zero"), Path("/dev/null"), tmp_path):
        monkeypatch.setenv("GRADSERVE_KEYS", str(path))
        for command in (("serve", "--port", "0"), ("keys", "add", "x"), ("keys", "ls")):
            status, out, complaint = called(*command)
            assert (status, out) == (2 if command[0] == "serve" else 1, "")
            assert "Not a regular file" in complaint
    assert [path.name for path in tmp_path.iterdir()] == ["fifo"]


def test_a_fifo_in_place_of_the_file_stops_no_server(file: Path) -> None:
    secret = {"Authorization": f"Bearer {add(file, 'eve', ['ops'])}"}
    with serving(keys=file) as url:
        assert httpx.get(f"{url}/v1/ops", headers=secret).status_code == 200
        file.unlink()
        os.mkfifo(file)
        for _ in range(2):
            assert httpx.get(f"{url}/v1/ops", headers=secret, timeout=10).status_code == 200


@pytest.mark.parametrize("suffix", ["lock", "new"])
def test_a_planted_link_leads_no_write_elsewhere(file: Path, suffix: str) -> None:
    victim = file.with_name("victim")
    victim.write_text("dear")
    planted = file.with_name(f"keys.json.{suffix}")
    planted.unlink(missing_ok=True)
    planted.symlink_to(victim)
    status, out, complaint = called("keys", "add", "eve", "--keys", str(file))
    assert victim.read_text() == "dear"
    assert (victim.stat().st_mode & 0o777) == 0o644
    if suffix == "lock":
        assert (status, out, str(planted) in complaint) == (1, "", True)
    else:  # a process that was killed leaves such a file, so that the next one removes it
        assert (status, [key.name for key in load(file)]) == (0, ["ann", "bob", "eve"])


def test_a_planted_fifo_is_no_lock(file: Path) -> None:
    lock = file.with_name("keys.json.lock")
    lock.unlink()
    os.mkfifo(lock)
    status, _, complaint = called("keys", "add", "eve", "--keys", str(file))
    assert (status, "Not a regular file" in complaint) == (1, True)


def test_the_files_beside_are_private(file: Path) -> None:
    assert {path.name: path.stat().st_mode & 0o777 for path in file.parent.iterdir()} == {
        "keys.json": 0o600,
        "keys.json.lock": 0o600,
    }


def test_a_full_disk_is_named_by_the_file(file: Path) -> None:
    """A limit of a file's size stands for the disk."""
    before, (soft, hard) = file.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(OSError, match="File too large") as raised:
            add(file, "cleo", ["ops"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert raised.value.filename == str(file)
    assert file.read_bytes() == before


def test_a_circle_of_links_is_reported(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    status, out, complaint = called("keys", "add", "x", "--keys", str(loop))
    assert (status, out, "Too many levels of symbolic links" in complaint) == (1, "", True)
