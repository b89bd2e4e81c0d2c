"""The answer to COMMIT is lost: every call that writes gives the answer, and leaves the state, of an undisturbed one."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

import headway.ledger
from headway import ProgressManager
from headway.core.retry import RetryPolicy
from headway.ledger import Done, Failed, Failure, Hold, Item, Job, Ledger, NewItem, Recorded
from headway.ledger.content import fingerprint
from headway.ledger.fleet import fleet
from headway.ledger.fleet.share import Share
from tests.services.lost_answers import contents, through
from tests.services.postgres import PostgresServer
from tests.services.proxy import TcpProxy
from tests.services.waiting import eventually

BOOM = Failure("ValueError", "boom", "ads.py:make_ad")
AT_ONCE = RetryPolicy(2, base=0.0, cap=0.0)


@dataclass
class Scene:
    """A ledger with a job in which something has happened already."""

    ledger: Ledger
    url: str
    job: Job = field(init=False)
    claimed: list[Item] = field(init=False)

    def __post_init__(self) -> None:
        self.job = self.ledger.create("ads", policy=AT_ONCE)
        self.job.register(NewItem(idx, f'{{"n":{idx}}}', f"k{idx}", fingerprint(f'{{"n":{idx}}}')) for idx in range(10))
        self.job.seal("digest")
        self.job.record([Done(0, result='"r"'), Done(1, seconds=1.0)])
        for _ in range(3):
            self.job.record([Failed(2, BOOM)])
        self.claimed = self.job.claim("w", limit=2, lease=1000)  # 3 and 4

    def held(self) -> Hold:
        return self.ledger.hold(self.job, {"workers": 2}, lease=1000)

    def taken_over(self) -> None:
        hold = self.ledger.hold(self.job, {}, lease=1e-6)
        self.job.note_running(hold, [(5, f"{hold.mark} worker 1")])

    def lapsed(self) -> None:
        (item,) = self.job.claim("slow", limit=1, lease=1e-6)
        found = self.ledger.database.one("SELECT lease_until FROM progress WHERE idx = ?", (item.idx,))
        assert found is not None
        # A store whose clock counts milliseconds may be asked twice within one.
        eventually(lambda: self.ledger.database.now() > found[0])

    def damaged(self) -> None:
        self.ledger.database.write("UPDATE input_products SET payload = '{bad' WHERE idx = 6")

    def all_but_the_last(self) -> None:
        self.job.record([Done(idx) for idx in range(2, 9)])

    def manager(self) -> ProgressManager:
        return ProgressManager()  # the same database, by the environment

    def handed_over(self, hold: Hold) -> None:
        fleet.hand_over(self.ledger.database, hold, work="{}", queue="normal", slots=2, most=None, has_pass=True)

    def stopped_fleet(self) -> None:
        self.handed_over(self.held())
        self.job.give_back([item.idx for item in self.claimed])
        self.job.stop(actor="ann")

    def share(self) -> Share:
        self.handed_over(self.held())
        known = fleet.read(self.ledger.database, self.job.no)
        assert known is not None
        return Share(self.ledger.database, self.job.id, known, "slot", lease=1000)

    def share_with_a_block(self) -> Share:
        share = self.share()
        assert [item.idx for item in share.claim_some(9)] == [5, 6, 7]
        return share

    def share_that_runs(self) -> Share:
        share = self.share_with_a_block()
        share.note_running(share.hold, [(5, "w")])
        return share

    def share_of_nothing(self) -> None:
        self.job.record([Done(idx) for idx in range(2, 10)], settle=False)
        self.share()

    def outputs(self) -> None:
        self.ledger.database.write("INSERT INTO outputs (job, path, seq, size) VALUES (?, 'o', 5, 50)", (self.job.no,))


Call = Callable[[Scene, Any], object]


def taken(scene: Scene, items: list[Item]) -> object:
    """What was claimed. Tokens differ from run to run; each is the one that stands in the database."""
    rows = scene.ledger.database.all("SELECT idx, token FROM progress WHERE job = ?", (scene.job.no,))
    assert {(item.idx, item.token) for item in items} <= set(rows)
    return anybodys(items)


def anybodys(items: list[Item]) -> object:
    return [item._replace(token=None) for item in items]


def managed(call: Callable[[ProgressManager], object]) -> Call:
    return lambda scene, manager: (call(manager), manager.close())[0]


#: operation: what is prepared, what is called. The number of the COMMIT that is lost is behind a colon, 0 if none is.
CALLS: dict[str, tuple[Callable[[Scene], Any] | None, Call]] = {
    "create": (None, lambda scene, _: scene.ledger.create("new").id),
    "describe": (
        None,
        lambda scene, _: scene.ledger.describe(
            scene.job, function="f", source="s", command="c", keyed_by="k", max_retries=5
        ),
    ),
    "hold": (None, lambda scene, _: plain(scene.ledger.hold(scene.job, {"a": 1}, lease=1000))),
    "hold after a run that was killed": (
        Scene.taken_over,
        lambda scene, _: plain(scene.ledger.hold(scene.job, {}, policy=AT_ONCE, lease=1000)),
    ),
    "renew of a hold": (Scene.held, lambda scene, hold: scene.ledger.renew(hold)),
    "release": (Scene.held, lambda scene, hold: scene.ledger.release(hold, "finished")),
    "archive": (None, lambda scene, _: scene.ledger.archive("ads", actor="ann") is not None),
    "forget": (None, lambda scene, _: scene.ledger.forget("ads", actor="ann")),
    "forget:1": (None, lambda scene, _: scene.ledger.forget("ads", actor="ann")),
    "forget:2": (None, lambda scene, _: scene.ledger.forget("ads", actor="ann")),
    "purge": (
        lambda scene: scene.job.record([Done(idx) for idx in range(10)]),
        lambda scene, _: scene.ledger.purge(older_than=-1, actor="ann"),
    ),
    "audit": (None, lambda scene, _: scene.ledger.note("looked", "ads", {"a": 1}, actor="ann")),
    "register": (None, lambda scene, _: scene.job.register([NewItem(3), NewItem(10), NewItem(11)])),
    "seal": (
        lambda scene: scene.job.record([Done(idx) for idx in range(3, 10)], settle=False),
        lambda scene, _: scene.job.seal("other"),
    ),
    "replace_items": (None, lambda scene, _: scene.job.replace_items([NewItem(0, "1", "k0", 7), NewItem(2, "2")])),
    "drop": (None, lambda scene, _: scene.job.drop([0, 2, 9])),
    "rewrite_outputs": (Scene.outputs, lambda scene, _: scene.job.rewrite_outputs()),
    "put_empty_results": (None, lambda scene, _: scene.job.put_empty_results()),
    "pause": (Scene.held, lambda scene, _: scene.job.pause(actor="ann")),
    "scale": (Scene.held, lambda scene, _: scene.job.scale(3, actor="ann")),
    "claim": (None, lambda scene, _: taken(scene, scene.job.claim("v", limit=3, lease=1000))),
    "claim of what another lost": (
        Scene.lapsed,
        lambda scene, _: taken(scene, scene.job.claim("v", limit=2, lease=1000)),
    ),
    "claim of what is damaged": (
        Scene.damaged,
        lambda scene, _: taken(scene, scene.job.claim("v", limit=9, lease=1000)),
    ),
    "renew": (None, lambda scene, _: scene.job.renew(scene.claimed, lease=2000)),
    "note_running": (Scene.held, lambda scene, hold: scene.job.note_running(hold, [(7, f"{hold.mark} worker 1")])),
    "give_back": (None, lambda scene, _: scene.job.give_back([3])),
    "record": (None, lambda scene, _: what_it_did(scene.job.record([Done(5, seconds=1.0)]))),
    "record of a failure": (None, lambda scene, _: plain(scene.job.record([Failed(5, BOOM, seconds=1.0)]))),
    "record under a claim": (
        None,
        lambda scene, _: plain(scene.job.record([Failed(3, BOOM, token=scene.claimed[0].token)])),
    ),
    "record of many": (
        None,
        lambda scene, _: plain(scene.job.record([Done(5), Failed(6, BOOM), Done(0), Done(2), Failed(2, BOOM)])),
    ),
    "record of the last": (Scene.all_but_the_last, lambda scene, _: plain(scene.job.record([Done(9)]))),
    "finish": (
        lambda scene: scene.job.record([Done(idx) for idx in range(3, 10)], settle=False),
        lambda scene, _: scene.job.finish(),
    ),
    "hand over to a fleet": (Scene.held, lambda scene, hold: scene.handed_over(hold)),
    "claim of a block": (Scene.share, lambda scene, share: [item.idx for item in share.claim_some(4)]),
    "record in a block": (
        Scene.share_with_a_block,
        lambda scene, share: plain(share.record([Done(5, seconds=1.0), Done(6)])),
    ),
    "record in a block, with a failure": (
        Scene.share_with_a_block,
        lambda scene, share: plain(share.record([Failed(5, BOOM, seen=0)])),
    ),
    "note_running in a block": (
        Scene.share_with_a_block,
        lambda scene, share: share.note_running(share.hold, [(5, "w")]),
    ),
    "excuse what runs in a block": (Scene.share_that_runs, lambda scene, share: share.excuse_running()),
    "leave": (Scene.share_with_a_block, lambda scene, share: share.leave()),
    "attend": (Scene.share_of_nothing, lambda scene, _: fleet.attend(scene.ledger.database, scene.job.no)),
    "continue_run": (Scene.stopped_fleet, lambda scene, _: scene.job.continue_run(actor="ann")),
    "retry_dead": (None, lambda scene, _: scene.job.retry_dead(actor="ann")),
    "untouched of what is damaged": (Scene.damaged, lambda scene, _: scene.job.untouched(-1, 9)),
    "mark_done": (Scene.manager, managed(lambda manager: manager.mark_done(3, {"a": 1}))),
    "mark_failed": (Scene.manager, managed(lambda manager: manager.mark_failed(3, {"error": "no"}))),
    "mark_many": (Scene.manager, managed(lambda manager: manager.mark_many([(1, None), (2, {"a": 1})]))),
    "register by the manager": (Scene.manager, managed(lambda manager: manager.register(range(4)))),
    "claim by the manager": (
        Scene.manager,
        managed(lambda manager: (manager.register([0]), anybodys(manager.claim("w")))[1]),
    ),
}


def what_it_did(recorded: Recorded) -> object:
    """Without how many others wait or are dead, which SQLite says of a single success to holders of the job only."""
    return plain(replace(recorded, waiting=0, given_up=0))


def plain(answer: object) -> object:
    """An answer without what differs from run to run."""
    if isinstance(answer, Hold):
        return answer.job, answer.token, answer.run
    names = [name for name in answer.__dataclass_fields__ if name != "due"]  # type: ignore[attr-defined]
    return [getattr(answer, name) for name in names]


def outcome(name: str, url: str, monkeypatch: pytest.MonkeyPatch, disturb: Callable[[], None] | None = None):
    monkeypatch.setenv("HEADWAY_DATABASE", url)
    prepare, call = CALLS[name]
    with Ledger.open(url) as ledger:
        scene = Scene(ledger, url)
        prepared = prepare(scene) if prepare is not None else None
        if disturb is not None:
            disturb()
        answer = call(scene, prepared)
        return answer, contents(ledger.database)


#: With the request lost nothing was committed and the call is simply made again: a few show that.
CUTS = [(name, "reply") for name in CALLS] + [
    (name, "request") for name in ("hold", "claim", "record of many", "record of the last", "forget:1")
]


@pytest.mark.req("S3-23")
@pytest.mark.parametrize(("name", "what"), CUTS)
def test_a_call_whose_commit_was_cut_off_is_as_if_nothing_had_happened(
    name: str,
    what: str,
    tmp_path: Path,
    postgres_server: PostgresServer,
    tcp_proxy: Callable[[int], TcpProxy],
    monkeypatch: pytest.MonkeyPatch,
):
    def new_database() -> str:
        return postgres_server.url(postgres_server.create_database(with_tables=True))

    # Shares and the end of a fleet exist on PostgreSQL only; everything else is the same on SQLite.
    shares = "block" in name or name in ("leave", "continue_run")
    proxy = tcp_proxy(postgres_server.port)
    later = int(name.partition(":")[2] or 0)
    # The sums of a minute stand elsewhere once it is over: both must be of one, and are made again where one ended.
    for turn in range(5):
        minute = time.time() // 60
        alone = new_database() if shares else f"sqlite:///{tmp_path / f'{turn}.db'}"
        undisturbed = outcome(name, alone, monkeypatch)
        disturbed = outcome(
            name, through(proxy, new_database()), monkeypatch, lambda: proxy.lose_commits(what, after=later)
        )
        assert proxy.commits_to_lose == 0, "the fault did not happen"
        if time.time() // 60 == minute:
            break
    assert disturbed[0] == undisturbed[0]
    assert disturbed[1] == undisturbed[1]


def test_no_operation_of_the_ledger_is_missing_above():
    folder = Path(headway.ledger.__file__).parent
    written = {
        operation for path in folder.glob("*.py") for operation in re.findall(r'operation="(\w+)"', path.read_text())
    }
    assert written <= {name.partition(" ")[0].partition(":")[0] for name in CALLS}
