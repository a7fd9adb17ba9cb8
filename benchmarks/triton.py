"""NVIDIA's real Triton Inference Server with ReluGrad as a Python model: the race is against its C++ front end.

The server comes from the wheel of nvidia-pytriton, unpacked once into `PEERS_HOME` (~/.cache/gradserve-peers). The
model runs in the system's python3 with Debian's NumPy, because the server's Python back end links against this python3.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

HOME = Path(os.environ.get("PEERS_HOME", Path.home() / ".cache" / "gradserve-peers")) / "triton"
WHEEL = "nvidia-pytriton==0.7.0"
SYSTEM_PYTHON = "/usr/bin/python3"

_CONFIG = """\
name: "ReluGrad"
backend: "python"
max_batch_size: 0
input [{name: "dY" data_type: TYPE_FP32 dims: [-1]}, {name: "X" data_type: TYPE_FP32 dims: [-1]}]
output [{name: "dX" data_type: TYPE_FP32 dims: [-1]}]
instance_group [{count: 1 kind: KIND_CPU}]
"""

_MODEL = """\
import numpy as np
import triton_python_backend_utils as triton


class TritonPythonModel:
    def execute(self, requests):
        return [self._relu_grad(request) for request in requests]

    def _relu_grad(self, request):
        dY, X = (triton.get_input_tensor_by_name(request, name).as_numpy() for name in ("dY", "X"))
        return triton.InferenceResponse(output_tensors=[triton.Tensor("dX", np.multiply(dY, X > 0))])
"""


def command(port: int) -> tuple[list[str], dict[str, str]]:
    """Return the command that starts the server on `port` of the loopback interface, and its environment."""
    if not (HOME / "tritonserver").exists():
        _install()
    arguments = [
        str(HOME / "tritonserver"),
        f"--model-repository={HOME / 'models'}",
        f"--backend-directory={HOME / 'backends'}",
        "--http-address=127.0.0.1",
        f"--http-port={port}",
        "--allow-grpc=false",
        "--allow-metrics=false",
    ]
    return arguments, {"LD_LIBRARY_PATH": str(HOME / "libs"), "PATH": "/usr/bin:/bin"}


def _install() -> None:
    check = subprocess.run([SYSTEM_PYTHON, "-c", "import numpy"], check=False, capture_output=True)
    if check.returncode:
        sys.exit(f"Triton's model needs NumPy in {SYSTEM_PYTHON}; on Debian: apt-get install python3-numpy")
    unpacked = HOME.parent / "triton-wheel"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", f"--target={unpacked}", WHEEL], check=True
    )
    parts = HOME.with_name("triton-parts")
    shutil.rmtree(parts, ignore_errors=True)
    server, backend, model = unpacked / "pytriton" / "tritonserver", parts / "backends" / "python", parts / "models"
    backend.mkdir(parents=True)
    (model / "ReluGrad" / "1").mkdir(parents=True)
    shutil.copy(server / "bin" / "tritonserver", parts)
    shutil.copytree(unpacked / "nvidia_pytriton.libs", parts / "libs")
    for one in (server / "backends" / "python").iterdir():
        if one.suffix in (".so", ".py"):
            shutil.copy(one, backend)
    version = sysconfig.get_python_version()
    shutil.copy(server / "python_backend_stubs" / version / "triton_python_backend_stub", backend)
    for program in (parts / "tritonserver", backend / "triton_python_backend_stub"):
        program.chmod(0o755)
    (model / "ReluGrad" / "config.pbtxt").write_text(_CONFIG)
    (model / "ReluGrad" / "1" / "model.py").write_text(_MODEL)
    parts.rename(HOME)
