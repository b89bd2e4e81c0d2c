"""The version number and the distribution's name, in a module without other imports."""

__version__ = "0.3.0"

#: The name to install: `pip install headway-jobs`. The package that is imported is `headway`.
DISTRIBUTION = "headway-jobs"


def install_command(*extras: str) -> str:
    """Return the pip command that installs Headway with these extras."""
    return f"pip install '{DISTRIBUTION}[{','.join(extras)}]'" if extras else f"pip install {DISTRIBUTION}"
