"""`coterie init`: a folder to begin with."""

from __future__ import annotations

from coterie.cli.options import HOME, Json, MaybeDir, Place
from coterie.cli.output import say, say_json


def init(place: Place = None, dir: MaybeDir = None, json: Json = False) -> None:  # noqa: A002
    """Make a society's folder, with commented templates."""
    from coterie.config import SocietyFolder
    from coterie.errors import StoreUnusable

    folder = SocietyFolder(place or dir or HOME)
    if folder.exists:
        raise StoreUnusable(f"there is a society in {folder.path} already: run it with coterie serve {folder.path}")
    written = folder.create()
    if json:
        say_json({"dir": str(folder.path), "written": [str(file) for file in written]})
        return
    for file in written:
        say(f"wrote {file}")
    say(f"Next: name your model services in {folder.path / 'llmservices.json'}, then run: coterie serve {folder.path}")
