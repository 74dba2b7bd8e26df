"""Requirements for the PostgreSQL server, and error messages for one that cannot be used: the cause and the remedy.

Connecting gives no error codes, only texts in the server's language. The known English texts have their own remedies;
any other text is shown whole.
"""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import quote

import psycopg
from psycopg.conninfo import conninfo_to_dict

from coterie.errors import StoreUnusable
from coterie.text import one_line

LEAST_VERSION = 13
"""`pg_current_xact_id` and `gen_random_uuid` exist since then."""
MAX_CAUSE_CHARACTERS = 400
_SERVER_ERROR = re.compile(r"(?:FATAL|ERROR):\s+([^\n]+)")
_CLIENT_ERROR = re.compile(r"failed: (?!connection to server|FATAL|ERROR)([^\n]+)")
_SET_PASSWORD = "set the right one in PGPASSWORD or ~/.pgpass, or in store.url"  # noqa: S105 - advice
_REMEDIES = (
    (r"password authentication failed", f"the password is wrong, or there is no such user: {_SET_PASSWORD}"),
    (r"no password supplied", f"the server asks for a password and none was given: {_SET_PASSWORD}"),
    (
        r'database "[^"]*" does not exist',
        "create it with CREATE DATABASE name ENCODING 'UTF8' TEMPLATE template0, or correct store.url",
    ),
    (r'role "[^"]*" does not exist', "create the user with CREATE ROLE name LOGIN PASSWORD '…', or correct store.url"),
    (r"server does not support SSL", "turn on ssl at the server, or, in a network you trust, set sslmode=disable"),
    (
        r"no encryption|SSL off",
        "the server lets this user in only with TLS: add ?sslmode=require to store.url, or change its pg_hba.conf",
    ),
    (
        r"certificate|SSL error|SSL SYSCALL",
        "its certificate is not trusted: name the authority's file with sslrootcert in store.url, or correct sslmode",
    ),
    (r"pg_hba\.conf|Peer authentication|Ident authentication", "let this user in from this machine in its pg_hba.conf"),
    (
        r"Connection refused|No such file or directory",
        "no server listens there: start it, or correct host and port in store.url",
    ),
    (r"resolve|translate host name|Name or service", "there is no host of that name: correct it in store.url"),
    (r"timeout", "nothing answers there: check the host in store.url, and firewalls on the way"),
    (
        r"too many (clients|connections)|remaining connection slots",
        "the server has too many connections: raise max_connections, or put PgBouncer before it",
    ),
    (r"starting up|shutting down|recovery mode", "the server is starting or stopping: try again in a moment"),
    (r"permission denied", 'give the user the rights that the owners\' guide lists under "Many machines"'),
    (r"read-only transaction", "it is a standby: name the primary in store.url"),
    (r"invalid .*(URI|connection option|percent)|URI", "correct store.url: postgresql://user@host:port/name"),
)
_OTHER_REMEDY = "check that it runs, and who may connect"


def unusable(error: psycopg.Error, url: str) -> StoreUnusable:
    """The error for the owner. It never contains the password of the URL."""
    cause = cause_of(error, url)
    remedy = next((remedy for pattern, remedy in _REMEDIES if re.search(pattern, cause)), _OTHER_REMEDY)
    return StoreUnusable(f"the PostgreSQL {_location(url)}cannot be used ({cause}): {remedy}")


def cause_of(error: psycopg.Error, url: str = "") -> str:
    """The error message of the server or the operating system, on one line, without the password of the URL."""
    text = str(error) or type(error).__name__
    # Several addresses of one host fail each with a message of its own.
    causes = _SERVER_ERROR.findall(text) or _CLIENT_ERROR.findall(text) or [text]
    return one_line(_without_password("; ".join(dict.fromkeys(map(str.strip, causes))), url), MAX_CAUSE_CHARACTERS)


def require_suitable(raw: psycopg.Connection[Any]) -> None:
    """Raise `StoreUnusable` if the server is too old, or the database cannot store every text."""
    version, encoding = raw.info.server_version, raw.info.parameter_status("server_encoding")
    if version < LEAST_VERSION * 10_000:
        found = raw.info.parameter_status("server_version") or version
        raise StoreUnusable(
            f"the server is PostgreSQL {found}, and Coterie needs {LEAST_VERSION} or newer: upgrade it, or use another"
        )
    if encoding != "UTF8":
        raise StoreUnusable(
            f"the database {raw.info.dbname!r} has the encoding {encoding}, which cannot store every text: create one"
            f" with CREATE DATABASE name ENCODING 'UTF8' TEMPLATE template0, and name it in store.url"
        )


def _location(url: str) -> str:
    try:
        found = conninfo_to_dict(url)
    except psycopg.Error:
        return "of store.url "
    host, port, name = (found.get(key) for key in ("host", "port", "dbname"))
    address = f"{host or 'the local socket'}{f':{port}' if port else ''}"
    return f"at {address}{f', database {name},' if name else ''} "


def _without_password(text: str, url: str) -> str:
    """An error about a wrong URL may quote a part of it."""
    userinfo = url.partition("://")[2].partition("?")[0].rpartition("@")[0]
    passwords = {userinfo.partition(":")[2]}
    try:
        passwords.add(str(conninfo_to_dict(url).get("password") or ""))
    except psycopg.Error:
        passwords |= set(re.findall(r"[?&]password=([^&]*)", url))
    for password in sorted(passwords | {quote(one) for one in passwords}, key=len, reverse=True):
        if password:
            text = text.replace(password, "***")
    return text
