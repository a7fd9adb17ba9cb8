"""`deploy/up`, run with stand-ins for the engine of containers and for curl: what it prints, and when."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]

ENGINE = """#!/bin/sh
echo "$*" >>"$CALLS"
case "$*" in
"compose version" | "compose --profile cluster version") exit "${VERSION:-0}" ;;
"compose pull nginx" | "compose --profile cluster pull nginx-cluster postgres-1") exit "${PULL:-0}" ;;
"compose build gradserve --pull" | "compose --profile cluster build gradserve --pull") ;;
run*) echo gs_secret && echo "This is the key's secret." >&2 ;;
"compose up --detach --force-recreate") exit "${UP:-0}" ;;
"compose --profile cluster up --detach --force-recreate nginx-cluster") ;;
"compose logs") echo "the log" ;;
*) echo "unexpected: $*" >&2 && exit 9 ;;
esac
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return a folder with the scripts, and stand-ins for all that they call."""
    (tmp_path / "deploy/containers").mkdir(parents=True)
    (tmp_path / "deploy/secrets").mkdir()
    (tmp_path / "bin").mkdir()
    for script in ("up", "keys"):
        shutil.copy(ROOT / "deploy" / script, tmp_path / "deploy")
    for place, text in {"deploy/containers/engine": ENGINE, "bin/curl": "#!/bin/sh\n"}.items():
        (tmp_path / place).write_text(text)
        (tmp_path / place).chmod(0o755)
    return tmp_path


def run(project: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PATH": f"{project}/bin:{os.environ['PATH']}",
        "CALLS": str(project / "calls"),
        **variables,
    }
    command = [str(project / "deploy/up"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def up(project: Path, **variables: str) -> tuple[int, list[str]]:
    done = run(project, **variables)
    assert "unexpected" not in done.stderr
    return done.returncode, done.stdout.splitlines()


def test_the_first_key_is_the_last_line(project: Path) -> None:
    status, lines = up(project)
    assert status == 0
    assert lines[0] == "gradserve is ready at http://127.0.0.1:8080. The next steps:"
    assert lines[-2:] == ["The first API key. It is kept nowhere, so keep it:", "gs_secret"]


def test_the_first_key_is_not_lost_if_the_start_fails(project: Path) -> None:
    status, lines = up(project, UP="1")
    assert status == 1
    assert lines == ["the log", "The first API key. It is kept nowhere, so keep it:", "gs_secret"]


def test_no_key_is_made_if_there_is_one(project: Path) -> None:
    (project / "deploy/secrets/gradserve_keys").write_text("[]")
    status, lines = up(project)
    assert status == 0
    assert not [line for line in lines if "gs_secret" in line]


def test_public_images_are_pulled_and_what_has_their_names_is_never_used(project: Path) -> None:
    status, _ = up(project)
    assert status == 0
    calls = (project / "calls").read_text().splitlines()
    assert calls[:3] == ["compose version", "compose pull nginx", "compose build gradserve --pull"]


@pytest.mark.parametrize("variable", ["VERSION", "PULL"])
@pytest.mark.parametrize("profile", [(), ("cluster",)], ids=["one", "cluster"])
def test_nothing_is_left_behind_if_containers_cannot_run(
    project: Path, profile: tuple[str, ...], variable: str
) -> None:
    before = sorted(project.rglob("*"))
    done = run(project, *profile, **{variable: "1"})
    assert (done.returncode, done.stdout) == (1, "")
    assert sorted(project.rglob("*")) == sorted([*before, project / "calls"])


def test_no_other_user_reads_the_secrets_or_holds_their_lock(project: Path) -> None:
    secrets = project / "deploy/secrets"
    (secrets / "gradserve_keys.lock").touch(0o644)
    assert up(project)[0] == 0
    assert [stat.S_IMODE(path.stat().st_mode) for path in (secrets, secrets / "gradserve_keys.lock")] == [0o700, 0o600]


def test_the_password_of_the_database_lies_where_no_other_user_enters(project: Path) -> None:
    for place in ("deploy/secrets", "mine/deep", "private"):
        file = project / place / "gradserve_postgres"
        if place == "private":
            file.parent.mkdir(mode=0o700)
        done = run(project, "cluster", **({} if place == "deploy/secrets" else {"GRADSERVE_POSTGRES_FILE": str(file)}))
        assert (done.returncode, "unexpected" in done.stderr) == (0, False), done.stderr
        assert "password=" in file.read_text()
        assert (stat.S_IMODE(file.parent.stat().st_mode), stat.S_IMODE(file.stat().st_mode)) == (0o700, 0o644)


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o711, 0o1777])
def test_no_password_is_written_where_others_may_enter(project: Path, mode: int) -> None:
    place = project / "open"
    place.mkdir()
    place.chmod(mode)
    done = run(project, "cluster", GRADSERVE_POSTGRES_FILE=str(place / "gradserve_postgres"))
    assert (done.returncode, done.stdout) == (1, "")
    assert f"others may enter {place}," in done.stderr
    assert not [*place.iterdir()]
    assert " up " not in (project / "calls").read_text()


def only(project: Path, programs: dict[str, str]) -> None:
    """Leave no other programs than these and those of the true engine."""
    shutil.copy(ROOT / "deploy/containers/engine", project / "deploy/containers")
    for name, text in programs.items():
        (project / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (project / "bin" / name).chmod(0o755)
    for name in ("bash", "dirname", "env", "sh"):
        (project / "bin" / name).symlink_to(shutil.which(name) or "")


MISSING = "containers cannot run here: no Docker engine answers"


@pytest.mark.parametrize(
    ("programs", "sentence"),
    [
        ({}, f"{MISSING}; install Docker with its compose plugin, or podman with podman-compose"),
        ({"docker": "exit 1"}, f"{MISSING}; install Docker with its compose plugin, or podman with podman-compose"),
        ({"podman": ""}, f"{MISSING}, and podman needs podman-compose: pipx install podman-compose"),
        (
            {"docker": '[ "$1" = info ]'},
            "containers cannot run here: docker has no compose; on Debian: apt-get install docker-compose-plugin",
        ),
    ],
    ids=["nothing", "docker without an engine", "podman alone", "docker without compose"],
)
def test_the_engine_says_what_is_missing(project: Path, programs: dict[str, str], sentence: str) -> None:
    only(project, programs)
    done = run(project, PATH=f"{project}/bin")
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"{sentence}\n")


def test_podman_builds_on_no_image_that_it_cannot_pull(project: Path) -> None:
    only(project, {"podman": "", "podman-compose": 'echo "$*"'})
    command = [str(project / "deploy/containers/engine"), "compose", "build", "gradserve", "--pull"]
    environment = {"PATH": f"{project}/bin"}
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60).stdout
    assert printed == f"-f compose.yaml -f {project}/deploy/containers/podman.yaml build gradserve --pull-always\n"


SEVERAL = """
case "$1" in
info | compose) [ "$1" = info ] || [ "$2" = version ] || echo "$*" ;;
ps) [ "$*" != "ps --quiet --filter label=com.docker.compose.project=gradserve" ] || echo id ;;
inspect) echo "$OWNER" ;;
esac
exit 0
"""
"""An engine with a container of the project `gradserve`, of the checkout in OWNER."""


@pytest.mark.parametrize("engine", ["docker", "podman"])
def test_two_checkouts_share_no_containers(project: Path, engine: str) -> None:
    only(project, {engine: SEVERAL, "podman-compose": 'echo "$*"'})
    other, command = project / "other", [str(project / "deploy/containers/engine"), "compose", "down"]
    other.mkdir()

    def down(owner: Path, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": f"{project}/bin", "OWNER": str(owner), **variables}
        return subprocess.run(command, env=environment, capture_output=True, text=True, cwd=project, timeout=60)

    refused = down(other)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert f"those of the project gradserve belong to {other}; export a COMPOSE_PROJECT_NAME" in refused.stderr
    (project / "link").symlink_to(project)
    own = [down(owner) for owner in (project, project / "link", project / "gone")]
    for done in [*own, down(other, COMPOSE_PROJECT_NAME="mine")]:
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.endswith("down\n")


def test_a_checkout_with_a_name_of_its_own_has_an_image_of_its_own() -> None:
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    assert services["gradserve"]["image"] == "${COMPOSE_PROJECT_NAME:-gradserve}"
    assert '"${COMPOSE_PROJECT_NAME:-gradserve}" keys' in (ROOT / "deploy/keys").read_text()
