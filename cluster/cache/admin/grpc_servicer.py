"""The administrators' gRPC service, `paceline.v1.CacheAdmin`, over the same service as HTTP."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import asdict
from typing import Any

import grpc
import numpy as np

from actors.errors import InvalidRequest
from cache_service.formats.documents import Piece
from cluster.cache.admin.credential import Credential
from cluster.cache.admin.documents import DocumentReader
from cluster.cache.admin.errors import RETRY_AFTER_S, UNREAD, status_of
from cluster.cache.admin.service import CacheAdminService, NamespaceQuery
from cluster.cache.admin.work import Work, pulled
from cluster.gateway.paceline.v1 import cache_admin_pb2

logger = logging.getLogger(__name__)

SERVICE_NAME = "paceline.v1.CacheAdmin"


class CredentialCheck(grpc.aio.ServerInterceptor):
    """Nothing is read of a call to the service that does not carry the credential."""

    def __init__(self, credential: Credential) -> None:
        self._credential = credential

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        metadata = handler_call_details.invocation_metadata or ()
        found = [value for key, value in metadata if key == "authorization"]
        is_open = not handler_call_details.method.startswith(f"/{SERVICE_NAME}/")  # the health service
        if is_open or (len(found) == 1 and self._credential.admits(found[0])):
            return await continuation(handler_call_details)
        logger.warning("%r: no administrator", handler_call_details.method)

        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        # Of the same kind: one for single messages would wait for a message that a stream need not have.
        make = {
            (False, False): grpc.unary_unary_rpc_method_handler,
            (False, True): grpc.unary_stream_rpc_method_handler,
            (True, False): grpc.stream_unary_rpc_method_handler,
            (True, True): grpc.stream_stream_rpc_method_handler,
        }[handler.request_streaming, handler.response_streaming]
        return make(_refuse)


async def _refuse(_: Any, context: Any) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "an administrator's credential is needed")


class CacheAdminServicer:
    """Methods as the generated stubs name them. work, imports: where the service is called."""

    def __init__(self, service: CacheAdminService, work: Work, imports: Work) -> None:
        self._service = service
        self._work = work
        self._imports = imports

    async def ListNamespaces(self, request: Any, context: Any) -> Any:
        acting = self._acting(context)
        found = await self._told(context, self._work.run(lambda: acting.namespaces(request.fingerprint)))
        namespaces = [cache_admin_pb2.NamespaceSummary(**asdict(summary)) for summary in found]
        return cache_admin_pb2.ListNamespacesResponse(namespaces=namespaces)

    async def GetStats(self, request: Any, context: Any) -> Any:
        acting, query = self._acting(context), _query(request.name)
        stats = asdict(await self._told(context, self._work.run(lambda: acting.stats(query))))
        earnings = cache_admin_pb2.Earnings(**stats.pop("earnings"))
        return cache_admin_pb2.NamespaceStats(earnings=earnings, **stats)

    async def ImportDocuments(self, requests: AsyncIterator[Any], context: Any) -> Any:
        acting, loop = self._acting(context), asyncio.get_running_loop()
        source = aiter(requests)
        first = await anext(source, None)
        if first is None or not first.HasField("name"):
            await self._abort(context, InvalidRequest("name", None, "the first message must have it"))
            return None  # not reached: an abort raises
        query = _query(first.name)

        def documents(reader: DocumentReader) -> Iterator[Piece]:
            yield from _documents(reader, first)
            for request in pulled(source, loop):
                yield from _documents(reader, request)

        task = self._imports.run(lambda: acting.import_documents(query, documents))
        return cache_admin_pb2.ImportResponse(**asdict(await self._told(context, task)))

    async def ExportDocuments(self, request: Any, context: Any) -> AsyncIterator[Any]:
        acting, query = self._acting(context), _query(request.name)
        export = await self._told(context, self._work.run(lambda: acting.export(query)))
        context.set_trailing_metadata(((UNREAD, str(export.unread)),))
        for piece in export.pieces:
            yield cache_admin_pb2.ExportPiece(
                document_id=piece.document_id,
                offset=piece.offset,
                kind=int(piece.kind),
                time_s=piece.time_s,
                token_ids=piece.token_ids.tolist(),
            )

    async def Purge(self, request: Any, context: Any) -> Any:
        acting, query = self._acting(context), _query(request.name)
        since_s = request.since_s if request.HasField("since_s") else None
        until_s = request.until_s if request.HasField("until_s") else None
        found = await self._told(context, self._work.run(lambda: acting.purge(query, since_s, until_s)))
        namespaces = [cache_admin_pb2.PurgedNamespace(**asdict(result)) for result in found]
        return cache_admin_pb2.PurgeResponse(namespaces=namespaces)

    async def Compact(self, request: Any, context: Any) -> Any:
        acting, query = self._acting(context), _query(request.name)
        result = await self._told(context, self._work.run(lambda: acting.compact(query)))
        return cache_admin_pb2.CompactResponse(**asdict(result))

    async def Verify(self, request: Any, context: Any) -> Any:
        acting, query = self._acting(context), _query(request.name)
        found = asdict(await self._told(context, self._work.run(lambda: acting.verify(query))))
        problems = [cache_admin_pb2.Problem(**problem) for problem in found.pop("problems")]
        return cache_admin_pb2.VerifyResponse(problems=problems, **found)

    def _acting(self, context: Any) -> CacheAdminService:
        return self._service.acting_for(f"grpc {context.peer()}")

    async def _told(self, context: Any, work: Awaitable[Any]) -> Any:
        try:
            return await work
        except Exception as error:
            await self._abort(context, error)

    async def _abort(self, context: Any, error: Exception) -> None:
        status = status_of(error)
        if status.grpc is grpc.StatusCode.INTERNAL:  # the client is not told more
            logger.error("a gRPC call failed", exc_info=error)
        metadata = (("grpc-retry-pushback-ms", str(1000 * RETRY_AFTER_S)),) if status.is_worth_another_try else ()
        await context.abort(status.grpc, status.message, metadata)


def _query(name: Any) -> NamespaceQuery:
    return NamespaceQuery(name.namespace, name.tenant, name.fingerprint)


def _documents(reader: DocumentReader, request: Any) -> Iterator[Piece]:
    kind = request.WhichOneof("document")
    if kind == "text":
        yield from reader.text(request.text)
    elif kind == "token_ids":
        yield from reader.token_ids(np.array(request.token_ids.ids, np.int64))
    elif kind == "json_line":
        yield from reader.rows([request.json_line.encode()], "json_line")
