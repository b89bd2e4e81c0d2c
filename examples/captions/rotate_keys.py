"""Change the keys in headway.toml that payloads and results are encrypted with.

python rotate_keys.py             put a new key first; the old ones still decrypt
python rotate_keys.py --retire    remove the old ones, when no task that was written with them is left
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from pathlib import Path

from cryptography.fernet import Fernet

SETTINGS = Path("headway.toml")


def main() -> None:
    text = SETTINGS.read_text("utf-8") if SETTINGS.exists() else ""
    keys = tomllib.loads(text).get("queue_keys", [])
    keys = keys[:1] if "--retire" in sys.argv else [Fernet.generate_key().decode(), *keys]
    rest = re.sub(r"^queue_keys = .*\n", "", text, flags=re.MULTILINE)
    new = SETTINGS.with_suffix(".new")
    new.write_text(f"queue_keys = {json.dumps(keys)}\n{rest}", "utf-8")
    new.chmod(0o600)
    new.replace(SETTINGS)  # processes read either the old file or the new one
    print(f"{SETTINGS}: a key that encrypts, {len(keys) - 1} older ones that only decrypt.")


if __name__ == "__main__":
    main()
