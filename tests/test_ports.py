"""Ports that tests reserve: no other socket gets them, and any server may listen there, again and again."""

from __future__ import annotations

import socket
from contextlib import ExitStack

from tests.buffers.stores import waiting
from tests.ports import free_port

RESERVING = """
from tests import ports

ports.PORTS = range(29_900, 30_000)
found = [ports.free_port() for _ in range(30)]
print("ready", flush=True)
input()
print(*found)
"""


def test_nothing_else_gets_a_reserved_port() -> None:
    reserved, found = {free_port() for _ in range(200)}, set[int]()
    with ExitStack() as stack:
        elsewhere = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=400))
        for number in range(800):
            one = stack.enter_context(socket.socket())
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, number % 2)
            one.bind(("127.0.0.1", 0)) if number % 4 else one.connect(elsewhere.getsockname())
            found.add(one.getsockname()[1])
        assert (len(reserved), reserved & found) == (200, set())
    for _ in range(2):
        with socket.socket() as server:  # of a program that does not set SO_REUSEADDR
            server.bind(("127.0.0.1", min(reserved)))
            server.listen()


def test_no_two_processes_get_the_same_port() -> None:
    both = [waiting(RESERVING) for _ in range(2)]
    found = [port for process in both for port in process.communicate("\n")[0].split()]
    assert len(found) == len({*found}) == 60
