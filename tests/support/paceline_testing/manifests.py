"""Manifests that are right, of every kind that `paceline validate` looks into. Each call makes new ones."""

from __future__ import annotations

import textwrap
from typing import Any

Manifest = dict[str, Any]

LABELS = {"app.kubernetes.io/name": "web", "tier": "front"}


def container(**more: Any) -> Manifest:
    return {
        "name": "web",
        "image": "registry.example.com/web@sha256:" + "a" * 64,
        "imagePullPolicy": "IfNotPresent",
        "ports": [
            {"name": "http", "containerPort": 8000},
            {"name": "metrics", "containerPort": 9090, "protocol": "TCP"},
        ],
        "env": [
            {"name": "MODE", "value": "fast"},
            {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "token"}}},
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        ],
        "resources": {"requests": {"cpu": "250m", "memory": "1Gi"}, "limits": {"cpu": 1, "memory": "1.5Gi"}},
        "volumeMounts": [
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "models", "mountPath": "/models", "readOnly": True},
        ],
        "readinessProbe": {"httpGet": {"path": "/readyz", "port": "http"}, "periodSeconds": 5},
        "livenessProbe": {"httpGet": {"path": "/livez", "port": 8000}, "failureThreshold": 6},
        "startupProbe": {"grpc": {"port": 9000}, "failureThreshold": 60},
        "lifecycle": {"preStop": {"sleep": {"seconds": 10}}},
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 10001,
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        **more,
    }


def pod_spec(**more: Any) -> Manifest:
    return {
        "serviceAccountName": "web",
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 60,
        "priorityClassName": "web",
        "nodeSelector": {"kubernetes.io/os": "linux"},
        "tolerations": [
            {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
            {"key": "spot", "value": "yes", "effect": "NoExecute", "tolerationSeconds": 30},
        ],
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "topology.kubernetes.io/zone",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": dict(LABELS)},
            }
        ],
        "affinity": {
            "podAntiAffinity": {
                "preferredDuringSchedulingIgnoredDuringExecution": [
                    {
                        "weight": 50,
                        "podAffinityTerm": {
                            "topologyKey": "kubernetes.io/hostname",
                            "labelSelector": {
                                "matchExpressions": [{"key": "tier", "operator": "In", "values": ["front"]}]
                            },
                        },
                    }
                ]
            },
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [{"matchExpressions": [{"key": "gpu", "operator": "Exists"}]}]
                }
            },
        },
        "initContainers": [{"name": "prepare", "image": "registry.example.com/prepare:1.2.3", "command": ["true"]}],
        "containers": [container()],
        "volumes": [
            {"name": "tmp", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}},
            {"name": "models", "persistentVolumeClaim": {"claimName": "models", "readOnly": True}},
        ],
        **more,
    }


def deployment() -> Manifest:
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "web", "labels": dict(LABELS), "annotations": {"example.com/owner": "some one"}},
        "spec": {
            "replicas": 2,
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": "25%", "maxUnavailable": 0}},
            "selector": {"matchLabels": dict(LABELS)},
            "template": {"metadata": {"labels": {**LABELS, "version": "1"}}, "spec": pod_spec()},
        },
    }


def stateful_set() -> Manifest:
    spec = pod_spec()
    spec["volumes"] = [{"name": "tmp", "emptyDir": {}}]  # models come from the claim template
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": "store"},
        "spec": {
            "serviceName": "store",
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": dict(LABELS)},
            "template": {"metadata": {"labels": dict(LABELS)}, "spec": spec},
            "volumeClaimTemplates": [
                {
                    "metadata": {"name": "models"},
                    "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "100Gi"}}},
                }
            ],
        },
    }


def service() -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "web"},
        "spec": {
            "type": "ClusterIP",
            "selector": dict(LABELS),
            "ports": [
                {"name": "http", "port": 80, "targetPort": "http"},
                {"name": "grpc", "port": 9000, "targetPort": 9000, "appProtocol": "kubernetes.io/h2c"},
            ],
        },
    }


def headless_service() -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "store"},
        "spec": {"clusterIP": "None", "selector": {"app": "store"}, "ports": [{"port": 6379}]},
    }


def disruption_budget() -> Manifest:
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": "web"},
        "spec": {"maxUnavailable": "25%", "selector": {"matchLabels": dict(LABELS)}},
    }


def autoscaler() -> Manifest:
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": "web"},
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "web"},
            "minReplicas": 2,
            "maxReplicas": 8,
            "metrics": [
                {
                    "type": "Resource",
                    "resource": {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 70}},
                }
            ],
            "behavior": {
                "scaleDown": {"selectPolicy": "Min", "policies": [{"type": "Pods", "value": 1, "periodSeconds": 60}]}
            },
        },
    }


def network_policy() -> Manifest:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": "web"},
        "spec": {
            "podSelector": {"matchLabels": dict(LABELS)},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [
                {
                    "from": [
                        {"podSelector": {}},
                        {"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16"]}},
                    ],
                    "ports": [{"port": "http"}, {"port": 9000, "endPort": 9010, "protocol": "TCP"}],
                }
            ],
            "egress": [
                {
                    "to": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}}}],
                    "ports": [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}],
                }
            ],
        },
    }


def deny_all() -> Manifest:
    """Beside `network_policy`, which lets DNS through."""
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": "deny-all"},
        "spec": {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]},
    }


def job() -> Manifest:
    spec = pod_spec(restartPolicy="Never")
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "prepare"},
        "spec": {"backoffLimit": 3, "template": {"metadata": {"labels": dict(LABELS)}, "spec": spec}},
    }


def cron_job() -> Manifest:
    return {
        "apiVersion": "batch/v1",
        "kind": "CronJob",
        "metadata": {"name": "compact"},
        "spec": {
            "schedule": "*/15 3-5 * jan-mar 1,5",
            "concurrencyPolicy": "Forbid",
            "jobTemplate": {"spec": {"template": {"spec": pod_spec(restartPolicy="OnFailure")}}},
        },
    }


def config_map() -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "settings"},
        "data": {"server.yaml": "a: 1\n", "EMPTY": ""},
        "binaryData": {"blob.bin": "AAEC"},
    }


def secret() -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "keys"},
        "type": "Opaque",
        "data": {"token": "c2VjcmV0"},
        "stringData": {"plain": "text"},
    }


def volume_claim() -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "models"},
        "spec": {"accessModes": ["ReadOnlyMany"], "resources": {"requests": {"storage": "200Gi"}}},
    }


def ingress() -> Manifest:
    backend = {"service": {"name": "web", "port": {"name": "http"}}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "Ingress",
        "metadata": {"name": "web"},
        "spec": {"rules": [{"http": {"paths": [{"path": "/v1", "pathType": "Prefix", "backend": backend}]}}]},
    }


def quota() -> Manifest:
    hard = {"requests.nvidia.com/gpu": "16", "requests.memory": "2Ti", "pods": "100"}
    return {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "gpus"}, "spec": {"hard": hard}}


def priority_class() -> Manifest:
    return {
        "apiVersion": "scheduling.k8s.io/v1",
        "kind": "PriorityClass",
        "metadata": {"name": "target"},
        "value": 100_000,
        "preemptionPolicy": "PreemptLowerPriority",
    }


def role() -> Manifest:
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role",
        "metadata": {"name": "system:reader"},
        "rules": [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list"]}],
    }


def role_binding() -> Manifest:
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": {"name": "reader"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "system:reader"},
        "subjects": [{"kind": "ServiceAccount", "name": "web"}],
    }


def ray_group(image: str = "rayproject/ray:2.60.0", gpus: int = 0, cpu: str = "8", **more: Any) -> Manifest:
    """A pod template of a Ray group."""
    devices = {"nvidia.com/gpu": gpus} if gpus else {}
    amounts = {"cpu": cpu, "memory": "32Gi", **devices}
    return {
        "metadata": {"labels": {"paceline/role": "worker"}, "annotations": {"example.com/note": "kept"}},
        "spec": {
            "containers": [
                {
                    "name": "ray",
                    "image": image,
                    "env": [{"name": "OMP_NUM_THREADS", "value": "1"}],
                    "ports": [{"name": "metrics", "containerPort": 8080}],
                    "resources": {"requests": dict(amounts), "limits": dict(amounts)},
                    "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
                    "securityContext": {"runAsNonRoot": True, "runAsUser": 10001},
                }
            ],
            "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}}],
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
            **more,
        },
    }


def ray_cluster_spec() -> Manifest:
    """A head without work, a target group with tensor parallel 8, draft workers on smaller nodes."""
    return {
        "rayVersion": "2.60.0",
        "enableInTreeAutoscaling": True,
        "autoscalerOptions": {
            "version": "v2",
            "upscalingMode": "Default",
            "idleTimeoutSeconds": 300,
            "resources": {"limits": {"cpu": "500m", "memory": "1Gi"}},
        },
        "authOptions": {"mode": "token"},
        "gcsFaultToleranceOptions": {
            "redisAddress": "redis://gcs-redis:6379",
            "redisPassword": {"valueFrom": {"secretKeyRef": {"name": "gcs-redis", "key": "password"}}},
        },
        "headGroupSpec": {
            "serviceType": "ClusterIP",
            "rayStartParams": {"num-cpus": "0", "dashboard-host": "0.0.0.0"},
            "template": ray_group(cpu="2"),
        },
        "workerGroupSpecs": [
            {
                "groupName": "router",
                "replicas": 1,
                "minReplicas": 1,
                "maxReplicas": 2,
                "rayStartParams": {},
                "template": ray_group(cpu="4"),
            },
            {
                "groupName": "target-tp8",
                "replicas": 1,
                "minReplicas": 1,
                "maxReplicas": 2,
                "idleTimeoutSeconds": 1800,
                "priority": 10,
                "rayStartParams": {},
                "template": ray_group(gpus=8, cpu="64", restartPolicy="Never"),
            },
            {
                "groupName": "draft",
                "replicas": 1,
                "minReplicas": 1,
                "maxReplicas": 6,
                "idleTimeoutSeconds": 300,
                "priority": 1,
                "labels": {"paceline/pool": "draft"},
                "rayStartParams": {},
                "template": ray_group(gpus=1),
            },
        ],
    }


SERVE_CONFIG = textwrap.dedent(
    """\
    proxy_location: EveryNode
    http_options:
      host: 0.0.0.0
      port: 8000
      request_timeout_s: 600
    grpc_options:
      port: 9000
      grpc_servicer_functions:
        - grpc_health.v1.health_pb2_grpc.add_HealthServicer_to_server
    applications:
      - name: paceline
        route_prefix: /
        import_path: cluster.app:build
        args:
          target:
            model: /models/target
            dtype: bfloat16
            device: cuda
            tensor_parallel: 8
          draft:
            model: /models/draft
            device: cuda
            workers: 1
          router:
            max_running: 64
        deployments:
          - name: Router
            max_ongoing_requests: 1000
            ray_actor_options:
              num_cpus: 1
          - name: DraftPool
            autoscaling_config:
              min_replicas: 1
              max_replicas: 6
              target_ongoing_requests: 2
    """
)


def ray_service() -> Manifest:
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": {"name": "paceline", "labels": {"app.kubernetes.io/name": "paceline"}},
        "spec": {
            "serveConfigV2": SERVE_CONFIG,
            "excludeHeadPodFromServeSvc": True,
            "rayClusterDeletionDelaySeconds": 120,
            "upgradeStrategy": {
                "type": "NewClusterWithIncrementalUpgrade",
                "clusterUpgradeOptions": {
                    "maxSurgePercent": 40,
                    "stepSizePercent": 10,
                    "intervalSeconds": 30,
                    "gatewayClassName": "istio",
                },
            },
            "rayClusterConfig": ray_cluster_spec(),
        },
    }


def small_ray_service() -> Manifest:
    """As a sample of KubeRay may look: fixed replicas, code from elsewhere, defaults and nulls all over."""
    config = """
applications:
  - name: fruit
    import_path: fruit.app
    route_prefix: /fruit
    runtime_env:
      working_dir: "https://example.com/fruit.zip"
    deployments:
      - name: Mango
        num_replicas: 2
        user_config: {price: 3}
        ray_actor_options: {num_cpus: 0.1}
"""
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": {"name": "fruit", "annotations": None},
        "spec": {
            "serveConfigV2": config,
            "rayClusterConfig": {
                "rayVersion": "2.60.0",
                "headGroupSpec": {
                    "rayStartParams": {},
                    "template": {
                        "metadata": None,
                        "spec": {"containers": [{"name": "head", "image": "rayproject/ray:2.60.0", "resources": None}]},
                    },
                },
                "workerGroupSpecs": [
                    {
                        "groupName": "small",
                        "replicas": 1,
                        "rayStartParams": {"resources": '"{\\"fruit\\": 2}"'},
                        "template": {
                            "spec": {"containers": [{"name": "ray-worker", "image": "rayproject/ray:2.60.0"}]}
                        },
                    }
                ],
            },
        },
    }


def ray_cluster() -> Manifest:
    spec = ray_cluster_spec()
    del spec["gcsFaultToleranceOptions"]
    return {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": {"name": "bench"}, "spec": spec}


def fixed_ray_cluster() -> Manifest:
    """No autoscaler, resources of groups instead of start parameters, legacy fault tolerance."""
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": {"name": "fixed", "annotations": {"ray.io/ft-enabled": "true"}},
        "spec": {
            "headGroupSpec": {
                "resources": {"CPU": "0"},
                "template": {
                    "spec": {
                        "containers": [
                            {
                                "name": "head",
                                "image": "registry.example.com/paceline:1.0.0",
                                "env": [{"name": "RAY_REDIS_ADDRESS", "value": "redis:6379"}],
                            }
                        ]
                    }
                },
            },
            "workerGroupSpecs": [
                {"groupName": "tpu", "replicas": 1, "numOfHosts": 4, "maxReplicas": 1, "template": ray_group()}
            ],
        },
    }


def ray_job() -> Manifest:
    spec = ray_cluster_spec()
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": "drafter"},
        "spec": {
            "entrypoint": "paceline drafter build --target smollm2",
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": 600,
            "rayClusterSpec": spec,
        },
    }


def ray_cron_job() -> Manifest:
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayCronJob",
        "metadata": {"name": "nightly"},
        "spec": {"schedule": "0 3 * * *", "timeZone": "Etc/UTC", "jobTemplate": ray_job()["spec"]},
    }


def http_route() -> Manifest:
    match = {"path": {"type": "PathPrefix", "value": "/v1"}}
    return {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "HTTPRoute",
        "metadata": {"name": "paceline"},
        "spec": {
            "parentRefs": [{"name": "public"}],
            "rules": [{"matches": [match], "backendRefs": [{"name": "web", "port": 80}]}],
        },
    }


def service_monitor() -> Manifest:
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "ServiceMonitor",
        "metadata": {"name": "paceline", "labels": {"release": "prometheus"}},
        "spec": {"selector": {"matchLabels": dict(LABELS)}, "endpoints": [{"port": "metrics", "interval": "15s"}]},
    }


VALID = (
    deployment, stateful_set, service, headless_service, disruption_budget, autoscaler, network_policy, deny_all, job,
    cron_job, config_map, secret, volume_claim, ingress, quota, priority_class, role, role_binding, ray_service,
    small_ray_service, ray_cluster, fixed_ray_cluster, ray_job, ray_cron_job, http_route, service_monitor,
)  # fmt: skip
