"""Settings: which one wins, where it came from, and one clear error for each bad one."""

from pathlib import Path

import pytest

from headway.config import OPTIONS, Config
from headway.errors import ConfigError
from headway.ledger import ProgressManager


def config(directory: Path, toml: str = "", environment: dict[str, str] | None = None, **cli) -> Config:
    if toml:
        (directory / "headway.toml").write_text(toml)
    return Config(cli=cli, environment=environment or {}, directory=directory)


@pytest.mark.req("S3-54")
def test_the_command_line_wins_over_the_environment_over_the_profile_over_the_file_over_the_default(tmp_path: Path):
    toml = 'profile = "live"\nretries = 3\nworkers = 3\nmode = "thread"\n[profiles.live]\nretries = 4\nworkers = 4\n'
    found = config(tmp_path, toml, {"HEADWAY_RETRIES": "5"}, workers=None, timeout=9.0)
    assert (found["timeout"], found.origin("timeout")) == (9.0, "command line")
    assert (found["retries"], found.origin("retries")) == (5, "HEADWAY_RETRIES")
    assert (found["workers"], found.origin("workers")) == (4, f"{tmp_path}/headway.toml [profiles.live]")
    assert (found["mode"], found.origin("mode")) == ("thread", f"{tmp_path}/headway.toml")
    assert (found["color"], found.origin("color")) == ("auto", "default")


def test_the_example_in_the_documentation_of_the_module_is_one_that_works(tmp_path: Path):
    from headway import config as module

    example = "\n".join(line[4:] for line in (module.__doc__ or "").splitlines() if line.startswith("    "))
    assert config(tmp_path, example)["database"] == "postgresql://headway@db/headway"


@pytest.mark.req("S3-54")
def test_the_database_of_a_progress_manager_comes_from_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEADWAY_DATABASE", f"sqlite:///{tmp_path}/from-environment.db")
    with ProgressManager() as progress:
        progress.mark_done(1)
    assert (tmp_path / "from-environment.db").exists()
    monkeypatch.delenv("HEADWAY_DATABASE")
    (tmp_path / "headway.toml").write_text('database = "sqlite:///from-file.db"\n')
    with ProgressManager() as progress:
        assert not progress.is_done(1)
    assert (tmp_path / "from-file.db").exists()


def test_a_profile_is_chosen_by_the_environment_first(tmp_path: Path):
    toml = 'profile = "a"\n[profiles.a]\nretries = 7\n[profiles.b]\nretries = 8\n'
    assert config(tmp_path, toml)["retries"] == 7
    assert config(tmp_path, "", {"HEADWAY_PROFILE": "b"})["retries"] == 8


@pytest.mark.parametrize(
    ("toml", "environment", "says", "hints"),
    [
        ("workres = 4", {}, "'workres'", "'workers'"),
        ("[profiles.a]\nretrys = 4", {}, "[profiles.a]", "'retries'"),
        ("zzzzzz = 1", {}, "'zzzzzz'", "headway config"),
        ('profile = "live"', {}, "'live'", ""),
        ("profile = ['live']", {}, "['live']", ""),
        ("profile = 5", {}, "5", ""),
        ("profiles = 5", {}, "'profiles'", "[profiles.NAME]"),
        ("[profiles]\nlive = 5", {}, "'profiles'", "[profiles.NAME]"),
        ("", {"HEADWAY_PROFILE": "live"}, "'live'", ""),
        ("workers = 0", {}, "at least 1", ""),
        ("workers = -1", {}, "at least 1", ""),
        ("workers = 2.5", {}, "whole number", ""),
        ("workers = true", {}, "whole number", ""),
        ("workers = [4]", {}, "single value", ""),
        ("workers = 1979-05-27", {}, "single value", ""),
        ("database = 5", {}, "text", ""),
        ("retries = 'many'", {}, "whole number", ""),
        ("timeout = 0", {}, "above 0", ""),
        ("timeout = nan", {}, "above 0", ""),
        ("timeout = inf", {}, "above 0", ""),
        ("retry_delay = 'off'", {}, "above 0", ""),
        ("retention_days = ''", {}, "above 0", ""),
        ("mode = 'fibre'", {}, "process, thread, async", ""),
        ("", {"HEADWAY_RETRIES": ""}, "HEADWAY_RETRIES", ""),
        ("", {"HEADWAY_RETRIES": "2 "}, "", ""),
        ("", {"HEADWAY_RATE": "fast"}, "HEADWAY_RATE", ""),
        ("workers = ", {}, "cannot be read", "headway.toml"),
        ("a = 1\na = 2", {}, "cannot be read", "headway.toml"),
    ],
)
def test_each_bad_setting_is_one_error_that_says_where_and_what(tmp_path: Path, toml, environment, says, hints):
    if says == "":
        assert config(tmp_path, toml, environment)["retries"] == 2  # int() minds no space; it stays so
        return
    with pytest.raises(ConfigError) as caught:
        config(tmp_path, toml, environment)
    assert says in str(caught.value)
    assert hints in caught.value.hint
    assert caught.value.hint
    assert caught.value.exit_code == 2
    assert toml == "" or "headway.toml" in str(caught.value)


def test_a_bad_value_that_holds_a_password_is_not_shown(tmp_path: Path):
    with pytest.raises(ConfigError) as caught:
        config(tmp_path, "", {"HEADWAY_WORKERS": "redis://:hunter2@h"})
    assert "hunter2" not in str(caught.value)


def test_a_file_that_is_not_utf_8_or_a_directory_is_one_clear_error(tmp_path: Path):
    (tmp_path / "headway.toml").write_bytes(b'database = "\xff"')
    with pytest.raises(ConfigError, match="cannot be read"):
        config(tmp_path)
    (tmp_path / "headway.toml").unlink()
    (tmp_path / "headway.toml").mkdir()
    with pytest.raises(ConfigError, match="cannot be read"):
        config(tmp_path)


@pytest.mark.parametrize("word", ["", "none", "off", "OFF"])
def test_an_optional_setting_can_be_switched_off_again(tmp_path: Path, word: str):
    found = config(tmp_path, "timeout = 5\nworkers = 4\nmax_failures = 3", {"HEADWAY_TIMEOUT": word})
    assert found["timeout"] is None
    assert found["workers"] == 4


def test_reloading_tells_what_changed(tmp_path: Path):
    environment = {"HEADWAY_RATE": "5"}
    found = config(tmp_path, "retries = 2", environment, workers=3)
    (tmp_path / "headway.toml").write_text("retries = 6\nworkers = 9\n")
    environment["HEADWAY_RATE"] = "7.5"
    assert found.reload() == {"retries": 6, "rate": 7.5}
    assert found["workers"] == 3
    assert found.reload() == {}


def test_reloading_a_bad_file_changes_nothing_and_raises(tmp_path: Path):
    found = config(tmp_path, "retries = 4")
    (tmp_path / "headway.toml").write_text("retries = -4\n")
    with pytest.raises(ConfigError):
        found.reload()
    assert found["retries"] == 4


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_every_option_has_a_help_and_a_default_its_own_reader_accepts(option):
    assert option.help
    if option.default not in (None, ()):
        assert option.read(str(option.default)) in (option.default, str(option.default).lower())
