"""Names that a package imports at the first access."""

from __future__ import annotations

import subprocess
import sys


def test_a_name_is_fetched_once_and_then_kept() -> None:
    code = (
        "import sys, muxkit; assert 'trio' not in sys.modules and 'connect' in dir(muxkit);"
        "assert 'connect' not in vars(muxkit); first = muxkit.connect; assert vars(muxkit)['connect'] is first;"
        "from muxkit import Channel, PluginError; assert vars(muxkit)['Channel'] is Channel"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_name_that_the_package_does_not_have_is_said_with_the_package() -> None:
    code = "import muxkit\ntry: muxkit.nothing\nexcept AttributeError as error: print(error)"
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert said == "module 'muxkit' has no attribute 'nothing'\n"
