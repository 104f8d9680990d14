"""Each rule catches the fault it is there for: planted in the rendered overlay that has everything in it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from tools.k8s_check import ROOT, render, schema_problems
from tools.k8s_rules import RULES, problems

Objects = list[dict[str, Any]]


@pytest.fixture(scope="module")
def embedded() -> Objects:
    objects = render(ROOT / "k8s" / "overlays" / "embedded")
    assert problems(objects) == []
    return objects


def find(objects: Objects, kind: str, name: str) -> dict[str, Any]:
    """By kind and name, the hash that kustomize adds to a ConfigMap's left out."""
    return next(one for one in objects if one["kind"] == kind and one["metadata"]["name"].startswith(name))


def pod(objects: Objects, name: str) -> dict[str, Any]:
    kind = "StatefulSet" if name in ("worker", "etcd", "minio") else "Deployment"
    spec: dict[str, Any] = find(objects, kind, f"segue-{name}")["spec"]["template"]["spec"]
    return spec


def container(objects: Objects, name: str) -> dict[str, Any]:
    only: dict[str, Any] = pod(objects, name)["containers"][0]
    return only


def setting(name: str, value: str) -> Callable[[Objects], None]:
    def plant(objects: Objects) -> None:
        find(objects, "ConfigMap", "segue-settings")["data"][name] = value

    return plant


def labels_of_workers(objects: Objects) -> None:
    find(objects, "StatefulSet", "segue-worker")["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/name"] = (
        "segue-wrker"
    )


def too_wide_a_service(objects: Objects) -> None:
    find(objects, "Service", "segue-ingress")["spec"]["selector"] = {"app.kubernetes.io/part-of": "segue"}


def budget_of_nobody(objects: Objects) -> None:
    budget = find(objects, "PodDisruptionBudget", "segue-router")
    budget["spec"]["selector"]["matchLabels"] = {"app.kubernetes.io/name": "segue-routers"}


def spread_of_nobody(objects: Objects) -> None:
    spread = pod(objects, "router")["topologySpreadConstraints"][0]
    spread["labelSelector"]["matchLabels"] = {"app.kubernetes.io/name": "router"}


def port_of_nobody(objects: Objects) -> None:
    find(objects, "Service", "segue-catalog")["spec"]["ports"][0]["targetPort"] = "http"


def translated_headless_port(objects: Objects) -> None:
    find(objects, "Service", "segue-routers")["spec"]["ports"][0]["port"] = 80


def claim_of_nobody(objects: Objects) -> None:
    next(one for one in pod(objects, "worker")["volumes"] if one["name"] == "models")["persistentVolumeClaim"][
        "claimName"
    ] = "models"


def lost_volume(objects: Objects) -> None:
    find(objects, "StatefulSet", "segue-worker")["spec"]["volumeClaimTemplates"] = []


def lost_config(objects: Objects) -> None:
    container(objects, "router")["envFrom"][0]["configMapRef"]["name"] = "segue-settings"


def lost_secret(objects: Objects) -> None:
    container(objects, "minio")["env"][2]["valueFrom"]["secretKeyRef"]["name"] = "minio"


def lost_secret_key(objects: Objects) -> None:
    container(objects, "ingress")["env"][0]["valueFrom"]["secretKeyRef"]["key"] = "secret"


def governed_by_a_virtual_address(objects: Objects) -> None:
    del find(objects, "Service", "segue-workers")["spec"]["clusterIP"]


def governed_by_nothing(objects: Objects) -> None:
    find(objects, "StatefulSet", "segue-worker")["spec"]["serviceName"] = "segue-worker"


def no_startup_probe(objects: Objects) -> None:
    del container(objects, "worker")["startupProbe"]


def probe_of_a_strange_port(objects: Objects) -> None:
    container(objects, "router")["readinessProbe"]["grpc"]["port"] = 7001


def probe_of_a_strange_name(objects: Objects) -> None:
    container(objects, "router")["livenessProbe"]["httpGet"]["port"] = "prometheus"


def probe_of_a_number(objects: Objects) -> None:
    container(objects, "router")["livenessProbe"]["httpGet"]["port"] = 9100


def hasty_liveness(objects: Objects) -> None:
    container(objects, "worker")["livenessProbe"]["failureThreshold"] = 1


def liveness_as_readiness(objects: Objects) -> None:
    probe = container(objects, "router")
    probe["livenessProbe"] = {**probe["readinessProbe"], "failureThreshold": 12}


def root(objects: Objects) -> None:
    pod(objects, "ingress")["securityContext"]["runAsNonRoot"] = False


def no_seccomp(objects: Objects) -> None:
    del pod(objects, "ingress")["securityContext"]["seccompProfile"]


def token(objects: Objects) -> None:
    del pod(objects, "catalog")["automountServiceAccountToken"]


def links(objects: Objects) -> None:
    pod(objects, "catalog")["enableServiceLinks"] = True


def privileges(objects: Objects) -> None:
    container(objects, "catalog")["securityContext"]["allowPrivilegeEscalation"] = True


def writable_root(objects: Objects) -> None:
    pod(objects, "ingress")["initContainers"][0]["securityContext"]["readOnlyRootFilesystem"] = False


def capabilities(objects: Objects) -> None:
    del container(objects, "etcd")["securityContext"]["capabilities"]


def no_memory_limit(objects: Objects) -> None:
    del container(objects, "worker")["resources"]["limits"]["memory"]


def any_version(objects: Objects) -> None:
    container(objects, "router")["image"] = "segue-router:latest"


def no_version(objects: Objects) -> None:
    container(objects, "router")["image"] = "registry.test:5000/segue-router"


def undefined_reference(objects: Objects) -> None:
    names = [one["name"] for one in container(objects, "worker")["env"]]
    container(objects, "worker")["env"].pop(names.index("POD_IP"))


def hasty_kill(objects: Objects) -> None:
    pod(objects, "worker")["terminationGracePeriodSeconds"] = 120


def no_tenant_secret(objects: Objects) -> None:
    container(objects, "ingress")["env"] = []


def two_of_a_name(objects: Objects) -> None:
    objects.append(find(objects, "Service", "segue-router"))


FAULTS: list[tuple[Callable[[Objects], None], str]] = [
    (labels_of_workers, "StatefulSet/segue-worker: selector"),
    (labels_of_workers, "Service/segue-workers: its selector matches nothing"),
    (too_wide_a_service, "Service/segue-ingress: its selector matches"),
    (budget_of_nobody, "PodDisruptionBudget/segue-router: its selector matches nothing"),
    (spread_of_nobody, "Deployment/segue-router: a topology spread"),
    (port_of_nobody, "Service/segue-catalog: port 7000 goes to 'http'"),
    (translated_headless_port, "Service/segue-routers: headless"),
    (claim_of_nobody, "PersistentVolumeClaim/models, which is not here"),
    (lost_volume, "worker mounts 'chunks'"),
    (lost_config, "ConfigMap/segue-settings, which is not here"),
    (lost_secret, "Secret/minio, which is neither"),
    (lost_secret_key, "key 'secret' of Secret/segue-tenant"),
    (governed_by_a_virtual_address, "its serviceName segue-workers is not a headless"),
    (governed_by_nothing, "its serviceName segue-worker is no Service"),
    (no_startup_probe, "worker has no startupProbe"),
    (probe_of_a_strange_port, "readinessProbe asks port 7001"),
    (probe_of_a_strange_name, "livenessProbe asks port 'prometheus'"),
    (probe_of_a_number, "livenessProbe asks port 9100"),
    (hasty_liveness, "liveness gives up after 10 s"),
    (liveness_as_readiness, "liveness asks whether it is ready"),
    (root, "Deployment/segue-ingress: may run as root"),
    (no_seccomp, "Deployment/segue-ingress: has no seccomp profile"),
    (token, "Deployment/segue-catalog: mounts a service account token"),
    (links, "Deployment/segue-catalog: gets service links"),
    (privileges, "catalog may gain privileges"),
    (writable_root, "await-tokenizer may write to its root"),
    (capabilities, "etcd keeps capabilities"),
    (no_memory_limit, "worker has no memory among its limits"),
    (any_version, "image segue-router:latest is not of one version"),
    (no_version, "image registry.test:5000/segue-router is not of one version"),
    (undefined_reference, "SEGUE_WORKER_ADVERTISE refers to $(POD_IP)"),
    (hasty_kill, "is killed after 120 s, its ordered end may take 120 s"),
    (no_tenant_secret, "SEGUE_INGRESS_TENANT_SECRET: required"),
    (two_of_a_name, "Service/segue-router: there are two"),
    (setting("SEGUE_ROUTER_CATALOGUE", "segue-catalog:7000"), "SEGUE_ROUTER_CATALOGUE is no setting of any service"),
    (setting("SEGUE_WORKR_LANES", "4"), "SEGUE_WORKR_LANES is no setting of any service"),
    (setting("SEGUE_WORKER_LANES", "many"), "SEGUE_WORKER_LANES=many"),
    (setting("SEGUE_ROUTER_CATALOG", "segue-catalogue:7000"), "there is no Service segue-catalogue with port 7000"),
    (setting("SEGUE_ROUTER_CATALOG", "segue-catalog:7001"), "there is no Service segue-catalog with port 7001"),
    (setting("SEGUE_CATALOG_LISTEN", "127.0.0.1:7000"), "listen is on 127.0.0.1"),
    (setting("SEGUE_CATALOG_LISTEN", "0.0.0.0:7004"), "listen is port 7004"),
    (setting("SEGUE_WORKER_METRICS_LISTEN", "0.0.0.0:9000"), "metrics_listen is port 9000"),
]


@pytest.mark.parametrize(("plant", "said"), FAULTS, ids=[said for _, said in FAULTS])
def test_planted_fault_is_caught(embedded: Objects, plant: Callable[[Objects], None], said: str) -> None:
    broken = copy.deepcopy(embedded)
    plant(broken)
    found = problems(broken)
    assert any(said in problem for problem in found), found


def test_every_rule_has_a_planted_fault(embedded: Objects, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a rule left out, some fault above goes unseen."""
    for rule in RULES:
        monkeypatch.setattr("tools.k8s_rules.RULES", tuple(other for other in RULES if other is not rule))
        assert any(_unseen(embedded, plant, said) for plant, said in FAULTS), rule.__name__


def _unseen(embedded: Objects, plant: Callable[[Objects], None], said: str) -> bool:
    broken = copy.deepcopy(embedded)
    plant(broken)
    return not any(said in problem for problem in problems(broken))


def misspelt_field(objects: Objects) -> None:
    container(objects, "worker")["livenesProbe"] = {}


def text_for_a_number(objects: Objects) -> None:
    find(objects, "StatefulSet", "segue-worker")["spec"]["replicas"] = "two"


def misspelt_nested_field(objects: Objects) -> None:
    pod(objects, "worker")["securityContext"]["runAsNonroot"] = True


@pytest.mark.parametrize("plant", [misspelt_field, text_for_a_number, misspelt_nested_field])
def test_schema_violation_is_caught(embedded: Objects, plant: Callable[[Objects], None]) -> None:
    broken = [copy.deepcopy(find(embedded, "StatefulSet", "segue-worker"))]
    assert schema_problems(broken) == []
    plant(broken)
    (problem,) = schema_problems(broken)
    assert problem.startswith("StatefulSet/segue-worker: ")


def test_unknown_kind_is_caught() -> None:
    strange = {"apiVersion": "apps/v1", "kind": "StatefulSets", "metadata": {"name": "x"}}
    assert len(schema_problems([strange])) == 1
