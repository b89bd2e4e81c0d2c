"""Compare docs/requirements.md with what the tests proved in the last run.

    python tools/trace.py RESULTS

RESULTS was written by `pytest --results RESULTS`. A requirement is a table row `| S3-01 | what holds |`. A test claims it
by `@pytest.mark.req("S3-01")` (on itself, on a class, in a module's `pytestmark` or a `pytest.param`), and proves it by
passing: a test that was skipped, deselected, never collected, or hidden by a later one of the same name proves nothing.
A requirement of a section whose heading ends in "(open)" is listed and may be unproved. A row that names a benchmark
(`bench/ledger.py`) needs that file.

Exits 1 when a requirement is unproved, a mark names one that is not listed, a test is hidden, or a benchmark is missing.
"""

import ast
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
HEADING = re.compile(r"^## (.+)$")
ROW = re.compile(r"^\| (S\d-\d\d) \| (.+) \|$")
BENCHMARK = re.compile(r"bench/\w+\.py")


@dataclass
class Requirement:
    text: str
    open: bool
    proofs: list[str] = field(default_factory=list)
    #: Tests that claim it and did not pass: with what became of them.
    claims: list[str] = field(default_factory=list)


def requirements(page: str) -> dict[str, Requirement]:
    found: dict[str, Requirement] = {}
    is_open = False
    for line in page.splitlines():
        if heading := HEADING.match(line):
            is_open = heading[1].rstrip().endswith("(open)")
        elif row := ROW.match(line):
            found[row[1]] = Requirement(row[2], is_open)
    return found


def hidden_tests(source: str) -> Iterator[str]:
    """Names of tests that a later test of the same name in the same class or module replaces."""
    scopes: list[list[ast.stmt]] = [ast.parse(source).body]
    while scopes:
        body = scopes.pop()
        names = [node.name for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)]
        yield from (name for name, count in Counter(names).items() if count > 1 and name.lower().startswith("test"))
        scopes += [node.body for node in body if isinstance(node, ast.ClassDef)]


def problems(listed: dict[str, Requirement], results: list[dict[str, object]], root: Path) -> Iterator[str]:
    """Fill in what proves each requirement, and say what is wrong."""
    unlisted: dict[str, list[str]] = defaultdict(list)
    for result in results:
        test, outcome, marks = str(result["test"]), str(result["outcome"]), result["requirements"]
        assert isinstance(marks, list)
        for mark in marks:
            if mark not in listed:
                unlisted[mark].append(test)
            elif outcome == "passed":
                listed[mark].proofs.append(test)
            else:
                listed[mark].claims.append(f"{test} ({outcome})")
    for name, found in listed.items():
        if not found.proofs and not found.open:
            yield f"unproved: {name} {found.text}: {', '.join(found.claims) or 'no test of this run is marked with it'}"
        for benchmark in BENCHMARK.findall(found.text):
            if not (root / benchmark).exists():
                yield f"{name} names {benchmark}, which does not exist"
    for mark, tests in unlisted.items():
        yield f"not in docs/requirements.md: {mark}, claimed by {', '.join(tests)}"
    for path in sorted((root / "tests").rglob("test_*.py")):
        for name in hidden_tests(path.read_text("utf-8")):
            yield f"{path.relative_to(root)}: {name} is there twice; the first is never run"


def main(arguments: list[str]) -> int:
    results = Path(arguments[0] if arguments else ROOT / ".test-results.json")
    if not results.exists():
        print(f"{results} is not there: make test writes it")
        return 1
    listed = requirements((ROOT / "docs" / "requirements.md").read_text("utf-8"))
    found = list(problems(listed, json.loads(results.read_text("utf-8"))["tests"], ROOT))
    for name, requirement in listed.items():
        print(f"{name}  {len(requirement.proofs):3}  {requirement.text}{'  (open)' if requirement.open else ''}")
    for problem in found:
        print(problem)
    still_open = sum(requirement.open and not requirement.proofs for requirement in listed.values())
    proved = sum(bool(requirement.proofs) for requirement in listed.values())
    print(f"{len(listed)} requirements: {proved} proved by tests that passed, {still_open} open; {len(found)} problems")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
