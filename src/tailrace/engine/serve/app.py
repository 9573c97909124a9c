"""The HTTP application: all routes, guarded, over one engine process."""

from fastapi import FastAPI

from tailrace import __version__
from tailrace.data.encoding import Tokenizer
from tailrace.engine.serve.base import ComputingEngine
from tailrace.engine.serve.control import Control
from tailrace.engine.serve.control_routes import control_routes
from tailrace.engine.serve.errors import add_error_handlers, answer
from tailrace.engine.serve.formats import Context
from tailrace.engine.serve.generation import generation_routes
from tailrace.engine.serve.guard import Guard, is_loopback
from tailrace.engine.serve.info_routes import info_routes
from tailrace.engine.serve.offered_weights import OfferedWeights
from tailrace.engine.serve.requests import Requests
from tailrace.engine.serve.settings import ServedModel, ServeSettings
from tailrace.engine.serve.text import TokenStrings
from tailrace.engine.serve.versions import Versions
from tailrace.errors import TransferFailed, WeightsRefused
from tailrace.weights.base import expected_tensors


def make_app(
    requests: Requests,
    engine: ComputingEngine,
    tokenizer: Tokenizer,
    model: ServedModel,
    settings: ServeSettings,
    token: str,
) -> FastAPI:
    """Make the application.

    Args:
        requests: of the engine.
        token: what requests must bear to change weights or state.
    """
    versions = Versions()
    context = Context(
        settings.served_model_name,
        tokenizer.backend_tokenizer,
        TokenStrings(tokenizer.backend_tokenizer),
        versions,
    )
    offered = OfferedWeights(settings.weights_folder, expected_tensors(model.path, model.dtype))
    control = Control(engine, requests, versions, offered)
    app = FastAPI(title="tailrace serve", version=__version__, docs_url=None, redoc_url=None)
    app.include_router(generation_routes(requests, context, tokenizer, model))
    app.include_router(control_routes(control, requests, versions))
    app.include_router(info_routes(requests, engine, model, settings))
    app.add_middleware(
        Guard,
        token=token,
        max_body_bytes=settings.max_body_bytes,
        all_guarded=not is_loopback(settings.host),
    )
    add_error_handlers(app)
    for kind in (WeightsRefused, TransferFailed):
        app.add_exception_handler(kind, answer(lambda why: (400, str(why))))
    return app
