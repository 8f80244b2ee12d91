"""Tokenizers: one base class, a class for each way of cutting text, all of them lazy."""

from __future__ import annotations

from .base import Tokenizer
from .byte_bpe import ByteBPE
from .special import TokenType
from .stream import StopStrings, Utf8Stream
from .strings import Strings

__all__ = ["ByteBPE", "StopStrings", "Strings", "TokenType", "Tokenizer", "Utf8Stream"]
