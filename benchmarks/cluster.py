"""Adds over PostgreSQL, against PostgreSQL itself with the same bytes, and graphs: `python -m benchmarks.cluster`.

Three servers share a PostgreSQL of their own in a temporary directory (TMPDIR chooses the disk), first without a
standby, then with a synchronous standby, which the bare contenders wait for, too. Every add has an Idempotency-Key of
its own. Contenders run by turns in one run. At the end every sum is compared with the adds; the exit status is 1 if a
sum is wrong.
"""

from __future__ import annotations

import itertools
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psycopg
from onnx import helper
from onnx.numpy_helper import from_array

from benchmarks.buffers import RATE_SECONDS, Client, Table, check, file, numbers, wrk
from benchmarks.servers import Server, gradserve, serving
from benchmarks.timing import alternate, table, verdict, watched
from service.buffers.postgres.schema import ROW_BYTES
from service.dtypes import Array
from tests.postgres import Cluster, binaries, cluster

REPLICAS = 3

CONNECTIONS = 16

SMALL = 1 << 10
"""Elements of 4 KB of float32."""

MEDIUM = 1 << 20
"""Elements of 4 MB of float32."""

LARGE = 1 << 24
"""Elements of 64 MB of float32."""

SHARED = 1 << 22
"""Elements of 16 MB of float32, to which eight clients add."""

ADDERS = 8

RATE_TURNS = 5

POLLS = 40

PARKED_SECONDS = 0.1
"""Seconds until a long poll waits in its server."""

MORE_MS = 20.0
"""Milliseconds that a long poll on another replica may take more."""

SIZES = 784, 512, 10

SHAPES = {"w1": SIZES[:2], "b1": SIZES[1:2], "w2": SIZES[1:], "b2": SIZES[2:]}
"""The parameters of an MLP of these sizes."""

BATCH = 64

MICRO_BATCH = f"/v1/graphs/mlp?from=parameters:mlp.p.*&into=gradients:mlp.g.*&outputs=loss&weight={BATCH}"
"""The request for a micro-batch."""

WORKERS = 6
"""Connections that send micro-batches."""

TABLES = """
create table bare (data bytea not null);
alter table bare alter data set storage external;
create table rows (data bytea not null);
alter table rows alter data set storage external;
"""
"""The tables of the bare contenders, which are not compressed either."""


class Setting(NamedTuple):
    """What a case needs: replicas, their database, a directory, and the rows of the table."""

    servers: list[Server]
    database: psycopg.Connection[Any]
    url: str
    work: Path
    rows: Table


def copied(setting: Setting, size: int) -> Callable[[], None]:
    """Return a function that copies these bytes into a table of 64 KB rows, and commits."""
    row = b"\0\1" + ROW_BYTES.to_bytes(4, "big") + numbers(ROW_BYTES // 4).tobytes()
    piece = row * min(16, size // ROW_BYTES)
    connection = setting.database

    def copy() -> None:
        with connection.cursor().copy("copy bare from stdin (format binary)") as stream:
            stream.write(b"PGCOPY\n\xff\r\n\0" + bytes(8))
            for _ in range(size // ROW_BYTES * len(row) // len(piece)):
                stream.write(piece)
            stream.write(b"\xff\xff")

    return copy


def small_adds(setting: Setting) -> None:
    """Adds of 4 KB over sixteen connections, to one replica and to all, against inserts by pgbench."""
    client, g = Client(setting.servers[0]), numbers(SMALL)
    body, names = file(gradient=g), ["small", *(f"small.{place}" for place in range(REPLICAS))]
    for name, number in itertools.product(names[1:], range(CONNECTIONS)):
        client.create(f"{name}.{number}", SMALL)

    def rate(place: int, name: str, connections: int, server: Server | None = None) -> float:
        work = setting.work / f"wrk{place}"
        work.mkdir(exist_ok=True)
        path = f"/v1/buffers/{name}.%/accumulate"
        return wrk(server or setting.servers[place], work, path, body, keys=True, connections=connections)

    def spread(names: list[str]) -> float:
        shares = [len(range(place, CONNECTIONS, REPLICAS)) for place in range(REPLICAS)]
        with ThreadPoolExecutor(REPLICAS) as pool:
            return sum(pool.map(rate, range(REPLICAS), names, shares))

    turns = []
    with serving(gradserve(store=f"lmdb:{setting.work}/lmdb"), "/v2/health/ready") as other:
        for number in range(CONNECTIONS):
            Client(other).create(f"small.{number}", SMALL)
        for _ in range(RATE_TURNS):
            rates = rate(0, "small", CONNECTIONS), spread(names[1:]), spread(names[:1] * REPLICAS)
            turns.append((*rates, rate(0, "small", CONNECTIONS, other), inserts(setting, g)))
    alone, apart, same, lmdb, bare = (statistics.median(each) for each in zip(*turns, strict=True))
    client = Client(setting.servers[0])  # the server has closed the idle connection
    for name, number in itertools.product(names, range(CONNECTIONS)):
        check(client, f"{name}.{number}", g)
    case, against = f"adds/s of 4 KB, {CONNECTIONS} connections", "pgbench, inserts/s"
    setting.rows.add(f"{case}, one replica", against, alone, bare, ">=", 0.5)
    setting.rows.add(f"{case}, three replicas", against, apart, bare, ">=", 0.8)
    setting.rows.add(f"{case}, three replicas, the same buffers", against, same, bare, ">=", None)
    setting.rows.add(f"{case}, one server over LMDB", against, lmdb, bare, ">=", None)


def inserts(setting: Setting, g: Array) -> float:
    """Return the rows with the bytes of `g` that pgbench inserts in a second over sixteen connections."""
    (setting.work / "insert.sql").write_text("insert into rows (data) values (:data);\n")
    options = ["-n", "-M", "prepared", "-c", str(CONNECTIONS), "-j", "2", "-T", str(RATE_SECONDS)]
    script = ["-f", str(setting.work / "insert.sql"), "-D", f"data=\\x{g.tobytes().hex()}", setting.url]
    command = [str(binaries() / "pgbench"), *options, *script]
    answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    setting.database.execute("truncate rows")
    return float(answer.split("tps = ")[1].split()[0])


def large_adds(setting: Setting) -> None:
    """Adds of 4 MB and of 64 MB, against the bare COPY of their bytes."""
    for size, name in ((MEDIUM, "4 MB"), (LARGE, "64 MB")):
        client, g = Client(setting.servers[0]), numbers(size)
        client.create(f"large.{size}", size)
        body = file(gradient=g)
        times = against_copy(setting, 4 * size, partial(client.add, f"/v1/buffers/large.{size}/accumulate", body))
        check(client, f"large.{size}", g)
        setting.rows.add(f"add of {name}, ms", "COPY of its bytes", *times, "<=", 1.6)


def against_copy(setting: Setting, size: int, call: Callable[[], object]) -> tuple[float, float]:
    """Return the milliseconds of the call, and of the bare COPY of these bytes."""
    copy = copied(setting, size)
    times = alternate(
        {"ours": lambda: call() and None, "copy": copy},
        seconds=8.0,
        least=12,
        check=lambda name, _: setting.database.execute("truncate bare") if name == "copy" else None,
    )
    return times["ours"] * 1e3, times["copy"] * 1e3


def shared_buffer(setting: Setting) -> None:
    """Eight clients add 16 MB to one buffer over all replicas, for a step, against the bare COPY of all bytes."""
    clients, g = [Client(setting.servers[number % REPLICAS]) for number in range(ADDERS)], numbers(SHARED)
    create(clients[0], "shared", SHARED, ADDERS)
    body, steps, reads = file(gradient=g), itertools.count(), []
    with ThreadPoolExecutor(ADDERS) as pool:

        def step() -> int:
            list(pool.map(lambda client: client.add("/v1/buffers/shared/accumulate", body), clients))
            return next(steps)

        times = against_copy(setting, ADDERS * g.nbytes, step)
        for _ in range(RATE_TURNS):
            query = f"?step={step()}"
            start = time.perf_counter()
            value = clients[1].value("shared", query)
            reads.append(time.perf_counter() - start)
            if not np.array_equal(value, ADDERS * g):
                sys.exit("the sum of a step is wrong")
    setting.rows.add("eight adds of 16 MB to one buffer, a step, ms", "COPY of 128 MB", *times, "<=", 1.5)
    read = statistics.median(reads) * 1e3
    setting.rows.add("its first read after it has closed, ms", "COPY of 128 MB", read, times[1], "<=", None)


def beside_large(setting: Setting) -> None:
    """The time of an add of 4 KB to other buffers, alone, and while a client adds and reads 64 MB at two paces."""
    client, g, path = Client(setting.servers[0]), numbers(LARGE), "/v1/buffers/small.%/accumulate"
    body = file(gradient=numbers(SMALL))
    client.create("beside", LARGE)
    add = partial(client.add, "/v1/buffers/beside/accumulate", file(gradient=g))

    def rate(pause: float | None) -> float:
        stop = threading.Event()

        def work() -> None:
            while pause is not None and not stop.is_set():
                add()
                client.value("beside")
                stop.wait(pause)

        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(work)
            measured = wrk(setting.servers[0], setting.work, path, body, keys=True, connections=8)
            stop.set()
            done.result()
        return measured

    paces = {"none": None, "with a pause of 1 s": 1.0, "without a pause": 0.0}
    turns = [{name: rate(pause) for name, pause in paces.items()} for _ in range(RATE_TURNS)]
    calm = statistics.median(turn["none"] for turn in turns)
    for name in [*paces][1:]:
        busy = statistics.median(turn[name] for turn in turns)
        case = f"time per add of 4 KB by 8 while 64 MB are added and read, {name}, us"
        setting.rows.add(case, "the same alone", 1e6 / busy, 1e6 / calm, "<=", 1.5)
    check(client, "beside", g)


def long_polls(setting: Setting) -> None:
    """The time from the closing add to the answer of a long poll, on another replica and on the same."""
    closer, places = Client(setting.servers[0]), {"other": setting.servers[1], "same": setting.servers[0]}
    pollers = {name: Client(server) for name, server in places.items()}
    create(closer, "polled", SMALL, 1)
    body, steps, times = file(gradient=numbers(SMALL)), itertools.count(), {name: list[float]() for name in places}
    with ThreadPoolExecutor(1) as pool:
        for _ in range(POLLS):
            for name, poller in pollers.items():
                answer = pool.submit(answered, poller, f"?step={next(steps)}&timeout=30")
                time.sleep(PARKED_SECONDS)
                start = time.perf_counter()
                closer.add("/v1/buffers/polled/accumulate", body)
                times[name].append((answer.result() - start) * 1e3)
    other, same = (statistics.median(times[name]) for name in places)
    wanted = [f"<= +{MORE_MS:g}", verdict(other - same <= MORE_MS)]
    case = ["closing add to the long poll's answer on another replica, ms", "on the same replica"]
    setting.rows.rows.append([*case, f"{other:.4g}", f"{same:.4g}", f"{other - same:+.2f}", *wanted])


def micro_batches(setting: Setting) -> None:
    """Micro-batches of an MLP to all replicas, against those to one, over as many connections: gradients of one run."""
    chance = np.random.default_rng(0)
    model = mlp(chance)
    body = file(x=chance.standard_normal((BATCH, SIZES[0]), np.float32), labels=chance.integers(0, SIZES[-1], BATCH))
    with serving(gradserve(store=f"lmdb:{setting.work}/graphs"), "/v2/health/ready") as other:
        choices = setting.servers, setting.servers[:1], [other]
        first = [started(choice[0], model, body) for choice in choices[1:]]
        turns = [[micro_batch_rate(choice, setting.work, body) for choice in choices] for _ in range(RATE_TURNS)]
        for choice, gradients in zip(choices[1:], first, strict=True):
            check_gradients(Client(choice[0]), gradients)
    spread, alone, lmdb = (statistics.median(each) for each in zip(*turns, strict=True))
    case = f"micro-batches/s of an MLP {'-'.join(map(str, SIZES))}, batch {BATCH}"
    setting.rows.add(f"{case}, three replicas", "one replica", spread, alone, ">=", None)
    setting.rows.add(f"{case}, one server over LMDB", "one replica", lmdb, alone, ">=", None)


def started(server: Server, model: bytes, body: bytes) -> dict[str, Array]:
    """Start a run of the MLP. Return the gradients of a micro-batch."""
    client = Client(server)
    client.ask("PUT", "/v1/graphs/mlp?loss=SoftmaxCrossEntropyLoss&set=parameters:mlp.p.*", model)
    for name, shape in SHAPES.items():
        client.create(f"mlp.g.{name}", *shape)
    client.add(MICRO_BATCH, body)
    return {name: client.value(f"mlp.g.{name}", "?reduce=mean") for name in SHAPES}


def micro_batch_rate(servers: Sequence[Server], work: Path, body: bytes) -> float:
    """Return the micro-batches per second of all servers together."""
    places = [work / f"wrk{number}" for number in range(len(servers))]
    for place in places:
        place.mkdir(exist_ok=True)
    send = partial(wrk, path=MICRO_BATCH, body=body, keys=True, connections=WORKERS // len(servers))
    with ThreadPoolExecutor(len(servers)) as pool:
        return sum(pool.map(send, servers, places))


def check_gradients(client: Client, gradients: dict[str, Array]) -> None:
    """Exit unless the mean gradients of the run are these."""
    for name, gradient in gradients.items():
        if not np.allclose(client.value(f"mlp.g.{name}", "?reduce=mean"), gradient, rtol=1e-3, atol=1e-6):
            sys.exit(f"the sum in mlp.g.{name} is wrong")


def mlp(chance: np.random.Generator) -> bytes:
    """Return the model of an MLP in ONNX."""
    weights = [from_array(chance.normal(0, 0.02, shape).astype(np.float32), name) for name, shape in SHAPES.items()]
    nodes = [("Gemm", "x", "w1", "b1", "h"), ("Relu", "h", "a"), ("Gemm", "a", "w2", "b2", "scores")]
    x, scores = (
        helper.make_tensor_value_info(name, 1, [None, size])
        for name, size in zip(("x", "scores"), SIZES[::2], strict=True)
    )
    made = [helper.make_node(op, given, [output]) for op, *given, output in nodes]
    graph = helper.make_graph(made, "mlp", [x], [scores], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return bytes(model.SerializeToString())


def answered(poller: Client, query: str) -> float:
    """Return when the long poll has its answer."""
    poller.value("polled", query)
    return time.perf_counter()


def create(client: Client, name: str, size: int, quorum: int) -> None:
    """Create a buffer whose steps close by themselves."""
    body = json.dumps({"shape": [size], "quorum": quorum}).encode()
    client.ask("PUT", f"/v1/buffers/{name}", body, {"Content-Type": "application/json"})


CASES = (small_adds, large_adds, shared_buffer, beside_large, long_polls, micro_batches)


@contextmanager
def settings(*, standby: bool) -> Iterator[Setting]:
    """Yield three replicas over a new database, with a synchronous standby or without."""
    with ExitStack() as stack:
        primary = stack.enter_context(cluster())
        if standby:
            follower = Cluster(primary.directory.parent / "standby")
            follower.follow(primary)
            stack.callback(follower.stop)
        start = gradserve(store=primary.url, durability="replicated" if standby else "local")
        servers = [stack.enter_context(serving(start, "/v2/health/ready")) for _ in range(REPLICAS)]
        database = stack.enter_context(psycopg.connect(primary.url, autocommit=True))
        database.execute(TABLES)
        work = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for number in range(CONNECTIONS):
            Client(servers[0]).create(f"small.{number}", SMALL)
        yield Setting(servers, database, primary.url, work, Table())


def main() -> None:
    """Print the tables. Cases whose names are given as arguments run alone."""
    if shutil.which("wrk") is None:
        sys.exit("This needs wrk; on Debian: apt-get install wrk")
    cases = [case for case in CASES if not sys.argv[1:] or case.__name__ in sys.argv[1:]]
    print("Adds over PostgreSQL, float32, medians by turns\n", flush=True)
    with watched():
        for standby in (False, True):
            with settings(standby=standby) as setting:
                for case in cases:
                    case(setting)
            title = "With a synchronous standby" if standby else "Without a standby"
            header = ["case", "against", "ours", "theirs", "ratio", "target", "met"]
            print(f"\n{title}\n\n{table(header, setting.rows.rows)}\n", flush=True)


if __name__ == "__main__":
    main()
