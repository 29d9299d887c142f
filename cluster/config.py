"""The typed configuration of a cluster. Data enters here from YAML and the command line, is validated once and frozen.

Unknown keys are errors. A component is handed its own part, never the whole.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from actors.logs import ObservabilityConfig
from actors.options import DraftPoolOptions, TargetGroupOptions
from actors.workers.autoscaling import AutoscalingConfig
from cache_service.errors import SettingError
from cache_service.options import Options
from cache_service.store.connection import parse_url
from cluster.errors import ConfigError, limit_of

NO_CACHE = "none"  # as `cache.url`
_OF_A_URL = ("username", "password_file", "ca_file", "certificate_file", "sentinel_username", "sentinel_password_file")


class TargetConfig(TargetGroupOptions):
    """The model whose output counts, and the groups of actors that it runs on."""

    model: str = "smollm2"  # a prepared name, a directory, a .gguf file or a Hugging Face id
    served_name: str | None = None  # what clients call it; None: the model's own name


class DraftConfig(DraftPoolOptions):
    """The draft model and its workers."""

    model: str = "auto"  # auto: the drafter built for the target, picked up when it is there; none: no draft model
    build: bool = True  # whether `paceline serve` builds the drafter that `auto` means where it is missing
    deadline_ms: Annotated[float, Field(gt=0)] = 200.0  # later than this, the round goes on without


class SpeculationConfig(Options):
    """How drafts are made, merged and accepted."""

    drafters: tuple[str, ...] = ("auto",)  # names of `paceline generate --drafter`, or none
    corpora: tuple[Path, ...] = ()  # directories of `paceline corpus build`, for the drafter retrieval
    # Of drafters by their names, as in {suffix: {len_threshold: 5}}: the keywords of their `create_drafter`.
    drafter_options: dict[str, dict[str, bool | int | float | str]] = Field(default_factory=dict)
    acceptance: Literal["coupled", "rejection"] = "coupled"
    # Tree nodes a sequence and round, beside those that a drafter requires (a lookahead window). 0: neither.
    max_draft_tokens: Annotated[int, Field(ge=0, le=256)] = 16
    max_rows: Annotated[int, Field(ge=1, le=4096)] = 64  # rows a round spent on either, all sequences


class RouterConfig(Options):
    """Batching, admission and fairness."""

    max_running: Annotated[int, Field(ge=1, le=4096)] = 16  # sequences in one round
    max_waiting: Annotated[int, Field(ge=0, le=100_000)] = 64  # beyond: 429 / RESOURCE_EXHAUSTED
    max_prefill_rows: Annotated[int, Field(ge=1, le=65_536)] = 256  # prompt rows a round, all sequences
    verify_timeout_s: Annotated[float, Field(gt=0)] = 120.0  # a target that takes longer has failed


class GatewayConfig(Options):
    """The public face."""

    host: str = "127.0.0.1"
    http_port: Annotated[int, Field(ge=1, le=65_535)] = 8000
    grpc_port: Annotated[int, Field(ge=1, le=65_535)] = 9000
    replicas: Annotated[int, Field(ge=1, le=256)] = 1
    max_new_tokens: Annotated[int, Field(ge=1)] = 4096  # most a request may ask for
    default_max_tokens: Annotated[int, Field(ge=1)] = 256  # when the request does not say
    request_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    max_body_bytes: Annotated[int, Field(ge=1024)] = 4 * 1024 * 1024
    grpc_reflection: bool = True
    # In what portions answers are streamed: see `cluster.gateway.streams`.
    stream_interval_ms: Annotated[float, Field(ge=0, le=10_000)] | None = None  # None: 100 with tenants, else 0
    stream_tokens: Annotated[int, Field(ge=0, le=4096)] = 0  # of a chunk; 0: as many as there are
    stream_obfuscation: bool | None = None  # pad chunks unless a request says otherwise; None: with tenants


class TenantsConfig(Options):
    """Who may call, and how warm caches are shared. Limits and keys are in the registry of `paceline tenant`."""

    file: Path | None = None  # the registry; None: $PACELINE_HOME/tenants.json
    open: bool = False  # without a registry, serve whoever reaches the gateway; on loopback that needs no leave
    allow_shared: bool = False  # tenants with policy shared do share; else they are isolated


class PromotionConfig(Options):
    """What tenants with policy `promoted` have all said becomes readable to all of them: see
    `cache_service.promotion.promotion_policy`. Without tenants nothing does."""

    enabled: bool = True  # else policy promoted is as isolated
    min_tenants: Annotated[int, Field(ge=5, le=10_000)] = 20  # distinct ones that must have said a phrase
    min_age_s: Annotated[int, Field(ge=0, le=2**31)] = 3600  # that it waits then
    release_every_s: Annotated[int, Field(ge=1, le=2**31)] = 3600  # phrases appear together, at multiples of this
    max_tokens: Annotated[int, Field(ge=1, le=16)] = 16  # of a phrase
    window_s: Annotated[int, Field(ge=60, le=2**31)] = 7 * 24 * 3600  # how long a tenant supports what it has said
    # Of the Laplace mechanism on the number of tenants; None: no noise. It keeps some phrases waiting.
    noise_epsilon: Annotated[float, Field(ge=0.001, le=1000)] | None = None
    max_phrases: Annotated[int, Field(ge=1, le=2**18)] = 2**16  # that are public or wait to be
    tenant_offers: Annotated[int, Field(ge=1, le=2**31)] = 10_000  # phrases of one tenant a day that count
    never: tuple[Annotated[str, Field(min_length=1, max_length=256)], ...] = ()  # texts that must not become public


class CacheConfig(Options):
    """The shared warm cache: what one router has learnt, all of them draft from.

    Passwords and keys come from files or the environment, never from here: `cluster.cache.access` reads them.
    """

    # None: a server of its own beside `paceline serve`; none: no cache; else redis://host:port/db, rediss:// with TLS,
    # redis+sentinel://host:port,host:port/service, redis+cluster://host:port,host:port
    url: str | None = None
    username: str | None = None
    password_file: Path | None = None  # None: $PACELINE_CACHE_PASSWORD, if it is set
    ca_file: Path | None = None  # None: the system's certificate authorities
    certificate_file: Path | None = None  # of this side, with its key_file, for servers that ask for one
    key_file: Path | None = None
    sentinel_username: str | None = None
    sentinel_password_file: Path | None = None  # None: $PACELINE_CACHE_SENTINEL_PASSWORD, if it is set
    # Keys that encrypt what lies in Redis, id:secret words, the newest has the highest id; None: $PACELINE_CACHE_KEYS,
    # if it is set, else nothing is encrypted.
    encryption_file: Path | None = None
    directory: Path | None = None  # data of the server of its own; None: $PACELINE_HOME/cache
    max_memory_bytes: Annotated[int, Field(ge=8 * 2**20)] = 512 * 2**20  # of that server
    keep_s: Annotated[int, Field(ge=60, le=2**31)] = 7 * 24 * 3600  # that a namespace lives after its last tokens
    max_queued_tokens: Annotated[int, Field(ge=1024, le=2**31)] = 1_000_000  # that wait to be written; the oldest go
    publish_prompts: bool = False  # not only what the target has said
    max_namespaces: Annotated[int, Field(ge=1, le=65_536)] = 64  # that a router drafts from; the least used give way
    index_tokens: Annotated[int, Field(ge=1024, le=2**40)] = 16 * 2**20  # of all of them together
    namespace_tokens: Annotated[int, Field(ge=1024, le=2**29)] = 4 * 2**20  # of each of them, the newest
    index_directory: Path | None = None  # of indexes that processes of a machine share; None: in memory (/dev/shm)
    promotion: PromotionConfig = PromotionConfig()

    @model_validator(mode="after")
    def _address(self) -> CacheConfig:
        if self.url is None or self.url == NO_CACHE:
            for name in _OF_A_URL:
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} needs a url of a server")
            return self
        try:
            address = parse_url(self.url)
        except SettingError as error:
            raise ValueError(str(error)) from None
        if address.username is not None or address.password is not None:
            raise ValueError("url names a user or a password; give username, and password_file or the environment")
        for name in ("ca_file", "certificate_file", "key_file"):
            if getattr(self, name) is not None and not address.tls:
                raise ValueError(f"{name} needs a url with TLS: rediss://, rediss+sentinel:// or rediss+cluster://")
        if (self.certificate_file is None) != (self.key_file is None):
            raise ValueError("certificate_file and key_file go together")
        return self


class ClusterConfig(Options):
    """One file describes one cluster."""

    target: TargetConfig = TargetConfig()
    draft: DraftConfig = DraftConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    autoscaling: AutoscalingConfig = AutoscalingConfig()
    router: RouterConfig = RouterConfig()
    gateway: GatewayConfig = GatewayConfig()
    tenants: TenantsConfig = TenantsConfig()
    cache: CacheConfig = CacheConfig()
    observability: ObservabilityConfig = ObservabilityConfig()

    @model_validator(mode="after")
    def _ports_differ(self) -> ClusterConfig:
        if self.gateway.http_port == self.gateway.grpc_port:
            port = self.gateway.http_port
            raise ValueError(f"gateway.http_port and gateway.grpc_port are both {port}; they must differ")
        return self


def paceline_home() -> Path:
    """Where prepared models live, and by default the cache's data: $PACELINE_HOME, else ~/.cache/paceline."""
    return Path(os.environ.get("PACELINE_HOME") or "~/.cache/paceline").expanduser()


def load_config(path: Path | None, overrides: list[str] | None = None) -> ClusterConfig:
    """Read a YAML file (None: all defaults) and apply `path.to.key=value` overrides, values in YAML syntax.

    Raises ConfigError with one line that names file, key, value and limit.
    """
    data: dict[str, Any] = {}
    if path is not None:
        data = _read_yaml(path)
    for override in overrides or []:
        _apply_override(data, override)
    try:
        return ClusterConfig.model_validate(data)
    except ValidationError as error:
        where = str(path) if path is not None else "configuration"
        raise ConfigError(f"{where}: {describe(error)}") from None


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: the top level is a {type(data).__name__}; it must be a mapping of sections")
    return data


def _apply_override(data: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    parts = key.strip().split(".")
    if not separator or not all(parts):
        raise ConfigError(f"--set {override}: write it as path.to.key=value")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        value = text
    section = data
    for part in parts[:-1]:
        child = section.setdefault(part, {})
        if not isinstance(child, dict):
            raise ConfigError(f"--set {override}: {part} is not a section")
        section = child
    section[parts[-1]] = value


def describe(error: ValidationError) -> str:
    """What is wrong with a configuration, in one line."""
    parts = []
    for problem in error.errors():
        field = ".".join(str(part) for part in problem["loc"]) or "configuration"
        if problem["type"] == "extra_forbidden":
            parts.append(f"{field}: unknown key")
        elif problem["type"] == "missing":
            parts.append(f"{field}: it is missing")
        elif problem["type"] == "value_error":
            parts.append(f"{field}: {limit_of(problem)}")
        else:
            shown = re.sub(r"//\S*@", "//...@", repr(problem["input"]))  # a URL may have a password in it
            parts.append(f"{field} is {shown}; {limit_of(problem)}")
    return "; ".join(parts)
