"""Services as the rest of the library sees them: for faces other than Trio's, and for the command line."""

from __future__ import annotations

from muxkit.rpc._call import END as END
from muxkit.rpc._call import ERROR as ERROR
from muxkit.rpc._call import ITEM as ITEM
from muxkit.rpc._call import TIMEOUT_HEADER as TIMEOUT_HEADER
from muxkit.rpc._call import timeout_text as timeout_text
from muxkit.rpc._errors import ErrorRecord as ErrorRecord
from muxkit.rpc._server import serve_bridged as serve_bridged
from muxkit.rpc._service import PREFIX as PREFIX
from muxkit.rpc._service import Method as Method
from muxkit.rpc._service import methods_of as methods_of
from muxkit.rpc._stream import as_stream as as_stream
