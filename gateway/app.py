"""The gateway's routes."""

from functools import partial
from pathlib import Path

import orjson
import structlog
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Mount, Route, WebSocketRoute
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway import answers, completions, openapi, problems, socket, unary
from gateway.door import Door
from gateway.endpoint import Endpoint, authorization
from gateway.metrics import FOLLOWED
from gateway.schemas.classification import ClassifyRequest, RerankRequest
from gateway.schemas.embeddings import EmbeddingRequest
from streams.errors import MillstreamError

log = structlog.get_logger()

PAGE = Path(__file__).parent / "page"
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


class NotFound(MillstreamError):
    """No such path."""

    code = "not_found"


class MethodNotAllowed(MillstreamError):
    """The path is there, this method is not."""

    code = "method_not_allowed"


class InternalError(MillstreamError):
    """Our own fault; the log has it."""


def app(door: Door) -> Starlette:
    """The ASGI application of one gateway."""
    return Starlette(
        routes=[
            *_inference(door),
            WebSocketRoute("/v1/stream", _Socket(door)),
            Route("/v1/models", partial(_models, door)),
            Route("/v1/models/{model:path}", partial(_model, door)),
            Route("/healthz", _healthz),
            Route("/readyz", partial(_readyz, door)),
            Route("/metrics", partial(_metrics, door)),
            Route("/openapi.json", _openapi),
            Route("/", _page),
            Mount("/page", StaticFiles(directory=PAGE)),
        ],
        exception_handlers={
            HTTPException: _explain,
            MillstreamError: _explain_ours,
            Exception: _explain_fault,
        },
    )


def _inference(door: Door) -> list[BaseRoute]:
    completion, chat = completions.COMPLETION, completions.CHAT
    applications: dict[str, ASGIApp] = {
        "/v1/completions": Endpoint(
            door,
            completion.schema,
            completion.submissions,
            partial(completions.serve, completion),
        ),
        "/v1/chat/completions": Endpoint(
            door, chat.schema, chat.submissions, partial(completions.serve, chat)
        ),
        "/v1/embeddings": Endpoint(door, EmbeddingRequest, unary.submissions, unary.embed),
        "/v1/classify": Endpoint(door, ClassifyRequest, unary.submissions, unary.classify),
        "/v1/rerank": Endpoint(door, RerankRequest, unary.submissions, unary.rerank),
        "/rerank": Endpoint(door, RerankRequest, unary.submissions, unary.rerank),
    }
    return [Route(path, each, methods=["POST"]) for path, each in applications.items()]


class _Socket:
    def __init__(self, door: Door) -> None:
        self._door = door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await socket.stream(self._door, scope, receive, send)


async def _models(door: Door, request: Request) -> Response:
    door.authenticate(authorization(request))
    models, aliases = door.registry.models, door.registry.aliases
    workers = door.workers
    cards = [answers.model_card(model, workers[model.name]) for model in models.values()]
    cards += [
        answers.adapter_card(models[adapter.model], workers[adapter.model], adapter)
        for adapter in door.registry.adapters.values()
        if adapter.model in models
    ]
    cards += [
        answers.model_card(models[alias.model], workers[alias.model], name)
        for name, alias in aliases.items()
        if alias.model in models
    ]
    return _json(answers.model_list(cards))


async def _model(door: Door, request: Request) -> Response:
    door.authenticate(authorization(request))
    name = request.path_params["model"]
    model, _, adapter = door.registry.target(name)
    workers = door.workers[model.name]
    if adapter:
        return _json(answers.adapter_card(model, workers, adapter, name))
    return _json(answers.model_card(model, workers, name))


async def _healthz(request: Request) -> Response:
    return _json({"status": "ok"})


async def _readyz(door: Door, request: Request) -> Response:
    """Ready: the broker is connected and some model has, or had, a worker; and not draining."""
    workers = door.workers
    ready = door.broker.connected and door.has_served and not door.draining.is_set()
    facts = {"ready": ready, "nats": door.broker.connected, "workers": workers}
    return _json(facts, 200 if ready else 503)


async def _metrics(door: Door, request: Request) -> Response:
    FOLLOWED.set(len(door.relay))
    return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)


async def _openapi(request: Request) -> Response:
    return _json(openapi.document())


async def _page(request: Request) -> Response:
    return FileResponse(PAGE / "index.html", headers=PAGE_HEADERS)


def _json(content: object, status: int = 200) -> Response:
    return Response(orjson.dumps(content), status, media_type="application/json")


async def _explain(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        response = problems.response(MethodNotAllowed(f"{request.method} is not allowed here"))
        response.headers.update(error.headers or {})
        return response
    return problems.response(NotFound(f"there is nothing at {request.url.path}"))


async def _explain_ours(request: Request, error: Exception) -> Response:
    assert isinstance(error, MillstreamError)
    return problems.response(error)


async def _explain_fault(request: Request, error: Exception) -> Response:
    log.error("request_failed", path=request.url.path, exc_info=error)
    return problems.response(InternalError("the gateway failed; its log says why"))
