"""The models, tokenization and probes."""

from __future__ import annotations

from services.ingress.api import Api, Exchange
from services.ingress.chat import render
from services.ingress.completions import prompt_ids
from services.ingress.http_io import JsonAnswer, read_body, while_connected
from services.ingress.memo import Scope
from services.ingress.model_directory import ServedModel
from services.ingress.responses import Json
from services.ingress.schemas import TokenizeBody, parse


async def list_models(api: Api, exchange: Exchange) -> JsonAnswer:
    exchange.tenant(api.tenants)
    return JsonAnswer(
        {"object": "list", "data": [_model(model) for model in api.directory.all()]}, headers=exchange.headers
    )


async def get_model(api: Api, exchange: Exchange) -> JsonAnswer:
    exchange.tenant(api.tenants)
    model = await api.directory.find(exchange.request.path_params["name"])
    return JsonAnswer(_model(model), headers=exchange.headers)


async def tokenize(api: Api, exchange: Exchange) -> JsonAnswer:
    """The very ids a request with this prompt or these messages would send, remembered turns included."""
    tenant = exchange.tenant(api.tenants)
    body = parse(TokenizeBody, await read_body(exchange.request, int(api.settings.max_body_bytes)))
    model = await api.directory.find(body.model)

    async def work() -> JsonAnswer:
        spliced = 0
        if body.messages is not None:
            prompt = await render(api, model, Scope(tenant.id, model.name), body.messages)
            ids, spliced = prompt.ids, prompt.spliced
        else:
            ids = await prompt_ids(model, body.prompt or "")
        told: Json = {
            "model": model.name,
            "tokens": ids,
            "count": len(ids),
            "spliced_tokens": spliced,
            "max_context": model.max_context,
        }
        return JsonAnswer(told, headers=exchange.headers)

    return await while_connected(exchange.receive, api.closing, work())


async def healthz(_api: Api, exchange: Exchange) -> JsonAnswer:
    """Answers as long as the event loop does."""
    return JsonAnswer({"status": "ok"}, headers=exchange.headers)


async def readyz(api: Api, exchange: Exchange) -> JsonAnswer:
    if api.why_not_ready:
        return JsonAnswer({"status": "not ready", "reason": api.why_not_ready}, 503, exchange.headers)
    return JsonAnswer({"status": "ready"}, headers=exchange.headers)


def _model(model: ServedModel) -> Json:
    return {
        "id": model.name,
        "object": "model",
        "created": model.since,
        "owned_by": "segue",
        "segue": {"max_context": model.max_context, "fingerprints": list(model.fingerprints)},
    }
