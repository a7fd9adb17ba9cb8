from tests.clients.torch.conftest import one_or_three, run, server

__all__ = ["one_or_three", "run", "server"]
