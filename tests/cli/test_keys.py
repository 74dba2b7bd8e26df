"""`coterie keys`: keys of programs, with and without a running server."""

from __future__ import annotations

import httpx

from coterie.config import read_address

from .commands import coterie
from .environment import Environment


def test_a_key_is_made_used_listed_and_revoked(env: Environment) -> None:
    made = coterie("keys", "add", "webui", "--agents", "ada", "--doors", "openai,mcp", "--dir", env.folder)
    token, sentence = made.stdout.splitlines()
    assert token.startswith("cot_")
    assert sentence == "The key webui reaches ada through openai, mcp. Its token is not shown again."
    assert "never" in coterie("keys", "list", "--dir", env.folder).stdout

    env.serve()
    address = read_address(env.folder / "data")
    assert address is not None
    url = address.url
    headers = {"Authorization": f"Bearer {token}"}
    assert httpx.get(f"{url}/v1/nothing", headers=headers).status_code == 404
    assert httpx.get(f"{url}/api/v1/agents", headers=headers).status_code == 403
    listed = coterie("keys", "list", "--json", "--dir", env.folder)
    assert token not in listed.stdout and listed.json["items"][0]["usedAt"]

    assert coterie("keys", "revoke", "webui", "--dir", env.folder).stdout == "The key webui is revoked.\n"
    assert httpx.get(f"{url}/v1/nothing", headers=headers).status_code == 401
    assert "revoked" in coterie("keys", "list", "--dir", env.folder).stdout


def test_a_wrong_key_is_refused_with_a_sentence(env: Environment) -> None:
    failure = coterie("keys", "add", "webui", "--doors", "opnai", "--dir", env.folder).failure
    assert failure == 'there is no door "opnai", did you mean "openai"?'
    assert coterie("keys", "add", "webui", "--agents", "nobody", "--dir", env.folder).failure.startswith(
        "there is no agent 'nobody'"
    )
    for name in ("nobody", "", "a/b"):
        assert coterie("keys", "revoke", name, "--json", "--dir", env.folder).json["error"] == "unknown_key"
