"""Floods ports of this machine: opens many connections, and sends any bytes for a while.

python flooding_caller.py SECONDS CONNECTIONS PORT...        on the loopback address only
"""

import random
import socket
import sys
from contextlib import suppress
from time import monotonic

HOST = "127.0.0.1"
WORDS = [
    b'["answer", 1, "00", "00"]\n',
    b'["beat", []]\n',
    b"GET / HTTP/1.1\r\n\r\n",
    b"\x00" * 300,
]


def disturb(seconds: float, connections: int, ports: list[int]) -> None:
    """Keep this number of connections open, each for a while."""
    chance, held = random.Random(0), list[socket.socket]()
    end = monotonic() + seconds
    while monotonic() < end:
        while len(held) < connections and monotonic() < end:
            with suppress(OSError):
                one = socket.create_connection((HOST, chance.choice(ports)), timeout=1.0)
                one.setblocking(False)
                held.append(one)
        for one in chance.sample(held, min(len(held), 50)):
            with suppress(OSError):
                one.send(chance.choice([*WORDS, chance.randbytes(200)]))
            if chance.random() < 0.5:
                held.remove(one)
                one.close()
    for one in held:
        one.close()


if __name__ == "__main__":
    arguments = sys.argv[1:]
    disturb(float(arguments[0]), int(arguments[1]), [int(port) for port in arguments[2:]])
