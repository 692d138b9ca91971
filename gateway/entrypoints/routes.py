"""The gateway's HTTP and WebSocket routes, with models, health, metrics and error handlers."""

from functools import partial
from importlib.metadata import version
from pathlib import Path

import structlog
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Mount, Route, WebSocketRoute
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from api import openai_bodies
from api.endpoints.completion_endpoint import CHAT, COMPLETION
from api.schemas.classify_rerank import ClassifyRequest, RerankRequest
from api.schemas.embeddings import EmbeddingRequest
from api.schemas.responses import ResponseRequest
from gateway import error_responses
from gateway.context import GatewayContext
from gateway.entrypoints import (
    completions,
    embed_classify_rerank,
    http_middleware,
    messages,
    openapi,
    usage,
    websocket,
)
from gateway.entrypoints.batches import batch_routes, estimate_routes, result_routes, retry_routes
from gateway.entrypoints.endpoint import Endpoint, request_key
from gateway.entrypoints.files import file_routes, upload_routes
from gateway.entrypoints.plain_responses import render_json
from gateway.entrypoints.responses import response_creation, response_routes
from gateway.entrypoints.webhooks import delivery_routes, endpoint_routes
from streams.errors import (
    Forbidden,
    InternalError,
    MethodNotAllowed,
    MillstreamError,
    ModelNotAllowed,
    NotFound,
)
from streams.metrics_server import host_refusal, names_this_machine

log = structlog.get_logger()

PAGE_DIRECTORY = Path(__file__).parents[1] / "page"
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'; object-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def build_app(context: GatewayContext) -> ASGIApp:
    """Return the ASGI application of one gateway."""
    application = Starlette(
        routes=[
            *_inference_routes(context),
            WebSocketRoute("/v1/stream", _WebSocketApp(context)),
            Route("/v1/models", partial(_list_models, context)),
            Route("/v1/models/{model:path}", partial(_show_model, context)),
            Route("/v1/usage", partial(usage.show_usage, context)),
            Route("/healthz", _healthz),
            Route("/health", _healthz),
            Route("/version", _version),
            Route("/readyz", partial(_readyz, context)),
            *messages.build_routes(context),
            *file_routes.build_routes(context),
            *upload_routes.build_routes(context),
            *batch_routes.build_routes(context),
            *result_routes.build_routes(context),
            *estimate_routes.build_routes(context),
            *retry_routes.build_routes(context),
            *response_routes.build_routes(context),
            *endpoint_routes.build_routes(context),
            *delivery_routes.build_routes(context),
            *_metrics_routes(context),
            Route("/openapi.json", _openapi),
            Route("/", _index_page),
            Mount("/page", _PageFiles(directory=PAGE_DIRECTORY)),
        ],
        exception_handlers={
            HTTPException: _handle_http_exception,
            MillstreamError: _handle_error,
            Exception: _handle_fault,
        },
    )
    application.router.redirect_slashes = False
    application.router.default = _serve_not_found
    return http_middleware.wrap(application, context.settings.cors_origins)


def _inference_routes(context: GatewayContext) -> list[BaseRoute]:
    completion, chat = COMPLETION, CHAT
    applications: dict[str, ASGIApp] = {
        "/v1/completions": Endpoint(
            context,
            completion.schema,
            completion.to_submissions,
            partial(completions.serve, completion),
        ),
        "/v1/chat/completions": Endpoint(
            context, chat.schema, chat.to_submissions, partial(completions.serve, chat)
        ),
        "/v1/embeddings": Endpoint(
            context,
            EmbeddingRequest,
            embed_classify_rerank.to_submissions,
            embed_classify_rerank.serve_embeddings,
        ),
        "/v1/classify": Endpoint(
            context,
            ClassifyRequest,
            embed_classify_rerank.to_submissions,
            embed_classify_rerank.serve_classify,
        ),
        "/v1/rerank": Endpoint(
            context,
            RerankRequest,
            embed_classify_rerank.to_submissions,
            embed_classify_rerank.serve_rerank,
        ),
        "/v1/responses": Endpoint(
            context,
            ResponseRequest,
            response_creation.to_submissions,
            response_creation.serve,
        ),
        "/rerank": Endpoint(
            context,
            RerankRequest,
            embed_classify_rerank.to_submissions,
            embed_classify_rerank.serve_rerank,
        ),
    }
    return [Route(path, each, methods=["POST"]) for path, each in applications.items()]


def _metrics_routes(context: GatewayContext) -> list[BaseRoute]:
    if not context.settings.has_public_metrics:
        return []
    return [Route("/metrics", partial(_metrics, context))]


class _WebSocketApp:
    def __init__(self, context: GatewayContext) -> None:
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await websocket.serve_websocket(self._context, scope, receive, send)


async def _list_models(context: GatewayContext, request: Request) -> Response:
    principal = await context.authenticate(request_key(request), request.scope, "models:read")
    models, workers, allows = (
        context.registry.models,
        context.worker_counts,
        principal.key.allows_model,
    )
    cards = [
        openai_bodies.model_card(model, workers[name])
        for name, model in models.items()
        if allows(name, name, is_adapter=False)
    ]
    cards += [
        openai_bodies.adapter_card(models[adapter.model], workers[adapter.model], adapter)
        for adapter in context.registry.adapters.values()
        if adapter.model in models and allows(adapter.id, adapter.model, is_adapter=True)
    ]
    cards += [
        openai_bodies.model_card(models[alias.model], workers[alias.model], name)
        for name, alias in context.registry.aliases.items()
        if alias.model in models and allows(name, alias.model, is_adapter=False)
    ]
    return render_json(openai_bodies.model_list(cards))


async def _show_model(context: GatewayContext, request: Request) -> Response:
    principal = await context.authenticate(request_key(request), request.scope, "models:read")
    name = request.path_params["model"]
    model, _, adapter = context.registry.resolve_target(name)
    if not principal.key.allows_model(name, model.name, is_adapter=adapter is not None):
        raise ModelNotAllowed(name)
    workers = context.worker_counts[model.name]
    if adapter:
        return render_json(openai_bodies.adapter_card(model, workers, adapter, name))
    return render_json(openai_bodies.model_card(model, workers, name))


async def _healthz(request: Request) -> Response:
    return render_json({"status": "ok"})


async def _version(request: Request) -> Response:
    return render_json({"version": version("millstream")})


async def _serve_not_found(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer at a path that does not exist, also where a WebSocket was asked for."""
    if scope["type"] == "http":
        raise HTTPException(404)
    await receive()  # websocket.connect
    error = NotFound(f"there is no WebSocket at {scope['path']}")
    await error_responses.deny_websocket(send, error)


async def _readyz(context: GatewayContext, request: Request) -> Response:
    """Answer 200 if the broker is connected, some model has or had a worker, and no drain runs.

    Else, or while the broker refuses a stream, the status is 503. Where `/metrics` is served the
    body has the facts, too: they name models and streams, which is for operators to know.
    """
    ready = all(check() for check in context.readiness_checks.values())
    facts: dict[str, object] = {"ready": ready}
    if context.settings.has_public_metrics and _may_see_metrics(context, request):
        facts |= {
            "nats": context.broker.is_connected,
            "unusable_streams": sorted(context.streams.unusable),
            "workers": context.worker_counts,
        }
    return render_json(facts, 200 if ready else 503)


def _may_see_metrics(context: GatewayContext, request: Request) -> bool:
    """True unless a page, or a proxy for strangers, may ask: who did so by another name."""
    host = request.headers.get("host")
    return context.settings.public_metrics or names_this_machine(host)


async def _metrics(context: GatewayContext, request: Request) -> Response:
    if not _may_see_metrics(context, request):
        raise Forbidden(
            f"{host_refusal(request.headers.get('host'))}, or start it with --public-metrics"
        )
    context.refresh_metrics()
    return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)


async def _openapi(request: Request) -> Response:
    return render_json(openapi.build_document())


class _PageFiles(StaticFiles):
    """The files of the page, each with the headers of the page itself."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(PAGE_HEADERS)
        return response


async def _index_page(request: Request) -> Response:
    return FileResponse(PAGE_DIRECTORY / "index.html", headers=PAGE_HEADERS)


async def _handle_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        response = _render_error(request, MethodNotAllowed(f"{request.method} is not allowed here"))
        response.headers.update(error.headers or {})
        return response
    return _render_error(request, NotFound(f"there is nothing at {request.url.path}"))


async def _handle_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, MillstreamError)
    return _render_error(request, error)


async def _handle_fault(request: Request, error: Exception) -> Response:
    log.error("request_failed", path=request.url.path, exc_info=error)
    return _render_error(request, InternalError("the gateway failed; its log says why"))


def _render_error(request: Request, error: MillstreamError) -> Response:
    """Return the HTTP response for an error, in the shape of the API that the path belongs to."""
    if messages.is_at(request.scope["path"]):
        return messages.render_error(request, error)
    return error_responses.error_response(error)
