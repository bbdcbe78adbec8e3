"""All errors raised by thinwire, one class per kind of failure."""


class ThinwireError(Exception):
    """Base class of thinwire's errors."""


class MessageError(ThinwireError):
    """A message from another rank cannot be decoded; names the invalid field."""


class MessageTruncated(MessageError):
    """The buffer is shorter than the header, or than the payload declared in the header."""


class MessageVersion(MessageError):
    """The message has another format version."""


class MessageCoding(MessageError):
    """The header has an index or value coding that is unknown or not allowed here."""


class MessageCount(MessageError):
    """The entry count exceeds the number of elements or disagrees with the payload."""


class MessageIndex(MessageError):
    """An index, or a sum of gaps, is out of range."""


class MessageLength(MessageError):
    """The payload length in the header disagrees with the number of entries."""


class CodecTextError(ThinwireError, ValueError):
    """A text with an unknown codec or invalid arguments; quotes the text."""


class ChainTextError(ThinwireError, ValueError):
    """A text that is not a leaf of the tree of chains; quotes the text."""


class ChainError(ThinwireError):
    """A chain that this codec or these ranks cannot run; gives the reason."""


class AttachError(ThinwireError):
    """`attach` refused the module, the options or the ranks; nothing was changed."""


class ExchangeError(ThinwireError, RuntimeError):
    """An exchange failed; names group, step, collective and rank. The wire is closed."""


class WireClosed(ExchangeError):
    """The wire was closed by an earlier error, an interrupt or `close()`; it issues no more collectives."""


class StateError(ThinwireError):
    """A saved state does not match this job; names the first difference. Nothing was loaded."""


class ProfileError(ThinwireError):
    """A profile that cannot be read or is implausible; names the invalid field."""


class PlanError(ThinwireError):
    """A plan that cannot be read or does not match this model or these ranks; names the first difference."""


class JournalError(ThinwireError):
    """A journal that cannot be read; names file, line and field."""


class JournalLine(JournalError):
    """A journal line that is not JSON, or has a field that is missing or of the wrong type."""


class JournalVersion(JournalError):
    """The journal has another format version."""


class JournalEmpty(JournalError):
    """The journal does not exist or is empty."""
