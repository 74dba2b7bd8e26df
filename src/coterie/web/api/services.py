"""Model services, and reloading the owner's files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

from coterie.errors import ConfigError
from coterie.llm.discovery import KEYED_SERVICES, LOCAL_SERVERS
from coterie.web.errors import RequestRejected
from coterie.web.routing import COMMON_PROBLEMS, Router, SocietyDep, problems
from coterie.web.schemas import ErrorPlace
from coterie.web.service_schemas import (
    ReloadResult,
    Service,
    ServiceChange,
    ServiceList,
    ServicePreset,
    ServiceTest,
)  # fmt: skip

router = Router(tags=["services"], responses=COMMON_PROBLEMS)

_CONFIG = "`config_invalid`"
_ServiceFields = Annotated[dict[str, Any], ServiceChange]


@router.get("/services", summary="List model services and their capabilities, and services that could be set up")
async def list_services(society: SocietyDep, probe: bool = False) -> ServiceList:
    """Keys are masked. With `probe`, also look for model servers on this machine."""
    setup = society.setup
    offers = await setup.discover(probe=probe)
    return ServiceList(
        items=[Service.of(view) for view in setup.list()],
        next=None,
        problems=ErrorPlace.of_all(setup.problems),
        offers=[ServicePreset.of(offer) for offer in offers],
        presets=[ServicePreset.of(offer) for offer in (*KEYED_SERVICES, *LOCAL_SERVERS)],
    )


@router.put(
    "/services/{service_id}",
    summary="Add a service, or change one",
    responses=problems("service_invalid", _422=f"`request_invalid`, {_CONFIG}"),
)
async def put_service(service_id: str, society: SocietyDep, body: _ServiceFields) -> Service:
    """The fields of llmservices.json; fields left out stay as they are.

    `key` is stored in data/secrets.json and never sent back. It belongs to the address it was entered for: a change of
    `baseURL` or `provider` needs `key` again, empty if the new address needs none.
    """
    key = _take_key(body)
    with _config_errors():
        return Service.of(await society.setup.put(service_id, body, key))


@router.delete(
    "/services/{service_id}",
    status_code=204,
    summary="Remove a service and its key",
    responses=problems("unknown_service", "service_in_use", _422=_CONFIG),
)
async def delete_service(service_id: str, society: SocietyDep) -> None:
    with _config_errors():
        await society.setup.delete(service_id)


@router.post(
    "/services/{service_id}/test",
    summary="Send one real request to a service and report the result",
    responses=problems("unknown_service", "service_invalid", _422=_CONFIG),
)
async def test_service(
    service_id: str, society: SocietyDep, body: Annotated[dict[str, Any] | None, ServiceChange] = None
) -> ServiceTest:
    """Without a body: the service as it is. With a body: as `PUT` would make it; nothing is saved."""
    if not body:
        return ServiceTest.of(await society.setup.test(service_id))
    key = _take_key(body)
    with _config_errors():
        return ServiceTest.of(await society.setup.test_entry(service_id, body, key))


@router.post(
    "/reload",
    summary="Reload coterie.toml, llmservices.json and the owner's tools",
    responses=problems(_422=_CONFIG),
)
async def reload_settings(society: SocietyDep) -> ReloadResult:
    with _config_errors():
        return ReloadResult(problems=ErrorPlace.of_all(await society.reload()))


def _take_key(fields: dict[str, Any]) -> str | None:
    key = fields.pop("key", None)
    if key is not None and not isinstance(key, str):
        raise RequestRejected(422, "service_invalid", "key must be a string")
    return key


@contextmanager
def _config_errors() -> Iterator[None]:
    """Answer with status 422 if a configuration file is invalid."""
    try:
        yield
    except ConfigError as error:
        places = ErrorPlace.of_all(error.problems)
        raise RequestRejected(422, "config_invalid", f"{error}; nothing was changed", problems=places) from error
