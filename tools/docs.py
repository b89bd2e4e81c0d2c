"""Check README.md and docs/: links lead somewhere, examples run, generated pages are up to date.

A block fenced as ```python run is an example: it is run on its own, as a script in an empty directory, and
has to exit 0.
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE

ROOT = Path(__file__).parent.parent
FENCE = re.compile(r"^```(?P<info>[^\n]*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:|mailto:|#)(?P<target>[^)\s#]+)")


def broken_links(page: Path) -> Iterator[str]:
    prose = FENCE.sub("", page.read_text("utf-8"))
    for link in LINK.finditer(prose):
        if not (page.parent / link["target"]).exists():
            yield f"{page.relative_to(ROOT)}: no such file: {link['target']}"


def failing_examples(page: Path) -> Iterator[str]:
    text = page.read_text("utf-8")
    for block in FENCE.finditer(text):
        if block["info"] == "python run" and (error := run(block["code"])):
            line = text.count("\n", 0, block.start()) + 1
            yield f"{page.relative_to(ROOT)}:{line}: the example fails\n{error}"


def run(code: str) -> str:
    """What the code wrote to stderr if it failed, else nothing."""
    with tempfile.TemporaryDirectory() as directory:
        script = Path(directory, "example.py")
        script.write_text(code, "utf-8")
        command = [sys.executable, script.name]
        done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=120, check=False)
    return (done.stderr or f"exit {done.returncode}") if done.returncode else ""


def stale_reference() -> Iterator[str]:
    """The command line's reference is written by the command line itself."""
    if (ROOT / "src" / "headway" / "cli" / "reference.py").exists():
        command = [sys.executable, "-m", "headway.cli.reference"]
        page = ROOT / "docs" / "cli.md"
        if not page.exists() or page.read_bytes() != subprocess.run(command, stdout=PIPE, check=True).stdout:
            yield "docs/cli.md is out of date: .venv/bin/python -m headway.cli.reference > docs/cli.md"


def main() -> int:
    pages = [*ROOT.glob("README.md"), *sorted((ROOT / "docs").rglob("*.md"))]
    problems = list(stale_reference())
    for page in pages:
        problems += [*broken_links(page), *failing_examples(page)]
    for problem in problems:
        print(problem)
    print(f"{len(pages)} pages, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
