"""Session stores: the interface of one, the three that come with muxkit, and their errors."""

from muxkit.protocols.restream.store.errors import IdsExhausted as IdsExhausted
from muxkit.protocols.restream.store.errors import MessageGone as MessageGone
from muxkit.protocols.restream.store.errors import NotJson as NotJson
from muxkit.protocols.restream.store.errors import OutOfOrderAck as OutOfOrderAck
from muxkit.protocols.restream.store.errors import SessionBusy as SessionBusy
from muxkit.protocols.restream.store.errors import SessionExists as SessionExists
from muxkit.protocols.restream.store.errors import SessionExpired as SessionExpired
from muxkit.protocols.restream.store.errors import SessionFinished as SessionFinished
from muxkit.protocols.restream.store.errors import Superseded as Superseded
from muxkit.protocols.restream.store.errors import UnknownMessage as UnknownMessage
from muxkit.protocols.restream.store.errors import UnknownSession as UnknownSession
from muxkit.protocols.restream.store.open import open_store as open_store
from muxkit.protocols.restream.store.rows import LAST_ID as LAST_ID
from muxkit.protocols.restream.store.rows import Message as Message
from muxkit.protocols.restream.store.rows import Status as Status
from muxkit.protocols.restream.store.rows import StoreLimits as StoreLimits
from muxkit.protocols.restream.store.rows import Transform as Transform
from muxkit.protocols.restream.store.store import SessionStore as SessionStore
from muxkit.storage import StoreCorrupt as StoreCorrupt
from muxkit.storage import StoreError as StoreError
from muxkit.storage import StoreFailed as StoreFailed
from muxkit.storage import StoreFull as StoreFull
from muxkit.storage import StoreLocked as StoreLocked
