"""The release, for whoever needs no more of headway than that."""

__version__ = "0.1.0"
