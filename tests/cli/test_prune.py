from __future__ import annotations

from .commands import coterie
from .environment import Environment


def test_prune_counts_first_and_then_deletes(either: Environment) -> None:
    coterie("send", "ada", "hello", "--wait", "--dir", either.folder)

    counted = coterie("prune", "--dry-run", "--dir", either.folder)
    assert counted.stdout == (
        "Would delete nothing.\n"
        "All messages are kept: set store.keep_days or store.keep_gb in coterie.toml to change that.\n"
    )
    done = coterie("prune", "--vacuum", "--json", "--dir", either.folder).json
    assert (done["dryRun"], done["keptDays"], done["deleted"]["messages"]) == (False, None, 0)
    assert done["bytesAfter"] > 0
    assert coterie("prune", "--dry-run", "--vacuum", "--dir", either.folder).code == 2
    assert coterie("verify", "--dir", either.folder).code == 0
