"""The routes."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from services.ingress.api import Api, Endpoint, new_request_id
from services.ingress.chat import chat_completions
from services.ingress.completions import completions
from services.ingress.errors import ApiError
from services.ingress.small_endpoints import get_model, healthz, list_models, readyz, tokenize


def build_app(api: Api) -> Starlette:
    """The ASGI application. No CORS headers: browsers of other origins are not let in."""

    def get(path: str, handler: Endpoint) -> Route:
        return Route(path, handler, methods=["GET"])

    def post(path: str, handler: Endpoint) -> Route:
        return Route(path, handler, methods=["POST"])

    return Starlette(
        routes=[
            post("/v1/chat/completions", Endpoint(api, "/v1/chat/completions", chat_completions)),
            post("/v1/completions", Endpoint(api, "/v1/completions", completions)),
            get("/v1/models", Endpoint(api, "/v1/models", list_models)),
            get("/v1/models/{name:path}", Endpoint(api, "/v1/models/{name}", get_model)),
            post("/tokenize", Endpoint(api, "/tokenize", tokenize)),
            get("/healthz", Endpoint(api, "/healthz", healthz, counts=False)),
            get("/readyz", Endpoint(api, "/readyz", readyz, counts=False)),
        ],
        exception_handlers={HTTPException: _no_such_route},
    )


async def _no_such_route(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    told = ApiError(status, f"{request.method} {request.url.path} is not served here.", code="unknown_url")
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    return JSONResponse(told.body(), status, headers | {"x-request-id": new_request_id()})
