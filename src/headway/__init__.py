"""Durable progress for long work in many processes.

    import headway

    result = headway.map(make_ad, products, job="ads-november")     # resumable; one SQLite file

Names are loaded when they are first used, so that ``import headway`` costs next to nothing.
"""

__version__ = "0.1.0"
