"""Random small clusters with random faults: what must hold does, and what is broken on purpose is found."""

import dataclasses

import msgspec
import pytest

from cluster.gateway import resume
from cluster.gateway.resume import UnbrokenStream
from cluster.simulate import simulation
from cluster.simulate.gateway import Gateway
from cluster.simulate.target import ScriptedTarget
from cluster.tenants import scope
from cluster.tenants.scope import scope_of
from paceline_testing.simulated_chaos import run_chaos


@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.slow) for first in (10, 20, 30, 40))])
def test_chaos(first):
    for seed in range(first, first + 10):
        chaos = run_chaos(seed)
        assert not chaos.problems, f"seed {seed}: {chaos.problems}"


def problems(first=0):
    """One seed after the other, so that whoever finds what they look for runs no more. first: which finds it soon."""
    return (problem for seed in range(first, first + 50) for problem in run_chaos(seed).problems)


def test_tenants_of_a_company_draft_from_each_others_text():
    assert any(run_chaos(seed).num_of_company for seed in range(4, 54))


def test_a_lost_token_is_found(monkeypatch):
    take = UnbrokenStream.take

    def lossy(self, chunk):
        chunk = take(self, chunk)
        return msgspec.structs.replace(chunk, token_ids=chunk.token_ids[:2])

    monkeypatch.setattr(UnbrokenStream, "take", lossy)
    assert any("not the right ones" in problem for problem in problems())


def test_a_token_that_comes_twice_after_a_lost_router_is_found(monkeypatch):
    rest_of = resume._rest_of
    monkeypatch.setattr(resume, "_rest_of", lambda request, got, passed_s: rest_of(request, got[:-1], passed_s))
    assert any("not the right ones" in problem for problem in problems(5))


def test_a_namespace_of_another_tenant_is_found(monkeypatch):
    first = []

    def same(sharing):
        first.append(sharing)
        return scope_of(dataclasses.replace(sharing, tenant_id=first[0].tenant_id))

    monkeypatch.setattr(simulation, "scope_of", same)
    assert any("must not have it" in problem for problem in problems(1))


def test_a_namespace_of_another_group_is_found(monkeypatch):
    namespace_of_group = scope.namespace_of_group
    monkeypatch.setattr(scope, "namespace_of_group", lambda key, group: namespace_of_group(key, "any"))
    assert any("must not have it" in problem for problem in problems(4))


def test_a_target_that_takes_a_batch_for_the_next_one_is_found(monkeypatch):
    """After an answer is lost, the router sends the same tokens again, which such a target counts twice."""
    found = ScriptedTarget._found

    def careless(self, item):
        known = self._sequences.get(item.delta.seq_id)
        return found(self, item) if known is None or not item.delta.start else known

    monkeypatch.setattr(ScriptedTarget, "_found", careless)
    assert any("not the right ones" in problem for problem in problems(17))


def test_a_request_that_outlives_its_gateway_is_found(monkeypatch):
    def lose(self):
        self.is_there = False

    monkeypatch.setattr(Gateway, "lose", lose)
    assert any("is its gateway there: False" in problem for problem in problems(8))
