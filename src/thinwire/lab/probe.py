"""One end of a calibration: `python -I -S probe.py listen|connect ADDRESS PORT ROUNDS`, ROUNDS as JSON.

A stand-alone program that uses only the standard library. A round is `[bytes, duplex, repeats]`; the connecting end prints
the seconds of every repeat as JSON, a line per round. Both ends read the same clock, since they are on one machine.
"""

import json
import socket
import struct
import sys
import threading
import time

SETTLE_SECONDS = 0.01  # between transfers, so that token buckets are full, as at the start of a step


def receive(connection: socket.socket, size: int, buffer: bytearray) -> float:
    while size:
        got = connection.recv_into(buffer, min(size, len(buffer)))
        if not got:
            raise ConnectionError("the other end has closed the connection")
        size -= got
    return time.monotonic()


def tell(connection: socket.socket, *values: float) -> None:
    connection.sendall(struct.pack("!2d", *values))


def hear(connection: socket.socket) -> tuple[float, float]:
    buffer = bytearray(16)
    view = memoryview(buffer)
    while view:
        got = connection.recv_into(view)
        if not got:
            raise ConnectionError("the other end has closed the connection")
        view = view[got:]
    first, second = struct.unpack("!2d", buffer)
    return first, second


def one_way(connection: socket.socket, sends: bool, data: bytes, buffer: bytearray) -> float:
    """Seconds from the first byte passed to the sender's kernel to the last one read from the receiver's."""
    if not sends:
        tell(connection, 0, 0)
        tell(connection, receive(connection, len(data), buffer), 0)
        return 0.0
    hear(connection)
    time.sleep(SETTLE_SECONDS)
    start = time.monotonic()
    connection.sendall(data)
    return hear(connection)[0] - start


def duplex(connection: socket.socket, sends: bool, data: bytes, buffer: bytearray) -> float:
    """Both ends send at the same time; seconds from the first start to the last arrival."""
    if sends:
        tell(connection, 0, 0)
    else:
        hear(connection)
    time.sleep(SETTLE_SECONDS)
    start = time.monotonic()
    sender = threading.Thread(target=connection.sendall, args=(data,))
    sender.start()
    end = receive(connection, len(data), buffer)
    sender.join()
    tell(connection, start, end)
    other_start, other_end = hear(connection)
    return max(end, other_end) - min(start, other_start)


def main() -> None:
    role, address, port, text = sys.argv[1:]
    if role == "listen":
        with socket.create_server((address, int(port))) as server:
            server.settimeout(30)
            connection, _ = server.accept()
    else:
        deadline = time.monotonic() + 30
        while True:  # the other end may not listen yet
            try:
                connection = socket.create_connection((address, int(port)), timeout=30)
                break
            except ConnectionRefusedError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)
    with connection:
        connection.settimeout(30)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        buffer = bytearray(1 << 18)
        for size, both, repeats in json.loads(text):
            transfer = duplex if both else one_way
            data = bytes(size)
            seconds = [transfer(connection, role == "connect", data, buffer) for _ in range(repeats)]
            if role == "connect":
                print(json.dumps(seconds), flush=True)


if __name__ == "__main__":
    main()
