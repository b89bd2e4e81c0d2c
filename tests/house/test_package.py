"""The package's data and the documents name one distribution."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from headway import __version__, _version
from headway.telemetry import Metrics, exposition
from headway.telemetry.catalog import METRICS
from tools import docs

ROOT = docs.ROOT
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
#: What a requirement that names Headway looks like: the distribution with extras, or after `pip install`.
NAMED = re.compile(r"(?<![\w./-])(headway(?:-\w+)*)\[([\w,]+)\]|pip install (?:--\S+ )*'?(headway[\w-]*)")


def pages_that_install() -> list[Path]:
    return [*docs.pages(), *sorted((ROOT / "examples").glob("*/README.md"))]


def test_the_project_has_the_distribution_name_of_the_source():
    assert PROJECT["name"] == _version.DISTRIBUTION
    used = {extra for extra in EXTRAS if extra not in ("all", "dev")}
    assert [f"{_version.DISTRIBUTION}[{','.join(extra for extra in EXTRAS if extra in used)}]"] == EXTRAS["all"]


@pytest.mark.parametrize("page", pages_that_install(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_install_command_of_a_page_names_the_distribution_and_extras_that_exist(page: Path):
    for with_extras, extras, alone in NAMED.findall(page.read_text("utf-8")):
        assert (with_extras or alone) == _version.DISTRIBUTION
        assert set(filter(None, extras.split(","))) <= EXTRAS.keys()
    for extras in re.findall(r"install[^\n]*'\.\[([\w,]+)\]'", page.read_text("utf-8")):
        assert set(extras.split(",")) <= EXTRAS.keys()


def test_the_install_command_names_its_extras():
    assert _version.install_command() == "pip install headway-jobs"
    assert _version.install_command("redis", "web") == "pip install 'headway-jobs[redis,web]'"


def test_deployments_name_an_image_of_this_version():
    series = ".".join(__version__.split(".")[:2])
    images = {
        image
        for path in [ROOT / "compose.yaml", *(ROOT / "deploy" / "kubernetes").glob("*.yaml")]
        for image in re.findall(r"image: headway:([\d.]+)", path.read_text("utf-8"))
    }
    assert images == {series}


def test_every_metric_of_the_source_has_a_help_text_that_says_more_than_its_name():
    assert docs.measured() == METRICS.keys()
    for name, metric in METRICS.items():
        assert metric.help.endswith("."), name
        assert metric.help.rstrip(".").lower() != name.replace("_", " ")


def test_prometheus_reads_the_help_text():
    metrics = Metrics()
    metrics.count("headway_events", sink="log")
    assert "# HELP headway_events_total Events delivered to the sink." in exposition(metrics).decode()
