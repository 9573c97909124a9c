"""For runs whose engine and trainer disagree: `tailrace diagnose`."""
