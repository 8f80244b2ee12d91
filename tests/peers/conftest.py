"""Peers are heavy packages: their tests are collected only with CKPTKIT_PEERS=1, which `make test-peers` sets."""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("CKPTKIT_PEERS") else ["test_*.py"]
