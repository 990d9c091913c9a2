"""Stand-ins for what CUDA graphs are recorded with, where there is no GPU."""


class Stream:
    def wait_stream(self, other): ...


class Nothing:
    """A context in which nothing happens."""

    def __init__(self, *_, **__): ...

    def __enter__(self): ...

    def __exit__(self, *_): ...
