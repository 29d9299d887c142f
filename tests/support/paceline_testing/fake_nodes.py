"""What no control plane does by itself: nodes that run pods, Ray's dashboard in the head, and a controller of Gateways.

Pods get an address of this machine, where one server answers for all of them, as a Ray cluster does on which Serve runs
well.
"""

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx

from paceline_testing.control_plane import ControlPlane, Object, own_address

DASHBOARD_PORT = 8265
SERVE_PORT = 8000

_PERIOD_S = 0.1
_TRUE = "True"


class FakeNodes:
    """In a `with` block, beside a running control plane. All that it does is done again every tenth of a second."""

    def __init__(self, control_plane: ControlPlane) -> None:
        self.plane = control_plane
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fake nodes", daemon=True)
        self.put_configs: list[Object] = []
        """Every configuration that the operator has put to a dashboard."""
        self._servers = [
            ThreadingHTTPServer((own_address(), port), _handler(self)) for port in (DASHBOARD_PORT, SERVE_PORT)
        ]
        self._duties: list[Callable[[], None]] = [self._run_pods, self._accept_gateways]

    def __enter__(self) -> "FakeNodes":
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "node"}}
        self.plane.apply(node)
        for server in self._servers:
            threading.Thread(target=server.serve_forever, daemon=True).start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def _run(self) -> None:
        while not self._stop.wait(_PERIOD_S):
            for duty in self._duties:
                try:
                    duty()
                except httpx.HTTPError as error:  # what has changed or gone meanwhile is seen the next time
                    print("fake nodes:", error)

    def _run_pods(self) -> None:
        for pod in self.plane.all("core/v1/pods", None):
            metadata, status = pod["metadata"], pod.get("status", {})
            path = self.plane.path_of("core/v1/pods", metadata["namespace"], metadata["name"])
            if "deletionTimestamp" in metadata:
                self.plane.http.request("DELETE", path, params={"gracePeriodSeconds": "0"})
            elif not pod["spec"].get("nodeName"):
                binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": metadata["name"]}}
                body = binding | {"target": {"apiVersion": "v1", "kind": "Node", "name": "node"}}
                self.plane.http.post(f"{path}/binding", content=json.dumps(body), headers=_JSON).raise_for_status()
            elif status.get("phase") not in ("Running", "Succeeded"):
                self.plane.patch(f"{path}/status", {"status": _status_of(pod)})

    def _accept_gateways(self) -> None:
        """As a controller that carries whatever it is told."""
        for kind in ("gateways", "httproutes"):
            answer = self.plane.http.get(f"/apis/gateway.networking.k8s.io/v1/{kind}")
            for each in answer.json()["items"] if answer.status_code == 200 else []:
                self._accept(kind, each)

    def _accept(self, kind: str, each: Object) -> None:
        metadata, generation = each["metadata"], each["metadata"]["generation"]
        types = ("Accepted", "Programmed") if kind == "gateways" else ("Accepted", "ResolvedRefs")
        conditions = [_condition(name) | {"observedGeneration": generation, "reason": name} for name in types]
        status: Object = {"conditions": conditions}
        if kind == "gateways":
            status["addresses"] = [{"type": "IPAddress", "value": own_address()}]
        else:
            controller = "example.com/controller"
            parents = each["spec"]["parentRefs"]
            status = {
                "parents": [
                    {"parentRef": parent, "controllerName": controller, "conditions": conditions} for parent in parents
                ]
            }
        before = each.get("status", {})
        told = before.get("parents", [{}])[0].get("conditions", []) if kind == "httproutes" else before["conditions"]
        if {(one["type"], one["status"], one.get("observedGeneration")) for one in told} != {
            (name, _TRUE, generation) for name in types
        }:
            path = self.plane.path_of(f"gateway.networking.k8s.io/v1/{kind}", metadata["namespace"], metadata["name"])
            self.plane.patch(f"{path}/status", {"status": status})


_JSON = {"Content-Type": "application/json"}


def _condition(name: str) -> Object:
    return {"type": name, "status": _TRUE, "lastTransitionTime": "2026-01-01T00:00:00Z", "message": ""}


def _status_of(pod: Object) -> Object:
    """Of a pod that runs and is ready, or of one of a job that has done its work."""
    owners = {owner["kind"] for owner in pod["metadata"].get("ownerReferences", [])}
    started = "2026-01-01T00:00:00Z"
    state: Object = {"running": {"startedAt": started}}
    phase = "Running"
    if "Job" in owners:
        phase, state = "Succeeded", {"terminated": {"exitCode": 0, "startedAt": started, "finishedAt": started}}
    containers = [
        {
            "name": container["name"], "image": container["image"], "imageID": "x", "ready": phase == "Running",
            "restartCount": 0, "started": True, "state": state,
        }
        for container in pod["spec"]["containers"]
    ]  # fmt: skip
    return {
        "phase": phase,
        "podIP": own_address(),
        "podIPs": [{"ip": own_address()}],
        "hostIP": own_address(),
        "startTime": started,
        "conditions": [_condition(name) for name in ("PodScheduled", "Initialized", "ContainersReady", "Ready")],
        "containerStatuses": containers,
    }


def _handler(nodes: FakeNodes) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            nodes.put_configs.append(json.loads(body))
            self._answer({})

        def do_GET(self) -> None:
            if self.path.startswith("/api/serve/applications"):
                last = nodes.put_configs[-1] if nodes.put_configs else {"applications": []}
                self._answer(_running(last))
            else:
                self._answer({"result": True})

        def _answer(self, body: Object) -> None:
            content = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    return Handler


def _running(config: Object) -> Object:
    """What Serve says of a configuration when all of it runs."""
    return {
        "target_capacity": config.get("target_capacity"),
        "applications": {
            application["name"]: {
                "name": application["name"], "status": "RUNNING", "message": "", "route_prefix": "/",
                "deployments": {
                    one["name"]: {"name": one["name"], "status": "HEALTHY", "message": ""}
                    for one in application.get("deployments", [])
                },
            }
            for application in config["applications"]
        },
    }  # fmt: skip
