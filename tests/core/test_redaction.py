"""What is hidden, what is left alone, and what that costs."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest

from headway import telemetry
from headway.telemetry import names_a_secret, redact

HIDDEN = [
    # in an address
    ("redis://:hunter2secret@h:6379/0", "redis://:***@h:6379/0"),
    ("postgresql://ann:hunter2@db/x", "postgresql://ann:***@db/x"),
    ("cannot reach postgresql://ann:p@hunter@db/x today", "cannot reach postgresql://ann:***@db/x today"),
    ("postgresql://ann:p/hunter:s@db/x", "postgresql://ann:***@db/x"),
    ("amqp+ssl://ann:hunter2@h", "amqp+ssl://ann:***@h"),
    ("redis://:#hunter#@h/1", "redis://:***@h/1"),
    ("redis://:/hunter/@h/1", "redis://:***@h/1"),
    ("redis://:@hunter@@h/1", "redis://:***@h/1"),
    ("redis://::hunter:@h/1", "redis://:***@h/1"),
    ("redis://:%23hunter%@h/1", "redis://:***@h/1"),
    ("redis://ann:123/hunter@h/1", "redis://ann:***@h/1"),
    ("postgresql://ann:5432#hunter@h/1", "postgresql://ann:***@h/1"),
    ("postgresql://ann@corp.example:hunter2@h/1", "postgresql://ann@corp.example:***@h/1"),
    ("redis://a:hunter1@h1,redis://b:hunter2@h2", "redis://a:***@h1,redis://b:***@h2"),
    ("https://" + "hunter2hunter2hunter2hunter2@sentry.example/3", "https://***@sentry.example/3"),
    (f"redis://:{'hunter' * 500}@h/1", "redis://:***@h/1"),
    # in the path or the query of an address
    ("https://hooks.slack.com/services/T0HUNTER2/B0HUNTER2/hunter2hunter2", "https://hooks.slack.com/services/***/***/***"),
    ("POST https://discord.com/api/webhooks/123456789/hunter2-Hunter_2: 404",
     "POST https://discord.com/api/webhooks/123456789/***: 404"),
    ("https://x.webhook.office.com/webhookb2/hunter2-0000@1111/IncomingWebhook/hunter2hunter2/1",
     "https://x.webhook.office.com/webhookb2/***/IncomingWebhook/***/1"),
    ("https://api.telegram.org/bot12345678:AAhunter2hunter2hunter2hunter2hunter2/sendMessage",
     "https://api.telegram.org/***/sendMessage"),
    ("https://chat.example/hooks/hunter2hunter2hunter2hunter2", "https://chat.example/hooks/***"),
    ("https://maker.ifttt.com/trigger/x/with/key/hunter2HUNTER2", "https://maker.ifttt.com/trigger/x/with/key/***"),
    ("https://s.example/c?sv=2024&sig=hunter2%2B&se=3", "https://s.example/c?sv=2024&sig=***&se=3"),
    ("?token=hunter2&page=4", "?token=***&page=4"),
    ("&X-Amz-Signature=hunter2&b=1", "&X-Amz-Signature=***&b=1"),
    ("https://maps.example/x?key=hunter2hunter2hunter2&q=1", "https://maps.example/x?key=***&q=1"),
    ("body: user=ann%26password%3Dhunter2", "body: user=ann%26password%3D***"),
    # by name
    ("password=hunter2", "password=***"),
    ("password=must token=expired", "password=*** token=***"),
    ("PASSWORD: 'two hunters'", "PASSWORD: ***"),
    ("{'db_password': 'hunter2', 'a': 1}", "{'db_password': ***, 'a': 1}"),
    ('{"api_key":"hunter2"}', '{"api_key":***}'),
    ('{"password":"a\\"hunter2\\"b", "c": 1}', '{"password":***, "c": 1}'),
    ('{"body": "{\\"password\\": \\"hunter two\\"}"}', '{"body": "{\\"password\\": ***}"}'),
    ("SECRET_KEY = hunter2", "SECRET_KEY = ***"),
    ("aws_secret_access_key=hunter2", "aws_secret_access_key=***"),
    ("PGPASSWORD=hunter2 psql", "PGPASSWORD=*** psql"),
    ("password=a,hunter;two&three)four next", "password=*** next"),
    ("connect(password=hunter2,user=ann)", "connect(password=***,user=ann)"),
    ("Server=db;Password=hunter2;Timeout=3", "Server=db;Password=***;Timeout=3"),
    ("password=b'hunter two'", "password=***"),
    ('password="never closed hunter', "password=***"),
    ("password2=hunter2 token_1=hunter2", "password2=*** token_1=***"),
    ("config['password'] = 'hunter2'", "config['password'] = ***"),
    ("otp=hunter2 and totp: 123456hunter", "otp=*** and totp: ***"),
    ("<ns:password>hunter two</ns:password>", "<ns:password>***</ns:password>"),
    ("X-Auth-Token: hunter2", "X-Auth-Token: ***"),
    ("password:\n  hunter2\nnext line", "password:\n  ***\nnext line"),
    ("[('user', 'ann'), ('password', 'hunter two')]", "[('user', ***), ('password', ***)]"),
    ("password=:hunter2 token=$hunter2 secret=<hunter2> auth=?hunter", "password=*** token=*** secret=*** auth=***"),
    ("if password == 'hunter2':", "if password == ***:"),
    ("assert token != 'hunter two'", "assert token != ***"),
    # in a command
    ("psql --password hunter -h db", "psql --password *** -h db"),
    ("tool --api-key 'hunter two' --verbose", "tool --api-key *** --verbose"),
    ("['tool', '--token', 'hunter two', '-v']", "['tool', '--token', ***, '-v']"),
    ("curl -s -u ann:hunter2 https://x.example", "curl -s -u ann:*** https://x.example"),
    ("sshpass -p hunter2 ssh h", "sshpass -p *** ssh h"),
    ("mysql -u ann -phunter2 db", "mysql -u ann -p*** db"),
    ("redis-cli -h x -a hunter2 ping", "redis-cli -h x -a *** ping"),
    # as people say it
    ("passwd 'hunter' is wrong", "passwd *** is wrong"),
    ("password hunter for ann was refused", "password *** for ann was refused"),
    ("the password is hunter2.", "the password is ***"),
    ("invalid token hunter2hunter2", "invalid token ***"),
    ("your otp 482911hunter expired", "your otp *** expired"),
    ("api key hunter2hunter2 was revoked", "api key *** was revoked"),
    ("login failed: ('ann', 'hunter2')", "login failed: ('ann', ***)"),
    ("auth=('ann', 'hunter two')", "auth=***"),
    ("AuthError: ('ann', 'hunter')", "AuthError: ('ann', ***)"),
    ("('admin', 'hunter')", "('admin', ***)"),
    ("HTTPBasicAuth('ann', 'hunter2')", "HTTPBasicAuth('ann', ***)"),
    # headers
    ("Authorization: Bearer hunter2hunter2", "Authorization: Bearer ***"),
    ("authorization: basic aHVudGVyMg==", "authorization: basic ***"),
    ("Authorization: Token hunter2", "Authorization: Token ***"),
    ("Authorization: hunter2hunter2", "Authorization: ***"),
    ("{'Authorization': 'hunter2hunter2', 'Accept': '*/*'}", "{'Authorization': '***', 'Accept': '*/*'}"),
    ("FERNET_KEY=hunter2", "FERNET_KEY=***"),
    ("secret_key_base: hunter2x", "secret_key_base: ***"),
    ("{'Authorization': 'Basic aHVudGVyMg=='}", "{'Authorization': 'Basic ***'}"),
    ('Authorization: Digest username="ann", response="hunter2"', "Authorization: Digest ***"),
    ("Set-Cookie: session=hunter2; Path=/", "Set-Cookie: ***"),
    ('Cookie: a="hunter"; b=hunter2\nHost: x', "Cookie: ***\nHost: x"),
    # by shape
    ("-----BEGIN RSA PRIVATE KEY-----\nhunter2\nabc\n-----END RSA PRIVATE KEY-----\nrest", "***\nrest"),
    ("-----BEGIN PRIVATE KEY-----\nhunter2 cut short", "***"),
    ("cut: hunter2\nhunter2\n-----END OPENSSH PRIVATE KEY-----\nrest", "cut:***\nrest"),
    ("sk-proj-hunter2hunter2hunter2", "***"),
    ("sk_live_hunter2hunter2", "***"),
    ("ghp_hunter2hunter2hunter2hunter2", "***"),
    ("glpat-hunter2hunter2hunter2", "***"),
    ("xoxb-hunter2-hunter2", "***"),
    ("AKIAHUNTER2HUNTER2AB", "***"),
    ("AIzahunter2hunter2hunter2hunter2hunter2", "***"),
    ("SG.hunter2hunter2hunter2.hunter2hunter2hunter2", "***"),
    ("eyJhunter2hunter2.eyJhunter2hunter2.hunter2", "***"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "shown"), HIDDEN, ids=range(len(HIDDEN)))
def test_a_secret_is_hidden_and_the_rest_can_still_be_read(text: str, shown: str):
    assert redact(text) == shown
    assert "hunter" not in redact(f"before {text} after").lower()
    assert redact(redact(text)) == redact(text), "what was hidden stays as it is"


HARMLESS = [
    "Authorization: required",
    # addresses
    "http://localhost:8000/users/me@example",
    "http://h:80?x=a@b",
    "http://h:80/a?mail=x@y.example",
    "https://x.example/a:b@c",
    "GET https://store.internal/docs/inv-00421.pdf timed out",
    "postgresql://db:5432/x?application_name=a@b",
    "mail to ann@corp.example at 12:30",
    "redis://127.0.0.1:6379/1 and redis://h1:6379,redis://h2:6379",
    "https://git.example/hooks/pre-commit and https://x.example/webhooks/deliveries/42",
    "ssh://git@example.org:22/repo.git",
    # names that are none, and values that say there is none
    "max_tokens=4096 passed=3 author=Jane",
    "monkey: banana, keyboard=qwerty, primary_key=17, key: value",
    "bypass=true compass: north trespass=no",
    "password=None token=null secret='' auth=False",
    "tests pass: 3 fail: 0",
    "token: 17, pin: 13",
    "PWD=/home/ann credentials=/etc/app/credentials.json",
    "signature: (self, x: int) -> str",
    "KeyError: 'password'",
    "missing 1 required positional argument: 'token'",
    "KeyError: 'sku'",
    "time=12:30, a=b",
    "config: debug, design=3, signal=9, spinner: on",
    'violates unique constraint "pk_user_profiles_account_id"',
    "relation pk_orders_2024_archive_by_customer does not exist",
    "headway run --no-last-pass jobs:f --last-pass jobs:f -w 2",
    "{'last_pass': True, 'first_pass': 'fast'} last_pass=no",
    "UPDATE t SET token = ?, password = %s WHERE secret = %(secret)s AND token = $1 AND auth = :auth",
    "record(token=token, password=self.password, auth=request.auth)",
    "password=... token: <token> secret={secret}",
    # prose
    "each carries a fencing token: whoever lost the lease loses",
    "without secrets: what it says is shown",
    "the token expired at 12:00",
    "Password: must be at least 8 characters",
    'password authentication failed for user "ann"',
    "password reset for ann, password change for bob",
    "password required for login",
    "access token: expired",
    "invalid token: unexpected character '<'",
    "Unexpected token '<' in JSON at position 0",
    "unexpected token 17 at line 3",
    "token 5 of 12 was skipped",
    "the --password is required; --token was not given",
    "Basic authentication required",
    "a basic configuration of the bearer",
    "bearer authentication is not supported",
    "the cookie: none was sent",
    "wrote 3 of 5 files in 12 s",
    "password hashing uses argon2id, tokens are signed by RS256",
    "oauth2 endpoint answered 404",
    "the secret store is sealed",
    "author ('Ann', 'Bob') and authors: ('Ann', 'Bob')",
    "('GET', '/users/3')",
    "('127.0.0.1', 5432)",
    "[Errno 111] Connection refused",
    "code 1234 at line 12",
    "pin 13 of the header",
    "UNIQUE constraint failed: users.email",
    "disk-usage-of-the-task-queue is 93 %",
    "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----",
    "commit deadbeef12345678deadbeef12345678deadbeef",
    '  File "/srv/app/jobs.py", line 12, in make_ad\n    return render(product)\n',
    "日本語のエラー: 値が不正です 🔴",
    "a\nb\tc\r\n \u2028 \0 \ud800",
    "",
]  # fmt: skip


@pytest.mark.parametrize("text", HARMLESS, ids=range(len(HARMLESS)))
def test_texts_without_secrets_are_unchanged(text: str):
    assert redact(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "a-" * 100_000,
        "a." * 100_000,
        "token" * 50_000,
        "password " * 20_000,
        "password:" * 20_000,
        "password=," * 20_000,
        "password=a,b" * 20_000,
        'password="' * 20_000,
        'password=\\"' * 20_000,
        "password=(" * 20_000,
        "('password', '" * 15_000,
        "('user', '" * 20_000,
        "auth(" * 40_000,
        "log in " * 30_000,
        "--" * 100_000,
        "--token " * 30_000,
        "<" * 200_000,
        "<token>" * 30_000,
        "://" * 50_000,
        "a://b:" * 30_000,
        "a://b:@" * 30_000,
        "a://hook/" * 20_000,
        ",a://" * 40_000,
        "eyJ-" * 50_000,
        "eyJaaaaaaaa." * 20_000,
        "-----BEGIN " * 20_000,
        "-----BEGIN PRIVATE KEY-----" * 8_000,
        "-----END PRIVATE KEY-----" * 8_000,
        '"\\' * 100_000,
        "bearer " * 30_000,
        "cookie: authorization: " * 10_000,
        "cookie: " * 20_000,
        "mysql curl redis-cli " * 10_000,
        "sk-" * 60_000,
        " " * 200_000,
        "password" + " " * 200_000,
    ],
    ids=range(36),
)
def test_redacting_a_long_hostile_text_takes_no_quadratic_time(text: str):
    """200 KB. Four times the text takes about four times as long; the square would take sixteen times."""

    def seconds(what: str) -> float:
        began = time.process_time()
        redact(what)
        return time.process_time() - began

    quarter, whole = min(seconds(text[: len(text) // 4]) for _ in range(3)), min(seconds(text) for _ in range(2))
    assert whole < 0.05 or whole < 9 * quarter


def test_a_text_of_any_length_costs_no_more_than_a_short_one_when_little_of_it_is_kept():
    filler = "row 17: the token of ann was password=x and more " * 200_000

    def seconds(text: str) -> float:
        began = time.process_time()
        assert len(redact(text, 300)) <= 300
        return time.process_time() - began

    short, long = (min(seconds(text) for _ in range(3)) for text in (filler[:20_000], filler))
    assert long < 5 * short + 0.01


@pytest.mark.parametrize(
    "secret", [text for text, shown in HIDDEN if "hunters" not in text], ids=lambda text: text[:12]
)
def test_no_part_of_a_secret_that_lies_across_the_cut_is_shown(secret: str):
    limit = 120
    for position in range(0, 2 * limit, 11):
        for text in (
            f"{'x ' * (position // 2)}{secret} {'y ' * 400}",
            f"{'x ' * 400}{secret} {'y ' * (position // 2)}",
        ):
            shown = redact(text, limit)
            assert len(shown) <= limit
            assert "hunt" not in shown.lower()


def test_a_secret_longer_than_anything_leaks_no_end_of_it():
    for text in (
        "password='" + "hunter" * 10_000,
        "-----BEGIN PRIVATE KEY-----\n" + "hunter2\n" * 5_000,
        "eyJ" + "hunter" * 9_000 + ".x",
    ):
        assert "hunter" not in redact(f"{text} and more", 300)


def test_a_long_text_keeps_its_beginning_its_length_and_its_end():
    text = "it began " + "x " * 5_000 + "and it ended"
    shown = redact(text, 200)
    assert shown.startswith("it began x x")
    assert shown.endswith("x and it ended")
    assert f" ... ({len(text)} characters) ... " in shown
    assert len(redact("x" * 10_000, 200)) <= 200
    assert len(redact("x" * 10_000, 5)) <= 5
    assert redact("short", 200) == "short"


@pytest.mark.parametrize(
    "place",
    [
        "redis://:{}@h:6379/1",
        "cannot reach postgresql://ann:{}@db.example:5432/x?sslmode=require: refused",
        "user=ann password={} host=x",
        "{{'password': '{}', 'a': 1}}",
        '{{"token":"{}","a":1}}',
        "tool --password {} -x",
        "passwd '{}' is wrong",
        "[('password', '{}')]",
        "X-Api-Key: {}",
    ],
)
def test_a_password_may_hold_any_sign_anywhere(place: str):
    chance = random.Random(7)
    for _ in range(400):
        letters = chance.choices("abcdefghXYZ0123456789", k=chance.randint(4, 12)) + chance.choices(
            "#/@%:!$+*~^|.-", k=2
        )
        chance.shuffle(letters)
        cut = chance.randint(0, len(letters))
        text = place.format("".join([*letters[:cut], "q7hunter", *letters[cut:]]))
        assert "hunter" not in redact(text), text


def test_a_subclass_of_str_is_redacted_by_its_content():
    class Text(str):
        __slots__ = ()

        def lower(self) -> str:
            raise RuntimeError

        def __len__(self) -> int:
            raise RuntimeError

    assert type(redact(Text("password=hunter2"), 40)) is str
    assert redact(Text("password=hunter2"), 40) == "password=***"


def test_any_mixture_of_pieces_is_redacted_without_an_error_and_stays_so():
    chance = random.Random(3)
    pieces = [piece for text, _ in HIDDEN for piece in (text[: len(text) // 2], text[len(text) // 2 :])] + HARMLESS
    for _ in range(500):
        text = "".join(chance.choices(pieces, k=6))
        for limit in (None, 0, 7, 60):
            shown = redact(text, limit)
            assert limit is None or len(shown) <= limit


@pytest.fixture
def _fresh_secrets() -> Iterator[None]:
    telemetry.forget_secrets()
    yield
    telemetry.forget_secrets()


@pytest.mark.usefixtures("_fresh_secrets")
def test_values_of_secret_variables_are_hidden_wherever_they_appear(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("BILLING_API_TOKEN", "plain-looking-words")
    monkeypatch.setenv("PGPASSWORD", "correct horse")
    monkeypatch.setenv("STRIPE_KEY", "battery\nstaple")
    monkeypatch.setenv("GIT_AUTHOR_NAME", "Jane Roe-Author")
    monkeypatch.setenv("SHORT_TOKEN", "abc")
    shown = redact("GET /plain-looking-words by Jane Roe-Author: abc, correct horse, battery\nstaple, correct%20horse")
    assert shown == "GET /*** by Jane Roe-Author: abc, ***, ***, ***"
    monkeypatch.setenv("LATE_SECRET", "learned-later")
    assert "learned-later" in redact("learned-later")
    telemetry.forget_secrets()
    assert redact("learned-later") == "***"


@pytest.mark.usefixtures("_fresh_secrets")
def test_the_password_of_an_address_in_the_environment_is_hidden_also_on_its_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HEADWAY_DATABASE", "postgresql://ann:staple%2Fhorse@db/x")
    assert redact("cannot use staple/horse or staple%2Fhorse at db") == "cannot use *** or *** at db"


@pytest.mark.parametrize(
    "name",
    ["password", "db_password", "PGPASSWORD", "apiKey", "API-KEY", "clientSecret", "token", "accessToken", "auth",
     "ENCRYPTION_KEY", "stripe_key", "credentials", "password2", "passphrase", "X-Signature", "otp", "DB_PASS"],
)  # fmt: skip
def test_a_name_that_says_secret_is_known(name: str):
    assert names_a_secret(name)


@pytest.mark.parametrize(
    "name",
    ["author", "tokens", "max_tokens", "passed", "passenger", "key", "keyboard", "monkey", "config", "signal", "bypass",
     "spinner", "laptop", "last_pass", "first-pass"],
)  # fmt: skip
def test_a_name_that_resembles_a_secret_is_not_one(name: str):
    assert not names_a_secret(name)
