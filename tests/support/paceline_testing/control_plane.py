"""A control plane of Kubernetes on loopback, with KubeRay's operator, and an impersonator of all nodes.

Its programs are found as those of kubebuilder's test environment: `KUBEBUILDER_ASSETS` is a directory with `etcd` and
`kube-apiserver`, and here `kube-controller-manager` and `kuberay-operator`, too. No container runs: pods are bound to a
node that is none and marked as ready.
"""

import json
import os
import secrets
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import yaml
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from paceline_testing.free_ports import free_ports

PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager", "kuberay-operator")

Object = dict[str, Any]

_START_S = 120.0


def missing_programs() -> str | None:
    """Why there can be no control plane; None: there can be one."""
    directory = os.environ.get("KUBEBUILDER_ASSETS")
    if not directory:
        return "KUBEBUILDER_ASSETS names no directory with a control plane"
    missing = [name for name in PROGRAMS if not (Path(directory) / name).is_file()]
    return f"{directory} has no {', '.join(missing)}" if missing else None


def own_address() -> str:
    """An address of this machine that is not loopback: the API server forwards to no other."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # nothing is sent
        address: str = probe.getsockname()[0]
        return address


class ControlPlane:
    """In a `with` block. All state is in `directory`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._programs = Path(os.environ["KUBEBUILDER_ASSETS"])
        self._ended = ExitStack()
        etcd, etcd_peer, self._port, probes = free_ports(4)
        token = secrets.token_hex(16)
        (directory / "tokens.csv").write_text(f'{token},admin,admin,"system:masters"\n')
        self._make_key()
        self.kubeconfig = directory / "kubeconfig"
        self.kubeconfig.write_text(_kubeconfig(self._port, token))
        self._commands = {
            "etcd": [
                f"--data-dir={directory / 'etcd'}", f"--listen-client-urls=http://127.0.0.1:{etcd}",
                f"--advertise-client-urls=http://127.0.0.1:{etcd}", f"--listen-peer-urls=http://127.0.0.1:{etcd_peer}",
                "--unsafe-no-fsync",
            ],
            "kube-apiserver": [
                f"--etcd-servers=http://127.0.0.1:{etcd}", "--bind-address=127.0.0.1", f"--secure-port={self._port}",
                f"--advertise-address={own_address()}", "--endpoint-reconciler-type=none", f"--cert-dir={directory}",
                f"--token-auth-file={directory / 'tokens.csv'}", "--authorization-mode=RBAC",
                "--service-cluster-ip-range=10.96.0.0/16", "--service-account-issuer=https://kubernetes.default.svc",
                f"--service-account-key-file={directory / 'accounts.key'}",
                f"--service-account-signing-key-file={directory / 'accounts.key'}",
            ],
            "kube-controller-manager": [
                f"--kubeconfig={self.kubeconfig}", f"--service-account-private-key-file={directory / 'accounts.key'}",
                "--leader-elect=false", "--secure-port=0", "--use-service-account-credentials=false",
            ],
            "kuberay-operator": [
                "--metrics-addr=0", f"--health-probe-bind-address=127.0.0.1:{probes}", "--enable-leader-election=false",
                "--use-kubernetes-proxy",
            ],
        }  # fmt: skip
        self.http = httpx.Client(
            base_url=f"https://127.0.0.1:{self._port}", headers={"Authorization": f"Bearer {token}"}, verify=False,
            timeout=60.0,
        )  # fmt: skip

    def __enter__(self) -> "ControlPlane":
        try:
            self._start("etcd")
            self._start("kube-apiserver")
            wait_for(self._is_ready, "the API server", _START_S)
            self._start("kube-controller-manager")
        except BaseException:
            self._ended.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.close()

    def start_operator(self, definitions: list[Path]) -> None:
        """KubeRay's operator, after the definitions of the custom resources that it knows."""
        for path in definitions:
            for definition in yaml.safe_load_all(path.read_bytes()):
                self.apply(definition)
                wait_for(lambda kind=definition["spec"]: self._serves(kind), path.name, _START_S)
        self._start("kuberay-operator")

    def path_of(self, kind: str, namespace: str | None = "paceline", name: str = "") -> str:
        """The path of a kind's objects, as `ray.io/v1/rayservices`, or of one of them."""
        group, version, plural = kind.split("/")
        root = f"/api/{version}" if group == "core" else f"/apis/{group}/{version}"
        where = f"/namespaces/{namespace}" if namespace is not None else ""
        return f"{root}{where}/{plural}" + (f"/{name}" if name else "")

    def all(self, kind: str, namespace: str | None = "paceline") -> list[Object]:
        found: list[Object] = self.http.get(self.path_of(kind, namespace)).raise_for_status().json()["items"]
        return found

    def get(self, kind: str, name: str, namespace: str | None = "paceline") -> Object | None:
        """None: there is none of this name."""
        answer = self.http.get(self.path_of(kind, namespace, name))
        if answer.status_code == 404:
            return None
        found: Object = answer.raise_for_status().json()
        return found

    def apply(self, each: Object, dry_run: bool = False) -> tuple[Object, list[str]]:
        """By server-side apply with strict validation: the object, and the API server's warnings. Raises AssertionError
        with its message where it refuses."""
        group, _, version = each["apiVersion"].rpartition("/")
        path = self.path_of(f"{group or 'core'}/{version}/{self._plural(each)}", each["metadata"].get("namespace"))
        answer = self.http.patch(
            f"{path}/{each['metadata']['name']}",
            params={"fieldManager": "test", "force": "true", "fieldValidation": "Strict"}
            | ({"dryRun": "All"} if dry_run else {}),
            headers={"Content-Type": "application/apply-patch+yaml"},
            content=json.dumps(each),
        )
        assert answer.is_success, f"{each['kind']} {each['metadata']['name']}: {answer.text}"
        return answer.json(), answer.headers.get_list("warning")

    def patch(self, path: str, change: Object) -> None:
        headers = {"Content-Type": "application/merge-patch+json"}
        self.http.patch(path, content=json.dumps(change), headers=headers).raise_for_status()

    def log(self, program: str) -> str:
        return (self._directory / f"{program}.log").read_text()

    def _plural(self, each: Object) -> str:
        group, _, version = each["apiVersion"].rpartition("/")
        root = f"/apis/{group}/{version}" if group else f"/api/{version}"
        resources = self.http.get(root).raise_for_status().json()["resources"]
        return next(one["name"] for one in resources if one["kind"] == each["kind"] and "/" not in one["name"])

    def _serves(self, kind: Object) -> bool:
        """kind: the `spec` of a definition."""
        versions = [each["name"] for each in kind["versions"] if each["served"]]
        answers = [self.http.get(f"/apis/{kind['group']}/{version}") for version in versions]
        return all(
            answer.is_success and kind["names"]["plural"] in {one["name"] for one in answer.json()["resources"]}
            for answer in answers
        )

    def _is_ready(self) -> bool:
        with suppress(httpx.HTTPError):
            return self.http.get("/readyz").status_code == 200
        return False

    def _make_key(self) -> None:
        key = rsa.generate_private_key(public_exponent=65_537, key_size=2048)
        text = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
        )
        (self._directory / "accounts.key").write_bytes(text)

    def _start(self, program: str) -> None:
        log = self._ended.enter_context((self._directory / f"{program}.log").open("wb"))
        process = subprocess.Popen(
            [self._programs / program, *self._commands[program]],
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            env=os.environ | {"KUBECONFIG": str(self.kubeconfig)},
        )
        self._ended.callback(_end, process)


def wait_for(condition: Callable[[], object], what: str, patience_s: float = 60.0) -> None:
    until = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < until, f"{what} did not come within {patience_s:g} s"
        time.sleep(0.1)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _kubeconfig(port: int, token: str) -> str:
    server = {"server": f"https://127.0.0.1:{port}", "insecure-skip-tls-verify": True}
    return yaml.safe_dump(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": server}],
            "users": [{"name": "admin", "user": {"token": token}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "admin"}}],
            "current-context": "test",
        }
    )
