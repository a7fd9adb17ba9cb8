"""The alerts and the dashboard use metrics that the service has."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from service.api.telemetry.metrics import FAMILIES, GAUGES, PHASES, ROUTES, STATUSES

DEPLOY = Path(__file__).parents[2] / "deploy"
ALERTS = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"][0]["rules"]
PANELS = json.loads((DEPLOY / "grafana.json").read_text())["panels"]
EXPRESSIONS = [rule["expr"] for rule in ALERTS] + [target["expr"] for panel in PANELS for target in panel["targets"]]

SERIES = set(GAUGES)
LABELS: dict[str, set[str]] = {name: set() for name in GAUGES}
for family in FAMILIES:
    endings = {"counter": ["_total"], "gauge": [""], "histogram": ["_bucket", "_sum", "_count"]}[family.kind]
    for ending in endings:
        SERIES.add(family.name + ending)
        LABELS[family.name + ending] = {*family.labels, *(["le"] if ending == "_bucket" else [])}


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_every_expression_uses_metrics_of_the_service(expression: str) -> None:
    named = re.findall(r"gradserve_\w+", expression)
    assert named
    assert set(named) <= SERIES
    labels = {label for grouped in re.findall(r"by \(([^)]*)\)", expression) for label in grouped.split(", ")}
    labels |= set(re.findall(r"[{,](\w+)=", expression))
    assert labels <= set().union(*(LABELS[name] for name in named))
    for pattern in re.findall(r'status=~?"([^"]*)"', expression):
        assert any(re.fullmatch(pattern, str(status)) for status in STATUSES)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not here; make test-compose has it")
def test_prometheus_accepts_the_alerts() -> None:
    done = subprocess.run(["promtool", "check", "rules", DEPLOY / "alerts.yml"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"{len(ALERTS)} rules found" in done.stdout


def test_the_dashboard_shows_every_metric() -> None:
    seen = {name for expression in EXPRESSIONS for name in re.findall(r"gradserve_\w+", expression)}
    for name in [*GAUGES, *(family.name for family in FAMILIES)]:
        assert any(one.startswith(name) for one in seen), name
    assert all({"alert", "expr", "for", "labels", "annotations"} == rule.keys() for rule in ALERTS)


def test_the_documentation_explains_the_labels() -> None:
    text = (DEPLOY.parent / "docs" / "operations.md").read_text()
    assert all(f"`{phase}`" in text for phase in PHASES)
    assert len(ROUTES) * len(STATUSES) < 500
