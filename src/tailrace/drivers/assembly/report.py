"""The lines that `tailrace train` prints at the end of a run."""

from contextlib import suppress

from tailrace.config import RunConfig
from tailrace.controller.checkpoints import checkpoint_name
from tailrace.drivers.assembly.display import NUM_REWARDS, sparkline
from tailrace.drivers.assembly.folder import RunFolder
from tailrace.drivers.assembly.resumption import best_evaluation
from tailrace.record.figures import rounds_of
from tailrace.record.metrics import read_rows
from tailrace.record.summary import RunSummary


def report(summary: RunSummary, folder: RunFolder, config: RunConfig) -> None:
    """Print the totals of a run, and where its files are."""
    lines = [f"events    {folder.events}  (tailrace view {folder.path})"]
    lost = {"skipped": summary.rows_skipped, "failed": summary.failures, "groups": summary.groups.reasons}
    for what, reasons in lost.items():
        if reasons:
            lines.append(f"{what:9} {', '.join(f'{count} {reason}' for reason, count in reasons.items())}")
    if config.prices and summary.cost is not None:
        lines.insert(0, f"cost      {config.prices.words(summary.cost)}")
    if summary.bound:
        lines.insert(0, f"bound     {summary.bound.line}")
    rows = read_rows(folder.metrics)
    if rewards := [row["round/reward"] for row in rounds_of(rows)]:
        curve = sparkline(rewards[:: -(-len(rewards) // NUM_REWARDS)])
        lines.insert(0, f"reward    {rewards[0]:.3f} -> {rewards[-1]:.3f}  {curve}  (means of rounds)")
    if held_out := summary.words.get("held-out reward"):
        lines.insert(0, f"held-out reward {held_out}, in {summary.steps} steps")
    if folder.model.exists():
        lines.append(f"model     {folder.model}")
    if folder.adapter.exists():
        lines.append(f"adapter   {folder.adapter}")
    if best := best_evaluation(rows, folder):
        name, how = checkpoint_name(best[1]), f"tailrace eval {folder.path} --checkpoint best"
        lines.append(f"best      checkpoints/{name}, held-out reward {best[0]:.3f}  ({how})")
    lines += [f"advice    {kind}, {text}" for kind, text in summary.advisories.items()]
    with suppress(OSError, ValueError):  # the output may be closed
        print(*lines, sep="\n")
