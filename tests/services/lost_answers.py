"""What a test of lost answers needs: the same database through a proxy, and all it contains, to be compared.

undisturbed = call(connect(url_of_one_database));        expected = contents(...)
proxy.lose_commits("reply"); disturbed = call(connect(through(proxy, url_of_another)))
assert (disturbed, contents(...)) == (undisturbed, expected)
"""

import re
from urllib.parse import urlsplit

from headway._sql import Database
from tests.services.proxy import TcpProxy

#: Moments, what names the process or the database, and numbers a sequence gives (a transaction that was rolled back
#: leaves a gap): these differ between two runs of the same test.
_DIFFERENT = re.compile(r"(^|_)(at|until|seen|minute|origin|claim|epoch|seq)$|^jobs\.no$|^projects\.no$|^blocks\.slot$")
_STAMP = re.compile(r"\d{8}T\d{6}|[0-9a-f]{32}")


def through(proxy: TcpProxy, url: str) -> str:
    """The address of the same database by way of the proxy, which reads what is not encrypted."""
    return url.replace(f":{urlsplit(url).port}/", f":{proxy.port}/") + "?sslmode=disable&gssencmode=disable"


def contents(database: Database) -> dict[str, list[tuple[object, ...]]]:
    """Every row of every table, without what must differ; the same for both engines."""
    found = {}
    for table, columns in _tables(database).items():
        if table in ("meta", "transactions"):
            continue
        kept = [name for name in columns if not _DIFFERENT.search(name) and not _DIFFERENT.search(f"{table}.{name}")]
        rows = database.all(f"SELECT {', '.join(kept)} FROM {table}")
        found[table] = sorted((tuple(map(_comparable, kept, row)) for row in rows), key=repr)
    return found


def _tables(database: Database) -> dict[str, list[str]]:
    rows = database.all(
        "SELECT m.name, c.name FROM sqlite_schema m JOIN pragma_table_info(m.name) c "
        "WHERE m.type = 'table' AND m.name NOT LIKE 'sqlite_%' ORDER BY m.name, c.name"
        if database.engine == "sqlite"
        else "SELECT table_name, column_name FROM information_schema.columns "
        "WHERE table_schema = 'headway' ORDER BY table_name, column_name"
    )
    tables: dict[str, list[str]] = {}
    for table, column in rows:
        tables.setdefault(table, []).append(column)
    return tables


def _comparable(column: str, value: object) -> object:
    if column == "holder" or (column == "token" and isinstance(value, int) and value >= 2**30):  # of a claim: `stride`
        return value is not None
    if isinstance(value, str):
        return _STAMP.sub("~", value)
    return float(value) if isinstance(value, int | float) else value
