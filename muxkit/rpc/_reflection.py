"""Reflection: a service that every server of calls has, which tells what else can be called."""

from __future__ import annotations

from typing import Any

import msgspec

from muxkit.rpc._service import Method


class MethodDescription(msgspec.Struct):
    """One method that can be called."""

    name: str
    """The full name, such as "Orders.get"."""
    signature: str
    """As it is written in Python: `Orders.get(id: int) -> Order`."""
    doc: str
    arguments: dict[str, Any]
    """The JSON schema of the arguments."""
    result: dict[str, Any]
    """The JSON schema of the result, or of the items of the stream."""
    takes_stream: bool = False
    returns_stream: bool = False
    idempotent: bool = False
    item: dict[str, Any] | None = None
    """The JSON schema of the items that the caller sends."""


class Description(msgspec.Struct):
    """Everything that a server has."""

    methods: list[MethodDescription]
    types: dict[str, Any]
    """The JSON schemas of the types that the methods refer to, by name: those under "$defs" in JSON Schema."""


class Reflection:
    """Describes the services of a server."""

    __rpc_name__ = "muxkit.Reflection"

    def __init__(self) -> None:
        self.methods: list[Method] = []

    async def describe(self) -> Description:
        """Return all methods that can be called, with their schemas."""
        kinds: list[Any] = []
        for method in self.methods:
            kinds += [method.arguments, method.result, method.item]
        schemas, types = msgspec.json.schema_components(
            kinds, schema_hook=_schema_of_others, ref_template="#/$defs/{name}"
        )
        described = []
        for number, method in enumerate(self.methods):
            arguments, result, item = schemas[3 * number : 3 * number + 3]
            reference = str(arguments.get("$ref", "")).rpartition("/")[2]
            described.append(
                MethodDescription(
                    name=method.full_name,
                    signature=method.show(),
                    doc=method.doc,
                    arguments=types.pop(reference, arguments),
                    result=result,
                    takes_stream=method.stream_parameter is not None,
                    returns_stream=method.returns_stream,
                    idempotent=method.options.idempotent,
                    item=None if method.stream_parameter is None else item,
                )
            )
        return Description(described, types)


def _schema_of_others(kind: Any) -> dict[str, Any]:  # noqa: ANN401 - a type of another library
    """Return the schema of a type that msgspec doesn't know."""
    if hasattr(kind, "model_json_schema"):  # pydantic
        schema: dict[str, Any] = kind.model_json_schema()
        return schema
    return {"title": getattr(kind, "__name__", str(kind))}
