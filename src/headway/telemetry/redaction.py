"""Redacts passwords, tokens and keys in text that is stored, logged or shown.

A secret is recognised by its name (``password=...``), its format (``ghp_...``), its position (``scheme://user:HERE@host``),
or as the value of an environment variable with such a name. Each rule returns the spans of the original text that are
secret; `redact` merges the spans and replaces them. So the rules do not depend on each other. A long text is cut before it
is redacted: the rules read far enough beyond the cut to recognise a secret that lies across it.

The time is linear in the length of the text: no pattern begins with a repetition, repetitions are possessive or bounded,
and no rule reads its match again.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple
from urllib.parse import quote, unquote

MASK = "***"
#: Characters that the rules read beyond a cut: more than any common key or token has.
_SIGHT = 8192

_SENSITIVE = (
    r"(?:pass(?:words?|wd|phrase|code)|(?<!by)(?<!com)(?<!tres)(?<!over)(?<!sur)"
    # excludes a pass over data: --last-pass, first_pass
    r"(?<!last[-_])(?<!first[-_])(?<!next[-_])(?<!final[-_])(?<!one[-_])(?<!two[-_])(?<!multi[-_])pass"
    r"|pwd|secrets?|token|credentials?|auth"
    r"|signature|(?<![a-z])(?:t?otp|sig|cvv|cvc|pin)"
    r"|(?:api|access|private|secret|client|master|signing|encryption|account|fernet)[-_ ]?key(?:_base)?)"
)

# ---- prose about passwords ------------------------------------------------------------------------------------------

#: Words that, after "password" or "token:", begin a sentence and are not a secret.
_PROSE = frozenset(
    """
    a absent accepted access again all already also an and another any are argument arguments as at attempt attempts auth
    authenticated authentication available be because been before being bool bucket buckets budget but by bytes cache
    cached can cannot change changed changes check checked checks cookie cookies could count counts created decoded
    decoding decrypted decryption deleted denied did do does each empty encoded encoding encrypted encryption endpoint
    endpoints entered entry error errors every exception exceptions exchange exist exists expected expired expires
    failed fails failure field fields file files first for found from generated given got grant grants had has hash hashed
    hashes hashing have header headers here hidden id ids if in incorrect index info information int into invalid is
    issued last length less lifetime limit limits list lists login logins long lookup manager match matches may might
    mismatch mismatched missing more most must name names needed new next no none not null of old on only option optional
    options or other pair pairs param parameter per policy position present previous prompt prompts protected protection
    provided provider received redacted refresh refreshed refused rejected removed request requests required reset resets
    response reused revoked ring rotate rotated rotation salt same scope scopes server service set shall short should
    since some specified storage store stored str stream streams string strong supplied than that the then there these
    this those to too ttl type types unavailable unexpected unknown unset until update updated updating usage used valid
    validated validation value values verification verified verify via was weak were when while will with without would
    wrong yes yet
    """.split()  # noqa: SIM905 - a list of two hundred strings is less readable
)
#: Technical terms with digits that often follow "password" or "token".
_TERMS = re.compile(
    r"(?:utf-?\d+|base-?\d+|sha-?\d+|md5|argon2\w*|bcrypt\d?|pbkdf2\w*|oauth-?[\d.]+|x509|[hre]s\d{3}|ed25519|v?\d[\d.]*)",
    re.IGNORECASE,
)
_NOTHING = frozenset(["none", "null", "nil", "true", "false", "yes", "no", "undefined", '""', "''", MASK])
#: Placeholders for a value: an SQL parameter, dots, a word in angle brackets.
_STAND_IN = re.compile(r"\?|%s|%\([a-z_]+\)s|\$\d\d?|\.{2,}\W*|<[a-z_ -]+>|\{[a-z_]*\}?|\*+\W*")
_EDGES = "'\"`.,;:!?()[]{}<>"


def _is_prose(value: str) -> bool:
    words = value.strip(_EDGES).lower().split()
    return not words or words[0] in _PROSE or words[0] in _NOTHING


def _begins_a_sentence(found: re.Match[str]) -> bool:
    """Return whether the value is a plain word and followed by another one, as in ``token: whoever has it``."""
    value, after = found["secret"], found.string[found.end("secret") : found.end("secret") + 2]
    return value.replace("'", "").isalpha() and value.islower() and after[:1] == " " and after[1:].isalpha()


def _looks_made_up(value: str, least: int) -> bool:
    """Return whether a word resembles a key: letters with digits, mixed case, or punctuation inside."""
    word = value.strip(_EDGES)
    if len(word) < least or _TERMS.fullmatch(word) or word[0] in "/~<" or "://" in word:
        return False
    digits = any(character.isdigit() for character in word)
    letters = any(character.isalpha() for character in word)
    inner = word[1:]
    mixed = word.isalpha() and inner != inner.lower() and inner != inner.upper()
    return (digits and letters) or (mixed and len(word) >= 16) or any(sign in word for sign in "!@#$%^&*+=")


def _is_named_secret(found: re.Match[str]) -> bool:
    """Decide on ``name = value``. Not secret: an empty value, a sentence after a colon, a count, a path."""
    name, separator, value = found["name"].lower(), found["separator"], found["secret"]
    bare = value.strip("\\'\"").lower()
    if (
        bare in _NOTHING
        or not bare
        or _STAND_IN.fullmatch(bare)
        or bare in (name, f":{name}")
        or bare.endswith(f".{name}")
    ):
        return False
    if separator == ":" and value[0] not in "'\"\\" and _is_prose(value):
        return False
    if separator == ":" and not name.startswith(("pass", "pwd")) and _begins_a_sentence(found):
        return False
    if name in ("pass", "token", "auth", "secrets", "credentials", "pin", "sig") and bare.isdigit() and len(bare) < 4:
        return False
    if name in ("pwd", "credentials", "auth") and bare[0] in "/~":
        return False
    return not (name == "signature" and bare[0] in "(<")


def _is_stated_secret(found: re.Match[str]) -> bool:
    """Decide on ``password hunter2``, ``token abc123def``: by quotes, by resemblance to a key, or by the next word."""
    name, value = found["name"].lower(), found["secret"]
    a_password = name.startswith(("pass", "pwd"))
    if (
        _is_prose(value)
        or (value[0] == "-" and not value.strip("-"))
        or _is_short_number(value, 4 if a_password else 6)
    ):
        return False
    if a_password:
        return value[0] in "'\"" or bool(found["for"]) or _looks_made_up(value, 5) or value.strip(_EDGES).isdigit()
    return _looks_made_up(value, 8) or (len(value) >= 8 and value.strip(_EDGES).isdigit())


def _is_short_number(value: str, digits: int) -> bool:
    """Return whether the value is a number too short to be a secret, such as a count."""
    word = value.strip(_EDGES)
    return word.isdigit() and len(word) < digits


def _is_option(found: re.Match[str]) -> bool:
    return found["secret"][0] != "-" and not _is_prose(found["secret"])


def _is_credential(found: re.Match[str]) -> bool:
    """Decide on the word after ``Bearer`` or ``Basic``, which may occur in prose, by its length and characters."""
    value = found["secret"]
    return value.lower().strip(_EDGES) not in _PROSE and (
        len(value) >= 24 or value.endswith("=") or _looks_made_up(value, 6)
    )


def _always(_: re.Match[str]) -> bool:
    return True


# ---- rules -----------------------------------------------------------------------------------------------------------

_QUOTED = r"""(?:[bruf]{0,2}(?:"(?:\\.|[^"\\\n])*+"?|'(?:\\.|[^'\\\n])*+'?))"""
# JSON inside JSON: the closing quote has as many backslashes as the opening one.
_ESCAPED = r"""(?:(?P<q>\\{1,8}["'])(?:(?!(?<!\\)(?P=q)).){0,4096}+(?:(?P=q))?)"""
# Text after a delimiter without a space still belongs to the secret, unless it is another name=value.
_BARE = (
    r"""(?:(?:[^\s,;&)}\]]++|(?=[,;&)}\]]))(?:[,;&)}\]]++(?!['"]?[a-z_][\w.-]{0,40}+['"]?\s*+[=:])"""
    r"""(?=[^\s,;&)}\]\w]{0,5}\w)[^\s,;&)}\]]++)*+)"""
)
_GROUPED = r"""(?:\([^()\n]{0,500}\)?|\[[^\[\]\n]{0,500}\]?)"""


Decision = Callable[[re.Match[str]], bool]


class _Rule(NamedTuple):
    """A pattern with the group ``secret``. ``hints``: the text must contain one of them, or the pattern is not tried."""

    hints: tuple[str, ...]
    pattern: re.Pattern[str]
    decide: Decision


def _rule(hints: str, pattern: str, decide: Decision = _always, flags: int = re.IGNORECASE) -> _Rule:
    return _Rule(tuple(hints.split()), re.compile(pattern, flags), decide)


_NAMES = "pass pwd secret token credential auth signature otp sig cvv cvc pin key"


def _named_rules() -> tuple[_Rule, ...]:
    """Return the rules for values with a telling name."""
    return (
        # password=..., "api_key": "...", X-Auth-Token: ..., ['secret'] = ..., also as JSON inside JSON
        _rule(
            _NAMES,
            rf"""(?P<name>{_SENSITIVE})(?:_?\d{{1,3}})?\b\\*+['"]?\]?[ \t]*+(?P<separator>=>|[:=!]=|[:=]|%3[ad])\s*+"""
            rf"""(?!(?:bearer|basic|digest)\s)(?P<secret>{_ESCAPED}|{_QUOTED}|{_GROUPED}|{_BARE})""",
            _is_named_secret,
        ),
        # the pair of a name and its value: ('password', 'hunter2')
        _rule(
            _NAMES,
            rf"""\(\s*+\\*+['"][\w-]{{0,40}}?{_SENSITIVE}\\*+['"],\s*+(?P<secret>{_QUOTED}|\\+'[^'\\]*+\\+')\s*+\)""",
        ),
        # <password>hunter2</password>
        _rule(_NAMES, rf"<(?:\w{{1,20}}:)?[\w-]{{0,40}}?{_SENSITIVE}>(?P<secret>[^<\n]{{1,2000}})<"),
        # --password X, --api-key=X, ['--token', 'X']
        _rule(
            "--",
            rf"""(?<![\w-])--?(?!-)[\w-]{{0,40}}?{_SENSITIVE}(?:\\*+['"],?)?[ \t]++"""
            rf"""(?P<secret>{_QUOTED}|[^\s'"]*[^\s'",.;:)])""",
            _is_option,
        ),
    )


def _command_rules() -> tuple[_Rule, ...]:
    """Return the rules for options of well-known commands."""
    return (
        _rule("sshpass", r"\bsshpass\s+-p\s*(?P<secret>\S+)"),
        _rule("redis-cli", r"\bredis-cli\b[^\n]{0,200}?\s-a\s+(?P<secret>\S+)"),
        _rule("mysql", r"\bmysql(?:dump|admin)?\b[^\n]{0,200}?\s-p(?P<secret>[^\s-]\S*)", flags=0),
        _rule("curl", r"\bcurl\b[^\n]{0,200}?\s(?:-u|--user)[\s=]+[^\s:]{1,100}:(?P<secret>\S+)"),
    )


def _prose_rules() -> tuple[_Rule, ...]:
    """Return the rules for secrets in sentences and in calls."""
    return (
        # password hunter2, passwd 'x', password x for, token abc123def
        _rule(
            "pass pwd token secret key otp",
            r"""\b(?P<name>pass(?:word|wd|phrase|code)|pwd|token|secret|(?:api|access|secret)[ _-]key|otp)\b['"]?[ \t]++"""
            rf"""(?:(?:is|was)[ \t]++)?(?P<secret>{_QUOTED}|[^\s'"]++)(?P<for>[ \t]+for\b)?""",
            _is_stated_secret,
        ),
        _rule(
            "otp pin code",
            r"\b(?:t?otp|pin|passcode|(?:verification|security|one-time) code)(?:\s+(?:is|was))?\s+(?P<secret>\d{4,8})\b",
        ),
        # Two strings in parentheses, after a word about signing in or if the first is a well-known user.
        _rule(
            "auth log credential",
            rf"""(?:\b\w{{0,20}}?auth(?!or)|\blog(?:ged|ging)? ?in\b|\bcredential)[^\n()]{{0,60}}\(\s*+{_QUOTED},\s*+"""
            rf"""(?P<secret>{_QUOTED})\s*+[,)]""",
        ),
        _rule(
            "('user (\"user ('admin (\"admin ('root (\"root ('guest (\"guest ('postgres ('default",
            rf"""\(['"](?:user(?:name)?|admin(?:istrator)?|root|guest|postgres|default)['"],\s*+(?P<secret>{_QUOTED})\s*+\)""",
        ),
    )


def _http_rules() -> tuple[_Rule, ...]:
    """Return the rules for HTTP headers and query parameters."""
    return (
        _rule("bearer basic", r"\b(?:bearer|basic)\s+(?P<secret>[A-Za-z0-9+/=._~-]{6,8192}+)", _is_credential),
        _rule(
            "authorization",
            r"""\b(?:proxy-)?authorization\\*+['"]?\s*+[:=]\s*+\\*+['"]?\w{1,32}[ \t]++(?P<secret>[^\s'"\\]++)""",
        ),
        # Authorization: hunter2hunter2, without a scheme
        _rule(
            "authorization",
            r"""\bauthorization\\*+['"]?\s*+[:=]\s*+\\*+['"]?(?P<secret>[^\s'"\\,;]{8,8192}+)""",
            _is_credential,
        ),
        _rule("digest", r"""\bauthorization\\*+['"]?\s*+[:=]\s*+\\*+['"]?digest[ \t]++(?P<secret>[^\r\n]++)"""),
        _rule(
            "cookie",
            rf"""\b(?:set-)?cookie\\*+['"]?\s*+[:=]\s*+(?P<secret>{_ESCAPED}|{_QUOTED}|(?=[^\r\n=]{{1,200}}=)[^\r\n]++)""",
        ),
        _rule("?key= &key=", r"[?&]key=(?P<secret>[^\s&#'\"]{16,})"),
    )


def _format_rules() -> tuple[_Rule, ...]:
    """Return the rules for well-known formats of keys and tokens."""
    return (
        _rule(
            "sk- k_live k_test whsec_ ghp_ gho_ ghu_ ghs_ ghr_ github_pat glpat- xox xapp- akia asia aiza ya29. sg. npm_ pypi-"
            " hf_ hvs. _v1_ shpat_ shpss_ shpca_ key- :aa eyj",
            r"\b(?P<secret>sk-(?=[\w-]{0,40}\d)[\w-]{16,}|[srp]k_(?:live|test)_\w{10,}|whsec_\w{16,}"
            r"|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|xox[abposr]-[\w-]{10,}|xapp-[\w-]{10,}"
            r"|A(?:KIA|SIA)[A-Z0-9]{16}|AIza[\w-]{30,}|ya29\.[\w-]{16,}|SG\.[\w-]{10,}(?:\.[\w-]{6,})?"
            r"|npm_[A-Za-z0-9]{30,}|pypi-[\w-]{40,}|hf_[A-Za-z0-9]{30,}|hvs\.[\w-]{20,}|do[opr]_v1_[0-9a-f]{40,}"
            r"|shp(?:at|ss|ca)_[0-9a-f]{32}|key-[0-9a-f]{32}|\d{8,10}:AA[\w-]{30,}"
            r"|eyJ[\w-]{8,8192}+(?:\.[\w-]{4,8192}+){0,4})",
            flags=0,
        ),
    )


@lru_cache(maxsize=1)
def _rules_by_hints() -> tuple[tuple[tuple[str, ...], tuple[_Rule, ...]], ...]:
    """Return the rules in groups with equal hints. Compiled at the first use: it takes longer than a short command."""
    every = (*_named_rules(), *_command_rules(), *_prose_rules(), *_http_rules(), *_format_rules())
    return tuple((hints, tuple(rules)) for hints, rules in groupby(every, key=lambda rule: rule.hints))


# ---- addresses -------------------------------------------------------------------------------------------------------

_ADDRESS = re.compile(r"""([a-z][a-z0-9+.-]{0,30})?://([^\s'"]++)""", re.IGNORECASE)
_NEXT_ADDRESS = re.compile(r"[,;|]\s*[a-z][a-z0-9+.-]{1,30}://", re.IGNORECASE)
_WEB = frozenset(["http", "https", "ws", "wss", "ftp", "grpc", "tcp"])
_PORT = re.compile(r"\d{2,5}(?=[/?,]|$)")
_KEY_AS_USER = re.compile(r"(?=[^@]*\d)[\w-]{20,200}@")
# Hosts and paths of webhooks: knowing the path is the permission to write.
_HOOK = re.compile(r"hook|api\.telegram\.org/bot|/trigger/[^/]+/with/key/|hooks\.|/services/T", re.IGNORECASE)
_SEGMENT = re.compile(r"(?<=/)[\w:%.~@=+-]{7,}[\w~=+-]")


def _in_addresses(text: str) -> Iterator[tuple[int, int]]:
    for found in _ADDRESS.finditer(text):
        scheme, start = (found[1] or "").lower(), found.start(2)
        rest = found[2]
        # One word may contain several addresses, as in a list of servers.
        ends = [match.start() for match in _NEXT_ADDRESS.finditer(rest)]
        for begin, end in zip([0, *ends], [*ends, len(rest)], strict=True):
            piece = rest[begin:end]
            offset = 0
            if begin:
                offset = piece.index("://") + 3
                scheme = piece[1 : offset - 3].strip().lower()
            yield from _in_address(scheme, piece[offset:], start + begin + offset)


def _in_address(scheme: str, rest: str, at: int) -> Iterator[tuple[int, int]]:
    """Yield the secret spans of an address. ``rest`` is the text after ``://``, without spaces and quotes."""
    last = rest.rfind("@")
    colon = rest.find(":")
    if -1 < colon < last and "/" not in rest[:colon]:
        # A password may contain any character, so it ends at the last @. An address without one may have an @ in its path.
        port = _PORT.match(rest, colon + 1)
        a_port = (
            port is not None
            and colon > 0
            and (scheme in _WEB or rest[port.end() : port.end() + 1] in ("?", ",") or "?" in rest[port.end() : last])
        )
        if not a_port:
            yield at + colon + 1, at + last
            return
    elif last > -1 and (key := _KEY_AS_USER.match(rest)):
        yield at, at + key.end() - 1
    if _HOOK.search(rest[:_SIGHT]):
        path = rest.partition("?")[0]
        for segment in _SEGMENT.finditer(path):
            if _is_hook_key(segment[0]):
                yield at + segment.start(), at + segment.end()


def _is_hook_key(segment: str) -> bool:
    word = segment.removeprefix("bot")
    if re.fullmatch(r"[a-z]+(?:[-_.][a-z]+)*\d?|\d+", word):  # a name, a number
        return False
    digits = any(character.isdigit() for character in word)
    mixed = word != word.lower() and word != word.upper()
    return (digits and any(character.isalpha() for character in word)) or (mixed and len(word) >= 16)


# ---- private keys ----------------------------------------------------------------------------------------------------

_BEGIN = re.compile(r"-----BEGIN [A-Z0-9 ]{0,40}?PRIVATE KEY[A-Z ]{0,20}-----")
_END = re.compile(r"-----END [A-Z0-9 ]{0,40}?PRIVATE KEY[A-Z ]{0,20}-----")
_NOT_OF_A_KEY = re.compile(r"[^A-Za-z0-9+/=\s\\]")


def _private_keys(text: str) -> Iterator[tuple[int, int]]:
    at = 0
    while (end := _END.search(text, at)) or (begin := _BEGIN.search(text, at)):
        begin = _BEGIN.search(text, at, end.start() if end else len(text))
        if begin is not None:
            yield begin.start(), end.end() if end else len(text)
        elif end is not None:
            # The beginning was cut off: include all preceding text that could belong to a key.
            before = text[max(at, end.start() - _SIGHT) : end.start()]
            odd = [found.end() for found in _NOT_OF_A_KEY.finditer(before)]
            yield end.start() - len(before) + (odd[-1] if odd else 0), end.end()
        if end is None:
            return
        at = end.end()


# ---- names and values of the environment -----------------------------------------------------------------------------

# Only a digit or a separator may follow: "author", "passenger" and "tokens" are not secrets.
_SECRET_VARIABLE = re.compile(rf"{_SENSITIVE}(?![a-z])|[_-]key$", re.IGNORECASE)
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def names_a_secret(name: str) -> bool:
    """Return whether values with this name are secret: ``password``, ``API_TOKEN``, ``ENCRYPTION_KEY``."""
    return _SECRET_VARIABLE.search(_CAMEL.sub("_", name)) is not None


def _secret_values(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the values of secret variables and the passwords of addresses.

    Short values are omitted, because they would mask ordinary words.
    """
    values: set[str] = set()
    for name, value in environment.items():
        if "://" in value:
            values.update(value[start:end] for start, end in _in_addresses(value))
        elif names_a_secret(name) and value and value[0] != "/":
            values.add(value)
    known = {form for value in values for form in (value, unquote(value), quote(value, safe="")) if len(value) >= 8}
    return tuple(sorted(known, key=len, reverse=True))


_known_secrets: tuple[str, ...] | None = None


def forget_secrets() -> None:
    """Read the environment again at the next `redact`, such as after a reload of the settings."""
    global _known_secrets
    _known_secrets = None


def _known(text: str) -> Iterator[tuple[int, int]]:
    global _known_secrets
    if _known_secrets is None:
        _known_secrets = _secret_values(os.environ)
    for secret in _known_secrets:
        at = text.find(secret)
        while at > -1:
            yield at, at + len(secret)
            at = text.find(secret, at + len(secret))


# ---- the whole -------------------------------------------------------------------------------------------------------


def redact(text: str, limit: int | None = None) -> str:
    """Return ``text`` without passwords, tokens and keys.

    With a ``limit`` the result has at most that many characters: the beginning, the original length, and the end. Only the
    parts near both ends are read, so the time does not grow with the text.
    """
    text = _plain(text)
    if limit is None or len(text) <= limit:
        return _shown(text, 0, len(text))[:limit]
    note = f" ... ({len(text)} characters) ... "
    tail = max(0, limit - len(note)) // 3
    head = max(0, limit - len(note) - tail)
    beginning = _shown(text[: head + _SIGHT], 0, head)[:head]
    seen_from = max(0, len(text) - tail - _SIGHT)
    window = _open_key(text, seen_from) + text[seen_from:]
    end = len(window) - tail
    # A partial word at the cut might be part of a secret that begins before the window.
    while end < len(window) and not window[end - 1].isspace():
        end += 1
    ending = _shown(window, end, len(window))
    return (beginning + note + ending[len(ending) - min(tail, len(ending)) :])[:limit]


def _plain(text: str) -> str:
    """Return a plain `str`: a subclass may override methods."""
    return text if type(text) is str else str.__getitem__(text, slice(None))


def _open_key(text: str, at: int) -> str:
    """Return the first line of the private key that contains ``at``, or an empty string."""
    begin = text.rfind("-----BEGIN ", 0, at)
    if begin == -1 or text.find("-----END ", begin, at) > -1:
        return ""
    line = _BEGIN.match(text, begin)
    return line[0] if line else ""


def _shown(text: str, start: int, end: int) -> str:
    """Return ``text[start:end]`` with its secrets masked, which the rules find in the whole text."""
    if start >= end:
        return ""
    parts, at = [], start
    for begin, stop in _united(text):
        if stop <= start or begin >= end:
            continue
        parts += [text[at : max(at, begin)], MASK]
        at = min(stop, end)
    return "".join(parts) + text[at:end] if parts else text[start:end]


def _united(text: str) -> list[tuple[int, int]]:
    """Return the secret spans of ``text`` in order, without overlaps."""
    spans = list(_known(text))
    if "://" in text:
        spans += _in_addresses(text)
    if "-----" in text:
        spans += _private_keys(text)
    lower = text.lower()
    for hints, rules in _rules_by_hints():
        if any(hint in lower for hint in hints):
            for rule in rules:
                spans += [found.span("secret") for found in rule.pattern.finditer(text) if rule.decide(found)]
    united: list[tuple[int, int]] = []
    for begin, stop in sorted(spans):
        if united and begin < united[-1][1]:
            united[-1] = (united[-1][0], max(stop, united[-1][1]))
        elif begin < stop:
            united.append((begin, stop))
    return united


#: Replaces the message of an exception whose ``__str__`` raises.
UNSPEAKABLE = "(its message cannot be shown)"


def error_message(error: BaseException) -> str:
    """Return ``str(error)``, or `UNSPEAKABLE` if that raises."""
    try:
        return _plain(str(error))
    except BaseException:  # noqa: BLE001 - a broken __str__ must not hide the failure itself
        return UNSPEAKABLE


def error_text(error: BaseException, limit: int) -> str:
    """Return ``Type: message``, redacted and bounded. The type (an ``AuthError``) helps to recognise a secret."""
    name = type.__getattribute__(type(error), "__name__")
    return redact(f"{name}: {error_message(error)}", limit)
