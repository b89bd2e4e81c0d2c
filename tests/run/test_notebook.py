"""A result in a notebook: one line as text, a table as HTML."""

from __future__ import annotations

from pathlib import Path

import headway


def failing(n: int) -> int:
    if n < 3:
        raise ValueError(f"<script>alert({n})</script> & 'more'")
    if n < 5:
        raise KeyError("price")
    return n


def test_the_table_has_counts_causes_and_how_to_retry_them_escaped(tmp_path: Path):
    database = f"sqlite:///{tmp_path / 'headway.db'}"
    result = headway.map(failing, range(10), job="ads", database=database, retries=0, progress="none")
    html = result._repr_html_()
    assert "<caption>Job ads: finished in " in html
    assert "<tr><th>done</th><td>5</td></tr><tr><th>dead</th><td>5</td></tr>" in html
    assert "<script>" not in html
    assert "ValueError: &lt;script&gt;alert" in html
    most = max(result.causes, key=lambda cause: cause.dead).no
    assert f"<code>headway retry ads --cause {most} --database {database}</code>" in html
    assert len(repr(result).splitlines()) == 1


def test_a_result_without_failures_has_only_counts(tmp_path: Path):
    result = headway.map(abs, [1, 2], job="ads", database=f"sqlite:///{tmp_path / 'headway.db'}", progress="none")
    assert result._repr_html_().count("<table>") == 1
    assert "retry" not in result._repr_html_()
