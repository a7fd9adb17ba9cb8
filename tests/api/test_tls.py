"""HTTPS, with small and large bodies."""

from __future__ import annotations

import ssl
from pathlib import Path

import httpx
import numpy as np
import pytest
import safetensors.numpy

from tests.serving import serving


def test_tensors_travel_by_https(certificate: tuple[Path, Path]) -> None:
    made, key = certificate
    with serving(tls_certificate=made, tls_key=key) as url:
        url = url.replace("http://", "https://")
        with httpx.Client(base_url=url, verify=ssl.create_default_context(cafile=str(made)), timeout=30) as client:
            for size in (10, 1_000_000, 5_000_000):
                dY = np.arange(size, dtype=np.float32)
                body = safetensors.numpy.save({"dY": dY, "X": np.ones_like(dY)})
                headers = {"Content-Type": "application/vnd.safetensors"}
                answer = client.post("/v1/ops/ReluGrad", content=body, headers=headers)
                assert (safetensors.numpy.load(answer.content)["dX"] == dY).all()
            assert client.get("/v2/health/ready").json() == {"ready": True}
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(url)
