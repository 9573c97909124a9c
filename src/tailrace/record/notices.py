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
            case StepRow():
                return self._mismatch(event)
        return []

    def _mismatch(self, row: StepRow) -> list[str]:
        """Alarms where engine and trainer should agree on the log-prob of each token, and do not: on tokens
        of the very weights that are trained. A figure that is not a number is an alarm, too."""
        kl, ess, limits = row.engine_mismatch_kl, row.ess, self.settings
        lines = []
        if kl is not None:
            figures = f"KL {number(kl)} nats a token, limit {limits.alarm_kl}"
            lines += self._alarm("kl", kl <= limits.alarm_kl, row.step, figures)
        if row.lag_max == 0:
            figures = f"effective sample size {number(ess)}, limit {limits.alarm_ess}"
            lines += self._alarm("ess", ess >= limits.alarm_ess, row.step, figures)
        return lines

    def _alarm(self, kind: str, is_well: bool, step: int, figures: str) -> list[str]:
        """One line when an alarm begins; the next one only after it has ended."""
        began = not is_well and kind not in self._alarms
        self._alarms = self._alarms - {kind} if is_well else self._alarms | {kind}
        what = "engine and trainer disagree on tokens of the same weights"
        remedy = "compare their dtype, temperature and weights"
        return [f"ALARM | Step {step} | {what}: {figures} | {remedy}"] if began else []
