"""The OpenAPI page of a released server, and the check of a request against it."""

import json
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema_rs

SCHEMAS = Path(__file__).parent / "schemas"


@cache
def _page(generation: str) -> dict[str, Any]:
    page: dict[str, Any] = json.loads((SCHEMAS / f"{generation}.json").read_text())
    return page


@cache
def _validator(generation: str, schema: str) -> Any:
    return jsonschema_rs.validator_for({**json.loads(schema), "components": _page(generation)["components"]})


class Page:
    """What one server accepts.

    Args:
        hidden: routes that this server does not have, because of how it was started.
        added: routes that it has because of how it was started: the fields of each.
    """

    def __init__(
        self, generation: str, hidden: Collection[str], added: Mapping[str, Collection[str]] | None = None
    ) -> None:
        self._generation = generation
        released = _page(generation)
        self.paths = {path: item for path, item in released["paths"].items() if path not in hidden}
        for path, fields in (added or {}).items():
            schema = {"type": "object", "properties": {name: {} for name in fields}, "required": list(fields)}
            body = {"content": {"application/json": {"schema": schema}}, "required": True}
            self.paths[path] = {"post": {"requestBody": body}}
        self.document = {**released, "paths": self.paths}

    def has(self, method: str, path: str) -> bool:
        return method.lower() in self.paths.get(path, {})

    def defect(self, method: str, path: str, query: Mapping[str, str], body: Any) -> str | None:
        """What is wrong with a request; None: nothing."""
        operation = self.paths[path][method.lower()]
        for parameter in operation.get("parameters", ()):
            if (text := query.get(parameter["name"])) is not None:
                value = text if parameter["schema"].get("type") == "string" else _parsed(text)
                if defect := self._mismatch(parameter["schema"], value):
                    return f"query {parameter['name']}: {defect}"
        if not (declared := operation.get("requestBody")):
            return None
        if body is None:
            return "the body is missing" if declared.get("required") else None
        return self._mismatch(declared["content"]["application/json"]["schema"], body)

    def unknown(self, method: str, path: str, query: Mapping[str, str], body: Any) -> set[str]:
        """Fields of a request that the server ignores, because it does not know them."""
        operation = self.paths[path][method.lower()]
        known = {parameter["name"] for parameter in operation.get("parameters", ())}
        found = set(query) - known
        if declared := operation.get("requestBody"):
            found |= set(self._unknown(declared["content"]["application/json"]["schema"], body))
        return {f"{path} {name}" for name in found}

    def _mismatch(self, schema: Mapping[str, Any], value: Any) -> str | None:
        for error in _validator(self._generation, json.dumps(schema)).iter_errors(value):
            return f"{'.'.join(map(str, error.instance_path))}: {error.message}"
        return None

    def _unknown(self, schema: Mapping[str, Any], value: Any, at: str = "") -> Iterator[str]:
        schemas = self.document["components"]["schemas"]
        while "$ref" in schema:
            schema = schemas[schema["$ref"].rpartition("/")[2]]
        if "properties" in schema and isinstance(value, dict):
            for name, each in value.items():
                if name in schema["properties"]:
                    yield from self._unknown(schema["properties"][name], each, f"{at}{name}.")
                else:
                    yield f"{at}{name}"


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
