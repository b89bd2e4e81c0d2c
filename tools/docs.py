"""Check README.md, CONTRIBUTING.md, SECURITY.md and docs/: links, examples, mentions, lists, generated pages.

- A link leads to a file that is there.
- A block fenced as ```python run is an example: it is run on its own, as a script in an empty directory, and has to exit 0.
  So is one fenced as ```sh run, with the command headway of this environment; it ends at the first command that fails.
- What the pages for contributors mention in `code` exists: paths, modules and names of headway, verbs of make.
- Every table, metric, Redis key and decision is listed once on its page, every exit code and event type is known.
- A generated page is what its generator writes now.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from subprocess import PIPE

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "headway"
FENCE = re.compile(r"^```(?P<info>[^\n]*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:|mailto:|#)(?P<target>[^)\s#]+)")
CODE = re.compile(r"`([^`\n]+)`")
PLACE = re.compile(r"(?:src|tests|tools|docs|bench|examples)/[\w./*-]*|[A-Z]\w+\.md|Makefile|pyproject\.toml")
NAME = re.compile(r"headway(?:\.\w+)+")
#: What runs a block that is fenced so.
RUNNERS: dict[str, tuple[str, ...]] = {"python run": (sys.executable,), "sh run": ("sh", "-eu")}


def pages() -> list[Path]:
    tops = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
    return [*(page for page in tops if page.exists()), *sorted((ROOT / "docs").rglob("*.md"))]


def house_pages() -> list[Path]:
    """What contributors read: full of names that others change."""
    tops = ("CONTRIBUTING.md", "SECURITY.md", "architecture.md")
    return [page for page in pages() if page.name in tops or page.name.startswith("add-a-")]


# ---- links, examples, generated pages --------------------------------------------------------------------------------


def broken_links(page: Path) -> Iterator[str]:
    prose = FENCE.sub("", page.read_text("utf-8"))
    for link in LINK.finditer(prose):
        if not (page.parent / link["target"]).exists():
            yield f"{page.relative_to(ROOT)}: no such file: {link['target']}"


def failing_examples(page: Path) -> Iterator[str]:
    text = page.read_text("utf-8")
    for block in FENCE.finditer(text):
        if block["info"] in RUNNERS and (error := run(block["code"], RUNNERS[block["info"]])):
            line = text.count("\n", 0, block.start()) + 1
            yield f"{page.relative_to(ROOT)}:{line}: the example fails\n{error}"


def run(code: str, runner: Sequence[str] = (sys.executable,)) -> str:
    """What the code wrote to stderr if it failed, else nothing."""
    places = [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
    environment = {**os.environ, "PATH": os.pathsep.join(places)}
    with tempfile.TemporaryDirectory() as directory:
        script = Path(directory, "example.py")
        script.write_text(code, "utf-8")
        done = subprocess.run(
            [*runner, script.name],
            cwd=directory, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
    return (done.stderr or f"exit {done.returncode}") if done.returncode else ""


def stale_reference() -> Iterator[str]:
    """Yield the generated pages that differ from what their generator writes now."""
    for name, generator in {
        "reference/cli.md": ["-m", "headway.cli.reference"],
        "reference/schema.md": ["tools/schema.py"],
        "reference/metrics.md": ["tools/metrics.py"],
    }.items():
        page, command = ROOT / "docs" / name, [sys.executable, *generator]
        if not page.exists() or page.read_bytes() != subprocess.run(command, cwd=ROOT, stdout=PIPE, check=True).stdout:
            yield f"docs/{name} is out of date: .venv/bin/python {' '.join(generator)} > docs/{name}"


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
    for page in pages():
        problems += [*broken_links(page), *failing_examples(page)]
    for problem in problems:
        print(problem)
    print(f"{len(pages())} pages, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
