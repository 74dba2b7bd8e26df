"""The model services, and the owner's files read again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fastapi import APIRouter, Body
from starlette.responses import Response

from coterie.errors import ConfigError, Problem
from coterie.llm.discovery import KEYED_SERVICES, LOCAL_SERVERS
from coterie.web import shapes
from coterie.web.endpoint import BODY, COMMON, SocietyDep, answer, gives, listing, nothing, problems
from coterie.web.errors import Rejected

router = APIRouter(tags=["services"], responses=COMMON)

_CONFIG = "`config_invalid`"


@router.get(
    "/services",
    summary="Model services, what each can do, and what could be set up",
    responses=gives(shapes.Services),
)
async def services(society: SocietyDep, probe: bool = False) -> Response:
    """Keys are masked. With `probe`, servers on this machine are looked for too."""
    setup = society.setup
    offers = await setup.discover(probe=probe)
    return listing(
        [one.to_dict() for one in setup.list()],
        None,
        problems=_told(setup.problems),
        offers=[offer.to_json() for offer in offers],
        presets=[offer.to_json() for offer in (*KEYED_SERVICES, *LOCAL_SERVERS)],
    )


@router.put(
    "/services/{service_id}",
    summary="Add a service, or change one",
    responses=gives(shapes.Service) | BODY | problems("service_invalid", _422=f"`request_invalid`, {_CONFIG}"),
)
async def put(service_id: str, society: SocietyDep, fields: dict[str, Any] = Body(...)) -> Response:  # noqa: B008
    """The fields of llmservices.json; those left out stay as they are.

    A key in `key` is kept in data/secrets.json, and never comes out again. It belongs to the address it was entered
    for: a change of `baseURL` or `provider` needs `key` again, empty if the new address needs none.
    """
    key = fields.pop("key", None)
    if key is not None and not isinstance(key, str):
        raise Rejected(422, "service_invalid", "key must be a string")
    with _readable():
        return answer((await society.setup.put(service_id, fields, key)).to_dict())


@router.delete(
    "/services/{service_id}",
    status_code=204,
    response_class=Response,
    summary="Remove a service and its key",
    responses=problems("unknown_service", "service_in_use", _422=_CONFIG),
)
async def delete(service_id: str, society: SocietyDep) -> Response:
    with _readable():
        await society.setup.delete(service_id)
    return nothing()


@router.post(
    "/services/{service_id}/test",
    summary="One real request; what came of it, in words",
    responses=gives(shapes.Trial) | BODY | problems("unknown_service", "service_invalid", _422=_CONFIG),
)
async def test(
    service_id: str,
    society: SocietyDep,
    fields: dict[str, Any] | None = Body(default=None),  # noqa: B008
) -> Response:
    """Without a body the service as it is; with one, as `PUT` would make it, and nothing is saved."""
    if not fields:
        return answer((await society.setup.test(service_id)).to_json())
    key = fields.pop("key", None)
    if key is not None and not isinstance(key, str):
        raise Rejected(422, "service_invalid", "key must be a string")
    with _readable():
        return answer((await society.setup.test_entry(service_id, fields, key)).to_json())


@router.post(
    "/reload",
    summary="Read coterie.toml, llmservices.json and the owner's tools again",
    responses=gives(shapes.Reloaded) | problems(_422=_CONFIG),
)
async def reload(society: SocietyDep) -> Response:
    with _readable():
        return answer({"problems": _told(await society.reload())})


@contextmanager
def _readable() -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        found = _told(error.problems)
        raise Rejected(422, "config_invalid", f"{error}; nothing was changed", problems=found) from error


def _told(found: Sequence[Problem]) -> list[dict[str, str]]:
    return [{"place": one.location, "message": one.message} for one in found]
