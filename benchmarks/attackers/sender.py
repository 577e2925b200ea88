"""Sends the same request over several connections until it is ended.

Usage: `sender.py PORT PATH FILE CONNECTIONS`: FILE has the body, with @number for the number of the request. Prints the
status of each response, on a line; 0 if there was none. Imports nothing of this project.
"""

import http.client
import itertools
import sys
import threading
from pathlib import Path

NUMBERS = itertools.count()


def send(port: int, path: str, body: bytes) -> None:
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        try:
            while True:
                numbered = body.replace(b"@number", b"%d" % next(NUMBERS))
                connection.request("POST", path, numbered, {"Content-Type": "application/json"})
                answer = connection.getresponse()
                answer.read()
                sys.stdout.write(f"{answer.status}\n")
                sys.stdout.flush()
        except (OSError, http.client.HTTPException):
            sys.stdout.write("0\n")
            sys.stdout.flush()
        finally:
            connection.close()


if __name__ == "__main__":
    port, path, file, connections = sys.argv[1:]
    threads = [
        threading.Thread(target=send, args=(int(port), path, Path(file).read_bytes())) for _ in range(int(connections))
    ]
    for thread in threads:
        thread.start()
