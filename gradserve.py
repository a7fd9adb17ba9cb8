"""The start of the `gradserve` command, which says so if another package named `service` hides ours."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

_FIRST_WORD = '"""gradserve:'
"""How our package's source begins. An installer may have put another's over it."""


def main() -> int | str:
    """Run the command, and return its exit status, or a sentence for stderr if the package is not ours."""
    spec = find_spec("service")
    ours = Path(__file__).resolve().with_name("service") / "__init__.py"
    found = Path(spec.origin).resolve() if spec is not None and spec.origin is not None else None
    if found != ours or not ours.read_text(encoding="utf-8").startswith(_FIRST_WORD):
        return (
            f"gradserve: another package named service, at {found}, hides that of gradserve."
            " Install gradserve by itself, with pipx or uvx, or run its container"
        )
    from service import __main__ as command

    return command.main()


if __name__ == "__main__":
    sys.exit(main())
