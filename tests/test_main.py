"""The command: what it prints, refuses, and how the server that it starts behaves as a process."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from service.__main__ import main
from service.kernels import OPERATORS
from service.settings import Settings
from tests.faults.servers import Server


def test_ops_lists_every_operator(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ops"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(OPERATORS)


def test_settings_lists_every_setting(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADSERVE_PORT", "1234")
    assert main(["settings"]) == 0
    printed = capsys.readouterr().out
    assert "GRADSERVE_PORT=1234\n" in printed
    for name, field in Settings.model_fields.items():
        assert f"GRADSERVE_{name.upper()}=" in printed
        assert field.description
        assert field.description in printed


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PORT", "80000"),
        ("PORT", "http"),
        ("THREADS", "0"),
        ("WORKERS", "257"),
        ("MAX_BODY_BYTES", "1 GB"),
        ("STORE_BYTES", "9" * 21),
        ("IDEMPOTENCY_SECONDS", "inf"),
        ("REQUEST_TIMEOUT", "nan"),
    ],
)
def test_a_bad_setting_is_named(
    name: str, value: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"GRADSERVE_{name}", value)
    assert main(["serve"]) == 2
    complaint = capsys.readouterr().err
    assert f"GRADSERVE_{name} is '{value}': " in complaint
    assert complaint.count("\n") == 1


def test_an_option_comes_before_the_environment(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADSERVE_PORT", "8000")
    assert main(["serve", "--port", "nonsense"]) == 2
    assert "GRADSERVE_PORT is 'nonsense'" in capsys.readouterr().err


@pytest.mark.parametrize("host", ["300.1.1.1", "127.0.0.1:8000", "[::1]", "no such name", "a" * 70])
def test_what_is_no_address_is_named(host: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--host", host]) == 2
    assert f"GRADSERVE_HOST is '{host}', but must be an IP address or a host name" in capsys.readouterr().err


@pytest.mark.parametrize("workers", [1, 2])
def test_a_port_in_use_is_named(
    workers: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADSERVE_WORKERS", str(workers))
    monkeypatch.setenv("GRADSERVE_STORE", f"lmdb:{tmp_path}/store")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--port", str(port)]) == 1
    complaint = capsys.readouterr().err
    assert f"127.0.0.1, port {port} (GRADSERVE_HOST, GRADSERVE_PORT): Address already in use" in complaint
    assert complaint.count("\n") == 1
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(("name", "meant"), [("KEY", "KEYS"), ("PRT", "PORT"), ("LOGLEVEL", "LOG_LEVEL")])
def test_a_setting_that_there_is_not_is_named(
    name: str, meant: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for other in ("GRADSERVE_TLS_CERTIFICATE_FILE", "GRADSERVE_API_KEY", "GRADSERVE_LISTEN"):  # which others read
        monkeypatch.setenv(other, "x")
    assert main(["ops"]) == 0
    monkeypatch.setenv(f"GRADSERVE_{name}", "x")
    assert main(["ops"]) == 2
    assert f"GRADSERVE_{name} is not a setting. Did you mean GRADSERVE_{meant}?" in capsys.readouterr().err


def test_variables_that_do_nothing_are_named(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with Server(tmp_path / "store", log=log, log_level="INFO", api_keys="x", tls_cert="x", url="x"):
        pass
    assert "without effect: GRADSERVE_API_KEYS, GRADSERVE_TLS_CERT\n" in log.read_text()


def test_no_output_is_no_mistake() -> None:
    done = subprocess.run(["sh", "-c", '"$0" -m service ops >&-', sys.executable], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_beyond_loopback_is_refused(host: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--host", host]) == 2
    assert "GRADSERVE_ALLOW_ANONYMOUS" in capsys.readouterr().err


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("case", ["missing", "no PEM", "encrypted"])
def test_a_certificate_that_cannot_be_used_is_named(
    case: str,
    workers: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    if case == "no PEM":
        certificate.write_text("nonsense")
        key.write_text("nonsense")
    if case == "encrypted":
        command = f"openssl req -x509 -newkey rsa:2048 -keyout {key} -out {certificate} -passout pass:word -subj /CN=x"
        subprocess.run(command.split(), check=True, capture_output=True)
    monkeypatch.setenv("GRADSERVE_WORKERS", str(workers))
    monkeypatch.setenv("GRADSERVE_TLS_CERTIFICATE", str(certificate))
    monkeypatch.setenv("GRADSERVE_TLS_KEY", str(key))
    assert main(["serve"]) == 2
    complaint = capsys.readouterr().err
    for word in ("GRADSERVE_TLS_CERTIFICATE", str(certificate), "GRADSERVE_TLS_KEY", str(key)):
        assert word in complaint


def test_who_reads_no_further_is_not_complained_of() -> None:
    listing = subprocess.Popen([sys.executable, "-m", "service", "ops"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert listing.stdout is not None
    listing.stdout.close()
    assert listing.wait(30) == 1
    assert listing.stderr is not None
    assert listing.stderr.read() == b""
    listing.stderr.close()


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["serve", "--nonsense"]])
def test_usage_errors(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert "usage: gradserve" in capsys.readouterr().err


@pytest.mark.parametrize(("host", "workers"), [("127.0.0.1", 1), ("0.0.0.0", 1), ("127.0.0.1", 2)])
def test_the_server_serves_and_ends_when_told(host: str, workers: int, tmp_path: Path) -> None:
    given = {"ALLOW_ANONYMOUS": "true", "HOST": host, "PORT": "0", "WORKERS": str(workers), "STORE": f"lmdb:{tmp_path}"}
    environment = {**os.environ, **{f"GRADSERVE_{name}": value for name, value in given.items()}}
    server = subprocess.Popen(
        [sys.executable, "-m", "service", "serve"], env=environment, stderr=subprocess.PIPE, text=True
    )
    try:
        assert server.stderr is not None
        said = ""
        while not ("running on" in said and "startup complete" in said):
            said += server.stderr.readline()
        port = said.split("running on http://")[1].split()[0].rsplit(":", 1)[1]
        # A worker process says so a moment before it listens.
        with httpx.Client(transport=httpx.HTTPTransport(retries=5)) as client:
            answer = client.post(f"http://127.0.0.1:{port}/v1/ops/ReluGrad", json={"dY": [1, 2], "X": [1, -1]})
        assert answer.json()["dX"]["data"] == [1.0, 0.0]
        server.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 30
        while server.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert server.returncode == 0
        assert "Traceback" not in server.stderr.read()
    finally:
        server.kill()
        server.wait()
        assert server.stderr is not None
        server.stderr.close()


LOSING = """
import signal, sys
from service.__main__ import main

class Finder:
    def find_spec(self, name, *_):
        if name == "service.cli":
            try:
                signal.raise_signal(signal.Signals[sys.argv[1]])
            except BaseException:
                pass

sys.meta_path.insert(0, Finder())
sys.exit(main(["ops"]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_not_lost_in_an_import(number: signal.Signals) -> None:
    """There are places in which Python drops an exception."""
    done = subprocess.run([sys.executable, "-c", LOSING, number.name], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (128 + number, "", "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_can_be_stopped_while_it_is_imported(number: signal.Signals) -> None:
    """Also as the first process of a container, where what nobody handles is ignored."""
    command = [sys.executable, "-X", "importtime", "-m", "service", "serve"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        assert any("asyncio" in line for line in server.stderr)  # among the first of what takes long
        server.send_signal(number)
        rest = server.stderr.read()
    assert server.returncode == 128 + number
    assert "Traceback" not in rest
    assert "Uvicorn running" not in rest
