"""Serve the simulated teacher on loopback: python scripts/simulated_teacher.py --world runs/quickstart/world.

An OpenAI-compatible server that knows the mini world and errs at a set rate. It is a simulation: no figure made with it
says anything about a real model.
"""

from __future__ import annotations

import argparse
import errno
import socket
from pathlib import Path

from aiohttp import web

from samrag.config import run
from samrag.errors import UserError
from samrag.files import write_text
from samrag.miniworld.dataset import read_truth
from samrag.miniworld.teacher import Teacher, application


def main() -> None:
    """Parse, load the truth, serve until stopped."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--world", type=Path, required=True, help="folder of a mini world")
    parser.add_argument("--port", type=int, default=8399, help="port on 127.0.0.1; 0 takes a free one")
    parser.add_argument("--error_rate", type=float, default=0.15, help="share of replies that are spoilt")
    parser.add_argument("--port_file", type=Path, help="write the port here once the server listens")
    arguments = parser.parse_args()
    try:
        teacher = Teacher(read_truth(arguments.world), arguments.error_rate)
    except ValueError as error:
        raise UserError(f"{error}.") from error

    try:
        listener = socket.create_server(("127.0.0.1", arguments.port))
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise UserError(f"port {arguments.port} is in use; stop what uses it, or choose another by --port.") from error
    port = listener.getsockname()[1]
    if arguments.port_file:
        write_text(arguments.port_file, f"{port}\n")
    print(f"simulated teacher (error rate {arguments.error_rate:.0%}) on http://127.0.0.1:{port}/v1", flush=True)
    web.run_app(application(teacher), sock=listener, print=None, access_log=None)


if __name__ == "__main__":
    run(main)
