"""What a display says at once, in a line of its own: evaluations, failures, alarms and long waits."""

from dataclasses import dataclass, field

from tailrace.record.base import RecordSettings
from tailrace.record.events import Evaluated, Event, SampleScored, Waiting
from tailrace.record.progress import number
from tailrace.record.rows import StepRow


@dataclass(slots=True)
class Notices:
    """Turns events into lines. A reason for a failed reward is named once: a reward function that always
    fails leads to no step whose line would say so."""

    settings: RecordSettings = field(default_factory=RecordSettings)
    _failures: set[str] = field(default_factory=set)
    _alarms: set[str] = field(default_factory=set)
    """The alarms that hold now."""

    def of(self, event: Event) -> list[str]:
        """The lines that an event is worth."""
        match event:
            case Evaluated():
                accuracy = f"Accuracy {number(event.accuracy)}"
                return [f"Evaluation | Round {event.round} | {accuracy} | {event.num_samples} samples"]
            case Waiting():
                return [f"No step for {event.quiet_s:.0f} s | {event.what}"]
            case SampleScored(failure=str(reason)) if reason not in self._failures:
                self._failures.add(reason)
                return [f"First failed reward | {reason} | {event.sample} | {event.detail}"]
            case StepRow() if event.lag_max == 0:
                return self._mismatch(event)
        return []

    def _mismatch(self, row: StepRow) -> list[str]:
        """Alarms on a step whose tokens all come from the weights that are trained: there, engine and trainer
        should give every token the same log-prob."""
        kl, ess = self.settings.alarm_kl, self.settings.alarm_ess
        checks = {
            f"KL {number(row.mismatch_kl)} nats a token, limit {kl}": row.mismatch_kl <= kl,
            f"effective sample size {number(row.ess)}, limit {ess}": row.ess >= ess,
        }
        lines = []
        for kind, (figures, is_well) in zip(("kl", "ess"), checks.items(), strict=True):
            if is_well:
                self._alarms.discard(kind)
            elif kind not in self._alarms:
                self._alarms.add(kind)
                lines.append(
                    f"ALARM | Step {row.step} | engine and trainer disagree on tokens of the same weights: "
                    f"{figures} | compare their dtype, temperature and weights"
                )
        return lines
