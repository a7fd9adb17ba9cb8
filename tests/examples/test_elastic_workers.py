"""The example whose workers come, go and lag behind, run as a user runs it."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from tests.examples.running import run, shared

RANKS = range(6)
STEPS = 24


def steps(printed: str, name: str) -> list[tuple[set[int], str]]:
    """Return the ranks that were in each step of a run, and what closed it."""
    _, section = re.split(rf"^{name} .*\n", printed, maxsplit=1, flags=re.MULTILINE)
    found = []
    for line in section.partition("\n\n")[0].splitlines():
        _, first, _, last, *marks, closed_by, _, _ = line.split()
        ranks = {rank for rank, mark in zip(RANKS, marks, strict=True) if mark == "x"}
        found += [(ranks, closed_by)] * (int(last) - int(first) + 1)
    return found


def test_training_goes_on_without_the_workers_that_are_away(tmp_path: Path) -> None:
    image = tmp_path / "loss.png"
    with shared("0.weight") as url:
        done = run("elastic_workers", "--steps", str(STEPS), "--deadline", "0.2", "--plot", str(image), "--url", url)
        assert done.returncode == 0, done.stderr

    undisturbed, disturbed = steps(done.stdout, "undisturbed"), steps(done.stdout, "disturbed")
    assert len(undisturbed) == len(disturbed) == STEPS
    for ranks, closed_by in [*undisturbed, *disturbed]:
        assert closed_by == "quorum" if ranks == set(RANKS) else closed_by in ("deadline", "members")
    assert undisturbed[0] == disturbed[0] == (set(RANKS), "quorum")
    away = [step for step, (ranks, _) in enumerate(disturbed) if 5 not in ranks]
    assert away  # it is killed,
    assert any(5 in ranks for ranks, _ in disturbed[away[0] :])  # and comes back
    assert any(closed_by == "members" for _, closed_by in disturbed)
    assert any(3 in ranks and 2 not in ranks for ranks, _ in disturbed)  # it is slow
    assert {3, 4}.isdisjoint(disturbed[-1][0])  # they are killed
    assert disturbed[-1][0]

    losses = [[float(one) for one in re.findall(r"\d\.\d{3}", line)] for line in re.findall(r"step.*#.*", done.stdout)]
    assert min(losses[0]) > 2
    assert max(losses[-1]) < 1.1
    if importlib.util.find_spec("matplotlib"):
        assert image.read_bytes().startswith(b"\x89PNG")
    else:
        assert f"{image} is not written: pip install matplotlib" in done.stdout


def test_too_few_steps_are_refused() -> None:
    done = run("elastic_workers", "--steps", "19")
    assert done.returncode == 2
    assert "--steps is 19, but must be from 20 to 1000" in done.stderr
