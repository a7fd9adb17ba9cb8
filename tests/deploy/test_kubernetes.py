"""The manifests fit the schemas of Kubernetes, each other, and the service."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from service.api.http.call import ALONE_TENSORS
from service.settings import VARIABLES, Settings

FOLDER = Path(__file__).parents[2] / "deploy/kubernetes"
KUSTOMIZATION = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
MANIFESTS: dict[str, dict[str, Any]] = {
    path.stem: yaml.safe_load(path.read_text())
    for path in sorted(FOLDER.glob("*.yaml"))
    if path.stem != "kustomization"
}
DEPLOYMENT = MANIFESTS["deployment"]["spec"]
POD = DEPLOYMENT["template"]["spec"]
(CONTAINER,) = POD["containers"]
SETTINGS = {one["name"]: one for one in CONTAINER["env"]}


@pytest.mark.parametrize("version", ["1.30", "1.37"])
@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_fits_the_schema(name: str, version: str) -> None:
    kubernetes_validate.validate(MANIFESTS[name], version, strict=True)
    wrong = copy.deepcopy(MANIFESTS[name])
    wrong["spec"]["misspelt"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, version, strict=True)


def test_the_kustomization_has_every_manifest_and_secret() -> None:
    assert sorted(KUSTOMIZATION["resources"]) == [f"{name}.yaml" for name in MANIFESTS]
    (generated,) = KUSTOMIZATION["secretGenerator"]
    keys = {Path(file).name for file in generated["files"]}
    store = SETTINGS["GRADSERVE_STORE"]["valueFrom"]["secretKeyRef"]
    (mounted,) = (volume["secret"] for volume in POD["volumes"] if "secret" in volume)
    assert {store["name"], mounted["secretName"]} == {generated["name"]}
    assert {store["key"], *(item["key"] for item in mounted["items"])} == keys
    assert KUSTOMIZATION["images"][0]["name"] == CONTAINER["image"]


def test_all_select_the_pods_of_the_deployment() -> None:
    labels = DEPLOYMENT["template"]["metadata"]["labels"]
    assert DEPLOYMENT["selector"]["matchLabels"] == labels
    assert MANIFESTS["service"]["spec"]["selector"] == labels
    assert MANIFESTS["poddisruptionbudget"]["spec"]["selector"]["matchLabels"] == labels
    assert MANIFESTS["poddisruptionbudget"]["spec"]["maxUnavailable"] < DEPLOYMENT["replicas"] == 3


def test_the_settings_and_limits_fit_the_service() -> None:
    assert SETTINGS.keys() <= VARIABLES
    values = {name[10:].lower(): one["value"] for name, one in SETTINGS.items() if "value" in one}
    settings = Settings(**values)
    (pause,) = re.findall(r"\d+", CONTAINER["lifecycle"]["preStop"]["exec"]["command"][1])
    assert int(pause) + settings.drain_timeout < POD["terminationGracePeriodSeconds"]
    (mount,) = (one["mountPath"] for one in CONTAINER["volumeMounts"] if one["name"] == "keys")
    assert str(settings.keys) == f"{mount}/keys"
    counted = max(settings.max_bytes_in_flight, ALONE_TENSORS * settings.max_tensor_bytes)
    process = (180 + 50 + 500 * settings.threads) * 10**6
    total = counted + settings.max_bytes_in_flight + settings.reuse_bytes + process
    assert total < int(CONTAINER["resources"]["limits"]["memory"].removesuffix("Mi")) << 20 < 1.2 * total


def test_the_container_has_no_rights() -> None:
    assert (POD["securityContext"]["runAsNonRoot"], POD["automountServiceAccountToken"]) == (True, False)
    assert CONTAINER["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
