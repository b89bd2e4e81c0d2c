"""``serve`` runs the web application, ``open`` opens it in a browser, ``token`` manages its tokens."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import click

from headway.cli import database_option, json_option, say, typed
from headway.cli.toolkit import Number, Whole, clock, confirm, open_store, put, put_json, put_table, yes_option
from headway.errors import NotFound, UsageError
from headway.telemetry import redact

if TYPE_CHECKING:
    from headway.local_servers import LocalServer

ROLES = ("viewer", "operator", "admin", "user")


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, metavar="ADDRESS", help="Address to listen on.")
@click.option("--port", type=Whole(0, 65_535), default=8700, show_default=True, help="Port; 0 selects a free one.")
@click.option(
    "--name", "names", multiple=True, metavar="HOST", help="Host name under which it is opened, besides localhost."
)
@click.option("--root-path", default="", metavar="PATH", help="Path under which a proxy shows it, such as /headway.")
@click.option("--open", "show", is_flag=True, help="Open it in a browser, logged in.")
@click.option("--no-auth", is_flag=True, help="Let everybody in as admin. Only on a loopback address.")
@click.option(
    "--redis", metavar="URL", help="The Redis server, for projects.  [default: none, unless the settings name one]"
)
@database_option
def serve(
    *, host: str, port: int, names: tuple[str, ...], root_path: str, show: bool, no_auth: bool, redis: str | None,
    database: str | None,
) -> int:  # fmt: skip
    """Serve the dashboard and the API until stopped.

    Everybody needs to log in. At the start it prints a link that opens one session in a browser. Commands of the same
    user on this machine find the server's token in a file. For other people create tokens: headway token.
    """
    from headway import local_servers, telemetry
    from headway._sql import connect
    from headway.cli.services.background import attending
    from headway.web.application import app
    from headway.web.server import check_access, listen
    from headway.web.server import serve as run

    if not re.fullmatch(r"(/[\w.~-]+)*", root_path, re.ASCII):
        raise UsageError(
            f"{root_path[:100]!r} is not a path.", hint="Begin with / and end without it: --root-path /headway"
        )
    application = app(database=database, redis=redis, hosts=names)
    config = application.site.settings
    telemetry.configure(level=config.text("log_level").upper(), as_json=config["log_format"] == "json")
    has_tokens = check_access(application, host, no_auth=no_auth)
    with listen(host, port) as listener:
        found = listener.getsockname()
        shown = f"[{found[0]}]" if ":" in found[0] else found[0]
        address = f"http://{shown}:{found[1]}"
        server = local_servers.new_server(listener)
        application.access.local, application.access.no_auth = server, no_auth
        # The application closes its connections after the last request, so relay and alerts have their own.
        with (
            connect(config.text("database"), create=True) as store,
            attending(config, store),
            local_servers.published(server) as problem,
        ):
            say(f"Serving {address} over {redact(application.site.database)}. Ctrl-C ends it.")
            _say_how_to_enter(server, problem, no_auth=no_auth, has_tokens=has_tokens)

            def ready() -> None:
                put(address)
                if show:
                    import webbrowser

                    webbrowser.open(address if no_auth else server.link())

            run(application, listener, ready=ready, root=root_path)
    return 0


def _say_how_to_enter(server: LocalServer, problem: OSError | None, *, no_auth: bool, has_tokens: bool) -> None:
    """Say how people and commands get access."""
    if problem is not None:
        say(f"Commands on this machine need a token: the token file cannot be written ({problem.strerror}).")
    if no_auth:
        say("Without authentication: whoever reaches this address is admin, also through a proxy or a tunnel.")
    elif has_tokens:
        say("Log in with a token; on this machine: headway open")
    else:
        say(f"Open it once, within 12 hours: {server.link()}")
        say(typed("Another link: headway open. For others: headway token create NAME --role viewer"))


@click.command("open")
@click.argument("address", required=False)
@click.option("--link", "only_link", is_flag=True, help="Print the link and open no browser.")
def open_(address: str | None, *, only_link: bool) -> None:
    """Open the dashboard of a server on this machine in a browser, logged in.

    It prints a link that opens one session. ADDRESS is needed only if several servers of yours run here.
    """
    from headway.local_servers import servers

    running = [server for server in servers() if _answers(server.connect_host, server.port)]
    chosen = [server for server in running if address is None or server.address == address.rstrip("/")]
    if not chosen:
        where = "" if address is None else f" at {redact(address)}"
        raise NotFound(
            f"No server of yours runs on this machine{where}.",
            hint=f"Running: {', '.join(server.address for server in running)}"
            if running
            else "Start one: headway serve",
        )
    if len(chosen) > 1:
        raise UsageError(
            f"{len(chosen)} servers of yours run on this machine.",
            hint=f"Name one: headway open {' | '.join(server.address for server in chosen)}",
        )
    link = chosen[0].link()
    put(link)
    if not only_link:
        import webbrowser

        if not webbrowser.open(link):
            say("No browser was found here. Open the link yourself; it works once, within 12 hours.")


def _answers(host: str, port: int) -> bool:
    """Return whether a server listens there. A killed server leaves its token file behind."""
    import socket

    try:
        socket.create_connection((host, port), 2).close()
    except OSError:
        return False
    return True


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def token() -> None:
    """Create, list and revoke tokens of the web application."""


@token.command()
@click.argument("name")
@click.option(
    "--role", type=click.Choice(ROLES), required=True,
    help="viewer reads; operator also retries, cancels and pauses; admin does everything; user sees the tasks of user NAME.",
)  # fmt: skip
@click.option(
    "--days", type=Number(0.001, 3650), metavar="DAYS", help="How long it is valid.  [default: until revoked]"
)
@database_option
def create(name: str, database: str | None, *, role: str, days: float | None) -> None:
    """Create a token for NAME and print it once: only its hash is stored.

    A server needs a token before it listens on an address that others can reach.
    """
    from headway._sql import connect
    from headway.config import Config
    from headway.ledger.store.audit import current_user
    from headway.web.auth import tokens

    with connect(Config(cli={"database": database}).text("database")) as store:
        text, made = tokens.create(store, name, role, days=days, by=current_user())
    put(text)
    say(
        f"Token of {name}, role {role}, valid {'until ' + clock(made.expires_at) if made.expires_at else 'until revoked'}."
    )
    say(typed(f"Send it as Authorization: Bearer ..., or log in with it. Revoke it: headway token revoke {made.id}"))


@token.command("list")
@json_option
@database_option
def list_(database: str | None, *, as_json: bool) -> None:
    """List the tokens without their secrets."""
    from headway.web.auth import tokens

    with open_store(database) as store:
        found = tokens.listed(store)
    if as_json:
        put_json(found)
        return
    if not found.tokens:
        say("No tokens yet: only links of headway open lead into the server.")
        return
    rows = [
        [
            one.id,
            one.name,
            one.role,
            clock(one.created_at),
            one.created_by,
            clock(one.expires_at),
            clock(one.revoked_at),
        ]
        for one in found.tokens
    ]
    put_table(["TOKEN", "NAME", "ROLE", "CREATED", "BY", "EXPIRES", "REVOKED"], rows, drop=("BY", "CREATED"))


@token.command()
@click.argument("id")
@yes_option
@database_option
def revoke(id: str, database: str | None, *, yes: bool) -> None:
    """Revoke a token and end its sessions. A running server obeys within seconds."""
    from headway.ledger.store.audit import current_user
    from headway.web.auth import tokens

    with open_store(database) as store:
        confirm(f"Revoke token {id}?", yes=yes)
        ended = tokens.revoke(store, id, by=current_user())
    say(f"Token {ended.id} of {ended.name} is revoked.")
