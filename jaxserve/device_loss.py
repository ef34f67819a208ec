"""The one fault of an engine that is nobody's."""


class DeviceLostError(RuntimeError):
    """Some of an engine's devices are gone, with the process that has them: it computes nothing any more, and
    nothing of what it was asked was at fault."""
