"""The servers the tests stand on do what their fixtures say."""

import contextlib
import socket
import socketserver
import threading
import time

import psycopg
import pytest
from google.cloud import firestore as google_firestore
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

import headway
from tests.services import firestore, postgres, redis
from tests.services.firestore import FirestoreEmulator
from tests.services.nginx import FORWARDING
from tests.services.postgres import PostgresServer
from tests.services.redis import RedisServer
from tests.services.waiting import eventually


@pytest.fixture
def echo():
    """The port of a server that sends back what it gets, and what it got so far."""
    received = bytearray()

    class Handler(socketserver.BaseRequestHandler):
        def handle(self):
            with contextlib.suppress(ConnectionResetError):
                while data := self.request.recv(65536):
                    received.extend(data)
                    self.request.sendall(data)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        yield server.server_address[1], received
        server.shutdown()


@pytest.fixture
def proxy(tcp_proxy, echo):
    return tcp_proxy(echo[0])


PATIENCE = 60  # for what has to come, on a machine that is busy with other things


def dial(proxy):
    return socket.create_connection(("127.0.0.1", proxy.port), PATIENCE)


def exchange(connection, data=b"ping"):
    connection.sendall(data)
    return connection.recv(65536)


@pytest.mark.parametrize("program", redis.installations(), ids=str)
def test_every_redis_found_starts_and_answers(program, service_directory):
    server = RedisServer(service_directory("redis"), program)
    server.start()
    assert server.client().ping()
    server.discard()


@pytest.mark.parametrize("programs", postgres.installations(), ids=str)
def test_every_postgres_found_starts_and_answers(programs, service_directory):
    server = PostgresServer(service_directory("postgres"), programs)
    server.start()
    with psycopg.connect(server.url()) as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)
    server.discard()


def test_redis_forgets_when_killed_and_returns_on_the_same_port(redis_server):
    client = redis_server.client()
    client.set("a", "1")
    assert client.get("a") == "1"
    redis_server.kill9()
    with pytest.raises(RedisConnectionError):
        client.get("a")
    redis_server.start()
    assert client.get("a") is None


def test_a_server_whose_port_was_taken_meanwhile_starts_on_another(redis_program, service_directory, echo):
    server = RedisServer(service_directory("redis"), redis_program)
    server.port = taken = echo[0]
    server.start()
    assert server.port != taken
    assert server.client().ping()
    server.discard()


@pytest.mark.parametrize("value", ["first", "second"])
def test_redis_is_empty_for_every_test(redis_server, value):
    assert redis_server.client(db=1).set("a", value, nx=True)


def test_a_frozen_redis_accepts_but_does_not_answer_until_it_continues(redis_server):
    redis_server.sigstop()
    client = redis_server.client()
    client.connection_pool.connection_kwargs["socket_timeout"] = 0.05
    with pytest.raises(RedisTimeoutError):
        client.ping()
    redis_server.sigcont()
    assert eventually(redis_server.ready, PATIENCE)


def test_a_redis_with_an_append_only_file_survives_a_kill(redis_factory):
    server = redis_factory(appendonly="yes", appendfsync="always", notify_keyspace_events="Kz")
    server.client().set("a", "1")
    server.kill9()
    server.start()
    assert server.client().get("a") == "1"
    assert set(server.client().config_get("notify-keyspace-events")["notify-keyspace-events"]) == set("Kz")


@pytest.mark.parametrize("value", [1, 2])
def test_postgres_gives_every_test_an_empty_database(postgres_url, value):
    with psycopg.connect(postgres_url) as connection:
        connection.execute("CREATE TABLE only_mine (value int)")
        connection.execute("INSERT INTO only_mine VALUES (%s)", (value,))
        assert connection.execute("SELECT value FROM only_mine").fetchall() == [(value,)]


@pytest.mark.parametrize("immediate", [False, True])
def test_postgres_keeps_what_was_committed_over_a_restart(postgres_server, postgres_url, immediate):
    with psycopg.connect(postgres_url) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 1 AS value")
    postgres_server.restart(immediate=immediate)
    with psycopg.connect(postgres_url) as connection:
        assert connection.execute("SELECT value FROM kept").fetchone() == (1,)


def test_a_postgres_of_ones_own_takes_settings(postgres_factory):
    with psycopg.connect(postgres_factory(fsync="on").url()) as connection:
        assert connection.execute("SHOW fsync").fetchone() == ("on",)


@pytest.mark.parametrize("program", firestore.installations(), ids=lambda program: type(program).__name__)
def test_every_firestore_emulator_found_writes_reads_listens_and_commits(program, service_directory, monkeypatch):
    emulator = FirestoreEmulator(service_directory("firestore"), program)
    emulator.start()
    monkeypatch.setenv("FIRESTORE_EMULATOR_HOST", emulator.host)
    client = google_firestore.Client(project=emulator.new_project())
    document = client.collection("jobs").document("a")
    document.set({"done": 1})
    assert document.get().to_dict() == {"done": 1}

    heard: list[int] = []
    listener = document.on_snapshot(lambda snapshots, _changes, _at: heard.append(snapshots[0].get("done")))
    eventually(lambda: heard == [1], PATIENCE, message="the listener hears of what is there")

    @google_firestore.transactional
    def add_one(transaction):
        done = document.get(transaction=transaction).get("done")
        transaction.update(document, {"done": done + 1})

    add_one(client.transaction())
    eventually(lambda: heard == [1, 2], PATIENCE, message="the listener hears of the change")
    listener.unsubscribe()
    client.close()
    emulator.discard()


def test_the_shared_firestore_emulator_gives_each_test_a_project_of_its_own(firestore_emulator):
    for _ in range(2):
        client = google_firestore.Client(project=firestore_emulator.new_project())
        document = client.collection("jobs").document("a")
        assert not document.get().exists
        document.set({"done": 1})
        client.close()


def test_a_proxy_passes_bytes_both_ways_and_counts_them(proxy):
    with dial(proxy) as connection:
        assert exchange(connection) == b"ping"
        assert (proxy.connections, proxy.open_connections) == (1, 1)
        assert (proxy.bytes_up, proxy.bytes_down) == (4, 4)
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1) == b""
    eventually(lambda: proxy.open_connections == 0, PATIENCE)


def test_a_refusing_proxy_turns_new_connections_away_and_keeps_the_old(proxy):
    with dial(proxy) as connection:
        assert exchange(connection) == b"ping"
        proxy.refuse()
        with pytest.raises(ConnectionRefusedError):
            dial(proxy)
        assert exchange(connection) == b"ping"
    proxy.pass_through()
    with dial(proxy) as connection:
        assert exchange(connection) == b"ping"


def test_a_cut_resets_what_is_open_and_lets_clients_come_back(proxy):
    with dial(proxy) as connection:
        assert exchange(connection) == b"ping"
        proxy.cut()
        with pytest.raises(ConnectionResetError):
            connection.recv(1)
    with dial(proxy) as connection:
        assert exchange(connection) == b"ping"


def test_a_black_hole_accepts_swallows_and_resets_its_victims_when_it_ends(proxy, echo):
    _port, received = echo
    with dial(proxy) as before:
        assert exchange(before) == b"ping"
        proxy.black_hole()
        with dial(proxy) as during:
            for connection in (before, during):
                connection.settimeout(0.1)
                with pytest.raises(TimeoutError):
                    exchange(connection, b"lost")
                connection.settimeout(PATIENCE)
            proxy.pass_through()
            for connection in (before, during):
                with pytest.raises(ConnectionResetError):
                    connection.recv(1)
    assert received == b"ping"


def test_a_delay_holds_back_each_answer(proxy):
    proxy.delay(0.1)
    with dial(proxy) as connection:
        began = time.monotonic()
        assert exchange(connection) == b"ping"
        assert time.monotonic() - began >= 0.1
        proxy.delay(60)
        connection.sendall(b"ping")
        proxy.cut()
        with pytest.raises(ConnectionResetError):
            connection.recv(1)


def test_a_throttle_carries_so_many_bytes_a_second(proxy):
    proxy.throttle(200_000)
    with dial(proxy) as connection:
        began = time.monotonic()
        connection.sendall(bytes(40_000))
        got = 0
        while got < 40_000:
            got += len(connection.recv(65536))
        assert time.monotonic() - began >= 0.2


def test_a_dropped_reply_comes_after_the_request_was_applied(proxy, echo):
    _port, received = echo
    proxy.drop_replies(every=2, to=b"count")
    with dial(proxy) as connection:
        assert exchange(connection, b"look") == b"look"
        assert exchange(connection, b"count") == b"count"
        assert exchange(connection, b"look") == b"look"
        with pytest.raises(ConnectionResetError):
            exchange(connection, b"count")
    assert received == b"lookcountlookcount"


def test_a_proxy_without_a_server_resets_its_clients(proxy, tcp_proxy):
    proxy.refuse()
    # The reset may be there before the dialling is over.
    with pytest.raises(ConnectionResetError), dial(tcp_proxy(proxy.port)) as connection:
        connection.recv(1)


def test_nginx_passes_requests_on_by_http_1_1_and_adds_only_what_it_is_told(nginx_factory, echo):
    port, received = echo
    for directives, expected in (("", False), (FORWARDING, True)):
        nginx = nginx_factory(f"http://127.0.0.1:{port}", directives=directives)
        received.clear()
        with socket.create_connection(("127.0.0.1", nginx.port), PATIENCE) as connection:
            connection.sendall(b"GET /jobs HTTP/1.1\r\nHost: headway.example\r\nConnection: close\r\n\r\n")
            eventually(lambda: b"\r\n\r\n" in received, PATIENCE)
        assert received.startswith(b"GET /jobs HTTP/1.1\r\n")
        assert (b"X-Forwarded-For: 127.0.0.1\r\n" in received) == expected
        assert (b"Host: headway.example\r\n" in received) == expected


def test_the_command_runs_in_a_process_of_its_own(headway_cli):
    done = headway_cli("--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert headway.__version__ in done.stdout
