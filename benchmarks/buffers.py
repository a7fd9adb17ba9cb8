"""Durable adds, over HTTP and in the store alone, against stateless requests and Redis: `python -m benchmarks.buffers`.

The server keeps its buffers in LMDB, in a temporary directory (TMPDIR chooses the disk), and every add has an
Idempotency-Key of its own. Redis 7 writes its log to the same disk and syncs it before it answers (`appendfsync
always`). Contenders run by turns in one run. At the end every sum is compared with the adds; the exit status is 1 if a
sum is wrong.
"""

from __future__ import annotations

import http.client
import itertools
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.servers import Server, gradserve, serving
from benchmarks.timing import alternate, table, verdict, watched
from service.buffers.changes import Add, Create
from service.buffers.lmdb.store import LmdbStore
from service.buffers.perform import Request
from service.buffers.record import Key, Spec
from service.codecs import safetensors
from service.dtypes import FLOAT32, Array

SMALL = 1 << 10
"""Elements of 4 KB of float32."""

LARGE = 1 << 20
"""Elements of 4 MB of float32."""

CONNECTIONS = 16
RATE_SECONDS = 3
RATE_TURNS = 5
THREADS = 16
ROWS = 8192
TABLE = (30000, 256)
MANY = 200
KEYED = 1000
"""Buffers of a request whose key is weighed."""
VALUE = 16 << 20
SIZES = [1 << 18, 1 << 22, 1 << 25, 1 << 27]
"""Elements of 1, 16, 128 and 512 MB of float32."""

SAFETENSORS = {"Content-Type": safetensors.MEDIA_TYPE}
_keys = itertools.count()


def numbers(*shape: int) -> Array:
    """Return integers, whose float32 sums are exact in any order."""
    return np.random.default_rng(0).integers(-8, 8, shape).astype(np.float32)


def file(**tensors: Array) -> bytes:
    """Return a safetensors file."""
    return b"".join(safetensors.encode(tensors))


class Client:
    """A connection to the server."""

    def __init__(self, server: Server) -> None:
        self._connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=600)

    def ask(self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None) -> bytes:
        """Send a request without a key and return the answer's body."""
        self._connection.request(method, path, body, headers or {})
        response = self._connection.getresponse()
        answer = response.read()
        if response.status not in (200, 201):
            sys.exit(f"{method} {path} answers {response.status}: {answer[:300]!r}")
        return answer

    def create(self, name: str, *shape: int) -> None:
        """Create a buffer."""
        self.ask(
            "PUT", f"/v1/buffers/{name}", json.dumps({"shape": shape}).encode(), {"Content-Type": "application/json"}
        )

    def add(self, path: str, body: bytes) -> dict[str, Any]:
        """Send an add with a new key and return its receipts."""
        head = {**SAFETENSORS, "Accept": "application/json", "Idempotency-Key": f"bench-{next(_keys)}"}
        receipts: dict[str, Any] = json.loads(self.ask("POST", path, body, head))
        return receipts

    def value(self, name: str, query: str = "") -> Array:
        """Return a buffer's value."""
        body = self.ask("GET", f"/v1/buffers/{name}/value{query}", headers={"Accept": safetensors.MEDIA_TYPE})
        length = int.from_bytes(body[:8], "little")
        return np.frombuffer(body, np.float32, offset=8 + length)

    def count(self, name: str) -> int:
        """Return the number of adds in a buffer."""
        number: int = json.loads(self.ask("GET", f"/v1/buffers/{name}"))["count"]
        return number


class Table:
    """Rows of a case, two figures, their ratio, and whether the ratio meets its target."""

    def __init__(self) -> None:
        self.rows: list[list[str]] = []

    def add(self, case: str, against: str, ours: float, theirs: float, sense: str, target: float | None) -> None:
        """Add a row, and print it in short."""
        ratio = ours / theirs
        wanted = ["-", "-"]
        if target is not None:
            wanted = [f"{sense} {target:g}", verdict(ratio <= target if sense == "<=" else ratio >= target)]
        self.rows.append([case, against, f"{ours:.4g}", f"{theirs:.4g}", f"{ratio:.2f}", *wanted])
        print(f"  {case}: {ratio:.2f}", flush=True)


def check(client: Client, name: str, gradient: Array) -> None:
    """Exit unless the buffer holds `gradient` as many times as it counts."""
    if not np.array_equal(client.value(name), gradient.reshape(-1) * np.float32(client.count(name))):
        sys.exit(f"the sum in {name} is wrong")


def large_add(rows: Table, server: Server) -> None:
    """A durable add of 4 MB against ReluGrad of twice that, answered."""
    client, g = Client(server), numbers(LARGE)
    client.create("large", LARGE)
    add, relu = file(gradient=g), file(dY=g, X=g)
    times = alternate(
        {
            "add": lambda: client.add("/v1/buffers/large/accumulate", add) and b"",
            "relu": lambda: client.ask("POST", "/v1/ops/ReluGrad", relu, SAFETENSORS),
        },
        seconds=6.0,
        calls=10,
    )
    check(client, "large", g)
    rows.add("add of 4 MB, ms", "ReluGrad, 8 MB in, 4 MB out", times["add"] * 1e3, times["relu"] * 1e3, "<=", 1.2)


def nothing(rows: Table, server: Server) -> None:
    """A scalar 0 for 64 MB, as a worker without data sends it, against a scalar 0 for 4 KB."""
    client, g, body = Client(server), numbers(VALUE), file(gradient=np.zeros((), np.float32))
    client.create("nothing", VALUE)
    client.create("nothing.small", SMALL)
    client.add("/v1/buffers/nothing/accumulate", file(gradient=g))
    times = alternate(
        {
            "large": lambda: client.add("/v1/buffers/nothing/accumulate", body),
            "small": lambda: client.add("/v1/buffers/nothing.small/accumulate", body),
        },
        seconds=4.0,
        calls=10,
    )
    if not np.array_equal(client.value("nothing"), g):
        sys.exit("an add of nothing has changed the sum")
    rows.add("add of nothing to 64 MB, ms", "to 4 KB", times["large"] * 1e3, times["small"] * 1e3, "<=", 1.2)


def wrk(server: Server, work: Path, path: str, body: bytes, *, keys: bool, connections: int = CONNECTIONS) -> float:
    """Return wrk's requests per second over `connections`. With `keys`, each request has a new key."""
    (work / "body").write_bytes(body)
    key = f'wrk.headers["Idempotency-Key"] = "{next(_keys)}-" .. count' if keys else ""
    (work / "post.lua").write_text(
        f"""wrk.method = "POST"
wrk.body = io.open("{work}/body", "rb"):read("*a")
wrk.headers["Content-Type"] = "{safetensors.MEDIA_TYPE}"
wrk.headers["Accept"] = "{"application/json" if keys else safetensors.MEDIA_TYPE}"
count = 0
request = function()
  count = count + 1
  {key}
  return wrk.format(nil, (string.gsub("{path}", "%%", count % {CONNECTIONS})))
end
"""
    )
    command = ["wrk", "-t1", f"-c{connections}", f"-d{RATE_SECONDS}s", "-s", f"{work}/post.lua", server.url]
    answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    if "Non-2xx" in answer:
        sys.exit(f"wrk met errors:\n{answer}")
    return float(answer.split("Requests/sec:")[1].split()[0])


@contextmanager
def redis(work: Path) -> Iterator[Callable[[], float]]:
    """Yield a function that measures pushes of 4 KB per second to a Redis that syncs before it answers."""
    port = 16379
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--dir", str(work), "--save", ""]
    process = subprocess.Popen([*command, "--appendonly", "yes", "--appendfsync", "always"], stdout=subprocess.DEVNULL)

    def rate() -> float:
        asked = ["redis-benchmark", "-p", str(port), "-c", str(CONNECTIONS), "-d", str(4 * SMALL), "-t", "rpush"]
        answer = subprocess.run([*asked, "-n", "40000", "--csv"], check=True, capture_output=True, text=True).stdout
        return float(answer.strip().splitlines()[-1].split(",")[1].strip('"'))

    try:
        for _ in range(100):
            if subprocess.run(["redis-cli", "-p", str(port), "ping"], capture_output=True).stdout.strip() == b"PONG":
                break
            time.sleep(0.1)
        else:
            sys.exit("Redis does not start")
        yield rate
    finally:
        process.terminate()
        process.wait()


def store_rate(store: LmdbStore, g: Array, *, keys: bool, adds: int = 300) -> tuple[float, float]:
    """Return adds per second and adds per commit of sixteen threads in this process, each with its own buffer."""

    def work(number: int) -> None:
        for _ in range(adds):
            key = Key("", f"{next(_keys)}", bytes(16)) if keys else None
            store.submit(Request([Add(name=f"b{number}", gradient=g)], key)).result()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
    before, start = store.generation(), time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds, commits = time.perf_counter() - start, store.generation() - before
    return THREADS * adds / seconds, THREADS * adds / commits


def small_adds(rows: Table, server: Server, work: Path) -> None:
    """Durable adds of 4 KB over sixteen connections, against Redis and against stateless requests."""
    client, g = Client(server), numbers(SMALL)
    for number in range(CONNECTIONS):
        client.create(f"small.{number}", SMALL)
    body, relu = file(gradient=g), file(dY=g, X=g)
    store = LmdbStore(work / "store", max_bytes=1 << 34)
    for number in range(THREADS):
        store.submit(Request([Create(name=f"b{number}", spec=Spec((SMALL,), FLOAT32))])).result()
    (work / "redis").mkdir()
    turns: list[tuple[float, ...]] = []
    with redis(work / "redis") as push:
        for _ in range(RATE_TURNS):
            turns.append(
                (
                    wrk(server, work, "/v1/buffers/small.%/accumulate", body, keys=True),
                    wrk(server, work, "/v1/ops/ReluGrad", relu, keys=False),
                    push(),
                    *store_rate(store, g, keys=False),
                    *store_rate(store, g, keys=True),
                )
            )
    store.close()
    client = Client(server)  # the server has closed the other connection, which was idle for too long
    for number in range(CONNECTIONS):
        check(client, f"small.{number}", g)
    medians = (statistics.median(one) for one in zip(*turns, strict=True))
    adds, stateless, pushes, alone, per_commit, keyed, _ = medians
    rows.add("adds/s of 4 KB, 16 connections", "Redis, rpush/s, appendfsync always", adds, pushes, ">=", 0.15)
    rows.add("adds/s, store alone, 16 threads", "Redis, rpush/s, appendfsync always", alone, pushes, ">=", 0.5)
    rows.add("the same, each with a key", "Redis, rpush/s, appendfsync always", keyed, pushes, ">=", None)
    rows.add("adds per commit, without keys", "1", per_commit, 1.0, ">=", 3.0)
    rows.add("time per add of 4 KB, us", "ReluGrad of 4 KB", 1e6 / adds, 1e6 / stateless, "<=", 1.6)


def many(rows: Table, server: Server) -> None:
    """Two hundred tensors in one request against one tensor of the same bytes."""
    client, g = Client(server), numbers(2_621_440)
    client.create("whole", g.size)
    parts = dict(zip((f"part.{number}" for number in range(MANY)), np.array_split(g, MANY), strict=True))
    for name, part in parts.items():
        client.create(name, part.size)
    whole, pieces = file(gradient=g), file(**parts)
    times = alternate(
        {
            "many": lambda: client.add("/v1/buffers/accumulate", pieces),
            "one": lambda: client.add("/v1/buffers/whole/accumulate", whole),
        },
        seconds=6.0,
        calls=5,
    )
    for name, part in parts.items():
        check(client, name, part)
    check(client, "whole", g)
    rows.add(f"{MANY} tensors, 10 MB, ms", "one tensor of 10 MB", times["many"] * 1e3, times["one"] * 1e3, "<=", 1.7)


def keyed(rows: Table, work: Path) -> None:
    """What keys take in the store alone: bytes of requests for 1,000 buffers of different versions, time of 200."""
    store, chance, g = LmdbStore(work / "keyed", max_bytes=1 << 34), np.random.default_rng(2), numbers(2)
    names = [f"layer.{number}.weight" for number in range(KEYED)]
    store.submit(Request([Create(name=name, spec=Spec((2,), FLOAT32)) for name in names])).result()
    adds = [Add(name=name, gradient=g) for name in names]

    def add(some: list[Add], *, key: bool) -> None:
        store.submit(Request(some, Key("", f"{next(_keys)}", bytes(16)) if key else None)).result()

    for _ in range(20):
        add([one for one in adds if chance.random() < 0.5], key=False)
    add(adds, key=True)
    before, requests = store.size()[1], 200
    for _ in range(requests):
        add(adds, key=True)
    taken = (store.size()[1] - before) / requests / KEYED
    times = alternate(
        {"with": lambda: add(adds[:MANY], key=True), "without": lambda: add(adds[:MANY], key=False)},
        seconds=4.0,
        calls=5,
    )
    store.close()
    rows.add("bytes per buffer of a keyed add to 1,000", "8 bytes", taken, 8.0, "<=", 1.0)
    against = "the same without keys"
    rows.add(f"keyed add to {MANY}, store alone, ms", against, times["with"] * 1e3, times["without"] * 1e3, "<=", None)


def reading(rows: Table, server: Server, work: Path) -> None:
    """Adds per second over eight connections: without a reader, and beside curl reading 64 MB at two paces."""
    client, g = Client(server), numbers(SMALL)
    client.create("read", VALUE)
    client.add("/v1/buffers/read/accumulate", file(gradient=numbers(VALUE)))
    body = file(gradient=g)

    def phase(pace: list[str] | None) -> tuple[float, int]:
        command = ["curl", "-sf", "-o", "/dev/null", "-H", f"Accept: {safetensors.MEDIA_TYPE}", "-w", "%{stderr}x"]
        url = f"{server.url}/v1/buffers/read/value#[1-1000000]"
        reader = None if pace is None else subprocess.Popen([*command, *pace, url], stderr=subprocess.PIPE)
        rate = wrk(server, work, "/v1/buffers/small.%/accumulate", body, keys=True, connections=8)
        if reader is None:
            return rate, 0
        reader.terminate()
        return rate, len(reader.communicate()[1])

    paces: dict[str, list[str] | None] = {"none": None, "2 a second": ["--rate", "120/m"], "without a pause": []}
    turns = [{name: phase(pace) for name, pace in paces.items()} for _ in range(RATE_TURNS)]
    calm = statistics.median(turn["none"][0] for turn in turns)
    for name in ("2 a second", "without a pause"):
        busy = statistics.median(turn[name][0] for turn in turns)
        reads = statistics.median(turn[name][1] for turn in turns) / RATE_SECONDS
        print(f"  {reads:.1f} reads of 64 MB a second", flush=True)
        case = f"time per add of 4 KB by 8 while 64 MB are read, {name}, us"
        rows.add(case, "the same without reads", 1e6 / busy, 1e6 / calm, "<=", 1.3)


def sparse(rows: Table, server: Server, work: Path) -> None:
    """GatherGrad into a buffer against GatherGrad that answers the dense output."""
    client = Client(server)
    client.create("emb.weight", *TABLE)
    indices = np.random.default_rng(1).integers(0, TABLE[0], ROWS)
    body = file(shape=np.array(TABLE), indices=indices, grad=numbers(ROWS, TABLE[1]))
    times = alternate(
        {
            "into": lambda: client.add("/v1/ops/GatherGrad?into=output:emb.weight", body) and b"",
            "dense": lambda: client.ask("POST", "/v1/ops/GatherGrad", body, SAFETENSORS),
        },
        seconds=8.0,
        calls=5,
    )
    dense = np.frombuffer(client.ask("POST", "/v1/ops/GatherGrad", body, SAFETENSORS)[-4 * TABLE[0] * TABLE[1] :], "f4")
    check(client, "emb.weight", dense)
    rows.add(
        "GatherGrad of 8192 rows into a buffer, ms",
        "answering the dense output",
        times["into"] * 1e3,
        times["dense"] * 1e3,
        "<=",
        1.0,
    )
    with serving(gradserve(store=f"lmdb:{work}/fresh"), "/v2/health/ready") as fresh:
        client = Client(fresh)
        client.create("emb.weight", *TABLE)
        idle = memory(fresh.pid, "VmRSS")
        client.add("/v1/ops/GatherGrad?into=output:emb.weight", body)
        peak = memory(fresh.pid, "VmHWM") - idle
    rows.add("its peak memory, MB", "bytes in", peak / 1e6, len(body) / 1e6, "<=", 2.0)


def memory(pid: int, what: str) -> int:
    """Return a memory figure of a process in bytes."""
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith(what))
    return int(line.split()[1]) * 1024


def growth(rows: Table, server: Server) -> None:
    """The time of an add per byte, judged from 16 MB on: an add of 1 MB mostly waits for the disk, three times."""
    client, per_byte = Client(server), {}
    for size in SIZES:
        g = numbers(size)
        client.create(f"grown.{size}", size)
        body = file(gradient=g)
        add = partial(client.add, f"/v1/buffers/grown.{size}/accumulate", body)
        taken = alternate({"add": add}, seconds=1.0, least=5)["add"]
        per_byte[size] = taken / (4 * size)
        print(f"  add of {4 * size >> 20} MB: {taken * 1e3:.1f} ms, {per_byte[size] * 1e12:.0f} per GB", flush=True)
        check(client, f"grown.{size}", g)
        client.ask("POST", f"/v1/buffers/grown.{size}/zero")
    del per_byte[SIZES[0]]
    slowest, fastest = max(per_byte.values()), min(per_byte.values())
    rows.add("add of 16 to 512 MB, slowest per GB, ms", "the fastest", slowest * 1e12, fastest * 1e12, "<=", 2.0)


def main() -> None:
    """Print the table."""
    for program, package in (("wrk", "wrk"), ("redis-server", "redis-server")):
        if shutil.which(program) is None:
            sys.exit(f"This needs {program}; on Debian: apt-get install {package}")
    print("Durable adds, float32, medians by turns\n", flush=True)
    rows = Table()
    with watched(), ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        store = f"lmdb:{work}/data"
        server = stack.enter_context(serving(gradserve(store=store, max_body_bytes=1 << 30), "/v2/health/ready"))
        large_add(rows, server)
        nothing(rows, server)
        small_adds(rows, server, work)
        many(rows, server)
        keyed(rows, work)
        reading(rows, server, work)
        sparse(rows, server, work)
        fresh = gradserve(store=f"lmdb:{work}/growth", max_body_bytes=1 << 30)
        growth(rows, stack.enter_context(serving(fresh, "/v2/health/ready")))
        print("\n" + table(["case", "against", "ours", "theirs", "ratio", "target", "met"], rows.rows))


if __name__ == "__main__":
    main()
