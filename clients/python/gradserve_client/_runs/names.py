"""The names of a run's buffers."""

from __future__ import annotations

import hashlib
import re

from gradserve_client._wire.arguments import as_name
from gradserve_client.errors import Conflict, GradserveError, InvalidInput, led, mistaken

MAX_PREFIX_CHARACTERS = 100
"""Characters of a prefix: the rest of a buffer's 200 is for the parameter."""

MAX_NAME_CHARACTERS = 180
"""Characters of a parameter's buffer: the server allows 200, and pieces and tallies add a few."""

_DIGEST_CHARACTERS = 32
"""Characters of the hash in a name that is too long: 128 bits never collide by chance."""


def checked_prefix(run: str, prefix: str | None) -> str:
    """Return what the names of a run's buffers begin with. Raises `InvalidInput` if no name can begin with it.

    By default it is the run and a dot. Dots in the run are quoted, so that no run's buffers begin as another's do.
    """
    if not (isinstance(run, str) and run):
        raise mistaken("run", f"is {run!r}, but must be a name")
    if not isinstance(prefix, str | None):
        raise mistaken("prefix", f"is {prefix!r}, but must be a string")
    if prefix is None:
        prefix = f"{quoted(run).replace('.', ':2E')}."
    as_name(f"{prefix}x")
    if len(prefix) > MAX_PREFIX_CHARACTERS:
        raise InvalidInput(
            f"The prefix {prefix!r} has {len(prefix)} characters, but at most {MAX_PREFIX_CHARACTERS} leave room for"
            " the parameters' names"
        )
    return prefix


def new_run(run: str) -> str:
    """Return the part of an error that says how to begin from nothing."""
    return f"give another run=, or delete this one, as with `gradserve-client runs delete {quoted(run)}`"


def first_new_run(run: str) -> str:
    """Return the same as the begin of a sentence."""
    return f"G{new_run(run)[1:]}"


def unjoined(error: Conflict, run: str) -> GradserveError:
    """Return the error of a join. It begins with `first_new_run` if another run would take the worker."""
    return led(error, first_new_run(run)) if error.code in ("run_exists", "run_ended") else error


def quoted(name: str) -> str:
    """Return a name with each byte that a buffer's name cannot have as `:` and two digits, as URLs do it with `%`.

    `urllib.parse.unquote(quoted.replace(":", "%"))` is the original.
    """
    return re.sub(
        r"[^A-Za-z0-9._-]",
        lambda found: "".join(f":{byte:02X}" for byte in found[0].encode(errors="surrogatepass")),
        name,
    )


def buffer_name(prefix: str, name: str) -> str:
    """Return the name of a parameter's buffer. A name that is too long ends with a hash."""
    whole = prefix + quoted(name)
    if len(whole) <= MAX_NAME_CHARACTERS:
        return whole
    digest = hashlib.sha256(whole.encode()).hexdigest()[:_DIGEST_CHARACTERS]
    return f"{whole[: MAX_NAME_CHARACTERS - len(digest) - 2]}::{digest}"
