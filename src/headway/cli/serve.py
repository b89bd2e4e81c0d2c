"""``serve`` opens the web application; ``token`` says who may use it."""

from __future__ import annotations

import click

from headway.cli import database_option, json_option, say, typed
from headway.cli.toolkit import Number, Whole, clock, confirm, open_store, put, put_json, put_table, yes_option
from headway.telemetry import redact

ROLES = ("viewer", "operator", "admin", "user")


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, metavar="ADDRESS", help="Where to listen.")
@click.option("--port", type=Whole(0, 65_535), default=8700, show_default=True, help="0 takes a free one.")
@click.option("--name", "names", multiple=True, metavar="HOST", help="A name it is opened under, besides localhost.")
@click.option("--open", "show", is_flag=True, help="Open it in a browser.")
@click.option(
    "--redis", metavar="URL", help="The Redis server, for projects.  [default: none, unless the settings name one]"
)
@database_option
def serve(*, host: str, port: int, names: tuple[str, ...], show: bool, redis: str | None, database: str | None) -> int:
    """Serve the dashboard and the API until stopped.

    While nobody made a token it is open to everybody on this machine, and listens nowhere else. Ctrl-C ends it.
    """
    from headway import telemetry
    from headway._sql import connect
    from headway.cli.attending import attending
    from headway.web.application import app
    from headway.web.server import check_access, listen
    from headway.web.server import serve as run

    application = app(database=database, redis=redis, hosts=names)
    config = application.site.settings
    telemetry.configure(level=config.text("log_level").upper(), as_json=config["log_format"] == "json")
    closed = check_access(application, host)
    with listen(host, port) as listener:
        found = listener.getsockname()
        shown = f"[{found[0]}]" if ":" in found[0] else found[0]
        address = f"http://{shown}:{found[1]}"
        say(f"Serving {address} over {redact(application.site.database)}. Ctrl-C ends it.")
        if closed:
            say(typed("A token is needed. Make one: headway token create NAME --role viewer|operator|admin"))
        else:
            say(typed("It is open to everybody on this machine. Close it: headway token create NAME --role admin"))

        def ready() -> None:
            put(address)
            if show:
                import webbrowser

                webbrowser.open(address)

        # Its own connections: those of the application are closed when the last request is answered.
        with connect(config.text("database"), create=True) as store, attending(config, store):
            run(application, listener, ready=ready)
    return 0


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def token() -> None:
    """Who may use the web application: make, list and revoke tokens."""


@token.command()
@click.argument("name")
@click.option(
    "--role", type=click.Choice(ROLES), required=True,
    help="viewer looks; operator also retries, cancels, pauses; admin does everything; user sees the tasks of the user NAME.",
)  # fmt: skip
@click.option(
    "--days", type=Number(0.001, 3650), metavar="DAYS", help="How long it is valid.  [default: until revoked]"
)
@database_option
def create(name: str, database: str | None, *, role: str, days: float | None) -> None:
    """Make a token for NAME and print it, this once: only its hash is kept.

    The first one closes the server: from then on everybody needs a token.
    """
    from headway._sql import connect
    from headway.config import Config
    from headway.ledger.recorder import current_user
    from headway.web import tokens

    with connect(Config(cli={"database": database}).text("database")) as store:
        text, made = tokens.create(store, name, role, days=days, by=current_user())
    put(text)
    say(f"It is {name}'s, as {role}{'' if made.expires_at is None else f', until {clock(made.expires_at)}'}.")
    say(typed(f"Send it as Authorization: Bearer ..., or log in with it. Revoke it: headway token revoke {made.id}"))


@token.command("list")
@json_option
@database_option
def list_(database: str | None, *, as_json: bool) -> None:
    """List the tokens, without what is secret of them."""
    from headway.web import tokens

    with open_store(database) as store:
        found = tokens.listed(store)
    if as_json:
        put_json(found)
        return
    if not found.tokens:
        say("Nobody made a token: the server is open to everybody on its machine, and to nobody else.")
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
    put_table(["TOKEN", "NAME", "ROLE", "MADE", "BY", "ENDS", "REVOKED"], rows, drop=("BY", "MADE"))


@token.command()
@click.argument("id")
@yes_option
@database_option
def revoke(id: str, database: str | None, *, yes: bool) -> None:
    """End a token, and every login by it. A running server knows it within seconds."""
    from headway.ledger.recorder import current_user
    from headway.web import tokens

    with open_store(database) as store:
        confirm(f"Revoke token {id}?", yes=yes)
        ended = tokens.revoke(store, id, by=current_user())
    say(f"Token {ended.id} of {ended.name} is revoked.")
