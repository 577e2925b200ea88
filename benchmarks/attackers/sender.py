"""Sends the same request over several connections until it is ended.

Usage: `sender.py PORT PATH FILE CONNECTIONS [endless]`: FILE has the body, with @number for the number of the request.
With `endless`, FILE has the beginning of a header, which each connection continues until the server answers. Prints the
status of each response, on a line; 0 if there was none. Imports nothing of this project.

It has the lowest priority, because an attacker on another machine takes no processor time from the server.
"""

import http.client
import itertools
import os
import select
import socket
import sys
import threading
from pathlib import Path

NUMBERS = itertools.count()
PIECE_BYTES = 16 * 1024
LOWEST_PRIORITY = 19


def send(port: int, path: str, body: bytes) -> None:
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        try:
            while True:
                numbered = body.replace(b"@number", b"%d" % next(NUMBERS))
                connection.request("POST", path, numbered, {"Content-Type": "application/json"})
                answer = connection.getresponse()
                answer.read()
                note(answer.status)
        except (OSError, http.client.HTTPException):
            note(0)
        finally:
            connection.close()


def send_endlessly(port: int, _: str, head: bytes) -> None:
    while True:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=120) as connection:
                connection.sendall(head)
                while not select.select([connection], [], [], 0)[0]:
                    connection.sendall(b"a" * PIECE_BYTES)
                words = connection.recv(PIECE_BYTES).split()
                note(int(words[1]) if len(words) > 1 else 0)
        except OSError:
            note(0)


def note(status: int) -> None:
    sys.stdout.write(f"{status}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    os.nice(LOWEST_PRIORITY)
    port, path, file, connections, *kind = sys.argv[1:]
    arguments = (int(port), path, Path(file).read_bytes())
    target = send_endlessly if kind == ["endless"] else send
    threads = [threading.Thread(target=target, args=arguments) for _ in range(int(connections))]
    for thread in threads:
        thread.start()
