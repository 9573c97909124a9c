"""Replies to requests that fail, in OpenAI's form."""

import json
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from tailrace.engine.serve.guard import error_body


def add_error_handlers(app: FastAPI) -> None:
    """Have the application reply in OpenAI's form to what it refuses."""
    app.add_exception_handler(HTTPException, answer(lambda why: (why.status_code, str(why.detail))))
    app.add_exception_handler(RequestValidationError, answer(lambda why: (400, _words(why))))
    app.add_exception_handler(UnicodeEncodeError, answer(lambda why: (400, "the text is not valid Unicode")))


def answer(describe: Callable[[Any], tuple[int, str]]) -> Callable[[Request, Exception], Response]:
    """An exception handler that replies in OpenAI's form, in ASCII: messages may quote the client's."""

    def handle(request: Request, why: Exception) -> Response:
        status, message = describe(why)
        return Response(json.dumps(error_body(status, message)), status, media_type="application/json")

    return handle


def _words(why: RequestValidationError) -> str:
    """The first defect of a body; the value is not repeated."""
    defect = why.errors()[0]
    return f"{'.'.join(map(str, defect['loc']))}: {defect['msg']}"
