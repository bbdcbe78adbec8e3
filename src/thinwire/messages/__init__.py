"""The bytes on the wire: header, index codings, value codings. `docs/message-format.md` is the specification."""
