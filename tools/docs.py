"""Check the pages of the project, of docs/ and of examples/: links, examples, mentions, lists, generated pages.

- A link leads to a file that is there.
- Every block of Python or shell runs. ```python run is a script in an empty directory and has to exit 0. So is ```sh run,
  with this environment's headway command; it ends at the first command that fails. ```sh run postgres redis gets real
  servers: POSTGRES and REDIS, the addresses that pages show, are replaced by theirs. ```sh tests/x.py says which test runs
  the block instead.
- On the page of an example such a block runs in a copy of the example's directory. Its other commands are run by
  tests/scenarios, and are only parsed here.
- Blocks of JSON, TOML and YAML parse.
- A paragraph has at most 90 words, and of all sentences less than 5 % have more than 30.
- What the pages for contributors mention in `code` exists: paths, modules and names of headway, verbs of make.
- Every table, metric, Redis key and decision is listed once on its page, every exit code and event type is known.
- A generated page is what its generator writes now.
"""

from __future__ import annotations

import ast
import atexit
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from subprocess import PIPE

import click
import yaml

from headway.cli import headway

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.services import postgres, redis  # noqa: E402 - found by the line above
from tests.services.postgres import PostgresServer  # noqa: E402
from tests.services.redis import RedisServer  # noqa: E402
from tools import diagrams  # noqa: E402

SOURCE = ROOT / "src" / "headway"
FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^\n]*)\n(?P<code>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:|mailto:)(?P<target>[^)\s#]*)(?:#(?P<anchor>[^)\s]+))?\)")
CODE = re.compile(r"`([^`\n]+)`")
PLACE = re.compile(r"(?:src|tests|tools|docs|bench|examples)/[\w./*-]*|[A-Z]\w+\.md|Makefile|pyproject\.toml")
NAME = re.compile(r"headway(?:\.\w+)+")
#: What runs the blocks of a language.
RUNNERS: dict[str, tuple[str, ...]] = {"python": (sys.executable,), "sh": ("sh", "-eu")}
EXAMPLE_SECONDS = 90
PARSERS: dict[str, Callable[[str], object]] = {
    "json": json.loads, "toml": tomllib.loads, "yaml": lambda text: list(yaml.safe_load_all(text)),
    "sh": lambda code: [parse_command(words) for words in commands(code)],
    "console": lambda code: [
        parse_command(words) for line in code.splitlines() if line.startswith("$ ") for words in commands(line[2:])
    ],
}  # fmt: skip
#: Languages of blocks that are only shown: transcripts, fragments of other programs' files, directives of the site.
OTHERS = {
    "acl",
    "console",
    "html",
    "ini",
    "json",
    "nginx",
    "sql",
    "text",
    "toml",
    "yaml",
    "{eval-rst}",
    "{toctree}",
}


def pages() -> list[Path]:
    tops = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
    return [*(page for page in tops if page.exists()), *sorted((ROOT / "docs").rglob("*.md"))]


def example_pages() -> list[Path]:
    return sorted((ROOT / "examples").glob("*/README.md"))


def house_pages() -> list[Path]:
    """What contributors read: full of names that others change."""
    tops = ("CONTRIBUTING.md", "SECURITY.md", "architecture.md")
    return [page for page in pages() if page.name in tops or page.name.startswith("add-a-")]


# ---- links, examples, generated pages --------------------------------------------------------------------------------


def slug(heading: str) -> str:
    """Return the anchor of a heading, as repository browsers and the site make it."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)|[`*]", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    return {
        slug(line.lstrip("#")) for line in FENCE.sub("", page.read_text("utf-8")).splitlines() if line.startswith("#")
    }


def broken_links(page: Path) -> Iterator[str]:
    """Yield the links that lead to no file or to no heading."""
    prose = FENCE.sub("", page.read_text("utf-8"))
    for link in LINK.finditer(prose):
        target = (page.parent / link["target"]) if link["target"] else page
        if not target.exists():
            yield f"{page.relative_to(ROOT)}: no such file: {link['target']}"
        elif link["anchor"] and target.suffix == ".md" and link["anchor"] not in anchors(target):
            yield f"{page.relative_to(ROOT)}: no such heading: {link['target'] or ''}#{link['anchor']}"


def blocks(page: Path) -> Iterator[tuple[int, str, str]]:
    """Yield the line, the info string and the text of every block."""
    text = page.read_text("utf-8")
    for block in FENCE.finditer(text):
        indent = len(block["indent"])
        code = "".join(line[indent:] or "\n" for line in block["code"].splitlines(keepends=True))
        yield text.count("\n", 0, block.start()) + 1, block["info"].strip(), code


def wrong_blocks(page: Path) -> Iterator[str]:
    """Yield the blocks that fail, that nothing runs, and that do not parse."""
    for line, info, code in blocks(page):
        if error := wrong_block(page, info, code):
            yield f"{page.relative_to(ROOT)}:{line}: {error}"


def wrong_block(page: Path, info: str, code: str) -> str:
    language, _, how = info.partition(" ")
    try:
        if language in PARSERS:
            PARSERS[language](code)
    except (ValueError, yaml.YAMLError, click.ClickException) as wrong:
        return f"the block is not valid {language}: {wrong}"
    if language not in RUNNERS:
        return "" if language in OTHERS else f"nothing runs a block fenced as '{info}'"
    word, *services = how.split() or [""]
    if word == "run" and SERVICES.keys() >= set(services):
        files = page.parent if page in example_pages() else None
        return f"the example fails\n{error}" if (error := run(code, RUNNERS[language], services, files)) else ""
    if not word and page in example_pages():
        return ""
    test = ROOT / word
    if not services and word.startswith("tests/") and test.exists() and page.name in test.read_text("utf-8"):
        return ""
    return f"nothing runs a block fenced as '{info}'"


def commands(code: str) -> Iterator[list[str]]:
    """Yield the arguments of each headway command that stands at the beginning of a line."""
    for start in (
        "docker compose run --rm server ",
        "docker compose exec server ",
        "kubectl exec deploy/headway-worker -- headway ",
    ):
        code = code.replace(start, "headway ")
    code = re.sub(r'"?\$\{?\w+(:-\w+)?\}?"?', "1", code)  # a variable of the shell, of any type
    for line in re.sub(r"\\\n\s*", " ", code).splitlines():
        if line.startswith("headway ") and not line.startswith("headway --"):
            lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|<>")
            lexer.whitespace_split, lexer.commenters = True, "#"
            words = list(lexer)
            end = next((number for number, word in enumerate(words) if re.fullmatch(r"[;&|<>]+", word)), len(words))
            yield words[1:end]


def parse_command(words: list[str]) -> dict[str, object]:
    """Parse a command line as `headway` does, without running it, and return its options."""
    command: click.Command | None = headway
    context = click.Context(headway, info_name="headway", **headway.context_settings)
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        _, command, words = command.resolve_command(context, words)
    if command is None or command is headway:
        raise click.UsageError("a verb is missing")
    return command.make_context(command.name, words, parent=context).params


def run(
    code: str, runner: Sequence[str] = (sys.executable,), services: Iterable[str] = (), files: Path | None = None
) -> str:
    """Run the code in an empty directory, or in a copy of ``files``. Return its output if it failed, else an empty text."""
    with SERVERS if services else contextlib.nullcontext():
        for service in services:
            address, start = SERVICES[service]
            code = code.replace(address, start())
        return run_alone(code, runner, files)


def run_alone(code: str, runner: Sequence[str], files: Path | None = None) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HEADWAY_")}
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    with tempfile.TemporaryDirectory() as directory:
        if files is not None:
            shutil.copytree(files, directory, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".work", "__pycache__"))
        script = Path(directory, "_block_of_the_page.py")
        script.write_text(code, "utf-8")
        process = subprocess.Popen(
            [*runner, script.name],
            cwd=directory, env=environment, text=True, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=EXAMPLE_SECONDS)
        except subprocess.TimeoutExpired:
            return f"it did not end within {EXAMPLE_SECONDS} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what the example left behind
            process.wait()
    return (output or f"exit {process.returncode}") if process.returncode else ""


@cache
def _server_directory() -> Path:
    directory = tempfile.TemporaryDirectory(prefix="headway-docs-")
    Path(directory.name).chmod(0o711)  # PostgreSQL runs as another user if we are root
    atexit.register(directory.cleanup)
    return Path(directory.name)


@cache
def _redis() -> RedisServer:
    server = RedisServer(_server_directory() / "redis", redis.installations()[0])
    server.start()
    atexit.register(server.discard)
    return server


@cache
def _postgres() -> PostgresServer:
    server = PostgresServer(_server_directory() / "postgres", postgres.installations()[0])
    server.start()
    atexit.register(server.discard)
    return server


def _empty_redis() -> str:
    """Return the address of an empty Redis without its database number."""
    _redis().make_pristine()
    return _redis().url().removesuffix("/0")


def _new_database() -> str:
    return _postgres().url(_postgres().create_database())


#: Held while an example uses the servers.
SERVERS = threading.Lock()
#: The address that pages show, and what returns the real one.
SERVICES: dict[str, tuple[str, Callable[[], str]]] = {
    "postgres": ("postgresql://localhost/headway", _new_database),
    "redis": ("redis://localhost:6379", _empty_redis),
}


def stale_reference() -> Iterator[str]:
    """Yield the generated pages that differ from what their generator writes now."""
    for name, generator in {
        "reference/cli.md": ["-m", "headway.cli.reference"],
        "reference/json.md": ["-m", "headway.views.schemas"],
        "reference/schema.md": ["tools/schema.py"],
        "reference/metrics.md": ["tools/metrics.py"],
    }.items():
        page, command = ROOT / "docs" / name, [sys.executable, *generator]
        if not page.exists() or page.read_bytes() != subprocess.run(command, cwd=ROOT, stdout=PIPE, check=True).stdout:
            yield f"docs/{name} is out of date: .venv/bin/python {' '.join(generator)} > docs/{name}"
    for name, picture in diagrams.DRAWN.items():
        path = diagrams.PICTURES / f"{name}.svg"
        if not path.exists() or path.read_text("utf-8") != diagrams.draw(picture):
            yield f"docs/pictures/{name}.svg is out of date: .venv/bin/python tools/diagrams.py"


# ---- prose -----------------------------------------------------------------------------------------------------------

GENERATED = {"cli.md", "json.md", "schema.md", "metrics.md"}
MAX_PARAGRAPH, MAX_SENTENCE, MAX_SHARE, MAX_WORDS = 90, 30, 0.05, 35_000
#: Lists of one line per requirement and per change, and pages of the repository's front.
NOT_COUNTED = {"requirements.md", "CHANGELOG.md"}


def paragraphs(page: Path) -> Iterator[str]:
    """Yield the paragraphs and lists of a page, without code, tables and headings."""
    text = re.sub(r"^\s*(?:\||#|<|!\[).*$", "", FENCE.sub("\n", page.read_text("utf-8")), flags=re.MULTILINE)
    for part in re.split(r"\n\s*\n", text):
        if part.strip():
            yield part


def sentences(paragraph: str) -> Iterator[str]:
    for item in re.split(r"\n(?=\s*(?:[-*]|\d+\.) )", paragraph):
        yield from re.split(r"(?<=[.!?:;])\s+", item)


def heavy_prose(page: Path) -> Iterator[str]:
    """Yield what is wrong with the length of paragraphs and sentences. A list without blank lines is one paragraph."""
    found = list(paragraphs(page))
    for paragraph in found:
        if len(paragraph.split()) > MAX_PARAGRAPH:
            yield f"{page.relative_to(ROOT)}: a paragraph has over {MAX_PARAGRAPH} words: {paragraph.strip()[:60]} ..."
    said = [sentence for paragraph in found for sentence in sentences(paragraph)]
    long = [sentence for sentence in said if len(sentence.split()) > MAX_SENTENCE]
    if len(long) > max(1, MAX_SHARE * len(said)):
        yield f"{page.relative_to(ROOT)}: {len(long)} of {len(said)} sentences have over {MAX_SENTENCE} words: {long[0][:60]}"


def written_pages() -> list[Path]:
    return [page for page in pages() if page.name not in GENERATED | NOT_COUNTED]


def words() -> int:
    return sum(len(page.read_text("utf-8").split()) for page in written_pages())


# ---- mentions --------------------------------------------------------------------------------------------------------


def broken_mentions(page: Path) -> Iterator[str]:
    text = page.read_text("utf-8")
    diagrams = [block["code"] for block in FENCE.finditer(text)]
    for mention in [*CODE.findall(FENCE.sub("", text)), *(word for code in diagrams for word in NAME.findall(code))]:
        if told := wrong_mention(mention):
            yield f"{page.relative_to(ROOT)}: `{mention}`: {told}"


def wrong_mention(mention: str) -> str:
    """Why what is mentioned does not exist, or nothing."""
    if mention.startswith("make "):
        targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
        verbs = [word for word in mention.split()[1:] if "=" not in word]
        return "" if all(verb in targets for verb in verbs) else "make has no such verb"
    if NAME.fullmatch(mention) and not (SOURCE.parent.parent / mention).exists():
        return wrong_name(mention)
    if PLACE.fullmatch(mention):
        return "" if any(ROOT.glob(mention.rstrip("/"))) else "there is no such file"
    return ""


def wrong_name(dotted: str) -> str:
    """A module, or a name that stands somewhere in the module or package before it."""
    path, rest = SOURCE, dotted.split(".")[1:]
    while rest and ((path / rest[0]).is_dir() or (path / f"{rest[0]}.py").exists()):
        path = path / rest[0] if (path / rest[0]).is_dir() else path / f"{rest[0]}.py"
        rest = rest[1:]
    if not rest:
        return ""
    files = [path] if path.is_file() else [*path.glob("*.py")]
    words = {word for file in files for word in re.findall(r"\w+", file.read_text("utf-8"))}
    missing = [name for name in rest if name not in words]
    return f"there is no {missing[0]} in {path.relative_to(ROOT)}" if missing else ""


# ---- lists -----------------------------------------------------------------------------------------------------------


def rows(page: str) -> list[str]:
    """The `code` words in the first column of every table of a page, without the labels of a metric."""
    path = ROOT / "docs" / page
    found = re.findall(r"^\| (`[^|]+) \|", path.read_text("utf-8"), re.MULTILINE) if path.exists() else []
    return [
        re.sub(r"(?<=\w)\{[\w,]+\}$", "", name) if page.endswith("metrics.md") else name
        for row in found
        for name in CODE.findall(row)
    ]


def list_problems(what: str, page: str, listed: Iterable[str], in_code: Iterable[str] | None) -> Iterator[str]:
    counts = Counter(listed)
    yield from (f"docs/{page} lists {what} {name} {count} times" for name, count in counts.items() if count > 1)
    if in_code is not None:
        known = set(in_code)
        yield from (f"docs/{page} lacks {what} {name}" for name in sorted(known - counts.keys()))
        yield from (f"docs/{page} lists {what} {name}, which there is not" for name in sorted(counts.keys() - known))


def tables() -> set[str]:
    statements = "\n".join(path.read_text("utf-8") for path in (SOURCE / "_sql" / "migrations").glob("*.sql"))
    made = set(re.findall(r"^\s*CREATE TABLE (?:IF NOT EXISTS )?(\w+)", statements, re.MULTILINE | re.IGNORECASE))
    gone = set(re.findall(r"^\s*DROP TABLE (?:IF EXISTS )?(\w+)", statements, re.MULTILINE | re.IGNORECASE))
    renamed = dict(re.findall(r"^\s*ALTER TABLE (\w+) RENAME TO (\w+)", statements, re.MULTILINE | re.IGNORECASE))
    return {renamed.get(name, name) for name in made} - (gone - set(renamed.values()))


def measured() -> set[str]:
    """Names given to count, gauge, observe and timed of the metrics."""
    names = set()
    for path in SOURCE.rglob("*.py"):
        if path.name == "catalog.py":
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and re.fullmatch(r"headway_[a-z_]*[a-z]", node.value)
            ):
                names.add(node.value)
    return names


def exit_code_problems() -> Iterator[str]:
    from headway import errors
    from headway.cli import EXIT_CODES

    for name, error in vars(errors).items():
        code = getattr(error, "exit_code", 0)
        if code not in EXIT_CODES:
            yield f"{name} ends with {code}, which the command line does not list"


def event_problems() -> Iterator[str]:
    """Every event type with a schema is on the page about events, once its page is there."""
    schemas = {path.stem for path in (SOURCE / "events" / "schemas").glob("*.json")}
    page = ROOT / "docs" / "reference" / "events.md"
    if schemas and page.exists():
        text = page.read_text("utf-8")
        yield from (
            f"docs/reference/events.md lacks event {name}" for name in sorted(schemas) if f"`{name}`" not in text
        )


def list_of_everything() -> Iterator[str]:
    decisions = [path.name for path in (ROOT / "docs" / "decisions").glob("[0-9]*.md")]
    index = re.findall(r"\]\((\d[\w-]*\.md)\)", (ROOT / "docs" / "decisions" / "README.md").read_text("utf-8"))
    yield from list_problems("the table", "internals/storage.md", rows("internals/storage.md"), tables())
    yield from list_problems("the metric", "reference/metrics.md", rows("reference/metrics.md"), measured())
    yield from list_problems(
        "the key", "reference/redis.md", rows("reference/redis.md"), None
    )  # a test compares them with the code
    yield from list_problems("the decision", "decisions/README.md", index, decisions)
    yield from exit_code_problems()
    yield from event_problems()


def main() -> int:
    problems = [*stale_reference(), *list_of_everything()]
    for page in house_pages():
        problems += broken_mentions(page)
    for page in [*pages(), *example_pages()]:
        problems += broken_links(page)
    with ThreadPoolExecutor(3) as threads:
        for found in threads.map(lambda page: list(wrong_blocks(page)), [*pages(), *example_pages()]):
            problems += found
    for page in written_pages():
        problems += heavy_prose(page)
    if words() > MAX_WORDS:
        problems.append(f"the pages have {words():,} words; {MAX_WORDS:,} are the limit")
    for problem in problems:
        print(problem)
    print(f"{len(pages())} pages, {words():,} words, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
