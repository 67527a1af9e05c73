"""Step times from a real run: which estimate makes the simulated run give its tokens when the real one did.

Only part of a run needs to be observed; what the fit is worth shows in the part that it did not see.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import exp, log

from kvpool.engine.roofline import StepTime
from kvpool.errors import ConfigError, MissingExtraError
from kvpool.replay.settings import ReplaySettings, Source
from kvpool.replay.simulator import replay
from kvpool.types import RequestId

try:
    from scipy.optimize import minimize
except ImportError as error:
    raise MissingExtraError("scipy", "fit") from error

# One request that went another way, by a preemption here and not there, must not rule the fit.
_MAX_ERROR_S = 30.0
_MARGIN_S = 5.0
# Preemptions make the loss jagged, so a search from one place alone may stay stuck near it.
_START_FACTORS = ((1.0, 1.0), (0.6, 0.6), (1.6, 0.6))


@dataclass(frozen=True, slots=True)
class Observed:
    """When a request's first and last token came in the real run, in seconds since the run's start of time."""

    first_token_s: float
    last_token_s: float


def fit_step_time(
    source: Source,
    settings: ReplaySettings,
    observed: Mapping[RequestId, Observed],
    until_s: float,
    start: StepTime,
) -> StepTime:
    """`start` with the `base_s` and `prefill_token_s` that bring simulated tokens closest to the observed ones.

    Minimises the mean distance in time (each at most 30 s) over all first and last tokens that came before `until_s`,
    by Nelder-Mead from `start` and from two places around it. Nothing that was observed later is looked at.
    A roofline estimate of the accelerator and the model is a good start.
    """
    fit = _Fit(source, replace(settings, mode="engine", stop_at_s=until_s + _MARGIN_S), observed, until_s)
    if not fit.num_observed:
        raise ConfigError(f"no token was observed before {until_s} s: nothing to fit")
    return min((fit.near(start, *factors) for factors in _START_FACTORS), key=fit.loss)


class _Fit:
    def __init__(
        self, source: Source, settings: ReplaySettings, observed: Mapping[RequestId, Observed], until_s: float
    ) -> None:
        self._source = source
        self._settings = settings
        self._until_s = until_s
        self._observed = observed
        self.num_observed = sum((o.first_token_s < until_s) + (o.last_token_s < until_s) for o in observed.values())

    def near(self, start: StepTime, base_factor: float, token_factor: float) -> StepTime:
        """The local best around `start` times the factors. The search moves by factors, so times stay positive."""

        def scaled(logs: Iterable[float]) -> StepTime:
            base, token = (exp(x) for x in logs)
            return replace(start, base_s=start.base_s * base, prefill_token_s=start.prefill_token_s * token)

        origin = (log(base_factor), log(token_factor))
        simplex = [origin, (origin[0] + 0.15, origin[1]), (origin[0], origin[1] + 0.15)]
        options = {"initial_simplex": simplex, "xatol": 2e-3, "fatol": 2e-3, "maxfev": 60}
        best = minimize(lambda logs: self.loss(scaled(logs)), origin, method="Nelder-Mead", options=options)
        return scaled(best.x)

    def loss(self, step_time: StepTime) -> float:
        """Mean seconds between simulated and real tokens; what did not come in time counts as 30 s late."""
        report = replay(self._source, replace(self._settings, step_time=step_time))
        assert report.timing is not None
        total = 0.0
        for life in report.timing.lives:
            real = self._observed[life.request_id]
            total += self._error(real.first_token_s, life.first_token_s) + self._error(
                real.last_token_s, life.last_token_s
            )
        return total / self.num_observed

    def _error(self, real_s: float, simulated_s: float | None) -> float:
        if real_s >= self._until_s:
            return 0.0
        return _MAX_ERROR_S if simulated_s is None else min(abs(simulated_s - real_s), _MAX_ERROR_S)
