"""Ask in a process of its own: some questions end the process, and some are never answered."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TypeVar

Answer = TypeVar("Answer")

SECONDS = 30
"""How long an answer may take."""


class Refused(Exception):
    """The other implementation gave no answer. The text says why not."""


def ask(question: Callable[[], Answer], seconds: float = SECONDS) -> Answer:
    """Return what `question` returns, or raise what it raises. Raise `Refused` if the process ends or is too slow."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=_send, args=(sender, question))
    child.start()
    sender.close()
    try:
        if not receiver.poll(seconds):
            raise Refused("The process does not answer.")
        answer: Answer
        answer, error = receiver.recv()
    except EOFError:
        raise Refused("The process ends.") from None
    finally:
        child.kill()
        child.join()
    if error is not None:
        raise error
    return answer


def _send(sender: Connection, question: Callable[[], object]) -> None:
    try:
        sender.send((question(), None))
    except Exception as error:
        sender.send((None, error))
