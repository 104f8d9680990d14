"""What a schema cannot see in rendered Kubernetes objects: whether they fit each other and the services they start.

Every rule takes all objects of one rendering and yields problems, each one line that names the object. Environment
variables are put together as the kubelet does it and given to the very settings classes the services read.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from libs.service.settings import SERVICES, ServiceSettings, SettingsError, load

Object = dict[str, Any]
Problems = Iterator[str]

WORKLOADS = ("Deployment", "StatefulSet", "DaemonSet", "Job")
PROVIDED_SECRETS = {"segue-tenant": {"tenant-secret"}, "segue-s3": {"access-key", "secret-key"}}
"""Made by the operator before the first apply (docs/deploy.md), and so in no rendering."""

_SECRET_STAND_IN = "0" * 64
_FIELD_STAND_INS = {"status.podIP": "10.0.0.1", "metadata.name": "pod-0"}
_REFERENCE = re.compile(r"\$\(([A-Za-z_][\w.-]*)\)")
_OWN_ADDRESS = re.compile(r"\b(segue-[a-z0-9-]+):(\d+)")
_LIVENESS_PATIENCE_S = 30
_PROBES = ("startupProbe", "readinessProbe", "livenessProbe")


@dataclass(frozen=True)
class Pod:
    """A workload's pod template."""

    workload: Object
    spec: Object
    labels: Mapping[str, str]

    @property
    def name(self) -> str:
        return title(self.workload)

    @property
    def containers(self) -> list[Object]:
        """The main ones."""
        return list(self.spec["containers"])

    @property
    def all_containers(self) -> list[Object]:
        return [*self.spec.get("initContainers", []), *self.containers]


class Rendering:
    """All objects of one `kubectl kustomize`, indexed."""

    def __init__(self, objects: list[Object]) -> None:
        self.objects = objects
        self._by_key = {(one["kind"], one["metadata"]["name"]): one for one in objects}
        self.pods = [
            Pod(one, one["spec"]["template"]["spec"], one["spec"]["template"]["metadata"].get("labels", {}))
            for one in objects
            if one["kind"] in WORKLOADS
        ]

    def of(self, kind: str) -> list[Object]:
        return [one for one in self.objects if one["kind"] == kind]

    def find(self, kind: str, name: str) -> Object | None:
        return self._by_key.get((kind, name))

    def selected(self, selector: Mapping[str, str]) -> list[Pod]:
        return [pod for pod in self.pods if selector and selector.items() <= pod.labels.items()]


def title(one: Object) -> str:
    """Kind/name."""
    return f"{one['kind']}/{one['metadata']['name']}"


def unique_names(found: Rendering) -> Problems:
    """An object that overwrites another is no error to kubectl."""
    seen = set()
    for one in found.objects:
        if title(one) in seen:
            yield f"{title(one)}: there are two of that name"
        seen.add(title(one))


def selectors(found: Rendering) -> Problems:
    """Workloads select their own pods, services exactly one workload's, budgets at least one's."""
    for pod in found.pods:
        wanted = pod.workload["spec"].get("selector", {}).get("matchLabels", {})
        if not wanted.items() <= pod.labels.items():
            yield f"{pod.name}: selector {wanted} does not match its own pod labels {dict(pod.labels)}"
        for spread in pod.spec.get("topologySpreadConstraints", []):
            if not spread["labelSelector"]["matchLabels"].items() <= pod.labels.items():
                yield f"{pod.name}: a topology spread constraint does not select its own pods"
    for service in found.of("Service"):
        matched = found.selected(service["spec"].get("selector", {}))
        if len(matched) != 1:
            names = ", ".join(pod.name for pod in matched) or "nothing"
            yield f"{title(service)}: its selector matches {names}, not one workload"
    for budget in found.of("PodDisruptionBudget"):
        if not found.selected(budget["spec"]["selector"]["matchLabels"]):
            yield f"{title(budget)}: its selector matches nothing"


def service_ports(found: Rendering) -> Problems:
    """What a service forwards to is a port that its pods declare."""
    for service in found.of("Service"):
        for pod in found.selected(service["spec"].get("selector", {})):
            declared = {value for container in pod.containers for value in _ports(container)}
            for port in service["spec"]["ports"]:
                target = port.get("targetPort", port["port"])
                if target not in declared:
                    yield f"{title(service)}: port {port['port']} goes to {target!r}, which {pod.name} does not have"
                headless = service["spec"].get("clusterIP") == "None"
                number = {name: value for one in pod.containers for name, value in _named_ports(one).items()}
                if headless and number.get(target, target) != port["port"]:
                    yield f"{title(service)}: headless, so port {port['port']} is not translated to {target!r}"


def references(found: Rendering) -> Problems:
    """ConfigMaps, Secrets, claims, volumes and headless services that are named exist."""
    for pod in found.pods:
        claims = {one["metadata"]["name"] for one in pod.workload["spec"].get("volumeClaimTemplates", [])}
        volumes = {one["name"] for one in pod.spec.get("volumes", [])}
        for volume in pod.spec.get("volumes", []):
            if "persistentVolumeClaim" in volume:
                yield from _must_exist(
                    found, pod, "PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]
                )
            if "configMap" in volume:
                yield from _must_exist(found, pod, "ConfigMap", volume["configMap"]["name"])
            if "secret" in volume:
                yield from _must_have(found, pod, "Secret", volume["secret"]["secretName"], None)
        for container in pod.all_containers:
            for mount in container.get("volumeMounts", []):
                if mount["name"] not in volumes | claims:
                    yield f"{pod.name}: {container['name']} mounts {mount['name']!r}, which is no volume of the pod"
            for source in container.get("envFrom", []):
                if "configMapRef" in source:
                    yield from _must_exist(found, pod, "ConfigMap", source["configMapRef"]["name"])
                if "secretRef" in source:
                    yield from _must_have(found, pod, "Secret", source["secretRef"]["name"], None)
            for variable in container.get("env", []):
                origin = variable.get("valueFrom", {})
                for field, kind in (("secretKeyRef", "Secret"), ("configMapKeyRef", "ConfigMap")):
                    if field in origin:
                        yield from _must_have(found, pod, kind, origin[field]["name"], origin[field]["key"])
        if pod.workload["kind"] == "StatefulSet":
            yield from _governing_service(found, pod)


def _governing_service(found: Rendering, pod: Pod) -> Problems:
    name = pod.workload["spec"]["serviceName"]
    service = found.find("Service", name)
    if service is None:
        yield f"{pod.name}: its serviceName {name} is no Service here"
    elif service["spec"].get("clusterIP") != "None" or pod not in found.selected(service["spec"].get("selector", {})):
        yield f"{pod.name}: its serviceName {name} is not a headless Service that selects it"


def _must_exist(found: Rendering, pod: Pod, kind: str, name: str) -> Problems:
    if found.find(kind, name) is None:
        yield f"{pod.name}: refers to {kind}/{name}, which is not here"


def _must_have(found: Rendering, pod: Pod, kind: str, name: str, key: str | None) -> Problems:
    one = found.find(kind, name)
    if one is not None:
        keys = {*one.get("data", {}), *one.get("stringData", {})}
    elif kind == "Secret" and name in PROVIDED_SECRETS:
        keys = PROVIDED_SECRETS[name]
    else:
        yield f"{pod.name}: refers to {kind}/{name}, which is neither here nor made by the operator"
        return
    if key is not None and key not in keys:
        yield f"{pod.name}: refers to key {key!r} of {kind}/{name}, which has {', '.join(sorted(keys))}"


def probes(found: Rendering) -> Problems:
    """Every long-lived container has all three, on ports it declares; liveness is patient and has its own reasons."""
    for pod in found.pods:
        if pod.workload["kind"] == "Job":
            continue
        for container in pod.containers:
            where = f"{pod.name}: {container['name']}"
            for kind in _PROBES:
                if kind not in container:
                    yield f"{where} has no {kind}"
                    continue
                yield from _probe_port(where, kind, container[kind], container)
            live = container.get("livenessProbe", {})
            patience = live.get("periodSeconds", 10) * live.get("failureThreshold", 3)
            if live and patience < _LIVENESS_PATIENCE_S:
                yield f"{where}: liveness gives up after {patience} s: a busy moment would restart it"
            if "grpc" in live or live.get("httpGet", {}).get("path") == "/readyz":
                yield f"{where}: liveness asks whether it is ready: a pod that waits for another would be restarted"


def _probe_port(where: str, kind: str, probe: Object, container: Object) -> Problems:
    named = _named_ports(container)
    if "grpc" in probe:  # takes no names
        if probe["grpc"]["port"] not in named.values():
            yield f"{where}: {kind} asks port {probe['grpc']['port']}, which has no name there"
        return
    asked = next((probe[way]["port"] for way in ("httpGet", "tcpSocket") if way in probe), None)
    if asked is not None and asked not in named:
        yield f"{where}: {kind} asks port {asked!r}, which is no name of a port there"


def hardening(found: Rendering) -> Problems:
    """What the `restricted` pod security standard wants, a read-only root, and limits."""
    for pod in found.pods:
        security = pod.spec.get("securityContext", {})
        if security.get("runAsNonRoot") is not True or security.get("runAsUser", 0) == 0:
            yield f"{pod.name}: may run as root"
        if security.get("seccompProfile", {}).get("type") != "RuntimeDefault":
            yield f"{pod.name}: has no seccomp profile"
        if pod.spec.get("automountServiceAccountToken") is not False:
            yield f"{pod.name}: mounts a service account token it has no use for"
        if pod.spec.get("enableServiceLinks") is not False:
            yield f"{pod.name}: gets service links, which may look like settings"
        for container in pod.all_containers:
            where = f"{pod.name}: {container['name']}"
            own = container.get("securityContext", {})
            if own.get("allowPrivilegeEscalation") is not False:
                yield f"{where} may gain privileges"
            if own.get("readOnlyRootFilesystem") is not True:
                yield f"{where} may write to its root file system"
            if own.get("capabilities", {}).get("drop") != ["ALL"]:
                yield f"{where} keeps capabilities"
            if own.get("runAsUser", 1) == 0 or own.get("privileged"):
                yield f"{where} may run as root"
            for part in ("requests", "limits"):
                for resource in ("cpu", "memory"):
                    if resource not in container.get("resources", {}).get(part, {}):
                        yield f"{where} has no {resource} among its {part}"
            if not re.search(r":(?!latest$)[\w.-]+$|@sha256:[0-9a-f]{64}$", container["image"]):
                yield f"{where}: image {container['image']} is not of one version"


def settings(found: Rendering) -> Problems:
    """Variables are settings that exist with values they take; ports, addresses and grace periods agree with them."""
    for pod in found.pods:
        for container in pod.all_containers:
            variables, troubles = _environment(found, container)
            yield from (f"{pod.name}: {container['name']}: {trouble}" for trouble in troubles)
            yield from (f"{pod.name}: {problem}" for problem in _unknown(variables))
            yield from (f"{pod.name}: {problem}" for problem in _unreachable(found, variables))
            if container["name"] in SERVICES and container in pod.containers:
                yield from _loads(pod, container, variables)


def _environment(found: Rendering, container: Object) -> tuple[dict[str, str], list[str]]:
    """The variables as the kubelet would set them, secrets and pod fields by stand-ins."""
    variables: dict[str, str] = {}
    troubles: list[str] = []
    for source in container.get("envFrom", []):
        held = found.find("ConfigMap", source.get("configMapRef", {}).get("name", "")) or {}
        variables |= held.get("data", {})
    for variable in container.get("env", []):
        origin = variable.get("valueFrom", {})
        if "fieldRef" in origin:
            value = _FIELD_STAND_INS.get(origin["fieldRef"]["fieldPath"], "")
        elif "secretKeyRef" in origin:
            value = _SECRET_STAND_IN
        elif "configMapKeyRef" in origin:
            held = found.find("ConfigMap", origin["configMapKeyRef"]["name"]) or {}
            value = held.get("data", {}).get(origin["configMapKeyRef"]["key"], "")
        else:
            value = variable.get("value", "")
            # Kubernetes leaves a reference to what was not defined before it as it stands.
            missing = [name for name in _REFERENCE.findall(value) if name not in variables]
            troubles += [f"{variable['name']} refers to $({name}), which is not defined before it" for name in missing]
            value = _REFERENCE.sub(lambda match: variables.get(match[1], match[0]), value)
        variables[variable["name"]] = value
    return variables, troubles


def settings_of(service: str) -> type[ServiceSettings]:
    """The settings class of a service, found in `services.<service>.settings`."""
    module = importlib.import_module(f"services.{service}.settings")
    own = [
        one
        for one in vars(module).values()
        if isinstance(one, type) and issubclass(one, ServiceSettings) and one.service == service
    ]
    return own[0]


def _unknown(variables: Mapping[str, str]) -> Problems:
    known = {"SEGUE_CONFIG"}
    for service in SERVICES:
        kind = settings_of(service)
        known |= {kind.variable(name) for name in kind.model_fields} | {f"SEGUE_{name.upper()}" for name in kind.SHARED}
    for name in variables:
        if name.startswith("SEGUE_") and name not in known:
            yield f"{name} is no setting of any service"


def _unreachable(found: Rendering, variables: Mapping[str, str]) -> Problems:
    for name, value in variables.items():
        for host, port in _OWN_ADDRESS.findall(value):
            service = found.find("Service", host)
            if service is None or int(port) not in {one["port"] for one in service["spec"]["ports"]}:
                yield f"{name}={value}: there is no Service {host} with port {port}"


def _loads(pod: Pod, container: Object, variables: Mapping[str, str]) -> Problems:
    try:
        given = load(settings_of(container["name"]), [], variables)
    except SettingsError as error:
        yield from (f"{pod.name}: {problem}" for problem in error.problems)
        return
    ports = _named_ports(container)
    for setting, names in (("listen", ("grpc", "http")), ("metrics_listen", ("metrics",))):
        host, _, port = str(getattr(given, setting)).rpartition(":")
        if int(port) not in {ports.get(name) for name in names}:
            yield f"{pod.name}: {setting} is port {port}, which is not the port called {' or '.join(names)}"
        if host not in ("0.0.0.0", "[::]"):
            yield f"{pod.name}: {setting} is on {host}, where no other pod reaches it"
    needed = given.shutdown_delay_s + given.shutdown_grace_s
    granted = pod.spec.get("terminationGracePeriodSeconds", 30)
    if granted <= needed:
        yield f"{pod.name}: is killed after {granted} s, its ordered end may take {needed:g} s"


def _named_ports(container: Object) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in container.get("ports", []) if "name" in port}


def _ports(container: Object) -> set[str | int]:
    return {*_named_ports(container), *(port["containerPort"] for port in container.get("ports", []))}


RULES: tuple[Callable[[Rendering], Problems], ...] = (
    unique_names, selectors, service_ports, references, probes, hardening, settings,
)  # fmt: skip


def problems(objects: list[Object]) -> list[str]:
    """Everything that is wrong, each once."""
    found = Rendering(objects)
    return list(dict.fromkeys(problem for rule in RULES for problem in rule(found)))
