"""Administrators' actions, for the command line and HTTP: translates names to namespaces, and results to plain records.

Methods block on Redis, so the HTTP server calls them in threads. They raise InvalidRequest, ConfigError
for documents that cannot be read, and what `CacheAdministration` raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

from actors.errors import InvalidRequest
from cache_service.admin.administration import (
    CacheAdministration,
    CompactResult,
    NamespaceStats,
    NamespaceSummary,
    RegionStatus,
)
from cache_service.admin.importer import ImportResult
from cache_service.admin.purge import PurgeResult
from cache_service.admin.verification import Verification
from cache_service.errors import NamespaceUnknown, SettingError
from cache_service.formats.documents import Piece
from cache_service.formats.export_format import ExportHeader
from cache_service.formats.namespaces import PUBLIC, imported, is_imported
from cache_service.formats.purged_times import FIRST_S, LAST_S, TimeRange
from cache_service.formats.store_keys import StoreKeys
from cluster.cache.admin.documents import DocumentReader, ImportModel, tokenizer_of
from cluster.cache.admin.names import Names
from cluster.cache.promotion import terms_of
from cluster.config import PromotionConfig


@dataclass(frozen=True, slots=True)
class NamespaceQuery:
    """Which namespace is meant; empty fields are unspecified."""

    namespace: str = ""
    tenant: str = ""
    fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class Export:
    """The contents of a namespace."""

    keys: StoreKeys
    pieces: list[Piece]
    unread: int  # stored objects that could not be read and are missing here

    @property
    def header(self) -> ExportHeader:
        fingerprint = self.keys.fingerprint
        return ExportHeader(fingerprint, tokenizer_of(fingerprint), self.keys.namespace)


class CacheAdminService:
    """model: the model of imports, made on first use. names: resolves names by the current registry."""

    def __init__(
        self,
        administration: CacheAdministration,
        model: Callable[[], ImportModel],
        names: Callable[[], Names],
        promotion: PromotionConfig | None = None,
    ) -> None:
        self._administration = administration
        self._model = model
        self._names = names
        self._promotion = promotion or PromotionConfig()

    def acting_for(self, actor: str) -> CacheAdminService:
        """The same service with another actor in the audit log."""
        return CacheAdminService(self._administration.acting_for(actor), self._model, self._names, self._promotion)

    def namespaces(self, fingerprint: str = "") -> list[NamespaceSummary]:
        return self._administration.namespaces(fingerprint or None)

    def regions(self) -> list[RegionStatus]:
        return self._administration.regions()

    def stats(self, query: NamespaceQuery) -> NamespaceStats:
        return self._administration.stats(self._one(query))

    def import_documents(
        self, query: NamespaceQuery, documents: Callable[[DocumentReader], Iterable[Piece]]
    ) -> ImportResult:
        """documents: makes pieces with the reader it is given."""
        model = self._model()
        fingerprint = model.info.fingerprint
        if query.fingerprint not in ("", fingerprint):
            raise InvalidRequest("fingerprint", query.fingerprint, f"imports here are for the model {fingerprint}")
        keys = _keys(fingerprint, self._name(query))
        if keys.namespace == PUBLIC:
            raise InvalidRequest("namespace", PUBLIC, "nothing but the promotion gate writes to it")
        if is_imported(keys.namespace):
            raise InvalidRequest("namespace", keys.namespace, "only what other clusters share is in it")
        return self._administration.import_documents(keys, documents(DocumentReader(model)))

    def export(self, query: NamespaceQuery) -> Export:
        keys = self._one(query)
        contents = self._administration.export(keys)
        return Export(keys, contents.pieces, contents.unread)

    def purge(self, query: NamespaceQuery, since_s: int | None = None, until_s: int | None = None) -> list[PurgeResult]:
        """Purge a namespace, or all of a tenant's own if only the tenant is named; of all models unless one is named.

        since_s, until_s: Unix times of last writes. Phrases that a purged namespace supports in the public pool are
        withdrawn whatever the times.
        """
        try:
            times = TimeRange(FIRST_S if since_s is None else since_s, LAST_S if until_s is None else until_s)
        except SettingError as error:
            raise InvalidRequest(error.field, error.value, error.limit) from None
        meant = self.to_purge(query)
        if not times.is_all and any(keys.namespace == PUBLIC for keys in meant):
            raise InvalidRequest("namespace", PUBLIC, "its phrases have no times; purge all of it")
        done = [self._administration.purge(keys, times) for keys in meant]
        names = self._names()
        organisations = names.feed_from([keys.namespace for keys in meant], "" if query.namespace else query.tenant)
        if names.registry is not None and organisations:
            terms = terms_of(names.registry, self._promotion)
            self._administration.withdraw(organisations, terms, query.fingerprint or None, erases=True)
        self._administration.clean_disk()
        return done

    def find(self, query: NamespaceQuery) -> list[StoreKeys]:
        """The namespace, once for each model that has it. Raises NamespaceUnknown if none has."""
        return self._administration.find(self._name(query), query.fingerprint or None)

    def to_purge(self, query: NamespaceQuery) -> list[StoreKeys]:
        """The namespaces that a purge would affect."""
        if query.namespace or not query.tenant:
            return self._with_imported(query)
        found = self._administration.namespaces(query.fingerprint or None)
        own = set(self._names().belong_to(query.tenant, [summary.namespace for summary in found]))
        return [StoreKeys(each.fingerprint, each.namespace) for each in found if each.namespace in own]

    def _with_imported(self, query: NamespaceQuery) -> list[StoreKeys]:
        """The namespace, with what other clusters share of it. Raises NamespaceUnknown."""
        name = self._name(query)
        found = []
        for each in (name, imported(name)):
            with suppress(NamespaceUnknown):
                found += self._administration.find(each, query.fingerprint or None)
        return found or self.find(query)

    def compact(self, query: NamespaceQuery) -> CompactResult:
        return self._administration.compact(self._one(query))

    def verify(self, query: NamespaceQuery) -> Verification:
        return self._administration.verify(self._one(query))

    def _name(self, query: NamespaceQuery) -> str:
        if not query.namespace and not query.tenant:
            raise InvalidRequest("namespace", query.namespace, "name one, or a tenant")
        return self._names().one(query.namespace or None, query.tenant or None)

    def _one(self, query: NamespaceQuery) -> StoreKeys:
        found = self.find(query)
        if len(found) > 1:
            known = ", ".join(keys.fingerprint for keys in found)
            raise InvalidRequest("fingerprint", query.fingerprint, f"several models have the namespace: {known}")
        return found[0]


def _keys(fingerprint: str, namespace: str) -> StoreKeys:
    try:
        return StoreKeys(fingerprint, namespace)
    except SettingError as error:
        raise InvalidRequest(error.field, error.value, error.limit) from None
