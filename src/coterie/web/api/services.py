"""Model services and their JSON bodies, and reloading the owner's files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import msgspec
from msgspec import UNSET, Meta, UnsetType, field

from coterie.errors import ConfigError
from coterie.llm.discovery import (
    KEYED_SERVICES,
    LOCAL_SERVERS,
    DiscoveredService,
    HealthCheck,
    HealthCode,
    ModelList,
)
from coterie.web.errors import RequestRejected
from coterie.web.openapi import COMMON_PROBLEMS, problems
from coterie.web.routing import API, Router, SocietyDep
from coterie.web.schemas import ErrorPlace, Schema, Time

if TYPE_CHECKING:
    # It loads every provider, which a command without agents does not need.
    from coterie.setup import ServiceView


class DeclaredCapabilities(Schema):
    input: list[str]
    output: list[str]


class ServiceCapabilities(DeclaredCapabilities):
    source: Literal["declared", "inferred"]


class ServiceLimits(Schema):
    image_bytes: int
    audio_bytes: int
    file_bytes: int


class ServicePrice(Schema):
    """Per million tokens."""

    input: float
    cached_input: Annotated[float, Meta(description="For input that the service had in its cache.")]
    output: float
    currency: str


class FoundCapabilities(Schema):
    """Whether each works; left out if it could not be found out."""

    tool_calling: bool | UnsetType = field(name="tool_calling", default=UNSET)
    vision: bool | UnsetType = UNSET


class ServiceTest(Schema):
    """The result of real requests: one text, and if that works one tool and one picture."""

    ok: bool
    code: HealthCode
    message: str
    detail: str
    ms: int
    at: Time
    capabilities: FoundCapabilities

    @classmethod
    def of(cls, check: HealthCheck) -> Self:
        return msgspec.convert(check.to_dict(), cls)


class Service(Schema):
    id: str
    name: str
    provider: str
    base_url: str = field(name="baseURL")
    model: str
    api_key: Annotated[str | None, Meta(description="Masked.")]
    capabilities: ServiceCapabilities
    capability_tags: list[str]
    description: str
    max_concurrent_requests: int
    timeout: Annotated[int, Meta(description="Longest silence within an answer, in milliseconds.")]
    first_token_timeout: Annotated[int | None, Meta(description="Longest silence before an answer, in milliseconds.")]
    total_timeout: Annotated[int, Meta(description="For a whole answer, in milliseconds.")]
    temperature: float | None
    top_p: float | None
    max_tokens: int | None
    reasoning_effort: str | None
    extra_body: Annotated[dict[str, Any], Meta(description="More keys of each request.")]
    headers: Annotated[dict[str, str], Meta(description="HTTP headers of each request. The values are masked.")]
    context_tokens: int | None
    limits: ServiceLimits
    fallback: list[str]
    price: Annotated[ServicePrice | None, Meta(description="null: the cost of requests is unknown.")]
    problems: list[ErrorPlace]
    trial: Annotated[ServiceTest | None, Meta(description="The last test of this configuration.")]
    used_by: list[str]
    tour: bool

    @classmethod
    def of(cls, view: ServiceView) -> Self:
        return msgspec.convert(view.to_dict(), cls)


class ServicePreset(Schema):
    """A service that could be set up."""

    id: str
    name: str
    provider: str
    base_url: str = field(name="baseURL")
    api_key: Annotated[str | None, Meta(description="`${NAME}`: the environment variable with the key.")]
    models: list[str]
    capabilities: Annotated[DeclaredCapabilities | None, Meta(description="null: a test finds them out.")]

    @classmethod
    def of(cls, found: DiscoveredService) -> Self:
        return msgspec.convert(found.to_dict(), cls)


class ServiceModels(Schema):
    """The models that a service offers."""

    code: Annotated[HealthCode, Meta(description="`ok`, or why they are not known.")]
    models: list[str]
    detail: str

    @classmethod
    def of(cls, found: ModelList) -> Self:
        return cls(code=found.code, models=list(found.models), detail=found.detail)


class ServiceList(Schema):
    items: list[Service]
    next: None
    problems: list[ErrorPlace]
    offers: Annotated[list[ServicePreset], Meta(description="Found on this machine, ready to be set up.")]
    presets: Annotated[list[ServicePreset], Meta(description="Well-known services; a key is still needed.")]


class ChangedLimits(Schema):
    image_bytes: int | UnsetType | None = UNSET
    audio_bytes: int | UnsetType | None = UNSET
    file_bytes: int | UnsetType | None = UNSET


class ChangedPrice(Schema):
    """Per million tokens."""

    input: Annotated[float, Meta(ge=0)]
    output: Annotated[float, Meta(ge=0)]
    cached_input: Annotated[float, Meta(ge=0, description="Default: `input`.")] | UnsetType | None = UNSET
    currency: Annotated[str, Meta(pattern="^[A-Z]{3}$", description="Default: USD.")] | UnsetType | None = UNSET


class ServiceChange(Schema):
    """Fields of an entry in llmservices.json. Fields left out stay as they are; null removes a field."""

    key: Annotated[str | None, Meta(description="The API key. It is never sent back.")] | UnsetType = UNSET
    name: str | UnsetType | None = UNSET
    provider: str | UnsetType | None = UNSET
    base_url: str | UnsetType | None = field(name="baseURL", default=UNSET)
    model: str | UnsetType | None = UNSET
    api_key: Annotated[str | None, Meta(description="`${NAME}`: the key's name.")] | UnsetType = UNSET
    capabilities: DeclaredCapabilities | UnsetType | None = UNSET
    capability_tags: list[str] | UnsetType | None = UNSET
    description: str | UnsetType | None = UNSET
    max_concurrent_requests: int | UnsetType | None = UNSET
    timeout: Annotated[int | None, Meta(description="Milliseconds.")] | UnsetType = UNSET
    first_token_timeout: Annotated[int | None, Meta(description="Milliseconds.")] | UnsetType = UNSET
    total_timeout: Annotated[int | None, Meta(description="Milliseconds.")] | UnsetType = UNSET
    temperature: float | UnsetType | None = UNSET
    top_p: float | UnsetType | None = UNSET
    max_tokens: int | UnsetType | None = UNSET
    reasoning_effort: str | UnsetType | None = UNSET
    extra_body: dict[str, Any] | UnsetType | None = UNSET
    headers: Annotated[dict[str, str] | None, Meta(description="Values may hold `${NAME}`.")] | UnsetType = UNSET
    context_tokens: int | UnsetType | None = UNSET
    limits: ChangedLimits | UnsetType | None = UNSET
    fallback: list[str] | UnsetType | None = UNSET
    price: ChangedPrice | UnsetType | None = UNSET


class ReloadResult(Schema):
    problems: list[ErrorPlace]


router = Router(prefix=API, tags=["services"], responses=COMMON_PROBLEMS)

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
    responses=problems("service_invalid", "id_taken", _422=f"`request_invalid`, {_CONFIG}"),
)
async def put_service(service_id: str, society: SocietyDep, body: _ServiceFields) -> Service:
    """The fields of llmservices.json; fields left out stay as they are. New capabilities that are left out are those
    that the last test of this body found.

    `key` is stored in data/secrets.json and never sent back. It belongs to the address it was entered for: a change of
    `baseURL` or `provider` needs `key` again, empty if the new address needs none.
    """
    key = _take_key(body)
    with config_errors():
        return Service.of(await society.setup.put(service_id, body, key))


@router.delete(
    "/services/{service_id}",
    status_code=204,
    summary="Remove a service and its key",
    responses=problems("unknown_service", "service_in_use", _422=_CONFIG),
)
async def delete_service(service_id: str, society: SocietyDep) -> None:
    with config_errors():
        await society.setup.delete(service_id)


@router.post(
    "/services/{service_id}/test",
    summary="Send real requests to a service and report the result",
    responses=problems("unknown_service", "service_invalid", "id_taken", _422=_CONFIG),
)
async def test_service(
    service_id: str, society: SocietyDep, body: Annotated[dict[str, Any] | None, ServiceChange] = None
) -> ServiceTest:
    """Without a body: the service as it is. With a body: as `PUT` would make it; nothing is saved.

    One text is sent, and if the service answers, one tool and one picture, with few tokens each. A `PUT` of the same
    body without `capabilities` writes those that were found.
    """
    if not body:
        return ServiceTest.of(await society.setup.test(service_id))
    key = _take_key(body)
    with config_errors():
        return ServiceTest.of(await society.setup.test_entry(service_id, body, key))


@router.post(
    "/services/{service_id}/models",
    summary="Ask a service which models it offers",
    responses=problems("unknown_service", "service_invalid", "id_taken", _422=_CONFIG),
)
async def list_service_models(
    service_id: str, society: SocietyDep, body: Annotated[dict[str, Any] | None, ServiceChange] = None
) -> ServiceModels:
    """Without a body: of the service as it is. With a body: as `PUT` would make it, `model` may be left out."""
    key = _take_key(body) if body else None
    with config_errors():
        return ServiceModels.of(await society.setup.models(service_id, body or {}, key))


@router.post(
    "/reload",
    summary="Reload coterie.toml, llmservices.json and the owner's tools",
    responses=problems(_422=_CONFIG),
)
async def reload_settings(society: SocietyDep) -> ReloadResult:
    with config_errors():
        return ReloadResult(problems=ErrorPlace.of_all(await society.reload()))


def _take_key(fields: dict[str, Any]) -> str | None:
    key = fields.pop("key", None)
    if key is not None and not isinstance(key, str):
        raise RequestRejected(422, "service_invalid", "key must be a string")
    return key


@contextmanager
def config_errors() -> Iterator[None]:
    """Answer with status 422 if a configuration file is invalid."""
    try:
        yield
    except ConfigError as error:
        places = ErrorPlace.of_all(error.problems)
        raise RequestRejected(422, "config_invalid", f"{error}; nothing was changed", problems=places) from error
