"""What deploys headway is parsed here, and compared with the command line, the settings and the server it speaks of.

Neither Docker nor a cluster is needed: the files are read, and the commands of the compose file are run as processes.
"""

from __future__ import annotations

import configparser
import json
import re
import shlex
import shutil
import sqlite3
import subprocess
import tomllib
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from headway import __version__
from headway.cli import headway
from headway.config import OPTIONS, PREFIX, Config
from headway.ledger import Done, Ledger
from headway.ledger.values import NewItem
from headway.queue.task_queue import TaskQueue
from headway.queue.worker.supervisor import END_SECONDS
from headway.web.auth.gate import PUBLIC
from headway.web.server import PORT
from tests.services.postgres import PostgresServer
from tests.services.redis import RedisServer
from tests.services.waiting import eventually

ROOT = Path(__file__).resolve().parent.parent.parent
DEPLOY = ROOT / "deploy"
PAGES = (
    "deploy.md", "deploy-systemd.md", "deploy-containers.md", "deploy-kubernetes.md",
    "reverse-proxy.md", "upgrade.md", "back-up.md", "monitor.md",
)  # fmt: skip
PAGE = "\n".join((ROOT / "docs" / "howto" / page).read_text("utf-8") for page in PAGES)
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))

#: Every variable that a setting can be given by.
VARIABLES = {PREFIX + option.name.upper() for option in OPTIONS} | {PREFIX + "PROFILE"}
VARIABLES |= {option.variable for option in OPTIONS if option.variable is not None}
SECRET = re.compile(r"PASSWORD|SECRET|TOKEN|KEY", re.IGNORECASE)

Spawn = Callable[..., "subprocess.Popen[str]"]


def accept(words: list[str]) -> dict[str, Any]:
    """Parse a command line as `headway` does, without running it; what its options became."""
    command: click.Command | None = headway
    context = click.Context(headway, info_name="headway", **headway.context_settings)
    while isinstance(command, click.Group) and (words or not command.invoke_without_command):
        assert words, "a verb is missing"
        name, *words = words
        command = command.get_command(context, name)
        assert command is not None, f"there is no verb {name!r}"
    assert command is not None
    return command.make_context(command.name, words, parent=context).params


def settings(environment: Mapping[str, str], directory: Path) -> Config:
    """The settings of a process with that environment; a name that means nothing fails."""
    assert environment.keys() <= VARIABLES, environment.keys() - VARIABLES
    return Config(environment=environment, directory=directory)


def grace_suffices(seconds: float, config: Config) -> bool:
    return seconds > float(str(config["queue_drain"])) + END_SECONDS


def test_an_unknown_command_or_setting_is_noticed(tmp_path: Path):
    with pytest.raises(AssertionError, match="no verb"):
        accept(["sweeper"])
    with pytest.raises(click.UsageError):
        accept(["relay", "--forever"])
    with pytest.raises(AssertionError):
        settings({"HEADWAY_SINK": "log:"}, tmp_path)


# ---- the image -------------------------------------------------------------------------------------------------------


def instructions(text: str) -> list[tuple[str, str]]:
    """(instruction, rest) of a Dockerfile, with continued lines joined and comments left out."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    found = [line.partition(" ") for line in joined.splitlines()]
    return [(word, rest.strip()) for word, _, rest in found]


@pytest.fixture(scope="module")
def image() -> list[tuple[str, str]]:
    return instructions((ROOT / "Dockerfile").read_text("utf-8"))


def of(image: list[tuple[str, str]], word: str) -> list[str]:
    return [rest for found, rest in image if found == word]


def last_stage(image: list[tuple[str, str]]) -> list[tuple[str, str]]:
    start = max(number for number, (word, _) in enumerate(image) if word == "FROM")
    return image[start:]


def test_the_image_knows_only_instructions_of_docker(image: list[tuple[str, str]]):
    known = {"ARG", "FROM", "WORKDIR", "COPY", "RUN", "ENV", "USER", "EXPOSE", "STOPSIGNAL", "ENTRYPOINT", "CMD"}
    assert {word for word, _ in image} <= known


def test_the_image_has_a_build_stage_and_runs_without_rights(image: list[tuple[str, str]]):
    first, second = of(image, "FROM")
    assert first.endswith(" AS build")
    assert first.split()[0] == second.split()[0], "the environment was made for that Python"
    final = last_stage(image)
    (user,) = of(final, "USER")
    assert re.fullmatch(r"[1-9]\d{3,}:[1-9]\d{3,}", user), "a number that is not root's"
    assert of(final, "COPY") == ["--from=build /opt/headway /opt/headway"], "no source, no build tools"
    assert of(final, "RUN") == []


def test_the_image_holds_no_secret_and_is_made_of_named_files_only(image: list[tuple[str, str]]):
    for rest in of(image, "ENV") + of(image, "ARG"):
        names = re.findall(r"(\w+)=", rest)
        assert not [name for name in names if SECRET.search(name) or name.startswith(PREFIX)]
    sources = [word for rest in of(image, "COPY") if "--from" not in rest for word in rest.split()[:-1]]
    assert sorted(sources) == ["LICENSE", "README.md", "constraints.txt", "pyproject.toml", "src"]
    assert all((ROOT / source).exists() for source in sources)
    ignored = (ROOT / ".dockerignore").read_text("utf-8").split("\n")
    assert "*" in ignored
    assert {line.removeprefix("!") for line in ignored if line.startswith("!")} == set(sources)


def test_the_image_has_the_extras_that_its_processes_need(image: list[tuple[str, str]]):
    (install,) = [rest for rest in of(image, "RUN") if "pip install" in rest]
    extras = re.search(r"'\.\[([\w,]+)\]'", install)
    assert extras is not None
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert set(extras[1].split(",")) <= project["optional-dependencies"].keys()
    assert {"postgres", "redis", "web"} <= set(extras[1].split(","))
    version = next(rest for rest in of(image, "ARG") if rest.startswith("PYTHON=")).removeprefix("PYTHON=")
    assert f"Programming Language :: Python :: {version}" in project["classifiers"]


def test_the_image_starts_headway_and_opens_the_port_of_the_server(image: list[tuple[str, str]]):
    assert json.loads(of(image, "ENTRYPOINT")[0]) == ["headway"]
    assert json.loads(of(image, "CMD")[0]) == ["--help"]
    assert of(image, "EXPOSE") == [str(PORT)]
    assert of(image, "STOPSIGNAL") == ["SIGTERM"]


# ---- compose ---------------------------------------------------------------------------------------------------------


def read_yaml(path: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(path.read_text("utf-8")) if document is not None]


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    (document,) = read_yaml(ROOT / "compose.yaml")
    return document


def ours(compose: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: one for name, one in compose["services"].items() if one["image"].startswith("headway:")}


def interpolated(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: re.sub(r"\$\{\w+:\?[^}]*\}", "x1", value) for name, value in environment.items()}


def test_every_service_of_the_compose_file_is_a_command_and_its_settings_are_ours(
    compose: dict[str, Any], tmp_path: Path
):
    services = ours(compose)
    assert services.keys() == {"worker", "server", "relay", "watcher"}
    for service in services.values():
        accept(service["command"])
        config = settings(interpolated(service["environment"]), tmp_path)
        assert config.is_set("database")
        assert config.is_set("redis")
        assert service["image"] == f"headway:{__version__.rpartition('.')[0]}"


def test_the_compose_file_contains_no_password(compose: dict[str, Any]):
    text = (ROOT / "compose.yaml").read_text("utf-8")
    for value in re.findall(r"(?:PASSWORD: |://\w*:|requirepass\n\s+- )(\S+)", text):
        assert value.startswith("${HEADWAY_"), value
        assert ":?" in value, "a missing one is an error, not an empty password"


def test_services_of_the_compose_file_may_write_nowhere_but_in_tmp(compose: dict[str, Any]):
    for service in ours(compose).values():
        assert service["read_only"] is True
        assert service["tmpfs"] == ["/tmp"]
        assert service["cap_drop"] == ["ALL"]
        assert all(volume.endswith(":ro") for volume in service.get("volumes", []))


def test_the_server_of_the_compose_file_is_probed_where_it_listens(compose: dict[str, Any]):
    server = compose["services"]["server"]
    port = accept(server["command"])["port"]
    assert server["ports"] == [f"127.0.0.1:{port}:{port}"]
    (probed,) = re.findall(r"http://127\.0\.0\.1:(\d+)(/\w+)", server["healthcheck"]["test"][-1])
    assert probed == (str(port), "/readyz")
    assert probed[1] in PUBLIC


def test_the_redis_of_the_compose_file_keeps_everything_and_announces_it(compose: dict[str, Any]):
    words = compose["services"]["redis"]["command"][1:]
    given = dict(zip(words[::2], words[1::2], strict=True))
    assert given["--maxmemory-policy"] == "noeviction"
    assert given["--appendonly"] == "yes"
    assert given["--notify-keyspace-events"] == "Kz"


def test_tasks_get_their_drain_time_before_docker_kills_them(compose: dict[str, Any], tmp_path: Path):
    worker = compose["services"]["worker"]
    seconds = float(worker["stop_grace_period"].removesuffix("s"))
    assert grace_suffices(seconds, settings(interpolated(worker["environment"]), tmp_path))


# ---- Kubernetes ------------------------------------------------------------------------------------------------------


def pods() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """(object, pod template) of every manifest that has one."""
    for path in MANIFESTS:
        for one in read_yaml(path):
            spec = one.get("spec", {})
            if "jobTemplate" in spec:
                yield one, spec["jobTemplate"]["spec"]["template"]
            elif "template" in spec:
                yield one, spec["template"]


def named(kind: str, name: str) -> dict[str, Any]:
    (found,) = [
        one for path in MANIFESTS for one in read_yaml(path) if (one["kind"], one["metadata"]["name"]) == (kind, name)
    ]
    return found


@pytest.fixture
def cluster_settings(tmp_path: Path) -> Config:
    data = named("ConfigMap", "headway")["data"]
    assert all(isinstance(value, str) for value in data.values()), "Kubernetes takes texts only"
    assert not {"HEADWAY_DATABASE", "HEADWAY_REDIS"} & data.keys(), "they have passwords"
    return settings(data, tmp_path)


@pytest.mark.parametrize(("one", "pod"), list(pods()), ids=lambda value: value.get("metadata", {}).get("name"))
def test_every_pod_runs_a_command_of_ours_without_rights(one: dict[str, Any], pod: dict[str, Any]):
    spec = pod["spec"]
    (container,) = spec["containers"]
    accept(container["args"])
    assert "command" not in container, "the image's entry point is headway"
    assert container["image"] == f"headway:{__version__.rpartition('.')[0]}"
    assert [next(iter(source.values()))["name"] for source in container["envFrom"]] == ["headway", "headway"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] > 1000
    assert spec["automountServiceAccountToken"] is False
    rights = container["securityContext"]
    assert rights["readOnlyRootFilesystem"] is True
    assert rights["allowPrivilegeEscalation"] is False
    assert rights["capabilities"] == {"drop": ["ALL"]}
    mounts = {mount["mountPath"]: mount.get("readOnly", False) for mount in container["volumeMounts"]}
    assert mounts.pop("/tmp") is False
    assert all(mounts.values())
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in spec["volumes"]}
    if "selector" in one["spec"]:
        assert one["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()


def test_every_process_has_its_manifest():
    verbs = {pod["spec"]["containers"][0]["args"][0] for _, pod in pods()}
    assert verbs == {"worker", "serve", "relay", "watch", "purge"}


def test_the_service_and_the_probes_lead_to_the_port_of_the_server():
    (container,) = named("Deployment", "headway-server")["spec"]["template"]["spec"]["containers"]
    (port,) = container["ports"]
    assert port["containerPort"] == accept(container["args"])["port"]
    for probe, path in (("livenessProbe", "/healthz"), ("readinessProbe", "/readyz")):
        assert container[probe]["httpGet"] == {"path": path, "port": port["name"]}
        assert path in PUBLIC
    service = named("Service", "headway")["spec"]
    assert service["ports"][0]["targetPort"] == port["name"]
    labels = named("Deployment", "headway-server")["spec"]["template"]["metadata"]["labels"]
    assert service["selector"].items() <= labels.items()


def test_a_pod_of_workers_has_the_time_and_the_memory_that_its_settings_promise(cluster_settings: Config):
    spec = named("Deployment", "headway-worker")["spec"]["template"]["spec"]
    assert grace_suffices(spec["terminationGracePeriodSeconds"], cluster_settings)
    limit = spec["containers"][0]["resources"]["limits"]["memory"]
    most = int(str(cluster_settings["queue_max_workers"]))
    assert int(limit.removesuffix("Mi")) >= most * (int(str(cluster_settings["queue_memory_limit"])) + 100) + 200


def test_one_watcher_at_a_time():
    spec = named("Deployment", "headway-watcher")["spec"]
    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})


def test_every_applied_manifest_exists(tmp_path: Path):
    (top,) = read_yaml(DEPLOY / "kustomization.yaml")
    assert set(top["resources"]) == {f"kubernetes/{path.name}" for path in MANIFESTS} - {"kubernetes/watcher.yaml"}
    (generated,) = top["configMapGenerator"]
    assert all((DEPLOY / file).exists() for file in generated["files"])
    if shutil.which("kubectl"):  # it needs no cluster for this; without it the lines above are what is checked
        done = subprocess.run(["kubectl", "kustomize", DEPLOY], capture_output=True, text=True, check=True)
        assert len(list(yaml.safe_load_all(done.stdout))) == 8


# ---- systemd ---------------------------------------------------------------------------------------------------------


def unit(path: Path) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, comment_prefixes=("#",))
    parser.optionxform = str  # type: ignore[assignment,method-assign]  # systemd minds capitals
    parser.read_string(path.read_text("utf-8"))
    return parser


def environment_file() -> dict[str, str]:
    lines = (DEPLOY / "headway.env.example").read_text("utf-8").splitlines()
    pairs = [line.partition("=") for line in lines if line and not line.startswith("#")]
    return {name: value for name, _, value in pairs}


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_every_unit_runs_a_command_of_ours_and_may_write_to_its_own_directory_only(path: Path):
    service = unit(path)["Service"]
    program, *words = shlex.split(service["ExecStart"])
    assert program == "/opt/headway/bin/headway"
    accept(words)
    assert service["EnvironmentFile"] == "/etc/headway/headway.env"
    assert service["User"] == "headway"
    assert service["UMask"] == "0077"
    assert service["ProtectSystem"] == "strict"
    assert service["NoNewPrivileges"] == "yes"
    if service.get("Type") != "oneshot":
        assert service["Restart"] == "always"
        assert service["RestartPreventExitStatus"] == "2"


def test_every_process_has_its_unit():
    verbs = {shlex.split(unit(path)["Service"]["ExecStart"])[1] for path in UNITS}
    assert verbs == {"worker", "serve", "relay", "watch", "purge"}


def test_the_settings_of_the_units_are_ours_and_enough_for_the_watcher(tmp_path: Path):
    from headway.cli.services.watch import watcher_environment
    from headway.watcher.runner import settings_from

    environment = environment_file()
    config = settings(environment, tmp_path)
    assert config.is_set("database")
    assert settings_from(environment | watcher_environment(config)).redis_url == environment["HEADWAY_REDIS"]
    worker = unit(DEPLOY / "systemd" / "headway-worker.service")["Service"]
    assert grace_suffices(float(worker["TimeoutStopSec"]), config)
    assert worker["KillMode"] == "mixed", "the supervisor tells its workers itself"


def test_systemd_finds_nothing_wrong_with_the_units(tmp_path: Path):
    """Where systemd is installed; the tests above read the units everywhere."""
    for path in (DEPLOY / "systemd").iterdir():
        text = path.read_text("utf-8").replace("/opt/headway/bin/headway", "/bin/true")
        (tmp_path / path.name).write_text(text)
    if shutil.which("systemd-analyze"):
        command = ["systemd-analyze", "verify", *sorted(str(path) for path in tmp_path.iterdir())]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        ours = [line for line in done.stderr.splitlines() if "headway" in line]
        assert ours == []


# ---- the page --------------------------------------------------------------------------------------------------------


def commands(text: str) -> Iterator[list[str]]:
    """Every command of ours in the page's blocks, wherever it is run, and in its tables."""
    for code in re.findall(r"^\|.*?`headway ([^`]*)`", text, re.MULTILINE):
        yield shlex.split(code)
    for block in re.findall(r"^ *```(?:sh|console)\b[^\n]*\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL):
        for line in re.sub(r"\\\n\s*", " ", block).splitlines():
            words = shlex.split(line.strip().removeprefix("$ "), comments=True)
            for start in (["docker", "compose", "run", "--rm"], ["docker", "compose", "exec"]):
                if words[: len(start)] == start:
                    yield words[len(start) + 1 :]
            if words[:1] == ["kubectl"] and "--" in words:
                words = words[words.index("--") + 1 :]
            if words[:1] == ["headway"]:
                yield words[1:]


def test_every_command_on_the_page_is_one_of_ours():
    found = list(commands(PAGE))
    assert len(found) >= 11
    for words in found:
        accept(words)


def test_the_page_names_every_file_there_is_to_deploy_with():
    text = PAGE
    files = [path.relative_to(ROOT) for path in DEPLOY.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    missing = [str(path) for path in files if path.name not in text and f"{path.parent}/" not in text]
    assert missing == []


def test_every_metric_setting_and_rule_that_the_page_names_is_there(tmp_path: Path):
    text = PAGE
    measured = (ROOT / "docs" / "reference" / "metrics.md").read_text("utf-8")
    assert set(re.findall(r"`(headway_\w+)", text)) <= set(re.findall(r"`(headway_\w+)", measured))
    assert set(re.findall(r"\b(HEADWAY_\w+)=", text)) <= VARIABLES | {
        "HEADWAY_POSTGRES_PASSWORD",
        "HEADWAY_REDIS_PASSWORD",
    }
    known = {option.name for option in OPTIONS}
    assert set(re.findall(r"`((?:queue|alert|watch)_\w+)`", text)) <= known


# ---- a copy and its return -------------------------------------------------------------------------------------------


def work_on(url: str) -> Ledger:
    ledger = Ledger.open(url)
    job = ledger.create("ads")
    job.register(NewItem(idx) for idx in range(100))
    job.record([Done(idx) for idx in range(60)])
    return ledger


def goes_on(url: str) -> None:
    with Ledger.open(url) as ledger:
        ledger.database.verify()
        job = ledger.job("ads")
        assert (job.info().total, job.info().done) == (100, 60)
        assert job.record([Done(60)]).done == 1


def backup_command(name: str) -> list[str]:
    """The command that the page has for it."""
    (line,) = re.findall(rf"^{name} .*$", PAGE, re.MULTILINE)
    return shlex.split(line)


def test_a_copy_of_a_sqlite_file_made_as_the_page_says_while_it_is_written_is_whole(tmp_path: Path):
    _, source, order = backup_command("sqlite3")
    (target,) = re.findall(r"VACUUM INTO '(.*)'", order)
    with work_on(f"sqlite:///{tmp_path}/headway.db") as ledger:
        assert Path(source).name == "headway.db"
        with sqlite3.connect(tmp_path / "headway.db") as connection:  # what the program sqlite3 does with the order
            connection.execute(order.replace(target, str(tmp_path / "copy.db")))
        connection.close()
        ledger.job("ads").record([Done(90)])  # after the copy
    goes_on(f"sqlite:///{tmp_path}/copy.db")
    assert (tmp_path / "copy.db").stat().st_mode & 0o777 == 0o600, "opening it makes it its owner's alone"


def test_a_dump_of_postgresql_made_as_the_page_says_can_be_restored(
    tmp_path: Path, postgres_server: PostgresServer, postgres_programs: Path, postgres_url: str
):
    other = postgres_server.url(postgres_server.create_database())
    with work_on(postgres_url):
        for name, url in (("pg_dump", postgres_url), ("pg_restore", other)):
            words = backup_command(name)
            words = [word.replace("headway.dump", str(tmp_path / "headway.dump")) for word in words]
            words = [url if word.startswith("postgresql://") else word for word in words]
            done = subprocess.run([postgres_programs / name, *words[1:]], capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
    goes_on(other)


# ---- and it runs -----------------------------------------------------------------------------------------------------


def test_the_commands_of_the_compose_file_run_a_task_tell_of_it_and_end_when_asked(
    compose: dict[str, Any],
    tmp_path: Path,
    spawn_cli: Spawn,
    headway_cli: Callable[..., subprocess.CompletedProcess[str]],
    postgres_url: str,
    redis_factory: Callable[..., RedisServer],
):
    """As processes, with the settings of the file, and the servers and the port of this test."""
    redis = redis_factory(maxmemory_policy="noeviction", appendonly="yes", notify_keyspace_events="Kz")
    shutil.copy(DEPLOY / "app" / "tasks.py", tmp_path)
    services = ours(compose)
    environment = interpolated(services["worker"]["environment"])
    environment |= {"HEADWAY_DATABASE": postgres_url, "HEADWAY_REDIS": redis.url(0), "HEADWAY_QUEUE_WORKERS": "1"}
    refused = headway_cli("serve", "--host", "0.0.0.0", "--port", "0", env=environment)
    assert refused.returncode == 5, refused.stderr
    assert "headway token create" in refused.stderr
    assert headway_cli("token", "create", "admin", "--role", "admin", env=environment).returncode == 0
    processes = {}
    for name, service in services.items():
        words = [word if word != str(PORT) else "0" for word in service["command"]]
        processes[name] = spawn_cli(*words, env=environment)
    stdout = processes["server"].stdout
    assert stdout is not None
    address = stdout.readline().strip().replace("0.0.0.0", "127.0.0.1")
    with urllib.request.urlopen(f"{address}/readyz", timeout=30) as answer:
        assert json.load(answer)["ready"] is True
    with TaskQueue(postgres_url, redis=redis.url(0)) as queue:
        queue.handler("echo")(lambda task, payload: payload)
        task = queue.submit("echo", {"n": 1}, user_id="anna")
        eventually(lambda: queue.get(task.id).status == "COMPLETED", 60)
    for process in processes.values():
        process.terminate()
    ended = {name: process.communicate(timeout=60)[1] for name, process in processes.items()}
    assert {name: process.returncode for name, process in processes.items()} == dict.fromkeys(processes, 0), ended
