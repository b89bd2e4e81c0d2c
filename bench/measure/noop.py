"""The function of `headway run` when only headway itself is to be measured."""


def noop(item: object) -> None:
    """Do nothing with it."""
