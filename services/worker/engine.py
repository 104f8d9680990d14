"""The model worker's engine: weights on a device, its pages, the loop, and the storage beside it.

Imported only where a model is served: it brings torch, transformers and the chunk tiers.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import grpc
from blake3 import blake3

from libs.chunks.object_store import Bucket
from libs.continuation.chain import CHUNK_TOKENS
from libs.controller.catalog_facts import LayerGroup, Model
from libs.service.errors import StartError
from libs.service.logs import get_logger
from libs.service.metrics import Metrics
from services.worker.allocator import bound_arenas
from services.worker.assembly import Engine
from services.worker.checkpoint.settings import CheckpointSettings
from services.worker.device_runtime import DeviceRuntime
from services.worker.model.errors import ModelError
from services.worker.model.load import LoadedModel, load
from services.worker.model.source import resolve
from services.worker.pages.pool import PagePool
from services.worker.pages.sizing import GroupSpec, PageSizes
from services.worker.restore.settings import RestoreSettings
from services.worker.return_cost import MeasuredReturnCost
from services.worker.runtime.grammars import MaskFactory
from services.worker.runtime.kv import KVStore, size_pages
from services.worker.settings import WorkerSettings
from services.worker.storage import DirectorySettings, Storage, StorageSettings, open_storage

log = get_logger(__name__)


@dataclass(frozen=True)
class ModelEngine:
    """An engine and what moves its bytes."""

    engine: Engine
    storage: Storage

    def export(self, metrics: Metrics) -> None:
        """Storage's counters, each under its own name."""
        counts = self.storage.counts
        metrics.export("store", counts.store)
        metrics.export("restore", counts.restore)
        metrics.export("checkpoint", counts.checkpoint)
        metrics.export("replicas", counts.replicas)
        metrics.export("placement", counts.placement)
        metrics.export("peers", counts.peers)
        metrics.export("serving", counts.serving)
        if counts.memory is not None:
            metrics.export("memory", counts.memory)
        if counts.directory is not None:
            metrics.export("directory", counts.directory)


async def model_engine(
    settings: WorkerSettings,
    catalog: grpc.aio.Channel,
    open_peer: Callable[[str], grpc.aio.Channel],
    masks: Mapping[str, MaskFactory] | None = None,
) -> ModelEngine:
    """Loads the model and opens storage; the runtime is not started yet. `masks`: the grammars requests may name.
    `open_peer`: a channel to another worker's HOST:PORT.

    Raises StartError.
    """
    try:
        folder, model = await asyncio.to_thread(_load, settings)
    except ModelError as error:
        raise StartError(error.problem, remedy=error.remedy) from error
    return await engine_of(settings, folder, model, catalog, open_peer, masks)


@dataclass(frozen=True)
class Compute:
    """An engine and the device memory behind its pages. `cost` measures nothing until it is told where from."""

    engine: Engine
    runtime: DeviceRuntime
    kv: KVStore
    cost: MeasuredReturnCost


async def engine_of(
    settings: WorkerSettings,
    folder: Path,
    model: LoadedModel,
    catalog: grpc.aio.Channel,
    open_peer: Callable[[str], grpc.aio.Channel],
    masks: Mapping[str, MaskFactory] | None = None,
) -> ModelEngine:
    """As `model_engine`, around a model that is loaded already. Raises StartError."""
    bound_arenas()
    compute = compute_of(settings, folder, model, masks)
    storage = await open_storage(
        _storage_settings(settings),
        kv=compute.kv,
        layout=model.identity.layout,
        catalog=catalog,
        leases=compute.engine.pool,
        prefill=compute.runtime.prefill,
        open_peer=open_peer,
    )
    compute.cost.measure(compute.runtime.prefill, storage.measurements.tiers)
    return ModelEngine(compute.engine, storage)


def compute_of(
    settings: WorkerSettings, folder: Path, model: LoadedModel, masks: Mapping[str, MaskFactory] | None = None
) -> Compute:
    """Pages and runtime for a loaded model, without storage; not started. Raises StartError."""
    layout = model.identity.layout
    slack = 2 * CHUNK_TOKENS + settings.step_tokens
    try:
        budget = size_pages(
            layout,
            int(settings.kv_bytes),
            settings.page,
            sequence_tokens=settings.route_tokens,
            window_slack=slack,
        )
    except ValueError as error:
        raise StartError(str(error), remedy="raise the setting kv_bytes") from error
    kv = KVStore(layout, budget.pages, settings.page, model.device)
    sizes = PageSizes(settings.page, CHUNK_TOKENS, settings.step_tokens)
    cost = MeasuredReturnCost(layout)
    pool = PagePool(
        [GroupSpec(group.name, group.window or 0, budget.pages[group.name]) for group in layout.groups], sizes, cost
    )
    full = [budget.pages[group.name] for group in layout.groups if group.window is None]
    context = min(
        settings.max_context or model.descriptor.max_context,
        model.descriptor.max_context,
        # What can never be reserved is not offered: routers refuse it for its length.
        min(full or [min(budget.pages.values())]) * settings.page,
    )
    serialized = settings.handlers == "serialized"
    runtime = DeviceRuntime(
        model,
        kv,
        pool,
        lanes=settings.lanes,
        max_context=context,
        threads=settings.threads,
        max_jobs=settings.max_control_tasks + settings.lanes,
        serialized=serialized,
        masks=masks,
    )
    name = settings.name or Path(settings.model).name.removesuffix(".gguf")
    log.info("model loaded", model=name, device=str(model.device), context=context, kv_bytes=budget.bytes)
    facts = _facts(model, folder, context)
    lanes = 1 if serialized else settings.lanes
    return Compute(Engine(facts, name, runtime, runtime, pool, lanes, layout.bytes_per_token), runtime, kv, cost)


def _load(settings: WorkerSettings) -> tuple[Path, LoadedModel]:
    said = ""

    def progress(doing: str, fraction: float) -> None:
        nonlocal said
        if doing != said:
            said = doing
            log.info("preparing the model", doing=doing)

    folder = resolve(settings.model, settings.cache_dir.expanduser(), progress)
    return folder, load(folder, settings.device, settings.dtype)


def _facts(model: LoadedModel, folder: Path, context: int) -> Model:
    identity = model.identity
    groups = tuple(
        LayerGroup(group.name, group.layers, group.window or 0, group.kv_heads, group.head_dim, group.dtype)
        for group in identity.layout.groups
    )
    return Model(
        identity.fingerprint,
        groups,
        CHUNK_TOKENS,
        identity.weights,
        identity.variant.text,
        context,
        _template_hash(folder),
        model.descriptor.vocab,
    )


def _template_hash(folder: Path) -> str:
    """BLAKE3 of the model's own chat template; empty where it carries none."""
    template = folder / "chat_template.jinja"
    if template.is_file():
        return blake3(template.read_bytes()).hexdigest()
    config = folder / "tokenizer_config.json"
    if config.is_file():
        text = json.loads(config.read_text(encoding="utf-8")).get("chat_template")
        if isinstance(text, str):
            return blake3(text.encode()).hexdigest()
    return ""


def _storage_settings(settings: WorkerSettings) -> StorageSettings:
    url = urlsplit(settings.s3_endpoint)
    directory = None
    if settings.chunk_dir is not None:
        directory = DirectorySettings(
            settings.chunk_dir.expanduser(), int(settings.chunk_dir_cap), int(settings.chunk_dir_free)
        )
    return StorageSettings(
        bucket=Bucket(
            endpoint=url.netloc,
            bucket=settings.s3_bucket,
            access_key=settings.s3_access_key,
            secret_key=settings.s3_secret_key.get_secret_value(),
            secure=url.scheme == "https",
            region=settings.s3_region,
        ),
        directory=directory,
        restore=RestoreSettings(
            fetch_bytes=int(settings.fetch_bytes), loss_ms=settings.restore_loss_ms, hedge_floor_ms=settings.hedge_ms
        ),
        checkpoint=CheckpointSettings(staging_bytes=int(settings.staging_bytes)),
        memory=int(settings.ram_bytes),
        serve_streams=settings.serve_streams,
        bucket_wait_s=settings.startup_wait_s,
    )
