"""Tools for testing protocols, transports and programs. None of them needs pytest.

- `check_stream_engine`, `check_link`, `check_packet_link`, `check_session` and the other `check_…` functions are
  conformance suites for implementations of muxkit's interfaces.
- `EnginePair` and `Network` connect sans-I/O engines with each other on a virtual clock.
- `weather_pair`, `PacketWeather` and `SimNetwork` simulate connections inside one Trio run. `explore` runs a program
  on a `SimNetwork` many times, each time with other faults.
- `chaos_dial`, `chaos_url`, `chaos_relay` and `chaos_packet_relay` add faults to existing connections, also real ones.
- `cancel_sweep` cancels an operation at each of its steps.
"""

from __future__ import annotations

from muxkit._lazy import lazily

# Tests of an engine don't need Trio, so each tool is imported when it is first used.
with lazily(globals()):
    from muxkit.testing._chaos import ChaosDial as ChaosDial
    from muxkit.testing._chaos import ChaosPlan as ChaosPlan
    from muxkit.testing._chaos import ChaosStats as ChaosStats
    from muxkit.testing._chaos import ChaosURL as ChaosURL
    from muxkit.testing._chaos import Cut as Cut
    from muxkit.testing._chaos import CutReport as CutReport
    from muxkit.testing._chaos import Way as Way
    from muxkit.testing._chaos import chaos_dial as chaos_dial
    from muxkit.testing._chaos import chaos_url as chaos_url
    from muxkit.testing._checks import cancel_sweep as cancel_sweep
    from muxkit.testing._explore import Exploration as Exploration
    from muxkit.testing._explore import Run as Run
    from muxkit.testing._explore import Stuck as Stuck
    from muxkit.testing._explore import explore as explore
    from muxkit.testing._explore import run_plan as run_plan
    from muxkit.testing._links import check_link as check_link
    from muxkit.testing._network import AimdReceiver as AimdReceiver
    from muxkit.testing._network import AimdSender as AimdSender
    from muxkit.testing._network import Bottleneck as Bottleneck
    from muxkit.testing._network import Fate as Fate
    from muxkit.testing._network import Journey as Journey
    from muxkit.testing._network import Network as Network
    from muxkit.testing._network import PathWeather as PathWeather
    from muxkit.testing._packet_links import check_packet_link as check_packet_link
    from muxkit.testing._packet_relay import ChaosPacketRelay as ChaosPacketRelay
    from muxkit.testing._packet_relay import PacketStats as PacketStats
    from muxkit.testing._packet_relay import chaos_packet_relay as chaos_packet_relay
    from muxkit.testing._pair import EngineCase as EngineCase
    from muxkit.testing._pair import EnginePair as EnginePair
    from muxkit.testing._pair import check_every_split as check_every_split
    from muxkit.testing._pair import check_stream_engine as check_stream_engine
    from muxkit.testing._plan import Fault as Fault
    from muxkit.testing._plan import Plan as Plan
    from muxkit.testing._plan import PlanRun as PlanRun
    from muxkit.testing._plan import Wake as Wake
    from muxkit.testing._plan import determined as determined
    from muxkit.testing._relay import ChaosRelay as ChaosRelay
    from muxkit.testing._relay import chaos_relay as chaos_relay
    from muxkit.testing._relay import parse_place as parse_place
    from muxkit.testing._sessions import SessionPair as SessionPair
    from muxkit.testing._sessions import check_cancellation as check_cancellation
    from muxkit.testing._sessions import check_leaving as check_leaving
    from muxkit.testing._sessions import check_openings as check_openings
    from muxkit.testing._sessions import check_pressure as check_pressure
    from muxkit.testing._sessions import check_reading as check_reading
    from muxkit.testing._sessions import check_session as check_session
    from muxkit.testing._sim import SimEvent as SimEvent
    from muxkit.testing._sim import SimNetwork as SimNetwork
    from muxkit.testing._sim import SimPackets as SimPackets
    from muxkit.testing._sim import SimRoute as SimRoute
    from muxkit.testing._sim import SimStream as SimStream
    from muxkit.testing._sim import SimTransport as SimTransport
    from muxkit.testing._sim import SimWeather as SimWeather
    from muxkit.testing._sim import sim_transport as sim_transport
    from muxkit.testing._weather import PacketChannel as PacketChannel
    from muxkit.testing._weather import PacketWeather as PacketWeather
    from muxkit.testing._weather import WeatherStream as WeatherStream
    from muxkit.testing._weather import replay as replay
    from muxkit.testing._weather import weather_pair as weather_pair
