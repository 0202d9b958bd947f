"""What the demo's topology file has for its demote_command and rejoin_command: it asks the demo, and waits.

`python -SE demo_command.py SOCKET demote|rejoin OLD NEW`: all clients wait while it runs, so it imports almost nothing.
Called by gateway.demo_hooks.
"""

import socket
import sys

TIMEOUT = 120.0  # seconds for a command


def main(path: str, *words: str) -> int:
    """Ask the demo; return the exit code."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(TIMEOUT)
        connection.connect(path)
        connection.sendall(" ".join(words).encode() + b"\n")
        trouble = connection.makefile().read()
    print(trouble, end="")
    return 1 if trouble else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
