"""How far is a query behind? The progress that Spark reports has both ends; this takes the difference."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from muxkit.pipeline.errors import OffsetError
from muxkit.pipeline.source.offsets import Offset

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql.streaming.listener import StreamingQueryProgress


def lag(progress: StreamingQueryProgress | Mapping[str, object] | None) -> dict[str, int]:
    """Messages of each stream that were there and not in the batch, from `query.lastProgress` or a listener's event.

    Empty before the first batch, and for queries that read nothing of ours.
    """
    if progress is None:
        return {}
    told: Any = json.loads(progress.json) if hasattr(progress, "json") else progress
    behind: dict[str, int] = {}
    for source in told["sources"]:
        latest, end = _offset(source.get("latestOffset")), _offset(source.get("endOffset"))
        for uuid, head in latest.streams.items():
            read = end.streams.get(uuid)
            if read is not None:
                behind[uuid] = max(0, head.id - read.id)
    return behind


def _offset(value: object) -> Offset:
    """Spark tells an offset as an object here and as text there."""
    try:
        told = json.loads(value) if isinstance(value, str) else value
        return Offset.from_json(told) if isinstance(told, dict) else Offset()
    except (OffsetError, ValueError):
        return Offset()
