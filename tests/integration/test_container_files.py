"""What the files of the containers say twice, they say alike, and as the service has it."""

from __future__ import annotations

import re

from service.api.buffer_models import LONGEST_WAIT
from service.settings import Settings
from tests.integration.stack import ROOT

NGINX = (ROOT / "deploy/nginx.conf").read_text()
COMPOSE = (ROOT / "compose.yaml").read_text()


def number(pattern: str, text: str) -> int:
    found = re.findall(pattern, text)
    assert found, pattern
    return min(map(int, found))


def test_the_largest_body_is_the_same_everywhere() -> None:
    allowed = number(r'GRADSERVE_MAX_BODY_BYTES: "(\d+)"', COMPOSE)
    assert number(r"client_max_body_size (\d+)m;", NGINX) << 20 == allowed == Settings().max_body_bytes


def test_whoever_waits_waits_long_enough() -> None:
    assert number(r"proxy_read_timeout (\d+)s;", NGINX) > LONGEST_WAIT
    assert number(r"stop_grace_period: (\d+)s", COMPOSE) > number(r'GRADSERVE_DRAIN_TIMEOUT: "(\d+)"', COMPOSE)
    assert number(r"\n    +keepalive_timeout (\d+)s;", NGINX) < Settings().keep_alive
