"""The alerts and the dashboard use metrics that a server exports, and Grafana finds both files and Prometheus."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from service.api.telemetry.metrics import FAMILIES, GAUGES, PHASES, ROUTES, STATUSES
from service.api.telemetry.processes import INFORMATION
from tests.documentation import PROCESSES
from tests.serving import serving

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
ALERTS = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"][0]["rules"]
PANELS = json.loads((DEPLOY / "grafana.json").read_text())["panels"]
TARGETS = [target for panel in PANELS for target in panel["targets"]]
EXPRESSIONS = [rule["expr"] for rule in ALERTS] + [target["expr"] for target in TARGETS]
SERIES = r"(?:gradserve|process)_\w+"


@pytest.fixture(scope="module")
def exported() -> dict[str, set[str]]:
    """The labels of every series of a server, by name. Those of a database or a disk have none."""
    with serving() as url:
        httpx.post(f"{url}/v1/ops/ReluGrad", json={"dY": [1], "X": [1]}).raise_for_status()
        httpx.get(f"{url}/nothing")
        text = httpx.get(f"{url}/metrics").text
    found: dict[str, set[str]] = defaultdict(set)
    found.update({name: set() for name in GAUGES if re.search("_(database|disk)_", name)})
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] |= sample.labels.keys()
    return dict(found)


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_every_expression_uses_metrics_of_the_service(exported: dict[str, set[str]], expression: str) -> None:
    named = re.findall(SERIES, expression)
    assert named
    assert set(named) <= exported.keys()
    labels = {label for grouped in re.findall(r"by \(([^)]*)\)", expression) for label in grouped.split(", ")}
    labels |= set(re.findall(r"[{,](\w+)=", expression))
    assert labels <= set().union(*(exported[name] for name in named))
    for pattern in re.findall(r'status=~?"([^"]*)"', expression):
        assert any(re.fullmatch(pattern, str(status)) for status in STATUSES)


def test_every_legend_names_labels_that_its_expression_keeps(exported: dict[str, set[str]]) -> None:
    for target in TARGETS:
        used = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
        (grouped,) = re.findall(r"by \(([^)]*)\)", target["expr"]) or [None]
        kept = (
            exported[re.findall(SERIES, target["expr"])[0]] | {"instance"} if grouped is None else grouped.split(", ")
        )
        assert used <= set(kept), target
        assert target["legendFormat"]


def test_grafana_gets_the_dashboard_and_the_prometheus_of_compose() -> None:
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    grafana = services["grafana"]
    mounts = dict(reversed(volume.removesuffix(":ro").split(":")) for volume in grafana["volumes"])
    (provider,) = yaml.safe_load(_mounted(mounts, "/etc/grafana/provisioning/dashboards/"))["providers"]
    (home,) = [place for place in mounts if place.startswith(provider["options"]["path"] + "/")]
    assert ROOT / mounts[home] == DEPLOY / "grafana.json"
    assert grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == home
    (source,) = yaml.safe_load(_mounted(mounts, "/etc/grafana/provisioning/datasources/"))["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert services["prometheus"]["ports"][0].endswith(":9090")
    assert services["prometheus"]["profiles"] == grafana["profiles"] == ["metrics"]
    scraping = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["global"]
    assert source["jsonData"]["timeInterval"] == scraping["scrape_interval"]
    (variable,) = json.loads((DEPLOY / "grafana.json").read_text())["templating"]["list"]
    assert (variable["type"], variable["query"]) == ("datasource", source["type"])
    assert {panel["datasource"]["uid"] for panel in PANELS} == {f"${{{variable['name']}}}"}


def _mounted(mounts: dict[str, str], folder: str) -> str:
    """Return the text of the only file that is mounted into the folder."""
    (path,) = [path for place, path in mounts.items() if place.startswith(folder)]
    return (ROOT / path).read_text()


def test_panels_have_their_own_places_and_numbers() -> None:
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in PANELS}
    assert (
        len(places)
        == len({panel["id"] for panel in PANELS})
        == len({panel["title"] for panel in PANELS})
        == len(PANELS)
    )


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not here; make test-compose has it")
def test_prometheus_accepts_the_alerts() -> None:
    done = subprocess.run(["promtool", "check", "rules", DEPLOY / "alerts.yml"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"{len(ALERTS)} rules found" in done.stdout


def test_the_dashboard_shows_every_metric() -> None:
    seen = {name for expression in EXPRESSIONS for name in re.findall(SERIES, expression)}
    apart = {"process_virtual_memory_bytes", "process_start_time_seconds", "python_info"}
    for name in {*GAUGES, *(family.name for family in FAMILIES), *PROCESSES, *INFORMATION} - apart:
        assert any(one.startswith(name) for one in seen), name
    assert all({"alert", "expr", "for", "labels", "annotations"} == rule.keys() for rule in ALERTS)


def test_the_documentation_explains_the_labels() -> None:
    text = (DEPLOY.parent / "docs" / "operations.md").read_text()
    assert all(f"`{phase}`" in text for phase in PHASES)
    assert len(ROUTES) * len(STATUSES) < 500
