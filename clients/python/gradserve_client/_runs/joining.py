"""How a worker comes to a run: with the run's weights, or without."""

from __future__ import annotations

from gradserve_client._runs.names import first_new_run, new_run
from gradserve_client._runs.start import Start
from gradserve_client.errors import Conflict


class Joining:
    """What a worker has said about its weights.

    In step 0 they are compared with the first worker's. Later they must come from the run, unless the worker cares for
    them itself (`start="any"`).
    """

    def __init__(self, first: Start, run: str, step: int, *, cares: bool, has_begun: bool) -> None:
        self._first, self._run, self._cares = first, run, cares
        self._has_weights = cares or step == 0
        self._must_compare = False
        self.is_new = cares and not has_begun
        """Whether the run may have nothing of this worker's weights, though it says that it cares for them."""

    def loads(self) -> None:
        """Note that the worker goes on from its own checkpoint."""
        self._has_weights, self._must_compare, self.is_new = True, not self._cares, False

    def shares(self) -> None:
        """Note that the worker sends its parameters, or has received those of another."""
        self._has_weights, self._must_compare, self.is_new = True, False, False

    def lags(self) -> None:
        """Note that the worker has left steps out."""
        self._has_weights = self._cares

    def check(self, step: int) -> None:
        """Raise `Conflict` if what the worker sends in this step may come from other weights than the run's."""
        if not self._has_weights:
            raise Conflict(
                f"{first_new_run(self._run)}, or give optimizer= in all workers: then the server keeps the weights. The"
                f" run is in step {step}, and this worker has not got its weights. Or call load_state_dict() with the"
                " worker's last state, or broadcast_parameters(send=False) while another worker sends, or give"
                " start='any' if its weights are right"
            )
        if self._must_compare:
            self._first.check_frozen()
            self._must_compare = False

    def begun(self, step: int) -> Conflict:
        """Return the error of a worker that sends its parameters in a step that has others."""
        return Conflict(
            f"Step {step} of this run has begun with other parameters, perhaps of an earlier job: if this worker goes"
            " on, call load_state_dict() with its last state first, or broadcast_parameters(send=False);"
            f" {new_run(self._run)}"
        )
