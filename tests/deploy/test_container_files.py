"""Limits, errors and timeouts in the files of the containers agree with each other and with the service."""

from __future__ import annotations

import re

import yaml

from service.api.buffers.models import MAX_WAIT_SECONDS
from service.api.http.call import ALONE_TENSORS
from service.errors import tree
from service.settings import Settings
from tests.integration.stack import COMMANDS, CONTAINERS, ROOT

NGINX = (ROOT / "deploy/nginx.conf").read_text()
COMPOSE = (ROOT / "compose.yaml").read_text()


def number(pattern: str, text: str) -> int:
    found = re.findall(pattern, text)
    assert found, pattern
    return min(map(int, found))


def test_nginx_and_service_have_the_same_body_limit() -> None:
    allowed = number(r'GRADSERVE_MAX_BODY_BYTES: "(\d+)"', COMPOSE)
    assert number(r"client_max_body_size (\d+)m;", NGINX) << 20 == allowed == Settings().max_body_bytes


def test_the_memory_limit_follows_from_the_settings() -> None:
    """The sum is that of the section Memory in docs/operations.md."""
    settings = Settings(threads=4)
    assert "GRADSERVE_MAX_TENSOR_BYTES" not in COMPOSE
    counted = max(settings.max_bytes_in_flight, ALONE_TENSORS * settings.max_tensor_bytes)
    process = (180 + 500 * settings.threads) * 10**6
    kept = settings.reuse_bytes + settings.graph_cache_bytes
    total = counted + settings.max_bytes_in_flight + kept + process
    assert total < number(r"mem_limit: (\d+)m", COMPOSE) << 20 < 1.2 * total


def test_nginx_uses_codes_and_titles_of_the_service() -> None:
    errors = {error.code: error for error in tree()}
    codes, titles, details = (by_status(name) for name in ("code", "title", "detail"))
    assert codes.keys() == titles.keys()
    handled = re.findall(r"\d+", re.findall(r"error_page (.*) /", NGINX)[0])
    assert re.findall(r"error_page (\d.*) =400 /", NGINX) == ["497 501 505"]
    assert re.findall(r"error_page (\d.*) =431 /", NGINX) == ["414 494"]
    assert set(handled) >= codes.keys() - {"default"}
    for status in handled:
        code = codes.get(status, codes["default"])
        assert titles.get(status, titles["default"]) == errors[code].title()
        assert errors[code].status == (503 if status in ("502", "504") else int(status))
        assert details.get(status, details["default"])
    assert f" {Settings().max_body_bytes} bytes" in details["413"]


def by_status(name: str) -> dict[str, str]:
    """Return a map of nginx.conf from an answer's status."""
    (found,) = re.findall(rf"map \$status \${name} {{\n(.*?\n)    }}", NGINX, re.DOTALL)
    return dict(re.findall(r'(\w+) "?(.*?)"?;\n', found))


def test_docker_finds_the_service_by_name() -> None:
    """Fixed addresses are for podman alone: deploy/containers/podman.yaml."""
    service = (ROOT / "deploy/service.conf").read_text()
    assert re.search(r"^resolver 127\.0\.0\.11 valid=5s", service, re.MULTILINE)
    assert re.search(r"^server gradserve:8000 resolve ", service, re.MULTILINE)
    assert not re.search(r"\d+\.\d+\.\d+\.\d+", NGINX + COMPOSE.replace("127.0.0.1", ""))
    assert not re.search(r"mac_address|ipv4_address|extra_hosts|ipam", COMPOSE)


def test_the_socket_is_in_a_directory_that_the_image_has() -> None:
    added = yaml.safe_load((ROOT / "deploy/compose.socket.yaml").read_text())
    service, image = added["services"]["gradserve"], (ROOT / "Dockerfile").read_text()
    ((volume, place),) = (one.split(":") for one in service["volumes"])
    assert list(added["volumes"]) == [volume]
    assert f"--chown=10001:10001 /data {place}\n" in image
    path = service["environment"]["GRADSERVE_SOCKET"]
    assert path.startswith(f"{place}/")
    assert f"`unix:{path}`" in (ROOT / "docs/operations.md").read_text()


def test_no_image_gets_the_settings_of_pip() -> None:
    for file in ("Dockerfile", "tests/integration/containers/prepare"):
        assert "pip.conf" not in (ROOT / file).read_text()


def test_each_timeout_exceeds_the_wait_behind_it() -> None:
    assert number(r"proxy_read_timeout (\d+)s;", NGINX) > MAX_WAIT_SECONDS
    assert number(r"stop_grace_period: (\d+)s", COMPOSE) > number(r'GRADSERVE_DRAIN_TIMEOUT: "(\d+)"', COMPOSE)
    assert number(r"\n    +keepalive_timeout (\d+)s;", NGINX) < Settings().keep_alive


def test_stand_ins_have_names_of_their_own() -> None:
    """No image of this machine passes for a public one."""
    stand_ins = yaml.safe_load((CONTAINERS / "stand_ins.yaml").read_text())["services"]
    named = {name: one.get("image") or one["build"]["args"]["BASE"] for name, one in stand_ins.items()}
    assert named.keys() == yaml.safe_load(COMPOSE)["services"].keys() - {"grafana"}
    assert all(image.startswith("localhost/gradserve-test/") for image in named.values())


def test_the_table_of_commands_has_what_an_operator_does() -> None:
    """tests/integration/test_commands.py runs each of them."""
    assert list(COMMANDS) == ["back", "restore,", "look", "upgrade,", "rotate", "serve", "share", "collect", "see"]
    assert all(COMMANDS.values())
