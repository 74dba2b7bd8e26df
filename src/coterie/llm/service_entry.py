"""One service of llmservices.json."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from coterie.artifacts import ArtifactType
from coterie.llm.secrets import Secret
from coterie.llm.service import INFERRED, Capabilities


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeLimits:
    """The largest attachment of each type that is sent to the service as it is, in bytes."""

    image: int = 10_000_000
    audio: int = 20_000_000
    file: int = 20_000_000

    def of(self, kind: ArtifactType) -> int:
        return {"image": self.image, "audio": self.audio, "file": self.file}[kind]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceEntry:
    id: str
    base_url: str
    model: str
    name: str = ""
    provider: str = "openai"
    """`openai`: any server that speaks OpenAI's chat completions."""
    api_key: Secret | None = None
    missing_key: str | None = None
    """The name of the key it wants and nobody has: it cannot be asked until that is mended."""
    capabilities: Capabilities = INFERRED
    capability_tags: tuple[str, ...] = ()
    description: str = ""
    max_concurrent_requests: int = 8
    timeout: timedelta = timedelta(seconds=120)
    max_tokens: int | None = None
    context_tokens: int | None = None
    limits: SizeLimits = SizeLimits()
    fallback: tuple[str, ...] = ()
    """Services to ask instead, in this order, when this one cannot answer."""

    @property
    def digest(self) -> str:
        """Another one after any change of the entry but its key, which must leave no trace."""
        told = {key: value for key, value in self.to_wire().items() if key != "apiKey"}
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:32]

    def to_wire(self) -> dict[str, Any]:
        """As in the file, for reading back; the key is masked."""
        return {
            "id": self.id,
            "name": self.name or self.id,
            "provider": self.provider,
            "baseURL": self.base_url,
            "model": self.model,
            "apiKey": self.api_key and self.api_key.masked,
            "capabilities": {
                "input": sorted(self.capabilities.input),
                "output": sorted(self.capabilities.output),
                "source": "inferred" if self.capabilities.inferred else "declared",
            },
            "capabilityTags": list(self.capability_tags),
            "description": self.description,
            "maxConcurrentRequests": self.max_concurrent_requests,
            "timeout": self.timeout // timedelta(milliseconds=1),
            "maxTokens": self.max_tokens,
            "contextTokens": self.context_tokens,
            "limits": {
                "imageBytes": self.limits.image,
                "audioBytes": self.limits.audio,
                "fileBytes": self.limits.file,
            },
            "fallback": list(self.fallback),
        }
