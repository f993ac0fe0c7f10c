"""Asks a server how it is, again and again: `python -m tests.soak.watch PORT`.

A process of its own, which nothing holds up but the machine. It ends with its standard input, and prints the
milliseconds of every answer, and by how many it woke up too late itself: so busy is the machine.
"""

import http.client
import json
import select
import sys
import time

PAUSE = 0.02


def ask(connection: http.client.HTTPConnection) -> float:
    started = time.perf_counter()
    connection.request("GET", "/health")
    response = connection.getresponse()
    body = response.read()
    seconds = time.perf_counter() - started
    if response.status != 200 or json.loads(body) != {"status": "ok"}:
        raise RuntimeError(f"/health answers {response.status} {body[:200]!r}")
    return 1e3 * seconds


def main() -> int:
    connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=30)
    found, late, slept = [], [], time.perf_counter()
    while not select.select([sys.stdin], [], [], PAUSE)[0]:
        late.append(1e3 * (time.perf_counter() - slept - PAUSE))
        found.append(ask(connection))
        slept = time.perf_counter()
    json.dump([found, late], sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
