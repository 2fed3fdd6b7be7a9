"""What a server gives to browsers: the JavaScript client, and static pages on the port of a WebSocket.

`MODULE` is the path of `muxkit.js`, an ES module without dependencies. `Pages` serves a folder, and the module with it,
when it is given to a WebSocket server as `pages=`.
"""

from __future__ import annotations

from ._files import FOLDER as FOLDER
from ._files import MODULE as MODULE
from ._files import TYPES as TYPES
from .pages import Pages as Pages

__all__ = ["FOLDER", "MODULE", "TYPES", "Pages"]
