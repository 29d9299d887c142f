"""The typed configuration of a cluster. Data enters here from YAML and the command line, is validated once and frozen.

Unknown keys are errors. A component is handed its own part, never the whole.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from actors.errors import InvalidRequest
from actors.logs import ObservabilityConfig
from actors.options import NUMBERED_GPU, DraftPoolOptions, TargetGroupOptions
from actors.pool_names import FIRST_POOL
from actors.workers.autoscaling import AutoscalingConfig
from cache_service.errors import SettingError
from cache_service.options import Options
from cache_service.promotion.promotion_policy import PromotionPolicy
from cache_service.regions.records import CLUSTER_PATTERN
from cache_service.store.connection import parse_url
from cluster.errors import ConfigError
from cluster.gateway_config import GatewayConfig
from cluster.validation import describe

if TYPE_CHECKING:
    from actors.messages import ServiceClass

MOST_PREFILL_ROWS = 4096  # of a round, where router.max_prefill_rows does not say
MOST_DRAFT_ROWS = 512  # of a round, where speculation.max_rows does not say
NO_CACHE = "none"  # as `cache.url`
_MERGE = "<<"  # a key of YAML that takes in other mappings
_MOST_DRAFT_MODELS = 16  # beside the first; each is a source of the router, which has room for 62 in all
_PoolName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]{0,31}$")]
_OF_A_URL = ("username", "password_file", "ca_file", "certificate_file", "sentinel_username", "sentinel_password_file")


class TargetConfig(TargetGroupOptions):
    """The model whose output counts, and the groups of actors that it runs on."""

    model: str = "smollm2"
    """A prepared name, a directory, a .gguf file or a Hugging Face id."""
    served_name: str | None = None
    """What clients call it; null: the model's own name."""
    tool_parser: str = "auto"
    """How the model writes calls of tools. auto: as its chat template shows."""


class DraftConfig(DraftPoolOptions):
    """The draft model and its workers."""

    model: str = "auto"
    """auto: the drafter shipped or built for the target, picked up when it is there; none: no draft model."""
    build: bool = True
    """Whether `paceline serve` builds the drafter that `auto` means where it is missing."""
    deadline_ms: Annotated[float, Field(gt=0)] = 200.0
    """Milliseconds that a round waits for drafts; then it goes on without them."""

    @model_validator(mode="after")
    def _is_shared_out(self) -> DraftConfig:
        if self.tensor_parallel > 1 and self.model == "auto":
            raise ValueError(
                f"tensor_parallel is {self.tensor_parallel} with model auto, whose reduced vocabulary needs 1; "
                "name a model"
            )
        return self


class DraftModelConfig(DraftPoolOptions):
    """A draft model beside `draft`, and its workers."""

    model: Annotated[str, Field(min_length=1)]
    """A prepared name, a directory, a .gguf file or a Hugging Face id."""
    workers: Annotated[int, Field(ge=1, le=1024)] = 1
    """Draft workers, at least."""
    deadline_ms: Annotated[float, Field(gt=0)] = 200.0
    """Milliseconds that a round waits for its drafts; then it goes on without them."""

    @model_validator(mode="after")
    def _is_there(self) -> DraftModelConfig:
        if self.model in ("auto", "none"):
            raise ValueError(f"model is {self.model}; it must name a model")
        return self


class SpeculationConfig(Options):
    """How drafts are made, merged and accepted."""

    drafters: tuple[str, ...] = ("auto",)
    """Names of drafters, as of `paceline generate --drafter`, or none."""
    corpora: tuple[Path, ...] = ()
    """Directories of `paceline corpus build`, for the drafter retrieval."""
    drafter_options: dict[str, dict[str, bool | int | float | str]] = Field(default_factory=dict)
    """Options of drafters by name, as in {suffix: {len_threshold: 5}}: the keywords of their classes."""
    acceptance: Literal["coupled", "rejection"] = "coupled"
    """How a draft token of a sampled text is accepted. coupled: if it is the token that would be drawn without drafts.
    rejection: tokens of a draft model's chain by the ratio of their probabilities in target and draft. A sequence
    without such a chain has trees of the other drafters: both rules are the same for tokens that are not drawn."""
    max_draft_tokens: Annotated[int, Field(ge=0, le=256)] = 16
    """Tree nodes of a sequence in a round, beside those that a drafter requires (a lookahead window). 0: none of
    either."""
    max_rows: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Rows of a round for tree nodes and required rows, all sequences together. null: 64, doubled up to 512 as
    long as twice the rows take less than 1.8 times as long."""


class Objective(Options):
    """What requests of a class are to get. null: nothing is promised."""

    ttft_s: Annotated[float, Field(gt=0, le=86_400)] | None = None
    """Seconds from a request to its first token."""
    tpot_s: Annotated[float, Field(gt=0, le=3600)] | None = None
    """Mean seconds of a token after the first."""


class ObjectivesConfig(Options):
    """Objectives by class. With any of them, rounds are planned so that most requests are within theirs: interactive
    ones go before batch, tenants share by weight, and requests whose first token would probably be late are refused
    (429). Without any, requests run in order of arrival and their class has no effect."""

    interactive: Objective = Objective()
    """For requests with service_tier default, priority, fast or scale, and for those that do not say."""
    batch: Objective = Objective()
    """For requests with service_tier flex."""

    @property
    def are_set(self) -> bool:
        return self != ObjectivesConfig()

    def of(self, service_class: ServiceClass) -> Objective:
        return self.batch if service_class == "batch" else self.interactive


class RouterConfig(Options):
    """Batching, admission and fairness."""

    max_running: Annotated[int, Field(ge=1, le=4096)] = 16
    """Sequences in one round."""
    max_waiting: Annotated[int, Field(ge=0, le=100_000)] = 64
    """Requests that wait; with objectives, of each class. Beyond: HTTP 429, gRPC RESOURCE_EXHAUSTED."""
    max_prefill_rows: Annotated[int, Field(ge=1, le=65_536)] | None = None
    """Prompt rows of a round, all sequences together. null: 8 to 4096, by the measured times of rounds."""
    verify_timeout_s: Annotated[float, Field(gt=0)] = 120.0
    """Seconds for one batch. A target that takes longer has failed."""
    send_ahead: Literal["auto", "on", "off"] = "auto"
    """Whether to send a round while the one before is computed, with drafts for its likely results, so that the target
    does not wait for the router. auto: where trying it shows that it gives more tokens a second."""
    objectives: ObjectivesConfig = ObjectivesConfig()
    """What each class of requests is to get."""


class TenantsConfig(Options):
    """Who may call, and how warm caches are shared. Limits and keys are in the registry of `paceline tenant`."""

    file: Path | None = None
    """The registry. null: $PACELINE_HOME/tenants.json."""
    open: bool = False
    """Without a registry, serve whoever reaches the gateway. On loopback this is not needed."""
    allow_shared: bool = False
    """Whether tenants with policy shared do share. Otherwise they are isolated."""


class PromotionConfig(PromotionPolicy):
    """When phrases of tenants with policy `promoted` become readable to all of them. Needs tenants."""

    enabled: bool = True
    """false: policy promoted is the same as isolated."""
    never: tuple[Annotated[str, Field(min_length=1, max_length=256)], ...] = ()
    """Texts that must not become readable."""


class RegionsConfig(Options):
    """Clusters with the same model, which share public phrases and what groups learn. Needs tenants."""

    url: Annotated[str, Field(pattern="^[a-z][a-z0-9+.-]*://[^@?]+$")] | None = None
    """A directory or an object store where clusters leave it for each other, as fsspec names them: file:///mnt/regions,
    s3://bucket/prefix; without user, password and query. null: nothing is shared."""
    cluster: Annotated[str, Field(pattern=rf"^{CLUSTER_PATTERN}$")] | None = None
    """Name of this cluster among them, which no other one has. Needed with a url."""
    options_file: Path | None = None
    """JSON file with options of fsspec's file system, such as key, secret and endpoint_url. null:
    $PACELINE_REGIONS_OPTIONS; if that is not set, the file system looks for credentials as it does elsewhere."""
    interval_s: Annotated[float, Field(ge=0.1, le=86_400)] = 60.0
    """Seconds between exchanges."""
    max_mb: Annotated[int, Field(ge=16, le=2**20)] = 256
    """Megabytes that this cluster shares, and that it keeps of all others; the oldest are left out."""

    @model_validator(mode="after")
    def _named(self) -> RegionsConfig:
        if self.url is not None and self.cluster is None:
            raise ValueError("url needs cluster, the name of this cluster")
        return self


# What a schema can say of it; `parse_url` says the rest.
_URL = rf"^({NO_CACHE}|rediss?(\+sentinel|\+cluster)?://[^@]+)$"


class CacheConfig(Options):
    """The shared warm cache: what one router has learnt, all of them draft from.

    Passwords and keys come from files or the environment, never from here: `cluster.cache.access` reads them.
    """

    url: Annotated[str | None, Field(json_schema_extra={"pattern": _URL})] = None
    """null: a server of its own beside `paceline serve`. none: no cache. Otherwise redis://host:port/db, rediss:// with
    TLS, redis+sentinel://host:port,host:port/service or redis+cluster://host:port,host:port."""
    username: str | None = None
    """User of the server."""
    password_file: Path | None = None
    """File with the password. null: $PACELINE_CACHE_PASSWORD, if it is set."""
    ca_file: Path | None = None
    """Certificate authorities. null: those of the system."""
    certificate_file: Path | None = None
    """Certificate of the client, for servers that ask for one; with key_file."""
    key_file: Path | None = None
    """Private key of certificate_file."""
    sentinel_username: str | None = None
    """User of the sentinels."""
    sentinel_password_file: Path | None = None
    """File with the sentinels' password. null: $PACELINE_CACHE_SENTINEL_PASSWORD, if it is set."""
    encryption_file: Path | None = None
    """File with the keys that encrypt the data in Redis: words id:secret, of which the newest has the highest id. null:
    $PACELINE_CACHE_KEYS; if that is not set, nothing is encrypted."""
    directory: Path | None = None
    """Data of the server of its own. null: $PACELINE_HOME/cache."""
    max_memory_bytes: Annotated[int, Field(ge=8 * 2**20)] = 512 * 2**20
    """Memory of the server of its own."""
    keep_s: Annotated[int, Field(ge=60, le=2**31)] = 7 * 24 * 3600
    """Seconds that a namespace is kept after its last tokens."""
    max_queued_tokens: Annotated[int, Field(ge=1024, le=2**31)] = 1_000_000
    """Tokens that wait to be written. Beyond, the oldest are dropped."""
    publish_prompts: bool = False
    """Whether prompts are learnt from as well as answers."""
    max_namespaces: Annotated[int, Field(ge=1, le=65_536)] = 64
    """Namespaces that a router drafts from. Beyond, the least recently used are dropped."""
    index_tokens: Annotated[int, Field(ge=1024, le=2**40)] = 16 * 2**20
    """Tokens of the local index, all namespaces together."""
    namespace_tokens: Annotated[int, Field(ge=1024, le=2**29)] = 4 * 2**20
    """Tokens of one namespace in the local index, the newest ones."""
    index_directory: Path | None = None
    """Indexes that the processes of a machine share. null: in memory (/dev/shm)."""
    promotion: PromotionConfig = PromotionConfig()
    """What tenants with policy promoted share."""
    regions: RegionsConfig = RegionsConfig()
    """What clusters share."""

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
    more_drafts: dict[_PoolName, DraftModelConfig] = Field(
        default_factory=dict,
        max_length=_MOST_DRAFT_MODELS,
        json_schema_extra={"additionalProperties": False, "propertyNames": {"not": {"const": "draft"}}},
    )
    """Further draft models by name, each with the keys of `draft` but `build`, and workers of its own. NAME's drafts
    are those of the drafter draft_model.NAME. Rounds ask whichever pays most in their namespace."""
    speculation: SpeculationConfig = SpeculationConfig()
    autoscaling: AutoscalingConfig = AutoscalingConfig()
    router: RouterConfig = RouterConfig()
    gateway: GatewayConfig = GatewayConfig()
    tenants: TenantsConfig = TenantsConfig()
    cache: CacheConfig = CacheConfig()
    observability: ObservabilityConfig = ObservabilityConfig()

    @model_validator(mode="after")
    def _pools_differ(self) -> ClusterConfig:
        if FIRST_POOL in self.more_drafts:
            raise ValueError(f"more_drafts.{FIRST_POOL}: this is the name of the draft model that `draft` describes")
        return self

    @model_validator(mode="after")
    def _ports_differ(self) -> ClusterConfig:
        ports: dict[int, str] = {}
        for name in ("http_port", "grpc_port", "metrics_port"):
            port = getattr(self.gateway, name)
            if port in ports:
                raise ValueError(f"gateway.{ports[port]} and gateway.{name} are both {port}; they must differ")
            if port is not None:
                ports[port] = name
        return self


def check_devices(config: ClusterConfig) -> None:
    """Raises InvalidRequest for a numbered GPU: Ray gives each rank and each draft worker one of its own."""
    more = {f"more_drafts.{name}": options.device for name, options in config.more_drafts.items()}
    for section, device in {"target": config.target.device, "draft": config.draft.device, **more}.items():
        if re.match(NUMBERED_GPU, device):
            limit = "Ray chooses the GPU of each worker; it must be auto, cpu or cuda"
            raise InvalidRequest(f"{section}.device", device, limit)


def load_config(path: Path | None, overrides: list[str] | None = None) -> ClusterConfig:
    """Read a YAML file (None: all defaults) and apply `path.to.key=value` overrides, values in YAML syntax.

    Raises ConfigError with one line that names file, key, value and limit.
    """
    data: dict[str, Any] = {}
    if path is not None:
        data = read_yaml(path)
    for override in overrides or []:
        apply_override(data, override)
    try:
        return ClusterConfig.model_validate(data)
    except ValidationError as error:
        where = "configuration" if path is None else str(path)
        raise ConfigError(f"{where}{' with --set' if overrides else ''}: {describe(error)}") from None


class _UniqueKeys(yaml.SafeLoader):
    """Refuses a key that comes twice, of which the first one's value would be lost."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        known = set[str]()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value != _MERGE:
                if key.value in known:
                    raise yaml.composer.ComposerError(None, None, f"{key.value!r} comes twice", key.start_mark)
                known.add(key.value)
        return node


def read_yaml(path: Path) -> dict[str, Any]:
    """Raises ConfigError for what is no mapping in YAML."""
    try:
        data = _UniqueKeys(path.read_text(encoding="utf-8")).get_single_data()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: the top level is a {type(data).__name__}; it must be a mapping of sections")
    return data


def apply_override(data: dict[str, Any], override: str, option: str = "--set") -> None:
    """Set what `path.to.key=value` names. option: for errors. Raises ConfigError."""
    key, separator, text = override.partition("=")
    parts = key.strip().split(".")
    if not separator or not all(parts):
        raise ConfigError(f"{option} {override}: write it as path.to.key=value")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        value = text
    section = data
    for part in parts[:-1]:
        child = section.setdefault(part, {})
        if not isinstance(child, dict):
            raise ConfigError(f"{option} {override}: {part} is not a section")
        section = child
    section[parts[-1]] = value
