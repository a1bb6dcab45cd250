"""The race gate: what a weight on ctx does when copies are late, and that nybble's streaming does not depend on it.

With fixed slots the alias of a forward points to the right slot, so an unsafe op is right as long as the next copy has
landed when the backward reads, and wrong once copies take longer than a layer's visit. That is our explanation of a
defect that was seen above some layer size only. The gate delays the copies of kilobyte layers and shows the threshold.
"""

from nybble.gate.race.command import SABOTAGES, add_arguments, run

__all__ = ["SABOTAGES", "add_arguments", "run"]
