"""Settings: which one wins, where it came from, and one clear error for each bad one."""

import warnings
from pathlib import Path

import pytest

from headway.config import OPTIONS, Config, MisspeltVariable
from headway.errors import ConfigError
from headway.ledger import ProgressManager
from headway.telemetry import forget_secrets, redact


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
        ("workers = -1", {}, "at least 0", ""),
        ("workers = 2.5", {}, "whole number", ""),
        ("workers = true", {}, "whole number", ""),
        ("workers = [4]", {}, "single value", ""),
        ("workers = 1979-05-27", {}, "single value", ""),
        ("database = 5", {}, "text", ""),
        ("retries = 'many'", {}, "whole number", ""),
        ("timeout = 0", {}, "above 0", ""),
        ("timeout = nan", {}, "above 0", ""),
        ("timeout = inf", {}, "above 0", ""),
        ("retry_delay = 'off'", {}, "from 0", ""),
        ("retention_days = ''", {}, "above 0", ""),
        ("mode = 'fibre'", {}, "process, thread, async", ""),
        ("", {"HEADWAY_RETRIES": ""}, "HEADWAY_RETRIES", ""),
        ("", {"HEADWAY_RETRIES": "2 "}, "", ""),
        ("", {"HEADWAY_RATE": "fast"}, "HEADWAY_RATE", ""),
        ("workers = ", {}, "cannot be read", "headway.toml"),
        ("a = 1\na = 2", {}, "cannot be read", "headway.toml"),
        # Python refuses to read and to write out numbers of so many digits.
        ("workers = " + "9" * 5000, {}, "cannot be read", "headway.toml"),
        ("workers = 0x" + "f" * 5000, {}, "workers", ""),
        ("workers = " + "[" * 5000, {}, "cannot be read", "headway.toml"),
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


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("database", "postgresql://headway@db/headway"),
        ("redis", "redis://h:6379/0"),
        ("states", "redis://h:6379/1"),
        ("token", "secret"),
        ("mode", "thread"),
        ("watch_channel", "events"),
    ],
)
def test_a_value_of_the_environment_may_have_the_end_of_line_of_the_file_it_comes_from(
    tmp_path: Path, name: str, value: str
):
    for end in ("\n", "\r\n", " "):
        assert config(tmp_path, "", {f"HEADWAY_{name.upper()}": f"{value}{end}"})[name] == value
    assert config(tmp_path, "", {"HEADWAY_PROFILE": "production\n"}).profile == "production"


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


def test_a_file_with_a_byte_order_mark_and_ends_of_line_of_another_system_is_read(tmp_path: Path):
    (tmp_path / "headway.toml").write_bytes(b"\xef\xbb\xbfretries = 7\r\n[profiles.live]\r\nretries = 8\r\n")
    assert config(tmp_path)["retries"] == 7
    assert config(tmp_path, "", {"HEADWAY_PROFILE": "live"})["retries"] == 8


@pytest.mark.parametrize("target", ["not-mounted/headway.toml", "headway.toml"])
def test_a_file_that_is_a_link_to_nowhere_is_an_error_and_not_the_defaults(tmp_path: Path, target: str):
    (tmp_path / "headway.toml").symlink_to(tmp_path / target)
    with pytest.raises(ConfigError, match=r"headway\.toml"):
        config(tmp_path)


@pytest.mark.parametrize("word", ["", "none", "off", "OFF"])
def test_an_optional_setting_can_be_switched_off_again(tmp_path: Path, word: str):
    found = config(tmp_path, "timeout = 5\nworkers = 4\nmax_failures = 3", {"HEADWAY_TIMEOUT": word})
    assert found["timeout"] is None
    assert found["workers"] == 4


def test_reloading_returns_the_changed_settings(tmp_path: Path):
    environment = {"HEADWAY_RATE": "5"}
    found = config(tmp_path, "retries = 2", environment, workers=3)
    (tmp_path / "headway.toml").write_text("retries = 6\nworkers = 9\n")
    environment["HEADWAY_RATE"] = "7.5"
    assert found.reload() == {"retries": 6, "rate": 7.5}
    assert found["workers"] == 3
    assert found.reload() == {}


def test_a_secret_that_came_with_a_reload_is_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RELAY_PASSWORD", "correct-horse-1")
    forget_secrets()
    found = config(tmp_path, "retries = 2")
    assert redact("said correct-horse-1") == "said ***"
    monkeypatch.setenv("RELAY_PASSWORD", "battery-staple-2")
    (tmp_path / "headway.toml").write_text("retries = 6\n")
    assert found.reload() == {"retries": 6}
    assert redact("said battery-staple-2") == "said ***"


def test_a_misspelt_variable_is_warned_of_once_with_the_name_that_was_meant(tmp_path: Path):
    environment = {"HEADWAY_WOKERS": "4", "HEADWAY_PORT": "tcp://10.0.0.1:80", "HEADWAY_MAX_RETRIES": "5"}
    with pytest.warns(MisspeltVariable) as caught:
        assert config(tmp_path, "", environment)["workers"] is None
    assert sorted(str(each.message) for each in caught) == [
        "HEADWAY_MAX_RETRIES is not a setting and is ignored. Did you mean HEADWAY_RETRIES?",
        "HEADWAY_WOKERS is not a setting and is ignored. Did you mean HEADWAY_WORKERS?",
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config(tmp_path, "", environment)


def test_no_setting_and_no_variable_of_kubernetes_is_taken_for_a_misspelt_one(tmp_path: Path):
    services = [f"HEADWAY{name}{end}" for name in ("", "_REDIS", "_WEB", "_DATABASE") for end in
                ("_PORT", "_SERVICE_HOST", "_SERVICE_PORT", "_PORT_6379_TCP", "_PORT_6379_TCP_ADDR")]  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config(tmp_path, "", dict.fromkeys(services, "x") | {"HEADWAY_PROFILE": "production", "HEADWAY_RATE": "5"})


def test_reloading_a_bad_file_changes_nothing_and_raises(tmp_path: Path):
    found = config(tmp_path, "retries = 4")
    (tmp_path / "headway.toml").write_text('profile = "production"\nretries = -4\n')
    with pytest.raises(ConfigError):
        found.reload()
    assert (found["retries"], found.profile) == (4, None)


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_every_option_has_a_help_and_a_default_its_own_reader_accepts(option):
    assert option.help
    if option.default not in (None, ()):
        assert option.read(str(option.default)) in (option.default, str(option.default).lower())


# ---- settings that follow another ------------------------------------------------------------------------------------


def test_a_database_and_a_redis_are_enough_for_everything(tmp_path: Path):
    found = config(tmp_path, "", {"HEADWAY_DATABASE": "sqlite:///a.db", "HEADWAY_REDIS": "redis://:pw@h:7000/0?x=1"})
    assert found["projects_redis"] == "redis://:pw@h:7000/1?x=1"
    assert found["queue_redis"] == found["watch_redis"] == "redis://:pw@h:7000/0?x=1"
    assert found["states"] == found["watch_store"] == "sqlite:///a.db"
    assert found.origin("projects_redis") == "follows redis"
    assert found.origin("watch_redis") == "follows queue_redis"


def test_a_setting_is_set_if_it_or_its_leader_is_set(tmp_path: Path):
    assert not config(tmp_path).is_set("projects_redis")
    named = config(tmp_path, "", {"HEADWAY_REDIS": "redis://h"})
    assert named.is_set("projects_redis")
    assert named.is_set("watch_redis")
    assert not named.is_set("states")
    apart = config(tmp_path, "", {"HEADWAY_QUEUE_REDIS": "redis://h"})
    assert (apart.is_set("watch_redis"), apart.is_set("projects_redis")) == (True, False)


def test_a_follower_can_be_set_and_unset(tmp_path: Path):
    toml = 'redis = "redis://a"\nprojects_redis = "redis://b/4"\nstates = "redis://c/2"\n'
    found = config(tmp_path, toml)
    assert (found["projects_redis"], found["states"], found["queue_redis"]) == (
        "redis://b/4",
        "redis://c/2",
        "redis://a",
    )
    again = config(tmp_path, toml, {"HEADWAY_PROJECTS_REDIS": "", "HEADWAY_STATES": "none"})
    assert (again["projects_redis"], again["states"]) == ("redis://a/1", "sqlite:///headway.db")


@pytest.mark.parametrize(
    ("address", "moved"),
    [
        ("redis://h", "redis://h/1"),
        ("redis://h:6379/", "redis://h:6379/1"),
        ("rediss://u:p%40@h/15", "rediss://u:p%40@h/1"),
        ("rediss://h/0?db=3&ssl_cert_reqs=none", "rediss://h/1?ssl_cert_reqs=none"),
        ("redis://h/0?%64b=3", "redis://h/1"),
        ("unix:///run/redis.sock", "unix:///run/redis.sock?db=1"),
        ("unix:///run/redis.sock?db=0&username=u", "unix:///run/redis.sock?username=u&db=1"),
    ],
)
def test_projects_live_in_database_1_of_the_server(tmp_path: Path, address: str, moved: str):
    from headway._redis import database_of

    found = config(tmp_path, "", {"HEADWAY_REDIS": address})
    assert found["projects_redis"] == moved
    assert database_of(found.text("projects_redis"), "state") == 1


@pytest.mark.parametrize(
    "address",
    ["foo://bar", "localhost", "redis://h:x/0", "redis://[::1", "http://h/1", "REDIS://h/1", "redis:h", "redis:/h/1"],
)
@pytest.mark.parametrize("name", ["redis", "projects_redis", "queue_redis"])
def test_an_invalid_redis_address_is_refused_from_every_source(tmp_path: Path, name: str, address: str):
    for arguments in (
        {"toml": f'{name} = "{address}"'},
        {"environment": {f"HEADWAY_{name.upper()}": address}},
        {name: address},
    ):
        with pytest.raises(ConfigError, match="must be an address"):
            config(tmp_path, **arguments)
        (tmp_path / "headway.toml").unlink(missing_ok=True)


def test_an_empty_address_on_the_command_line_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError):
        config(tmp_path, projects_redis="")


def test_the_old_name_of_a_setting_is_an_error_that_says_the_new_one(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"HEADWAY_STATE .*HEADWAY_PROJECTS_REDIS") as caught:
        config(tmp_path, "", {"HEADWAY_STATE": "redis://:hunter2@h/1"})
    assert "hunter2" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"'state' in .*'projects_redis'"):
        config(tmp_path, 'state = "redis://h/1"')
    with pytest.raises(ConfigError, match=r"\[profiles.live\]"):
        config(tmp_path, 'profile = "live"\n[profiles.live]\nstate = "redis://h/1"')


def test_a_list_is_an_array_in_toml_and_divided_by_commas_or_spaces_in_the_environment(tmp_path: Path):
    assert config(tmp_path, 'watch_queues = ["a", "b c"]').texts("watch_queues") == ("a", "b c")
    for text in ("a,b", "a b", " a, b ,", "a,,b"):
        assert config(tmp_path, "", {"HEADWAY_WATCH_QUEUES": text}).texts("watch_queues") == ("a", "b")
    (tmp_path / "headway.toml").unlink()
    assert config(tmp_path).texts("watch_queues") == ()
    for bad in ("watch_queues = [1, 2]", "watch_queues = 3", "watch_queues = [['a']]", "watch_queues = {a = 1}"):
        with pytest.raises(ConfigError, match="list of texts"):
            config(tmp_path, bad)


def test_the_watchers_settings_are_known_under_the_names_it_has_in_the_environment(tmp_path: Path):
    environment = {
        "REDIS_URL": "redis://rq/5", "RQ__QUEUE": "digits,words", "DIGITS_EVENTS_CHANNEL": "c", "RQ_WATCHER_PAGE_SIZE": "7",
        "RQ_WATCHER_STREAM": "",
    }  # fmt: skip
    found = config(tmp_path, 'watch_channel = "other"\nwatch_stream = "kept"\nwatch_sweep = 60', environment)
    assert (found["watch_redis"], found.origin("watch_redis")) == ("redis://rq/5", "REDIS_URL")
    assert found.texts("watch_queues") == ("digits", "words")
    assert (found["watch_channel"], found["watch_page_size"]) == ("c", "7")
    assert (found["watch_stream"], found["watch_sweep"]) == (
        "kept",
        "60",
    )  # what is empty in its environment is not set
    assert found["redis"] == "redis://localhost:6379/0"  # a variable of the watcher's is nobody else's


def test_every_variable_the_watcher_reads_is_known_to_the_settings():
    import inspect
    import re

    from headway.watcher import runner

    read = set(re.findall(r'"((?:RQ_|REDIS_|DIGITS_)[A-Z_]+)"', inspect.getsource(runner)))
    assert read <= {option.variable for option in OPTIONS}


def test_the_settings_in_force_reach_the_watcher_as_its_environment(tmp_path: Path):
    from headway.cli.services.watch import watcher_environment
    from headway.watcher.runner import settings_from

    environment = {"HEADWAY_REDIS": "redis://h:7000/3", "RQ__QUEUE": "digits, words", "RQ_WATCHER_FIELDS": '{"a": 1}'}
    toml = 'watch_channel = "c"\nwatch_payload_fields = ["user", "model"]\nwatch_sweep = 60\n'
    found = config(tmp_path, toml, environment, watch_stuck_timeout="90")
    settings = settings_from({**environment, **watcher_environment(found)})
    assert settings.redis_url == "redis://h:7000/3"
    assert settings.queues == ("digits", "words")
    assert (settings.channel, settings.stuck_job_timeout_s, settings.sweep_s) == ("c", 90.0, 60.0)
    assert settings.form.payload_fields == ("user", "model")
