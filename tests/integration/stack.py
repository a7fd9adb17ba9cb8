"""The containers of compose.yaml as a separate project beside the containers of `make up`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[2]
ENGINE = ROOT / "deploy/containers/engine"
CONTAINERS = ROOT / "tests/integration/containers"
HOME = Path(os.environ.get("GRADSERVE_CONTAINERS", Path.home() / ".cache/gradserve-containers"))
"""What CONTAINERS/prepare keeps."""
PROJECT = "gradserve-test"
NETWORK = "10.203.78"
"""The network of these containers on podman, beside that of `make up`."""
CLUSTER_NETWORK = "10.203.80"
"""The same for the containers of the profile `cluster`."""

_, _, _AFTER = (ROOT / "docs/operations.md").read_text().partition("with `deploy/containers/engine` in place of")
_ROWS = re.findall(r"^\| ([^|]+) \| (`.*) \|$", _AFTER.partition("\n\n-")[0], re.MULTILINE)
COMMANDS = {to.split()[0]: re.findall(r"`([^`]+)`", cell) for to, cell in _ROWS}
"""The commands in the table of docs/operations.md, by the first word of what they are for."""


class Stack:
    """The service and nginx, on a port of 127.0.0.1."""

    services: tuple[str, ...] = ("gradserve", "nginx")

    def __init__(self, port: int, key_file: Path, project: str = PROJECT, network: str = NETWORK) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.secret, self._project = "", project
        self._environment = {
            **os.environ,
            "PATH": f"{CONTAINERS}:{os.environ['PATH']}",  # of podman-compose
            "COMPOSE_PROJECT_NAME": project,
            "GRADSERVE_LISTEN": f"127.0.0.1:{port}",
            "GRADSERVE_KEY_FILE": str(key_file),
            "GRADSERVE_NETWORK": network,
        }
        if (HOME / "containers.conf").exists():
            self._environment["CONTAINERS_CONF"] = str(HOME / "containers.conf")

    def engine(self, *arguments: str, status: int = 0, seconds: float = 120) -> str:
        """Run docker or podman, check the exit status, and return the output."""
        return self._run(str(ENGINE), *arguments, status=status, seconds=seconds)

    def shell(self, line: str, folder: Path, **variables: str) -> str:
        """Run a line of docs/operations.md with this engine, and `folder` for its files. Return its output."""
        line = line.replace("docker ", f"{ENGINE} ").replace("deploy/secrets/", f"{folder}/")
        line = line.replace("backup.safetensors", f"{folder}/backup.safetensors")
        return self._run("bash", "-euc", line, seconds=600, variables=variables)

    def can_pull(self, image: str) -> bool:
        """Return whether this machine has the image, or can pull it."""
        command = (str(ENGINE), "pull", "--quiet", image)
        return subprocess.run(command, env=self._environment, capture_output=True, timeout=600).returncode == 0

    def keys(self, *arguments: str) -> str:
        """Run deploy/keys and return its output."""
        return self._run(str(ROOT / "deploy/keys"), *arguments).strip()

    def build(self) -> None:
        """Build the image."""
        self.engine("compose", "build", "gradserve", seconds=600)

    def up(self) -> None:
        """Start both containers and wait until the service answers."""
        self.engine("compose", "up", "--detach")
        self.wait()

    def up_with(self, changes: Path) -> None:
        """Restart both containers with the changes of this compose file."""
        self.engine("compose", "down")
        self.engine("compose", "-f", "compose.yaml", "-f", str(changes), "up", "--detach")

    def serve_https(self, port: int, certificate: Path, key: Path) -> None:
        """Restart both containers with HTTPS on this port, too, and a new certificate."""
        subject = ("-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1")
        files = ("-keyout", str(key), "-out", str(certificate))
        self._run("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject, *files)
        key.chmod(0o644)
        self._environment |= {
            "GRADSERVE_LISTEN_TLS": f"127.0.0.1:{port}",
            "GRADSERVE_TLS_CERTIFICATE_FILE": str(certificate),
            "GRADSERVE_TLS_KEY_FILE": str(key),
        }
        self.up_with(ROOT / "deploy/compose.tls.yaml")
        self.wait()

    def watch(self, port: int, key_file: Path) -> None:
        """Start Prometheus beside both containers on this port, with a new API key."""
        key_file.write_text(self.keys("add", "prometheus", "--scopes", "admin"))
        key_file.chmod(0o644)
        self._environment |= {
            "GRADSERVE_LISTEN_PROMETHEUS": f"127.0.0.1:{port}",
            "GRADSERVE_METRICS_KEY_FILE": str(key_file),
        }
        self.engine("compose", "--profile", "metrics", "up", "--detach", "prometheus")

    def wait(self) -> None:
        """Wait until the service answers through nginx."""
        end = time.monotonic() + 60
        while time.monotonic() < end:
            try:
                if httpx.get(f"{self.url}/v2/health/ready", timeout=5, trust_env=False).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        logs = "\n".join(map(self.logs, self.services))
        raise AssertionError(f"it does not get ready:\n{logs}")

    def container(self, service: str) -> str:
        """Return the id of the service's container."""
        labels = (f"com.docker.compose.project={self._project}", f"com.docker.compose.service={service}")
        filters = [f"--filter=label={label}" for label in labels]
        (found,) = self.engine("ps", "--all", "--quiet", *filters).split()
        return found

    def exec(self, service: str, *command: str, status: int = 0) -> str:
        """Run a command in the service's container and return its output."""
        return self.engine("exec", self.container(service), *command, status=status)

    def inspect(self, service: str, what: str) -> Any:
        """Return a field of the engine's description of the service's container, such as State.ExitCode."""
        return json.loads(self.engine("inspect", "--format", f"{{{{json .{what}}}}}", self.container(service)))

    def health(self, service: str = "gradserve") -> int:
        """Run the health check in the service's container and return its exit status."""
        kind, *command = self.inspect(service, "Config.Healthcheck.Test")
        assert kind == "CMD"
        run = [str(ENGINE), "exec", self.container(service), *command]
        return subprocess.run(run, env=self._environment, capture_output=True, timeout=30).returncode

    def logs(self, service: str) -> str:
        """Return the log of the service's container."""
        return self.engine("logs", self.container(service))

    def down(self) -> None:
        """Remove the containers and their data."""
        self.engine("compose", "down", "--volumes")

    def _run(
        self, *command: str, status: int = 0, seconds: float = 120, variables: Mapping[str, str] | None = None
    ) -> str:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**self._environment, **(variables or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
        )
        assert done.returncode == status, f"{command} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
        return done.stdout + (done.stderr if "logs" in command else "")


class Cluster(Stack):
    """Three replicas behind nginx, over two PostgreSQL servers: the profile `cluster`."""

    services = ("gradserve-1", "postgres-1", "postgres-2", "nginx-cluster")

    def __init__(self, port: int, folder: Path) -> None:
        super().__init__(port, folder / "gradserve_keys", f"{PROJECT}-cluster", CLUSTER_NETWORK)
        self._environment |= {
            "GRADSERVE_LISTEN_CLUSTER": f"127.0.0.1:{port}",
            "GRADSERVE_POSTGRES_FILE": str(folder / "gradserve_postgres"),
        }

    def up(self) -> None:
        """Start the cluster as `make up-cluster` does."""
        self._run(str(ROOT / "deploy/up"), "cluster", seconds=600)

    def down(self) -> None:
        self.engine("compose", "--profile", "cluster", "down", "--volumes")

    def kill(self, service: str) -> None:
        self.engine("kill", "--signal", "KILL", self.container(service))

    def start(self, service: str) -> None:
        self.engine("start", self.container(service))

    def sql(self, service: str, query: str) -> str:
        """Return the answer of a PostgreSQL server; an error of the query fails."""
        command = ("psql", "--host", "/tmp", "--username", "postgres", "--tuples-only", "--no-align", "--command")
        return self.exec(service, *command, query).strip()
