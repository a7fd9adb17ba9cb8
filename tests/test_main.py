"""The command: its output, the faults that it reports, and the server as a process."""

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


def test_settings_hides_the_password_of_the_database(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADSERVE_STORE", "postgresql://ann:s3cret@db/g")
    assert main(["settings"]) == 0
    assert "GRADSERVE_STORE=postgresql://ann:***@db/g\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PORT", "80000"),
        ("PORT", "http"),
        ("THREADS", "0"),
        ("WORKERS", "257"),
        ("MAX_BODY_BYTES", "1XB"),
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
    message = capsys.readouterr().err
    assert f"GRADSERVE_{name} is '{value}', but must be " in message
    assert "valid" not in message
    assert message.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "size"),
    [("1GB", 10**9), ("64MiB", 64 << 20), ("512k", 512 << 10), ("2t", 2 << 40), ("3Kb", 3000), ("7", 7)],
)
def test_a_size_has_units(text: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADSERVE_MAX_BODY_BYTES", text)
    monkeypatch.setenv("GRADSERVE_REUSE_BYTES", text)
    settings = Settings()
    assert settings.max_body_bytes == settings.reuse_bytes == size


def test_an_option_overrides_the_environment(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADSERVE_PORT", "8000")
    assert main(["serve", "--port", "nonsense"]) == 2
    assert "GRADSERVE_PORT is 'nonsense'" in capsys.readouterr().err


@pytest.mark.parametrize("host", ["300.1.1.1", "127.0.0.1:8000", "[::1]", "no such name", "a" * 70])
def test_an_invalid_host_is_named(host: str, capsys: pytest.CaptureFixture[str]) -> None:
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
    message = capsys.readouterr().err
    assert f"127.0.0.1, port {port} (GRADSERVE_HOST, GRADSERVE_PORT): Address already in use" in message
    assert message.count("\n") == 1
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(("name", "meant"), [("KEY", "KEYS"), ("PRT", "PORT"), ("LOGLEVEL", "LOG_LEVEL")])
def test_a_misspelt_setting_is_named(
    name: str, meant: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Not settings, but compose.yaml and the clients read them.
    for other in ("GRADSERVE_TLS_CERTIFICATE_FILE", "GRADSERVE_API_KEY", "GRADSERVE_LISTEN"):
        monkeypatch.setenv(other, "x")
    assert main(["ops"]) == 0
    monkeypatch.setenv(f"GRADSERVE_{name}", "x")
    assert main(["ops"]) == 2
    assert f"GRADSERVE_{name} is not a setting. Did you mean GRADSERVE_{meant}?" in capsys.readouterr().err


def test_variables_without_effect_are_named(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with Server(tmp_path / "store", fork=False, log=log, log_level="INFO", api_keys="x", tls_cert="x", url="x"):
        pass
    assert "without effect: GRADSERVE_API_KEYS, GRADSERVE_TLS_CERT\n" in log.read_text()


def test_a_closed_stdout_causes_no_error() -> None:
    process = subprocess.run(["sh", "-c", '"$0" -m service ops >&-', sys.executable], capture_output=True, text=True)
    assert (process.returncode, process.stderr) == (0, "")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_listening_beyond_loopback_needs_keys(host: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--host", host]) == 2
    assert "GRADSERVE_ALLOW_ANONYMOUS" in capsys.readouterr().err


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("case", ["missing", "no PEM", "encrypted"])
def test_an_unusable_certificate_is_named(
    case: str, workers: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
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
    message = capsys.readouterr().err
    for word in ("GRADSERVE_TLS_CERTIFICATE", str(certificate), "GRADSERVE_TLS_KEY", str(key)):
        assert word in message


def test_a_closed_pipe_ends_the_command_quietly() -> None:
    listing = subprocess.Popen([sys.executable, "-m", "service", "ops"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert listing.stdout is not None
    listing.stdout.close()
    assert listing.wait(30) == 1
    assert listing.stderr is not None
    assert listing.stderr.read() == b""
    listing.stderr.close()


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["serve", "--nonsense"]])
def test_a_wrong_command_line_exits_with_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert "usage: gradserve" in capsys.readouterr().err


@pytest.mark.parametrize(("host", "workers"), [("127.0.0.1", 1), ("0.0.0.0", 1), ("127.0.0.1", 2)])
def test_the_server_serves_and_ends_on_sigterm(host: str, workers: int, tmp_path: Path) -> None:
    settings = {
        "ALLOW_ANONYMOUS": "true",
        "HOST": host,
        "PORT": "0",
        "WORKERS": str(workers),
        "STORE": f"lmdb:{tmp_path}",
    }
    environment = {**os.environ, **{f"GRADSERVE_{name}": value for name, value in settings.items()}}
    server = subprocess.Popen(
        [sys.executable, "-m", "service", "serve"], env=environment, stderr=subprocess.PIPE, text=True
    )
    try:
        assert server.stderr is not None
        log = ""
        while " at http://" not in log:
            line = server.stderr.readline()
            assert line, f"the server does not start:\n{log}"
            log += line
        port = log.split(" at http://")[1].split(",")[0].rsplit(":", 1)[1]
        # A worker process logs this a moment before it listens.
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


RAISING_IN_AN_IMPORT = """
import signal, sys
from service.__main__ import main

class Finder:
    def find_spec(self, name, *_):
        if name == "service.commands.cli":
            try:
                signal.raise_signal(signal.Signals[sys.argv[1]])
            except BaseException:
                pass

sys.meta_path.insert(0, Finder())
sys.exit(main(["ops"]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_not_lost_during_an_import(number: signal.Signals) -> None:
    """Python swallows an exception in some places, so the command ends without raising."""
    process = subprocess.run(
        [sys.executable, "-c", RAISING_IN_AN_IMPORT, number.name], capture_output=True, text=True, timeout=60
    )
    assert (process.returncode, process.stdout, process.stderr) == (128 + number, "", "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_the_command_during_its_imports(number: signal.Signals) -> None:
    """In a container the command is the first process, for which the kernel ignores unhandled signals."""
    command = [sys.executable, "-X", "importtime", "-m", "service", "serve"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        assert any("asyncio" in line for line in server.stderr)  # one of the first slow imports
        server.send_signal(number)
        rest = server.stderr.read()
    assert server.returncode == 128 + number
    assert "Traceback" not in rest
    assert " at http://" not in rest
