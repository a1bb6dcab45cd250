"""Times for the gates that time a step, so that their verdicts can be tested without a card: the training is real."""

import contextlib
from unittest import mock

from nybble.gate.training import timing
from nybble.gate.training.timing import Turns

# Milliseconds of a round, with a right verdict; every arm that is not named takes 100.
RIGHT = {"fused": 95.0, "dense weight (ablation)": 90.0, "streamed": 95.0, "resident": 95.0}
CONTROLS = {"no backward": 30.0, "every step twice": 190.0}


@contextlib.contextmanager
def made_up(**ms: float):
    """Inside the block arms take no turns; what they take is RIGHT, but for `ms`."""
    times = RIGHT | CONTROLS | ms

    def turns(calls, rounds, device, seed=0, warm=None):
        seconds = {name: [times.get(name, 100.0) * (1 + 0.001 * i) for i in range(rounds.count)] for name in calls}
        return Turns(seconds, seconds, {name: [] for name in calls})

    with mock.patch.object(timing, "take_turns", turns):
        yield
