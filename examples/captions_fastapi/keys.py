"""Put a new encryption key first into headway.toml, and keep the others behind it."""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path

from cryptography.fernet import Fernet

FILE = Path("headway.toml")

settings = tomllib.loads(FILE.read_text()) if FILE.exists() else {}
keys = [Fernet.generate_key().decode(), *settings.get("queue_keys", [])]
new = FILE.with_suffix(".new")
new.touch(mode=0o600)
new.write_text(f"queue_keys = {json.dumps(keys)}\n")
os.replace(new, FILE)  # no process reads half a file
print(f"{FILE} has {len(keys)} keys.")
