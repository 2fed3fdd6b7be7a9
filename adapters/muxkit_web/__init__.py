"""Browser support for servers: the JavaScript client, and static pages on the port of a WebSocket server.

`MODULE` is the path of `muxkit.js`, an ES module without dependencies. `Pages` serves a folder together with that
module. Pass it to a WebSocket server as `pages=`.
"""

from __future__ import annotations

from ._files import FOLDER as FOLDER
from ._files import MODULE as MODULE
from ._files import TYPES as TYPES
from .pages import Pages as Pages

__all__ = ["FOLDER", "MODULE", "TYPES", "Pages"]
