"""Compare docs/internals/requirements.md with what the tests proved in the last run.

    python tools/trace.py RESULTS

RESULTS was written by `pytest --results RESULTS`. A requirement is a table row `| S3-01 | what holds |`. A test claims it
by `@pytest.mark.req("S3-01")` (on itself, on a class, in a module's `pytestmark` or a `pytest.param`), and proves it by
passing: a test that was skipped, deselected, never collected, or hidden by a later one of the same name proves nothing.
A requirement of a section whose heading ends in "(open)" is listed and may be unproved. A row that names a benchmark
(`bench/ledger.py`) needs that file.

Each requirement also has a mutant in tests/mutants/ (`req = "S3-01"`): a change that undoes it, with a test of this
requirement that fails then. `make mutants` runs them; this tool checks that the named test carries the requirement's mark
and passed. A requirement that cannot have a mutant is listed with its reason under "## Without a mutant".

Exits 1 when a requirement is unproved or has neither mutant nor reason, a mark names one that is not listed, a test is
hidden, or a benchmark is missing.
"""

import ast
import json
import re
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
HEADING = re.compile(r"^## (.+)$")
ROW = re.compile(r"^\| (S\d-\d\d) \| (.+) \|$")
WITHOUT_A_MUTANT = "Without a mutant"
BENCHMARK = re.compile(r"bench/\w+\.py")


@dataclass
class Requirement:
    text: str
    open: bool
    proofs: list[str] = field(default_factory=list)
    #: Tests that claim it and did not pass: with what became of them.
    claims: list[str] = field(default_factory=list)
    #: Tests of the mutants that undo it.
    mutant_tests: list[str] = field(default_factory=list)
    #: Why it has no mutant.
    excuse: str | None = None

    @property
    def has_mutant(self) -> bool:
        """Return whether a test that proves the requirement is named by one of its mutants."""
        return any(_names(named, proof) for named in self.mutant_tests for proof in self.proofs)


def _names(named: str, test: str) -> bool:
    """Return whether a mutant's test id selects `test`: itself, one of its parameters, or a member of its file or class."""
    return test == named or test.startswith((f"{named}[", f"{named}::"))


def requirements(page: str) -> dict[str, Requirement]:
    """Read the requirements of the page, with the reasons of those that have no mutant."""
    found: dict[str, Requirement] = {}
    excuses: dict[str, str] = {}
    heading = ""
    for line in page.splitlines():
        if match := HEADING.match(line):
            heading = match[1].rstrip()
        elif row := ROW.match(line):
            if heading == WITHOUT_A_MUTANT:
                excuses[row[1]] = row[2]
            else:
                found[row[1]] = Requirement(row[2], heading.endswith("(open)"))
    for name, reason in excuses.items():
        if name in found:
            found[name].excuse = reason
    return found


def add_mutants(listed: dict[str, Requirement], root: Path) -> Iterator[str]:
    """Fill in the mutants' tests, and yield mutants of requirements that are not listed."""
    for path in sorted((root / "tests" / "mutants").glob("*.toml")):
        for number, mutant in enumerate(tomllib.loads(path.read_text("utf-8")).get("mutant", []), 1):
            name = mutant.get("req")
            if name in listed:
                listed[name].mutant_tests += mutant["tests"]
            elif name is not None:
                yield f"not in docs/internals/requirements.md: {name}, named by mutant {path.stem} {number}"


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
    yield from without_mutant(listed)
    for mark, tests in unlisted.items():
        yield f"not in docs/internals/requirements.md: {mark}, claimed by {', '.join(tests)}"
    for path in sorted((root / "tests").rglob("test_*.py")):
        for name in hidden_tests(path.read_text("utf-8")):
            yield f"{path.relative_to(root)}: {name} is there twice; the first is never run"


def without_mutant(listed: dict[str, Requirement]) -> Iterator[str]:
    """Yield the proved requirements that have neither a mutant nor a reason for its absence."""
    for name, found in listed.items():
        if found.proofs and not found.open and not found.has_mutant and found.excuse is None:
            yield f"no mutant: {name} {found.text}"


def main(arguments: list[str]) -> int:
    results = Path(arguments[0] if arguments else ROOT / ".test-results.json")
    if not results.exists():
        print(f"{results} is not there: make test writes it")
        return 1
    listed = requirements((ROOT / "docs" / "internals" / "requirements.md").read_text("utf-8"))
    found = list(add_mutants(listed, ROOT))
    found += problems(listed, json.loads(results.read_text("utf-8"))["tests"], ROOT)
    for name, requirement in listed.items():
        mutant = "mutant" if requirement.has_mutant else "reason" if requirement.excuse else "-"
        state = "  (open)" if requirement.open else ""
        print(f"{name}  {len(requirement.proofs):3}  {mutant:6}  {requirement.text}{state}")
    for problem in found:
        print(problem)
    still_open = sum(requirement.open and not requirement.proofs for requirement in listed.values())
    proved = sum(bool(requirement.proofs) for requirement in listed.values())
    mutants = sum(requirement.has_mutant for requirement in listed.values())
    excused = sum(requirement.excuse is not None for requirement in listed.values())
    print(
        f"{len(listed)} requirements: {proved} proved by tests that passed, {mutants} of them also by a mutant,"
        f" {excused} without a mutant for a stated reason, {still_open} open; {len(found)} problems"
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
