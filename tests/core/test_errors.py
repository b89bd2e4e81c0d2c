"""The tree of errors, as it is drawn at the top of errors.py."""

import copy
import inspect
import pickle
import re
import traceback

import pytest

from headway import errors
from headway.errors import HeadwayError, MissingExtra

CLASSES = [item for item in vars(errors).values() if inspect.isclass(item) and issubclass(item, HeadwayError)]


def drawn() -> dict[str, tuple[str, int | None]]:
    """Of each class in the drawing its parent and the exit code that stands beside it."""
    tree: dict[str, tuple[str, int | None]] = {}
    above: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        if match := re.match(r"    ([│├└─ ]*)([A-Z]\w+)\s*(.*)", line):
            depth = len(match[1]) // 4
            code = re.search(r"\(exit (\d+)\)", match[3])
            del above[depth:]
            tree[match[2]] = (above[-1] if above else "Exception", int(code[1]) if code else None)
            above.append(match[2])
    return tree


def test_the_drawing_has_every_class_under_its_parent():
    assert {name: parent for name, (parent, _) in drawn().items()} == {
        kind.__name__: kind.__mro__[1].__name__ for kind in CLASSES
    }


def test_the_exit_codes_are_those_of_the_drawing():
    tree = drawn()

    def expected(name: str) -> int:
        parent, code = tree[name]
        return code if code is not None else 1 if parent == "Exception" else expected(parent)

    assert {kind.__name__: kind.exit_code for kind in CLASSES} == {name: expected(name) for name in tree}


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_class_has_a_docstring(kind: type[HeadwayError]):
    assert (kind.__doc__ or "").strip().endswith(".")


@pytest.mark.parametrize(
    "kind", [kind for kind in CLASSES if issubclass(kind, errors.StorageError) and kind is not errors.StorageError]
)
def test_a_storage_error_has_a_hint(kind: type[HeadwayError]):
    assert kind("x").hint


def test_a_hint_given_where_it_is_raised_wins_over_the_class_hint():
    error = errors.JobHeld("held", hint="Ask Anna.")
    assert (str(error), error.hint) == ("held", "Ask Anna.")
    assert errors.JobHeld("held").hint == errors.JobHeld.hint != ""
    assert errors.JobHeld("held", hint="").hint == ""


def test_a_missing_extra_names_the_command_that_installs_it():
    error = MissingExtra("postgres", "A postgresql:// database")
    assert "postgres" in str(error)
    assert error.hint == "Install it: pip install 'headway-jobs[postgres]'"
    assert error.exit_code == 2


@pytest.mark.parametrize("again", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))])
@pytest.mark.parametrize(
    "error", [errors.StoreFull("full", hint="Free some."), MissingExtra("redis", "A queue")], ids=["hint", "extra"]
)
def test_an_error_survives_the_way_between_processes(error: HeadwayError, again):
    other = again(error)
    assert (type(other), str(other), other.hint) == (type(error), str(error), error.hint)


def test_a_traceback_shows_the_hint_and_keeps_it_when_the_hint_changes():
    error = errors.InputChanged("The items changed.")
    error.add_note("seen in cell 3")
    assert error.__notes__ == [f"Hint: {errors.InputChanged.hint}", "seen in cell 3"]
    error.hint = "Call it with fresh=True."
    shown = "".join(traceback.format_exception(error))
    assert shown.count("Hint:") == 1
    assert "Hint: Call it with fresh=True." in shown
    assert "seen in cell 3" in shown
    error.hint = ""
    assert "Hint" not in "".join(traceback.format_exception(error))
