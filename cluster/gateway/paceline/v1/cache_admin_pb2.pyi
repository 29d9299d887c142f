from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class NamespaceName(_message.Message):
    __slots__ = ("namespace", "tenant", "fingerprint")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    tenant: str
    fingerprint: str
    def __init__(self, namespace: _Optional[str] = ..., tenant: _Optional[str] = ..., fingerprint: _Optional[str] = ...) -> None: ...

class NamespaceRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: NamespaceName
    def __init__(self, name: _Optional[_Union[NamespaceName, _Mapping]] = ...) -> None: ...

class ListNamespacesRequest(_message.Message):
    __slots__ = ("fingerprint",)
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    fingerprint: str
    def __init__(self, fingerprint: _Optional[str] = ...) -> None: ...

class NamespaceSummary(_message.Message):
    __slots__ = ("fingerprint", "namespace", "keys", "memory_bytes", "expires_in_s")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_IN_S_FIELD_NUMBER: _ClassVar[int]
    fingerprint: str
    namespace: str
    keys: int
    memory_bytes: int
    expires_in_s: int
    def __init__(self, fingerprint: _Optional[str] = ..., namespace: _Optional[str] = ..., keys: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., expires_in_s: _Optional[int] = ...) -> None: ...

class ListNamespacesResponse(_message.Message):
    __slots__ = ("namespaces",)
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    namespaces: _containers.RepeatedCompositeFieldContainer[NamespaceSummary]
    def __init__(self, namespaces: _Optional[_Iterable[_Union[NamespaceSummary, _Mapping]]] = ...) -> None: ...

class Earnings(_message.Message):
    __slots__ = ("requests", "hits", "rounds", "accepted_tokens", "proposed_as_expected", "right_as_expected", "proposed_worse", "right_worse", "proposed_better", "right_better")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROPOSED_AS_EXPECTED_FIELD_NUMBER: _ClassVar[int]
    RIGHT_AS_EXPECTED_FIELD_NUMBER: _ClassVar[int]
    PROPOSED_WORSE_FIELD_NUMBER: _ClassVar[int]
    RIGHT_WORSE_FIELD_NUMBER: _ClassVar[int]
    PROPOSED_BETTER_FIELD_NUMBER: _ClassVar[int]
    RIGHT_BETTER_FIELD_NUMBER: _ClassVar[int]
    requests: int
    hits: int
    rounds: int
    accepted_tokens: int
    proposed_as_expected: int
    right_as_expected: int
    proposed_worse: int
    right_worse: int
    proposed_better: int
    right_better: int
    def __init__(self, requests: _Optional[int] = ..., hits: _Optional[int] = ..., rounds: _Optional[int] = ..., accepted_tokens: _Optional[int] = ..., proposed_as_expected: _Optional[int] = ..., right_as_expected: _Optional[int] = ..., proposed_worse: _Optional[int] = ..., right_worse: _Optional[int] = ..., proposed_better: _Optional[int] = ..., right_better: _Optional[int] = ...) -> None: ...

class NamespaceStats(_message.Message):
    __slots__ = ("fingerprint", "namespace", "memory_bytes", "expires_in_s", "epoch", "manifest_version", "generations", "segments", "segment_bytes", "log_entries", "documents", "phrases", "tokens", "first_s", "last_s", "unread", "earnings")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_IN_S_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_VERSION_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOG_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    PHRASES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FIRST_S_FIELD_NUMBER: _ClassVar[int]
    LAST_S_FIELD_NUMBER: _ClassVar[int]
    UNREAD_FIELD_NUMBER: _ClassVar[int]
    EARNINGS_FIELD_NUMBER: _ClassVar[int]
    fingerprint: str
    namespace: str
    memory_bytes: int
    expires_in_s: int
    epoch: str
    manifest_version: int
    generations: int
    segments: int
    segment_bytes: int
    log_entries: int
    documents: int
    phrases: int
    tokens: int
    first_s: int
    last_s: int
    unread: int
    earnings: Earnings
    def __init__(self, fingerprint: _Optional[str] = ..., namespace: _Optional[str] = ..., memory_bytes: _Optional[int] = ..., expires_in_s: _Optional[int] = ..., epoch: _Optional[str] = ..., manifest_version: _Optional[int] = ..., generations: _Optional[int] = ..., segments: _Optional[int] = ..., segment_bytes: _Optional[int] = ..., log_entries: _Optional[int] = ..., documents: _Optional[int] = ..., phrases: _Optional[int] = ..., tokens: _Optional[int] = ..., first_s: _Optional[int] = ..., last_s: _Optional[int] = ..., unread: _Optional[int] = ..., earnings: _Optional[_Union[Earnings, _Mapping]] = ...) -> None: ...

class ImportRequest(_message.Message):
    __slots__ = ("name", "text", "token_ids", "json_line")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    JSON_LINE_FIELD_NUMBER: _ClassVar[int]
    name: NamespaceName
    text: str
    token_ids: TokenIdsDocument
    json_line: str
    def __init__(self, name: _Optional[_Union[NamespaceName, _Mapping]] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIdsDocument, _Mapping]] = ..., json_line: _Optional[str] = ...) -> None: ...

class TokenIdsDocument(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ImportResponse(_message.Message):
    __slots__ = ("documents", "tokens", "known_documents", "known_tokens", "stored_bytes", "dropped_generations")
    DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    KNOWN_DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    KNOWN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    DROPPED_GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    documents: int
    tokens: int
    known_documents: int
    known_tokens: int
    stored_bytes: int
    dropped_generations: int
    def __init__(self, documents: _Optional[int] = ..., tokens: _Optional[int] = ..., known_documents: _Optional[int] = ..., known_tokens: _Optional[int] = ..., stored_bytes: _Optional[int] = ..., dropped_generations: _Optional[int] = ...) -> None: ...

class ExportPiece(_message.Message):
    __slots__ = ("document_id", "offset", "kind", "time_s", "token_ids")
    DOCUMENT_ID_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    TIME_S_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    document_id: bytes
    offset: int
    kind: int
    time_s: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, document_id: _Optional[bytes] = ..., offset: _Optional[int] = ..., kind: _Optional[int] = ..., time_s: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class PurgeRequest(_message.Message):
    __slots__ = ("name", "since_s", "until_s")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SINCE_S_FIELD_NUMBER: _ClassVar[int]
    UNTIL_S_FIELD_NUMBER: _ClassVar[int]
    name: NamespaceName
    since_s: int
    until_s: int
    def __init__(self, name: _Optional[_Union[NamespaceName, _Mapping]] = ..., since_s: _Optional[int] = ..., until_s: _Optional[int] = ...) -> None: ...

class PurgedNamespace(_message.Message):
    __slots__ = ("fingerprint", "namespace", "tokens", "keys")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    fingerprint: str
    namespace: str
    tokens: int
    keys: int
    def __init__(self, fingerprint: _Optional[str] = ..., namespace: _Optional[str] = ..., tokens: _Optional[int] = ..., keys: _Optional[int] = ...) -> None: ...

class PurgeResponse(_message.Message):
    __slots__ = ("namespaces",)
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    namespaces: _containers.RepeatedCompositeFieldContainer[PurgedNamespace]
    def __init__(self, namespaces: _Optional[_Iterable[_Union[PurgedNamespace, _Mapping]]] = ...) -> None: ...

class CompactResponse(_message.Message):
    __slots__ = ("fingerprint", "namespace", "is_busy", "folds", "folded_entries", "trimmed_entries", "dropped_generations", "damaged_entries", "lost_segments")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    IS_BUSY_FIELD_NUMBER: _ClassVar[int]
    FOLDS_FIELD_NUMBER: _ClassVar[int]
    FOLDED_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    TRIMMED_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    DROPPED_GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    LOST_SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    fingerprint: str
    namespace: str
    is_busy: bool
    folds: int
    folded_entries: int
    trimmed_entries: int
    dropped_generations: int
    damaged_entries: int
    lost_segments: int
    def __init__(self, fingerprint: _Optional[str] = ..., namespace: _Optional[str] = ..., is_busy: _Optional[bool] = ..., folds: _Optional[int] = ..., folded_entries: _Optional[int] = ..., trimmed_entries: _Optional[int] = ..., dropped_generations: _Optional[int] = ..., damaged_entries: _Optional[int] = ..., lost_segments: _Optional[int] = ...) -> None: ...

class Problem(_message.Message):
    __slots__ = ("kind", "detail")
    KIND_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    kind: str
    detail: str
    def __init__(self, kind: _Optional[str] = ..., detail: _Optional[str] = ...) -> None: ...

class VerifyResponse(_message.Message):
    __slots__ = ("fingerprint", "namespace", "objects", "tokens", "unused_segments", "other_keys", "problems")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    UNUSED_SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    OTHER_KEYS_FIELD_NUMBER: _ClassVar[int]
    PROBLEMS_FIELD_NUMBER: _ClassVar[int]
    fingerprint: str
    namespace: str
    objects: int
    tokens: int
    unused_segments: int
    other_keys: _containers.RepeatedScalarFieldContainer[str]
    problems: _containers.RepeatedCompositeFieldContainer[Problem]
    def __init__(self, fingerprint: _Optional[str] = ..., namespace: _Optional[str] = ..., objects: _Optional[int] = ..., tokens: _Optional[int] = ..., unused_segments: _Optional[int] = ..., other_keys: _Optional[_Iterable[str]] = ..., problems: _Optional[_Iterable[_Union[Problem, _Mapping]]] = ...) -> None: ...
