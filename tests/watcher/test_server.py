"""The server's side: its settings, its rights, its link."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from headway.errors import ConfigError, HeadwayError, InvalidInput, Unavailable
from headway.watcher import RedisProcessedStore, link
from headway.watcher.adapters import PubSubAdapter, checked_url, connect
from headway.watcher.link import preflight
from headway.watcher.runner import main
from tests.services.redis import RedisServer, installations
from tests.services.waiting import eventually
from tests.watcher.scene import CHANNEL, Scene

SUFFICIENT = ["Kz", "AK", "KEA", "g$lshztdxeK", "KzE"]
INSUFFICIENT = ["", "K", "z", "Ez", "E", "KE", "K$", "KEx", "Kg", "EA"]


@pytest.mark.req("S4-13", "S4-26")
@pytest.mark.parametrize("flags", SUFFICIENT)
def test_flags_that_announce_sorted_sets_by_key_are_accepted_however_they_are_spelled(scene: Scene, flags):
    scene.redis.config_set("notify-keyspace-events", flags)
    before = scene.redis.config_get("notify-keyspace-events")
    preflight(connect(scene.url))
    assert scene.redis.config_get("notify-keyspace-events") == before, "the server's setting is not ours to change"


@pytest.mark.req("S4-13", "S4-26")
@pytest.mark.parametrize("flags", INSUFFICIENT)
def test_insufficient_flags_are_refused_with_the_setting_to_use(scene: Scene, flags):
    scene.redis.config_set("notify-keyspace-events", flags)
    with pytest.raises(ConfigError, match="does not announce") as caught:
        preflight(connect(scene.url))
    assert "notify-keyspace-events Kz" in caught.value.hint


@pytest.mark.parametrize("flags", ["Kz", "AK", "K", "Ez", ""])
def test_a_probe_agrees_with_the_flags_where_config_is_denied(scene: Scene, monkeypatch, flags):
    monkeypatch.setattr(link, "PROBE_S", 0.3)
    scene.redis.config_set("notify-keyspace-events", flags)
    scene.redis.execute_command("ACL", "SETUSER", "operator", "on", ">word", "~*", "&*", "+@all", "-config")
    redis = connect(scene.url.replace("redis://", "redis://operator:word@"))
    if flags in SUFFICIENT:
        preflight(redis)
    else:
        with pytest.raises(ConfigError, match="a test change was not announced"):
            preflight(redis)
    assert scene.redis.keys("headway:probe:*") == []


@pytest.mark.req("S4-14")
def test_a_wrong_setting_is_found_before_the_first_subscription(scene: Scene):
    scene.redis.config_set("notify-keyspace-events", "")
    scene.burst(1)
    with pytest.raises(ConfigError), scene.watching():
        pass
    assert scene.events.hear() == []
    assert scene.commands().get("PSUBSCRIBE", 0) == 0


@pytest.mark.req("S4-33")
@pytest.mark.parametrize("flags", ["zK", "AK"])
def test_the_servers_setting_is_never_changed(scene: Scene, flags):
    scene.redis.config_set("notify-keyspace-events", flags)
    with scene.watching():
        pass
    assert scene.redis.config_get("notify-keyspace-events")["notify-keyspace-events"] == flags
    assert scene.commands().get("CONFIG|SET", 1) == 1


@pytest.mark.req("S4-12")
def test_without_the_right_to_subscribe_it_ends_with_the_servers_reason(scene: Scene):
    scene.redis.execute_command("ACL", "SETUSER", "operator", "on", ">word", "~*", "resetchannels", "+@all")
    url = scene.url.replace("redis://", "redis://operator:word@")
    with (
        pytest.raises(Unavailable, match="refused us: this user has no permissions") as caught,
        scene.watching(redis_url=url),
    ):
        pass
    assert "word" not in str(caught.value)


@pytest.mark.req("S4-12")
def test_without_a_server_it_ends_with_a_clear_error(scene: Scene):
    scene.server.stop()
    with pytest.raises(Unavailable, match="cannot be reached"), scene.watching():
        pass


@pytest.mark.parametrize(
    "url",
    [
        "http://localhost",
        "localhost:6379",
        "",
        "redis://h:port/0",
        "redis://h:99999/0",
        "redis://[::1/0",
        "redis://h/one",
        "redis://h/\u0661",
        "redis://h/0?db=x",
        "redis://h/0?decode_responses=true",
        "redis://h/0?protocol=3",
        "redis://h/0?socket_timeout=60",
        "redis://h/0?retry_on_timeout=yes",
        "redis://h/0?health_check_interval=1",
        "redis://h/0?client_name=",
        "redis://h/0#fragment",
    ],
)
def test_an_unusable_address_is_refused(url):
    with pytest.raises(InvalidInput, match="REDIS_URL is not a valid address") as caught:
        connect(url)
    assert "redis://user:password@host:6379/0" in caught.value.hint


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("redis://", "localhost:6379/0"),
        ("redis://user:se%2Fcr%40et@h.example:7000/3", "h.example:7000/3"),
        ("rediss://:x@[::1]:7000?ssl_cert_reqs=none&db=2", "::1:7000/2"),
        ("unix:///run/redis.sock?db=4", "/run/redis.sock/4"),
    ],
)
def test_an_address_is_named_by_its_place_alone(url, place):
    assert checked_url(url) == place


SECRETS = ["qqq#zzz/vvv", "qqq/zzz", "12/qqq", "12#qqq", "12?qqq", "qqq@zzz#vvv", "qqq%zzz#", "?db=qqq"]


@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.parametrize(
    "shape", ["redis://:{}@127.0.0.1:1/0", "redis://me:{}@127.0.0.1:1/0", "rediss://{}@127.0.0.1:1"]
)
def test_no_part_of_a_password_that_was_not_escaped_is_repeated(secret, shape):
    with pytest.raises(HeadwayError) as caught:
        connect(shape.format(secret)).time()
    shown = f"{caught.value} {caught.value.hint}"
    for part in ("qqq", "zzz", "vvv", ":12"):
        assert part not in shown


@pytest.mark.req("S4-03")
def test_three_registries_of_the_queue_are_listened_to(scene: Scene):
    with scene.watching():
        assert scene.redis.pubsub_numpat() == 3


@pytest.mark.req("S4-20")
def test_a_cut_link_ends_the_watcher(scene: Scene):
    watching = scene.start()
    (link,) = [c for c in scene.redis.client_list() if c["name"] == "headway-watcher" and c["psub"] != "0"]
    scene.redis.client_kill_filter(_id=link["id"])
    error = watching.ended()
    assert isinstance(error, Unavailable)
    assert "cannot be reached" in str(error)


@pytest.mark.req("S4-20")
def test_a_link_that_is_dead_without_saying_so_ends_the_watcher(scene: Scene, monkeypatch):
    monkeypatch.setattr(link, "REPLY_S", 0.5)
    watching = scene.start(ping_s=0.2)
    scene.server.sigstop()
    error = watching.ended()
    assert isinstance(error, Unavailable)
    assert "no answer to a ping" in str(error)


@pytest.mark.req("S4-20")
def test_a_link_whose_bytes_vanish_ends_the_watcher_and_the_next_one_catches_up(scene: Scene, tcp_proxy, monkeypatch):
    monkeypatch.setattr(link, "REPLY_S", 0.5)
    proxy = tcp_proxy(scene.server.port)
    watching = scene.start(redis_url=f"redis://127.0.0.1:{proxy.port}/0", ping_s=0.2)
    proxy.black_hole()
    scene.burst(1)
    assert isinstance(watching.ended(), Unavailable)
    assert scene.events.hear() == []
    with scene.watching():
        scene.events.expect(("burst-00000", "failed"))


def test_an_unconfirmed_event_is_published_again_under_its_id(scene: Scene, tcp_proxy):
    proxy = tcp_proxy(scene.server.port)
    watching = scene.start(redis_url=f"redis://127.0.0.1:{proxy.port}/0")
    proxy.drop_replies(to=b"PUBLISH")
    scene.burst(1)
    assert isinstance(watching.ended(), Unavailable)
    with scene.watching():
        scene.events.expect(("burst-00000", "failed"), ("burst-00000", "failed"))
    assert len({event["id"] for event in scene.events.all}) == 1


def test_a_slow_link_is_only_slow(scene: Scene, tcp_proxy):
    proxy = tcp_proxy(scene.server.port)
    proxy.delay(0.05)
    with scene.watching(redis_url=f"redis://127.0.0.1:{proxy.port}/0"):
        ids = scene.burst(100)
        scene.events.expect(*[(job_id, "failed") for job_id in ids])


def test_the_sweep_reports_its_entries_before_a_lost_setting(scene: Scene):
    watching = scene.start(sweep_s=0.2)
    scene.redis.config_set("notify-keyspace-events", "")
    scene.burst(1)
    assert isinstance(watching.ended(), ConfigError)
    scene.events.expect(("burst-00000", "failed"))


@pytest.mark.req("S4-13")
@pytest.mark.parametrize("rights", ["+@all", "+@all -config"])
def test_a_watcher_that_was_blinded_notices_it_at_the_next_sweep_although_nothing_happens(
    scene: Scene, monkeypatch, rights
):
    monkeypatch.setattr(link, "PROBE_S", 0.5)
    scene.redis.execute_command("ACL", "SETUSER", "operator", "on", ">word", "~*", "&*", *rights.split())
    url = scene.url.replace("redis://", "redis://operator:word@")
    watching = scene.start(redis_url=url, sweep_s=0.3)
    scene.sweeps(2)  # that find nothing wrong
    assert watching.error is None
    scene.redis.config_set("notify-keyspace-events", "")
    error = watching.ended()
    assert isinstance(error, ConfigError)
    assert "does not announce" in str(error)
    assert scene.redis.keys("headway:probe:*") == []


@pytest.mark.req("S4-02", "S4-31")
def test_without_notifications_it_ends_and_does_not_poll(scene: Scene, monkeypatch, tmp_path):
    """There is nothing it could be switched to: whatever the environment says."""
    scene.redis.config_set("notify-keyspace-events", "")
    scene.burst(1)
    scene.redis.config_resetstat()
    monkeypatch.chdir(tmp_path)
    for extra in ({}, {"RQ_WATCHER_MODE": "polling", "RQ_WATCHER_POLL_INTERVAL_SECONDS": "1", "poll_interval_s": "1"}):
        environment = {
            "REDIS_URL": scene.url, "RQ__QUEUE": scene.name, "DIGITS_EVENTS_CHANNEL": CHANNEL,
            "RQ_WATCHER_STUCK_TIMEOUT_SECONDS": "60", "HEADWAY_DATABASE": f"sqlite:///{tmp_path}/x.db", **extra,
        }  # fmt: skip
        assert main(environment) == 2
    assert not {"ZRANGE", "ZSCAN", "ZCARD", "ZRANGEBYSCORE", "ZREVRANGEBYSCORE"} & scene.commands().keys()
    assert scene.events.hear() == []


@pytest.mark.req("S4-32")
def test_another_database_than_0_has_another_prefix(scene: Scene, tmp_path):
    other = Scene(scene.server, tmp_path, db=1)
    with other.watching():
        scene.burst(1, prefix="elsewhere")
        other.burst(1)
        other.events.expect(("burst-00000", "failed"))


@pytest.mark.req("S4-35")
@pytest.mark.parametrize(("name", "neighbour"), [("q[1]", "q1"), ("jobs*", "jobs-of-others"), ("a", "b")])
def test_a_queue_is_never_mistaken_for_another(scene: Scene, tmp_path, name, neighbour):
    other = Scene(scene.server, tmp_path, queue=neighbour)
    scene = Scene(scene.server, tmp_path, queue=name)
    with scene.watching():
        before = scene.commands()
        other.burst(1, prefix="other")
        scene.burst(1)
        scene.events.expect(("burst-00000", "failed"))
        assert scene.commands()["PUBLISH"] == before.get("PUBLISH", 0) + 1


def test_one_watcher_can_watch_several_queues(scene: Scene, tmp_path):
    other = Scene(scene.server, tmp_path, queue="letters")
    with scene.watching(queues=("digits", "letters")) as watching:
        scene.burst(1, prefix="d")
        other.burst(1, prefix="l")
        events = scene.events.expect(("d-00000", "failed"), ("l-00000", "failed"))
        assert set(watching.watcher.started) == {"digits", "letters"}
    assert [event["data"]["queue"] for event in events] == ["digits", "letters"]


@pytest.mark.req("S4-06", "S4-10")
def test_running_executions_are_known_until_they_end(scene: Scene):
    scene.worker()
    with scene.watching(stuck_job_timeout_s=2.0) as watching:
        started = watching.watcher.started["digits"]
        job, flag = scene.hang()
        eventually(lambda: [member.split(":")[0] for member in started.running] == [job.id])
        (running,) = started.running.values()
        created = running.created_at
        eventually(lambda: scene.commands().get("ZADD", 0) >= 5, message="heartbeats")
        assert [running.created_at for running in started.running.values()] == [created]
        flag.touch()
        eventually(lambda: not started.running)
    assert scene.events.hear() == []


def test_closed_idle_connections_cause_a_read_and_no_outage(scene: Scene):
    with scene.watching(sweep_s=0.2) as watching:
        for _ in range(3):
            scene.sweeps(2)
            scene.redis.client_kill_filter(_type="normal", skipme=True)
        assert watching.error is None
        scene.burst(1)
        scene.events.expect(("burst-00000", "failed"))


def test_the_kernel_watches_over_a_link_that_says_nothing(scene: Scene):
    """At no cost in commands: a peer that vanished is noticed after 10 + 2 * 5 s."""
    link = connect(scene.url).pubsub()
    link.subscribe("x")
    assert isinstance(link, PubSubAdapter)
    sock = link._pubsub.connection._sock  # type: ignore[attr-defined]  # redis-py's own
    assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 10
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL) == 5
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT) == 2
    link.close()


def test_a_server_on_a_socket_file_is_watched_as_well(redis_factory, tmp_path):
    server = redis_factory(unixsocket=str(tmp_path / "redis.sock"), notify_keyspace_events="Kz")
    scene = Scene(server, tmp_path)
    with scene.watching(redis_url=f"unix://{tmp_path}/redis.sock"):
        scene.burst(1)
        scene.events.expect(("burst-00000", "failed"))
    scene.close()


DOCUMENT = (Path(__file__).parents[2] / "docs" / "reference" / "watcher.md").read_text()


def documented_rights(*more: str, without: str = "") -> list[str]:
    """The command of the document, with the rights it names for these cases."""
    found = re.search(r"```acl\n(.*?)```", DOCUMENT, re.DOTALL)
    assert found
    words = found.group(1).split()
    for case in more:
        extra = re.search(rf"^- {re.escape(case)}[^`]*?: `([^`]+)`", DOCUMENT, re.MULTILINE)
        assert extra, case
        words += extra.group(1).split()
    return [word.replace("PASSWORD", "word") for word in words if word != without]


@pytest.mark.req("S4-12")
@pytest.mark.parametrize("program", installations(), ids=lambda program: str(program.parent))
@pytest.mark.parametrize("config", ["granted", "denied"])
@pytest.mark.parametrize("store", ["sqlite", "redis"])
def test_the_rights_in_the_document_suffice(service_directory, tmp_path, program, config, store):
    server = RedisServer(service_directory("acl"), program, notify_keyspace_events="Kz")
    server.start()
    scene = Scene(server, tmp_path)
    cases = ["with a stream"]
    cases += ["with `RQ_WATCHER_STORE=redis`"] if store == "redis" else []
    cases += ["where `CONFIG` is denied"] if config == "denied" else []
    rights = documented_rights(*cases, without="+config|get" if config == "denied" else "")
    scene.redis.execute_command(*rights)
    url = scene.url.replace("redis://", "redis://watcher:word@")
    try:
        scene.worker()
        kept = (lambda queue: RedisProcessedStore(connect(url), queue)) if store == "redis" else None
        with scene.watching(store=kept, redis_url=url, stream="digits:log", sweep_s=0.5):
            failed = scene.enqueue("fail")
            scene.events.expect((failed.id, "failed"))
            job, flag = scene.hang()
            job.cancel()
            scene.events.expect((failed.id, "failed"), (job.id, "canceled"))
            flag.touch()
            scene.events.expect((failed.id, "failed"), (job.id, "canceled"), (job.id, "finished"))
            scene.sweeps(2)
        assert scene.redis.xlen("digits:log") == 3
        # redis-py also says its name and version, and does not mind that it may not.
        allowed = {"client", "client|setinfo"} | ({"config", "config|get"} if config == "denied" else set())
        assert {str(entry["object"]) for entry in scene.redis.acl_log()} <= allowed
    finally:
        scene.close()
        server.discard()


def test_a_stream_key_of_another_type_ends_the_watcher_without_a_record(scene: Scene):
    scene.redis.set("digits:log", "no stream")
    scene.burst(1)
    assert "refused to publish" in str(scene.start(stream="digits:log").ended())
    scene.redis.delete("digits:log")
    with scene.watching(stream="digits:log"):
        eventually(lambda: scene.redis.xlen("digits:log") == 1)
