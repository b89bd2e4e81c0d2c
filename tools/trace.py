"""Compare docs/requirements.md with the marks in the tests.

A requirement is a table row `| S3-01 | what holds |`. A test claims it by `@pytest.mark.req("S3-01")`; the
mark may also stand on a class, in a module's `pytestmark` or in a `pytest.param`. Exits 1 when a requirement
has no test or a mark names a requirement that is not listed.
"""

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
ROW = re.compile(r"^\| (S\d-\d\d) \| (.+) \|$", re.MULTILINE)


def requirements(page: str) -> dict[str, str]:
    return dict(ROW.findall(page))


def claims(module: ast.Module) -> Iterator[tuple[str, str]]:
    """Each (requirement, test) the module claims."""
    shared = [
        requirement
        for node in module.body
        if isinstance(node, ast.Assign) and "pytestmark" in map(ast.unparse, node.targets)
        for requirement in marked(node)
    ]
    yield from claims_of(module.body, shared)


def claims_of(body: list[ast.stmt], shared: list[str]) -> Iterator[tuple[str, str]]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            own = [requirement for decorator in node.decorator_list for requirement in marked(decorator)]
            yield from claims_of(node.body, shared + own)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            own = [requirement for decorator in node.decorator_list for requirement in marked(decorator)]
            for requirement in dict.fromkeys(shared + own):
                yield requirement, node.name


def marked(node: ast.AST) -> list[str]:
    """The requirements named by every `mark.req(...)` at or below the node."""
    return [
        ast.literal_eval(argument)
        for call in ast.walk(node)
        if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("mark.req")
        for argument in call.args
    ]


def main() -> int:
    listed = requirements((ROOT / "docs" / "requirements.md").read_text("utf-8"))
    tests: dict[str, list[str]] = defaultdict(list)
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for requirement, test in claims(ast.parse(path.read_text("utf-8"), path.name)):
            tests[requirement].append(f"{path.relative_to(ROOT)}::{test}")

    for requirement, text in listed.items():
        print(f"{requirement}  {len(tests[requirement]):3}  {text}")
    untested = [requirement for requirement in listed if not tests[requirement]]
    for requirement in untested:
        print(f"no test: {requirement} {listed[requirement]}")
    unlisted = {requirement: where for requirement, where in tests.items() if requirement not in listed}
    for requirement, where in unlisted.items():
        print(f"not in docs/requirements.md: {requirement}, claimed by {', '.join(where)}")
    print(f"{len(listed)} requirements, {len(untested)} without a test, {len(unlisted)} claimed but not listed")
    return 1 if untested or unlisted else 0


if __name__ == "__main__":
    sys.exit(main())
