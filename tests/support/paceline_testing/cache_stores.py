"""Servers, namespaces and listeners for the tests of the shared cache."""

import itertools
import os
import signal
import time

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from cache_service.formats.documents import Piece, assemble, document_id_of
from cache_service.formats.entry_codec import encode_entry
from cache_service.formats.frame import FrameCodec
from cache_service.formats.store_keys import StoreKeys
from cache_service.formats.stream_id import parse_id
from cache_service.log.log_reader import LogReader, ReaderSettings
from cache_service.store.connection import Connection
from cache_service.store.store import Store

FINGERPRINT = "model"
PATIENCE_S = 60.0  # how long a busy machine may take, which compiles kernels perhaps

_numbers = itertools.count()


def piece(name, offset, tokens, time_s=1_000, kind=0):
    return Piece(document_id_of(name), offset, np.array(tokens, np.int32), kind, time_s)


def contents(pieces):
    """Documents as plain values that can be compared: {(document, kind, offset of a run): tokens}."""
    return {(p.document_id, p.kind, p.offset): p.token_ids.tolist() for p in assemble(pieces)}


def until(condition, patience_s=PATIENCE_S):
    """Wait for it; false if it does not come true."""
    deadline = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def kill(server):
    """Kill a server, and wait until it is gone: before that, `restart` would find it running."""
    os.kill(server.pid, signal.SIGKILL)
    assert until(lambda: not server.is_running)


class Documents:
    """A listener that keeps everything by generation, and drops generations as the manifest does."""

    def __init__(self):
        self.generations = {}
        self.num_resets = 0

    def begin(self, manifest, segments):
        self._manifest = manifest
        generations = () if manifest is None else manifest.generations
        self._generation_of = {entry.digest: each.number for each in generations for entry in each.segments}
        return True

    def segment(self, entry, columns):
        self._keep(self._generation_of[entry.digest], columns.pieces())

    def segments_told(self):
        pass

    def entry(self, entry_id, pieces):
        manifest = self._manifest
        if manifest is None:
            self._keep(0, pieces)
        elif parse_id(entry_id) <= parse_id(manifest.folded_id):
            self._keep(manifest.folded_generation, pieces)
        else:
            self._keep(manifest.open_generation.number, pieces)

    def renew(self, manifest):
        self._manifest = manifest
        self.generations = {g: pieces for g, pieces in self.generations.items() if g >= manifest.oldest_generation}

    def reset(self):
        self.generations = {}
        self.num_resets += 1

    def _keep(self, generation, pieces):
        copies = [Piece(p.document_id, p.offset, p.token_ids.copy(), p.kind, p.time_s) for p in pieces]
        self.generations.setdefault(generation, []).extend(copies)

    @property
    def contents(self):
        return contents([p for pieces in list(self.generations.values()) for p in list(pieces)])

    @property
    def num_tokens(self):
        return sum(map(len, self.contents.values()))


class Namespace:
    """One namespace of a server, with short methods for tests."""

    def __init__(self, settings, name=None, ring=None, max_log_entries=1_000_000):
        self.connection = Connection(settings)
        self.keys = StoreKeys(FINGERPRINT, name or f"ns{next(_numbers)}-{time.monotonic_ns()}")
        self.ring = ring
        self.max_log_entries = max_log_entries
        self.store = Store(self.connection, self.keys)

    @property
    def codec(self):
        return FrameCodec(self.keys, self.ring)

    @property
    def redis(self):
        return self.connection.client()

    def open(self, name=None):
        """Open a namespace for publishers, followers and compactors."""
        keys = self.keys if name is None else StoreKeys(FINGERPRINT, name)
        return Store(self.connection, keys), FrameCodec(keys, self.ring)

    def names(self):
        """Keys that are there."""
        return self.redis.keys(self.keys.key("*"))

    def append(self, *pieces):
        return self.store.append([encode_entry(self.codec, list(pieces))], self.max_log_entries)[0]

    def reader(self, listener, **settings):
        return LogReader(self.store, self.codec, listener, ReaderSettings(**settings))

    def read(self, **settings):
        """Documents and counters of a reader that starts now."""
        documents = Documents()
        reader = self.reader(documents, **settings)
        catch_up(reader)
        return documents, reader.counters


def fold_all(compactor):
    """Fold the whole log, and let another compactor take over."""
    while compactor.fold():
        pass
    compactor.release()


def run_histories(machine, server, max_examples, steps):
    """Random histories of a state machine, which finds the server's settings as `server_settings`."""
    suppressed = list(HealthCheck)
    limits = settings(max_examples=max_examples, stateful_step_count=steps, suppress_health_check=suppressed)
    run_state_machine_as_test(type("Machine", (machine,), {"server_settings": server.settings}), settings=limits)


def catch_up(reader):
    for _ in range(10_000):
        if not reader.step():
            return
    raise AssertionError("a reader does not come to an end")
