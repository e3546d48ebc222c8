"""What self-contained pages share: their parts as files, embedded data, a policy by hash."""

import json
from base64 import b64encode
from collections.abc import Iterable
from functools import cache
from hashlib import sha256
from importlib.resources import files

__all__ = ["embed", "join_scripts", "policy", "read_part"]


@cache
def read_part(path: str) -> str:
    """Return a file of `penstock/view` as text."""
    return files("penstock.view").joinpath(*path.split("/")).read_text(encoding="utf-8")


def join_scripts(paths: Iterable[str]) -> str:
    """Join scripts in dependency order."""
    return "\n" + "\n".join(read_part(f"{path}.js") for path in paths)


def policy(style: str, script: str) -> str:
    """Return a policy that blocks everything but our own style and script, by their hashes."""
    rules = {
        "default-src": "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "img-src": "data:",
        "style-src": f"'sha256-{_hash(style)}'",
        "script-src": f"'sha256-{_hash(script)}'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())


def embed(value: object) -> str:
    """Return a value as JSON inside an element; `<` is escaped, or it could end the element."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def _hash(text: str) -> str:
    return b64encode(sha256(text.encode("utf-8")).digest()).decode("ascii")
