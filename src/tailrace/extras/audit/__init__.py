"""For those who write rewards: `tailrace check-reward`."""
