"""The folder a society lives in."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from coterie.errors import StoreUnusable

TEMPLATES = ("coterie.toml", "llmservices.json")
"""Files that nobody else has: where one is, a society is."""
TOOLS = "tools.py"


@dataclass(frozen=True, slots=True)
class SocietyFolder:
    path: Path

    @property
    def data(self) -> Path:
        """What the runtime keeps; nobody else's business, so mode 0700."""
        return self.path / "data"

    @property
    def artifacts(self) -> Path:
        return self.data / "artifacts"

    @property
    def exists(self) -> bool:
        return self.data.is_dir() or any((self.path / name).exists() for name in TEMPLATES)

    def make(self) -> list[Path]:
        """See that the folder is there; a new one gets commented templates. What was written."""
        try:
            if self.exists:
                self.data.mkdir(mode=0o700, exist_ok=True)
                return []
            self.data.mkdir(mode=0o700, parents=True)
            return [self._write(name) for name in (*TEMPLATES, TOOLS) if not (self.path / name).exists()]
        except OSError as error:
            raise StoreUnusable(
                f"{self.path} cannot be made or written ({error.strerror}): choose another folder with --dir"
            ) from error

    def _write(self, name: str) -> Path:
        target = self.path / name
        target.write_bytes((files("coterie") / "templates" / name).read_bytes())
        return target
