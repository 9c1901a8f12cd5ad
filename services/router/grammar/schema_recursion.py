"""JSON schemas that only an endless value would satisfy: each object must hold another of its kind, for ever."""

from __future__ import annotations

from typing import Any

from shared.errors import InvalidRequestError

_MAX_STEPS = 20_000
"""Schemas that take more are let through: their answers end at max_tokens."""


class _TooManySteps(Exception):
    pass


def check_recursion(schema: Any) -> None:
    """Raises InvalidRequestError if no finite value follows `schema`. What else is wrong with it the library says."""
    try:
        is_finite = _Search(schema).can_end(schema, frozenset())
    except (_TooManySteps, RecursionError):
        return
    if not is_finite:
        raise InvalidRequestError("the schema requires itself, so that no answer to it could ever end; make one property optional")


class _Search:
    def __init__(self, root: Any) -> None:
        self._root = root
        self._num_steps = 0
        self._ending: set[str] = set()

    def can_end(self, schema: Any, open_refs: frozenset[str]) -> bool:
        """Whether a finite value follows `schema`; `open_refs` are the references on the way here, which cannot help it end."""
        self._num_steps += 1
        if self._num_steps > _MAX_STEPS:
            raise _TooManySteps
        if not isinstance(schema, dict):
            return True
        if "const" in schema or "enum" in schema:
            return True
        reference = schema.get("$ref")
        if isinstance(reference, str) and not self._reference_can_end(reference, open_refs):
            return False
        if not all(self.can_end(part, open_refs) for part in _list(schema.get("allOf"))):
            return False
        for key in ("anyOf", "oneOf"):
            options = _list(schema.get(key))
            if options and not any(self.can_end(option, open_refs) for option in options):
                return False
        return self._container_can_end(schema, open_refs)

    def _reference_can_end(self, reference: str, open_refs: frozenset[str]) -> bool:
        if reference in self._ending:
            return True
        if reference in open_refs:
            return False
        target = self._root
        for part in reference.removeprefix("#").split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(target, dict) or key not in target:
                return True
            target = target[key]
        if not self.can_end(target, open_refs | {reference}):
            return False
        self._ending.add(reference)
        return True

    def _container_can_end(self, schema: dict[str, Any], open_refs: frozenset[str]) -> bool:
        if schema.get("type") == "object":
            properties = schema.get("properties")
            required = [name for name in _list(schema.get("required")) if isinstance(name, str)]
            needed = [properties[name] for name in required if name in properties] if isinstance(properties, dict) else []
            return all(self.can_end(part, open_refs) for part in needed)
        num_items = schema.get("minItems")
        if schema.get("type") == "array" and isinstance(num_items, int) and num_items > 0:
            prefix = _list(schema.get("prefixItems"))
            rest = [schema["items"]] if num_items > len(prefix) and "items" in schema else []
            return all(self.can_end(part, open_refs) for part in [*prefix[:num_items], *rest])
        return True


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
