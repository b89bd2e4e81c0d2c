"""Who gets in: tokens, logins, forms, and what other sites' pages can make a browser send."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import HTTPConnection
from websockets.exceptions import ConnectionClosedError, InvalidStatus

from headway._sql import connect
from headway.config import Config, is_loopback
from headway.errors import ConfigError
from headway.states import Manager, open_store
from headway.views.reading import Reader
from headway.web.api.problems import Throttled
from headway.web.auth import tokens
from headway.web.auth.addresses import networks, peer_of
from headway.web.auth.identity import Access, Known
from headway.web.auth.throttle import GUESSES, Throttle
from headway.web.site import THREADS, WAITING, Site, User
from tests.services.waiting import eventually
from tests.web.conftest import Servers, Web, answer_of, make_tokens, news, until_closed


def visit(web: Web) -> tuple[str, dict[str, str]]:
    """The login page's form token, and the cookies that came with it."""
    answer = web.ask("/login")
    found = re.search(r'name="csrf" value="([^"]+)"', answer.text)
    assert found is not None
    return found[1], answer.cookies


def log_in(web: Web, role: str) -> tuple[str, dict[str, str]]:
    """The form token and the cookies of somebody who logged in."""
    csrf, cookies = visit(web)
    answer = web.post("/login", form={"csrf": csrf, "token": web.tokens[role], "next": "/jobs"}, cookies=cookies)
    assert (answer.status, answer.headers["Location"]) == (303, "/jobs")
    cookies |= answer.cookies
    page = web.ask("/login", cookies=cookies)
    found = re.search(r'name="csrf" value="([^"]+)"', page.text)
    assert found is not None
    return found[1], cookies


# ---- --no-auth ------------------------------------------------------------------------------------------------------


def test_without_authentication_everybody_is_admin_and_the_server_says_so(serve: Servers, tmp_path: Path):
    web = serve("--no-auth")
    assert web.ask("/api/v1/jobs").json == {"schema": "headway.jobs/1", "jobs": [], "next": None}
    said = (tmp_path / "serve.log").read_text()
    assert "whoever reaches this address is admin" in said
    assert "/enter" not in said


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8700", "127.0.0.1.evil.example", "", "[::1", "10.0.0.1"]
)
def test_a_name_that_was_pointed_at_this_machine_opens_nothing(opened: Web, host: str):
    """DNS rebinding: the page's own name resolves to 127.0.0.1, and the browser calls it the same origin."""
    assert opened.ask("/api/v1/jobs", Host=host).status == 401
    for path in ("/", "/jobs"):
        assert opened.ask(path, Host=host).headers["Location"].startswith("/login")


@pytest.mark.parametrize(
    ("text", "near"),
    [("127.0.0.1", True), ("127.8.9.1", True), ("::1", True), ("::ffff:127.0.0.1", True), ("::ffff:10.0.0.1", False),
     ("::", False), ("0.0.0.0", False), ("10.0.0.1", False), ("127.0.0.1.evil.example", False), ("localhost", False)],
)  # fmt: skip
def test_an_address_of_this_machine_is_known_however_it_is_written(text: str, near: bool):
    assert is_loopback(text) is near


@pytest.mark.parametrize("where", [("--host", "0.0.0.0"), ("--name", "headway.example"), ("--name", "")])
def test_an_address_that_others_can_reach_needs_a_token_and_authentication(headway_cli, where: tuple[str, str]):
    """A name that others use is the name of a proxy, and a proxy on this machine sends everybody's requests."""
    answer = headway_cli("serve", *where, "--port", "0")
    assert (answer.returncode, answer.stdout) == (5, "")
    assert "headway token create" in answer.stderr
    headway_cli("token", "create", "anna", "--role", "admin")
    answer = headway_cli("serve", "--no-auth", *where, "--port", "0")
    assert (answer.returncode, answer.stdout) == (5, "")
    assert "--no-auth would make everybody an admin" in answer.stderr


def test_a_port_in_use_and_an_address_of_another_machine_are_clear_errors(headway_cli):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        answer = headway_cli("serve", "--port", str(taken.getsockname()[1]))
    assert answer.returncode == 2
    assert "is in use" in answer.stderr
    assert "Traceback" not in answer.stderr


@pytest.mark.parametrize("theirs", ['prefs={"dark":true}', "a=b c", 'x="', "ünï=1", "flag", "=", "expires=1; path=/"])
def test_a_cookie_of_another_application_of_this_host_logs_nobody_out(closed: Web, theirs: str):
    _, cookies = log_in(closed, "viewer")
    ours = "; ".join(f"{name}={value}" for name, value in cookies.items())
    for both in (f"{theirs}; {ours}", f"{ours}; {theirs}"):
        assert closed.ask("/api/v1/jobs", Cookie=both.encode()).status == 200


# ---- tokens ---------------------------------------------------------------------------------------------------------


def test_a_token_is_shown_once_and_kept_as_a_hash(headway_cli, tmp_path: Path):
    made = headway_cli("token", "create", "anna", "--role", "operator", "--days", "90").stdout.strip()
    assert re.fullmatch(r"hw_[0-9a-f]{12}_[A-Za-z0-9_-]{43}", made)
    secret = made.split("_", 2)[2].encode()
    assert all(secret not in path.read_bytes() for path in tmp_path.glob("headway.db*"))
    listed = headway_cli("token", "list")
    assert made.split("_")[1] in listed.stdout
    assert secret.decode() not in listed.stdout + listed.stderr
    gone = headway_cli("token", "revoke", made.split("_")[1], "--yes")
    assert (gone.returncode, "is revoked" in gone.stderr) == (0, True)
    assert headway_cli("token", "revoke", "ffffffffffff", "--yes").returncode == 2


def test_a_token_that_ran_out_is_no_token(database: str):
    with connect(database) as store:
        text, _ = tokens.create(store, "anna", "viewer", days=1, by="test")
        assert tokens.find(store, text) is not None
        store.write("UPDATE web_tokens SET expires_at = 1")
        assert tokens.find(store, text) is None
        cookie = tokens.open_session(store, tokens.listed(store).tokens[0].id, user=User("anna", "viewer"))
        assert tokens.find_session(store, cookie) is None


@pytest.mark.parametrize(
    "text", ["", "hw_", "x", "hw_000000000000_" + "A" * 43, "hw_'_" + "A" * 43, "\udcff", "é" * 60]
)
def test_what_is_no_token_is_nobodys(database: str, text: str):
    with connect(database) as store:
        tokens.create(store, "anna", "viewer", by="test")
        assert tokens.find(store, text) is None


def test_the_public_part_of_one_token_does_not_open_with_the_secret_of_another(database: str):
    with connect(database) as store:
        one, _ = tokens.create(store, "anna", "viewer", by="test")
        two, _ = tokens.create(store, "ben", "admin", by="test")
        mixed = "_".join([*two.split("_")[:2], one.split("_", 2)[2]])
        assert tokens.find(store, mixed) is None


def test_wrong_tokens_are_counted_by_address_for_a_minute():
    now = [0.0]
    throttle = Throttle(lambda: now[0])
    for _ in range(GUESSES):
        throttle.check("10.0.0.1")
        throttle.failed("10.0.0.1")
    with pytest.raises(Throttled):
        throttle.check("10.0.0.1")
    throttle.check("10.0.0.2")
    now[0] = 61.0
    throttle.check("10.0.0.1")


@pytest.mark.parametrize(
    ("one", "other", "together"),
    [
        ("2001:db8::1", "2001:db8::ffff:ffff:ffff:ffff", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("::ffff:192.0.2.1", "192.0.2.1", True),
        ("::ffff:192.0.2.1", "::ffff:192.0.2.2", False),
        ("192.0.2.1", "192.0.2.2", False),
    ],
)
def test_the_addresses_of_one_network_guess_together(one: str, other: str, together: bool):
    throttle = Throttle()
    for _ in range(GUESSES):
        throttle.failed(one)
    with pytest.raises(Throttled) if together else contextlib.nullcontext():
        throttle.check(other)


def test_guessing_is_throttled_and_does_not_keep_out_who_is_known(serve: Servers, database: str):
    made = make_tokens(database)
    web = serve("--database", database)
    web.tokens = made
    assert web.ask("/api/v1/jobs", token="viewer").status == 200
    csrf, cookies = visit(web)
    answers = [
        web.post("/login", form={"csrf": csrf, "token": f"guess-{number}"}, cookies=cookies).status
        for number in range(GUESSES + 1)
    ]
    assert answers == [303] * GUESSES + [429]
    assert web.ask("/api/v1/jobs", token="hw_000000000000_" + "A" * 43).error == "Throttled"
    assert web.ask("/api/v1/jobs", token="viewer").status == 200


def test_wrong_tokens_that_are_sent_at_once_are_tried_no_oftener_and_right_ones_all_pass(serve: Servers, database: str):
    """Those that are still being looked up count: else hundreds would be tried before the first one is known to be wrong."""
    with connect(database) as store:
        right = [tokens.create(store, f"poller-{number}", "viewer", by="test")[0] for number in range(40)]
    web = serve("--database", database)

    def ask(token: str) -> int:
        return web.ask("/api/v1/queues", token=token).status

    with ThreadPoolExecutor(40) as pool:
        assert set(pool.map(ask, right)) == {200}
        wrong = list(pool.map(ask, [f"hw_{number:012}_{'A' * 43}" for number in range(80)]))
        assert sorted(set(wrong)) == [401, 429]
        assert wrong.count(401) <= GUESSES
        assert set(pool.map(ask, right)) == {200}


def test_who_waits_for_a_turn_is_not_forgotten_when_the_one_whose_turn_it_is_goes_away():
    throttle = Throttle()
    for _ in range(GUESSES - 1):
        throttle.failed("10.0.0.1")  # one place is left

    async def look_up(*, wrong: bool = False, until: asyncio.Event | None = None) -> None:
        async with throttle.trying("10.0.0.1"):
            if until is not None:
                await until.wait()
            if wrong:
                throttle.failed("10.0.0.1")

    async def scene() -> None:
        known = asyncio.Event()
        first = asyncio.create_task(look_up(until=known))
        await asyncio.sleep(0)
        leaving, wrong, *others = (asyncio.create_task(look_up(wrong=number == 1)) for number in range(5))
        await asyncio.sleep(0)
        first.add_done_callback(lambda _: leaving.cancel())
        known.set()
        await asyncio.wait_for(wrong, 5)
        assert leaving.cancelled()
        for one in others:
            with pytest.raises(Throttled):
                await asyncio.wait_for(one, 5)

    asyncio.run(scene())


@pytest.mark.parametrize(
    ("socket", "said", "expected"),
    [
        ("198.51.100.9", ["203.0.113.7"], "198.51.100.9"),  # no proxy of ours: its word counts for nothing
        ("10.0.0.5", ["203.0.113.7"], "203.0.113.7"),
        ("10.0.0.5", ["192.0.2.1, 203.0.113.7, 10.0.0.6"], "203.0.113.7"),  # what is left of it the sender wrote
        ("10.0.0.5", ["192.0.2.1", "203.0.113.7", "10.0.0.6"], "203.0.113.7"),
        ("10.0.0.5", [], "10.0.0.5"),
        ("10.0.0.5", ["10.0.0.7, 10.0.0.6"], "10.0.0.7"),
        ("10.0.0.5", ["203.0.113.7, unknown"], "10.0.0.5"),
        ("10.0.0.5", ["203.0.113.7:4711"], "203.0.113.7"),
        ("10.0.0.5", ["[2001:db8::7]:4711"], "2001:db8::7"),
        ("::ffff:10.0.0.5", ["::ffff:203.0.113.7"], "203.0.113.7"),
        ("fd00::1%eth0", ["203.0.113.7, fd00::2"], "203.0.113.7"),
        ("10.0.0.5", ["a" * 5000, ",,,"], "10.0.0.5"),
    ],
)
def test_behind_proxies_of_ours_the_address_is_the_one_they_saw(socket: str, said: list[str], expected: str):
    headers = [(b"x-forwarded-for", text.encode()) for text in said]
    scope = {"type": "http", "client": (socket, 1), "headers": headers}
    assert peer_of(scope, networks(["10.0.0.0/24", "fd00::/8"])) == expected
    assert peer_of(scope) == socket
    assert peer_of({"type": "http", "client": None, "headers": headers}, networks(["10.0.0.0/24"])) == "local"


def test_a_proxy_that_is_no_address_is_refused_at_the_start():
    with pytest.raises(ConfigError, match="web_proxies"):
        networks(["10.0.0.5", "proxy.internal"])


def test_behind_a_proxy_one_persons_guesses_keep_out_no_other_and_elsewhere_the_header_changes_nothing(
    serve: Servers, database: str
):
    make_tokens(database)
    wrong = "hw_000000000000_" + "A" * 43
    behind = serve("--database", database, env={"HEADWAY_WEB_PROXIES": "127.0.0.1"})
    alone = serve("--database", database)
    for number in range(GUESSES):
        assert behind.ask("/api/v1/jobs", token=wrong, X_Forwarded_For=f"192.0.2.{number}, 203.0.113.7").status == 401
        assert alone.ask("/api/v1/jobs", token=wrong, X_Forwarded_For=f"203.0.113.{number}").status == 401
    assert behind.ask("/api/v1/jobs", token=wrong, X_Forwarded_For="192.0.2.99, 203.0.113.7").status == 429
    assert behind.ask("/api/v1/jobs", token=wrong, X_Forwarded_For="203.0.113.8").status == 401
    assert alone.ask("/api/v1/jobs", token=wrong, X_Forwarded_For="203.0.113.99").status == 429


def test_when_everybody_comes_back_at_once_after_a_restart_nobody_is_one_too_many(database: str):
    """A thousand pages reconnect in the same moment, each of somebody else, to a server that knows nobody yet."""
    config = Config(cli={"database": database})
    site = Site(database, None, config, Reader(config))
    many = THREADS + WAITING + 100
    with connect(database) as store:
        made = [tokens.create(store, f"poller-{number}", "viewer", by="test") for number in range(many)]
        cookies = [tokens.open_session(store, token.id, user=User(token.name, "viewer")) for _, token in made]
    access = Access(site)

    def coming(header: bytes, text: str, number: int) -> HTTPConnection:
        peer = (f"10.0.{number // 250}.{number % 250}", 1)
        return HTTPConnection({"type": "http", "client": peer, "headers": [(header, text.encode())]})

    async def come() -> list[Known | None]:
        await asyncio.gather(*(access.load() for _ in range(many)))
        named = [coming(b"authorization", f"Bearer {text}", number) for number, (text, _) in enumerate(made)]
        logged_in = [
            coming(b"cookie", f"{access.name('session')}={text}", number) for number, text in enumerate(cookies)
        ]
        return await asyncio.gather(*(access.who(one) for one in (*named, *logged_in)))

    found = asyncio.run(come())
    site.close()
    assert [one.user.name if one else None for one in found] == [f"poller-{number}" for number in range(many)] * 2


# ---- logging in -----------------------------------------------------------------------------------------------------


def test_somebody_without_a_session_is_sent_to_the_login_and_back_to_where_they_were(closed: Web):
    answer = closed.ask("/jobs/ads?state=dead")
    assert (answer.status, answer.headers["Location"]) == (303, "/login?next=/jobs/ads%3Fstate%3Ddead")


def test_a_session_cookie_is_out_of_reach_for_scripts_and_other_sites(closed: Web):
    csrf, cookies = visit(closed)
    answer = closed.post("/login", form={"csrf": csrf, "token": closed.tokens["viewer"]}, cookies=cookies)
    [cookie] = [value for value in answer.headers.get_all("set-cookie") or [] if "session" in value]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert closed.tokens["viewer"] not in str(answer.headers)
    assert closed.ask("/api/v1/jobs", cookies=cookies | answer.cookies).status == 200


def test_behind_a_proxy_that_ends_tls_the_cookies_are_for_tls_only(closed: Web):
    for said, secure in (("https", True), ("HTTPS, http", True), ("http", False)):
        answer = closed.ask("/login", X_Forwarded_Proto=said)
        assert ("Secure" in answer.headers["set-cookie"]) == secure
    assert "Secure" not in closed.ask("/login").headers["set-cookie"]


@pytest.mark.parametrize(
    "target", ["//evil.example", "https://evil.example", "/\\evil.example", "\\\\evil", "/a\r\nX: y"]
)
def test_a_login_leads_to_no_other_site(closed: Web, target: str):
    csrf, cookies = visit(closed)
    form = {"csrf": csrf, "token": closed.tokens["viewer"], "next": target}
    assert closed.post("/login", form=form, cookies=cookies).headers["Location"] == "/"


def test_logging_out_ends_the_session_itself_not_only_the_cookie(closed: Web):
    csrf, cookies = log_in(closed, "viewer")
    assert closed.ask("/api/v1/jobs", cookies=cookies).status == 200
    assert closed.post("/logout", form={"csrf": csrf}, cookies=cookies).status == 303
    assert closed.ask("/api/v1/jobs", cookies=cookies).status == 401


def test_revoking_a_token_ends_the_sessions_by_it(serve: Servers, database: str):
    made = make_tokens(database)
    web = serve("--database", database)
    web.tokens = made
    _, cookies = log_in(web, "viewer")
    with connect(database) as store:
        tokens.revoke(store, made["viewer"].split("_")[1], by="test")
    eventually(lambda: web.ask("/api/v1/jobs", cookies=cookies).status == 401)


# ---- other sites' pages ---------------------------------------------------------------------------------------------

FOREIGN = [
    {"Origin": "https://evil.example"},
    {"Origin": "null"},
    {"Origin": "http://[half"},
    {"Sec_Fetch_Site": "cross-site"},
    {"Sec_Fetch_Site": "same-site"},
]


@pytest.mark.parametrize("headers", FOREIGN, ids=str)
def test_a_page_of_another_site_changes_nothing(closed: Web, headers: dict[str, str]):
    csrf, cookies = log_in(closed, "admin")
    answer = closed.post("/api/v1/queues/low/pause", cookies=cookies, X_CSRF_Token=csrf, **headers)
    assert (answer.status, answer.error) == (403, "Forbidden")
    form = {"csrf": csrf, "queue": "low"}
    assert closed.post("/actions/pause", form=form, cookies=cookies, **headers).status == 403
    assert not any(queue["paused"] for queue in closed.ask("/api/v1/queues", cookies=cookies).json["queues"])


@pytest.mark.parametrize("headers", FOREIGN, ids=str)
def test_a_page_of_another_site_opens_no_live_connection(closed: Web, headers: dict[str, str]):
    with pytest.raises(InvalidStatus) as refused, closed.live(token="viewer", **headers):
        pass
    assert answer_of(refused.value) == (403, "Forbidden")


def test_a_script_of_another_site_reads_nothing_of_an_open_server(opened: Web):
    assert opened.ask("/api/v1/jobs", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="no-cors").status == 403
    assert opened.ask("/api/v1/jobs", Sec_Fetch_Site="same-origin").status == 200
    answer = opened.post("/api/v1/queues/low/pause", Origin=opened.address)
    assert (answer.status, answer.error) == (403, "Forbidden")  # our own page sends its form's token


def test_a_program_on_this_machine_needs_no_form(opened: Web):
    assert opened.post("/api/v1/queues/low/pause", {"reason": "upgrade"}).json["touched"] == 1


def test_a_cookie_alone_changes_nothing_and_a_form_of_another_session_neither(closed: Web):
    csrf, cookies = log_in(closed, "operator")
    other, _ = log_in(closed, "admin")
    assert closed.post("/api/v1/queues/low/resume", cookies=cookies).error == "Forbidden"
    assert closed.post("/api/v1/queues/low/resume", cookies=cookies, X_CSRF_Token=other).error == "Forbidden"
    assert closed.post("/api/v1/queues/low/resume", cookies=cookies, X_CSRF_Token=csrf).status == 200
    for given in ({}, {"csrf": ""}, {"csrf": other}):
        assert closed.post("/actions/resume", form={"queue": "low", **given}, cookies=cookies).status == 403


def test_a_live_connection_is_refused_to_who_is_not_known(closed: Web):
    for token, expected in ((None, (401, "Unauthenticated")), ("hw_none", (401, "Unauthenticated"))):
        with pytest.raises(InvalidStatus) as refused, closed.live(token=token):
            pass
        assert answer_of(refused.value) == expected


def test_a_live_connection_ends_when_its_token_is_revoked(serve: Servers, database: str):
    made = make_tokens(database)
    web = serve("--database", database)
    with web.live(token=made["viewer"]) as socket:
        assert "full" in news(socket)
        with connect(database) as store:
            tokens.revoke(store, made["viewer"].split("_")[1], by="test")
        with pytest.raises(ConnectionClosedError):
            until_closed(socket)
        assert socket.close_code == 4401


# ---- every answer ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/healthz", "/login", "/api/v1/jobs", "/nothing", "/api/v1/openapi.json"])
def test_every_answer_forbids_what_a_page_of_ours_never_does(closed: Web, path: str):
    headers = closed.ask(path, token="viewer").headers
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "same-origin"
    assert headers["Cache-Control"] in ("no-store", "private, no-cache")


def test_a_payload_is_shown_masked_and_only_to_who_may_see_it(closed: Web):
    assert closed.ask("/api/v1/jobs/ads/items/44?payload=true", token="viewer").error == "Forbidden"
    shown = closed.ask("/api/v1/jobs/ads/items/44?payload=true", token="operator")
    assert shown.json["item"]["payload"] == {"sku": "sku-44", "api_token": "***"}
    assert "payload" not in closed.ask("/api/v1/jobs/ads/items/44", token="operator").json["item"]
    assert closed.ask("/api/v1/jobs/ads/dead/letters?payload=true", token="operator").error == "Forbidden"
    letters = closed.ask("/api/v1/jobs/ads/dead/letters?payload=true", token="admin").json["letters"]
    assert letters[0]["payload"]["api_token"] == "hunter2-hunter2"


def test_messages_and_payloads_of_states_are_masked_by_role(fresh: Web, database: str):
    store, _ = open_store(database, "leaky", 1)
    with Manager("leaky", 0, 1, store) as manager:
        manager.set_state(
            "ingest", status=5, message="password=hunter2-hunter2", payload={"api_token": "hunter2-hunter2", "rows": 3}
        )
    seen = {role: fresh.ask("/api/v1/states/leaky", token=role) for role in ("viewer", "operator", "admin")}
    for role in ("viewer", "operator"):
        assert "hunter2" not in seen[role].text
        assert "hunter2" not in fresh.ask("/states/leaky", token=role).text
        with fresh.live(token=role, states="leaky") as socket:
            sent = news(socket)
            while not (sent.get("full") or sent["delta"]).get("states"):
                sent = news(socket)
            assert "hunter2" not in json.dumps(sent)
    [viewers], [operators] = seen["viewer"].json["states"], seen["operator"].json["states"]
    assert (viewers["payload"], viewers["message"]) == (None, "password=***")
    assert operators["payload"]["rows"] == 3
    assert operators["payload"]["api_token"] == "***"
    assert seen["admin"].json["states"][0]["payload"]["api_token"] == "hunter2-hunter2"


@pytest.mark.parametrize(("back", "there"), [("/jobs", "/me"), ("/", "/me"), ("/tasks/t-anna", "/tasks/t-anna")])
def test_a_user_of_an_application_lands_on_a_page_of_theirs_after_the_login(closed: Web, back: str, there: str):
    csrf, cookies = visit(closed)
    form = {"csrf": csrf, "token": closed.tokens["user"], "next": back}
    answer = closed.post("/login", form=form, cookies=cookies)
    assert answer.headers["Location"] == there
    page = closed.ask(there, cookies=cookies | answer.cookies)
    assert page.status == 200
    assert 'action="/logout"' in page.text
    assert 'action="/logout"' not in closed.ask("/jobs", token="viewer").text  # a token has no session to end


def test_pages_are_compressed_but_not_for_other_sites_and_api_answers_are_exact(closed: Web):
    encodings = {
        site: closed.ask("/jobs", token="viewer", Accept_Encoding="gzip", Sec_Fetch_Mode="navigate", **site_of(site))
        for site in ("", "same-origin", "none", "cross-site", "same-site")
    }
    packed = {site: answer.headers["Content-Encoding"] for site, answer in encodings.items()}
    assert packed == {"": "gzip", "same-origin": "gzip", "none": "gzip", "cross-site": None, "same-site": None}
    assert b"<h1>Jobs" in gzip.decompress(encodings[""].body)
    answer = closed.ask("/api/v1/jobs", token="viewer", Accept_Encoding="gzip")
    assert (answer.headers["Content-Encoding"], bool(answer.headers["ETag"])) == (None, True)


def site_of(site: str) -> dict[str, Any]:
    return {"Sec_Fetch_Site": site} if site else {}
