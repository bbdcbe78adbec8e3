"""Every error that thinwire raises on purpose, one class a failure."""

from __future__ import annotations


class ThinwireError(Exception):
    """Base of all errors of thinwire."""


class MessageError(ThinwireError):
    """A message from another rank cannot be decoded; says which field is wrong."""


class MessageTruncated(MessageError):
    """The buffer ends before the header or before the payload that the header promises."""


class MessageVersion(MessageError):
    """The message was written by another version of the format."""


class MessageCoding(MessageError):
    """The header names an index or value coding that does not exist, or not in this place."""


class MessageCount(MessageError):
    """More entries than elements, or a number of entries that the payload does not hold."""


class MessageIndex(MessageError):
    """An index, or a sum of gaps, points past the last element."""


class MessageLength(MessageError):
    """The payload length in the header disagrees with the entries it must hold."""


class CodecTextError(ThinwireError, ValueError):
    """A text that names no codec, or one with arguments that it does not take; quotes the text."""


class ChainTextError(ThinwireError, ValueError):
    """A text that is no leaf of the tree of chains; quotes the text."""


class ChainError(ThinwireError):
    """A chain that this codec or these ranks cannot run; says why."""


class AttachError(ThinwireError):
    """`attach` refuses: the module, the options or the ranks do not fit; nothing was changed."""


class ExchangeError(ThinwireError, RuntimeError):
    """An exchange failed: names group, step, collective and rank. The wire is closed after it."""


class WireClosed(ExchangeError):
    """The wire was closed, by an earlier error, an interrupt or `close()`; it issues no further collective."""


class StateError(ThinwireError):
    """A saved state does not fit this job; names the first difference. Nothing was loaded."""


class ProfileError(ThinwireError):
    """A profile that cannot be read or cannot have been measured; says which field is wrong."""


class PlanError(ThinwireError):
    """A plan that cannot be read, or does not fit this model or these ranks; names the first difference."""


class JournalError(ThinwireError):
    """A journal of a run that cannot be read; names file, line and field."""


class JournalLine(JournalError):
    """A line of a journal that is no JSON, or has a field that is missing or of the wrong kind."""


class JournalVersion(JournalError):
    """The journal was written by another version of the format."""


class JournalEmpty(JournalError):
    """There is no journal at this place, or nothing in it."""
