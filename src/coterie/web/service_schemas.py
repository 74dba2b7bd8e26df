"""JSON bodies about model services."""

from __future__ import annotations

from typing import Annotated, Literal, Self

import msgspec
from msgspec import UNSET, Meta, UnsetType, field

from coterie.llm.discovery import DiscoveredService, HealthCheck, HealthCode
from coterie.setup import ServiceView
from coterie.web.schemas import ErrorPlace, Schema, Time


class DeclaredCapabilities(Schema):
    input: list[str]
    output: list[str]


class ServiceCapabilities(DeclaredCapabilities):
    source: Literal["declared", "inferred"]


class ServiceLimits(Schema):
    image_bytes: int
    audio_bytes: int
    file_bytes: int


class ServiceTest(Schema):
    """The result of one real request."""

    ok: bool
    code: HealthCode
    message: str
    detail: str
    ms: int
    at: Time

    @classmethod
    def of(cls, check: HealthCheck) -> Self:
        return msgspec.convert(check.to_json(), cls)


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
    timeout: Annotated[int, Meta(description="Milliseconds.")]
    max_tokens: int | None
    context_tokens: int | None
    limits: ServiceLimits
    fallback: list[str]
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
    capabilities: DeclaredCapabilities

    @classmethod
    def of(cls, found: DiscoveredService) -> Self:
        return msgspec.convert(found.to_json(), cls)


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
    max_tokens: int | UnsetType | None = UNSET
    context_tokens: int | UnsetType | None = UNSET
    limits: ChangedLimits | UnsetType | None = UNSET
    fallback: list[str] | UnsetType | None = UNSET


class ReloadResult(Schema):
    problems: list[ErrorPlace]
