"""One control plane for all tests: they have namespaces of their own."""

import itertools
from pathlib import Path

import helm_python
import pytest

from paceline_testing.control_plane import ControlPlane, missing_programs
from paceline_testing.fake_nodes import FakeNodes

CRDS = Path(__file__).resolve().parents[3] / "shared" / "data" / "crds"

_numbers = itertools.count()


@pytest.fixture(scope="session")
def nodes(tmp_path_factory):
    """Fake nodes beside a control plane with KubeRay's operator."""
    if (why := missing_programs()) is not None:
        pytest.skip(why)
    if not CRDS.is_dir():
        pytest.skip(f"{CRDS} is not there")
    with ControlPlane(tmp_path_factory.mktemp("control-plane")) as plane, FakeNodes(plane) as made:
        plane.start_operator(sorted(CRDS.glob("*.yaml")))
        yield made


@pytest.fixture
def plane(nodes):
    return nodes.plane


@pytest.fixture
def namespace(plane):
    """A new one, in which Pod Security admits nothing but `restricted`."""
    name = f"test-{next(_numbers)}"
    labels = {"pod-security.kubernetes.io/enforce": "restricted", "pod-security.kubernetes.io/warn": "restricted"}
    plane.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}})
    yield name
    plane.http.delete(f"/api/v1/namespaces/{name}")


@pytest.fixture
def helm(plane, namespace):
    """Helm, connected to the control plane."""
    with helm_python.Config(kubeconfig_path=plane.kubeconfig, namespace=namespace) as config:
        yield config
