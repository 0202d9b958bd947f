"""The command line: `gateway COMMAND`.

Exit codes: 0 fine, 1 failure (told in one sentence or one line a fault), 2 a word of the call is off.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated

import anyio
import typer

from gateway import __version__, variant

app = typer.Typer(
    name="gateway",
    help="One endpoint in front of a PostgreSQL primary and its streaming standbys.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
File = Annotated[Path, typer.Argument(help="The topology file.", metavar="FILE")]


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"gateway {__version__} ({variant()})")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show version and variant.")
    ] = False,
) -> None: ...


@app.command()
def serve(file: File) -> None:
    """Serve the endpoint that FILE describes, in the foreground, until SIGTERM."""
    from gateway.supervisor.listeners import ListenError
    from gateway.supervisor.main import Supervisor
    from gateway.topology import SettingsError

    try:
        supervisor = Supervisor(file)
    except SettingsError as error:
        _fail(f"{file} cannot be used:", *map(str, error.faults))
    except ListenError as error:
        _fail(str(error))
    raise typer.Exit(asyncio.run(supervisor.run()))


@app.command()
def check(file: File) -> None:
    """Report every fault of FILE, each with the path of its key."""
    from gateway.supervisor.main import read_users
    from gateway.topology import SettingsError, load

    try:
        settings = load(file)
        read_users(settings)
    except SettingsError as error:
        _fail(*map(str, error.faults))
    for warning in settings.warnings:
        typer.echo(f"warning: {warning}", err=True)
    typer.echo(f"{file}: no faults")


@app.command()
def demo(
    port: Annotated[int, typer.Option(help="The port to serve on, on 127.0.0.1.", min=1, max=65535)] = 6432,
    postgres: Annotated[str | None, typer.Option(help="PostgreSQL's major version.", metavar="VERSION")] = None,
) -> None:
    """Start a throw-away primary with two standbys and serve it, until Ctrl-C."""
    from gateway.demo import run_demo

    raise typer.Exit(run_demo(port, postgres))


@app.command()
def switchover(
    node: Annotated[
        str | None, typer.Argument(help="The standby that takes over; the one that got farthest if none.")
    ] = None,
    url: Annotated[str | None, typer.Option(help="A running gateway: postgresql://user@host:port.")] = None,
    config: Annotated[Path, typer.Option(help="The topology file of a gateway on this machine.")] = Path(
        "topology.toml"
    ),
    force: Annotated[bool, typer.Option("--force", help="End the transactions that do not end in time.")] = False,
) -> None:
    """Let a standby and the primary change places, without an error for anybody."""
    from gateway.attach import AttachError, attach
    from gateway.session import SessionError

    async def order() -> str:
        session = await attach(url, config)
        try:
            quoted = '"' + node.replace('"', '""') + '"' if node else ""
            await session.query(f"SWITCHOVER {quoted} {'FORCE' if force else ''}")
            return session.notices[0]
        finally:
            await session.close()

    try:
        typer.echo(anyio.run(order))
    except (AttachError, SessionError) as error:
        _fail(str(error))
    except OSError as error:
        _fail(f"the gateway has gone: {error}")


def _fail(*lines: str) -> None:
    for line in lines:
        typer.echo(line, err=True)
    raise typer.Exit(1)


def main() -> None:
    """Run the command line."""
    sys.exit(app())
